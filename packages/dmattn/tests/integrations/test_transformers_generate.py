"""generate(): the same greedy tokens as eager attention, with every cache, and from masks that
hold nothing of the size of a prompt squared."""

from typing import Any

import pytest
import torch
from hf_models import DECODERS, VOCABULARY, make_model, with_attention
from torch import Tensor

NEW_TOKENS = 64
PROMPT = 30  # longer than the window


def prompt(length: int = PROMPT) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, implementation: str, **options: Any) -> Tensor:
    model = with_attention(model, implementation).eval()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | prompt() | options
    tokens: Tensor = model.generate(**options)
    return tokens


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens(name: str, cache: str) -> None:
    """Models with windows get caches that slide, of either kind."""
    model = make_model(name)
    eager = greedy(model, "eager", cache_implementation=cache)
    assert eager.shape == (2, PROMPT + NEW_TOKENS)
    assert torch.equal(greedy(model, "dmattn", cache_implementation=cache), eager)
