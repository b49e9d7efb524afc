"""The attention function by itself, against attention written out in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils

from dmattn.integrations.transformers.attention import attention_forward
from dmattn.integrations.transformers.interval_mask import IntervalMask
from dmattn.integrations.transformers.masks import make_mask

BATCH, HEADS, HEADS_K = 2, 4, 2


class Layer(nn.Module):
    """Like the attention layers of transformers, most of which have an attribute `is_causal`."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def operands(query_len: int = 37, key_len: int = 53, head_dim: int = 8, value_dim: int = 8) -> Any:
    torch.manual_seed(query_len)
    query = torch.randn(BATCH, HEADS, query_len, head_dim, requires_grad=True)
    key = torch.randn(BATCH, HEADS_K, key_len, head_dim, requires_grad=True)
    value = torch.randn(BATCH, HEADS_K, key_len, value_dim, requires_grad=True)
    return query, key, value


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(B, Sq, H, Dv)."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(HEADS // HEADS_K, 1) for t in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.double()
    if keep is not None:
        logits = logits.masked_fill(~keep, -math.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    probabilities = logits.softmax(-1)[..., : key.shape[2]]
    return (probabilities @ value).transpose(1, 2)


def causal(query_len: int, key_len: int) -> Tensor:
    return torch.ones(query_len, key_len, dtype=torch.bool).tril(key_len - query_len)


def check(
    tensors: Any, mask: Tensor | None, learned: Any = (), *, wanted: Any, **options: Any
) -> None:
    """Compare output and gradients with `written_out`, each to within 32 roundings of float32."""
    module = options.pop("module", Layer())
    out, weights = attention_forward(module, *tensors, mask, **options)
    assert weights is None
    assert out.is_contiguous()
    weight = torch.randn_like(out)
    inputs = (*tensors, *learned)
    found = (out, *torch.autograd.grad((out * weight).sum(), inputs))
    exact = written_out(*tensors, **wanted)
    exact = (exact, *torch.autograd.grad((exact * weight).sum(), inputs))
    for a, b in zip(found, exact, strict=True):
        allowed = 32 * torch.finfo(torch.float32).eps * float(b.detach().abs().max())
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "module, is_causal, rows, expected",
    [
        (Layer(), None, 37, True),
        (Layer(False), None, 37, False),
        (Layer(False), True, 37, True),
        (Layer(True), False, 37, False),
        (Layer(True), None, 1, True),
    ],
)
def test_causality_without_a_mask(
    module: Any, is_causal: bool | None, rows: int, expected: bool
) -> None:
    keep = causal(rows, 53) if expected else None
    check(operands(rows), None, module=module, is_causal=is_causal, wanted={"keep": keep})


def test_scale_cap_sinks_and_head_dims() -> None:
    sinks = torch.randn(HEADS, requires_grad=True)
    settings = {"scaling": 0.7, "softcap": 1.5}
    wanted = settings | {"sinks": sinks, "keep": causal(37, 53)}
    for dims in ((8, 8), (24, 16), (8, 16)):
        tensors = operands(head_dim=dims[0], value_dim=dims[1])
        check(tensors, None, [sinks], s_aux=sinks, wanted=wanted, **settings)


def test_masks_of_the_user() -> None:
    """Masks of four dimensions: boolean ones, and a learned one that is added to the logits."""
    keep = torch.rand(BATCH, 1, 37, 53) < 0.5
    keep[..., 0] = True
    check(operands(), keep, wanted={"keep": keep})
    for_all_rows = (torch.rand(BATCH, 1, 1, 53) < 0.5).expand(-1, -1, 37, -1)
    check(operands(), for_all_rows, wanted={"keep": for_all_rows})
    learned = torch.randn(1, HEADS, 37, 53, requires_grad=True)
    check(operands(), learned, [learned], wanted={"bias": learned})


def test_masks_of_other_keys_are_refused() -> None:
    """Also masks of more keys than there are, since the first or the last could be meant."""
    query, key, value = operands()
    words = r"attention_mask: got shape \(.*60\), wanted a mask of 53 keys"
    described = make_mask(BATCH, 37, 60, 16, attention_mask=torch.rand(BATCH, 60) < 0.5)
    assert isinstance(described, IntervalMask)
    longer = torch.ones(BATCH, 60, dtype=torch.bool)
    for mask in (longer, longer[:, None, None], longer[:, None, None].float(), described):
        with pytest.raises(ValueError, match=words):
            attention_forward(Layer(), query, key, value, mask)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 37, 53, device="cpu")
    with pytest.raises(TypeError, match=r"attention_mask: got BlockMask"):
        attention_forward(Layer(), query, key, value, blocks)


