"""Which calls the kernels for Hopper compute, and how they are launched."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

import abi
from abi import BFLOAT16, FLOAT32, tensor
from probe import SM90, Probe, mask

SMS = 132
LONG: dict[str, Any] = {"seqlen_q": 4096, "seqlen_k": 4096, "nheads": 16, "nheads_k": 4}


@pytest.mark.parametrize(
    "head_dim, block_m, block_n",
    [(40, 192, 128), (64, 192, 128), (72, 128, 128), (128, 128, 128), (192, 128, 112)],
)
def test_tiles(probe: ctypes.CDLL, head_dim: int, block_m: int, block_n: int) -> None:
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, **LONG)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, block_m, block_n)


def test_blocks_stay_and_count_their_work(probe: ctypes.CDLL) -> None:
    plan = Probe(probe).fwd(SM90, SMS, batch=1, head_dim=128, **LONG)
    assert plan["blocks"] == SMS and plan["num_splits"] == 1
    assert plan["workspace_bytes"] == 256  # the counter
    few = Probe(probe).fwd(SM90, SMS, batch=1, head_dim=128, **(LONG | {"nheads": 4}))
    assert few["arch"] == 90 and few["blocks"] == 4 * 32 and few["workspace_bytes"] == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "head_dim, length, block_m, block_n, blocks_per_sm",
    [
        (40, 1024, 128, 64, 2),
        (64, 512, 128, 64, 2),
        (64, 1025, 192, 128, 1),
        (72, 512, 128, 128, 1),
    ],
)
def test_two_blocks_share_an_sm_where_rows_are_few(
    probe: ctypes.CDLL,
    head_dim: int,
    length: int,
    block_m: int,
    block_n: int,
    blocks_per_sm: int,
    packed: bool,
) -> None:
    if packed:
        sizes = PACKED | {"max_seqlen_q": length, "max_seqlen_k": length, "nheads": 8}
    else:
        sizes = LONG | {"batch": 32, "seqlen_q": length, "seqlen_k": length}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, is_causal=1, **sizes)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, block_m, block_n)
    assert plan["blocks"] == SMS * blocks_per_sm and plan["num_splits"] == 1
    assert plan["workspace_bytes"] == 256  # the counter


def test_no_more_blocks_than_items_share_an_sm(probe: ctypes.CDLL) -> None:
    sizes = {"batch": 3, "seqlen_q": 500, "seqlen_k": 500, "nheads": 20, "nheads_k": 20}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=64, **sizes)
    assert plan["arch"] == 90 and plan["block_n"] == 64
    assert plan["blocks"] == 3 * 20 * 4 and plan["workspace_bytes"] == 0


TALL, SHORT, TWO_BLOCKS = (192, 128), (128, 128), (128, 64)  # tiles of Sm90FwdShape


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "tile", "causal_tile"),
    [
        (1024, 1024, 10, SHORT, SHORT),  # all row blocks have an SM, in any shape
        (1024, 2048, 20, TALL, TALL),  # one wave of tall ones, or two of short ones
        (1024, 1024, 24, SHORT, SHORT),  # two waves of either
        (1024, 1024, 40, TALL, TWO_BLOCKS),
        (448, 1500, 256, TALL, TALL),
        (512, 512, 512, TWO_BLOCKS, TWO_BLOCKS),
        (4096, 77, 8, TWO_BLOCKS, TWO_BLOCKS),  # many rows of few keys
        (4096, 4096, 8, SHORT, SHORT),  # 176 tall row blocks, or 256
        (4096, 4096, 16, TALL, TALL),
        (192, 300, 132, TALL, TALL),  # the shapes of the sanitizers' launches
        (200, 250, 2, SHORT, SHORT),
    ],
)
def test_the_fastest_of_three_shapes(
    probe: ctypes.CDLL,
    rows: int,
    keys: int,
    heads: int,
    tile: tuple[int, int],
    causal_tile: tuple[int, int],
) -> None:
    sizes = {"batch": 1, "seqlen_q": rows, "seqlen_k": keys, "nheads": heads, "nheads_k": heads}
    for head_dim, causal in itertools.product((40, 64), (0, 1)):
        plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, is_causal=causal, **sizes)
        wanted = causal_tile if causal else tile
        assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, *wanted)


@pytest.mark.parametrize(
    ("given", "has_counter"),
    [
        ({}, False),  # 256 row blocks
        ({"is_causal": 1}, True),
        ({"seqlen_q": 4300}, True),  # 272: some blocks have three
        ({"head_dim": 64, "seqlen_q": 256, "seqlen_k": 256, "nheads": 200, "nheads_k": 200}, False),
    ],
)
def test_two_equal_row_blocks_need_no_counter(
    probe: ctypes.CDLL, given: dict[str, Any], has_counter: bool
) -> None:
    sizes = LONG | {"nheads": 8, "head_dim": 128, "batch": 1} | given
    plan = Probe(probe).fwd(SM90, SMS, **sizes)
    assert plan["arch"] == 90 and plan["blocks"] == SMS * (2 if given.get("head_dim") == 64 else 1)
    assert plan["workspace_bytes"] == (256 if has_counter else 0)


DENSE = (1, 16, 4096, 4096)
SQUARE = 4096 * 4096
CHANGED_SCORES: dict[str, dict[str, Any]] = {
    "key bias": {"bias": tensor((1, 1, 1, 4096))},
    "fp32 key bias": {"bias": tensor((1, 1, 1, 4096), FLOAT32)},
    "every second key": {"bias": tensor((1, 1, 1, 4096), stride=(8192, 8192, 8192, 2))},
    "16-bit bias": {"bias": tensor(DENSE)},
    "fp32 bias": {"bias": tensor(DENSE, FLOAT32)},
    "shared bias": {"bias": tensor((2, 1, 4096, 4096), FLOAT32)},
    "expanded bias": {"bias": tensor((2, 16, 4096, 4096), stride=(0, SQUARE, 4096, 1))},
    "16-bit bias, rows on 2 bytes": {"bias": tensor(DENSE, stride=(0, 4097 * 4096, 4097, 1))},
    "fp32 bias on 8 bytes": {"bias": tensor(DENSE, FLOAT32, stride=(0, 4098 * 4096, 4098, 1))},
    "bias of a few rows": {"seqlen_q": 400, "nheads": 64, "bias": tensor((1, 64, 400, 4096))},
    "mask": {"mask": mask(1, 1, 4096, 4096)},
    "mask and bias": {"mask": mask(2, 4, 4096, 4096), "bias": tensor(DENSE, FLOAT32)},
    "softcap": {"softcap": 30.0},
    "softcap and bias": {"softcap": 30.0, "bias": tensor((1, 1, 1, 4096), FLOAT32)},
    "negative scale": {"softmax_scale": -1.0},
}
KEY_BIASES = [CHANGED_SCORES[x] for x in ("key bias", "fp32 key bias", "every second key")]
# Those with tall tiles at head_dim 64: a bias alone, which is in 16 bits or for each key.
TALL = KEY_BIASES + [
    CHANGED_SCORES[x] for x in ("16-bit bias", "expanded bias", "16-bit bias, rows on 2 bytes")
]


@pytest.mark.parametrize("arguments", CHANGED_SCORES.values(), ids=CHANGED_SCORES.keys())
@pytest.mark.parametrize(
    "head_dim, block_m, block_n",
    [(40, 128, 128), (64, 128, 128), (96, 128, 128), (128, 128, 128), (136, 128, 64)],
)
def test_tiles_of_changed_scores(
    probe: ctypes.CDLL, arguments: dict[str, Any], head_dim: int, block_m: int, block_n: int
) -> None:
    plan = Probe(probe).fwd(SM90, SMS, **({"batch": 2, "head_dim": head_dim} | LONG | arguments))
    if head_dim <= 64 and arguments in TALL:
        block_m = 192
    if head_dim > 128 and arguments == CHANGED_SCORES["softcap"]:
        block_n = 80  # the tiles for softcap without a bias
    if head_dim == 136 and arguments in KEY_BIASES:
        block_n = 96  # those for a bias for each key alone, for 192 columns
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, block_m, block_n)
    assert plan["blocks"] == SMS and plan["num_splits"] == 1 and not plan["gathered"]


@pytest.mark.parametrize(
    "more, block_n",
    [
        ({}, 96),
        ({"seqlen_q": 1025}, 96),
        ({"seqlen_q": 1024, "nheads": 64}, 64),
        ({"mask": mask(1, 1, 4096, 4096)}, 64),
        ({"softcap": 30.0}, 64),
        ({"softmax_scale": 0.0}, 64),
    ],
    ids=["long", "barely long", "few rows", "mask", "softcap", "scale of 0"],
)
def test_what_key_biases_alone_have(probe: ctypes.CDLL, more: dict[str, Any], block_n: int) -> None:
    """With anything else, or with few rows, they have the tiles of any other bias."""
    arguments = {"head_dim": 192, "bias": tensor((1, 1, 1, 4096))} | more
    plan = Probe(probe).fwd(SM90, SMS, **({"batch": 2} | LONG | arguments))
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, 128, block_n)
    assert plan["num_splits"] == 1


@pytest.mark.parametrize(
    "more, block_m",
    [
        ({}, 192),
        ({"seqlen_q": 1025}, 192),
        ({"seqlen_q": 1024}, 128),
        ({"mask": mask(1, 1, 4096, 4096)}, 128),
        ({"mask": mask(1, 1, 1, 4096)}, 128),
        ({"softcap": 30.0}, 128),
        ({"softmax_scale": -1.0}, 128),
        ({"bias": tensor(DENSE, FLOAT32)}, 128),
    ],
)
def test_tall_tiles_of_a_bias_alone(probe: ctypes.CDLL, more: dict[str, Any], block_m: int) -> None:
    """Kernels with three consumers support neither masks nor fp32 tiles of a bias."""
    bias = {"bias": tensor((1, 1, 1, 4096))}
    arguments = {"batch": 2, "head_dim": 64} | LONG | bias | more
    plan = Probe(probe).fwd(SM90, SMS, **arguments)
    assert (plan["arch"], plan["block_m"]) == (90, block_m)


@pytest.mark.parametrize(
    "head_dim, heads, seqlen_k, more, splits",
    [
        # Keys are not split if they are few, or if the GPU is nearly full without splits.
        (64, 2, 512, {}, 1),
        (128, 2, 512, {}, 1),
        (128, 100, 4096, {}, 1),
        (128, 8, 1024, {"is_causal": 1, "seqlen_q": 1024}, 1),
        # What a mask, a bias or softcap adds to the time of a score counts, too.
        (128, 100, 4096, {"softcap": 20.0}, 1),
        (128, 2, 256, {"mask": mask(1, 1, 128, 256)}, 1),
        (128, 8, 4096, {"mask": mask(1, 1, 128, 4096)}, 16),
        (64, 16, 4096, {"bias": tensor((1, 1, 1, 4096), BFLOAT16)}, 8),
        (256, 16, 4096, {"bias": tensor((1, 1, 128, 4096), BFLOAT16)}, 8),
        (128, 16, 4096, {"bias": tensor((1, 1, 128, 4096), FLOAT32)}, 8),
        (128, 16, 4096, {"bias": tensor((1, 1, 128, 4096)), "softcap": 20.0}, 8),
        # Rows of a bias have three consumers at head_dim 64: 132 blocks of 192 rows fill the GPU.
        (64, 12, 2048, {"seqlen_q": 2048, "bias": tensor((1, 1, 2048, 2048), BFLOAT16)}, 1),
    ],
)
def test_few_blocks_of_rows_go_by_the_time(
    probe: ctypes.CDLL,
    head_dim: int,
    heads: int,
    seqlen_k: int,
    more: dict[str, Any],
    splits: int,
) -> None:
    call = {"batch": 1, "seqlen_q": 128, "seqlen_k": seqlen_k, "nheads": heads, "nheads_k": heads}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, **(call | more))
    assert (plan["arch"], plan["num_splits"]) == (90, splits)


@pytest.mark.parametrize(
    "head_dim, heads, seqlen_k, splits",
    [(128, 2, 4096, 32), (64, 16, 2048, 8), (256, 8, 4096, 13), (128, 48, 4096, 2)],
)
@pytest.mark.parametrize("causal", [0, 1])
def test_keys_of_few_blocks_of_rows_are_split(
    probe: ctypes.CDLL, head_dim: int, heads: int, seqlen_k: int, splits: int, causal: int
) -> None:
    call = {"batch": 1, "seqlen_q": 100, "seqlen_k": seqlen_k, "nheads": heads, "nheads_k": heads}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, is_causal=causal, **call)
    assert (plan["arch"], plan["num_splits"]) == (90, splits)
    assert plan["blocks"] == heads * splits <= SMS
    # Partial outputs, and log-sum-exps with their rests.
    assert plan["workspace_bytes"] >= splits * heads * 100 * (head_dim + 2) * 4


@pytest.mark.parametrize("keys", [4096, 4095])
@pytest.mark.parametrize("bias_rows", [1, 2048])
def test_shares_have_no_tall_tiles(probe: ctypes.CDLL, bias_rows: int, keys: int) -> None:
    """A bias alone has tall tiles at head_dim 64, but the kernels for them do not split keys."""
    call = {"batch": 1, "seqlen_q": 2048, "seqlen_k": keys, "nheads": 2, "nheads_k": 1}
    bias = tensor((1, 1, bias_rows, keys))
    plan = Probe(probe).fwd(SM90, SMS, head_dim=64, bias=bias, **call)
    assert (plan["arch"], plan["block_m"]) == (90, 128) and plan["num_splits"] > 1


@pytest.mark.parametrize(
    "rows, heads, heads_k, head_dim, keys, arch",
    [
        (16, 8, 1, 64, 32768, 80),
        (32, 32, 8, 64, 8192, 80),
        (32, 32, 8, 128, 16384, 80),
        (64, 32, 8, 128, 16384, 90),  # together half as many blocks, each of which takes longer
        (128, 32, 8, 128, 16384, 90),  # together as many blocks as apart
        (32, 16, 16, 128, 16384, 90),  # no group
    ],
)
def test_rows_of_a_group_or_shares_of_the_keys(
    probe: ctypes.CDLL, rows: int, heads: int, heads_k: int, head_dim: int, keys: int, arch: int
) -> None:
    """The faster of two: the sm80 code with the rows of a group together, or Hopper's splits."""
    call = {"batch": 1, "seqlen_q": rows, "seqlen_k": keys, "nheads": heads, "nheads_k": heads_k}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, is_causal=1, **call)
    assert plan["arch"] == arch and plan["num_splits"] > 1


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_part_of_a_wave_is_split(probe: ctypes.CDLL, sms: int, head_dim: int) -> None:
    """Without splits one row block more than there are SMs would take as long as twice as many."""
    heads = sms + 1
    call = {"batch": 1, "seqlen_q": 128, "seqlen_k": 16384, "nheads": heads, "nheads_k": heads}
    assert Probe(probe).fwd(SM90, sms, head_dim=head_dim, **call)["num_splits"] > 1


