"""What the suite found, as JSON for the repository and as a table for the reader."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import OUT_OF_MEMORY
from gpu.sanitize import TOOLS, Finding
from source_hash import source_hash

if TYPE_CHECKING:
    from attention.targets import Target

OUTCOMES = ("passed", "failed", "crashed", "skipped", "not run")
SLOWEST = 10
REASONS = 60  # of so many failures the reason is kept
NAMED = 200  # so many of the tests that found no memory at first are named


def environment() -> dict[str, Any]:
    """GPU, driver and versions; whatever cannot be found out is null."""
    found: dict[str, Any] = {"gpu": None, "driver": None, "python": platform.python_version()}
    torch = importlib.import_module("torch")
    found |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {"gpu": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
        found["driver"] = _driver_version()
    try:
        kernels = importlib.import_module("dmattn_kernels")
    except ImportError as error:
        return found | {"kernels": f"not importable: {error}"}
    return found | {
        "kernels": kernels.version(),
        "kernels_cuda": kernels.cuda_version(),
        "architectures": kernels.architectures(),
        "abi_version": kernels.abi_version(),
        "source_hash": built_from(kernels.library_path()),
    }


def built_from(library: Path) -> str | None:
    """The hash of the sources that a library was built from, which it carries inside."""
    found = re.search(rb"dmattn-source-hash:([0-9a-f]{64})", library.read_bytes())
    return None if found is None else found[1].decode()


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip()


def compose(
    found_by: list[tuple[Target, list[dict[str, Any]]]],
    findings: list[Finding],
    complete: bool,
    seconds: float,
    runs: int = 1,
) -> dict[str, Any]:
    """The report. `ok`: the run was complete, nothing failed, every tool found its planted fault.

    `runs`: the number of runs, each of which went on where the one before had no time left.
    """
    found_by = [(target, lacking_memory_as_not_run(lines)) for target, lines in found_by]
    outcomes = {target.name: lines for target, lines in found_by}
    counts = {name: _counts(lines) for name, lines in outcomes.items()}
    backends: dict[str, list[dict[str, Any]]] = {}
    for target, lines in found_by:
        backends.setdefault(target.backend_name, []).extend(lines)
    failed = [
        {"target": name, **line}
        for name, lines in outcomes.items()
        for line in lines
        if line["outcome"] in ("failed", "crashed")
    ]
    skipped = Counter(
        str(line["reason"])
        for lines in outcomes.values()
        for line in lines
        if line["outcome"] == "skipped"
    )
    passed = not failed and all(x["passed"] > 0 and not x["not run"] for x in counts.values())
    bitten = {
        finding.name.split()[0] for finding in findings if finding.ok and "planted" in finding.name
    }
    sanitized = bool(findings) and all(finding.ok for finding in findings) and bitten == set(TOOLS)
    found = environment()
    if found.get("source_hash") != source_hash():
        found["note"] = "the library was not built from the sources in this tree"
    return {
        "ok": complete and passed and sanitized and "note" not in found,
        "complete": complete,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "source_hash": None,
        **found,
        "seconds": round(seconds),
        "runs": runs,
        "tests": counts,
        "backends": {name: _counts(lines) for name, lines in backends.items()},
        "failed_tests": [
            {**line, "reason": line["reason"][-1500:] if i < REASONS else ""}
            for i, line in enumerate(failed)
        ],
        "tests_not_run": [
            {"target": name, "test": line["test"]}
            for name, lines in outcomes.items()
            for line in lines
            if line["outcome"] == "not run"
        ],
        "found_no_memory_at_first": [
            {"target": name, "test": line["test"], "tries": line["tries"]}
            for name, lines in outcomes.items()
            for line in lines
            if line.get("tries", 1) > 1
        ][:NAMED],
        "skipped_reasons": dict(skipped),
        "slowest": _slowest(outcomes),
        "sanitizer": [dataclasses.asdict(finding) for finding in findings],
    }


def is_ok(found: dict[str, Any]) -> bool:
    """`ok` of a report, after the outcome of what was run again has been written into it."""
    return (
        found["complete"]
        and not found["failed_tests"]
        and all(
            counts["passed"] > 0 and not counts["not run"] for counts in found["tests"].values()
        )
        and bool(found["sanitizer"])
        and all(finding["ok"] for finding in found["sanitizer"])
        and "note" not in found
    )


def is_of_this_library(found: dict[str, Any]) -> bool:
    """Whether a report is of the installed library, and this was built from the sources here."""
    return bool(found["source_hash"] == environment().get("source_hash") == source_hash())


def put_into(found: dict[str, Any], newer: dict[str, Any], backends: Mapping[str, str]) -> None:
    """Replace what a report says about the targets of a newer one, and list them as run again.

    `backends`: for each target the name of its backend.
    """
    for name, counts in newer["tests"].items():
        of_backend = found["backends"][backends[name]]
        for outcome, count in counts.items():
            of_backend[outcome] += count - found["tests"][name][outcome]
        found["tests"][name] = counts
        failed = [line for line in found["failed_tests"] if line["target"] != name]
        found["failed_tests"] = failed + [x for x in newer["failed_tests"] if x["target"] == name]
        left = [line for line in found.get("tests_not_run", []) if line["target"] != name]
        found["tests_not_run"] = left + [x for x in newer["tests_not_run"] if x["target"] == name]
        tried = [x for x in found.get("found_no_memory_at_first", []) if x["target"] != name]
        tried += [x for x in newer.get("found_no_memory_at_first", []) if x["target"] == name]
        found["found_no_memory_at_first"] = tried
        about = {key: newer[key] for key in ("date", "gpu", "seconds", "skipped_reasons")}
        found.setdefault("run_again", []).append({"target": name, **about})
    found["ok"] = is_ok(found)


def _outcomes_of(
    lines: list[dict[str, Any]], run: Callable[[str, str], str], width: int
) -> list[str]:
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(lambda line: run(line["target"], line["test"]), lines))


def run_failed_tests(
    found: dict[str, Any],
    backends: Mapping[str, str],
    run: Callable[[str, str], str],
    width: int = 1,
) -> list[dict[str, Any]]:
    """Run the failed tests of a report again; those that pass now count as passed.

    `backends`: for each target the name of its backend. `run`: a function that runs a test on a
    target and returns its outcome: passed, skipped or failed. `width`: how many run at a time.
    Returns an entry for each test that was run.
    """
    again = []
    failed = list(found["failed_tests"])
    for line, outcome in zip(failed, _outcomes_of(failed, run, width), strict=True):
        passed = outcome == "passed"
        again.append({"target": line["target"], "test": line["test"], "passed": passed})
        if passed:
            _count_as(found, line["target"], backends, line["outcome"], "passed")
            found["failed_tests"].remove(line)
    return again


def lacking_memory_as_not_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A test that found no memory beside others has shown nothing: it counts as not run."""
    return [
        {**line, "outcome": "not run"}
        if line["outcome"] == "failed" and OUT_OF_MEMORY in line["reason"]
        else line
        for line in lines
    ]


