"""Generating text from the cache: each byte costs the same, however long the text has become."""

from typing import NamedTuple

import torch
from torch import Tensor

from bytes_lm.device import clock, half_precision
from bytes_lm.model import BytesLM
from bytes_lm.text import VOCABULARY

# Steps before a CUDA graph is made of the next: what a first call sets up cannot be captured.
_EAGER_STEPS = 3


class Written(NamedTuple):
    """The bytes, and how many came a second once all was set up (None where none did)."""

    text: bytes
    bytes_per_second: float | None


class _Writer:
    """Chooses one byte after the other.

    All that changes from step to step is on the device and changes in place: the host never waits
    for a byte, and a CUDA graph of one step does all further steps.
    """

    def __init__(self, model: BytesLM, noise: Tensor) -> None:
        self.model = model
        self.noise = noise  # (count, 256)
        self.caches = model.make_caches(1)
        self.text = noise.new_zeros(len(noise), dtype=torch.int64)
        self.byte = noise.new_zeros((1, 1), dtype=torch.int64)  # the last one, still to be read
        self.done = noise.new_zeros(1, dtype=torch.int64)

    def read(self, tokens: Tensor) -> None:
        """Take (1, S) tokens in, and choose the byte after them."""
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
    """Draw count bytes after a (S,) prompt of at least one; the likeliest ones at temperature 0."""
    if len(prompt) == 0:
        raise ValueError("prompt: got no bytes, wanted at least one")
    device = prompt.device
    noise = temperature * gumbel_noise(count, seed).to(device)
    # One autocast for all: it casts the weights once and keeps them, for the CUDA graph too.
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
            with torch.cuda.graph(graph):  # notes the step down, and does not do it
                writer.step()
            step = graph.replay
        start = clock(device)
        for _ in range(eager, steps):
            step()
        seconds = clock(device) - start
    speed = (steps - eager) / seconds if steps > eager else None
    return Written(bytes(writer.text.tolist()), speed)


def gumbel_noise(count: int, seed: int) -> Tensor:
    """(count, 256) float32, for drawing on the device without asking the host.

    argmax(logits + temperature * noise) is distributed as softmax(logits / temperature).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(count, VOCABULARY, dtype=torch.float32)
    drawn.exponential_(generator=generator)
    return -drawn.clamp_(min=1e-30).log()  # of an exact 0 it would be INF
