"""examples/compare_attention.py, tiny: it runs to its end, and all start from the same weights."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "benchmarks/results/quality_h200.json"


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    for needed in ("matplotlib", "tqdm"):
        pytest.importorskip(needed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    import compare_attention
    from quality import attentions, plan, report, tasks

    yield SimpleNamespace(
        main=compare_attention.main, attentions=attentions, plan=plan, report=report, tasks=tasks
    )
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("quality") / "results.json"
    found = example.main(
        ["--quick", "--device=cpu", "--seeds=2", "--no-progress", f"--output={path}"]
    )
    assert json.loads(path.read_text()) == found
    return dict(found)


def test_trains_everything(results: dict) -> None:
    runs = results["runs"]
    assert len({(r["task"], r["attention"], r["seed"]) for r in runs}) == len(runs) == 4 * 3 * 2
    assert all(run["complete"] and run["steps"] == 4 for run in runs)
    assert all(0 < run["final"]["loss"] < 12 for run in runs)


def test_renders(example: SimpleNamespace, results: dict, tmp_path: Path) -> None:
    report = example.report
    (tmp_path / "quality.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.render(results, tmp_path)
    page = (tmp_path / "quality.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert all(title in page for title in report.TASKS.values())
    drawn = {path.name for path in (tmp_path / "assets").iterdir()}
    assert drawn == {"quality_loss.png", "quality_recall.png"}  # times on a CPU are not drawn
    report.plot_costs(tmp_path / "cost.png", results)
    assert (tmp_path / "cost.png").stat().st_size > 10_000


def test_stops_in_time(example: SimpleNamespace, tmp_path: Path) -> None:
    """Runs that the limit cuts short are recorded as incomplete, and are in no table."""
    arguments = ["--quick", "--device=cpu", "--seeds=1", "--limit=1e-3", "--no-progress"]
    found = example.main([*arguments, "--tasks", "recall", f"--output={tmp_path / 'results.json'}"])
    assert [run["complete"] for run in found["runs"]] == [False] * 3
    assert example.report.tasks_of(found) == []
    with pytest.raises(SystemExit, match="has no task of which all runs ended"):
        example.main([f"--render={tmp_path / 'results.json'}", f"--docs={tmp_path}"])
    (tmp_path / "others.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"others.json has no task"):
        example.main([f"--render={tmp_path / 'others.json'}", f"--docs={tmp_path}"])
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "others.json"}


def test_renders_into_the_page_that_is_there(
    example: SimpleNamespace, results: dict, tmp_path: Path
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(SystemExit, match=r"--docs: got .*none, wanted a folder with the page"):
        example.main([f"--render={tmp_path / 'results.json'}", f"--docs={tmp_path / 'none'}"])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--small", "--tasks", "text"), "--tasks: got 'text' with --small, wanted some of 'rec"),
        (("--quick", "--tasks", "nope"), "--tasks: got 'nope', wanted some of 'recall'"),
        (("--render=nothing.json",), "--render: got nothing.json, wanted a file of results"),
        (("--quick", "--output=."), "--output: got the folder ., wanted a file"),
        (("--quick", "--steps-scale=inf"), "--steps-scale: got inf, wanted a positive number"),
    ],
)
def test_refuses_before_it_trains(
    example: SimpleNamespace,
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        example.main(["--no-progress", *arguments])
    assert words in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_all_start_alike(example: SimpleNamespace) -> None:
    """If the window holds all keys, the three attentions are the same function before training."""
    config = example.plan.QUICK[example.plan.TEXT].config
    tokens = torch.arange(config.window)[None]
    full, *others = (
        example.attentions.make_model(kind, config, torch.device("cpu"))(tokens)
        for kind in example.attentions.ATTENTIONS
    )
    for other in others:
        torch.testing.assert_close(other, full)


def test_window_is_that_of_constant_scores(example: SimpleNamespace) -> None:
    """Untrained, running top-w is the sliding window: scores are equal, and later keys win."""
    config = example.plan.QUICK[example.plan.TEXT].config
    tokens = torch.arange(config.length)[None]
    sliding, top, full = (
        example.attentions.make_model(kind, config, torch.device("cpu"))(tokens)
        for kind in (
            example.attentions.SLIDING,
            example.attentions.TOP,
            example.attentions.FULL,
        )
    )
    torch.testing.assert_close(top, sliding)
    assert not torch.allclose(full, sliding)


@pytest.mark.parametrize("fewest,nearest", [(3, 0), (1, 9)])
def test_recall_asks_what_it_told(example: SimpleNamespace, fewest: int, nearest: int) -> None:
    recall = example.tasks.RecallConfig(
        pairs=3, fewest_pairs=fewest, questions=10, keys=8, values=8, nearest=nearest
    )
    generator = torch.Generator().manual_seed(0)
    (tokens, targets), distance = example.tasks.draw_recall(recall, 32, 40, generator)
    counts = set()
    for row in range(32):
        pairs = {key: value for key, value in tokens[row, :6].view(3, 2).tolist() if key < 8}
        counts.add(len(pairs))
        (asked,) = (targets[row] != example.tasks.NO_TARGET).nonzero(as_tuple=True)
        assert len(asked) == 10 and asked.min() >= 6 + nearest
        for place in asked.tolist():
            assert targets[row, place] == pairs[int(tokens[row, place])]
            assert tokens[row, place - distance[row, place]] == targets[row, place]
        rest = set(range(2 * len(pairs), 40)) - set(asked.tolist())
        assert all(tokens[row, place] >= 16 for place in rest)
    assert counts == set(range(fewest, 4))


def test_joined_pairs(example: SimpleNamespace) -> None:
    recall = example.tasks.RecallConfig(
        pairs=3, fewest_pairs=3, questions=10, keys=4, values=8, joined=True
    )
    generator = torch.Generator().manual_seed(0)
    (tokens, targets), distance = example.tasks.draw_recall(recall, 8, 40, generator)
    for row in range(8):
        pairs = {int(pair) // 8: int(pair) % 8 for pair in tokens[row, :3]}
        (asked,) = (targets[row] != example.tasks.NO_TARGET).nonzero(as_tuple=True)
        assert len(pairs) == 3 and len(asked) == 10
        for place in asked.tolist():
            key = int(tokens[row, place]) - 4 * 8
            assert int(targets[row, place]) - 4 * 9 == pairs[key]
            assert tokens[row, place - distance[row, place]] == key * 8 + pairs[key]


def test_cache_bytes(example: SimpleNamespace) -> None:
    """Keys and values in bfloat16; with running top-w a float32 score and a position per entry."""
    config = example.plan.QUICK[example.plan.TEXT].config
    entry = 2 * 2 * config.width // config.heads * config.kv_heads * config.layers
    full, sliding, top = (
        example.attentions.cache_bytes(kind, config, 40) for kind in example.attentions.ATTENTIONS
    )
    assert full == 40 * entry and sliding == config.window * entry
    assert top == config.window * (entry + (4 + 4) * config.kv_heads * config.layers)


def test_page_shows_what_was_recorded(example: SimpleNamespace) -> None:
    page = (ROOT / "docs/quality.md").read_text()
    assert example.report.with_tables(page, json.loads(RECORDED.read_text())) == page
