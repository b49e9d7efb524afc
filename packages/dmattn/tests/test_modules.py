"""DynamicMaskAttention and the rotary embedding, on the CPU."""

import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_releases import exports_any_length

from dmattn import flash_dmattn_func
from dmattn.modules import DynamicMaskAttention, apply_rotary, rotary_embedding

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make_layer(**options: Any) -> DynamicMaskAttention:
    """A float64 layer whose parameters are all away from their initial values."""
    layer = DynamicMaskAttention(
        HIDDEN, HEADS, options.pop("num_kv_heads", KV_HEADS), dtype=torch.float64, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def inputs(seqlen: int = 12, batch: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, seqlen, HIDDEN, dtype=dtype)


def plain_attention(layer: DynamicMaskAttention, x: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
    """The layer's output by torch's own attention; keep and bias broadcast to (B, H, S, S)."""
    heads = (*x.shape[:2], -1, layer.head_dim)
    q = layer.q_norm(layer.q_proj(x).view(heads))
    k = layer.k_norm(layer.k_proj(x).view(heads))
    v = layer.v_proj(x).view(heads).transpose(1, 2)
    if layer.rope_theta is not None:
        cos, sin = rotary_embedding(torch.arange(x.shape[1]), layer.head_dim, layer.rope_theta)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    mask = bias.expand(keep.shape).masked_fill(~keep, -math.inf)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v, attn_mask=mask, enable_gqa=True
    )
    result: Tensor = layer.o_proj(out.transpose(1, 2).flatten(2))
    return result


def top_window(scores: Tensor, window: int) -> Tensor:
    """(B, HS, S) scores -> (B, HS, S, S): the rule of running top-w, row by row."""
    size = scores.shape[-1]
    keep = torch.zeros(*scores.shape, size, dtype=torch.bool)
    for batch, heads in enumerate(scores.tolist()):
        for head, row in enumerate(heads):
            for query in range(size):
                best = sorted(range(query + 1), key=lambda j: (row[j], j))[-window:]
                keep[batch, head, query, best] = True
    return keep


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shape_and_dtype(dtype: torch.dtype, kv_heads: int) -> None:
    layer = DynamicMaskAttention(HIDDEN, HEADS, kv_heads, window_size=5, dtype=dtype)
    out = layer(inputs(dtype=dtype))
    assert out.shape == (2, 12, HIDDEN)
    assert out.dtype == dtype
    assert torch.isfinite(out).all()


def test_head_dim_apart_from_hidden_size() -> None:
    layer = DynamicMaskAttention(HIDDEN, 3, 1, head_dim=16, window_size=4)
    assert layer.q_proj.weight.shape == (48, HIDDEN)
    assert layer.k_proj.weight.shape == layer.v_proj.weight.shape == (16, HIDDEN)
    assert layer.dt_proj.weight.shape == (1, 16)
    assert layer(inputs(dtype=torch.float32)).shape == (2, 12, HIDDEN)


def test_parameter_names_are_those_of_the_checkpoints() -> None:
    names = {name for name, _ in DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS).named_parameters()}
    linear = {f"{name}_proj.weight" for name in ("q", "k", "v", "o", "dt")}
    assert names == linear | {"A", "q_norm.weight", "k_norm.weight"}
    early = DynamicMaskAttention(
        HIDDEN, HEADS, KV_HEADS, qk_norm=False, bias=True, num_score_heads=HEADS
    )
    names = {name for name, _ in early.named_parameters()}
    assert names == linear | {"A"} | {name.replace("weight", "bias") for name in linear}
    assert early.A.shape == (HEADS,)
    assert early.dt_proj.weight.shape == (HEADS, KV_HEADS * HEAD_DIM)


def test_initial_values() -> None:
    layer = DynamicMaskAttention(256, 8, 4, bias=True)
    assert not layer.A.any()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "dt_proj"):
        linear = getattr(layer, name)
        assert not linear.bias.any()
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(layer.state_dict()["q_norm.weight"], torch.ones(32))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    assert not layer.A.any()
    assert torch.equal(layer.state_dict()["k_norm.weight"], torch.ones(32))


