"""Which launches compute-sanitizer watches for each family of kernels (gpu/sanitize.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu import sanitize, sanitizer_cases, sanitizer_garbage
from gpu.device import FAMILY_VARIABLE
from gpu.sanitizer_launch import Launch

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
    """Rows over lists: every width of a last tile, no keys, and lists one after the other."""
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
