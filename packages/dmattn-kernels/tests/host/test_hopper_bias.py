"""Which backward calls with a dense bias Hopper's kernels compute, and where its gradient goes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from abi import BFLOAT16, FLOAT32, Tensor, tensor
from probe import (
    DB_ACCUM,
    DB_KEY,
    DB_NONE,
    DB_PAIR,
    DB_TILE,
    DIRECT,
    KEY,
    SM90,
    TILE,
    Plan,
    Probe,
    mask,
)

SMS = 132
LENGTH = 4096
DENSE = (1, 16, LENGTH, LENGTH)
OF_PAIRS = (1, 8, LENGTH, LENGTH)
OF_GROUPS = (1, 4, LENGTH, LENGTH)
# The heads of a group share a bias, but each of them has a mask of its own.
OTHER_MASKS = {
    "nheads_k": 4,
    "bias": tensor(OF_GROUPS),
    "mask": mask(1, 16, LENGTH, LENGTH),
}
WITH_DBIAS = "dq dk dv dbias"


def plan_of(
    probe: ctypes.CDLL, gradients: str = "dq dk dv", round: int = 0, **arguments: Any
) -> Plan:
    fields: dict[str, Any] = {"batch": 1, "head_dim": 128, "nheads": 16, "nheads_k": 16}
    fields |= {"seqlen_q": LENGTH, "seqlen_k": LENGTH} | arguments
    fields.setdefault("bias", tensor(DENSE))
    rows = (fields["batch"], fields["nheads"], fields["seqlen_q"])
    fields.setdefault("softmax_lse_rest", tensor(rows, FLOAT32))
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, round=round, **fields)


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ({}, DB_NONE),
        ({"head_dim": 40}, DB_NONE),
        ({"gradients": WITH_DBIAS}, DB_TILE),
        ({"gradients": WITH_DBIAS, "head_dim": 64, "is_causal": 1}, DB_TILE),
        (
            {"gradients": WITH_DBIAS, "nheads_k": 4, "bias": tensor(OF_GROUPS)},
            DB_ACCUM,
        ),
        ({"gradients": WITH_DBIAS, "bias": tensor((1, 1, LENGTH, LENGTH))}, DB_ACCUM),
        ({"gradients": WITH_DBIAS, "batch": 2}, DB_PAIR),
        ({"gradients": WITH_DBIAS, "nheads_k": 8, "bias": tensor(OF_PAIRS)}, DB_PAIR),
        ({"gradients": WITH_DBIAS, "batch": 3}, DB_ACCUM),
        ({"bias": tensor(DENSE, stride=(0, 0, LENGTH, 1))}, DB_NONE),
        (
            {
                "seqlen_q": 500,
                "seqlen_k": 127,
                "bias": tensor((1, 16, 500, 127), stride=(64000 * 16, 64000, 128, 1)),
            },
            DB_NONE,
        ),
    ],
    ids=[
        *("no gradient", "small heads", "own entries", "causal", "bias of groups"),
        *(
            "one bias for all heads",
            "one for two batches",
            "bias of pairs",
            "one for three batches",
            "expanded",
            "odd keys, even rows",
        ),
    ],
)
def test_what_they_compute(probe: ctypes.CDLL, arguments: dict[str, Any], kind: int) -> None:
    plan = plan_of(probe, **arguments)
    assert plan["bias.kind"] == TILE and plan["dbias_kind"] == kind
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    # Logits stay in natural units, so that a bias of finfo.min does not overflow.
    assert plan["lse_scale"] == 1 and plan["rest_scale"] > 1
    assert bool(plan["dbias"]) == (kind != DB_NONE)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "arguments, kind",
    [
        ({}, DB_NONE),
        ({"gradients": WITH_DBIAS, "is_causal": 1}, DB_TILE),
        ({"gradients": WITH_DBIAS, "batch": 2}, DB_ACCUM),
        ({"gradients": WITH_DBIAS, "bias": tensor((1, 1, LENGTH, LENGTH), FLOAT32)}, DB_ACCUM),
        ({"seqlen_k": 4092, "bias": tensor((1, 1, LENGTH, 4092), FLOAT32)}, DB_NONE),
    ],
    ids=["no gradient", "own entries, causal", "two batches", "one for all heads", "odd keys"],
)
def test_fp32_bias(probe: ctypes.CDLL, arguments: dict[str, Any], kind: int, head_dim: int) -> None:
    fields = {"bias": tensor(DENSE, FLOAT32), "head_dim": head_dim} | arguments
    plan = plan_of(probe, **fields)
    assert plan["bias.kind"] == DIRECT and plan["dbias_kind"] == kind
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    # Gradients of a shared bias are added up in dbias itself.
    assert plan["once_zero_bytes"] == 0
    is_added_to = kind == DB_ACCUM or plan["is_causal"]
    entries = plan["dbias_elements"]
    assert plan["dbias_zero_bytes"] == (4 * entries if is_added_to else 0)


@pytest.mark.parametrize("keys, arch", [(1 << 29, 90), ((1 << 29) + 4096, 80)])
def test_rows_of_a_bias_are_no_longer_than_32_bits_count(
    probe: ctypes.CDLL, keys: int, arch: int
) -> None:
    fields: dict[str, Any] = {"batch": 1, "nheads": 64, "nheads_k": 1, "head_dim": 64}
    fields |= {"seqlen_q": 4096, "seqlen_k": keys, "bias": tensor((1, 1, 4096, keys), FLOAT32)}
    assert Probe(probe).fwd(SM90, SMS, **fields)["arch"] == arch
    assert plan_of(probe, **fields)["arch"] == arch


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("heads, with_mask", [(1, False), (4, False), (4, True)])
def test_bias_of_keys(probe: ctypes.CDLL, heads: int, with_mask: bool, dtype: int) -> None:
    fields: dict[str, Any] = {"batch": 2, "nheads_k": 4}
    if with_mask:
        fields["mask"] = mask(1, 1, LENGTH, LENGTH)
    plan = plan_of(probe, WITH_DBIAS, bias=tensor((2, heads, 1, LENGTH), dtype), **fields)
    assert (plan["bias.kind"], plan["dbias_kind"]) == (KEY, DB_KEY)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 64, 128)
    assert plan["lse_scale"] == 1 and plan["rest_scale"] > 1
    assert plan["dbias_cols_reduced"] and plan["once_zero_bytes"] == 4 * 2 * 16 * LENGTH


@pytest.mark.parametrize("of_mask", [(1, 1), (2, 4), (2, 16)])
def test_a_mask_beside_a_bias(probe: ctypes.CDLL, of_mask: tuple[int, int]) -> None:
    """dbias starts as zeros, since tiles of which the mask keeps nothing are never written."""
    fields = {"batch": 2, "nheads_k": 4, "mask": mask(*of_mask, LENGTH, LENGTH)}
    plan = plan_of(probe, WITH_DBIAS, bias=tensor((2, 16, LENGTH, LENGTH)), **fields)
    assert (plan["arch"], plan["dbias_kind"]) == (90, DB_TILE)
    assert plan["mask.bits"] and plan["dbias_zero_bytes"] == 2 * 2 * 16 * LENGTH * LENGTH


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("of_mask, serves_fp32", [((1, 1), 1), ((2, 4), 1), ((2, 16), 0)])
def test_a_key_mask_beside_a_dense_bias(
    probe: ctypes.CDLL, of_mask: tuple[int, int], serves_fp32: int, dtype: int
) -> None:
    """The mask's keys are not listed, as the bias would then be read number by number."""
    fields = {"batch": 2, "nheads_k": 4, "mask": mask(*of_mask, 1, LENGTH)}
    plan = plan_of(probe, WITH_DBIAS, bias=tensor((2, 16, LENGTH, LENGTH), dtype), **fields)
    assert plan["arch"] == (90 if dtype == BFLOAT16 or serves_fp32 else 80)
    assert plan["dbias_kind"] == DB_TILE and not plan["gathered"]
    entries = 2 * 16 * LENGTH * LENGTH
    assert plan["mask.bits"] and plan["dbias_zero_bytes"] == entries * (
        2 if dtype == BFLOAT16 else 4
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"bias": tensor(DENSE, FLOAT32), "mask": mask(1, 1, LENGTH, LENGTH)},
        {"bias": tensor(DENSE, FLOAT32, (0, LENGTH * LENGTH, 1, LENGTH))},
        {"bias": tensor(DENSE, stride=(0, 0, 0, 1)), "gradients": WITH_DBIAS},
        {"bias": tensor(DENSE, stride=(0, LENGTH * LENGTH, 1, LENGTH))},
        {"seqlen_k": 4095, "bias": tensor((1, 16, LENGTH, 4095)), "deterministic": 1},
        {"bias": tensor(DENSE, stride=(0, LENGTH * 4100, 4100, 1)), "deterministic": 1},
        {"gradients": WITH_DBIAS, "deterministic": 1, **OTHER_MASKS},
        {"softcap": 30.0},
        {"bias": tensor((1, 16, LENGTH, 1)), "mask": mask(1, 1, 1, LENGTH)},
        {"softmax_lse_rest": Tensor()},
    ],
    ids=[
        *("fp32 and mask", "fp32, strided columns", "of keys, all gradients"),
        *(
            "strided columns",
            "odd rows, deterministic",
            "rows on 8 bytes, deterministic",
            "gradient of groups with other masks, deterministic",
            "softcap",
            "of rows, key mask",
            "no rest of lse",
        ),
    ],
)
def test_what_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    assert plan_of(probe, **arguments)["arch"] == 80