@pytest.mark.parametrize("more", [{}, {"softcap": 30.0}], ids=["plain", "softcap"])
def test_few_rows_and_few_keys(probe: ctypes.CDLL, more: dict[str, Any]) -> None:
    """Keys of up to three tiles are not split, however few the blocks of rows are."""
    few = {"batch": 1, "head_dim": 128, "seqlen_q": 70, "nheads": 2, "nheads_k": 1}
    assert Probe(probe).fwd(SM90, SMS, seqlen_k=384, **few, **more)["num_splits"] == 1
    long = Probe(probe).fwd(SM90, SMS, seqlen_k=4096, **few, **more)
    assert long["num_splits"] > 1 and long["arch"] == 90


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": tensor((2, 4096, 4, 128), stride=(0, 512, 128, 1))},
        {"q": tensor((2, 4096, 16, 128), stride=(4096 * 2052, 2052, 128, 1))},
        {"k": tensor((2, 4096, 4, 128), stride=(0, 512, 128, 1)), "softcap": 30.0},
        {
            "q": tensor((2, 4096, 16, 128), stride=(4096 * 2052, 2052, 128, 1)),
            "mask": mask(1, 1, 4096, 4096),
        },
        {"bias": tensor(DENSE, stride=(0, SQUARE, 1, 4096))},
        {"bias": tensor(DENSE, FLOAT32, stride=(0, 2 * SQUARE, 8192, 2))},
        {"bias": tensor((1, 16, 4096, 1), FLOAT32)},
        {"bias": tensor(DENSE, FLOAT32, stride=(0, 1 << 40, 4096, 1))},
    ],
    ids=[
        *("expanded", "unaligned", "expanded, softcap", "unaligned, mask"),
        "rows of the bias next to each other",
        *("every second key of the bias", "row bias", "far heads of the bias"),
    ],
)
def test_what_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    plan = Probe(probe).fwd(SM90, SMS, **({"batch": 2, "head_dim": 128} | LONG | arguments))
    assert plan["arch"] == 80


