"""Generating text from the cache: each byte costs the same, however long the text has become."""

from typing import NamedTuple

import torch
from torch import Tensor

from bytes_lm.device import clock, half_precision
from bytes_lm.model import BytesLM
from bytes_lm.text import VOCABULARY

# Steps that run before the next one is captured in a CUDA graph: first calls set things up that
# cannot be captured.
_EAGER_STEPS = 3


class Written(NamedTuple):
    """The bytes, and how many were written in a second.

    The first few, which set things up, do not count; the speed is None if there are no others.
    """

    text: bytes
    bytes_per_second: float | None


class _Writer:
    """Chooses one byte after the other.

    All that changes from step to step is on the device and is updated in place. So the host never
    waits for a byte, and all further steps are replays of the CUDA graph of one step.
    """

    def __init__(self, model: BytesLM, noise: Tensor) -> None:
        self.model = model
        self.noise = noise  # (count, 256)
        self.caches = model.make_caches(1)
        self.text = noise.new_zeros(len(noise), dtype=torch.int64)
        self.byte = noise.new_zeros((1, 1), dtype=torch.int64)  # chosen last, not read yet
        self.done = noise.new_zeros(1, dtype=torch.int64)

    def read(self, tokens: Tensor) -> None:
        """Let the model read (1, S) tokens, and choose the byte after them."""
        logits = self.model(tokens, self.caches)[:, -1].float()
        chosen = (logits + self.noise.index_select(0, self.done)).argmax(-1)
        self.text.index_copy_(0, self.done, chosen)
        self.byte.copy_(chosen[:, None])
        self.done.add_(1)

    def step(self) -> None:
        self.read(self.byte)


@torch.no_grad()
def continue_text(
    model: BytesLM, prompt: Tensor, count: int, temperature: float = 0.7, seed: int = 0
) -> Written:
    """Draw count bytes after a prompt (S,), S >= 1; at temperature 0 the likeliest ones."""
    if len(prompt) == 0:
        raise ValueError("prompt: got no bytes, wanted at least one")
    device = prompt.device
    noise = temperature * gumbel_noise(count, seed).to(device)
    # One autocast around all calls: it casts the weights once and keeps them, also for the graph.
    with half_precision(device):
        writer = _Writer(model, noise)
        if count > 0:
            writer.read(prompt.long()[None])
        steps = max(0, count - 1)
        eager = min(steps, _EAGER_STEPS)
        for _ in range(eager):
            writer.step()
        step = writer.step
        if device.type == "cuda" and steps > eager:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records the step without running it
                writer.step()
            step = graph.replay
        start = clock(device)
        for _ in range(eager, steps):
            step()
        seconds = clock(device) - start
    speed = (steps - eager) / seconds if steps > eager else None
    return Written(bytes(writer.text.tolist()), speed)


def gumbel_noise(count: int, seed: int) -> Tensor:
    """(count, 256) float32 noise, with which the device draws bytes without the host.

    argmax(logits + temperature * noise) is distributed as softmax(logits / temperature).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(count, VOCABULARY, dtype=torch.float32)
    drawn.exponential_(generator=generator)
    return -drawn.clamp_(min=1e-30).log()  # an exact 0 would give INF
