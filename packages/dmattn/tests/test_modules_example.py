"""The training example, small: it runs to its end, its loss falls, and its files are there."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
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
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_bytes_lm")


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
    assert written["generated"]["bytes_per_second"] > 0
    assert written["generated"]["text"] in printed
    assert not (tmp_path / "loss_paths.png").exists()


def test_same_seed_same_losses(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=3", "--length=32", "--window=8", f"--output-dir={tmp_path}"]
    first = example.main([*arguments, "--seed=3"])["train_bits"]
    assert first == example.main([*arguments, "--seed=3"])["train_bits"]
    assert first != example.main([*arguments, "--seed=4"])["train_bits"]


def test_window_wider_than_the_context(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=2", "--length=32", "--window=100", f"--output-dir={tmp_path}"]
    assert len(example.main(arguments)["train_bits"]) == 2
    assert (tmp_path / "mask.png").exists()


def test_prompt_and_length_of_the_text(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=1", "--length=32", "--window=8", f"--output-dir={tmp_path}"]
    written = example.main([*arguments, "--prompt=d\u00e9f", "--generate=7"])["generated"]
    assert written["prompt"] == "d\u00e9f"
    assert 1 <= len(written["text"]) <= 7  # bytes that are no UTF-8 become one character or more
    assert "generated" not in example.main([*arguments, "--generate=0"])


def test_mask_paths_side_by_side(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "--steps=6", "--length=48", "--window=8", f"--output-dir={tmp_path}"]
    metrics = example.main([*arguments, "--mask-path=both"])
    runs = metrics["mask_paths"]
    assert list(runs) == ["window", "dense", "nudged"]
    assert runs["window"]["max_difference_bits"] == 0
    for name in ("dense", "nudged"):
        gaps = [
            abs(a - b) for a, b in zip(runs[name]["train_bits"], metrics["train_bits"], strict=True)
        ]
        assert runs[name]["max_difference_bits"] == max(gaps)
        assert runs[name]["mean_difference_bits"] == pytest.approx(sum(gaps) / 6)
        assert gaps[0] < 1e-5
        assert max(gaps) < 0.05
        assert runs[name]["heldout_bits"][0][1] == pytest.approx(metrics["heldout_bits"][0][1])
    losses = {name: (run["train_bits"], run["heldout_bits"]) for name, run in runs.items()}
    assert losses["nudged"] != losses["window"]
    assert (tmp_path / "loss_paths.png").read_bytes().startswith(b"\x89PNG")
    assert "loss_paths.png" in capsys.readouterr().out
    dense = example.main([*arguments, "--mask-path=dense"])
    assert dense["train_bits"] == runs["dense"]["train_bits"]


def test_runs_that_do_not_differ_are_drawn(example: ModuleType, tmp_path: Path) -> None:
    """A few float32 steps may give equal losses; a logarithmic axis then has nothing to show."""
    pictures = importlib.import_module("bytes_lm.pictures")
    history = example.History([8.0, 7.0], [(0, 8.0), (2, 7.0)], 1.0, 1.0)
    pictures.plot_paths(tmp_path / "paths.png", {"window": history, "dense": history}, "a title")
    assert (tmp_path / "paths.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_with_a_line(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        example.run(interrupted)
    assert stop.value.code == 130 and capsys.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize("path", ["dense", "both"])
def test_no_mask_to_compare(example: ModuleType, tmp_path: Path, path: str) -> None:
    arguments = [*SMALL, "--length=32", "--window=32", f"--output-dir={tmp_path}"]
    with pytest.raises(SystemExit, match="got a window of 32 for a context of 32"):
        example.main([*arguments, f"--mask-path={path}"])


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64")
def test_mask_paths_train_alike(example: ModuleType) -> None:
    """In float64, and on random bytes, where no two scores are equal but for rounding."""
    config = example.Config(
        layers=2, width=32, heads=4, kv_heads=2, length=64, window=12, batch=4, steps=20
    )
    chances = torch.rand(256) ** 4
    streams = [
        torch.multinomial(chances, 100_000, replacement=True).to(torch.uint8) for _ in range(2)
    ]
    text, cpu = example.Text(*streams, 1, 1), torch.device("cpu")

    def losses(path: str, window: int) -> list[float]:
        model = example.make_model(config, path, cpu)
        for layer in model.attention_layers():
            layer.window_size = window
        curve: list[float] = example.train(model, text, config, cpu, progress=False).train
        assert all(layer.A.any() for layer in model.attention_layers())  # no sliding window
        return curve

    expected = losses("window", 12)
    assert expected[-1] < expected[0] - 0.3
    assert losses("dense", 12) == pytest.approx(expected, abs=1e-12)
    assert losses("dense", 11) != pytest.approx(expected, abs=1e-6)  # one key less is noticed


def test_nudged_weights(example: ModuleType) -> None:
    config, cpu = example.Config(layers=1, width=32, heads=2, kv_heads=1), torch.device("cpu")
    plain, nudged = (
        dict(example.make_model(config, path, cpu).named_parameters())
        for path in ("window", "nudged")
    )
    bytes_read = torch.arange(64)[None]
    logits = [example.make_model(config, path, cpu)(bytes_read) for path in ("window", "nudged")]
    assert 0 < (logits[0] - logits[1]).abs().max() < 1e-4
    for name, parameter in plain.items():
        moved = (nudged[name] - parameter).abs()
        assert ((moved > 0) == (parameter != 0)).all(), name
        assert (moved <= parameter.abs() * 2**-23).all(), name


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
    pictures = importlib.import_module("bytes_lm.pictures")
    torch.manual_seed(0)
    scores = torch.randint(5, (20,)).float()
    keep = pictures.kept_keys(scores, 4)
    for query in range(20):
        best = sorted(range(query + 1), key=lambda j: (scores[j].item(), j))[-4:]
        assert keep[query].nonzero().flatten().tolist() == sorted(best)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--no-such-option", "unrecognized arguments"),
        ("--mask-path=triangle", "invalid choice"),
        ("--generate=-1", "--generate: got -1, wanted 0 or more"),
        ("--prompt=", "--prompt: got nothing"),
    ],
)
def test_bad_options(
    example: ModuleType, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main([option])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps=-1"], "--steps: got -1, wanted a number from 0 up"),
        (["--batch=0"], "--batch: got 0, wanted a number from 1 up"),
        (["--length=0"], "--length: got 0, wanted a number from 1 up"),
        (["--window=0"], "--window: got 0, wanted a number from 1 up"),
        (["--layers=0"], "--layers: got 0, wanted a number from 1 up"),
        (["--kv-heads=0"], "--kv-heads: got 0, wanted a number from 1 up"),
        (["--seed=-1"], "--seed: got -1, wanted a number from 0 up"),
        (["--lr=nan"], "--lr: got nan, wanted a positive number"),
        (["--lr=inf"], "--lr: got inf, wanted a positive number"),
        (["--lr=0"], "--lr: got 0.0, wanted a positive number"),
        (["--heads=3"], "--heads: got 3, wanted a multiple of --kv-heads = 2"),
        (["--width=130"], r"--width: got 130, wanted a multiple of 2 \* --heads = 8"),
        (["--width=20"], r"--width: got 20, wanted a multiple of 2 \* --heads = 8"),
        (["--width=2048"], r"--width: got 2048, wanted at most 256 \* --heads = 1024"),
        (["--length=100000000"], "--length: got 100000000, wanted at most"),
    ],
)
def test_refused_before_training(
    example: ModuleType,
    tmp_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*_: object) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(example, "train", train)
    with pytest.raises(SystemExit, match=message):
        example.main(["--device=cpu", "--no-progress", f"--output-dir={tmp_path}", *options])


def test_output_that_is_no_folder(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(SystemExit, match=r"--output-dir: got .*taken, wanted a folder"):
        example.main([*SMALL, f"--output-dir={tmp_path / 'taken'}"])


def test_no_steps(example: ModuleType, tmp_path: Path) -> None:
    arguments = [*SMALL, "--steps=0", "--length=32", "--window=8", f"--output-dir={tmp_path}"]
    metrics = example.main([*arguments, "--generate=0"])
    assert metrics["train_bits"] == []
    assert len(metrics["heldout_bits"]) == 1


def test_without_matplotlib(tmp_path: Path) -> None:
    """--help works; a run says at once what is missing, and not after it has trained."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import train_bytes_lm; train_bytes_lm.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--mask-path" in result.stdout
    command += ["--device=cpu", f"--output-dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "the pictures at the end need matplotlib: pip install matplotlib\n"


def test_context_parallel_wants_torchrun(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    arguments = [*SMALL, "--context-parallel", f"--output-dir={tmp_path}"]
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        example.main(arguments)
    with pytest.raises(SystemExit):
        example.main([*arguments, "--mask-path=both"])
    assert "--mask-path" in capsys.readouterr().err