KEPT = {"mask": mask(1, 4, 1, 4096)}  # a key mask becomes a list of keys
KEY_BIAS = {"bias": tensor((1, 4, 1, 4096), FLOAT32)}


@pytest.mark.parametrize(
    "head_dim, block_n",
    [(40, 128), (64, 128), (72, 128), (128, 128), (136, 96), (192, 96), (200, 64), (256, 64)],
)
@pytest.mark.parametrize("more", [{}, KEY_BIAS], ids=["plain", "key bias"])
def test_lists(probe: ctypes.CDLL, head_dim: int, block_n: int, more: dict[str, Any]) -> None:
    plan = Probe(probe).fwd(SM90, SMS, batch=1, head_dim=head_dim, **LONG, **KEPT, **more)
    assert plan["gathered"]
    assert (plan["arch"], plan["block_m"], plan["num_splits"]) == (90, 128, 1)
    assert (plan["block_n"], plan["blocks"]) == (block_n, SMS)
    # Two thread blocks share an SM if lists are short and a thread has few numbers of the output.
    few: dict[str, Any] = {"seqlen_k": 2000, "mask": mask(1, 4, 1, 2000)}
    if more:
        few["bias"] = tensor((1, 4, 1, 2000), FLOAT32)
    plan = Probe(probe).fwd(SM90, SMS, batch=1, head_dim=head_dim, **(LONG | few))
    assert plan["gathered"] and (plan["arch"], plan["block_m"]) == (90, 128)
    assert (plan["block_n"], plan["blocks"]) == (
        (64, 2 * SMS) if head_dim <= 64 else (block_n, SMS)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0},
        {"softmax_scale": -1.0},
        {"bias": tensor((1, 16, 4096, 4096), stride=(0, SQUARE, 1, 4096))},
        {"bias": tensor((1, 16, 4096, 1))},
        {"k": tensor((1, 4096, 4, 128), stride=(0, 516, 128, 1)), **KEY_BIAS},
        {"k": tensor((1, 4096, 4, 128), stride=(0, 1 << 32, 128, 1))},
    ],
    ids=["softcap", "negative scale", "strided bias", "bias of rows", "unaligned", "far rows"],
)
def test_lists_that_others_compute(probe: ctypes.CDLL, arguments: dict[str, Any]) -> None:
    call = {"batch": 1, "head_dim": 128} | LONG | KEPT | arguments
    plan = Probe(probe).fwd(SM90, SMS, **call)
    assert plan["gathered"] and plan["arch"] == 80