@pytest.mark.parametrize("deterministic", [0, 1])
@pytest.mark.parametrize(
    "arguments",
    [
        {"nheads_k": 4, "is_causal": 1},
        {"nheads_k": 1},
        {"nheads_k": 2, "seqlen_q": 200, "seqlen_k": 256},
        {"nheads_k": 4, "head_dim": 256},
        {"nheads": 7, "nheads_k": 1, "seqlen_q": 16384, "seqlen_k": 16384},
        {"nheads": 5, "nheads_k": 1, "seqlen_q": 8192, "seqlen_k": 8192},
    ],
    ids=["causal", "one key head", "short", "wide heads", "rounds of 4 and 3", "of 2, 2 and 1"],
)
def test_biases_of_keys_in_each_head_of_a_group(
    probe: ctypes.CDLL, arguments: dict[str, Any], deterministic: int
) -> None:
    """An item has the bias of one head, so that each head of a group is a part, in all rounds."""
    keys, nheads = arguments.get("seqlen_k", LENGTH), arguments.get("nheads", 16)
    fields = {"bias": tensor((1, nheads, 1, keys)), "deterministic": deterministic, **arguments}
    first = plan_of(probe, WITH_DBIAS, **fields)
    assert first["arch"] == 90 and first["dbias_kind"] == DB_KEY and not first["per_group"]
    assert first["dk_slots"] and first["dbias_cols"]
    for number in range(first["rounds"]):
        plan = plan_of(probe, WITH_DBIAS, round=number, **fields)
        heads = plan["group_end"] - plan["group_begin"]
        assert plan["num_splits"] >= heads and plan["num_splits"] % heads == 0
    # Copies of one bias count as one bias, unless each of them has a gradient.
    copies = fields | {"bias": tensor((1, nheads, 1, keys), stride=(0, 0, 0, 1))}
    shared = fields | {"bias": tensor((1, 1, 1, keys))}
    assert plan_of(probe, **copies)["num_splits"] == plan_of(probe, **shared)["num_splits"]
    assert plan_of(probe, WITH_DBIAS, **copies)["num_splits"] == first["num_splits"]