@pytest.mark.parametrize("exp_score", [True, False])
@pytest.mark.parametrize("num_score_heads", [KV_HEADS, HEADS])
@pytest.mark.parametrize("window", [1, 3, 12, 50, None])
@pytest.mark.parametrize("dense_mask", [False, True])
def test_equals_plain_attention(
    exp_score: bool, num_score_heads: int, window: int | None, dense_mask: bool
) -> None:
    layer = make_layer(
        window_size=window,
        exp_score=exp_score,
        num_score_heads=num_score_heads,
        bias=True,
        dense_mask=dense_mask,
    )
    x = inputs()
    scores = layer.key_scores(x)
    keep = top_window(scores, 12 if window is None else window)
    repeat = HEADS // num_score_heads
    keep = keep.repeat_interleave(repeat, 1)
    bias = scores[:, :, None].repeat_interleave(repeat, 1)
    torch.testing.assert_close(layer(x), plain_attention(layer, x, keep, bias))


@pytest.mark.parametrize("exp_score", [True, False])
def test_zero_score_and_wide_window_is_softmax_attention(exp_score: bool) -> None:
    layer = make_layer(window_size=12, exp_score=exp_score)
    with torch.no_grad():
        layer.A.zero_()
    x = inputs()
    causal = torch.ones(2, HEADS, 12, 12, dtype=torch.bool).tril()
    expected = plain_attention(layer, x, causal, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(layer(x), expected)


def test_zero_score_is_a_sliding_window() -> None:
    layer = make_layer(window_size=4)
    with torch.no_grad():
        layer.A.zero_()
    x = inputs()
    keep = torch.ones(2, HEADS, 12, 12, dtype=torch.bool).tril().triu(-3)
    expected = plain_attention(layer, x, keep, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("dense_mask", [False, True])
def test_not_causal(dense_mask: bool) -> None:
    layer = make_layer(window_size=4, is_causal=False, dense_mask=dense_mask)
    x = inputs()
    scores = layer.key_scores(x)
    keep = torch.zeros(2, KV_HEADS, 12, dtype=torch.bool)
    keep.scatter_(-1, scores.topk(4).indices, True)
    keep = keep[:, :, None].expand(-1, -1, 12, -1).repeat_interleave(2, 1)
    bias = scores[:, :, None].repeat_interleave(2, 1)
    torch.testing.assert_close(layer(x), plain_attention(layer, x, keep, bias))


@pytest.mark.parametrize("options", [{}, {"num_score_heads": HEADS}, {"softcap": 2.0}])
def test_dense_mask_has_the_gradients_of_the_selection(options: dict[str, Any]) -> None:
    layer, x = make_layer(window_size=4, **options), inputs(20).requires_grad_()
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, :7] = False
    leaves = [x, *layer.parameters()]
    grads = []
    for dense_mask in (False, True):
        layer.dense_mask = dense_mask
        out = layer(x, attention_mask=padding)
        grads.append(torch.autograd.grad(out[:, 7:].square().sum(), leaves))
    for selected, dense in zip(*grads, strict=True):
        torch.testing.assert_close(dense, selected, rtol=0, atol=1e-9)
        assert dense.abs().amax() > 1e-3


def test_dense_mask_is_what_attention_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def note(*tensors: Tensor, **options: Any) -> Tensor:
        given.append(options)
        return flash_dmattn_func(*tensors, **options)

    monkeypatch.setattr("dmattn.modules.dynamic_mask_attention.flash_dmattn_func", note)
    layer, x = make_layer(window_size=4, dense_mask=True), inputs(12)
    layer(x)
    assert given[0]["window_size"] is None
    assert torch.equal(given[0]["attn_mask"], top_window(layer.key_scores(x), 4))
    layer(x[:, :4])  # nothing to choose: no mask
    assert given[1]["attn_mask"] is None


def test_score_formula() -> None:
    layer = make_layer(bias=True)
    x = inputs()
    step = F.softplus(layer.dt_proj(layer.v_proj(x)))
    plain = (layer.A * step).transpose(1, 2)
    torch.testing.assert_close(layer.key_scores(x), plain.exp())
    layer.exp_score = False
    torch.testing.assert_close(layer.key_scores(x), plain)


def test_scores_are_float32_in_a_bfloat16_layer_and_under_autocast() -> None:
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, window_size=4)
    x = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.v_proj(x).dtype == torch.bfloat16
        assert layer.key_scores(x).dtype == torch.float32
        out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), layer(x), atol=0.02, rtol=0.02)
    half = layer.to(torch.bfloat16)
    assert half.key_scores(x.bfloat16()).dtype == torch.float32


def test_huge_scores_stay_finite() -> None:
    layer = make_layer(window_size=4)
    with torch.no_grad():
        layer.A.fill_(1e6)
    x = inputs().requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("exp_score", [True, False])
