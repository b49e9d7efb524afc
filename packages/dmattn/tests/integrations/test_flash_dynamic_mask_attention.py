"""The function that has the name it has in flash-dmattn, against the definition in float64."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmattn import sliding_window, top_window_mask
from dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from dmattn.reference import reference_attention

B, H, HK, S, D, WINDOW = 2, 4, 2, 37, 8, 11
EPSILON = torch.finfo(torch.float32).eps


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4, dtype=dtype)


def operands(rows: int = S) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key and value as (B, heads, S, D), as layers have them, and a bias (B, HK, 1, S)."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return normal(B, H, rows, D), normal(B, HK, S, D), normal(B, HK, S, D), normal(B, HK, 1, S)


def exact(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, bias: Tensor | None, **more: Any
) -> Tensor:
    settings = {"scale": D**-0.5, "is_causal": True, "softcap": 0.0} | more
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out: Tensor = reference_attention(
        q, k, v, keep, bias, settings["scale"], settings["is_causal"], settings["softcap"]
    ).out
    return out.float()


def check(found: tuple[Tensor, None], wanted: Tensor) -> None:
    out, weights = found
    assert weights is None
    assert out.is_contiguous() and out.shape == wanted.shape
    # Outputs are sums of some tens of products, each of size 1 to 5.
    assert float((out - wanted).abs().max()) <= 32 * EPSILON


forward = flash_dynamic_mask_attention_forward


@pytest.mark.parametrize("shape", ["with a row", "without rows", "expanded over rows"])
@pytest.mark.parametrize("name", ["window_size", "keep_window_size"])
def test_scores_of_keys(shape: str, name: str) -> None:
    query, key, value, bias = operands()
    wanted = exact(query, key, value, top_window_mask(bias, WINDOW), bias)
    given = {"without rows": bias[:, :, 0], "expanded over rows": bias.expand(-1, -1, S, -1)}
    found = forward(Layer(), query, key, value, None, given.get(shape, bias), **{name: WINDOW})
    check(found, wanted)


def test_no_row_feels_later_keys() -> None:
    query, key, value, bias = operands()
    before, _ = forward(Layer(), query, key, value, None, bias, keep_window_size=WINDOW)
    bias[..., 20:] += 9
    after, _ = forward(Layer(), query, key, value, None, bias, keep_window_size=WINDOW)
    assert torch.equal(after[:, :20], before[:, :20])


@pytest.mark.parametrize("window", [None, WINDOW, 2 * S])
@pytest.mark.parametrize("heads", [1, HK, H])
@pytest.mark.parametrize("bias_rows", [1, S])
def test_masks_with_rows(window: int | None, heads: int, bias_rows: int) -> None:
    """Each row chooses among the keys that it sees, by the mask and by causality."""
    query, key, value, bias = operands()
    bias = bias.expand(-1, -1, bias_rows, -1) + torch.randn(bias_rows, 1)
    bias = bias + torch.randn(B, HK, bias_rows, S)
    mask = torch.rand(B, heads, S, S) < 0.7
    keep, sides = mask, bias.repeat_interleave(2, 1).expand(-1, -1, S, -1)
    if window == WINDOW:
        seen = mask.repeat_interleave(H // heads, 1) & torch.ones(S, S, dtype=torch.bool).tril()
        hidden = sides.masked_fill(~seen, -torch.inf)
        places = hidden.topk(WINDOW).indices  # no two scores are equal
        keep = torch.zeros_like(hidden, dtype=torch.bool).scatter(-1, places, True) & seen
    longer = nn.functional.pad(mask, (0, 5), value=True)  # a cache that is longer than its keys
    found = forward(Layer(), query, key, value, longer, bias, window_size=window)
    check(found, exact(query, key, value, keep, sides))


@pytest.mark.parametrize("integers", [True, False])
def test_padding(integers: bool) -> None:
    query, key, value, bias = operands()
    mask = torch.arange(S) >= torch.tensor([[0], [14]])
    keep = top_window_mask(bias, WINDOW, attention_mask=mask)
    given = mask.long() if integers else mask
    found = forward(Layer(), query, key, value, given, bias, window_size=WINDOW)
    check(found, exact(query, key, value, keep, bias))


@pytest.mark.parametrize("window", [WINDOW, None])
def test_packed_without_padding(window: int | None) -> None:
    query, key, value, bias = (t[:1] for t in operands())
    lengths = [12, 1, 24]
    bounds = torch.tensor([0, 12, 13, 37])
    parts = []
    for start, length in zip(bounds.tolist(), lengths, strict=False):
        q, k, v, b = (
            t.narrow(t.dim() - 1 if t.shape[2] == 1 else 2, start, length)
            for t in (query, key, value, bias)
        )
        keep = None if window is None else top_window_mask(b, window)
        parts.append(exact(q, k, v, keep, b))
    options: dict[str, Any] = {"cu_seq_lens_q": bounds, "window_size": window}
    wanted = torch.cat(parts, 1)
    check(forward(Layer(), query, key, value, None, bias, **options), wanted)
    options |= {"cu_seq_lens_k": bounds.int(), "max_length_q": 24, "max_length_k": 24}
    check(forward(Layer(), query, key, value, None, bias, **options), wanted)


def test_settings_of_the_call_and_of_the_layer() -> None:
    query, key, value, bias = operands()
    layer = Layer()
    layer.is_causal = False
    wanted = exact(query, key, value, None, bias, is_causal=False, softcap=0.7, scale=0.9)
    check(forward(layer, query, key, value, None, bias, 0.9, 0.7), wanted)
    wanted = exact(query, key, value, None, None)
    check(forward(layer, query, key, value, None, None, is_causal=True), wanted)
    # One row is the last one, and sees all keys.
    check(forward(layer, query[:, :, -1:], key, value, None, None, is_causal=True), wanted[:, -1:])


def test_gradients_of_scores() -> None:
    query, key, value, bias = (t.requires_grad_() for t in operands())
    out, _ = forward(
        Layer(), query, key, value, None, bias.expand(-1, -1, S, -1), window_size=WINDOW
    )
    found = torch.autograd.grad(out.square().sum(), (query, key, value, bias))
    twins = [t.detach().double().requires_grad_() for t in (query, key, value, bias)]
    keep = top_window_mask(bias, WINDOW).repeat_interleave(2, 1)
    k, v, b = (t.repeat_interleave(2, 1) for t in twins[1:])
    logits = twins[0] @ k.mT * D**-0.5 + b
    probabilities = logits.masked_fill(~keep, -torch.inf).softmax(-1)
    (probabilities @ v).square().sum().backward()
    for gradient, twin in zip(found, twins, strict=True):
        assert torch.allclose(gradient.double(), twin.grad, rtol=0, atol=64 * EPSILON)


@pytest.mark.parametrize("target", [None, torch.bfloat16])
def test_float32_inputs_of_adapters(target: torch.dtype | None) -> None:
    """They are cast to `target_dtype`, or else to the dtype of the layer's weights."""
    query, key, value, bias = operands()
    layer = Layer(torch.float32 if target is not None else torch.bfloat16)
    out, _ = forward(layer, query, key, value, None, bias, window_size=WINDOW, target_dtype=target)
    assert out.dtype == torch.bfloat16
    wanted = exact(query, key, value, top_window_mask(bias, WINDOW), bias)
    assert float((out.float() - wanted).abs().max()) <= 4 * torch.finfo(torch.bfloat16).eps
    mixed, _ = forward(Layer(), query, key, value.bfloat16(), None, bias, target_dtype=target)
    assert mixed.dtype == (torch.float32 if target is None else target)