@pytest.mark.parametrize("length, arch", [(4096, 90), (32768, 80)])
def test_sums_of_single_heads_keep_to_the_limit(probe: ctypes.CDLL, length: int, arch: int) -> None:
    """dq, dk and dv of one head in fp32 take more than 1.5 times q, k and v of two heads."""
    fields = {"nheads": 2, "nheads_k": 1, "seqlen_q": length, "seqlen_k": length, "is_causal": 1}
    plan = plan_of(probe, bias=tensor((1, 2, 1, length)), **fields)
    assert plan["arch"] == arch
    assert plan["workspace_bytes"] <= max(1.5 * 4 * length * 128 * 2, 9 << 20)


@pytest.mark.parametrize(
    "arguments, kind",
    [
        ({"bias": tensor(DENSE, stride=(0, LENGTH * 4100, 4100, 1))}, DB_NONE),
        ({"bias": tensor(DENSE, FLOAT32, (0, LENGTH * 4098, 4098, 1))}, DB_NONE),
        ({"seqlen_k": 4095, "bias": tensor((1, 16, LENGTH, 4095)), "is_causal": 1}, DB_TILE),
        ({"seqlen_k": 4094, "bias": tensor((1, 1, LENGTH, 4094), FLOAT32)}, DB_ACCUM),
        ({"seqlen_k": 4095, "batch": 2, "bias": tensor((1, 16, LENGTH, 4095))}, DB_ACCUM),
        (
            {"seqlen_k": 4094, "bias": tensor((1, 1, LENGTH, 4094), stride=(0, 0, LENGTH, 1))},
            DB_ACCUM,
        ),
    ],
    ids=[
        *("rows on 8 bytes", "fp32, rows on 8 bytes", "odd rows of the gradient"),
        *("fp32, rows of the gradient on 8 bytes", "odd rows of two batches"),
        "odd sums of the gradient",
    ],
)
def test_rows_that_tma_does_not_take(
    probe: ctypes.CDLL, arguments: dict[str, Any], kind: int
) -> None:
    plan = plan_of(probe, WITH_DBIAS if kind != DB_NONE else "dq dk dv", **arguments)
    assert (plan["arch"], plan["block_m"], plan["dbias_kind"]) == (90, 64, kind)


