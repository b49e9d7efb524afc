"""Logits and all gradients of models, against transformers' own eager attention.

The effect of rounding is measured: all weights are changed by up to one rounding of float32, and
eager attention is run again. dmattn, which adds up in another order, may differ from eager
attention by twice that effect plus 4 roundings. The largest of up to four such measurements counts,
since a single one may be small by chance. (Eager attention in float64 is no reference: it still
computes its softmax in float32, and gives NaN for rows of padding.)
"""

import re
from typing import Any

import pytest
import torch
from hf_models import (
    DECODERS,
    EPSILON,
    OTHERS,
    VOCABULARY,
    make_model,
    packed,
    relative_error,
    with_attention,
    with_rounded_weights,
)
from torch import Tensor

from dmattn.integrations.transformers.interval_mask import IntervalMask

DRAWS = 4
LENGTH = 150  # more than one block of 128 rows, and longer than windows and chunks


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def padding(side: str, batch: int = 2, length: int = LENGTH) -> Tensor:
    """1 for tokens, 0 for the padding of the first sequence."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, slice(0, 37) if side == "left" else slice(length - 37, length)] = 0
    return mask


def run(model: Any, real: Tensor, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Logits of the real tokens, and all gradients of a loss that depends on these logits alone."""
    model.zero_grad()
    logits = model(**inputs).logits
    logits = logits * real[..., None].to(logits.dtype)
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()}, gradients


def check_parity(model: Any, real: Tensor, **inputs: Any) -> None:
    eager = run(with_attention(model, "eager"), real, inputs)
    errors = errors_of(run(with_attention(model, "dmattn"), real, inputs), eager)
    allowed = [0.0, 0.0]
    for _ in range(DRAWS):  # stops at the first that allows the errors
        rounded = errors_of(run(with_rounded_weights(model), real, inputs), eager)
        allowed = [max(a, 2 * b + 4 * EPSILON) for a, b in zip(allowed, rounded, strict=True)]
        if all(error <= most for error, most in zip(errors, allowed, strict=True)):
            return
    raise AssertionError(f"logits and gradients: errors {errors}, allowed {allowed}")


def errors_of(found: tuple[Any, Any], exact: tuple[Any, Any]) -> list[float]:
    """The relative errors of the logits, and of the gradients."""
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [n for n in (*DECODERS, *OTHERS) if n != "t5"])
def test_padding(name: str, side: str) -> None:
    ids = tokens()
    if side == "none":
        check_parity(make_model(name), torch.ones_like(ids), input_ids=ids)
        return
    real = padding(side)
    check_parity(make_model(name), real, input_ids=ids, attention_mask=real)


@pytest.mark.parametrize("padded", [False, True])
def test_encoder_and_decoder(padded: bool) -> None:
    """T5: a learned bias for each pair of positions, cross attention, no scale."""
    ids = tokens()
    real = padding("right") if padded else torch.ones_like(ids)
    decoder_ids = tokens(length=140).flip(1)
    real_decoder = padding("right", length=140) if padded else torch.ones_like(decoder_ids)
    check_parity(
        make_model("t5"),
        real_decoder,
        input_ids=ids,
        attention_mask=real if padded else None,
        decoder_input_ids=decoder_ids,
        decoder_attention_mask=real_decoder if padded else None,
    )


@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents(name: str) -> None:
    """Documents given by positions that restart; they differ between the rows of the batch."""
    lengths = ((3, 40, 1, 70, 36), (90, 60))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = tokens()
    model = make_model(name)
    check_parity(
        model, torch.ones_like(ids), input_ids=ids, position_ids=positions, use_cache=False
    )
    if name == "gpt_oss":
        return  # its masks are not given the positions: no packing in eager either
    together = model(ids, position_ids=positions, use_cache=False).logits
    alone = model(ids[:1, 43:44], use_cache=False).logits
    torch.testing.assert_close(together[:1, 43:44], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in DECODERS if n != "llama4"])
def test_packed_documents_by_boundaries(name: str) -> None:
    """With the cache that models create by default, in which case masks know of no documents."""
    lengths = (40, 1, 70, 39)
    model = with_attention(make_model(name), "dmattn")
    together = model(tokens(1), **packed(*lengths)).logits
    alone = torch.cat([model(part).logits for part in tokens(1).split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    weights = torch.linspace(-1, 1, together.numel()).view_as(together)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad((x * weights).sum(), parameters) for x in (together, alone)]
    largest = max(float(g.abs().max()) for g in gradients[1])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * largest)


def test_boundaries_that_are_refused() -> None:
    model = with_attention(make_model("llama4"), "dmattn")
    inputs = packed(100, 50)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: got boundaries beside chunks"):
        model(tokens(1), **inputs)
    model(tokens(1), **inputs, use_cache=False)  # the mask knows of the documents
    model = with_attention(make_model("llama"), "dmattn")
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: got boundaries beside a batch of 2"):
        model(tokens(2), **inputs)
    with pytest.raises(TypeError, match=r"cu_seq_lens_q: got \[0, 150\]"):
        model(tokens(1), cu_seq_lens_q=[0, 150])
    wrong: list[list[int]] = [[0, 90, 140], [0, 40], [0, 60, 200], [5, 150], [0, 90, 60, 150]]
    for bounds in wrong:
        got = "60 at index 2 behind 90" if 60 in bounds[2:] else bounds
        words = f"cu_seq_lens_q: got {got}, wanted rising from 0 to 150"
        with pytest.raises(ValueError, match=re.escape(words)):
            model(tokens(1), cu_seq_lens_q=torch.tensor(bounds))
    with pytest.raises(ValueError, match="max_length_q: got 80, wanted at least 90"):
        model(tokens(1), cu_seq_lens_q=torch.tensor([0, 90, 150]), max_length_q=80)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that run again in the backward get the same mask, which is still not made dense."""

    def never(mask: IntervalMask) -> Tensor:
        raise AssertionError(f"{mask} was made dense")

    monkeypatch.setattr(IntervalMask, "to_dense_mask", never)
    ids, real = tokens(), padding("left")
    inputs = {"input_ids": ids, "attention_mask": real, "use_cache": False}
    model = with_attention(make_model("gemma3"), "dmattn")
    wanted = run(model, real, inputs)
    # The second name is deprecated, but older releases have no other.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for got, plain in zip(run(model, real, inputs), wanted, strict=True):
        assert relative_error(got, plain) <= 4 * EPSILON


@pytest.mark.parametrize("name", DECODERS)
def test_future_tokens_change_nothing(name: str) -> None:
    model = with_attention(make_model(name), "dmattn").eval()
    ids = tokens()
    changed = ids.clone()
    changed[:, 80:] = ids[:, 80:].flip(1)
    for inputs in ({}, {"attention_mask": padding("left")}):
        with torch.no_grad():
            a, b = (model(x, **inputs).logits for x in (ids, changed))
        real = inputs.get("attention_mask", torch.ones_like(ids))[:, :80].bool()
        torch.testing.assert_close(a[:, :80][real], b[:, :80][real], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(a[:, 80:], b[:, 80:], rtol=1e-2, atol=1e-2)
