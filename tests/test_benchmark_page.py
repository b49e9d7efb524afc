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
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import parts, peers, render, run, summary  # noqa: E402
from benchmarks.cases import CASES, Case  # noqa: E402

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


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_groups_are_spread_over_gpus(gpus: int) -> None:
    found = parts.spread(CASES, gpus)
    assert [len(part) > 0 for part in found] == [True] * gpus
    assert sorted(CASES.index(case) for part in found for case in part) == list(range(len(CASES)))
    groups = [{case.group for case in part} for part in found]
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_runs_on_several_gpus_become_one() -> None:
    first, second = recorded(seconds=3), recorded(seconds=5)
    first["rows"], second["rows"] = first["rows"][2:], second["rows"][:2]
    second["ceilings"], second["not_run"] = {"copy_tb_s": 0.5, "matmul_tflops": 2.0}, ["decode: x"]
    found = parts.join([first, second])
    assert [row["group"] for row in found["rows"]] == ["key mask", "decode", "decode"]
    assert found["ceilings"] == {"copy_tb_s": 0.5, "matmul_tflops": 1.0}
    assert (found["not_run"], found["seconds"], found["gpus"]) == (["decode: x"], 5, 2)
    assert "Measured on 2 xs of one machine" in render.markdown(found, None)


def test_the_table_of_blocks_is_that_of_flex_attention() -> None:
    """Lengths that are not multiples of 128, and a rule that reads a tensor."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    end = torch.randint(0, 600, (2, 2, 500), generator=torch.Generator().manual_seed(0))

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i < end[b, h // 2, j])

    case = Case("a group", "a case", (), 2, 500, 500, 4, 2, 64)
    found = peers._blocks(case, rule, 2, 4, "cpu")
    padded = torch.nn.functional.pad(end, (0, 12))
    end = padded  # `create_block_mask` calls the rule with indices beyond the lengths
    wanted = flex.create_block_mask(rule, 2, 4, 500, 500, device="cpu", BLOCK_SIZE=128)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


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