@pytest.mark.parametrize(
    "arguments, sharers",
    [
        ({}, 0),
        ({"mask": mask(1, 1, LENGTH, LENGTH), "nheads_k": 4}, 0),
        ({"bias": tensor(DENSE, FLOAT32)}, 0),
        ({"bias": tensor((1, 1, 1, LENGTH), FLOAT32)}, 0),
        ({"gradients": WITH_DBIAS}, 0),
        ({"gradients": WITH_DBIAS, "batch": 2}, 0),
        ({"gradients": WITH_DBIAS, "batch": 3}, 3),
        ({"gradients": WITH_DBIAS, "bias": tensor((1, 1, 1, LENGTH)), "nheads_k": 4}, 0),
    ],
    ids=[
        *("16 bits", "a mask, groups", "fp32", "of keys", "gradient"),
        *("two that share it", "three that share it", "gradient of keys"),
    ],
)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_a_fixed_order(
    probe: ctypes.CDLL, arguments: dict[str, Any], sharers: int, head_dim: int
) -> None:
    """Blocks of keys take turns at dq, and batches at a dbias that they share.

    They take no turns at a dbias that is a sum of two terms, whose order makes no difference.
    """
    plan = plan_of(probe, **arguments, head_dim=head_dim, deterministic=1)
    assert (plan["arch"], plan["per_batch"], plan["bias_pairs"]) == (90, 0, 0)
    assert plan["dq_semaphore"] and plan["work_counter"]
    assert bool(plan["dbias_semaphore"]) == (sharers > 0)
    other = plan_of(probe, **arguments, head_dim=head_dim)
    assert not other["dq_semaphore"] and not other["dbias_semaphore"]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(
    "of_bias, of_mask",
    [
        ((1, 1), None),
        ((1, 4), None),
        ((1, 16), None),
        ((3, 1), None),
        ((3, 4), None),
        ((1, 1), (1, 1)),
        ((1, 4), (1, 4)),
        ((3, 1), (3, 1)),
    ],
)
def test_turns_at_a_gradient_that_is_shared(
    probe: ctypes.CDLL, of_bias: tuple[int, int], of_mask: tuple[int, int] | None, dtype: int
) -> None:
    """There is one launch, with a counter for each tile of the gradient that starts at zero."""
    bias = tensor((*of_bias, LENGTH, LENGTH), dtype)
    given: dict[str, Any] = {"bias": bias, "batch": 3, "nheads_k": 4}
    if of_mask is not None:
        given["mask"] = mask(*of_mask, 1 if dtype == FLOAT32 else LENGTH, LENGTH)
    plan = plan_of(probe, WITH_DBIAS, deterministic=1, **given)
    assert (plan["arch"], plan["dbias_kind"]) == (90, DB_ACCUM)
    assert (plan["per_batch"], plan["per_head_k"], plan["per_group"]) == (0, 0, 0)
    batches = 1 if of_bias[0] == 1 else plan["round.batches"]
    heads = 1 if of_bias[1] == 1 else plan["round.heads_k"] * of_bias[1] // 4
    tiles = batches * heads * (LENGTH // 64) * (LENGTH // 128)
    first = plan["dbias_semaphore"]
    cleared = plan["scratch_zeros"] + plan["once_zero_bytes"]
    assert cleared <= first and first + 4 * tiles <= cleared + plan["counter_zero_bytes"]
    others = [plan[name] for name in ("dq_semaphore", "work_counter", "dkv_semaphore")]
    assert all(not first <= other < first + 4 * tiles for other in others)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    "of_bias, of_mask", [((1, 16), (3, 1)), ((3, 1), (3, 16)), ((1, 1), (3, 1))]
)
def test_others_that_share_it_have_other_tiles(
    probe: ctypes.CDLL, of_bias: tuple[int, int], of_mask: tuple[int, int], head_dim: int
) -> None:
    """With different masks nobody could tell whose turn it is, so launches follow one another."""
    bias = tensor((*of_bias, LENGTH, LENGTH))
    given = {"bias": bias, "batch": 3, "mask": mask(*of_mask, LENGTH, LENGTH)}
    plan = plan_of(probe, WITH_DBIAS, deterministic=1, head_dim=head_dim, **given)
    assert plan["arch"] == 90 and not plan["dbias_semaphore"]
    shares_heads = of_bias[1] == 1
    assert (plan["per_batch"], plan["per_head_k"]) == (1, int(shares_heads))