@pytest.mark.parametrize("window", [WINDOW, S, 2 * S])
def test_scores_of_nan_are_never_kept(window: int) -> None:
    query, key, value, bias = operands()
    hidden = bias.clone()
    hidden[..., 5], hidden[..., 9] = float("nan"), float("-inf")
    masked = torch.ones(1, 1, 1, S, dtype=torch.bool)
    masked[..., 5] = masked[..., 9] = False
    found, _ = forward(Layer(), query, key, value, None, hidden, keep_window_size=window)
    wanted, _ = forward(Layer(), query, key, value, masked, bias, keep_window_size=window)
    torch.testing.assert_close(found, wanted)


def test_equal_scores_are_a_sliding_window() -> None:
    query, key, value, bias = operands()
    found, _ = forward(Layer(), query, key, value, None, bias * 0, keep_window_size=WINDOW)
    wanted = exact(query, key, value, sliding_window(S, WINDOW).to_mask(), None)
    check((found, None), wanted)


@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, "dropout: got 0.1, wanted 0", {"dropout": 0.1}),
        (ValueError, "window_size: got 3 beside keep_window_size=4", {"window_size": 3}),
        (ValueError, "window_size: got 0", {"keep_window_size": None, "window_size": 0}),
        (ValueError, "attention_bias: got None, wanted a bias", {"attention_bias": None}),
        (TypeError, r"attention_bias: got \[1\] \(list\)", {"attention_bias": [1]}),
        (TypeError, "is_causal: got 'yes'", {"is_causal": "yes"}),
        (TypeError, "target_dtype: got 'bf16'", {"target_dtype": "bf16"}),
        (
            ValueError,
            "attention_bias: got None, wanted a bias",
            {"attention_bias": None, "attention_mask": torch.ones(B, 1, S, S, dtype=torch.bool)},
        ),
        (ValueError, "query: got batch 2", {"cu_seq_lens_q": torch.tensor([0, S])}),
        (TypeError, "attention_mask: got dtype", {"attention_mask": torch.zeros(B, 1, 1, S)}),
        (TypeError, "query: got None, wanted a torch.Tensor", {"query": None}),
        (ValueError, r"key: got shape \(3,\), wanted", {"key": torch.zeros(3)}),
        (TypeError, "value: got dtype torch.int64", {"value": torch.zeros(B, 2, S, 8).long()}),
        (TypeError, "attention_bias: got 1 .int., wanted a torch.Tensor", {"attention_bias": 1}),
        (
            TypeError,
            "attention_bias: got dtype torch.bool, .* a mask of bools is an attention_mask",
            {"attention_bias": torch.ones(B, 1, 1, S).bool()},
        ),
        (
            ValueError,
            rf"attention_bias: got shape .*, {S - 1}\), wanted .*, {S}\)",
            {"attention_bias": torch.zeros(B, 1, S, S - 1)},
        ),
        (ValueError, "attention_mask: got shape", {"attention_mask": torch.tensor(True)}),
        (
            ValueError,
            r"attention_mask: got shape \(1, 5\)",
            {"attention_mask": torch.ones(1, 5).int()},
        ),
        (
            ValueError,
            r"attention_mask: got shape \(7, 37\)",
            {"attention_mask": torch.ones(7, 37).int()},
        ),
        (ValueError, r"attention_bias: got shape \(2, 3\)", {"attention_bias": torch.ones(2, 3)}),
        (TypeError, "scaling: got 'a'", {"scaling": "a"}),
        (ValueError, r"scaling: got 1e\+300, wanted 0 or", {"scaling": 1e300}),
        (
            ValueError,
            r"key: got shape \(2, 2, 37, 4\), wanted \(2, heads, seqlen_k, 8\)",
            {"key": torch.zeros(B, HK, S, 4)},
        ),
        (
            ValueError,
            r"value: got shape \(2, 2, 36, 8\), wanted \(2, 2, 37, head_dim\)",
            {"value": torch.zeros(B, HK, S - 1, D)},
        ),
        (
            ValueError,
            "attention_mask: got device meta, wanted cpu as query",
            {"attention_mask": torch.ones(B, S, dtype=torch.bool, device="meta")},
        ),
        (TypeError, r"is_causal: got 'no' \(str\), wanted True or", {"is_causal": "no"}),
        (TypeError, "deterministic: got 1", {"deterministic": 1}),
        (TypeError, r"target_dtype: got 'half' \(str\)", {"target_dtype": "half"}),
    ],
)
def test_bad_arguments(error: type[Exception], words: str, arguments: dict[str, Any]) -> None:
    query, key, value, bias = operands()
    operand = {"query": query, "key": key, "value": value, "attention_bias": bias}
    given = operand | {"attention_mask": None, "keep_window_size": 4} | arguments
    with pytest.raises(error, match=words):
        forward(Layer(), **given)


