"""The serving example: a running batch gives each request what it gets alone."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from bytes_lm.config import Config
from bytes_lm.generation import continue_text
from bytes_lm.model import BytesLM
from bytes_lm.serving import Engine, Request


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_answer_is_that_of_its_request_alone() -> None:
    torch.manual_seed(0)
    model = BytesLM(Config(layers=2, width=32, heads=2, kv_heads=1, window=12)).double()
    for layer in model.attention_layers():
        for parameter in (layer.A, layer.dt_proj.weight, layer.o_proj.weight):
            torch.nn.init.normal_(parameter)
    lengths, counts = (1, 90, 30, 12, 61, 5, 30), (9, 1, 14, 6, 3, 20, 5)
    prompts = [torch.randint(256, (n,), dtype=torch.uint8) for n in lengths]
    arrivals = [0.0, 0.0, 0.05, 0.0, 0.01, 0.3, 0.0]
    requests = [Request(*given) for given in zip(arrivals, prompts, counts, strict=True)]
    with Engine(model, slots=3, chunk=20) as engine:
        for _ in range(2):  # again, in slots that were used before
            for answer, request in zip(engine.serve(requests), requests, strict=True):
                by_itself = continue_text(model, request.prompt, request.count, temperature=0.0)
                assert bytes(answer.text) == by_itself.text
                assert engine.serve_alone(request).text == answer.text
                assert answer.times == sorted(answer.times) and answer.times[0] > request.arrival
    assert len(engine.free) == 3 and not engine.running and not engine.active.any()


def test_goes_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = BytesLM(Config(layers=1, width=32, heads=2, kv_heads=1, window=12)).double()
    prompts = [torch.randint(256, (n,), dtype=torch.uint8) for n in (5, 40, 7)]
    want = [continue_text(model, prompt, 3, temperature=0.0).text for prompt in prompts]
    with Engine(model, slots=2, chunk=20) as engine:
        steps, step = iter([0, 1]), engine._call_step

        def interrupted() -> None:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            step()

        monkeypatch.setattr(engine, "_call_step", interrupted)
        with pytest.raises(KeyboardInterrupt):  # while one request is answered and one is read
            engine.serve([Request(0.0, prompt, 10**9) for prompt in prompts])
        monkeypatch.setattr(engine, "_call_step", step)
        assert not engine.running and not engine.reading and not engine.active.any()
        answers = engine.serve([Request(0.0, prompt, 3) for prompt in prompts])
    assert [bytes(answer.text) for answer in answers] == want


def test_serves_and_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for needed in ("matplotlib", "tqdm"):
        pytest.importorskip(needed)
    example = importlib.import_module("serve_bytes_lm")
    arguments = ["--device=cpu", "--steps=0", "--requests=4", "--longest=40", "--count=5"]
    found = example.main([*arguments, "--rate=50", f"--output-dir={tmp_path}"])
    assert json.loads((tmp_path / "serving.json").read_text()) == found
    assert (tmp_path / "serving.png").stat().st_size > 5000
    assert found["equal_alone"] == found["requests"] == 4
    assert found["time_to_first_byte"]["p50"] <= found["time_to_first_byte"]["p99"]
    assert found["equal_by_itself"] == 4
    assert "4 of 4 answers are those that requests get alone" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--longest: got 1000000000, wanted less"):
        example.main([*arguments, "--longest=1000000000", f"--output-dir={tmp_path}"])
    with pytest.raises(SystemExit, match=r"--output-dir: got .*serving\.png, wanted"):
        example.main([*arguments, f"--output-dir={tmp_path / 'serving.png'}"])
    for wrong in ("--rate=1e-300", "--seed=99999999999999999999", "--requests=2.5"):
        with pytest.raises(SystemExit):
            example.main([*arguments, wrong])
        option, got = wrong.split("=")
        words = capsys.readouterr().err
        assert option in words and f"got {got}, wanted" in words


def test_requests_for_nothing_are_refused() -> None:
    prompt = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"prompt: got shape \(0,\), wanted .* at least one byte"):
        Request(0.0, prompt[:0], 1)
    with pytest.raises(ValueError, match="count: got 0, wanted at least 1"):
        Request(0.0, prompt, 0)
    with pytest.raises(TypeError, match=r"count: got 2\.5, wanted an int"):
        Request(0.0, prompt, 2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prompt: got dtype torch\.int64, wanted torch\.uint8"):
        Request(0.0, prompt.long(), 1)
    for never in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"arrival: got {never}, wanted a finite number"):
            Request(never, prompt, 1)
    model = BytesLM(Config(layers=1, width=32, heads=2, kv_heads=1, window=12))
    for name in ("slots", "chunk"):
        with pytest.raises(ValueError, match=f"{name}: got 0, wanted at least 1"):
            Engine(model, **({"slots": 1, "chunk": 1} | {name: 0}))
