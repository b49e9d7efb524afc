"""The calls that benchmarks/random_calls.py draws: peers compute what dmattn computes."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks import random_calls
from benchmarks.random_calls import KINDS, Draw, Result
from torch import Tensor
from torch.nn.attention import SDPBackend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_calls_by_what_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_calls, "LENGTHS", (512, 520, 1024))
    monkeypatch.setattr(random_calls, "HEADS", (2, 4))
    monkeypatch.setattr(random_calls, "HEAD_DIMS", (8, 16))
    monkeypatch.setattr(random_calls, "_WITH_MASKS", {"math": SDPBackend.MATH})
    for name in ("CUDNN", "FLASH", "EFFICIENT"):
        monkeypatch.setattr(random_calls, name, SDPBackend.MATH)
    wide = random.Random.choice
    # Draw only from the first three of the lengths, batches and so on that a kind lists itself.
    monkeypatch.setattr(random.Random, "choice", lambda self, x: wide(self, x[:3]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("packed", "top")])
def test_peers_compute_the_same(kind: str, seed: int) -> None:
    drawn = KINDS[kind](Draw(seed, CPU))
    ours = drawn.ours()
    assert isinstance(ours, Tensor)
    for call in drawn.peers.values():
        found = call()
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, ours, rtol=2e-2, atol=2e-2)
    if drawn.inputs:
        torch.autograd.grad(ours.sum(), drawn.inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_call_again(kind: str) -> None:
    first, second = (KINDS[kind](Draw(7, CPU)) for _ in range(2))
    assert first.name == second.name
    for a, b in zip(first.inputs, second.inputs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["packed", "top"])
def test_our_side_runs(kind: str) -> None:
    drawn = KINDS[kind](Draw(1, CPU))
    out = drawn.ours()
    assert isinstance(out, Tensor) and bool(out.isfinite().all())
    torch.autograd.grad(out.sum(), drawn.inputs)


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    fast = Result("dense", "a fast one", 1.0, 1.5, "cuDNN", 2.0, 1.25, "flash")
    slow = Result("few rows", "a slow one", 1.0, 0.5, "flash")
    random_calls.show([fast, slow], below=1.0)
    text = capsys.readouterr().out
    assert "a slow one" in text and "a fast one" not in text
    assert "100%" in text and "0%" in text
