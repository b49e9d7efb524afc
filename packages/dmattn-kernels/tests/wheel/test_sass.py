"""The machine code for Hopper: what loops consist of, and that kernels that start early wait."""

from __future__ import annotations

import ctypes
import re
import tomllib
from pathlib import Path

import pytest

import sass
from conftest import PACKAGE


@pytest.fixture(scope="module")
def hopper_kernels(library: ctypes.CDLL, library_path: Path) -> list[sass.Kernel]:
    if "sm_90a" not in library.dmattn_architectures().decode().split(","):
        pytest.skip("the library holds no code for sm_90a")
    return list(sass.kernels(library_path, "sm_90a", "dmattn4sm90"))


def test_every_kind_of_kernel_is_found(hopper_kernels: list[sass.Kernel]) -> None:
    kinds = {kind for k in hopper_kernels for kind in re.findall(r"([a-z]+_kernel)I", k.name)}
    assert kinds == {"fwd_kernel", "bwd_kernel", "wide_kernel", "gather_kernel"}


def test_products_are_computed_by_wgmma_alone(hopper_kernels: list[sass.Kernel]) -> None:
    """A kernel has one to three innermost loops of products: for whole tiles and for cut ones.

    Tiles that a window cuts come both before and behind the whole tiles.
    """
    for kernel in hopper_kernels:
        opcodes = {x.opcode for x in kernel.instructions}
        assert "HGMMA" in opcodes and not {"HMMA", "IMMA", "DMMA"} & opcodes, kernel.name
        assert len(kernel.product_loops()) in (1, 2, 3), kernel.name


def test_loops_leave_local_memory_alone(hopper_kernels: list[sass.Kernel]) -> None:
    """tests/allowed_spills.toml names the loops that may access local memory, and why."""
    allowed = tomllib.loads((PACKAGE / "tests" / "allowed_spills.toml").read_text())
    entries = allowed["allowed_in_loop"]
    assert all(entry["reason"] for entry in entries)
    used, offenders = set(), []
    for kernel in hopper_kernels:
        found = max(
            sum(kernel.instructions[n].is_local_memory for n in loop)
            for loop in kernel.product_loops()
        )
        names = [
            i
            for i, entry in enumerate(entries)
            if all(re.search(part, kernel.name) for part in entry["kernel"])
        ]
        if found:
            used.update(names)
        if found > max((entries[i]["most"] for i in names), default=0):
            offenders.append(f"{found} instructions: {kernel.name}")
    assert not offenders, "\n".join(offenders)
    assert used == set(range(len(entries))), "an entry allows what no kernel needs"


def test_products_are_not_waited_for_one_by_one(hopper_kernels: list[sass.Kernel]) -> None:
    """If ptxas serializes products, it puts a wait for all that are under way behind each one."""
    for kernel in hopper_kernels:
        for loop in kernel.product_loops():
            inside = [kernel.instructions[n] for n in sorted(loop)]
            products = sum(x.is_matrix_product for x in inside)
            waits = sum(x.name.startswith("WARPGROUP.DEPBAR") for x in inside)
            assert products >= 3 * waits, f"{products} products, {waits} waits: {kernel.name}"


@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize(
    "mode", ["0ELi1ELb0", "7ELi1ELb0", "0ELi1ELb1"], ids=["plain", "packed", "split keys"]
)
def test_output_is_waited_for_in_the_softmax(
    hopper_kernels: list[sass.Kernel], head_dim: int, mode: str
) -> None:
    """The wait is not before the softmax, as it would be without stay_behind(), nor at its end.

    docs/kernels/forward.md says what that gains.
    """
    kind = f"Li{head_dim}ELi2ELi128ELi2ELNS0_9ScoreModeE{mode}E"
    found = [k for k in hopper_kernels if "fwd_kernel" in k.name and kind in k.name]
    assert len(found) == 2, "one for each dtype"
    for kernel in found:
        for loop in kernel.product_loops():
            code = [kernel.instructions[number] for number in sorted(loop)]
            exponentials = [place for place, x in enumerate(code) if x.name == "MUFU.EX2"]
            waits = [place for place, x in enumerate(code) if x.name == "WARPGROUP.DEPBAR.LE"]
            assert len(waits) == 2, "for the scores, and for the output"
            before = sum(place < waits[1] for place in exponentials)
            assert len(exponentials) // 8 <= before <= len(exponentials) * 3 // 4