def test_additive_masks_are_no_infinities() -> None:
    """transformers masks by the lowest finite number; a row of nothing else sees all keys alike."""
    keep = causal(37, 53).expand(BATCH, 1, -1, -1).clone()
    keep[0, :, 5] = False
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(keep.shape).masked_fill(~keep, lowest)
    query, key, value = operands()
    out, _ = attention_forward(Layer(), query, key, value, mask)
    mean = value.mean(2).repeat_interleave(HEADS // HEADS_K, 1)
    torch.testing.assert_close(out[0, 5], mean[0])
    exact = written_out(query, key, value, keep=keep)
    others = torch.ones(37, dtype=torch.bool)
    others[5] = False
    torch.testing.assert_close(out[:, others], exact[:, others].float())


@pytest.mark.parametrize("padded", [False, True])
def test_position_bias(padded: bool) -> None:
    """A learned bias for each pair of positions, beside causal and window masks, also padded."""
    window = masking_utils.sliding_window_causal_mask_function(9)
    padding = torch.ones(BATCH, 53, dtype=torch.bool)
    padding[0, :12] = False
    bias = torch.randn(1, HEADS, 37, 60, requires_grad=True)
    for pattern in (masking_utils.causal_mask_function, window):
        arguments: dict[str, Any] = {"q_offset": 16, "mask_function": pattern}
        arguments |= {"attention_mask": padding if padded else None}
        mask = make_mask(BATCH, 37, 53, **arguments)
        dense = masking_utils.sdpa_mask(BATCH, 37, 53, **arguments, allow_is_causal_skip=False)
        wanted = {"keep": dense, "bias": bias[..., :53]}
        check(operands(), mask, [bias], position_bias=bias, wanted=wanted)


@pytest.mark.parametrize("window", [None, 9])
def test_padding_masks_of_compiled_models(window: int | None) -> None:
    """The mask (B, Sk) that compiled models get, beside causality and the window of the layer."""
    padding = torch.ones(BATCH, 53, dtype=torch.bool)
    padding[0, :12] = False
    keep = causal(37, 53)
    if window is not None:
        keep = keep & (torch.arange(53) > torch.arange(37)[:, None] + 16 - window)
    for mask in (None, padding):
        seen = keep if mask is None else keep & mask[:, None, None]
        check(operands(), mask, sliding_window=window, wanted={"keep": seen})


def test_mixed_dtypes() -> None:
    """As under autocast, or with adapters in float32: the dtype of the values is used for all."""
    query, key, value = (t.detach() for t in operands())
    narrow = [t.bfloat16() for t in (query, key, value)]
    wanted, _ = attention_forward(Layer(), *narrow, None)
    out, _ = attention_forward(Layer(), query, key, narrow[2], None)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention_forward(Layer(), query, key, narrow[2], None)
        assert torch.equal(out, wanted)


def test_mask_of_another_call() -> None:
    """An IntervalMask that was made for another batch size is read as an ordinary mask."""
    window = masking_utils.sliding_window_causal_mask_function(9)
    mask = make_mask(1, 37, 53, mask_function=window, q_offset=16)
    assert isinstance(mask, IntervalMask)
    check(operands(), mask, wanted={"keep": mask.to_dense_mask()})


@pytest.mark.parametrize("narrow", ["query", "key"])
def test_batch_of_one(narrow: str) -> None:
    """Queries, or keys and values, that all sequences share, such as learned queries."""
    query, key, value = operands()
    if narrow == "query":
        query = query[:1].detach().requires_grad_()
    else:
        key, value = (t[:1].detach().requires_grad_() for t in (key, value))
    check((query, key, value), None, wanted={"keep": causal(37, 53)})


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout: got 0\.1, wanted 0"):
        attention_forward(Layer(), *operands(), None, dropout=0.1)
    for sizes in ({"head_dim": 264}, {"value_dim": 264}):
        with pytest.raises(ValueError, match=r"head_dim: got 264, wanted at most 256.*eager"):
            attention_forward(Layer(), *operands(**sizes), None)
    for shape in ((BATCH, 53), (BATCH, 1, 37, 53)):
        with pytest.raises(TypeError, match=r"attention_mask: got dtype torch\.int64 in"):
            attention_forward(Layer(), *operands(), torch.ones(shape, dtype=torch.int64))


def test_no_attention_weights() -> None:
    _, weights = attention_forward(Layer(), *operands(), None, output_attentions=True)
    assert weights is None
