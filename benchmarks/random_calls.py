"""Times random calls beside the fastest of torch's own, to find where dmattn is slower.

    python benchmarks/random_calls.py [--seconds S] [--seed N] [--kinds KIND ...] [--json OUT]

The cases of `cases.py` are chosen; these are drawn at random: shapes, groups of heads, dtypes,
masks and biases, large and small. For each call the forward and, where there is one, the backward
are timed from a cold L2 cache, in turn with every peer that can compute the same. The ratio is the
time of the fastest peer over that of dmattn: below 1 the peer is faster. Attention over selected
keys is compared with attention over all keys, which is what there is without a selection.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dmattn
from benchmarks.peers import sdpa, torch_varlen_call
from benchmarks.timing import Call, Clock

LENGTHS = (
    *(50, 77, 128, 197, 257, 384, 512, 577, 640, 1000, 1024, 1369, 1500, 2048, 2049, 3000),
    *(4096, 6000, 8192, 12288, 16384),
)
HEAD_DIMS = (32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
HEADS = (3, 4, 6, 8, 12, 16, 20, 24, 32)
GROUPS = (1, 1, 1, 2, 4, 8)
ROUNDS = 7
QKV = tuple[Tensor, Tensor, Tensor]
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION


@dataclasses.dataclass(frozen=True)
class Shape:
    """B sequences of S tokens, H query heads over HK, D columns."""

    batch: int
    seqlen: int
    nheads: int
    nheads_k: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"H{self.nheads}/{self.nheads_k}"
        return f"B{self.batch} S{self.seqlen} {heads} D{self.head_dim} {dtype}"


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call by dmattn and by its peers, which return the output; inputs that get gradients."""

    name: str
    ours: Call
    peers: dict[str, Call]
    inputs: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    """Milliseconds of dmattn, the ratio of the fastest peer's time to that, and which peer it was.

    The same of the backward, if it was timed.
    """

    kind: str
    name: str
    forward: float
    forward_ratio: float
    forward_peer: str
    backward: float | None = None
    backward_ratio: float | None = None
    backward_peer: str | None = None

    @property
    def worst(self) -> float:
        return min(self.forward_ratio, self.backward_ratio or self.forward_ratio)


class Draw:
    """Random shapes and tensors, the same for the same seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.random = random.Random(seed)
        self.device = device
        torch.manual_seed(seed)

    def shape(self, most_tokens: int, most_work: float = 3e12, shortest: int = 1) -> Shape:
        """A shape of at most so many tokens and so much forward work, as if not causal."""
        while True:
            pick = self.random.choice
            batch, seqlen, nheads = pick((1, 1, 2, 3, 4, 8, 16, 32, 64)), pick(LENGTHS), pick(HEADS)
            group, head_dim = pick(GROUPS), pick(HEAD_DIMS)
            work = 4.0 * batch * nheads * seqlen**2 * head_dim
            fits = 512 <= batch * seqlen <= most_tokens and work <= most_work
            if fits and seqlen >= shortest and nheads % group == 0:
                dtype = pick((torch.bfloat16, torch.bfloat16, torch.float16))
                return Shape(batch, seqlen, nheads, nheads // group, head_dim, dtype)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def normal(self, *size: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=dtype).requires_grad_(grad)

    def qkv(self, x: Shape, seqlen_k: int | None = None, grad: bool = True) -> QKV:
        keys = x.seqlen if seqlen_k is None else seqlen_k

        def operand(seqlen: int, nheads: int) -> Tensor:
            return self.normal(x.batch, seqlen, nheads, x.head_dim, dtype=x.dtype, grad=grad)

        rows = operand(x.seqlen, x.nheads)
        return rows, operand(keys, x.nheads_k), operand(keys, x.nheads_k)


def by(
    qkv: QKV,
    backend: SDPBackend,
    added: Callable[[], Tensor] | None = None,
    causal: bool = False,
) -> Call:
    """torch's attention; `added` makes, within the timed call, its mask or bias."""
    return lambda: sdpa(*qkv, backend, None if added is None else added(), causal)


# --- kinds of calls -------------------------------------------------------------------------------


def dense(draw: Draw) -> Drawn:
    x, causal = draw.shape(32768), draw.chance(0.6)
    qkv = draw.qkv(x)
    return Drawn(
        f"{x}{' causal' if causal else ''}",
        lambda: dmattn.flash_dmattn_func(*qkv, is_causal=causal),
        {"cuDNN": by(qkv, CUDNN, causal=causal), "flash": by(qkv, FLASH, causal=causal)},
        list(qkv),
    )


def cross(draw: Draw) -> Drawn:
    x, keys = draw.shape(32768), draw.random.choice(LENGTHS[:18])
    qkv = draw.qkv(x, keys)
    return Drawn(
        f"{x} over {keys} keys",
        lambda: dmattn.flash_dmattn_func(*qkv),
        {"cuDNN": by(qkv, CUDNN), "flash": by(qkv, FLASH)},
        list(qkv),
    )