@pytest.mark.parametrize("window", [3, 12, None])
def test_gradient_reaches_every_parameter(exp_score: bool, window: int | None) -> None:
    layer = make_layer(window_size=window, exp_score=exp_score, bias=True)
    x = inputs().requires_grad_()
    (layer(x) * torch.randn(2, 12, HIDDEN, dtype=torch.float64)).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().amax() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().amax() > 0, name


def test_gradient_reaches_A_at_its_initial_value() -> None:
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, window_size=3)
    layer(inputs(dtype=torch.float32)).square().sum().backward()
    assert layer.A.grad is not None
    assert layer.A.grad.abs().amin() > 0


def test_gradient_of_scores_against_differences() -> None:
    layer = make_layer(window_size=5)
    x = inputs(7, 1)

    def loss(A: Tensor, dt: Tensor) -> Tensor:
        values = {"A": A, "dt_proj.weight": dt}
        out: Tensor = torch.func.functional_call(layer, values, (x,))
        return out.square().sum()

    A, dt = (p.detach().clone().requires_grad_() for p in (layer.A, layer.dt_proj.weight))
    assert torch.autograd.gradcheck(loss, (A, dt))


@pytest.mark.parametrize("window", [1, 4, 30])
def test_future_tokens_do_not_change_the_past(window: int) -> None:
    layer = make_layer(window_size=window)
    x = inputs(20, 1)
    before = layer(x)
    for position in (1, 7, 19):
        changed = x.clone()
        changed[:, position:] = torch.randn_like(changed[:, position:]) * 3
        torch.testing.assert_close(layer(changed)[:, :position], before[:, :position])


@pytest.mark.parametrize("window", [3, 30])
def test_right_padding_changes_nothing(window: int) -> None:
    layer = make_layer(window_size=window)
    x = inputs(15)
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[:, 10:] = False
    torch.testing.assert_close(layer(x, attention_mask=mask)[:, :10], layer(x[:, :10]))


@pytest.mark.parametrize("window", [3, 30])
@pytest.mark.parametrize("is_causal", [True, False])
def test_left_padding_changes_nothing(window: int, is_causal: bool) -> None:
    layer = make_layer(window_size=window, is_causal=is_causal)
    x = inputs(15)
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[:, :5] = False
    positions = torch.arange(15) - 5
    out = layer(x, positions=positions, attention_mask=mask)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[:, 5:], layer(x[:, 5:]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_padding_masks_of_integers(dtype: torch.dtype) -> None:
    layer, x = make_layer(window_size=4), inputs(15)
    mask = torch.ones(2, 15, dtype=torch.bool)
    mask[0, :5] = False
    want = layer(x, attention_mask=mask)
    assert torch.equal(layer(x, attention_mask=mask.to(dtype)), want)
    assert not torch.equal(layer(x)[0], want[0])


@pytest.mark.parametrize("options", [{}, {"window_size": None}, {"num_score_heads": HEADS}])
def test_meta_device(options: dict[str, Any]) -> None:
    """Shapes without data, as for deferred initialisation and the inference of shapes."""
    layer = DynamicMaskAttention(
        HIDDEN, HEADS, KV_HEADS, **{"window_size": 4, "device": "meta", **options}
    )
    x = torch.empty(2, 12, HIDDEN, device="meta")
    assert layer(x).shape == x.shape and layer(x).is_meta
    with torch.no_grad():
        full = {"evict": False, "capacity": 20} if layer.window_size is None else {}
        cache = layer.make_cache(2, **full)
        layer(x, cache=cache)
        assert layer(x[:, :1], cache=cache).shape == (2, 1, HIDDEN)


class InBuffers(torch.nn.Module):
    """A layer whose padding and positions lie in buffers for the longest text."""

    mask: Tensor
    positions: Tensor

    def __init__(self, batch: int | None, positions: Tensor) -> None:
        super().__init__()
        self.layer, self.batch = make_layer(window_size=5), batch
        self.register_buffer("mask", torch.rand(2, 64) < 0.8)
        self.register_buffer("positions", positions)

    def forward(self, x: Tensor) -> Tensor:
        seqlen = x.shape[1]
        if self.batch is not None:
            x = x.reshape(self.batch, seqlen, HIDDEN)
        out: Tensor = self.layer(x, self.positions[..., :seqlen], self.mask[:, :seqlen])
        return out


@pytest.mark.parametrize(
    "build",
    [
        lambda: make_layer(window_size=5),
        lambda: make_layer(window_size=None),
        lambda: InBuffers(None, torch.arange(64)),
        lambda: InBuffers(2, torch.arange(64)),
        lambda: InBuffers(2, torch.arange(64).expand(2, -1)),
        lambda: InBuffers(2, torch.arange(64)[None]),
    ],
)
def test_one_graph_for_all_lengths(build: Callable[[], torch.nn.Module]) -> None:
    graphs, module = 0, build()

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=count, dynamic=True, fullgraph=True)
    for seqlen in range(9, 45, 3):  # 12 lengths, around twice the window and above
        x = inputs(seqlen)
        torch.testing.assert_close(compiled(x), module(x))
    assert graphs == 1


