"""attn_implementation="dmattn" in bfloat16: logits, gradients, caches and generated text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, WINDOW, make_model, with_attention
from torch import Tensor
from transformers import CompileConfig

from attention.targets import target_device
from models.graphs import graph_launches, only_cuda_graphs
from models.precision import (
    Models,
    check,
    check_outcomes,
    logits_and_gradients,
    models,
    on_device,
)

NAMES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
LENGTH = 300  # more than two blocks of 128 rows
NEW_TOKENS = 64


def made(name: str) -> Models:
    # T5 has no softmax scale: with a larger head_dim rows would attend to hardly more than one key.
    model = make_model(name, head_dim=8 if name == "t5" else 64)
    return models(model, lambda model: with_attention(model, "dmattn"))


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padding(side: str, batch: int = 2, length: int = LENGTH) -> Tensor:
    """1 for tokens, 0 for the padding of the first sequence."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side != "none":
        mask[0, slice(0, 37) if side == "left" else slice(length - 37, length)] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, side: str) -> None:
    ids, real = tokens(), padding(side)
    inputs = {"input_ids": ids} | ({} if side == "none" else {"attention_mask": real})
    check(made(name), lambda model: logits_and_gradients(model, real, **inputs))


@pytest.mark.parametrize("side", ["none", "right"])
def test_encoder_and_decoder(side: str) -> None:
    """T5: a learned bias for each pair of positions, cross attention, no scale."""
    ids, real = tokens(), padding(side)
    decoder_ids, real_decoder = tokens(length=140).flip(1), padding(side, length=140)
    inputs = {"input_ids": ids, "decoder_input_ids": decoder_ids}
    if side != "none":
        inputs |= {"attention_mask": real, "decoder_attention_mask": real_decoder}
    check(made("t5"), lambda model: logits_and_gradients(model, real_decoder, **inputs))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_documents(name: str) -> None:
    """Documents are given by positions that restart; they differ between the rows of the batch."""
    lengths = ((3, 40, 1, 200, 56), (90, 210))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = tokens()
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    check(made(name), lambda model: logits_and_gradients(model, torch.ones_like(ids), **inputs))


@pytest.mark.parametrize("name", NAMES)
def test_future_tokens_change_nothing(name: str) -> None:
    model = made(name).ours.eval()
    ids = tokens()
    changed = ids.clone()
    changed[:, 200:] = ids[:, 200:].flip(1)
    for side in ("none", "left"):
        real = padding(side).to(target_device())
        with torch.no_grad():
            a, b = (model(x.to(real.device), attention_mask=real).logits for x in (ids, changed))
        past = real[:, :200].bool()
        a, b, c, d = a[:, :200][past], b[:, :200][past], a[:, 200:], b[:, 200:]
        if name == "gpt_oss":  # experts compute all tokens that are sent to them at once
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
        else:
            assert torch.equal(a, b)
        assert float((c - d).abs().max()) > 0.5


@pytest.mark.parametrize(
    "name, cache",
    [
        ("llama", "dynamic"),
        ("llama", "static"),
        # Layers with a window have sliding caches. Gemma and GPT-OSS have layers of both kinds.
        ("mistral", "dynamic"),
        ("gemma2", "dynamic"),
        ("gemma3", "static"),
        ("gpt_oss", "dynamic"),
        ("t5", "dynamic"),
    ],
)
def test_generated_logits(name: str, cache: str) -> None:
    check_generated(made(name), name, cache_implementation=cache, disable_compile=True)


@pytest.mark.cuda
@pytest.mark.slow
def test_generated_by_cuda_graphs() -> None:
    """generate() itself compiles the steps over a static cache, each of which is a CUDA graph.

    The model has no window: the static cache of transformers for a window recompiles by itself.
    """
    name = "llama"
    trio = made(name)
    how = CompileConfig(mode="reduce-overhead", fullgraph=True)
    options = {"cache_implementation": "static", "compile_config": how}
    with only_cuda_graphs():
        check_generated(trio, name, **options)
        launches = graph_launches(lambda: check_generated(trio, name, **options))
    assert launches >= NEW_TOKENS - 1


def check_generated(trio: Models, name: str, **options: Any) -> None:
    """The logits by which generate() chose each token, compared with whole forwards over its
    text."""
    ids, real = tokens(length=2 * WINDOW), padding("left", length=2 * WINDOW)
    inputs = on_device({"input_ids": ids * real, "attention_mask": real})
    found = trio.ours.eval().generate(
        **inputs,
        **options,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ours = torch.stack(found.logits, 1).float()
    assert ours.shape[1] == NEW_TOKENS

    def whole(model: Any) -> Tensor:
        text = found.sequences[:, :-1]
        mask = torch.ones_like(text)
        mask[:, : real.shape[1]] = inputs["attention_mask"]
        forward = {"input_ids": text, "attention_mask": mask}
        if name == "t5":
            forward = inputs | {"decoder_input_ids": text}
        with torch.no_grad():
            logits: Tensor = model.eval()(**forward).logits
        return logits[:, -NEW_TOKENS:].float()

    exact, eager = whole(trio.exact), whole(trio.eager)
    check_outcomes({"logits": exact}, {"logits": eager}, {"logits": ours})
