"""The training example's generation: the cache gives the text that the whole model would write."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from bytes_lm.config import Config
from bytes_lm.generation import continue_text, gumbel_noise
from bytes_lm.model import BytesLM

WINDOW = 8
PROMPTS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]  # shorter and longer than the window


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make_model() -> BytesLM:
    """A float64 model with random scores (no sliding window), whose attention matters most."""
    model = BytesLM(Config(layers=2, width=32, heads=4, kv_heads=2, window=WINDOW)).double()
    for layer in model.attention_layers():
        torch.nn.init.normal_(layer.A)
        torch.nn.init.normal_(layer.dt_proj.weight)
        torch.nn.init.normal_(layer.o_proj.weight)
    return model


def random_bytes(count: int) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8)


@torch.no_grad()
def text_of_whole_model(
    model: BytesLM, prompt: Tensor, count: int, temperature: float = 0.0
) -> bytes:
    """What `continue_text` writes with seed 0, by running the whole model anew for each byte."""
    tokens, noise = prompt.long(), temperature * gumbel_noise(count, seed=0)
    for extra in noise:
        logits = model(tokens[None])[0, -1:]
        tokens = torch.cat((tokens, (logits + extra).argmax(-1)))
    return bytes(tokens[len(prompt) :].tolist())


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
def test_logits_from_the_cache_are_those_of_the_whole_model(prompt: int) -> None:
    model, tokens = make_model(), random_bytes(prompt + 2 * WINDOW).long()[None]
    caches = model.make_caches(1)
    parts = [model(tokens[:, :prompt], caches)]
    parts += [model(tokens[:, t : t + 1], caches) for t in range(prompt, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_text_is_that_of_the_whole_model(prompt: int, temperature: float) -> None:
    model, given = make_model(), random_bytes(prompt)
    expected = text_of_whole_model(model, given, 3 * WINDOW, temperature)
    assert continue_text(model, given, 3 * WINDOW, temperature).text == expected
    assert temperature == 0 or len(set(expected)) > WINDOW


@pytest.mark.parametrize("count", [0, 1, 2])
def test_shortest_texts(count: int) -> None:
    model, given = make_model(), random_bytes(WINDOW)
    written = continue_text(model, given, count, temperature=0)
    assert written.text == text_of_whole_model(model, given, count)
    assert written.bytes_per_second is None  # too few steps to be timed


def test_each_step_reads_one_byte() -> None:
    model, lengths = make_model(), []
    model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    written = continue_text(model, random_bytes(3 * WINDOW), 20)
    assert lengths == [3 * WINDOW] + [1] * 19
    assert written.bytes_per_second is not None
    assert written.bytes_per_second > 0


def test_the_seed_chooses_the_text() -> None:
    model, given = make_model(), random_bytes(5)
    texts = [continue_text(model, given, 30, 1.0, seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt: got no bytes"):
        continue_text(make_model(), random_bytes(0), 5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_noise_draws_from_the_softmax(temperature: float) -> None:
    count, logits = 40_000, torch.randn(256) * 2
    drawn = (logits + temperature * gumbel_noise(count, seed=1)).argmax(-1)
    share = torch.bincount(drawn, minlength=256) / count
    p = (logits / temperature).softmax(-1)
    # Five standard deviations of a binomial share, and one drawing more for the rarest bytes.
    assert ((share - p).abs() <= 5 * (p / count).sqrt() + 1 / count).all()
    assert torch.isfinite(gumbel_noise(1000, seed=2)).all()
    assert math.isclose(float(gumbel_noise(4000, seed=3).mean()), 0.5772, abs_tol=0.01)
