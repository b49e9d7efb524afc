"""The barriers of the Hopper backward kernel, in random orders of execution: no deadlock, no buffer written too early.

The producer and the consumers are written down as in bwd_kernel.cuh, step by step; a product reads its buffers from its
start to the wait that covers it. Each run takes random steps of random threads. Run it by `python simulate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CONSUMERS = 2
Wait = Callable[[], bool]


@dataclass
class Barrier:
    """An mbarrier: a phase ends with the last arrival, once all bytes that it expects are there."""

    arrivals: int
    pending: int = 0
    missing_bytes: int = 0
    phases: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def _try_end(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phases += 1
            self.pending = self.arrivals

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.missing_bytes += expected
        self.pending -= 1
        self._try_end()

    def copied(self, size: int) -> None:
        self.missing_bytes -= size
        self._try_end()

    def passed(self, parity: int) -> Wait:
        return lambda: self.phases % 2 != parity


@dataclass
class Ring:
    stages: int
    stage: int = 0
    phase: int = 0

    def advance(self) -> None:
        self.stage += 1
        if self.stage == self.stages:
            self.stage, self.phase = 0, self.phase ^ 1


@dataclass
class Buffer:
    """What a buffer holds, and how many products or threads are reading it."""

    holds: object = None
    readers: int = 0

    def write(self, what: object) -> None:
        assert self.readers == 0, f"{what} written over {self.holds} that is being read"
        self.holds = what

    def start(self, what: object) -> None:
        assert self.holds == what, f"read {self.holds}, wanted {what}"
        self.readers += 1

    def finish(self) -> None:
        self.readers -= 1


@dataclass
class Machine:
    """One thread block of the kernel over `items` with so many steps each."""

    items: list[int]
    stages_q: int
    stages_dout: int
    early_scores: bool
    rng: random.Random
    copies: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = CONSUMERS
        self.k, self.v = Buffer(), Buffer()
        self.k_full, self.v_full, self.k_empty, self.v_empty = Barrier(1), Barrier(1), Barrier(n), Barrier(n)
        self.q = [Buffer() for _ in range(self.stages_q)]
        self.q_full = [Barrier(1) for _ in self.q]
        self.q_empty = [Barrier(n) for _ in self.q]
        self.dout = [Buffer() for _ in range(self.stages_dout)]
        self.dout_full = [Barrier(1) for _ in self.dout]
        self.dout_empty = [Barrier(n) for _ in self.dout]
        self.ds = [[Buffer() for _ in range(n)] for _ in range(2)]
        self.item_full, self.item_empty = [Barrier(1), Barrier(1)], [Barrier(n), Barrier(n)]
        self.item: list[Buffer] = [Buffer(), Buffer()]
        self.met = 0  # arrivals at the named barrier for ds

    def copy(self, buffer: Buffer, what: object, full: Barrier) -> None:
        """A bulk copy: bytes land at some later time."""
        full.arrive(expected=1)
        assert buffer.readers == 0, f"{what} is copied over what is being read"
        buffer.holds = None

        def land() -> None:
            buffer.write(what)
            full.copied(1)

        self.copies.append(land)

    def producer(self) -> Iterator[Wait]:
        q, dout, items = Ring(self.stages_q), Ring(self.stages_dout), Ring(2)
        kv_phase = 0
        for index in range(len(self.items) + 1):
            yield self.item_empty[items.stage].passed(items.phase ^ 1)
            self.item[items.stage].write(index)
            self.item_full[items.stage].arrive()
            items.advance()
            if index == len(self.items):
                return
            for step in range(self.items[index]):
                yield self.q_empty[q.stage].passed(q.phase ^ 1)
                self.copy(self.q[q.stage], (index, step), self.q_full[q.stage])
                q.advance()
                if step == 0:
                    yield self.k_empty.passed(kv_phase ^ 1)
                    self.copy(self.k, index, self.k_full)
                yield self.dout_empty[dout.stage].passed(dout.phase ^ 1)
                self.copy(self.dout[dout.stage], (index, step), self.dout_full[dout.stage])
                dout.advance()
                if step == 0:
                    yield self.v_empty.passed(kv_phase ^ 1)
                    self.copy(self.v, index, self.v_full)
                    kv_phase ^= 1

    def consumer(self, me: int) -> Iterator[Wait]:
        items, q_next, dout = Ring(2), Ring(self.stages_q), Ring(self.stages_dout)
        kv_phase = ds_stage = 0
        rounds = 0
        products: list[list[Buffer]] = []

        def start(*reads: tuple[Buffer, object]) -> None:
            for buffer, what in reads:
                buffer.start(what)
            products.append([buffer for buffer, _ in reads])

        def wait(pending: int) -> None:
            while len(products) > pending:
                for buffer in products.pop(0):
                    buffer.finish()

        while True:
            yield self.item_full[items.stage].passed(items.phase)
            index = self.item[items.stage].holds
            assert isinstance(index, int)
            self.item_empty[items.stage].arrive()
            items.advance()
            if index == len(self.items):
                return
            steps = self.items[index]
            if steps == 0:
                continue
            q_place = Ring(self.stages_q, q_next.stage, q_next.phase)

            def scores(step: int, index: int = index) -> Iterator[Wait]:
                yield self.q_full[q_next.stage].passed(q_next.phase)
                start((self.k, index), (self.q[q_next.stage], (index, step)))
                q_next.advance()

            def dp(step: int, index: int = index) -> Iterator[Wait]:
                yield self.dout_full[dout.stage].passed(dout.phase)
                start((self.v, index), (self.dout[dout.stage], (index, step)))

            yield self.k_full.passed(kv_phase)
            yield from scores(0)
            yield self.v_full.passed(kv_phase)
            yield from dp(0)
            wait(1)
            q_before = -1
            for step in range(steps):
                wait(2 if self.early_scores else 1)
                lse = self.q[q_place.stage]
                lse.start((index, step))
                yield lambda: True
                lse.finish()
                wait(1)
                if q_before >= 0:
                    self.q_empty[q_before].arrive()
                start((self.dout[dout.stage], (index, step)))
                wait(1)
                self.ds[ds_stage][me].write((index, step))
                yield lambda: True
                self.met += 1
                rounds += 1
                yield lambda: self.met >= CONSUMERS * rounds
                start((self.k, index), *((self.ds[ds_stage][c], (index, step)) for c in range(CONSUMERS)))
                ds_stage ^= 1
                wait(1)
                self.dout_empty[dout.stage].arrive()
                dout.advance()
                last = step + 1 == steps
                if not last and self.early_scores:
                    yield from scores(step + 1)
                start((self.q[q_place.stage], (index, step)))
                wait(2 if not last and self.early_scores else 1)
                yield lambda: True  # dq leaves
                if last:
                    break
                if not self.early_scores:
                    yield from scores(step + 1)
                yield from dp(step + 1)
                q_before = q_place.stage
                q_place.advance()
            wait(0)
            self.q_empty[q_place.stage].arrive()
            self.k_empty.arrive()
            self.v_empty.arrive()
            kv_phase ^= 1

    def run(self) -> None:
        threads = [self.producer(), *(self.consumer(i) for i in range(CONSUMERS))]
        waiting: dict[int, Wait] = {i: (lambda: True) for i in range(len(threads))}
        while waiting:
            ready = [i for i, condition in waiting.items() if condition()]
            choices = len(ready) + len(self.copies)
            assert choices > 0, f"deadlock of {sorted(waiting)}: {self.items}"
            pick = self.rng.randrange(choices)
            if pick >= len(ready):
                self.copies.pop(pick - len(ready))()
                continue
            try:
                waiting[ready[pick]] = next(threads[ready[pick]])
            except StopIteration:
                del waiting[ready[pick]]
        assert not self.copies


def main() -> None:
    runs = 0
    for seed in range(400):
        rng = random.Random(seed)
        for stages_q in (2, 3, 4):
            for stages_dout in (2, 3):
                for early in (False, True):
                    items = [rng.choice((0, 1, 1, 2, 3, 4, 5, 9)) for _ in range(rng.randrange(6))]
                    Machine(items, stages_q, stages_dout, early, rng).run()
                    runs += 1
    print(f"{runs} runs, no deadlock and no buffer written too early")


if __name__ == "__main__":
    main()
