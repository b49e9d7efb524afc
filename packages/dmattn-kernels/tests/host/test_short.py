"""Attention over few keys: which calls its kernels take, in how many blocks, with what memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import abi
from abi import BFLOAT16, FLOAT32, SOME_ADDRESS, contiguous, tensor
from probe import (
    DB_ACCUM,
    DB_NONE,
    DB_TILE,
    FULL,
    GENERAL,
    PLAIN,
    SM80,
    SM89,
    SM90,
    WORKSPACE,
    Plan,
    Probe,
    mask,
)

SETS = [SM80, SM89, SM90]
SMS = 132
WINDOWS: dict[str, Any] = {  # of a picture, with a bias that all of them share
    "batch": 2048,
    "seqlen_q": 49,
    "seqlen_k": 49,
    "nheads": 3,
    "nheads_k": 3,
    "head_dim": 32,
}
SMALL: dict[str, Any] = {
    "batch": 2,
    "seqlen_q": 60,
    "seqlen_k": 61,
    "nheads": 4,
    "nheads_k": 2,
    "head_dim": 64,
}
SCORES = (2, 4, 60, 61)  # of SMALL


@pytest.fixture(scope="module")
def plan(probe: ctypes.CDLL) -> Probe:
    return Probe(probe, short=True)


def q_like(**view: Any) -> abi.Tensor:
    """The queries of SMALL, or what has their shape."""
    return tensor((2, 60, 4, 64), **view)


def k_like(**view: Any) -> abi.Tensor:
    return tensor((2, 61, 2, 64), **view)


# Strides by which some rows do not start on 16 bytes.
ODD_Q = (60 * 260, 260, 64, 1)
ODD_K = (61 * 132, 132, 64, 1)

# Calls that the kernels for few keys take, forward and backward; and calls that they leave.
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "two rows": {"seqlen_q": 2},
    "one key": {"seqlen_k": 1},
    "most keys": {"seqlen_k": 64},
    "smallest heads": {"head_dim": 8},
    "heads between the tiles": {"head_dim": 24},
    "causal": {"is_causal": 1},
    "causal, rows without keys": {"is_causal": 1, "seqlen_k": 20},
    "negative scale": {"softmax_scale": -1.0},
    "scale of zero": {"softmax_scale": 0.0},
    "bias": {"bias": tensor(SCORES)},
    "fp32 bias": {"bias": tensor(SCORES, FLOAT32)},
    "bias by columns": {"bias": tensor(SCORES, stride=(4 * 60 * 61, 60 * 61, 1, 60))},
    "bias off 16 bytes": {"bias": tensor(SCORES, data=SOME_ADDRESS + 2)},
    "bias of kv heads": {"bias": tensor((1, 2, 60, 61))},
    "bias for each key": {"bias": tensor((2, 4, 1, 61))},
    "bias for each row": {"bias": tensor((2, 4, 60, 1))},
    "dense mask": {"mask": mask(2, 1, 60, 61)},
    "row mask": {"mask": mask(1, 4, 60, 1)},
    "key mask": {"mask": mask(2, 1, 1, 61)},
    "key mask of kv heads": {"mask": mask(2, 2, 1, 61)},
    "expanded key mask": {"mask": mask(2, 4, 60, 61, stride=(61, 0, 0, 1))},
    "expanded mask": {"mask": mask(2, 4, 60, 61, stride=(0, 0, 61, 1))},
    "apart": {
        "q": q_like(stride=(60 * 264, 264, 64, 1)),
        "k": k_like(stride=(61 * 192, 192, 64, 1)),
    },
    "rest of lse": {"softmax_lse_rest": tensor((2, 4, 60), FLOAT32)},
}
LEFT: dict[str, dict[str, Any]] = {
    "many keys": {"seqlen_k": 129},
    "one row": {"seqlen_q": 1},
    "wide heads": {"head_dim": 72},
    "softcap": {"softcap": 1.0},
    "q off 16 bytes": {"q": q_like(data=SOME_ADDRESS + 8)},
    "k off 16 bytes": {"k": k_like(data=SOME_ADDRESS + 8)},
    "v off 16 bytes": {"v": k_like(data=SOME_ADDRESS + 8)},
    "out off 16 bytes": {"out": q_like(data=SOME_ADDRESS + 8)},
    "odd rows of q": {"q": q_like(stride=ODD_Q)},
    "odd rows of v": {"v": k_like(stride=ODD_K)},
    "odd rows of out": {"out": q_like(stride=ODD_Q)},
    "selection": {"is_causal": 1, "selection": abi.selection(60, 61, 128)},
    "selection for all rows": {"selection": abi.selection(60, 61, 128, causal=False)},
    "window": {"is_causal": 1, "selection": abi.selection(60, 61, 128), "window": 20},
}
BOTH = [*((fields, 1) for fields in TAKEN.values()), *((fields, 0) for fields in LEFT.values())]
NAMES = [*TAKEN, *LEFT]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("fields, short", BOTH, ids=NAMES)
def test_which_calls_are_short(
    plan: Probe, fields: dict[str, Any], short: int, kernels: str
) -> None:
    arguments = SMALL | fields
    found = plan.fwd(kernels, SMS, **arguments), plan.bwd(kernels, SMS, **arguments)
    assert [each["short"] for each in found] == [short, short]
    for each in found if short else ():
        # All chips have the same kernels, with one tile shape.
        assert (each["arch"], each["dim_tile"], each["workspace_bytes"]) == (80, 64, 0)
        is_plain = not {"bias", "mask"} & fields.keys() and fields.get("softmax_scale", 1.0) > 0
        assert each["level"] == (PLAIN if is_plain else GENERAL)


@pytest.mark.parametrize("heads, short", [(1, 1), (2, 1), (4, 0)])
def test_a_group_shares_the_keys_that_are_cleared(plan: Probe, heads: int, short: int) -> None:
    """Keys that a mask hides from all rows may hold NaN, and become zeros in the tile of a kv head.

    So all heads of a group have to share such a mask in the backward.
    """
    hides = mask(2, heads, 1, 61)
    assert plan.fwd(SM90, SMS, **SMALL, mask=hides)["short"]
    assert plan.bwd(SM90, SMS, **SMALL, mask=hides)["short"] == short
    rows = mask(2, heads, 60, 61)
    assert plan.bwd(SM90, SMS, **SMALL, mask=rows)["short"]


@pytest.mark.parametrize("keys, short", [(64, 1), (65, 1), (128, 1), (129, 0)])
@pytest.mark.parametrize("fields", [{}, {"is_causal": 1}, {"gradients": "dv"}])
def test_the_backward_is_for_more_keys(
    plan: Probe, fields: dict[str, Any], keys: int, short: int
) -> None:
    arguments = SMALL | fields | {"seqlen_k": keys}
    assert plan.bwd(SM80, SMS, **arguments)["short"] == short
    # For more than 64 keys Hopper has another kernel, of which a tile has all keys of a head.
    stores_dq = keys > 64 and "gradients" not in fields
    assert plan.bwd(SM90, SMS, **arguments)["short"] == (0 if stores_dq else short)
    narrow = arguments | {"head_dim": 32}
    assert plan.bwd(SM90, SMS, **narrow)["short"] == short
    hidden = arguments | {"mask": mask(2, 1, 1, keys)}
    assert plan.bwd(SM90, SMS, **hidden)["short"] == short
    # With a mask Hopper's other kernel is used if there is enough to do.
    many = hidden | {"batch": 40, "mask": mask(40, 1, 1, keys)}
    assert plan.bwd(SM80, SMS, **many)["short"] == short
    assert plan.bwd(SM90, SMS, **many)["short"] == (0 if stores_dq else short)
    arguments.pop("gradients", None)
    assert plan.fwd(SM90, SMS, **arguments)["short"] == (keys == 64)


@pytest.mark.parametrize("keys, head_dim, short", [(64, 64, 1), (65, 32, 1), (65, 40, 0)])
@pytest.mark.parametrize(
    "letters", ["bias bhqk", "bias bh1k", "bias 1111", "mask bhqk", "mask 11q1"]
)
def test_wide_scores_leave_no_room_for_more(
    plan: Probe, letters: str, keys: int, head_dim: int, short: int
) -> None:
    """With more than 64 keys and head_dims above 32: no bias, and no mask except a key mask."""
    name, axes = letters.split()
    extents = zip(axes, (2, 4, 60, keys), strict=True)
    shape = tuple(1 if axis == "1" else extent for axis, extent in extents)
    operand = {name: mask(*shape) if name == "mask" else tensor(shape)}
    sizes = SMALL | {"seqlen_k": keys, "head_dim": head_dim}
    assert plan.bwd(SM90, SMS, **sizes, **operand)["short"] == short


@pytest.mark.parametrize("kernels", SETS)
def test_packed_sequences_are_not(plan: Probe, kernels: str) -> None:
    lengths = {"total_q": 120, "total_k": 150, "max_seqlen_q": 60, "max_seqlen_k": 61}
    assert not plan.fwd(kernels, packed=True, **lengths)["short"]
    assert not plan.bwd(kernels, packed=True, **lengths)["short"]


def test_calls_without_work_are_not(plan: Probe) -> None:
    assert plan.fwd(**(SMALL | {"seqlen_k": 0}))["no_keys"]
    assert plan.fwd(**(SMALL | {"batch": 0}))["is_empty"]
    assert plan.bwd(**(SMALL | {"seqlen_k": 0}))["zeros"]
    nothing = plan.bwd(**SMALL, gradients="")
    assert not nothing["short"] and not nothing["launches"]


def test_a_build_without_the_units_takes_other_kernels(probe: ctypes.CDLL) -> None:
    other = Probe(probe, short=False)
    for kernels in SETS:
        assert not other.fwd(kernels, **SMALL)["short"]
        found = other.bwd(kernels, **SMALL)
        assert not found["short"] and found["launches"] and found["workspace_bytes"] > 0


@pytest.mark.parametrize("num_splits, short", [(0, 1), (1, 1), (2, 0)])
def test_parts_of_keys_are_for_other_kernels(plan: Probe, num_splits: int, short: int) -> None:
    assert plan.fwd(**SMALL, num_splits=num_splits)["short"] == short


@pytest.mark.parametrize(
    "sizes, fwd, bwd",
    [
        ({"seqlen_q": 256, "nheads_k": 4}, 1, 1),
        ({"seqlen_q": 257, "nheads_k": 4}, 1, 0),
        ({"seqlen_q": 5000}, 1, 0),
        # At most 4 tiles of rows, counted over all heads of a group.
        ({"seqlen_q": 64, "nheads": 4, "nheads_k": 1}, 1, 1),
        ({"seqlen_q": 65, "nheads": 4, "nheads_k": 1}, 1, 0),
        ({"seqlen_q": 65, "nheads": 2, "nheads_k": 1}, 1, 1),
        ({"seqlen_q": 64, "nheads": 5, "nheads_k": 1}, 1, 0),
        # More of them, if there are kv heads enough for the GPU: two for three SMs.
        ({"seqlen_q": 65, "nheads": 16, "nheads_k": 1, "batch": 88}, 1, 1),
        ({"seqlen_q": 65, "nheads": 16, "nheads_k": 1, "batch": 87}, 1, 0),
        ({"seqlen_q": 257, "batch": 2 * SMS}, 1, 0),
    ],
)
def test_many_rows_are_shared_out(plan: Probe, sizes: dict[str, int], fwd: int, bwd: int) -> None:
    assert plan.fwd(SM90, SMS, **(SMALL | sizes))["short"] == fwd
    assert plan.bwd(SM90, SMS, **(SMALL | sizes))["short"] == bwd


@pytest.mark.parametrize(
    "fields, short",
    [
        ({"dout": q_like(data=SOME_ADDRESS + 8)}, 0),
        ({"dout": q_like(stride=ODD_Q)}, 0),
        ({"dsoftmax_lse": tensor((2, 4, 60), FLOAT32)}, 1),
        ({"deterministic": 1}, 1),
    ],
)
def test_what_only_the_backward_has(plan: Probe, fields: dict[str, Any], short: int) -> None:
    found = plan.bwd(**SMALL, **fields)
    assert found["short"] == short
    if short:
        assert bool(found["dlse"]) == ("dsoftmax_lse" in fields)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gradients_off_16_bytes_are_not(plan: Probe, name: str) -> None:
    like = q_like if name == "dq" else k_like
    wanted = "dq dk dv".replace(name, "")
    for data, short in ((SOME_ADDRESS, 1), (SOME_ADDRESS + 8, 0)):
        params = abi.bwd_params(gradients=wanted, **SMALL)
        setattr(params, name, like(data=data))
        fields = {x: getattr(params, x) for x in ("dq", "dk", "dv")}
        assert plan.bwd(gradients="", **SMALL, **fields)["short"] == short


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dq dk", "dq dv", "dk dv"])
def test_some_gradients(plan: Probe, wanted: str) -> None:
    found = plan.bwd(**SMALL, gradients=wanted)
    assert found["short"] and found["level"] == GENERAL
    assert [name for name in ("dq", "dk", "dv") if found[name]] == wanted.split()


@pytest.mark.parametrize(
    "shape, fields, kind",
    [
        (SCORES, {}, DB_TILE),
        (SCORES, {"is_causal": 1}, DB_TILE),
        (SCORES, {"mask": mask(2, 1, 60, 61)}, DB_TILE),
        (SCORES, {"deterministic": 1}, DB_TILE),
        (SCORES, {"seqlen_q": 120}, DB_TILE),
        ((1, 4, 60, 61), {}, DB_ACCUM),
        ((2, 2, 60, 61), {}, DB_ACCUM),
        ((2, 1, 60, 61), {}, DB_ACCUM),
        ((1, 1, 60, 61), {"seqlen_q": 64}, DB_ACCUM),
        ((1, 4, 60, 61), {"seqlen_q": 65}, None),
        ((1, 4, 60, 61), {"deterministic": 1}, None),
        ((2, 4, 1, 61), {}, None),
        ((1, 1, 1, 61), {}, None),
        ((2, 4, 60, 1), {}, None),
        ((1, 1, 1, 1), {}, None),
    ],
)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("wanted", ["dq dk dv dbias", "dbias"])
def test_gradients_of_the_bias(
    plan: Probe,
    shape: tuple[int, ...],
    fields: dict[str, Any],
    kind: int | None,
    dtype: int,
    wanted: str,
) -> None:
    arguments = SMALL | fields
    if shape[2] > 1:
        shape = (*shape[:2], arguments["seqlen_q"], shape[3])
    bias = tensor(shape, dtype)
    found = plan.bwd(SM90, SMS, gradients=wanted, bias=bias, **arguments)
    assert found["short"] == (kind is not None)
    # Without a gradient any such bias is taken.
    assert plan.bwd(SM90, SMS, gradients="dq dk dv", bias=bias, **arguments)["short"]
    if kind is None:
        return
    assert found["dbias_kind"] == kind and found["level"] == GENERAL
    assert not found["dbias_cols_reduced"] and not found["dbias_rows_reduced"]
    # If sums are apart from the gradient, their rows start on 16 bytes.
    is_apart = kind == DB_ACCUM and dtype != FLOAT32
    strides = contiguous((*shape[:3], 64 if is_apart else 61))
    assert found["dbias_row_stride"] == strides[2]
    assert found["dbias_head_stride"] == (strides[1] if shape[1] > 1 else 0)
    assert found["dbias_batch_stride"] == (strides[0] if shape[0] > 1 else 0)
    check_dbias_memory(found, 4 if dtype == FLOAT32 else 2)


def check_dbias_memory(found: Plan, element_bytes: int) -> None:
    """Sums are in fp32 and start as zeros; they lie in dbias itself, or in the workspace."""
    entries = found["dbias_elements"]
    sum_bytes = 4 * entries
    if found["dbias_kind"] == DB_ACCUM and element_bytes == 2:
        assert found["dbias"] == found["dbias_accum"] == found["scratch_zeros"] == WORKSPACE
        keys = found["seqlen_k"]
        sum_bytes = 4 * entries // keys * (-(-keys // 4) * 4)
        assert sum_bytes <= found["scratch_zero_bytes"] == found["workspace_bytes"]
        assert found["workspace_bytes"] < sum_bytes + 256
        assert found["dbias_zero_bytes"] == 0
        return
    assert (found["dbias"], found["dbias_accum"]) == (SOME_ADDRESS, 0)
    assert found["workspace_bytes"] == found["scratch_zero_bytes"] == 0
    is_sum = found["dbias_kind"] == DB_ACCUM
    assert found["dbias_zero_bytes"] == (sum_bytes if is_sum else 0)


def test_a_bias_without_gradient_has_none(plan: Probe) -> None:
    found = plan.bwd(**SMALL, bias=tensor((1, 4, 60, 61)))
    assert found["dbias_kind"] == DB_NONE and found["dbias"] == 0


def shared_bias(sizes: dict[str, Any], dtype: int = BFLOAT16) -> abi.Tensor:
    return tensor((1, sizes["nheads"], sizes["seqlen_q"], sizes["seqlen_k"]), dtype)


@pytest.mark.parametrize("kernels", SETS)
def test_a_block_for_each_batch(plan: Probe, kernels: str) -> None:
    """Unless batches share a bias."""
    sizes = WINDOWS | {"seqlen_q": 130}
    own = tensor((2048, 3, 130, 49))
    heads_share = tensor((2048, 1, 49, 49))
    for more in ({}, {"bias": own}, {"mask": mask(1, 1, 130, 49)}):
        found = plan.fwd(kernels, SMS, **sizes, **more)
        assert (found["slices"], found["blocks"]) == (2048, 2048 * 3 * 3)
        assert found["level"] == (GENERAL if more else PLAIN)
        found = plan.bwd(kernels, SMS, **sizes, **more)
        assert (found["slices"], found["blocks"]) == (2048, 2048 * 3)
        assert found["level"] == (GENERAL if more else PLAIN)
    found = plan.bwd(kernels, SMS, gradients="dq dbias", bias=heads_share, **WINDOWS)
    assert (found["dbias_kind"], found["slices"], found["level"]) == (DB_ACCUM, 2048, GENERAL)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(
    "head_dim, forward, backward",
    # By head_dim an SM has six or five blocks of the forward, and four or three of the backward.
    # With 3 heads that makes 264, 220, 176 and 132 slices at most, of 8, 10, 12 and 16 batches.
    [(32, 256, 171), (64, 205, 128)],
)
def test_blocks_that_share_a_bias_take_several_batches(
    plan: Probe, head_dim: int, forward: int, backward: int, kernels: str
) -> None:
    sizes = WINDOWS | {"head_dim": head_dim}
    # A bias that is expanded over the batches is shared too.
    expanded = tensor((2048, 3, 49, 49), stride=(0, 49 * 49, 49, 1))
    for bias in (shared_bias(sizes), expanded):
        fwd = plan.fwd(kernels, SMS, bias=bias, **sizes)
        bwd = plan.bwd(kernels, SMS, bias=bias, **sizes)
        assert (fwd["slices"], fwd["blocks"], fwd["level"]) == (forward, 3 * forward, FULL)
        assert (bwd["slices"], bwd["blocks"], bwd["level"]) == (backward, 3 * backward, FULL)
    summed = plan.bwd(kernels, SMS, gradients="dq dk dv dbias", bias=shared_bias(sizes), **sizes)
    assert (summed["dbias_kind"], summed["slices"]) == (DB_ACCUM, backward)


def test_blocks_of_more_than_a_tile_have_a_batch_each(plan: Probe) -> None:
    """That is so in the backward; the forward has a block for each tile."""
    rows = WINDOWS | {"seqlen_q": 192, "nheads": 6}
    assert plan.fwd(SM90, SMS, bias=shared_bias(rows), **rows)["slices"] == 44
    for more in ({"seqlen_q": 65}, {"nheads": 6}, {"seqlen_k": 65}):
        sizes = WINDOWS | more
        found = plan.bwd(SM90, SMS, bias=shared_bias(sizes), **sizes)
        assert found["short"] and (found["slices"], found["level"]) == (2048, GENERAL)
    # If each batch has a gradient of its own, nothing is summed over batches.
    expanded = tensor((2048, 3, 49, 49), stride=(0, 49 * 49, 49, 1))
    found = plan.bwd(SM90, SMS, gradients="dq dbias", bias=expanded, **WINDOWS)
    assert (found["dbias_kind"], found["slices"], found["level"]) == (DB_TILE, 2048, GENERAL)


@pytest.mark.parametrize("sms", [1, 58, 132])
@pytest.mark.parametrize("nheads", [1, 5, 32])
@pytest.mark.parametrize("batch", [1, 2, 24, 25, 1000, 4097])
def test_no_slice_is_empty_or_longer_than_need_be(
    plan: Probe, batch: int, nheads: int, sms: int
) -> None:
    sizes = WINDOWS | {"batch": batch, "nheads": nheads, "nheads_k": nheads}
    bias = shared_bias(sizes)
    fwd, bwd = (call(SM80, sms, bias=bias, **sizes) for call in (plan.fwd, plan.bwd))
    for found, blocks_per_sm in ((fwd, 6), (bwd, 4)):
        slices = found["slices"]
        assert 1 <= slices <= batch and found["blocks"] == slices * nheads
        assert found["level"] == (FULL if slices < batch else GENERAL)
        if 2 * nheads > blocks_per_sm * sms:  # a block for all batches would leave places idle
            assert slices == batch
            continue
        # As few batches each as the GPU has places for, and no more blocks than that takes.
        places = max(1, min(batch, blocks_per_sm * sms // nheads))
        most = -(-batch // slices)
        assert most == -(-batch // places) and slices <= places
        assert slices == 1 or most * (slices - 1) < batch


def operands(like: dict[str, abi.Tensor]) -> tuple[dict[str, abi.Tensor], dict[str, int]]:
    """Tensors like these with different addresses and strides, and what the probe should find.

    All of their rows are apart from each other.
    """
    placed, wanted = {}, {}
    for i, (name, view) in enumerate(like.items()):
        address = SOME_ADDRESS + (i << 30)
        extents = [view.shape[n] + (8 * (i + 1) if n > 0 else 0) for n in range(view.ndim)]
        stride = contiguous(extents)
        placed[name] = tensor(view.shape[: view.ndim], view.dtype, stride, address)
        short = name.replace("softmax_", "")
        if name in ("mask", "bias"):
            wanted[f"{name}.ptr"] = address
            fields = [f"{name}.{x}_stride" for x in ("batch", "head", "row", "col")]
        else:
            wanted[short] = address
            axes = ("batch", "row", "head") if view.ndim == 4 else ("batch", "head", "row")
            fields = [f"{short}_stride.{x}" for x in axes]
        if name != "softmax_lse_rest":  # it has those of lse
            wanted |= dict(zip(fields, stride, strict=False))
    placed["softmax_lse_rest"].stride[:] = placed["softmax_lse"].stride[:]
    return placed, wanted


def test_operands_reach_the_kernels(plan: Probe) -> None:
    like = dict.fromkeys(("q", "out"), q_like()) | dict.fromkeys(("k", "v"), k_like())
    like |= dict.fromkeys(("softmax_lse", "softmax_lse_rest"), tensor((2, 4, 60), FLOAT32))
    like |= {"bias": tensor(SCORES), "mask": mask(2, 2, 60, 61)}
    of_bwd = dict.fromkeys(("dout", "dq"), q_like()) | dict.fromkeys(("dk", "dv"), k_like())
    of_bwd["dsoftmax_lse"] = tensor((2, 4, 60), FLOAT32)
    for more, call in (({}, plan.fwd), (of_bwd, plan.bwd)):
        fields, wanted = operands(like | more)
        wanted |= {"bias.head_ratio": 1, "mask.head_ratio": 2, "head_ratio": 2, "is_causal": 1}
        wanted |= SMALL
        arguments: dict[str, Any] = SMALL | fields | ({"gradients": ""} if more else {})
        found = call(is_causal=1, softmax_scale=0.25, **arguments)
        assert found["short"] and found["softmax_scale"] == 0.25
        assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    "given, strides, ratio",
    [
        (mask(2, 1, 60, 61), (60 * 61, 0, 61, 1), 4),
        (mask(2, 2, 60, 61), (2 * 60 * 61, 60 * 61, 61, 1), 2),
        (mask(1, 1, 1, 61), (0, 0, 0, 1), 4),
        (mask(2, 2, 1, 61), (2 * 61, 61, 0, 1), 2),
        (mask(2, 4, 60, 61, stride=(0, 0, 61, 1)), (0, 0, 61, 1), 4),
        (mask(1, 4, 60, 1), (0, 60, 1, 0), 1),
    ],
)
def test_masks_are_read_as_they_are(
    plan: Probe, given: abi.Tensor, strides: tuple[int, ...], ratio: int
) -> None:
    for found in (plan.fwd(**SMALL, mask=given), plan.bwd(**SMALL, mask=given)):
        names = ("batch", "head", "row", "col")
        assert tuple(found[f"mask.{name}_stride"] for name in names) == strides
        assert found["mask.head_ratio"] == ratio