def mask(draw: Draw) -> Drawn:
    x, how = draw.shape(16384), draw.random.choice(("padding", "padding", "rows", "documents"))
    qkv, places = draw.qkv(x), torch.arange(x.seqlen, device=draw.device)
    if how == "padding":
        shortest = max(1, x.seqlen // 4)
        lengths = [draw.random.randint(shortest, x.seqlen) for _ in range(x.batch)]
        seen = (places < torch.tensor(lengths, device=draw.device)[:, None])[:, None, None]
    elif how == "documents":
        number = places // max(1, x.seqlen // 5)
        seen = (number[:, None] == number)[None, None]
    else:
        seen = torch.rand(1, x.nheads, x.seqlen, x.seqlen, device=draw.device) < 0.5
    return Drawn(
        f"{x} {how}",
        lambda: dmattn.flash_dmattn_func(*qkv, attn_mask=seen),
        {name: by(qkv, backend, lambda: seen) for name, backend in _WITH_MASKS.items()},
        list(qkv),
    )


_WITH_MASKS = {"cuDNN": CUDNN, "efficient": EFFICIENT}


def bias(draw: Draw) -> Drawn:
    """A bias for each row and key, of 16 bits or fp32, with its gradient asked for or not."""
    x = draw.shape(16384)
    while x.batch * x.nheads * x.seqlen**2 > 1.2e9:
        x = draw.shape(16384)
    qkv, grad = draw.qkv(x), draw.chance(0.65)
    heads = draw.random.choice(((1, x.nheads), (x.batch, x.nheads), (x.batch, 1), (1, 1)))
    dtype = torch.float32 if draw.chance(0.3) else x.dtype
    added = draw.normal(*heads, x.seqlen, x.seqlen, dtype=dtype, grad=grad)

    def as_mask() -> Tensor:
        return added.to(x.dtype).expand(x.batch, x.nheads, -1, -1)

    peers = {"efficient": by(qkv, EFFICIENT, as_mask)}
    if not grad:
        peers["cuDNN"] = by(qkv, CUDNN, as_mask)
    bits = "fp32" if dtype == torch.float32 else "16 bits"
    return Drawn(
        f"{x} [{heads[0]}, {heads[1]}, S, S] {bits}{', gradient' if grad else ''}",
        lambda: dmattn.flash_dmattn_func(*qkv, attn_bias=added),
        peers,
        [*qkv, *([added] if grad else [])],
    )


def few_rows(draw: Draw) -> Drawn:
    """Decoding, drafts, and short prompts over a long cache."""
    pick = draw.random.choice
    rows, keys = pick((1, 1, 1, 2, 4, 8, 16, 32, 64)), pick((300, 1000, 2048, 8000, 32768, 65536))
    nheads, nheads_k = pick(((32, 8), (32, 32), (16, 4), (8, 1), (64, 8), (28, 4), (16, 16)))
    batch, head_dim = pick((1, 1, 2, 4, 8, 16, 64)), pick((64, 80, 96, 128, 128, 192, 256))
    while batch * keys * nheads_k * head_dim > 6e8:
        batch, keys = (batch // 2, keys) if batch > 1 else (1, keys // 2)
    x = Shape(batch, rows, nheads, nheads_k, head_dim, torch.bfloat16)
    qkv = draw.qkv(x, keys, grad=False)
    return Drawn(
        f"{x} over {keys} keys",
        lambda: dmattn.flash_dmattn_func(*qkv),
        {"cuDNN": by(qkv, CUDNN), "flash": by(qkv, FLASH)},
        [],
    )


def packed(draw: Draw) -> Drawn:
    pick = draw.random.choice
    count, longest = pick((4, 8, 16, 32, 64, 200)), pick((128, 512, 1024, 2048, 4096))
    count = min(count, 90000 // longest)
    lengths = [draw.random.randint(max(1, longest // 16), longest) for _ in range(count)]
    nheads, nheads_k = pick(((16, 16), (32, 8), (16, 4), (12, 12), (8, 2), (24, 24)))
    x = Shape(1, sum(lengths), nheads, nheads_k, pick(HEAD_DIMS), torch.bfloat16)
    q, k, v = (t.detach().squeeze(0).requires_grad_() for t in draw.qkv(x))
    causal, grouped = draw.chance(0.6), nheads != nheads_k
    ends = torch.tensor([0, *lengths]).cumsum(0).to(draw.device, torch.int32)
    bounds = (ends, ends, max(lengths), max(lengths))
    return Drawn(
        f"{count} sequences up to {max(lengths)}: {x}{' causal' if causal else ''}",
        lambda: dmattn.flash_dmattn_varlen_func(q, k, v, *bounds, is_causal=causal),
        {"varlen_attn": lambda: torch_varlen_call(causal, grouped)(q, k, v, *bounds)},
        [q, k, v],
    )


def top(draw: Draw) -> Drawn:
    """Running top-w, selection included, beside attention over all keys without a bias."""
    x = draw.shape(32768, 6e12, shortest=1000)
    window = min(draw.random.choice((128, 256, 512, 1024, 2048)), x.seqlen // 2)
    qkv = draw.qkv(x)
    heads = draw.random.choice((x.nheads_k, x.nheads_k, x.nheads))
    scores = draw.normal(x.batch, heads, 1, x.seqlen, dtype=x.dtype)
    settings: dict[str, Any] = {"attn_bias": scores, "is_causal": True, "window_size": window}
    return Drawn(
        f"{x} w{window}, scores of {heads} heads",
        lambda: dmattn.flash_dmattn_func(*qkv, **settings),
        {"cuDNN, all keys": by(qkv, CUDNN, causal=True)},
        [*qkv, scores],
    )


KINDS: dict[str, Callable[[Draw], Drawn]] = {
    "dense": dense,
    "cross": cross,
    "mask": mask,
    "bias": bias,
    "few rows": few_rows,
    "packed": packed,
    "top": top,
}


# --- timing ---------------------------------------------------------------------------------------


def time_call(clock: Clock, call: Call) -> float:
    call()
    call()
    return statistics.median(clock.once(call) for _ in range(ROUNDS))


def time_both(clock: Clock, call: Call, inputs: list[Tensor]) -> tuple[float, float | None]:
    """Milliseconds of the forward and the backward; None without inputs that have a gradient."""
    forward = time_call(clock, call)
    if not inputs:
        return forward, None
    out: Any = call()
    dout = torch.randn_like(out)
    return forward, time_call(
        clock, lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    )


def compare(clock: Clock, kind: str, drawn: Drawn) -> Result | None:
    """None where no peer computes the call."""
    forward, backward = time_both(clock, drawn.ours, drawn.inputs)
    peers: dict[str, tuple[float, float | None]] = {}
    for name, call in drawn.peers.items():
        try:
            peers[name] = time_both(clock, call, drawn.inputs)
        except RuntimeError:  # what the peer does not compute, or what does not fit into memory
            continue
    if not peers:
        return None
    first = min(peers, key=lambda name: peers[name][0])
    found = Result(kind, drawn.name, forward, peers[first][0] / forward, first)
    times = {name: both[1] for name, both in peers.items() if both[1] is not None}
    if backward is None or not times:
        return found
    second = min(times, key=lambda name: times[name])
    ratio = times[second] / backward
    return dataclasses.replace(found, backward=backward, backward_ratio=ratio, backward_peer=second)


def show(results: Sequence[Result], below: float) -> None:
    """A summary by kind, and the calls in which a peer is faster."""
    print(
        f"\n{'kind':10} {'calls':>5}  {'forward':>8} {'at least 1':>10}  {'backward':>8} at least 1"
    )
    for kind in dict.fromkeys(x.kind for x in results):
        of_kind = [x for x in results if x.kind == kind]
        words = f"{kind:10} {len(of_kind):5}"
        for ratios in (
            [x.forward_ratio for x in of_kind],
            [x.backward_ratio for x in of_kind if x.backward_ratio is not None],
        ):
            if ratios:
                share = sum(x >= 1 for x in ratios) / len(ratios)
                words += f"  {statistics.median(ratios):8.2f} {share:10.0%}"
        print(words)
    print(f"\nbelow {below:g}, in ms, with the ratio to the fastest peer:")
    for x in sorted(results, key=lambda x: x.worst):
        if x.worst >= below:
            break
        words = f"{x.kind:9} {x.name:70} {x.forward:8.4f} {x.forward_ratio:5.2f} {x.forward_peer}"
        if x.backward is not None:
            words += f", backward {x.backward:.4f} {x.backward_ratio:.2f} {x.backward_peer}"
        print(words)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="to draw calls for; 120")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--below", type=float, default=1.0, help="the ratio up to which to list")
    parser.add_argument("--json", type=Path, help="where to write all results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if not torch.cuda.is_available():
        print("random_calls: torch sees no CUDA device", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    clock, results = Clock(device), []
    start, number = time.monotonic(), 0
    while time.monotonic() - start < arguments.seconds:
        kind = arguments.kinds[number % len(arguments.kinds)]
        draw = Draw(arguments.seed * 100_000 + number, device)
        number += 1
        found = compare(clock, kind, KINDS[kind](draw))
        results += [found] if found is not None else []
        seconds = time.monotonic() - start
        print(f"\r{len(results)} calls, {seconds:.0f} of {arguments.seconds:.0f} s", end="")
    show(results, arguments.below)
    if arguments.json is not None:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        calls = [dataclasses.asdict(x) for x in results]
        arguments.json.write_text(json.dumps(facts | {"calls": calls}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