@pytest.mark.parametrize("head_dim, splits", [(64, 8), (128, 8), (192, 8), (256, 8)])
@pytest.mark.parametrize("more", [{}, KEY_BIAS], ids=["no bias", "bias"])
def test_lists_of_few_blocks_of_rows_are_split(
    probe: ctypes.CDLL, head_dim: int, splits: int, more: dict[str, Any]
) -> None:
    """Short lists are split into fewer shares; the host cannot know how short a mask's list is."""
    call = {"batch": 1, "seqlen_q": 100, "seqlen_k": 4096, "nheads": 16, "nheads_k": 4}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, **call, **KEPT, **more)
    assert plan["gathered"] and (plan["arch"], plan["num_splits"]) == (90, splits)
    assert plan["blocks"] == 16 * splits
    listed = abi.selection(100, 4096, 512, 1, 4)
    few = Probe(probe).fwd(
        SM90, SMS, head_dim=head_dim, **call, is_causal=1, selection=listed, **more
    )
    assert few["gathered"] and few["arch"] == 90 and few["num_splits"] < splits


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_a_key_mask_beside_a_dense_bias(probe: ctypes.CDLL, dtype: int) -> None:
    """Without a list, tiles of the bias are copied whole; with one, it is read number by number."""
    call = {"batch": 1, "head_dim": 128} | LONG | KEPT | {"bias": tensor(DENSE, dtype)}
    plan = Probe(probe).fwd(SM90, SMS, **call)
    assert not plan["gathered"] and plan["arch"] == 90 and plan["mask.bits"]


