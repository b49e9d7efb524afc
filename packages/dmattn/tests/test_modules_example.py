"""The training example, small: it runs to its end, its loss falls, and its files are there."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_bytes_lm.py"
SMALL = ["--device=cpu", "--no-progress", "--layers=1", "--width=32", "--heads=2", "--kv-heads=1"]


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    for needed in ("matplotlib", "tqdm"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("train_bytes_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_trains_and_leaves_its_files(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--steps=30", "--length=64", "--window=16", "--batch=8", "--lr=1e-2"]
    metrics = example.main([*arguments, f"--output-dir={tmp_path}"])
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["config"]["window"] == 16
    assert written["final_heldout_bits"] == metrics["final_heldout_bits"]
    assert len(written["train_bits"]) == 30
    assert written["heldout_bits"][0][1] > 6.5  # nothing learned yet
    assert written["final_heldout_bits"] < written["heldout_bits"][0][1] - 1
    assert sum(written["train_bits"][-5:]) / 5 < written["train_bits"][0] - 1
    assert written["tokens_per_second"] > 0
    assert 3 < written["unigram_entropy_bits"] < 6
    for picture in ("loss_curve.png", "mask.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "loss_curve.png" in printed
    assert "verdict" in printed


def test_same_seed_same_losses(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=3", "--length=32", "--window=8", f"--output-dir={tmp_path}"]
    first = example.main([*arguments, "--seed=3"])["train_bits"]
    assert first == example.main([*arguments, "--seed=3"])["train_bits"]
    assert first != example.main([*arguments, "--seed=4"])["train_bits"]


def test_window_wider_than_the_context(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=2", "--length=32", "--window=100", f"--output-dir={tmp_path}"]
    assert len(example.main(arguments)["train_bits"]) == 2
    assert (tmp_path / "mask.png").exists()


def test_split_is_by_file(example: ModuleType, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"file{number}.py").write_bytes(f"{number:02}".encode() * 50_000)
    skipped = tmp_path / "site-packages"
    skipped.mkdir()
    (skipped / "other.py").write_bytes(b"x" * 1000)
    text = example.load_text(tmp_path)
    assert text.train_files + text.heldout_files == 40
    assert text.heldout_files > 0
    train, heldout = (bytes(part.tolist()) for part in (text.train, text.heldout))
    assert b"x" not in train + heldout
    assert not {train[i : i + 40] for i in range(0, len(train), 100_001)} & {
        heldout[i : i + 40] for i in range(0, len(heldout), 100_001)
    }


def test_too_little_text(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"print()")
    with pytest.raises(RuntimeError, match="wanted at least 100000"):
        example.load_text(tmp_path)


def test_unigram_entropy(example: ModuleType) -> None:
    assert example.unigram_entropy(torch.tensor([7, 7, 7], dtype=torch.uint8)) == 0
    uniform = torch.arange(256, dtype=torch.uint8).repeat(3)
    assert example.unigram_entropy(uniform) == pytest.approx(8)


def test_kept_keys(example: ModuleType) -> None:
    torch.manual_seed(0)
    scores = torch.randint(5, (20,)).float()
    keep = example.kept_keys(scores, 4)
    for query in range(20):
        best = sorted(range(query + 1), key=lambda j: (scores[j].item(), j))[-4:]
        assert keep[query].nonzero().flatten().tolist() == sorted(best)


def test_unknown_option(example: ModuleType) -> None:
    with pytest.raises(SystemExit):
        example.main(["--no-such-option"])
