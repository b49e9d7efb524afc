"""Few keys: up to 128 of them and head dimensions up to 64, as in windows of images or short texts.

On CUDA such calls have kernels of their own (docs/kernels/short.md), in which a thread block takes
all keys of a head and, with a bias that batch entries share, one batch entry after the other. These
tests are about the limits of these kernels: rows and keys around every tile, operands of every
shape and layout, and calls just outside of what they take.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.cases import (
    LAYOUTS,
    MASK_FILLS,
    OPERAND_LAYOUTS,
    OPERAND_SHAPES,
    Case,
    build,
    case_id,
)
from attention.driver import assert_close, check, run
from attention.oracle import Problem
from attention.targets import target

pytestmark = pytest.mark.each_family

HALF = ("bf16", "f16")
HEAD_DIMS = (64, 32, 40, 8, 24)
HEADS = ((2, 2), (4, 2), (3, 1), (8, 1))  # ratios 1, 2, 3 and 8
KEYS = (1, 2, 15, 16, 17, 49, 63, 64, 65, 127, 128)


def _lengths() -> list[Case]:
    """As many rows as keys, fewer, more, and several blocks of 64 rows."""
    pairs = [
        (KEYS[(i + ahead) % len(KEYS)], KEYS[i]) for i in range(len(KEYS)) for ahead in (0, 3, 7)
    ]
    pairs += [(rows, keys) for rows in (129, 200, 256) for keys in (16, 49, 64, 77, 128)]
    pairs += [(257, 64), (300, 128), (256, 129), (49, 129)]  # too many rows or keys
    cases = []
    for i, (rows, keys) in enumerate(pairs):
        nheads, nheads_k = HEADS[i % 4]
        case = Case(rows, keys, 3, nheads, nheads_k, HEAD_DIMS[i % 5], HALF[i % 2])
        cases.append(case.with_(causal=i % 3 == 1, dlse=i % 2 == 0))
    return cases


@pytest.mark.parametrize("case", _lengths(), ids=case_id)
def test_lengths(case: Case) -> None:
    check(case)
    check(case.with_(causal=not case.causal, bias="bh1k" if case.causal else ""))


@pytest.mark.parametrize("dtype", target().dtypes)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 72])
def test_heads(head_dim: int, dtype: str) -> None:
    for nheads, nheads_k in HEADS:
        case = Case(49, 49, 2, nheads, nheads_k, head_dim, dtype, bias="1hqk", dlse=True)
        check(case)
        check(case.with_(seqlen_q=100, seqlen_k=128, bias="", mask="b1qk", causal=True))


@pytest.mark.parametrize("shape", OPERAND_SHAPES)
def test_bias(shape: str) -> None:
    """Rows of the bias start at any multiple of 2 bytes, or of 16; several row blocks; also without
    its gradient."""
    for dtype, f32 in (("bf16", False), ("f16", True)):
        case = Case(49, 49, 5, 4, 2, 32, dtype, bias=shape, bias_f32=f32, dlse=True)
        check(case)
        check(case.with_(wants="qkv"))
        check(case.with_(seqlen_q=64, seqlen_k=64, causal=True))
        check(case.with_(seqlen_q=150, seqlen_k=120, head_dim=64, causal=True))


ENTRIES = (
    *("some_minus_inf", "all_minus_inf", "some_lowest", "all_lowest", "lowest_rows"),
    *("wide", "huge", "zero"),
)


@pytest.mark.parametrize("fill", ENTRIES)
@pytest.mark.parametrize("f32", [False, True])
def test_entries_of_a_bias(fill: str, f32: bool) -> None:
    case = Case(49, 49, 3, 4, 2, 32, HALF[f32], bias="1hqk", bias_fill=fill, bias_f32=f32)
    check(case)
    check(case.with_(bias="bhqk", seqlen_k=100, causal=True))
    check(case.with_(bias="bk1k", seqlen_k=128, head_dim=64))


@pytest.mark.parametrize("shape", OPERAND_SHAPES)
def test_mask(shape: str) -> None:
    case = Case(49, 49, 5, 4, 2, 32, mask=shape, dlse=True)
    check(case)
    check(case.with_(seqlen_q=150, seqlen_k=120, head_dim=64, causal=True, dtype="f16"))


@pytest.mark.parametrize("fill", MASK_FILLS)
def test_kept_by_a_mask(fill: str) -> None:
    """Masks that keep all keys, none or a few, and rows that keep nothing."""
    case = Case(100, 100, 3, 4, 2, 64, mask="b1qk", mask_fill=fill, dlse=True)
    check(case)
    check(case.with_(mask="b11k", seqlen_q=128, seqlen_k=128, dtype="f16"))
    check(case.with_(mask="bh1k", seqlen_q=49, seqlen_k=49, causal=True))


@pytest.mark.parametrize("bias", ["1hqk", "bhqk", "bh1k", "1kqk"])
@pytest.mark.parametrize("mask", ["b1qk", "b11k", "1h1k", "bhqk"])
def test_mask_and_bias(mask: str, bias: str) -> None:
    case = Case(49, 49, 6, 4, 2, 32, mask=mask, bias=bias, mask_fill="dead_rows", dlse=True)
    check(case)
    check(case.with_(seqlen_q=130, seqlen_k=65, bias_f32=True, bias_fill="some_minus_inf"))


@pytest.mark.parametrize("batch", [37, 300])
@pytest.mark.parametrize(
    "bias,mask", [("1hqk", ""), ("1hqk", "b1qk"), ("11qk", ""), ("1hqk", "b11k")]
)
def test_batches_that_share_a_bias(batch: int, bias: str, mask: str) -> None:
    """A thread block takes several batch entries, and adds to the gradient once.

    Not all thread blocks take the same number of entries.
    """
    case = Case(49, 49, batch, 4, 4, 32, bias=bias, mask=mask)
    check(case)
    check(case.with_(wants="qkv", mask_fill="dead_rows"))
    check(case.with_(seqlen_q=17, seqlen_k=70, nheads_k=2, bias_f32=True, dlse=True))
    if batch == 37:
        check(case.with_(seqlen_q=130, seqlen_k=128, head_dim=64))


@pytest.mark.parametrize("batch", [37, 300])
@pytest.mark.parametrize("keys", [49, 100])
@pytest.mark.parametrize("f32", [False, True])
def test_each_batch_adds_once_to_a_shared_gradient(f32: bool, keys: int, batch: int) -> None:
    """Each batch entry has gradients in a single row of one head, in which at most one other entry
    has: in a sum of all entries, one more or less would be within the tolerance."""
    problem = build(Case(49, keys, batch, 4, 4, 32, bias="1hqk", bias_f32=f32, dlse=True))
    assert problem.dlse is not None
    number = torch.arange(batch, device=problem.q.device)
    row, head = number % 49, number // 49 % 4
    dout, dlse = torch.zeros_like(problem.dout), torch.zeros_like(problem.dlse)
    dout[number, row, head] = problem.dout[number, row, head]
    dlse[number, head, row] = problem.dlse[number, head, row]
    problem = problem.with_(dout=dout, dlse=dlse)
    assert_close(problem, run(problem))


@pytest.mark.parametrize("batch", [3, 300])
def test_many_rows_for_a_head_of_keys(batch: int) -> None:
    """Too many rows for the one thread block that would take them, unless there are many such
    blocks."""
    case = Case(130, 16, batch, 8, 1, 8, causal=True)
    check(case)
    check(case.with_(nheads=6, nheads_k=3, mask="b11k", causal=False))


@pytest.mark.parametrize("wants", ["", "q", "k", "v", "b", "kv", "qk", "qb", "kvb"])
def test_some_gradients(wants: str) -> None:
    for bias in ("1hqk", "bhqk", "111k", ""):
        case = Case(49, 49, 5, 4, 2, 32, bias=bias, wants=wants, causal=not bias, dlse=True)
        check(case)
        check(case.with_(seqlen_q=150, seqlen_k=128, head_dim=64, mask="b11k"))


@pytest.mark.parametrize("mask", ["", "b1qk"])
def test_gradient_of_lse_alone(mask: str) -> None:
    """A zero dout: dv is zero, the others are not."""
    problem = build(Case(100, 90, 3, 4, 2, 64, mask=mask, bias="1hqk", dlse=True))
    problem = problem.with_(dout=torch.zeros_like(problem.dout))
    found = run(problem)
    assert_close(problem, found)
    assert found.dv is not None and not bool(found.dv.any())


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.2, -1.5])
@pytest.mark.parametrize("keys", [49, 100])
def test_scale(keys: int, scale: float) -> None:
    case = Case(70, keys, 3, 4, 2, 64, scale=scale, bias="1hqk", causal=True, dlse=True)
    check(case)
    check(case.with_(bias=""))
    check(case.with_(bias="", mask="b1qk", causal=False))


@pytest.mark.parametrize("logits", [1e-4, 30.0, 1e3, 1e4])
@pytest.mark.parametrize("dtype", HALF)
def test_size_of_logits(logits: float, dtype: str) -> None:
    """From a uniform softmax to one that picks a single key."""
    case = Case(70, 64, 3, 4, 2, 64, dtype, logits=logits, dlse=True)
    check(case)
    check(case.with_(seqlen_k=127, bias="1hqk", causal=True))


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8])
def test_constant_in_the_bias(offset: float) -> None:
    """It cancels in the softmax, and must not reach the backward by a rounded lse either."""
    problem = build(Case(49, 100, 5, bias="1hqk", bias_f32=True, wants="qkv"))
    assert problem.bias is not None
    # Multiples of 1/16 and a scale of 1/4: their sums with 1e4 are exact in float32.
    q, k = ((4 * x).round() / 4 for x in (problem.q, problem.k))
    scale = 0.0 if offset > 1e5 else 0.25
    none, shifted = (
        run(problem.with_(q=q, k=k, softmax_scale=scale, bias=torch.full_like(problem.bias, shift)))
        for shift in (0.0, offset)
    )
    for (name, a), (_, b) in zip(none.items(), shifted.items(), strict=True):
        if name != "lse":
            room = max(2 * torch.finfo(a.dtype).eps * float(a.abs().max()), 2e-3)
            torch.testing.assert_close(b, a, rtol=0, atol=room, msg=name)


# --- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str) -> None:
    """The layout of q, k, v and dout. Rows that do not start on 16 bytes are left to other
    kernels."""
    for head_dim in (32, 64):
        case = Case(49, 49, 3, 4, 2, head_dim, layout=layout, bias="1hqk", dlse=True)
        check(case)
        check(case.with_(seqlen_q=130, seqlen_k=128, bias="", mask="b11k", causal=True))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_one_misaligned(name: str) -> None:
    problem = build(Case(49, 100, 3, 4, 4, 64, bias="1hqk"))
    for layout in ("misaligned", "offset"):
        moved = problem.with_(**{name: LAYOUTS[layout](getattr(problem, name))})
        assert_close(moved, run(moved))


@pytest.mark.parametrize("seqlen,head_dim", [(49, 32), (128, 64)])
@pytest.mark.parametrize("order", ["sn", "ns"])
def test_packed_projection(order: str, head_dim: int, seqlen: int) -> None:
    """q, k and v as slices of one projection: (B, S, 3, H, D), and (3, B, H, S, D) as in Swin."""
    problem = build(Case(seqlen, seqlen, 5, 4, 4, head_dim, bias="1hqk"))
    parts = (problem.q, problem.k, problem.v)
    if order == "sn":
        q, k, v = torch.stack(parts, dim=2).unbind(2)
    else:
        rows = torch.stack([x.transpose(1, 2) for x in parts])
        q, k, v = (x.transpose(1, 2) for x in rows.unbind(0))
    problem = problem.with_(q=q, k=k, v=v)
    assert_close(problem, run(problem))


@pytest.mark.parametrize("how", ["turned", "expanded"])
def test_gradient_of_any_layout(how: str) -> None:
    """dout with head_dim not innermost, and with strides of 0, as the gradient of a sum arrives."""
    problem = build(Case(49, 70, 3, bias="1hqk"))
    if how == "turned":
        dout = problem.dout.transpose(1, 3).contiguous().transpose(1, 3)
    else:
        dout = problem.dout.new_ones(()).expand(problem.dout.shape)
    problem = problem.with_(dout=dout)
    assert_close(problem, run(problem))


@pytest.mark.parametrize("layout", OPERAND_LAYOUTS)
def test_layout_of_mask_and_bias(layout: str) -> None:
    case = Case(49, 49, 3, 4, 2, 32, operand_layout=layout, dlse=True)
    for shape in ("bhqk", "1kqk", "b1qk"):
        check(case.with_(bias=shape))
        check(case.with_(mask=shape, seqlen_q=130, seqlen_k=100))
        check(case.with_(bias=shape, bias_f32=True, mask="b11k", seqlen_k=128))


@pytest.mark.parametrize("shape", ["1hqk", "b1qk", "11qk", "bh1k", "1h1k"])
def test_expanded_mask_and_bias(shape: str) -> None:
    """Views that repeat elements; the gradient of the bias is that of the view."""
    problem = build(Case(49, 70, 5, 4, 2, 32, bias=shape, mask=shape))
    full = (5, 4, 49, 70)
    for changes in ({"bias": problem.bias, "mask": None}, {"bias": None, "mask": problem.mask}):
        wide = {name: x if x is None else x.expand(full) for name, x in changes.items()}
        wants = problem.wants if wide["bias"] is not None else "qkv"
        expanded = problem.with_(**wide, wants=wants)
        assert_close(expanded, run(expanded))


def _behind_nan(x: Tensor) -> Tensor:
    """A view of a longer tensor, in which rows of NaN follow the rows of each batch entry."""
    longer = x.new_full((x.shape[0], x.shape[1] + 64, *x.shape[2:]), float("nan"))
    longer[:, : x.shape[1]] = x
    return longer[:, : x.shape[1]]


@pytest.mark.parametrize("rows,keys", [(1, 2), (15, 17), (49, 49), (65, 63), (130, 65), (64, 127)])
def test_what_lies_behind_is_not_read(rows: int, keys: int) -> None:
    """A tile has more rows and keys than the call: what is there in memory must not count."""
    problem = build(Case(rows, keys, 3, 4, 2, 64, bias="1hqk", dlse=True))
    moved = {name: _behind_nan(getattr(problem, name)) for name in ("q", "k", "v", "dout")}
    problem = problem.with_(**moved)
    assert_close(problem, run(problem))
    alone = problem.with_(bias=None, wants="qkv", is_causal=True)
    assert_close(alone, run(alone))


@pytest.mark.parametrize("mask", ["b11k", "111k", "bk1k"])
@pytest.mark.parametrize("rows,keys", [(49, 49), (64, 64), (30, 100), (150, 128)])
def test_keys_hidden_from_all_rows_may_hold_anything(rows: int, keys: int, mask: str) -> None:
    """Like the unused places of a padded batch, which nobody has written."""
    if target().backend in ("flex", "plain"):
        pytest.skip("this backend reads all keys and multiplies hidden ones by 0")
    problem = build(Case(rows, keys, 3, 4, 2, 64, mask=mask, dlse=True))
    assert problem.mask is not None
    hidden = ~problem.mask.expand(3, 2, 1, keys).squeeze(2).transpose(1, 2).unsqueeze(3)
    assert hidden.any() and not hidden.all()
    k, v = (x.masked_fill(hidden, float("nan")) for x in (problem.k, problem.v))
    assert_close(problem, run(problem.with_(k=k, v=v)))


# --- beside the kernels for few keys --------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(49, 49, softcap=5.0, bias="1hqk"),
        Case(49, 49, sinks="normal", bias="1hqk", dlse=True),
        Case(100, 128, sinks="high", mask="b11k", causal=True),
        Case(49, 49, head_dim=32, value_dim=64, bias="1hqk"),
        Case(100, 128, head_dim=64, value_dim=96),
        Case(49, 100, head_dim=20, bias="1hqk"),
        Case(49, 49, head_dim=5, mask="b1qk"),
    ],
    ids=case_id,
)
def test_what_else_a_call_may_have(case: Case) -> None:
    """Features that the kernels for few keys do not take, or take in another form."""
    check(case)


# --- the same bits --------------------------------------------------------------------------------

REPEATED = [
    Case(49, 49, 70, 4, 4, 32, bias="bhqk"),
    Case(128, 128, 40, 4, 2, 64, causal=True, dlse=True),
    Case(200, 77, 20, 2, 2, 64),
    Case(49, 49, 150, 4, 4, 32, bias="1hqk", mask="b1qk", wants="qkv"),
]


@pytest.mark.parametrize("case", REPEATED, ids=case_id)
def test_same_bits_in_every_run(case: Case) -> None:
    """Nothing here is summed over batches: all of a gradient comes from one thread block.

    Backends that also serve other devices promise the same bits only with `deterministic=True`.
    """
    _compare_runs(build(case), deterministic=target().backend is not None)


@pytest.mark.parametrize("bias", ["1hqk", "11qk", "111k"])
def test_same_bits_of_shared_biases(bias: str) -> None:
    """These gradients are sums over batch entries, in a fixed order if `deterministic=True`."""
    _compare_runs(build(Case(49, 49, 150, 4, 2, 32, bias=bias)), deterministic=True)


def _compare_runs(problem: Problem, deterministic: bool) -> None:
    want = run(problem, deterministic)
    for _ in range(3):
        for (name, a), (_, b) in zip(
            run(problem, deterministic).items(), want.items(), strict=True
        ):
            assert torch.equal(a, b), name