def left_tests(found: dict[str, Any]) -> dict[str, list[str]]:
    """For each target the tests that no worker began before time was up, or that lacked memory."""
    left: dict[str, list[str]] = {}
    for line in found["tests_not_run"]:
        left.setdefault(line["target"], []).append(line["test"])
    return left


def put_left_into(
    found: dict[str, Any],
    outcomes: Mapping[str, list[dict[str, Any]]],
    about: dict[str, Any],
    backends: Mapping[str, str],
) -> None:
    """Put the outcomes of a report's `left_tests` into it, and list their targets as run again.

    `outcomes`: for each target a line for each test. `about`: what the list says about the run.
    `backends`: for each target the name of its backend.
    """
    for name, lines in outcomes.items():
        ended = [line for line in lacking_memory_as_not_run(lines) if line["outcome"] != "not run"]
        tests = {line["test"] for line in ended}
        for line in ended:
            _count_as(found, name, backends, "not run", line["outcome"])
        failed = [x for x in ended if x["outcome"] in ("failed", "crashed")]
        found["failed_tests"] += [{"target": name, **line} for line in failed]
        found["tests_not_run"] = [
            x for x in found["tests_not_run"] if x["target"] != name or x["test"] not in tests
        ]
        found.setdefault("run_again", []).append({"target": name, "left": len(ended), **about})
    found["ok"] = is_ok(found)


def _count_as(
    found: dict[str, Any], target: str, backends: Mapping[str, str], before: str, now: str
) -> None:
    for counts in (found["tests"][target], found["backends"][backends[target]]):
        counts[before] -= 1
        counts[now] += 1


def _counts(lines: list[dict[str, Any]]) -> dict[str, int]:
    found = Counter(line["outcome"] for line in lines)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def _slowest(outcomes: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = [
        (line["seconds"], name, line["test"]) for name, found in outcomes.items() for line in found
    ]
    ranked = sorted(lines, reverse=True)[:SLOWEST]
    return [f"{seconds:.1f} s {name} {test.rsplit('/', 1)[-1]}" for seconds, name, test in ranked]


def table(found: dict[str, Any]) -> str:
    """The summary that a run prints at its end."""
    lines = ["", f"GPU {found['gpu']}, driver {found['driver']}, torch {found['torch']}"]
    lines.append(
        f"kernels {found['kernels']} for {found.get('architectures')}, took {found['seconds']} s"
    )
    if "note" in found:
        lines.append(f"NOTE: {found['note']}")
    lines += ["", *(f"slow: {line}" for line in found["slowest"][:5]), ""]
    by_file = Counter(
        (line["target"], line["test"].split("::")[0].rsplit("/", 1)[-1])
        for line in found["failed_tests"]
    )
    lines += [
        f"failed: {count:4d} in {name} ({target})"
        for (target, name), count in by_file.most_common()
    ]
    for line in found["failed_tests"][:16]:
        reason = [x for x in line["reason"].splitlines() if x.startswith("E ")] or [
            line["reason"][-150:]
        ]
        lines.append(
            f"  {line['target']} {line['test'].rsplit('/', 1)[-1]}: " + " | ".join(reason)[:400]
        )
    lines.append("")
    for title, kind in (("target", "tests"), ("backend", "backends")):
        lines.append(f"{title:12}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
        for name, counts in found[kind].items():
            lines.append(f"{name:12}" + "".join(f"{counts[outcome]:10d}" for outcome in OUTCOMES))
    lines += ["", f"{'compute-sanitizer':32}{'':8}{'errors':>8}{'launches':>10}{'seconds':>9}"]
    for entry in found["sanitizer"]:
        verdict, errors = "ok" if entry["ok"] else "FAILED", entry["errors"]
        lines.append(
            f"{entry['name']:32}{verdict:8}{'-' if errors is None else errors:>8}"
            f"{entry['launches'] or '':>10}{entry['seconds']:>9}  {entry['words'][:150]}"
        )
    if not found["sanitizer"]:
        lines.append("not run")
    lines += [
        "",
        "ALL PASSED"
        if found["ok"]
        else "NOT OK" + ("" if found["complete"] else " (not a complete run)"),
    ]
    return "\n".join(lines)
