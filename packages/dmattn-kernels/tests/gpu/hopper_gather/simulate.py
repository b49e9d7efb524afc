"""The barriers of the Hopper forward over lists, in random orders of execution.

The producer's warps and the consumers are written down as in gather_producer.cuh and
gather_kernel.cuh, step by step; a product reads its buffers from its start to the wait that covers
it, and a copy lands at some later time. Each run takes random steps of random threads, and fails on
a deadlock, or where a buffer is written while it is read or read before it holds what it should.
Run it by `python simulate.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

CONSUMERS = 2
WARPS = 4  # of the producer, and of a consumer
Wait = Callable[[], bool]


@dataclass
class Barrier:
    """An mbarrier: a phase ends with the last arrival."""

    arrivals: int
    pending: int = 0
    phases: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than the barrier counts"
        self.pending -= 1
        if self.pending == 0:
            self.phases += 1
            self.pending = self.arrivals

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
    """A part of a buffer for each warp that writes it, and how many are reading all of it."""

    parts: int = 1
    holds: list[object] = field(default_factory=list)
    readers: int = 0

    def __post_init__(self) -> None:
        self.holds = [None] * self.parts

    def write(self, what: object, part: int = 0) -> None:
        assert self.readers == 0, f"{what} written over {self.holds} that is being read"
        self.holds[part] = what

    def start(self, what: object) -> None:
        assert all(x == what for x in self.holds), f"read {self.holds}, wanted {what}"
        self.readers += 1

    def finish(self) -> None:
        self.readers -= 1


@dataclass
class Machine:
    """One thread block over items of so many tiles each; the last `masked` tiles have facts."""

    items: list[tuple[int, int]]
    stages: int
    says_itself: bool  # the copies say when they are there; otherwise the producer does (kProducer)
    rng: random.Random
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # warp, what happens

    def __post_init__(self) -> None:
        # Each consumer has its half of Q, and writes its half of the output over it.
        self.q = [Buffer(CONSUMERS) for _ in range(2)]
        self.q_full = [Barrier(1) for _ in self.q]
        self.q_empty = [Barrier(CONSUMERS) for _ in self.q]
        self.tiles = {x: [Buffer(WARPS) for _ in range(self.stages)] for x in "kv"}
        self.full = {x: [Barrier(WARPS) for _ in range(self.stages)] for x in "kv"}
        self.empty = {x: [Barrier(CONSUMERS) for _ in range(self.stages)] for x in "kv"}
        self.facts = [Buffer(WARPS) for _ in range(2)]
        self.facts_full = [Barrier(WARPS) for _ in range(2)]
        self.facts_empty = [Barrier(WARPS * CONSUMERS) for _ in range(2)]
        self.item = [Buffer() for _ in range(2)]
        self.item_full = [Barrier(1) for _ in range(2)]
        self.item_empty = [Barrier(WARPS * CONSUMERS) for _ in range(2)]
        self.next_item = [-1, -1]
        self.met = 0  # arrivals at the producer's named barrier
        # Arrivals at the consumers' named barriers: the last of them passes the first turn.
        self.turns = [1, 0]
        self.waits = [0, 0]

    def run(self) -> None:
        threads: list[Iterator[Wait]] = [ProducerWarp(self, i).run() for i in range(WARPS)]
        threads += [Consumer(self, i).run() for i in range(CONSUMERS)]
        waiting: dict[int, Wait] = {i: (lambda: True) for i in range(len(threads))}
        while waiting:
            ready = [i for i, condition in waiting.items() if condition()]
            # The copies of a warp may land in any order.
            choices = len(ready) + len(self.copies)
            assert choices > 0, f"deadlock of {sorted(waiting)}: {self.items}"
            pick = self.rng.randrange(choices)
            if pick >= len(ready):
                self.copies.pop(pick - len(ready))[1]()
                continue
            try:
                waiting[ready[pick]] = next(threads[ready[pick]])
            except StopIteration:
                del waiting[ready[pick]]
        assert not self.copies


class ProducerWarp:
    """A warp of the producer; the names are those of GatherProducer."""

    def __init__(self, machine: Machine, warp: int) -> None:
        self.m, self.warp = machine, warp
        self.places = {x: Ring(machine.stages) for x in "kv"}
        self.facts_place, self.item_place = Ring(2), Ring(2)
        self.q_place = Ring(2)
        self.next_slot = self.rounds = 0
        self.unsaid: Barrier | None = None
        self.on_the_way: dict[int, int] = {}  # barrier -> copies that have not landed

    def run(self) -> Iterator[Wait]:
        m, index = self.m, 0
        while True:
            if self.warp == 0:
                yield m.item_empty[self.item_place.stage].passed(self.item_place.phase ^ 1)
                m.item[self.item_place.stage].write(index)
                m.item_full[self.item_place.stage].arrive()
            self.item_place.advance()
            if index == len(m.items):
                break
            tiles, masked = m.items[index]
            following = -1
            if tiles == 0:
                yield from self.say_all()
                yield from self.copy_q(index)
                yield from self.take_next(index)
                following = self.following
            for n in range(tiles):
                yield from self.copy("k", (index, n))
                if n >= tiles - masked:
                    yield from self.write_facts((index, n))
                if n == 0:
                    yield from self.copy_q(index)
                    yield from self.take_next(index)
                    following = self.following
                else:
                    yield from self.copy("v", (index, n - 1))
            if tiles > 0:
                yield from self.copy("v", (index, tiles - 1))
            index = following
        yield from self.say_all()

    def take_next(self, index: int) -> Iterator[Wait]:
        m = self.m
        if self.warp == 0:
            m.next_item[self.next_slot] = index + 1
        yield lambda: True
        m.met += 1
        self.rounds += 1
        rounds = self.rounds
        yield lambda: m.met >= WARPS * rounds
        self.following = m.next_item[self.next_slot]
        assert self.following == index + 1
        self.next_slot ^= 1

    def copy_q(self, index: int) -> Iterator[Wait]:
        m, stage = self.m, self.q_place.stage
        if self.warp == 0:
            yield m.q_empty[stage].passed(self.q_place.phase ^ 1)
            if m.items[index][0] > 0:
                assert m.q[stage].readers == 0

                def land() -> None:
                    for part in range(CONSUMERS):
                        m.q[stage].write(index, part)
                    m.q_full[stage].arrive()

                m.copies.append((-1, land))
            else:
                m.q_full[stage].arrive()
        self.q_place.advance()

    def copy(self, which: str, what: object) -> Iterator[Wait]:
        m, place = self.m, self.places[which]
        yield from self.wait_until_free(m.empty[which][place.stage], place.phase ^ 1)
        buffer, full = m.tiles[which][place.stage], m.full[which][place.stage]
        buffer.write(None, self.warp)
        key = id(full)
        self.on_the_way[key] = self.on_the_way.get(key, 0) + 1

        def land() -> None:
            buffer.write(what, self.warp)
            self.on_the_way[key] -= 1
            if m.says_itself:
                full.arrive()

        m.copies.append((self.warp, land))
        if not m.says_itself:
            if self.unsaid is not None:
                yield from self.say(self.unsaid)
            self.unsaid = full
        place.advance()

    def say(self, full: Barrier) -> Iterator[Wait]:
        yield lambda: self.on_the_way[id(full)] == 0
        full.arrive()

    def say_all(self) -> Iterator[Wait]:
        if self.unsaid is not None:
            yield from self.say(self.unsaid)
            self.unsaid = None

    def wait_until_free(self, empty: Barrier, parity: int) -> Iterator[Wait]:
        if not self.m.says_itself and not empty.passed(parity)():
            yield from self.say_all()
        yield empty.passed(parity)

    def write_facts(self, what: object) -> Iterator[Wait]:
        m, stage = self.m, self.facts_place.stage
        yield from self.wait_until_free(m.facts_empty[stage], self.facts_place.phase ^ 1)
        m.facts[stage].write(what, self.warp)
        m.facts_full[stage].arrive()
        self.facts_place.advance()


class Consumer:
    """A warpgroup; the names are those of GatherConsumer."""

    def __init__(self, machine: Machine, me: int) -> None:
        self.m, self.me = machine, me
        self.places = {x: Ring(machine.stages) for x in "kv"}
        self.facts_place, self.item_place, self.q_place = Ring(2), Ring(2), Ring(2)
        self.stored, self.storing = -1, False
        self.products: list[list[Callable[[], None]]] = []

    def start_product(self, which: str, what: tuple[int, int]) -> None:
        tile = self.m.tiles[which][self.places[which].stage]
        tile.start(what)
        reads = [tile.finish]
        if which == "k":
            q = self.m.q[self.q_place.stage]
            assert q.holds[self.me] == what[0], f"Q of {q.holds}, wanted {what}"
        self.products.append(reads)

    def wait(self, pending: int) -> None:
        while len(self.products) > pending:
            for finish in self.products.pop(0):
                finish()

    def release(self, which: str) -> None:
        self.m.empty[which][self.places[which].stage].arrive()
        self.places[which].advance()

    def tile_is_there(self, which: str) -> Wait:
        place = self.places[which]
        return self.m.full[which][place.stage].passed(place.phase)

    def next_item(self) -> Iterator[Wait]:
        m, stage = self.m, self.item_place.stage
        yield m.item_full[stage].passed(self.item_place.phase)
        index = m.item[stage].holds[0]
        assert isinstance(index, int)
        for _ in range(WARPS):
            m.item_empty[stage].arrive()
        self.item_place.advance()
        self.index = index

    def release_stored(self) -> Iterator[Wait]:
        if self.stored >= 0:
            stage = self.stored
            yield lambda: not self.storing
            self.m.q_empty[stage].arrive()
        self.stored = -1

    def run(self) -> Iterator[Wait]:
        m = self.m
        yield from self.next_item()
        has_scores = False
        while self.index < len(m.items):
            index = self.index
            tiles, masked = m.items[index]
            q_stage = self.q_place.stage
            if not has_scores:
                yield m.q_full[q_stage].passed(self.q_place.phase)
                if tiles > 0:
                    yield self.tile_is_there("k")
                    self.start_product("k", (index, 0))
                    yield lambda: True
                    self.wait(0)
                    self.release("k")
            if tiles > 0:
                if masked >= tiles:
                    yield from self.read_facts((index, 0))
                for n in range(1, tiles):
                    yield from self.release_stored()
                    yield from self.start_both((index, n), (index, n - 1))
                    if n >= tiles - masked:
                        yield from self.read_facts((index, n))
                    self.wait(0)
                    self.release("v")
            yield from self.release_stored()
            self.q_place.advance()
            yield from self.next_item()
            following = self.index
            has_scores = tiles > 0 and following < len(m.items) and m.items[following][0] > 0
            if has_scores:
                yield m.q_full[self.q_place.stage].passed(self.q_place.phase)
                yield from self.start_both((following, 0), (index, tiles - 1))
                self.wait(0)
                self.release("v")
            elif tiles > 0:
                yield self.tile_is_there("v")
                self.start_product("v", (index, tiles - 1))
                yield lambda: True
                self.wait(0)
                self.release("v")
            assert tiles == 0 or m.q[q_stage].holds[self.me] == index
            m.q[q_stage].holds[self.me] = "output"
            self.storing = True

            def stored() -> None:
                self.storing = False

            m.copies.append((-1, stored))
            self.stored = q_stage
        yield lambda: not self.storing

    def start_both(self, scores: tuple[int, int], output: tuple[int, int]) -> Iterator[Wait]:
        m = self.m
        yield self.tile_is_there("k")
        m.waits[self.me] += 1
        waits = m.waits[self.me]
        yield lambda: m.turns[self.me] >= waits
        self.start_product("k", scores)
        yield self.tile_is_there("v")
        self.start_product("v", output)
        m.turns[1 - self.me] += 1
        yield lambda: True
        self.wait(1)
        self.release("k")

    def read_facts(self, what: object) -> Iterator[Wait]:
        m, stage = self.m, self.facts_place.stage
        yield m.facts_full[stage].passed(self.facts_place.phase)
        m.facts[stage].start(what)
        yield lambda: True
        m.facts[stage].finish()
        for _ in range(WARPS):
            m.facts_empty[stage].arrive()
        self.facts_place.advance()


def main() -> None:
    runs = 0
    for seed in range(300):
        rng = random.Random(seed)
        for stages in (1, 2, 3, 4):
            for says_itself in (False, True):
                for _ in range(2):
                    items = []
                    for _ in range(rng.randrange(8)):
                        tiles = rng.choice((0, 1, 1, 2, 3, 4, 5, 9))
                        items.append((tiles, min(tiles, rng.choice((0, 1, 2, 9)))))
                    Machine(items, stages, says_itself, rng).run()
                    runs += 1
    print(f"{runs} runs, no deadlock and no buffer written too early")


if __name__ == "__main__":
    main()