@exports_any_length
@pytest.mark.parametrize("window", [5, None])
def test_exported_with_a_dynamic_length(window: int | None) -> None:
    layer = make_layer(window_size=window)
    seqlen = torch.export.Dim("seqlen", min=6)
    program = torch.export.export(
        layer, (inputs(20),), dynamic_shapes={"hidden_states": {1: seqlen}}
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in (6, 20, 77, 300):
        x = inputs(length)
        torch.testing.assert_close(loaded(x), layer(x))


def test_positions() -> None:
    layer = make_layer(window_size=4)
    x = inputs()
    steps = torch.arange(12)
    expected = layer(x)
    torch.testing.assert_close(layer(x, positions=steps), expected)
    shifted = layer(x, positions=steps.expand(2, -1) + 100)
    torch.testing.assert_close(shifted, expected, atol=1e-4, rtol=1e-4)  # float32 angles
    torch.testing.assert_close(layer(x, positions=steps[None]), expected)
    wide = rotary_embedding(steps[None], HEAD_DIM)
    torch.testing.assert_close(layer(x, position_embeddings=wide), expected)
    shared = rotary_embedding(steps, HEAD_DIM)
    torch.testing.assert_close(layer(x, position_embeddings=shared), expected)
    assert not torch.allclose(layer(x, positions=steps * 3), expected)


def test_without_rotary_embedding() -> None:
    layer = make_layer(window_size=None, rope_theta=None, num_kv_heads=4)
    x = inputs()
    causal = torch.ones(2, HEADS, 12, 12, dtype=torch.bool).tril()
    bias = layer.key_scores(x)[:, :, None]
    torch.testing.assert_close(layer(x), plain_attention(layer, x, causal, bias))
    with pytest.raises(ValueError, match="positions: got a value, wanted None"):
        layer(x, positions=torch.arange(12))


def test_rotation_depends_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, HEAD_DIM, dtype=torch.float64)

    def dot(i: int, j: int) -> float:
        turned = [
            apply_rotary(x, *rotary_embedding(torch.tensor([p]), HEAD_DIM))
            for x, p in ((q, i), (k, j))
        ]
        return float((turned[0] * turned[1]).sum())

    assert dot(9, 4) == pytest.approx(dot(105, 100), rel=1e-4)
    assert dot(9, 4) != pytest.approx(dot(9, 5), rel=1e-2)


def test_rotary_angles_are_float32_under_autocast() -> None:
    positions = torch.tensor([4097])
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rotary_embedding(positions, HEAD_DIM)
        turned = apply_rotary(torch.ones(1, 1, 1, HEAD_DIM, dtype=torch.bfloat16), cos, sin)
    assert cos.dtype == sin.dtype == turned.dtype == torch.float32
    assert cos[0, 0].item() == pytest.approx(math.cos(4097.0), abs=1e-6)


def test_repr_and_state_dict() -> None:
    layer = make_layer(window_size=17)
    assert "window_size=17" in repr(layer)
    assert "num_kv_heads=2" in repr(layer)
    twin = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS, window_size=17, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    x = inputs()
    assert torch.equal(layer(x), twin(x))