@pytest.mark.parametrize(
    "tile",
    [
        *("Li64ELi3ELi128E", "Li96ELi2ELi128E", "Li128ELi2ELi128E"),
        *("Li192ELi2ELi96E", "Li256ELi2ELi64E"),
    ],
    ids=["64", "96", "128", "192", "256"],
)
def test_output_is_waited_for_in_the_softmax_of_biased_scores(
    hopper_kernels: list[sass.Kernel], tile: str
) -> None:
    """Likewise where the products add a bias for each key: in the loop over tiles that are cut, and
    in the one over whole tiles.

    A step has two branches with as many exponentials each. One is for a large bias, and waits for
    the output before its softmax.
    """
    kind = f"{tile}Li2ELNS0_9ScoreModeE3ELi1ELb0"
    found = [k for k in hopper_kernels if "fwd_kernel" in k.name and kind in k.name]
    assert len(found) == 2, "one for each dtype"
    for kernel in found:
        loops = kernel.product_loops()
        assert len(loops) == 2
        for loop in loops:
            names = [kernel.instructions[number].name for number in sorted(loop)]
            waits = [place for place, name in enumerate(names) if name == "WARPGROUP.DEPBAR.LE"]
            before = [names[:place].count("MUFU.EX2") for place in waits]
            of_branch = names.count("MUFU.EX2") // 2
            assert len(before) == 3, "for the scores, and for the output in each branch"
            inside = [count % of_branch for count in before]
            assert any(of_branch // 8 <= x <= of_branch * 3 // 4 for x in inside), before


def test_usual_decoding_is_small(library: ctypes.CDLL, library_path: Path) -> None:
    """Code that other kernels have displaced from caches is read from memory again.

    A kernel of 143 KB took 10 us longer for that.
    """
    if "sm_90" not in library.dmattn_architectures().decode().split(","):
        pytest.skip("the library holds no code for sm_90")
    sizes = {
        kernel.name: len(kernel.instructions) * sass.INSTRUCTION_BYTES
        for kernel in sass.kernels(library_path, "sm_90", "decode_kernel")
        if "LevelE0" in kernel.name or "LevelE4" in kernel.name
    }
    assert sizes and max(sizes.values()) <= 80 << 10, sizes


# Instructions that access global memory, and those that copy to it or from it.
MEMORY = {"LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS", "UBLKCP", "UBLKRED"}
COPIES = ("UTMALDG", "UTMASTG", "UTMAREDG")
# Kernels that are not launched early: this one has a cooperative launch.
IN_TURN = ("select_launch_kernel",)


def test_kernels_that_start_early_wait_first(
    library: ctypes.CDLL, library_path: Path, hopper_kernels: list[sass.Kernel]
) -> None:
    """They wait before they access global memory: see src/kernels/shared/early_start.cuh.

    The compiler may not move an ordinary load to before the wait. But `__ldg` tells it that nothing
    writes to that memory, so that it may move such a load.
    """
    assert "sm_90" in library.dmattn_architectures().decode().split(",")
    helpers = list(sass.kernels(library_path, "sm_90.cubin", "_GLOBAL__N_"))
    early = [k for k in helpers if not any(name in k.name for name in IN_TURN)]
    early += hopper_kernels
    assert len(early) > 50
    wrong = []
    for kernel in early:
        opcodes = [x.opcode for x in kernel.instructions]
        wait = opcodes.index("ACQBULK") if "ACQBULK" in opcodes else len(opcodes)
        touched = [x for x in opcodes[:wait] if x in MEMORY or x in COPIES]
        if touched or wait == len(opcodes):
            wrong.append(f"{touched[:3]} before the wait: {kernel.name}")
    assert not wrong, "\n".join(wrong)


def test_drafts_read_ahead_past_the_l1_cache(library: ctypes.CDLL, library_path: Path) -> None:
    """Decode kernels of drafts read queries, keys and values before the wait, past the L1 cache.

    An L1 cache may still hold what lay there before. See run() in
    src/kernels/attention/sm80/decode_kernel.cuh.
    """
    assert "sm_90" in library.dmattn_architectures().decode().split(",")
    kernels = list(sass.kernels(library_path, "sm_90.cubin", "decode_kernel"))
    drafts = [k for k in kernels if "DecodeCaseE3" in k.name]
    assert drafts
    for kernel in kernels:
        waits = [n for n, x in enumerate(kernel.instructions) if x.opcode == "ACQBULK"]
        assert bool(waits) == (kernel in drafts), kernel.name
        before = kernel.instructions[: max(waits, default=0)]
        touched = {x.name for x in before if x.opcode in MEMORY or x.opcode in COPIES}
        past = {x for x in touched if x.startswith("LDGSTS.") and "BYPASS" in x}
        past |= {x for x in touched if x.startswith("LDG.") and x.endswith(".STRONG.GPU")}
        assert touched == past, kernel.name


def test_decoding_does_not_wait_for_its_counts(library: ctypes.CDLL, library_path: Path) -> None:
    """ptxas must not merge the additions of a warp's lanes, as it then waits for the result.

    See count_in() in src/kernels/attention/sm80/decode_results.cuh.
    """
    assert "sm_90" in library.dmattn_architectures().decode().split(",")
    for kernel in sass.kernels(library_path, "sm_90.cubin", "decode_kernel"):
        adds = [x for x in kernel.instructions if x.name.startswith("ATOMG.E.ADD")]
        assert adds, kernel.name
        assert "UPOPC" not in {x.opcode for x in kernel.instructions}, kernel.name
