"""Serving: requests join a running batch as they come, and leave it when they are done.

The sequences of the caches are slots. A request gets a free one. Its prompt goes in by chunks, one
chunk between two steps of decoding, so that the others wait for a chunk at most. Each step of
decoding is one call for all slots; those without a text to go on are left out on the device.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bytes_lm.device import half_precision
from bytes_lm.model import BytesLM

# Steps before a CUDA graph is made of the next: what a first call sets up cannot be captured.
_EAGER_STEPS = 3


@dataclass(frozen=True)
class Request:
    """What somebody asks for."""

    arrival: float  # seconds after the start
    prompt: Tensor  # uint8 (S,), S at least 1
    count: int  # bytes to write, at least 1


@dataclass
class Answer:
    """What became of a request; times in seconds after the start."""

    request: Request
    text: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each byte
    read: int = 0  # bytes of the prompt that are in

    @property
    def is_done(self) -> bool:
        return len(self.text) == self.request.count


class Engine:
    """Writes the likeliest bytes for many requests at once.

    Args:
        model: the model; on a GPU it computes in bfloat16.
        slots: sequences that are worked on at a time.
        chunk: bytes of a prompt that go in at a time.
    """

    def __init__(self, model: BytesLM, slots: int, chunk: int) -> None:
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.chunk = chunk
        with half_precision(self.device):
            self.caches = model.make_caches(slots)
        self.byte = torch.zeros((slots, 1), dtype=torch.int64, device=self.device)
        self.active = torch.zeros((slots, 1), dtype=torch.bool, device=self.device)
        self.running: dict[int, Answer] = {}  # by slot
        self.reading: deque[int] = deque()  # slots whose prompt is not in yet
        self.free = deque(range(slots))
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def serve(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in the order of the requests, which arrive by the clock on the wall."""
        answers = [Answer(request) for request in requests]
        waiting = deque(sorted(answers, key=lambda answer: answer.request.arrival))
        start = time.perf_counter()
        # One autocast for all: it casts the weights once and keeps them, for the CUDA graph too.
        with half_precision(self.device):
            while waiting or self.running:
                now = time.perf_counter() - start
                while waiting and self.free and waiting[0].request.arrival <= now:
                    self._join(waiting.popleft())
                if not self.running:
                    time.sleep(max(0.0, waiting[0].request.arrival - now))
                    continue
                self._read_chunk(start)
                self._write_bytes(start)
        return answers

    def _join(self, answer: Answer) -> None:
        slot = self.free.popleft()
        for cache in self.caches:
            cache.reset(torch.tensor([slot], device=self.device))
        self.running[slot] = answer
        self.reading.append(slot)

    def _read_chunk(self, start: float) -> None:
        """The next chunk of the prompt that came first."""
        if not self.reading:
            return
        slot = self.reading[0]
        answer = self.running[slot]
        prompt = answer.request.prompt[answer.read : answer.read + self.chunk]
        tokens = prompt.to(self.device).long()[None]
        where = torch.tensor([slot], device=self.device)
        logits = self.model(tokens, self.caches, slots=where)[:, -1]
        answer.read += len(prompt)
        if answer.read == len(answer.request.prompt):
            self.reading.popleft()
            self.byte[slot] = logits.argmax(-1)
            self.active[slot] = True
            self._note(slot, int(self.byte[slot]), start)

    def _write_bytes(self, start: float) -> None:
        """The next byte of every slot whose prompt is in."""
        slots = [slot for slot in self.running if slot not in self.reading]
        if not slots:
            return
        if self._graph is not None:
            self._graph.replay()
        elif self.device.type == "cuda" and self._steps >= _EAGER_STEPS:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # notes the step down, and does not do it
                self._step()
            graph.replay()
            self._graph = graph
        else:
            self._step()
        self._steps += 1
        written = self.byte.flatten().tolist()
        for slot in slots:
            self._note(slot, written[slot], start)

    def _step(self) -> None:
        logits = self.model(self.byte, self.caches, real=self.active)[:, -1]
        self.byte.copy_(logits.argmax(-1, keepdim=True))

    def _note(self, slot: int, byte: int, start: float) -> None:
        """A byte is there; the slot is free after the last one."""
        answer = self.running[slot]
        answer.text.append(byte)
        answer.times.append(time.perf_counter() - start)
        if answer.is_done:
            self.active[slot] = False
            del self.running[slot]
            self.free.append(slot)
