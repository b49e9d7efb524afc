"""How many parts Hopper's backward cuts tiles of keys into, in calls whose best number is measured.

The comments have microseconds on an H200, bfloat16, with the number of parts forced
(docs/kernels/backward.md).
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

import abi
from abi import BFLOAT16, FLOAT32, tensor
from probe import SM90, Plan, Probe, mask

SMS = 132
Shape = tuple[int, int, int, int, int]  # batch, length, heads, heads of keys, head_dim


def plan_of(
    probe: ctypes.CDLL, shape: Shape, causal: int, dbias: bool = False, **arguments: Any
) -> Plan:
    batch, length, heads, heads_k, head_dim = shape
    fields: dict[str, Any] = {"batch": batch, "nheads": heads, "nheads_k": heads_k}
    fields |= {"head_dim": head_dim, "seqlen_q": length, "seqlen_k": length}
    fields |= {"is_causal": causal} | arguments
    gradients = "dq dk dv dbias" if dbias else "dq dk dv"
    if "bias" in fields:
        fields["softmax_lse_rest"] = tensor((batch, heads, length), FLOAT32)
    return Probe(probe).bwd(SM90, SMS, gradients=gradients, **fields)


@pytest.mark.parametrize(
    "shape, causal, rounds, parts",
    [
        # Rounds of two kv heads and of one, or of two sequences and one: 939 in four parts, which
        # suit both rounds, 1197 in two, which suit the first alone.
        ((3, 4096, 8, 1, 128), 0, 2, 4),
        ((1, 4096, 24, 3, 64), 0, 2, 4),
        # Up to 2048 rows there is more room for sums: 59 in four parts, 98 in two rounds.
        ((3, 512, 16, 4, 128), 1, 1, 4),
        # 59 in four parts, 73 in eight and 95 in one.
        ((1, 777, 24, 6, 128), 1, 1, 4),
        # 55 in eight, 66 in twelve and 96 in one.
        ((1, 1500, 8, 2, 96), 1, 1, 8),
        # 137 in one, 165 in four, which take two rounds.
        ((2, 1500, 12, 6, 128), 1, 1, 1),
        # 157 in three, as one item for each SM, and 227 in one.
        ((4, 577, 16, 2, 64), 0, 1, 3),
        # Rows of several kv heads that leave L2: 3138 in 16, 3524 in four.
        ((8, 3000, 32, 2, 128), 1, 2, 16),
        # 4.60 to 4.66 ms in two parts or more, 9.19 in one.
        ((1, 16384, 16, 1, 128), 1, 2, 8),
    ],
)
def test_parts(probe: ctypes.CDLL, shape: Shape, causal: int, rounds: int, parts: int) -> None:
    plan = plan_of(probe, shape, causal)
    assert (plan["arch"], plan["rounds"], plan["num_splits"]) == (90, rounds, parts)


@pytest.mark.parametrize(
    "shape, of_bias, dtype, causal, rounds, parts",
    [
        # An fp32 bias that all heads share: 722 with a head each, 1000 in two parts of two heads.
        ((1, 8192, 4, 1, 64), (1, 1), FLOAT32, 0, 1, 4),
        # Parts of its heads alone: two are the most that the last round has heads for.
        ((1, 8192, 8, 1, 192), (1, 1), FLOAT32, 1, 3, 2),
        # Two sequences share the biases of heads: 816, and 944 in three rounds of four parts.
        ((3, 4096, 3, 3, 128), (1, 3), BFLOAT16, 0, 1, 1),
        # Each sequence has its bias: 743 in two rounds of six parts, 844 in one.
        ((2, 3000, 12, 6, 64), (2, 1), BFLOAT16, 0, 2, 6),
        # Pairs of heads that share a bias read it once: 93, and 108 in two parts.
        ((1, 1000, 20, 20, 64), (1, 1), BFLOAT16, 0, 1, 1),
    ],
)
def test_parts_beside_a_bias(
    probe: ctypes.CDLL,
    shape: Shape,
    of_bias: tuple[int, int],
    dtype: int,
    causal: int,
    rounds: int,
    parts: int,
) -> None:
    bias = tensor((*of_bias, shape[1], shape[1]), dtype)
    plan = plan_of(probe, shape, causal, dbias=True, bias=bias)
    assert (plan["arch"], plan["rounds"], plan["num_splits"]) == (90, rounds, parts)


def test_parts_beside_a_window(probe: ctypes.CDLL) -> None:
    """835 in two parts, 851 in four or eight, and 1097 in three of unequal numbers of heads."""
    window = abi.selection(4096, 4096, 1152, 1, 1)
    plan = plan_of(probe, (2, 4096, 32, 2, 128), 1, window=1024, selection=window)
    assert plan["arch"] == 90 and plan["num_splits"] in (2, 4, 8)


@pytest.mark.parametrize(
    "shape, parts",
    [
        # 336 in eight parts, 404 in four.
        ((1, 2048, 24, 3, 128), 8),
        # 239 in three parts, one item for each SM in each of two rounds, and 283 in eight.
        ((16, 640, 8, 1, 128), 3),
    ],
)
def test_parts_beside_a_mask(probe: ctypes.CDLL, shape: Shape, parts: int) -> None:
    plan = plan_of(probe, shape, 0, mask=mask(1, 1, shape[1], shape[1]))
    assert (plan["arch"], plan["num_splits"]) == (90, parts)


@pytest.mark.parametrize(
    "shape, keys",
    [
        ((8, 384, 40, 8, 128), 384),
        ((16, 384, 28, 4, 64), 384),
        ((4, 512, 28, 4, 192), 512),
        ((3, 691, 9, 3, 192), 691),
        # More rows than keys, of which the first see none.
        ((1, 10951, 2, 1, 128), 757),
        ((1, 9816, 16, 1, 128), 201),
        ((1, 4096, 16, 16, 128), 256),
    ],
)
def test_few_parts_are_no_reason_for_others(probe: ctypes.CDLL, shape: Shape, keys: int) -> None:
    """Hopper's kernels take them. More parts would keep thread blocks busy, but cost time."""
    assert plan_of(probe, shape, 1, seqlen_k=keys)["arch"] == 90


