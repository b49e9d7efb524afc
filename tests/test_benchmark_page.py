"""The page on performance is made from the recorded runs, and says from which run a row is.

Programs that measure times say in one line what they lack, before they time or write anything.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import render, run, summary  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


def test_the_page_is_made_from_the_recorded_runs() -> None:
    results = json.loads((RESULTS / "h200.json").read_text())
    models = json.loads((RESULTS / "h200-models.json").read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert render.markdown(results, "assets", models) == page, "render.py makes another page"


def test_the_readme_quotes_the_recorded_runs() -> None:
    results = json.loads((RESULTS / "h200.json").read_text())
    page = (ROOT / "README.md").read_text()
    assert summary.with_summary(page, results) == page, "render.py makes another README"
    for what, ratio in (*summary.TABLE, *summary.NOT_AHEAD):
        found = [ratio.of(results, phase) for phase in ("forward", "backward")]
        assert {len(ratios) for ratios in found} <= {0, len(ratio.cases) or len(found[0])}, what


def recorded(**runs: Any) -> dict[str, Any]:
    """Results with two cases of a group and one of another, and perhaps with further runs."""
    rows = [
        {
            "group": group,
            "case": case,
            "contender": "dmattn",
            "label": "dmattn",
            "phase": "forward",
            "ms": 1.0,
            "tflops": 1.0,
        }
        for group, case in (("decode", "first"), ("decode", "second"), ("key mask", "first"))
    ]
    about = dict.fromkeys(("date", "gpu", "torch", "cudnn", "dmattn", "family", "dtype"), "x")
    ceilings = {"copy_tb_s": 1.0, "matmul_tflops": 1.0}
    return {**about, "ceilings": ceilings, "rows": rows, "not_run": [], **runs}


def test_rows_with_a_note_are_marked() -> None:
    noted = {"date": "a day", "family": "x", "note": "on a busy host", "groups": ["decode: first"]}
    page = render.markdown(recorded(further_runs=[noted]), None)
    assert "from a run of a day, on a busy host." in page
    assert [line for line in page.splitlines() if line.startswith("| first")] == [
        "| first | **dmattn** | 1.000 | 1 |  |",  # of the group "key mask"
        "| first † | **dmattn** | 1.000 | 1 |  |",
    ]
    assert "| second | **dmattn**" in page and "†" not in render.markdown(recorded(), None)


def test_a_new_run_of_a_group_takes_the_marks_of_its_rows_away() -> None:
    noted = {"date": "a day", "family": "x", "note": "a note", "groups": ["decode: first"]}
    both = {**noted, "groups": ["decode: second", "key mask: first"]}
    earlier = recorded(further_runs=[noted, both])
    new = {**recorded(), "rows": [row for row in earlier["rows"] if row["group"] == "decode"]}
    new["not_run"] = ["decode: third", "key mask: first"]
    found = run.append(earlier, new)
    assert [x["groups"] for x in found["further_runs"]] == [["key mask: first"], ["decode"]]
    assert found["not_run"] == ["decode: third"]  # "key mask" has its earlier rows


@pytest.mark.parametrize(
    "command, words",
    [
        ("run.py", "no CUDA device: nothing to time"),
        ("compare.py before after", "no CUDA device: nothing to time"),
        ("transformers_models.py --tiny --cases nope", "--cases: none of ["),
        ("context_parallel.py", "wanted to be started by torchrun"),
    ],
)
def test_what_cannot_be_timed_is_said_in_a_line(command: str, words: str) -> None:
    script, *arguments = command.split()
    if script == "transformers_models.py":
        pytest.importorskip("transformers")
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 1 and result.stdout == ""
    assert words in result.stderr and "Traceback" not in result.stderr


def test_a_choice_of_no_case_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an empty file would replace the recorded results."""
    monkeypatch.setattr(sys, "argv", ["run.py", "--cases", "nope"])
    with pytest.raises(SystemExit, match="--cases, --skip: they leave no case"):
        run.choose(run.parse())
