"""The barriers of the Hopper backward kernel, in random orders of execution.

The producer and the consumers are written down as in bwd_kernel.cuh, step by step; a product reads
its buffers from its start to the wait that covers it. Each run takes random steps of random
threads, and fails on a deadlock, or where a buffer is written while it is read or read before it
holds what it should. Run it by `python simulate.py`.
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
        self.k_full, self.v_full, self.k_empty, self.v_empty = (
            Barrier(1),
            Barrier(1),
            Barrier(n),
            Barrier(n),
        )
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

    def run(self) -> None:
        threads = [self.producer(), *(Consumer(self, i).run() for i in range(CONSUMERS))]
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


class Consumer:
    """A warpgroup; the names are those of BwdConsumer."""

    def __init__(self, machine: Machine, me: int) -> None:
        self.m, self.me = machine, me
        self.items, self.dout = Ring(2), Ring(machine.stages_dout)
        self.q_next, self.q_place = Ring(machine.stages_q), Ring(machine.stages_q)
        self.kv_phase = self.ds_stage = self.rounds = 0
        self.q_before = -1
        self.products: list[list[Buffer]] = []

    def start(self, *reads: tuple[Buffer, object]) -> None:
        for buffer, what in reads:
            buffer.start(what)
        self.products.append([buffer for buffer, _ in reads])

    def wait(self, pending: int) -> None:
        while len(self.products) > pending:
            for buffer in self.products.pop(0):
                buffer.finish()

    def run(self) -> Iterator[Wait]:
        m = self.m
        while True:
            yield m.item_full[self.items.stage].passed(self.items.phase)
            index = m.item[self.items.stage].holds
            assert isinstance(index, int)
            m.item_empty[self.items.stage].arrive()
            self.items.advance()
            if index == len(m.items):
                return
            if m.items[index] > 0:
                yield from self.work(index)

    def work(self, index: int) -> Iterator[Wait]:
        m, steps = self.m, self.m.items[index]
        self.q_place = Ring(m.stages_q, self.q_next.stage, self.q_next.phase)
        yield m.k_full.passed(self.kv_phase)
        yield from self.start_scores(index, 0)
        yield m.v_full.passed(self.kv_phase)
        yield from self.start_dp(index, 0)
        yield from self.front(index, 0)
        for step in range(steps - 1):
            yield from self.back(index, step, is_last=False)
            yield from self.front(index, step + 1)
        yield from self.back(index, steps - 1, is_last=True)
        self.wait(0)
        m.q_empty[self.q_place.stage].arrive()
        m.k_empty.arrive()
        m.v_empty.arrive()
        self.kv_phase ^= 1

    def start_scores(self, index: int, step: int) -> Iterator[Wait]:
        yield self.m.q_full[self.q_next.stage].passed(self.q_next.phase)
        self.start((self.m.k, index), (self.m.q[self.q_next.stage], (index, step)))
        self.q_next.advance()

    def start_dp(self, index: int, step: int) -> Iterator[Wait]:
        yield self.m.dout_full[self.dout.stage].passed(self.dout.phase)
        self.start((self.m.v, index), (self.m.dout[self.dout.stage], (index, step)))

    def front(self, index: int, step: int) -> Iterator[Wait]:
        m = self.m
        self.wait(2 if m.early_scores and step > 0 else 1)
        lse = m.q[self.q_place.stage]
        lse.start((index, step))
        yield lambda: True
        lse.finish()
        self.wait(1)
        if step > 0:
            m.q_empty[self.q_before].arrive()
        self.start((m.dout[self.dout.stage], (index, step)))
        self.wait(1)
        m.ds[self.ds_stage][self.me].write((index, step))
        yield lambda: True
        m.met += 1
        self.rounds += 1
        yield lambda: m.met >= CONSUMERS * self.rounds

    def back(self, index: int, step: int, is_last: bool) -> Iterator[Wait]:
        m, what = self.m, (index, step)
        self.start((m.k, index), *((part, what) for part in m.ds[self.ds_stage]))
        self.ds_stage ^= 1
        self.wait(1)
        m.dout_empty[self.dout.stage].arrive()
        self.dout.advance()
        starts_early = m.early_scores and not is_last
        if starts_early:
            yield from self.start_scores(index, step + 1)
        self.start((m.q[self.q_place.stage], what))
        self.wait(2 if starts_early else 1)
        yield lambda: True  # dq leaves
        if is_last:
            return
        if not starts_early:
            yield from self.start_scores(index, step + 1)
        yield from self.start_dp(index, step + 1)
        self.q_before = self.q_place.stage
        self.q_place.advance()


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
