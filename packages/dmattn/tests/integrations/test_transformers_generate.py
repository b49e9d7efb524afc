"""generate() with every cache: the same greedy tokens as with eager attention."""

from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, make_model, with_attention
from torch import Tensor
from transformers import DynamicCache, StaticCache

PROMPT = 30  # longer than the window


def prompt(length: int = PROMPT) -> dict[str, Tensor]:
    """Two prompts, the first padded on its left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, implementation: str, new_tokens: int = 64, **options: Any) -> Tensor:
    model = with_attention(model, implementation).eval()
    options = {"max_new_tokens": new_tokens, "do_sample": False} | options
    tokens: Tensor = model.generate(**options)
    return tokens


@pytest.mark.parametrize(
    "name, cache",
    [
        ("llama", "dynamic"),
        ("llama", "static"),
        # Layers with a window have sliding caches. Gemma 3 and GPT-OSS have layers of both kinds.
        ("mistral", "dynamic"),
        ("gemma3", "static"),
        ("gpt_oss", "dynamic"),
        ("llama4", "dynamic"),
        ("t5", "dynamic"),
    ],
)
def test_greedy_tokens(name: str, cache: str) -> None:
    model = make_model(name)
    options = prompt() | {"cache_implementation": cache}
    eager = greedy(model, "eager", **options)
    assert eager.shape[1] >= 64
    assert torch.equal(greedy(model, "dmattn", **options), eager)


def test_window_over_a_cache_that_keeps_all() -> None:
    model = make_model("mistral")
    tokens = [
        greedy(model, implementation, 16, **prompt(), past_key_values=DynamicCache())
        for implementation in ("eager", "dmattn")
    ]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_dialogue(cache: Any) -> None:
    """A second prompt for a filled cache, and after reset() the same cache for another dialogue."""
    model = make_model("gemma3")
    spoken = []
    for implementation in ("eager", "dmattn"):
        options = {"config": model.config} | ({"max_cache_len": 99} if cache is StaticCache else {})
        past = cache(**options)
        found = []
        for _ in range(2):
            first = greedy(model, implementation, 5, **prompt(), past_key_values=past)
            more = torch.cat([first, prompt()["input_ids"][1:].expand(2, -1)], 1)
            mask = torch.ones_like(more)
            mask[0, :9] = 0
            history = {"input_ids": more, "attention_mask": mask, "past_key_values": past}
            found.append(greedy(model, implementation, 5, **history))
            past.reset()
        assert torch.equal(*found)
        spoken.append(found[0])
    assert torch.equal(*spoken)