def test_bad_packed_arguments() -> None:
    query, key, value, bias = (t[:1] for t in operands())
    bounds = torch.tensor([0, 12, S])
    with pytest.raises(ValueError, match=r"attention_bias: got shape \(1, 2, 37, 37\)"):
        forward(Layer(), query, key, value, None, bias + torch.zeros(S, 1), cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: got shape \(0,\)"):
        forward(Layer(), query, key, value, None, bias, cu_seq_lens_q=bounds[:0])
    beyond = torch.tensor([0, 2**32 + S])  # S, if it were truncated to int32
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: got \[0, 4294967333\], wanted rising"):
        forward(Layer(), query, key, value, None, bias, cu_seq_lens_q=beyond, max_length_q=S)
    with pytest.raises(TypeError, match=r"query: got \[1\] \(list\)"):
        forward(Layer(), [1], key, value, None, bias)
    with pytest.raises(TypeError, match=r"cu_seq_lens_q: got .*list"):
        forward(Layer(), query, key, value, None, bias, cu_seq_lens_q=[0, S])
    with pytest.raises(TypeError, match=r"cu_seq_lens_q: got dtype torch.float32, wanted .*int32"):
        forward(Layer(), query, key, value, None, bias, cu_seq_lens_q=bounds.float())
    with pytest.raises(TypeError, match=r"max_length_k: got 12.5 \(float\), wanted an int"):
        forward(Layer(), query, key, value, None, bias, cu_seq_lens_q=bounds, max_length_k=12.5)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("cu_seq_lens_q: got [0, 12], wanted rising", {"cu_seq_lens_q": torch.tensor([0, 12])}),
        ("cu_seq_lens_k: got [0, 12], wanted rising", {"cu_seq_lens_k": torch.tensor([0, 12])}),
        ("cu_seq_lens_k: got shape (2,), wanted (3,)", {"cu_seq_lens_k": torch.tensor([0, S])}),
        ("max_length_q: got 5, wanted at least 25", {"max_length_q": 5}),
        ("max_length_k: got 24, wanted at least 25", {"max_length_k": 24}),
        ("mask: got shape (1, 3, 37) beside", {"attention_mask": torch.ones(1, 3, S).bool()}),
        ("attention_bias: got shape (1, 36) beside", {"attention_bias": torch.ones(1, S - 1)}),
        ("key: got shape (2, 2, 37, 8), wanted (1,", {"key": torch.ones(B, HK, S, D)}),
    ],
)
def test_packed_errors_have_the_names_and_shapes_of_the_caller(
    words: str, arguments: dict[str, Any]
) -> None:
    query, key, value, bias = (t[:1] for t in operands())
    given = {"query": query, "key": key, "value": value, "attention_bias": bias}
    given |= {"attention_mask": None, "cu_seq_lens_q": torch.tensor([0, 12, S])} | arguments
    with pytest.raises(ValueError, match=re.escape(words)):
        forward(Layer(), **given)


