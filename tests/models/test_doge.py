"""Doge models with running top-w in bfloat16: logits, gradients, caches and generated text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doge_models import left_padding, make_doge, tokens
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from attention.targets import target_device
from dmattn.integrations.transformers import DogeCache, enable_doge
from models.graphs import graph_launches, only_cuda_graphs
from models.precision import (
    Models,
    check,
    check_outcomes,
    logits_and_gradients,
    models,
    on_device,
)

LENGTH = 250  # each token occurs once; more than a block of 128 rows
PROMPT, NEW_TOKENS = 41, 64
SIZES = {"head_dim": 64}


def made(**settings: Any) -> Models:
    return models(make_doge(**SIZES | settings), enable_doge)


# `is_moe` has no case with padding: experts of Doge mix the tokens of a batch, padding included.
ATTENTION: list[dict[str, Any]] = [{}, {"window": 100}, {"sliding_window": 12}]
ATTENTION += [{"sliding_window": 30}]
CASES = [(s, side) for s in ATTENTION for side in ("none", "left", "right")]
CASES += [({"is_moe": True}, "none")]


@pytest.mark.parametrize("settings, side", CASES, ids=str)
def test_logits_and_gradients(settings: dict[str, Any], side: str) -> None:
    ids = tokens(2, LENGTH)
    real = torch.ones_like(ids)
    if side != "none":
        real = left_padding(ids, 0, 60)
        real = real.flip(1) if side == "right" else real
    inputs = {"input_ids": ids, "use_cache": False}
    inputs |= {} if side == "none" else {"attention_mask": real}
    check(made(**settings), lambda model: logits_and_gradients(model, real, **inputs))


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 12}], ids=str)
def test_packed_documents(settings: dict[str, Any]) -> None:
    """Documents are given by positions that restart; they differ between the rows of the batch."""
    lengths = ((3, 40, 1, 150, 56), (90, 160))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = tokens(2, LENGTH)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    real = torch.ones_like(ids)
    check(made(**settings), lambda model: logits_and_gradients(model, real, **inputs))


@pytest.mark.parametrize("side", ["none", "left"])
def test_future_tokens_change_nothing(side: str) -> None:
    model, ids = made().ours.eval(), tokens(2, LENGTH)
    changed = ids.clone()
    changed[:, 200:] = ids[:, 200:].flip(1)
    real = torch.ones_like(ids) if side == "none" else left_padding(ids, 0, 60)
    real = real.to(target_device())
    with torch.no_grad():
        a, b = (model(x.to(real.device), attention_mask=real).logits for x in (ids, changed))
    past = real[:, :200].bool()
    assert torch.equal(a[:, :200][past], b[:, :200][past])
    assert not torch.equal(a[:, 200:], b[:, 200:])


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=PROMPT + NEW_TOKENS),
    "kept keys": DogeCache,
}


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_generated_logits(cache: str, is_moe: bool) -> None:
    """The logits by which generate() chose each token, compared with whole forwards over its text.

    Each token occurs once, since which of two equal scores eager keeps is not defined. Experts mix
    the tokens of a batch: with them the text is one sequence, which all models take token by token.
    """
    check_generated(made(is_moe=is_moe), CACHES[cache], is_moe, disable_compile=True)


@pytest.mark.cuda
@pytest.mark.slow
def test_generated_by_cuda_graphs() -> None:
    """Steps over a DogeCache, compiled by generate() itself; each is a CUDA graph.

    A new cache lies elsewhere in memory, so the graph is recorded again for it.
    """
    trio = made()
    how = CompileConfig(mode="reduce-overhead", fullgraph=True)

    def make_cache(config: Any) -> DogeCache:
        return DogeCache(config, compileable=True)

    with only_cuda_graphs():
        check_generated(trio, make_cache, False, compile_config=how)
        launches = graph_launches(
            lambda: check_generated(trio, make_cache, False, compile_config=how)
        )
    assert launches >= NEW_TOKENS - 5  # of which the first are for warming up and recording


def check_generated(trio: Models, make_cache: Any, is_moe: bool, **options: Any) -> None:
    ids = tokens(1 if is_moe else 2, PROMPT)
    real = torch.ones_like(ids) if is_moe else left_padding(ids, 0, 8)
    inputs = on_device({"input_ids": ids * real, "attention_mask": real})
    found = trio.ours.eval().generate(
        **inputs,
        **options,
        past_key_values=make_cache(trio.ours.config),
        no_repeat_ngram_size=1,
        eos_token_id=None,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ours = torch.stack(found.logits, 1).float()
    text = found.sequences[:, :-1]
    mask = torch.ones_like(text)
    mask[:, :PROMPT] = inputs["attention_mask"]
    exact, eager = (forced(m, text, mask, is_moe) for m in (trio.exact, trio.eager))
    check_outcomes({"logits": exact}, {"logits": eager}, {"logits": ours})


@torch.no_grad()
def forced(model: Any, text: Tensor, mask: Tensor, in_steps: bool) -> Tensor:
    """Logits (B, NEW_TOKENS, vocabulary) behind the prompt."""
    model.eval()
    if not in_steps:
        logits: Tensor = model(text, attention_mask=mask).logits
        return logits[:, -NEW_TOKENS:].float()
    past = DynamicCache(config=model.config)
    parts = [text[:, :PROMPT], *text[:, PROMPT:].split(1, 1)]
    steps = [model(part, past_key_values=past).logits[:, -1] for part in parts]
    return torch.stack(steps, 1).float()