@pytest.mark.parametrize(
    "shape, causal, fields, parts",
    [
        ((1, 8192, 7, 1, 192), 1, {}, [3, 3, 3]),
        ((1, 2050, 5, 1, 160), 1, {"seqlen_k": 5000}, [3, 2]),
        ((1, 3000, 7, 1, 256), 0, {"softcap": 20.0}, [8, 6]),
        ((1, 8192, 5, 1, 128), 0, {"deterministic": 1}, [2, 2, 1]),
    ],
)
def test_a_last_round_of_fewer_heads(
    probe: ctypes.CDLL, shape: Shape, causal: int, fields: dict[str, Any], parts: list[int]
) -> None:
    """Its parts have whole heads, or all heads are cut into equally many shares of their rows.

    In a fixed order no head is cut.
    """
    rounds = plan_of(probe, shape, causal, **fields)["rounds"]
    plans = [plan_of(probe, shape, causal, round=i, **fields) for i in range(rounds)]
    assert [plan["num_splits"] for plan in plans] == parts
    assert plans[-1]["round.groups"] < plans[0]["round.groups"]


@pytest.mark.parametrize(
    "shape", [(2, 640, 24, 6, 128), (1, 300, 6, 6, 64), (1, 8, 1, 1, 64), (1, 600, 4, 2, 256)]
)
@pytest.mark.parametrize("sms", [1, 2, 78, 132])
def test_any_number_of_sms(probe: ctypes.CDLL, shape: Shape, sms: int) -> None:
    """With one SM there is no cluster of two thread blocks, as wide heads have them.

    That once led to a division by zero.
    """
    batch, length, heads, heads_k, head_dim = shape
    fields = {"batch": batch, "nheads": heads, "nheads_k": heads_k, "head_dim": head_dim}
    for keys in (0, 1, 127, 4095):
        plan = Probe(probe).bwd(
            *(SM90, sms), **fields, gradients="dq dk dv", seqlen_q=length, seqlen_k=keys
        )
        assert keys == 0 or plan["num_splits"] >= 1


@pytest.mark.parametrize("dtype, kinds", [(BFLOAT16, [3, 4]), (FLOAT32, [3, 3])])
def test_rows_of_dbias_may_be_apart(probe: ctypes.CDLL, dtype: int, kinds: list[int]) -> None:
    """Two scores share each entry. In 16 bits TMA adds to rows that start on 16 bytes."""
    rows, size = 4095, 2 if dtype == BFLOAT16 else 4
    shape = (1, 16, rows, rows)

    def apart(pitch: int) -> abi.Tensor:
        return tensor(shape, dtype, [16 * rows * pitch, rows * pitch, pitch, 1])

    found = []
    for pitch in (rows, 4096):
        call = {"bias": apart(4096), "dbias": apart(pitch)}
        call |= {"softmax_lse_rest": tensor((2, 16, rows), FLOAT32)}
        extents = {"batch": 2, "seqlen_q": rows, "seqlen_k": rows, "nheads": 16, "nheads_k": 16}
        plan = Probe(probe).bwd(SM90, SMS, head_dim=128, **extents, **call)
        found.append(plan["dbias_kind"])
        adds_up_in_place = plan["dbias_kind"] == 4 or dtype == FLOAT32
        assert plan["dbias_row_stride"] == (pitch if adds_up_in_place else 4096)
        last = ((16 * rows - 1) * pitch + rows) * size
        assert plan["dbias_zero_bytes"] == (last if adds_up_in_place else 0)
    assert found == kinds