def test_boundaries_of_keys_alone_are_named() -> None:
    query, key, value, _ = (t[:1] for t in operands())
    bounds = torch.tensor([0, 12])
    with pytest.raises(ValueError, match=r"cu_seq_lens_k: got \[0, 12\], wanted rising"):
        forward(Layer(), query, key, value, None, None, cu_seq_lens_k=bounds)


@pytest.mark.parametrize("window", [None, WINDOW, S, 2 * S])
def test_a_bias_without_keys_is_refused_at_every_length(window: int | None) -> None:
    query, key, value, bias = operands()
    with pytest.raises(ValueError, match=r"attention_bias: got shape \(2, 2, 1\), wanted"):
        forward(Layer(), query, key, value, None, bias[:, :, 0, :1], window_size=window)
    if window is not None:
        with pytest.raises(ValueError, match="attention_bias: got None, wanted a bias"):
            forward(Layer(), query, key, value, None, None, window_size=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_module(dtype: torch.dtype) -> None:
    """The module only says how to cast and whether rows see later keys."""
    query, key, value, bias = (t.to(dtype) for t in operands())
    found, _ = forward(None, query, key, value, None, bias, window_size=WINDOW)
    wanted, _ = forward(nn.Module(), query, key, value, None, bias, window_size=WINDOW)
    assert found.dtype == dtype and torch.equal(found, wanted)


def test_lengths_beside_boundaries_that_are_not_read() -> None:
    """As on a GPU: only the number of sequences is known."""
    query, key, value, bias = (t[:1].to("meta") for t in operands())
    options = {"cu_seq_lens_q": torch.zeros(3, dtype=torch.int64, device="meta")}
    out, _ = forward(
        Layer(), query, key, value, None, bias, **options, max_length_q=19, max_length_k=19
    )
    assert out.shape == (1, S, H, D)
    with pytest.raises(ValueError, match=r"max_length_k: got 18, wanted .* of 2 documents with 37"):
        forward(Layer(), query, key, value, None, bias, **options, max_length_q=19, max_length_k=18)
