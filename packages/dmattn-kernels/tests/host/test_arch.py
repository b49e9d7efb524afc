"""Which kernels a chip gets: the table in src/host/arch.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

import abi
from abi import fwd_params
from probe import SM80, SM89, SM90, Probe, mask

RELEASE = "sm_80,sm_86,sm_89,sm_90,sm_90a,compute_89"
WIDE, NARROW = 227 << 10, 99 << 10  # bytes of shared memory a block


def kernel_set(
    probe: ctypes.CDLL,
    capability: int,
    smem: int,
    forced: str | None = None,
    built_for: str = RELEASE,
    all_tiles: bool = False,
) -> tuple[int, str]:
    """Status, and the name of the set or the message."""
    text = ctypes.create_string_buffer(1 << 10)
    name = None if forced is None else forced.encode()
    status = probe.probe_kernel_set(
        *(capability, smem, name, built_for.encode(), int(all_tiles)),
        *(text, ctypes.c_size_t(len(text))),
    )
    return status, text.value.decode()


@pytest.mark.parametrize(
    "capability, smem, name",
    [
        *((80, 163 << 10, SM80), (86, NARROW, SM89), (89, NARROW, SM89), (90, WIDE, SM90)),
        (87, 163 << 10, SM89),  # runs the machine code for 8.6
        # Chips that run the PTX, which has both sets of tiles.
        *((100, WIDE, SM80), (103, WIDE, SM80), (120, NARROW, SM89), (121, NARROW, SM89)),
    ],
)
def test_chips_of_a_release(probe: ctypes.CDLL, capability: int, smem: int, name: str) -> None:
    assert kernel_set(probe, capability, smem) == (abi.OK, name)


@pytest.mark.parametrize(
    "built_for, capability, smem, wanted",
    [
        ("sm_80,compute_80", 100, WIDE, SM80),
        ("sm_80,compute_80", 120, NARROW, ""),
        ("sm_86", 89, NARROW, SM89),
        ("sm_86", 87, 163 << 10, SM89),
        ("sm_80,sm_89", 86, NARROW, ""),  # machine code for 8.0 has the wide tiles alone
        ("sm_120", 121, NARROW, SM89),
        ("sm_120", 100, WIDE, ""),
        ("sm_89", 90, WIDE, ""),
        ("sm_90a", 90, WIDE, ""),
        ("compute_89", 80, 163 << 10, ""),
        ("compute_89", 90, WIDE, SM80),
    ],
)
def test_the_code_that_a_driver_takes(
    probe: ctypes.CDLL, built_for: str, capability: int, smem: int, wanted: str
) -> None:
    status, text = kernel_set(probe, capability, smem, built_for=built_for)
    if wanted:
        assert (status, text) == (abi.OK, wanted)
    else:
        assert status == abi.UNSUPPORTED and f"this build ({built_for}) lacks the" in text


def test_hopper_code_is_for_hopper_alone(probe: ctypes.CDLL) -> None:
    assert kernel_set(probe, 90, WIDE, built_for="sm_80,compute_80") == (abi.OK, SM80)
    assert kernel_set(probe, 103, WIDE, built_for=RELEASE) == (abi.OK, SM80)


@pytest.mark.parametrize("capability", [86, 89, 120])
def test_narrow_tiles_need_code_made_for_them(probe: ctypes.CDLL, capability: int) -> None:
    """PTX of compute_80 does not contain them, and neither does the code for other chips."""
    built_for = f"sm_80,sm_{capability},compute_80"
    assert kernel_set(probe, capability, NARROW, built_for=built_for) == (abi.OK, SM89)
    status, text = kernel_set(probe, capability, NARROW, built_for="sm_80,sm_8,compute_80")
    assert status == abi.UNSUPPORTED
    assert "(sm_80,sm_8,compute_80) lacks the sm89 kernels" in text
    assert kernel_set(probe, capability, NARROW, all_tiles=True) == (abi.OK, SM89)


@pytest.mark.parametrize(
    "forced, all_tiles, status, words",
    [
        (SM80, False, abi.OK, SM80),
        (SM89, True, abi.OK, SM89),
        (SM89, False, abi.UNSUPPORTED, "lacks the sm89 kernels"),
        (
            "sm70",
            False,
            abi.INVALID_VALUE,
            "DMATTN_ARCH in the environment is 'sm70'; wanted sm90 or sm80 or sm89",
        ),
    ],
)
def test_a_forced_set(
    probe: ctypes.CDLL, forced: str, all_tiles: bool, status: int, words: str
) -> None:
    found, text = kernel_set(probe, 90, WIDE, forced, "sm_90", all_tiles)
    assert (found, words in text) == (status, True), text


def test_chips_without_kernels(probe: ctypes.CDLL) -> None:
    status, text = kernel_set(probe, 75, 64 << 10)
    assert (status, "compute capability 7.5; wanted at least 8.0" in text) == (
        abi.UNSUPPORTED,
        True,
    )
    status, text = kernel_set(probe, 87, 98 << 10, all_tiles=True)
    assert status == abi.UNSUPPORTED and "has 100352 bytes of shared memory" in text


@pytest.fixture
def without_units(probe: ctypes.CDLL) -> Iterator[None]:
    probe.probe_leave_out_units(80)
    yield
    probe.probe_leave_out_units(0)


@pytest.mark.usefixtures("without_units")
def test_a_build_without_the_unit(probe: ctypes.CDLL) -> None:
    """The error comes with the size of the workspace, before anything is launched."""
    text = ctypes.create_string_buffer(1 << 10)
    status = probe.probe_fwd(
        *(ctypes.byref(fwd_params(head_dim=72)), b"sm80", 132, None),
        *(text, ctypes.c_size_t(len(text))),
    )
    assert status == abi.UNSUPPORTED
    assert b"no forward kernel for bfloat16, head_dim up to 128, dense keys" in text.value
    assert Probe(probe).fwd(seqlen_k=0)["no_keys"]  # needs none


@pytest.fixture
def without_hopper_units(probe: ctypes.CDLL) -> Iterator[None]:
    probe.probe_leave_out_units(90)
    yield
    probe.probe_leave_out_units(0)


@pytest.mark.usefixtures("without_hopper_units")
def test_a_build_without_hopper_code(probe: ctypes.CDLL) -> None:
    """With sm_90 but without sm_90a, Hopper runs the sm80 code for everything."""
    assert kernel_set(probe, 90, WIDE, built_for="sm_80,sm_90") == (abi.OK, SM90)
    long: dict[str, Any] = {"batch": 1, "nheads": 16, "nheads_k": 16}
    long |= {"seqlen_q": 4096, "seqlen_k": 4096}
    for plan in (
        Probe(probe).fwd(SM90, 132, head_dim=128, **long),
        Probe(probe).fwd(SM90, 132, head_dim=128, mask=mask(1, 1, 1, 4096), **long),
        Probe(probe).bwd(SM90, 132, head_dim=128, deterministic=1, gradients="dq dk dv", **long),
    ):
        assert plan["arch"] == 80 and plan["blocks"] > 132


@pytest.mark.parametrize(
    "compiled_for, driver, setting, wanted",
    [
        (90, 13000, None, True),
        (90, 12030, "1", True),
        (100, 13000, "", True),
        (80, 13000, None, False),  # PTX of compute_80, also where a newer chip runs it
        (89, 13000, None, False),
        (90, 12020, None, False),
        (90, 13000, "0", False),
    ],
)
def test_which_kernels_start_early(
    probe: ctypes.CDLL, compiled_for: int, driver: int, setting: str | None, wanted: bool
) -> None:
    """They need code that can wait, a driver that captures such launches, and no other setting."""
    name = None if setting is None else setting.encode()
    assert probe.probe_may_start_early(compiled_for, driver, name) == wanted