PACKED: dict[str, Any] = {"packed": True, "sequences": 20, "nheads": 4, "nheads_k": 2}
PACKED |= {"total_q": 9000, "max_seqlen_q": 3000, "total_k": 8000, "max_seqlen_k": 2500}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(
    "head_dim, block_m, block_n",
    [(40, 192, 128), (64, 192, 128), (96, 128, 128), (128, 128, 128), (192, 128, 112)],
)
def test_packed_sequences(
    probe: ctypes.CDLL, head_dim: int, block_m: int, block_n: int, causal: int
) -> None:
    plan = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, is_causal=causal, **PACKED)
    assert (plan["arch"], plan["block_m"], plan["block_n"]) == (90, block_m, block_n)
    assert plan["blocks"] == SMS and plan["num_splits"] == 1
    assert plan["workspace_bytes"] == 256  # the counter


@pytest.mark.parametrize("sequences, max_seqlen_q", [(1, 300), (3, 300), (9, 40)])
def test_packed_sequences_have_blocks_for_all_row_blocks(
    probe: ctypes.CDLL, sequences: int, max_seqlen_q: int
) -> None:
    """There are as many as sequences of any lengths may need."""
    sizes = PACKED | {"sequences": sequences, "total_q": 300, "max_seqlen_q": max_seqlen_q}
    sizes |= {"total_k": 2500}
    plan = Probe(probe).fwd(SM90, SMS, head_dim=128, **sizes)
    assert plan["arch"] == 90 and plan["blocks"] == (300 // 128 + sequences) * 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0, "mask": mask(2, 9000, 2500)},
        {"softmax_scale": -1.0},
        {"bias": tensor((4, 8000))},
        {"mask": mask(2, 9000, 2500)},
        {"mask": mask(2, 8000)},
        {"k": tensor((8000, 2, 128), stride=(128, 0, 1))},
        {"q": tensor((9000, 4, 128), stride=(516, 128, 1))},
        {"k": tensor((8000, 2, 128), stride=(1 << 33, 128, 1))},
    ],
    ids=[
        *("softcap and mask", "negative scale", "bias", "mask", "key mask", "expanded"),
        *("unaligned", "far rows"),
    ],
)
def test_packed_sequences_that_others_compute(
    probe: ctypes.CDLL, arguments: dict[str, Any]
) -> None:
    assert Probe(probe).fwd(SM90, SMS, head_dim=128, **PACKED, **arguments)["arch"] == 80