def test_launches_that_follow_one_another(probe: ctypes.CDLL) -> None:
    """There is a launch for each batch and head that share dbias, if batches have different masks.

    Each launch counts its own items.
    """
    bias = tensor((1, 1, LENGTH, LENGTH), FLOAT32)
    given = {"bias": bias, "deterministic": 1, "batch": 3, "nheads": 8, "nheads_k": 8}
    given["mask"] = mask(3, 1, 1, LENGTH)
    found = [
        plan_of(probe, WITH_DBIAS, launch=(batch, head, 0), **given)
        for batch in range(3)
        for head in range(8)
    ]
    assert {(plan["arch"], plan["per_batch"], plan["per_head_k"]) for plan in found} == {(90, 1, 1)}
    assert {plan["blocks"] for plan in found} == {LENGTH // 128}
    counters = [plan["work_counter"] for plan in found]
    assert counters == [counters[0] + 4 * i for i in range(24)]
    assert counters[-1] < found[0]["scratch_zeros"] + found[0]["counter_zero_bytes"]


@pytest.mark.parametrize("is_causal", [0, 1])
def test_only_tiles_that_no_row_sees_are_cleared(probe: ctypes.CDLL, is_causal: int) -> None:
    plan = plan_of(probe, gradients=WITH_DBIAS, is_causal=is_causal)
    assert plan["dbias_zero_bytes"] == is_causal * 2 * 16 * LENGTH * LENGTH


@pytest.mark.parametrize("batch, bytes_of_entry", [(2, 0), (3, 4)])
def test_two_terms_need_no_sums_beside(probe: ctypes.CDLL, batch: int, bytes_of_entry: int) -> None:
    """Two terms are added up in the gradient itself, which starts as zeros."""
    plan = plan_of(probe, gradients=WITH_DBIAS, batch=batch)
    entries = 16 * LENGTH * LENGTH
    assert plan["dbias_zero_bytes"] == (0 if bytes_of_entry else 2 * entries)
    assert plan["once_zero_bytes"] == bytes_of_entry * entries


@pytest.mark.parametrize("keys, pitch", [(4093, 4096), (4096, 4096), (4098, 4100)])
@pytest.mark.parametrize("batch", [3, 4])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_rows_of_sums_start_on_16_bytes(
    probe: ctypes.CDLL, keys: int, pitch: int, batch: int, dtype: int
) -> None:
    """Sums of a 16-bit gradient are apart from it, those of an fp32 one only if copying them pays.

    That is if its rows do not start on 16 bytes and enough scores share an entry.
    """
    bias = tensor((1, 16, LENGTH, keys), dtype)
    plan = plan_of(probe, WITH_DBIAS, batch=batch, seqlen_k=keys, bias=bias)
    assert (plan["arch"], plan["dbias_kind"]) == (90, DB_ACCUM)
    is_apart = dtype == BFLOAT16 or (keys % 4 > 0 and batch == 4)
    assert plan["dbias_row_stride"] == (pitch if is_apart else keys)
    assert plan["dbias_head_stride"] == LENGTH * plan["dbias_row_stride"]
    assert bool(plan["dbias_accum"]) == is_apart
    entries = 4 * 16 * LENGTH
    assert plan["once_zero_bytes"] == (entries * pitch if is_apart else 0)
    assert plan["dbias_zero_bytes"] == (0 if is_apart else entries * keys)


PAIRS_NONE, PAIRS_HEADS, PAIRS_BATCHES = range(3)


@pytest.mark.parametrize(
    "batch, of_bias, arguments, pairs, kind",
    [
        (2, (1, 16), {}, PAIRS_BATCHES, DB_TILE),
        (2, (1, 16), {"is_causal": 1}, PAIRS_BATCHES, DB_TILE),
        (4, (1, 16), {}, PAIRS_BATCHES, DB_ACCUM),
        (2, (1, 1), {}, PAIRS_BATCHES, DB_ACCUM),
        (2, (2, 1), {}, PAIRS_HEADS, DB_ACCUM),
        (1, (1, 1), {}, PAIRS_HEADS, DB_ACCUM),
        (3, (1, 1), {}, PAIRS_HEADS, DB_ACCUM),
        (2, (2, 1), {"nheads_k": 4}, PAIRS_HEADS, DB_ACCUM),
        (2, (2, 1), {"head_dim": 40}, PAIRS_HEADS, DB_ACCUM),
        (3, (1, 16), {}, PAIRS_NONE, DB_ACCUM),
        (2, (2, 16), {}, PAIRS_NONE, DB_TILE),
        (4, (4, 1), {"nheads_k": 1}, PAIRS_NONE, DB_ACCUM),
        (2, (2, 4), {"nheads_k": 4}, PAIRS_NONE, DB_ACCUM),
        (2, (1, 16), {"head_dim": 128}, PAIRS_NONE, DB_PAIR),
        (2, (1, 16), {"gradients": "dq dk dv"}, PAIRS_NONE, DB_NONE),
        (2, (1, 16), {"mask": mask(1, 1, LENGTH, LENGTH)}, PAIRS_NONE, DB_PAIR),
        (2, (1, 16), {"seqlen_q": 1104, "seqlen_k": 1104}, PAIRS_NONE, DB_PAIR),
    ],
)
def test_pairs_that_share_a_bias(
    probe: ctypes.CDLL,
    batch: int,
    of_bias: tuple[int, int],
    arguments: dict[str, Any],
    pairs: int,
    kind: int,
) -> None:
    """Two heads or batches that share a bias have one thread block, which sums their gradients."""
    fields: dict[str, Any] = {"gradients": WITH_DBIAS, "head_dim": 64, "batch": batch} | arguments
    rows, keys = fields.get("seqlen_q", LENGTH), fields.get("seqlen_k", LENGTH)
    plan = plan_of(probe, bias=tensor((*of_bias, rows, keys)), **fields)
    assert (plan["arch"], plan["bias_pairs"], plan["dbias_kind"]) == (90, pairs, kind)
    is_cleared = kind == DB_PAIR or (kind == DB_TILE and plan["is_causal"])
    assert plan["dbias_zero_bytes"] == (2 * plan["dbias_elements"] if is_cleared else 0)
    assert plan["once_zero_bytes"] == (4 * plan["dbias_elements"] if kind == DB_ACCUM else 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", range(257, 265))
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("batches", [1, 4])
def test_sums_in_a_fixed_order_of_any_number_of_keys(
    probe: ctypes.CDLL, batches: int, dtype: int, keys: int, head_dim: int
) -> None:
    """The rows of the bias start on 16 bytes, whatever the number of keys.

    If many scores share its gradient, sums lie apart from that, and its rows may start anywhere;
    otherwise they start on 16 bytes, too.
    """
    shape, pitch = (batches, 4, 200, keys), 264

    def apart(step: int) -> Tensor:
        return tensor(shape, dtype, [4 * 200 * step, 200 * step, step, 1])

    call: dict[str, Any] = {"batch": 4, "seqlen_q": 200, "seqlen_k": keys, "nheads": 4}
    call |= {"nheads_k": 4, "head_dim": head_dim, "deterministic": 1}
    call |= {"bias": apart(pitch), "dbias": apart(keys if batches == 1 else pitch)}
    call["softmax_lse_rest"] = tensor((4, 4, 200), FLOAT32)
    plan = Probe(probe).bwd(SM90, SMS, gradients="dq dk dv", **call)
    assert plan["arch"] == 90
    if batches == 1:
        assert plan["dbias_row_stride"] % 4 == 0


@pytest.mark.parametrize(
    "head_dim, arguments, block_m",
    [
        (64, {}, 96),
        (40, {"is_causal": 1}, 96),
        (128, {}, 64),
        (64, {"mask": mask(1, 1, LENGTH, LENGTH)}, 64),
        (64, {"deterministic": 1}, 64),
    ],
)
def test_a_bias_for_each_key_alone_has_the_tiles_of_none(
    probe: ctypes.CDLL, head_dim: int, arguments: dict[str, Any], block_m: int
) -> None:
    bias = tensor((1, 16, 1, LENGTH))
    plan = plan_of(probe, WITH_DBIAS, head_dim=head_dim, bias=bias, **arguments)
    assert (plan["arch"], plan["block_m"], plan["dbias_kind"]) == (90, block_m, DB_KEY)