@pytest.mark.parametrize("seqlen", [0, 1])
def test_shortest_sequences(seqlen: int) -> None:
    layer = make_layer(window_size=4)
    assert layer(inputs(seqlen)).shape == (2, seqlen, HIDDEN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"num_heads": -1}, "num_heads: got -1"),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, wanted a divisor of num_heads = 4"),
        ({"num_kv_heads": 0}, "num_kv_heads: got 0"),
        ({"hidden_size": 30}, "hidden_size: got 30, wanted a multiple of num_heads = 4"),
        ({"head_dim": 0}, "head_dim: got 0"),
        ({"head_dim": 7}, "head_dim: got 7, wanted an even number"),
        ({"num_score_heads": 3}, "num_score_heads: got 3, wanted num_kv_heads = 2"),
        ({"window_size": 0}, "window_size: got 0"),
        ({"rope_theta": -1.0}, "rope_theta: got -1.0"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"softcap": math.inf}, "softcap: got inf, wanted a finite number"),
        ({"head_dim": 300}, "head_dim: got 300, wanted 1 to 256"),
        ({"init_std": math.nan}, "init_std: got nan"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    with pytest.raises(ValueError, match=message):
        DynamicMaskAttention(**{**good, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 2.5}, "window_size: got 2.5 .*, wanted an int of at least 1, or None"),
        ({"window_size": True}, "window_size: got True"),
        ({"head_dim": 8.0}, "head_dim: got 8.0"),
        ({"num_heads": "4"}, "num_heads: got '4'"),
        ({"softcap": None}, "softcap: got None, wanted a finite number"),
        ({"rope_theta": "x"}, "rope_theta: got 'x'"),
        ({"is_causal": "no"}, "is_causal: got 'no' .*, wanted True or False"),
        ({"exp_score": 1}, "exp_score: got 1"),
        ({"bias": None}, "bias: got None, wanted True or False"),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    with pytest.raises(TypeError, match=message):
        DynamicMaskAttention(**{**good, **options})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden_states": torch.zeros(2, 12, 31)}, ValueError, "hidden_states: got shape"),
        ({"hidden_states": torch.zeros(12, 32)}, ValueError, "hidden_states: got shape"),
        ({"attention_mask": torch.ones(2, 12)}, TypeError, "attention_mask: got dtype"),
        (
            {"attention_mask": torch.ones(2, 11, dtype=torch.bool)},
            ValueError,
            "attention_mask: got shape",
        ),
        ({"positions": torch.arange(11)}, ValueError, "positions: got shape"),
        ({"positions": torch.arange(12.0)}, TypeError, "positions: got dtype"),
        ({"positions": list(range(12))}, TypeError, "positions: got .*list.*, wanted a torch.Te"),
        ({"positions": torch.zeros(3, 12).long()}, ValueError, "positions: got shape"),
        (
            {"positions": torch.zeros(12, device="meta").long()},
            ValueError,
            "positions: got device meta, wanted cpu as hidden_states",
        ),
        ({"hidden_states": [1.0]}, TypeError, "hidden_states: got .*list.*, wanted a torch.Te"),
        ({"hidden_states": torch.zeros(2, 12, 32).long()}, TypeError, "hidden_states: got dtype"),
        (
            {"hidden_states": torch.zeros(2, 12, 32).to_sparse()},
            ValueError,
            "hidden_states: got a tensor of layout torch.sparse_coo",
        ),
        ({"attention_mask": [True]}, TypeError, "attention_mask: got .*list"),
        (
            {"attention_mask": torch.ones(2, 1, 1, 12).bool()},
            ValueError,
            "attention_mask: got shape",
        ),
        (
            {"attention_mask": torch.ones(2, 12, device="meta").bool()},
            ValueError,
            "attention_mask: got device meta, wanted cpu as hidden_states",
        ),
        ({"cache": [1]}, TypeError, r"cache: got \[1\] \(list\), wanted a DynamicMaskCache"),
        ({"position_embeddings": torch.zeros(12, 4)}, TypeError, "position_embeddings: got"),
        ({"position_embeddings": (None, torch.zeros(12, 4))}, TypeError, "cos: got None"),
        (
            {"position_embeddings": (torch.zeros(12, 4),) * 3},
            TypeError,
            r"position_embeddings: got a tuple of length 3, wanted \(cos, sin\)",
        ),
        (
            {"position_embeddings": (torch.zeros(12, 4), torch.zeros(12, 5))},
            ValueError,
            "sin: got shape",
        ),
        (
            {
                "positions": torch.arange(12),
                "position_embeddings": rotary_embedding(torch.arange(12), HEAD_DIM),
            },
            ValueError,
            "positions: got a value beside position_embeddings",
        ),
    ],
)
def test_bad_inputs(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    layer = DynamicMaskAttention(HIDDEN, HEADS, KV_HEADS)
    with pytest.raises(error, match=message):
        layer(**{"hidden_states": torch.zeros(2, 12, HIDDEN), **arguments})


@pytest.mark.parametrize(
    ("head_dim", "theta", "message"),
    [(7, 1e4, "head_dim: got 7"), (0, 1e4, "head_dim: got 0"), (8, 0.0, "theta: got 0.0")],
)
def test_bad_rotary_options(head_dim: int, theta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_embedding(torch.arange(3), head_dim, theta)
