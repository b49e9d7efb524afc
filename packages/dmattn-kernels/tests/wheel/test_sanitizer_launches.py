"""Which launches compute-sanitizer watches for each family of kernels (gpu/sanitize.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu import sanitize, sanitizer_cases, sanitizer_garbage
from gpu.device import FAMILY_VARIABLE
from gpu.sanitizer_hopper_launches import hopper_launches
from gpu.sanitizer_launch import Launch
from gpu.sanitizer_short import NARROW_SHORT, SHORT

FAMILIES = ["sm80", "sm89", "sm90"]


def jobs_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Commands by name, as on a machine that has the tool."""
    monkeypatch.setattr(sanitize, "find_tool", lambda name: name)
    return {job.name: job.command for job in sanitize.kernel_jobs(tmp_path, FAMILIES, 60.0)}


def test_every_family_gets_wrong_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = jobs_of(tmp_path, monkeypatch)
    assert {f"memcheck {family} garbage" for family in FAMILIES} <= names.keys()


def test_every_choice_of_launches_names_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAMILY_VARIABLE, "sm90")
    launches = [launch.name for _, _, launch in sanitizer_cases.all_launches()]
    wrong = [case.name for case in sanitizer_garbage.cases()]
    for name, command in jobs_of(tmp_path, monkeypatch).items():
        among = wrong if name.endswith("garbage") else launches
        only = command[command.index("--only") + 1]
        for part in only.split(","):
            assert any(sanitizer_cases.is_named(x, part) for x in among), (name, part)


def test_lists_of_hopper_reach_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches over lists are calls of attention, with and without a bias.

    Both kinds have some with more row blocks than an H200 has SMs, so that a thread block passes
    from one list to the next.
    """
    monkeypatch.setenv(FAMILY_VARIABLE, "sm90")
    own = [
        launch
        for _, _, launch in sanitizer_cases.all_launches()
        if sanitizer_cases.is_named(launch.name, "listed rows")
    ]
    launches = [launch for launch in own if isinstance(launch, Launch)]
    assert launches == own and {bool(launch.bias) for launch in launches} == {True, False}
    many = [x for x in launches if -(-x.seqlen_q // 128) * x.nheads * x.batch > 132]
    assert {bool(launch.bias) for launch in many} == {True, False}


def test_gradients_of_hopper_with_a_bias_reach_its_kernels() -> None:
    """Its backward with a bias needs the rest of lse; without it, the sm80 code would run."""
    biased = [launch for _, launch in hopper_launches() if launch.bias and launch.wants]
    assert any(launch.name.startswith("wide heads") for launch in biased)
    assert not [launch.name for launch in biased if not sanitizer_cases.has_rest(launch)]


def few_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Launch]]:
    """The launches of a family over few keys: dtype, head_dim, launch."""
    monkeypatch.setenv(FAMILY_VARIABLE, family)
    return [
        (dtype, head_dim, launch)
        for dtype, head_dim, launch in sanitizer_cases.all_launches()
        if isinstance(launch, Launch) and launch in (*SHORT, *NARROW_SHORT)
    ]


def fits_few_keys(head_dim: int, x: Launch) -> bool:
    """Whether the kernels for few keys compute it, as src/host/plan/short.cpp decides.

    Other kernels compute the launches that they do not.
    """
    if x.seqlen_q == 1 or x.seqlen_k > 128 or head_dim > 64 or x.softcap or x.skip or x.splits:
        return False
    if x.mask[2:3] == "1" and x.mask[1] == "h" and x.nheads > x.nheads_k and x.wants:
        return False
    if not x.wants:
        return x.seqlen_k <= 64
    if x.seqlen_k > 64 and head_dim > 32 and (x.bias or x.mask[2:3] == "q"):
        return False
    if -(-x.seqlen_q // 64) * (x.nheads // x.nheads_k) > 4:  # too many for so few thread blocks
        return False
    has_sums = "b" in x.wants and bool(x.bias) and x.bias[:2] != "bh"
    sums_fit = x.seqlen_q <= 64 and not x.deterministic
    has_entries = "b" not in x.wants or not x.bias or x.bias[2:] == "qk"
    return x.seqlen_q <= 256 and has_entries and (sums_fit or not has_sums)


def test_few_keys_reach_each_of_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not few_keys("sm90", monkeypatch) and not few_keys("sm89", monkeypatch)
    kernels = set()
    for dtype, head_dim, x in few_keys("sm80", monkeypatch):
        assert fits_few_keys(head_dim, x), x.name
        is_single = x.seqlen_q <= 64 and x.nheads == x.nheads_k and x.seqlen_k <= 64
        # More thread blocks than an H200 runs at a time.
        has_many = x.batch * x.nheads * -(-x.seqlen_q // 64) > 6 * 132 and x.bias.startswith("1")
        changes = bool(x.bias or x.mask)
        kind = dtype, head_dim > 32
        if x.seqlen_k <= 64:
            kernels.add(("forward", *kind, changes, has_many))
        if x.wants:
            changes |= x.wants not in ("qkv", "qkvb")
            shape = is_single, x.seqlen_k > 64
            kernels.add(("backward", *kind, *shape, changes, has_many and is_single))
    assert len(kernels) == 2 * 2 * (3 + 3 + 2 + 2)
