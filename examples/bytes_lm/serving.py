"""Serving: requests join a running batch as they come, and leave it when they are done.

Each sequence of the caches is a slot, and each request gets a free one. The model reads its prompt
in chunks, one chunk between two steps of decoding, so that the other requests wait for one chunk at
most. Each step of decoding is one call for all slots; slots that have no text to continue are left
out on the device.

Both calls always have the same shapes: a chunk that is not full is padded, and each step is for all
slots. Matrix products of different shapes may add their terms in different orders. Where two bytes
are equally likely except for rounding, that can change which of them is written. With equal shapes
each row has the same result whatever the other rows hold. So an answer depends on its prompt alone.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from bytes_lm.device import half_precision
from bytes_lm.model import BytesLM

# Calls that run before the next one is captured in a CUDA graph: first calls set things up that
# cannot be captured.
_EAGER_CALLS = 3


@dataclass(frozen=True)
class Request:
    """What somebody asks for."""

    arrival: float  # seconds after the start; any finite number
    prompt: Tensor  # uint8 (S,), S at least 1
    count: int  # bytes to write, at least 1

    def __post_init__(self) -> None:
        if self.prompt.dim() != 1 or len(self.prompt) == 0:
            shape = tuple(self.prompt.shape)
            raise ValueError(f"prompt: got shape {shape}, wanted (S,) with at least one byte")
        if self.prompt.dtype != torch.uint8:
            raise TypeError(f"prompt: got dtype {self.prompt.dtype}, wanted torch.uint8")
        if not math.isfinite(self.arrival):
            raise ValueError(f"arrival: got {self.arrival}, wanted a finite number")
        _at_least_one("count", self.count)


@dataclass
class Answer:
    """The answer to a request, as far as it is written; times in seconds after the start."""

    request: Request
    text: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each byte
    read: int = 0  # bytes of the prompt that the model has read

    @property
    def is_done(self) -> bool:
        return len(self.text) == self.request.count


def _at_least_one(name: str, number: int) -> None:
    """Check that a number is an int of at least 1: with any other the engine would never end."""
    if not isinstance(number, int):
        raise TypeError(f"{name}: got {number!r}, wanted an int")
    if number < 1:
        raise ValueError(f"{name}: got {number}, wanted at least 1")


class Engine:
    """Writes the likeliest bytes for many requests at once; to be used in a `with` statement.

    Args:
        model: the model; on a GPU it computes in bfloat16.
        slots: sequences that are worked on at a time, at least 1.
        chunk: bytes of a prompt that are read at a time, at least 1.
    """

    def __init__(self, model: BytesLM, slots: int, chunk: int) -> None:
        _at_least_one("slots", slots)
        _at_least_one("chunk", chunk)
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.chunk = chunk
        with half_precision(self.device):
            self.caches = model.make_caches(slots)
        # The two calls read and write these tensors in place, as their CUDA graphs need it.
        self.byte = torch.zeros((slots, 1), dtype=torch.int64, device=self.device)
        self.active = torch.zeros((slots, 1), dtype=torch.bool, device=self.device)
        self.tokens = torch.zeros((1, chunk), dtype=torch.int64, device=self.device)
        self.real = torch.zeros((1, chunk), dtype=torch.bool, device=self.device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.running: dict[int, Answer] = {}  # by slot
        self.reading: deque[int] = deque()  # slots whose prompt has not been read to its end
        self.free = deque(range(slots))
        self._precision = ExitStack()

    def __enter__(self) -> Self:
        # One autocast around all calls: it casts the weights once and keeps them, also for graphs.
        self._precision.enter_context(half_precision(self.device))
        with torch.no_grad():  # these calls change no cache: no token is real, no slot is active
            self._call_read = self._prepared(self._read)
            self._call_step = self._prepared(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        del self._call_read, self._call_step
        self._precision.close()

    def _prepared(self, call: Callable[[], None]) -> Callable[[], None]:
        """A function that replays the call from a CUDA graph; on a CPU the call itself."""
        for _ in range(_EAGER_CALLS):
            call()
        if self.device.type != "cuda":
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records the call without running it
            call()
        return graph.replay

    @torch.no_grad()
    def serve(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers in the order of the requests, which arrive in real time."""
        answers = [Answer(request) for request in requests]
        try:
            self._work_on(deque(sorted(answers, key=lambda answer: answer.request.arrival)))
        finally:
            self._leave_all()
        return answers

    def _work_on(self, waiting: deque[Answer]) -> None:
        start = time.perf_counter()
        while waiting or self.running:
            now = time.perf_counter() - start
            while waiting and self.free and waiting[0].request.arrival <= now:
                self._join(waiting.popleft())
            if not self.running:
                time.sleep(max(0.0, waiting[0].request.arrival - now))
                continue
            self._read_chunk(start)
            self._write_bytes(start)

    def _leave_all(self) -> None:
        """Free all slots, so that after an error or Ctrl-C no request is left in one."""
        self.running.clear()
        self.reading.clear()
        self.active.zero_()
        self.free = deque(range(len(self.active)))

    def serve_alone(self, request: Request) -> Answer:
        """The answer to a request that is served while there is no other."""
        return self.serve([replace(request, arrival=0.0)])[0]

    def _join(self, answer: Answer) -> None:
        slot = self.free.popleft()
        for cache in self.caches:
            cache.reset(torch.tensor([slot], device=self.device))
        self.running[slot] = answer
        self.reading.append(slot)

    def _read_chunk(self, start: float) -> None:
        """Read the next chunk of the prompt that came first."""
        if not self.reading:
            return
        slot = self.reading[0]
        answer = self.running[slot]
        prompt = answer.request.prompt[answer.read : answer.read + self.chunk].long()
        self.tokens.copy_(pad(prompt, (0, self.chunk - len(prompt)))[None])
        self.real.copy_((torch.arange(self.chunk) < len(prompt))[None])
        self.slot.fill_(slot)
        self._call_read()
        answer.read += len(prompt)
        if answer.read == len(answer.request.prompt):
            self.reading.popleft()
            self.active[slot] = True
            self._note(slot, int(self.byte[slot]), start)

    def _read(self) -> None:
        """Let the model read a chunk, and choose the byte after its last real token."""
        logits = self.model(self.tokens, self.caches, real=self.real, slots=self.slot)
        last = (self.real.sum(1) - 1).clamp(min=0)
        self.byte.index_copy_(0, self.slot, logits[0].index_select(0, last).argmax(-1)[:, None])

    def _write_bytes(self, start: float) -> None:
        """Write the next byte of every slot whose prompt has been read."""
        slots = [slot for slot in self.running if slot not in self.reading]
        if not slots:
            return
        self._call_step()
        written = self.byte.flatten().tolist()
        for slot in slots:
            self._note(slot, written[slot], start)

    def _step(self) -> None:
        logits = self.model(self.byte, self.caches, real=self.active)[:, -1]
        self.byte.copy_(logits.argmax(-1, keepdim=True))

    def _note(self, slot: int, byte: int, start: float) -> None:
        """Add a byte to the answer of a slot, and free the slot after its last byte."""
        answer = self.running[slot]
        answer.text.append(byte)
        answer.times.append(time.perf_counter() - start)
        if answer.is_done:
            self.active[slot] = False
            del self.running[slot]
            self.free.append(slot)
