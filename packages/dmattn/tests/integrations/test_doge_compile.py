"""Doge models under torch.compile: without a graph break, and in two graphs for all lengths."""

from typing import Any

import pytest
import torch
from doge_models import WINDOW, close, left_padding, make_doge, outcome, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from dmattn.integrations.transformers import DogeCache, enable_doge

LENGTHS = (40, 48, 55, 72, 90)  # the first makes one graph, the second another for all to come


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compiled(function: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def inputs_of(case: str, ids: Tensor) -> dict[str, Any]:
    if case == "padding":
        return {"attention_mask": left_padding(ids, 0, 9)}
    if case == "packed":
        rows = [(13, ids.shape[1] - 13), (1, ids.shape[1] - 1)]
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        return {"position_ids": positions}
    return {}


@pytest.mark.parametrize(
    "case, settings",
    [
        ("plain", {}),
        ("padding", {}),
        ("packed", {}),
        ("packed", {"sliding_window": WINDOW - 5}),
    ],
)
def test_training(case: str, settings: dict[str, Any]) -> None:
    model = enable_doge(make_doge(layers=1, **settings))
    model, counter = compiled(model)
    for length in LENGTHS:
        ids = tokens(2, length)
        inputs = inputs_of(case, ids) | {"use_cache": False}
        found = outcome(model, ids, **inputs)
        wanted = outcome(model._orig_mod, ids, **inputs)
        for a, b in zip(found.values(), wanted.values(), strict=True):
            assert close(a, b)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "kind, new", [(DynamicCache, 1), (StaticCache, 1), (StaticCache, 7), (DogeCache, 1)]
)
def test_generating(kind: Any, new: int) -> None:
    """The prompt is not compiled, as generate() does not compile it either."""
    model, ids = enable_doge(make_doge(layers=1)).eval(), tokens(2, 41)
    room = {"max_cache_len": 45} if kind is StaticCache else {}
    cache = kind(config=model.config, **room)
    step, counter = compiled(lambda ids, cache: model(ids, past_key_values=cache).logits)
    with torch.no_grad():
        parts = [model(ids[:, :20], past_key_values=cache).logits]
        parts += [step(part, cache) for part in ids[:, 20:].split(new, 1)]
        assert close(torch.cat(parts, 1), model(ids).logits)
    assert counter.frame_count <= 2
