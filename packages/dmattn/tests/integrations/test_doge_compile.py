"""Doge models under torch.compile: without graph breaks, and with two graphs for all lengths."""

from typing import Any

import pytest
import torch
from doge_models import WINDOW, close, left_padding, make_doge, outcome, tokens
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch_releases import needs_2_9
from transformers import CompileConfig, DynamicCache, StaticCache

from dmattn.integrations.transformers import DogeCache, enable_doge

pytestmark = needs_2_9("cannot compile Doge models of transformers, with dmattn or without")

LENGTHS = (40, 48, 55, 72, 90)  # a graph for the first one, and a graph for all that follow


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


def test_prompts_of_a_model_that_is_compiled_by_hand() -> None:
    """generate() makes their masks outside of the graph, as an IntervalMask, which can be read."""
    model, ids = enable_doge(make_doge(layers=1)).eval(), tokens(2, 20)
    options: dict[str, Any] = {"attention_mask": left_padding(ids, 0, 9), "do_sample": False}
    options |= {"no_repeat_ngram_size": 1, "max_new_tokens": 3, "eos_token_id": None}

    def room() -> StaticCache:
        return StaticCache(config=model.config, max_cache_len=30)

    wanted = model.generate(ids, past_key_values=room(), **options)
    plain = model.forward
    model.forward, _ = compiled(plain)
    try:
        found = model.generate(ids, past_key_values=room(), disable_compile=True, **options)
    finally:
        model.forward = plain
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("compileable", [False, True])
def test_padding_beside_a_cache_of_kept_keys(compileable: bool) -> None:
    model, ids = enable_doge(make_doge(layers=1)).eval(), tokens(2, 23)
    real = left_padding(ids, 0, 9)
    step, _ = compiled(model)
    logits: list[Tensor] = []
    for run in (model, step):
        cache = DogeCache(model.config, compileable=compileable)
        end = 0
        with torch.no_grad():
            for part in ids.split([20, 1, 1, 1], 1):
                end += part.shape[1]
                found = run(part, attention_mask=real[:, :end], past_key_values=cache)
        logits.append(found.logits)
    assert close(logits[1], logits[0])


def compiled_by_generate(graphs: list[Any]) -> CompileConfig:
    """A config by which generate() compiles on the CPU, too, and adds each graph to `graphs`."""

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    how = CompileConfig(backend=count, mode=None, fullgraph=True)
    how._compile_all_devices = True
    return how


def test_generate_compiles_its_steps() -> None:
    """One graph, in which no Python number grows with the text, serves all tokens of two texts."""
    model = enable_doge(make_doge(layers=1)).eval()
    graphs: list[Any] = []
    how = compiled_by_generate(graphs)
    for start in range(2):
        ids = tokens(2 + start, 41)[start:]
        real = left_padding(ids, 0, 9)
        options: dict[str, Any] = {"attention_mask": real, "do_sample": False}
        options |= {"no_repeat_ngram_size": 1, "max_new_tokens": 30, "eos_token_id": None}
        wanted = model.generate(ids * real, past_key_values=DogeCache(model.config), **options)
        cache = DogeCache(model.config, compileable=True)
        options["compile_config"] = how
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = model.generate(ids * real, past_key_values=cache, **options)
        assert torch.equal(found, wanted)
        assert cache.get_seq_length() == 41 + 29
        # The text can be continued from there, and the count of its tokens continues, too.
        more = wanted[:, -1:]
        mask = torch.cat([real, real.new_ones(2, 30)], 1)
        with torch.no_grad():
            model(more, attention_mask=mask, past_key_values=cache)
        assert cache.get_seq_length() == 41 + 30
    assert len(graphs) == 1


def test_generate_compiles_prompts_in_chunks() -> None:
    model, ids = enable_doge(make_doge(layers=1)).eval(), tokens(2, 30)
    options: dict[str, Any] = {"do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 8}
    options |= {"prefill_chunk_size": 7}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, past_key_values=DogeCache(model.config), **options)
    graphs: list[Any] = []
    options["compile_config"] = compiled_by_generate(graphs)
    cache = DogeCache(model.config, compileable=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
    assert graphs