@pytest.mark.parametrize("head_dim", [40, 96, 128, 192, 256])
def test_packed_sequences_with_softcap(probe: ctypes.CDLL, head_dim: int) -> None:
    """They have the tiles for softcap, of which there are none for head_dim 96 and 192."""
    packed = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, softcap=30.0, **PACKED)
    dense = Probe(probe).fwd(SM90, SMS, head_dim=head_dim, softcap=30.0, seqlen_q=3000)
    assert packed["arch"] == dense["arch"] == 90
    assert (packed["block_m"], packed["block_n"]) == (dense["block_m"], dense["block_n"])


@pytest.mark.parametrize(
    "batch, seqlen_q, seqlen_k, packs",
    [
        (8, 32, 8192, True),
        (8, 48, 8192, False),  # only half as many rows, in whole blocks
        (4, 32, 1024, False),  # too few keys to be worth it
        (64, 24, 512, True),
    ],
)
def test_few_rows_of_groups_go_together(
    probe: ctypes.CDLL, batch: int, seqlen_q: int, seqlen_k: int, packs: bool
) -> None:
    shape = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    plan = Probe(probe).fwd(SM90, SMS, nheads=32, nheads_k=8, head_dim=128, is_causal=1, **shape)
    assert (plan["arch"], plan["token_rows.count"]) == ((80, seqlen_q) if packs else (90, 1))
    if packs:
        assert plan["blocks"] == batch * 8 * plan["num_splits"] and plan["workspace_bytes"] > 256
