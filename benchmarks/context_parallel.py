"""Times a sequence spread over several GPUs against the same sequence on one of them.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--json OUT] [--cases S ...]

For each case, forward and backward: the milliseconds of one GPU and of all of them together, their
ratio, how far the results are apart, and the bytes that leave each GPU per call, counted at the
collectives and, where the driver has NVLink counters, by these. Rank 0 prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dmattn import flash_dmattn_func
from dmattn.distributed import context_parallel_attention, groups

Step = Callable[[], list[Tensor]]

_HEAD_START_CYCLES = 8_000_000  # about 4 ms in which the host enqueues the first call


@dataclass(frozen=True)
class Case:
    """Sizes of the whole sequence."""

    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int
    window: int
    calls: int  # in a round of timing
    batch: int = 1

    def name(self) -> str:
        return (
            f"B{self.batch} S{self.seqlen} H{self.nheads}/{self.nheads_k} D{self.head_dim} "
            f"w{self.window}"
        )

    def state_bytes(self, itemsize: int) -> int:
        """Keys, values and float32 scores of w tokens."""
        row = 2 * self.head_dim * itemsize + 4
        return self.batch * self.window * self.nheads_k * row


CASES = (
    Case(65536, 16, 4, 128, 2048, 12),
    Case(262144, 16, 4, 128, 2048, 5),
    Case(2097152, 8, 2, 128, 2048, 2),
)
TINY = (Case(512, 4, 2, 16, 64, 2),)  # for a machine without GPUs


class Bench:
    """One case on this rank's device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)  # the same on all ranks
        shapes = [(case.seqlen, heads, case.head_dim) for heads in self.heads()]
        self.whole = [self.random(case.batch, *shape) for shape in shapes]
        scores = torch.randn(case.batch, case.nheads_k, 1, case.seqlen, device=device)
        self.whole.append(scores.requires_grad_())
        self.dout = self.random(case.batch, case.seqlen, case.nheads, case.head_dim).detach()
        self.own = [self.part(t).detach().clone().requires_grad_() for t in self.whole]
        self.own_dout = self.part(self.dout).clone()

    def heads(self) -> tuple[int, int, int]:
        return self.case.nheads, self.case.nheads_k, self.case.nheads_k

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_()

    def part(self, t: Tensor) -> Tensor:
        """This rank's tokens."""
        dim = 1 if t.shape[1] == self.case.seqlen else 3
        return t.chunk(self.ranks, dim)[self.rank]

    def forward_alone(self) -> Tensor:
        """The forward of the whole sequence on this device."""
        q, k, v, bias = self.whole
        window = self.case.window
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, window_size=window)

    def backward_alone(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.whole, self.dout)

    def forward_together(self) -> Tensor:
        """The forward of this rank's tokens, together with the other ranks."""
        return context_parallel_attention(*self.own, window_size=self.case.window)

    def backward_together(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.own, self.own_dout)

    def alone(self) -> list[Tensor]:
        """Forward and backward of the whole sequence on this device: out and the gradients."""
        out = self.forward_alone()
        return [out, *self.backward_alone(out)]

    def together(self) -> list[Tensor]:
        """The same for this rank's tokens, together with the other ranks."""
        out = self.forward_together()
        return [out, *self.backward_together(out)]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, step: Step) -> float:
        """The time of one of several calls, one after the other as in training.

        On a GPU by its own clock, after a pause in which the host gets ahead of the GPU.
        """
        self.synchronize()
        dist.barrier()
        if self.device.type != "cuda":
            begun = time.perf_counter()
            for _ in range(self.case.calls):
                step()
            return (time.perf_counter() - begun) / self.case.calls * 1e3
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(self.case.calls):
            step()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) / self.case.calls

    def race(self, rounds: int) -> dict[str, float]:
        """Medians over the rounds.

        For one device alone, that of the mean over the devices and that of the fastest; for all
        devices together, that of the slowest.
        """
        steps: dict[str, Step] = {"alone": self.alone, "together": self.together}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            step()
            step()
        for _ in range(rounds):
            for name, step in steps.items():
                found = gathered(self.milliseconds(step))
                mean = sum(found) / len(found)
                times[name].append(mean if name == "alone" else max(found))
                if name == "alone":
                    times.setdefault("fastest alone", []).append(min(found))
        return {name: statistics.median(found) for name, found in times.items()}

    def compare(self) -> dict[str, Any]:
        """How far this rank's results are from those of the whole sequence on one device.

        As a fraction of the norm of the latter, beside the same for a second run on one device.
        """
        names = ("out", "dq", "dk", "dv", "dbias")
        once, mine, again = (
            [t.detach() for t in step()] for step in (self.alone, self.together, self.alone)
        )
        found: dict[str, Any] = {}
        for name, whole, twice, own in zip(names, once, again, mine, strict=True):
            expected = self.part(whole).float()
            norm = expected.norm()
            found[name] = {
                "difference": float((own.float() - expected).norm() / norm),
                "difference of two runs alone": float(
                    (self.part(twice).float() - expected).norm() / norm
                ),
                "same bits": own.equal(self.part(whole)),
            }
        return found


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def counting(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Notes the bytes that each collective of the exchange sends to other ranks."""
    gather, to_all, others = groups.all_gather, dist.all_to_all_single, dist.get_world_size() - 1

    def all_gather(into: Tensor, own: Tensor, **named: Any) -> Any:
        on_host = own.nbytes == groups.MESSAGE_BYTES and not own.is_cuda
        sent.append(("agreement on the host" if on_host else "all-gather", own.nbytes * others))
        return gather(into, own, **named)

    def all_to_all(into: Tensor, own: Tensor, **named: Any) -> Any:
        splits = named["input_split_sizes"]
        sent.append(("all-to-all", (sum(splits) - splits[dist.get_rank()]) * own.itemsize))
        return to_all(into, own, **named)

    groups.all_gather, dist.all_to_all_single = all_gather, all_to_all  # type: ignore[assignment]
    try:
        yield
    finally:
        groups.all_gather, dist.all_to_all_single = gather, to_all


def nvlink_bytes(device: torch.device) -> int | None:
    """Bytes sent by a GPU so far over all its links, or None where the driver does not say."""
    if device.type != "cuda":
        return None
    number = str(torch.cuda.get_device_properties(device).uuid)
    command = ["nvidia-smi", "nvlink", "-gt", "d", "-i", f"GPU-{number}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    found = re.findall(r"Data Tx:\s*(\d+)\s*KiB", text)
    return sum(map(int, found)) * 1024 if found else None


def count_bytes(bench: Bench) -> dict[str, Any]:
    """What leaves each rank in one call, forward and backward."""
    sent: list[tuple[str, int]] = []
    with counting(sent):
        bench.together()
    bench.synchronize()
    before, calls = nvlink_bytes(bench.device), 20
    dist.barrier()
    if before is not None:
        for _ in range(calls):
            bench.together()
        bench.synchronize()
        dist.barrier()
    after = nvlink_bytes(bench.device)
    links = None if before is None or after is None else (after - before) // calls
    return {"collectives": sent, "nvlink": links}


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """All that is known of one case; the same on all ranks."""
    bench = Bench(case, device)
    differences = gathered(bench.compare())
    times = bench.race(rounds)
    sent = gathered(count_bytes(bench))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {
        "case": case.name(),
        "ranks": dist.get_world_size(),
        "alone_ms": times["alone"],
        "fastest_alone_ms": times["fastest alone"],
        "together_ms": times["together"],
        "ratio": times["alone"] / times["together"],
        "state_bytes": case.state_bytes(bench.dtype.itemsize),
        "sent": sent,
        "differences": differences,
        "peak_bytes": peak,
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['case']}: one GPU {row['alone_ms']:.3f} ms (the fastest of them "
        f"{row['fastest_alone_ms']:.3f}), {row['ranks']} GPUs "
        f"{row['together_ms']:.3f} ms, {row['ratio']:.3f} x"
    )
    unit = row["state_bytes"]
    for rank, sent in enumerate(row["sent"]):
        parts = [f"{name} {size} ({size / unit:.3f})" for name, size in sent["collectives"]]
        links = sent["nvlink"]
        counters = "no counters" if links is None else f"{links} ({links / unit:.3f})"
        print(
            f"  rank {rank} sends {', '.join(parts)}; by NVLink's counters {counters}, where 1 is "
            f"{unit}, w rows"
        )
    for rank, names in enumerate(row["differences"]):
        parts = [
            f"{name} {d['difference']:.1e} (alone twice {d['difference of two runs alone']:.1e}"
            f"{', same bits' if d['same bits'] else ''})"
            for name, d in names.items()
        ]
        print(f"  rank {rank} from one GPU: {', '.join(parts)}")
    sys.stdout.flush()


class Span(NamedTuple):
    """A kernel, copy or collective on the GPU's clock, in microseconds."""

    start: float
    end: float
    name: str


MARKER_CYCLES = 2000  # of a kernel that marks in the profile where forward and backward begin
LINES = 15


def profile(case: Case, device: torch.device, calls: int = 4) -> None:
    """Print what runs on the GPUs in a call, rank by rank, in forward and in backward."""
    bench = Bench(case, device)
    parts = {"alone": (bench.forward_alone, bench.backward_alone)}
    parts["together"] = (bench.forward_together, bench.backward_together)
    for name, (forward, backward) in parts.items():
        backward(forward())
        dist.barrier()
        bench.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as record:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            begun = time.perf_counter()
            for _ in range(calls):
                torch.cuda._sleep(MARKER_CYCLES)  # type: ignore[no-untyped-call]
                out = forward()
                torch.cuda._sleep(MARKER_CYCLES)  # type: ignore[no-untyped-call]
                backward(out)
            host = (time.perf_counter() - begun) / calls * 1e3
            torch.cuda._sleep(MARKER_CYCLES)  # type: ignore[no-untyped-call]
            bench.synchronize()
        found = [
            Span(event.time_range.start, event.time_range.end, event.name)
            for event in record.events()
            if event.device_type.name == "CUDA"
        ]
        text = f"host {host:.3f} ms a call\n{summary(found, calls)}"
        for rank, said in enumerate(gathered(text)):
            if dist.get_rank() == 0 and (name == "together" or rank == 0):
                print(f"{case.name()} {name}, rank {rank}: {said}", flush=True)


def summary(spans: list[Span], calls: int) -> str:
    """Milliseconds and launches of each kernel, and gaps without any; by forward and backward.

    The first call is left out: the ranks do not begin at the same time.
    """
    spans = sorted(spans)
    marks = [number for number, span in enumerate(spans) if "spin" in span.name][1:]
    lines = []
    for phase, name in enumerate(("forward", "backward")):
        times: dict[str, list[float]] = {}
        gaps: dict[str, list[float]] = {}
        total = busy = 0.0
        for first, last in list(pairwise(marks))[phase + 2 :: 2]:
            end = spans[first].end
            total += spans[last].start - end
            before = "(begin)"
            for span in (*spans[first + 1 : last], spans[last]):
                if span.start > end:
                    key = f"{short(before)} -> {short(span.name)}"
                    gaps.setdefault(key, []).append(span.start - end)
                if span is spans[last]:
                    break
                times.setdefault(span.name, []).append(span.end - span.start)
                busy += max(0.0, span.end - max(span.start, end))
                if span.end > end:
                    end, before = span.end, span.name
        n = (calls - 1) * 1e3
        lines.append(
            f" {name} {total / n:.4f} ms, nothing runs for {(total - busy) / n:.4f} ms of it"
        )
        for found, head, most in ((times, "", LINES), (gaps, "idle: ", 6)):
            ordered = sorted(found.items(), key=lambda item: -sum(item[1]))
            for key, values in ordered[:most]:
                count = len(values) / (calls - 1)
                lines.append(f"  {sum(values) / n:8.4f} {count:5.1f} {head}{short(key, 100)}")
            if len(ordered) > most:
                rest = [value for _, values in ordered[most:] for value in values]
                count = len(rest) / (calls - 1)
                lines.append(f"  {sum(rest) / n:8.4f} {count:5.1f} {head}others")
    return "\n".join(lines)


def short(name: str, most: int = 40) -> str:
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::", "", name)[:most]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", type=int, help="only these lengths")
    parser.add_argument("--rounds", type=int, default=7, help="of timing; medians are shown")
    parser.add_argument("--profile", action="store_true", help="also list kernels and their times")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if "LOCAL_RANK" not in os.environ:
        print("wanted to be started by torchrun: see --help", file=sys.stderr)
        return 1
    on_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60)
    )
    rows = []
    for case in CASES if on_gpu else TINY:
        if arguments.cases is None or case.seqlen in arguments.cases:
            rows.append(measure(case, device, arguments.rounds))
            if dist.get_rank() == 0:
                show(rows[-1])
            if on_gpu and arguments.profile and case.seqlen < 300000:
                profile(case, device)
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    if dist.get_rank() == 0 and arguments.json is not None:
        name = torch.cuda.get_device_name() if on_gpu else "CPU"
        report = {"device": name, "torch": torch.__version__, "rows": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
