"""Times models of transformers with dmattn beside transformers' own attention, in one run.

    python benchmarks/transformers_models.py [--cases WORD ...] [--json OUT] [--profile] [--tiny]

The backends "triton" and "flex" are timed here as well, beside the CUDA kernels and beside
FlexAttention called by hand. The results go to benchmarks/results/<gpu>-models.json, from which
render.py makes a part of the page. A case that fails is recorded with the reason, and the others
go on. `--profile` also prints which kernels the time of each step went to. `--tiny` runs the same
code with small shapes on the CPU, which shows that it works and says nothing about speed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor

import dmattn
import dmattn.integrations.transformers as dmt
from benchmarks import models_table
from benchmarks.cases import Case
from benchmarks.peers import Data, compiled_flex, make_data
from benchmarks.timing import Call, Clock

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of all cases."""

    vocabulary: int = 32768
    hidden: int = 1024  # of Doge; heads of 64 dimensions, an eighth as many for keys
    intermediate: int = 2048
    layers: int = 8
    window: int = 2048
    training: int = 16384
    long_training: int = 65536
    batch: int = 8  # of generation
    prompts: tuple[int, ...] = (4096, 16384, 65536)
    peer_prompt: int = 16384
    new_tokens: int = 256
    slow_tokens: int = 32  # for sdpa by cuDNN, which takes a tenth of a second each
    llama_hidden: int = 2048  # heads of 128 dimensions
    llama_length: int = 4096
    kernels: int = 16384
    kept: int = 1024
    flex: int = 8192


TINY = Sizes(
    *(64, 128, 64, 2, 16, 96, 128),
    batch=2,
    prompts=(32, 64),
    peer_prompt=64,
    new_tokens=6,
    slow_tokens=4,
    llama_hidden=256,
    llama_length=64,
    kernels=256,
    kept=64,
    flex=256,
)


class Bench:
    """Where a run takes place, and how it takes time."""

    def __init__(self, sizes: Sizes, device: torch.device, profile: bool) -> None:
        self.sizes, self.device, self._profile = sizes, device, profile
        self._clock = Clock(device) if device.type == "cuda" else None

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Call) -> float:
        """By the host's clock; the device is idle before and after."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def steps(self, call: Call, fewest: int, most: int, budget_s: float) -> Row:
        """Milliseconds of whole steps, after one to warm up."""
        call()
        found: list[float] = []
        while len(found) < most and (len(found) < fewest or sum(found) < 1000 * budget_s):
            found.append(1000 * self.seconds(call))
        return {"ms": statistics.median(found), "low_ms": min(found), "high_ms": max(found)} | {
            "count": len(found)
        }

    def race(
        self, calls: dict[str, Call], budget_s: float, fewest: int, most: int
    ) -> dict[str, Row]:
        """Milliseconds on the device of calls taken in turn, round after round."""
        if self._clock is None:
            return {name: self.steps(call, 1, 2, 0.1) for name, call in calls.items()}
        timings = self._clock.race(calls, budget_s, fewest, most)
        return {
            name: {"ms": t.median, "low_ms": t.low, "high_ms": t.high, "count": t.count}
            for name, t in timings.items()
        }

    def peak_bytes(self, call: Call) -> int:
        """The most memory that a call takes beside what was there before."""
        if self.device.type != "cuda":
            call()
            return 1
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def profile(self, title: str, call: Call) -> None:
        """Print for how long the device was busy and with what, and the time that passed."""
        if not self._profile:
            return
        activity = torch.profiler.ProfilerActivity
        on_cuda = self.device.type == "cuda"
        wall = self.seconds(call)
        watched = [activity.CUDA if on_cuda else activity.CPU]
        with torch.profiler.profile(activities=watched) as seen:
            call()
            self.wait()
        time_of = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        events = [e for e in seen.key_averages() if getattr(e, time_of) > 0]
        events.sort(key=lambda e: -getattr(e, time_of))
        busy = sum(getattr(e, time_of) for e in events) / 1e3
        count = sum(e.count for e in events)
        print(f"  {title}: {1e3 * wall:.2f} ms passed, busy {busy:.2f} ms, {count} kernels")
        for event in events[:14]:
            spent = getattr(event, time_of) / 1e3
            print(f"    {spent:8.3f} ms {event.count:6d} x {event.key[:90]}")


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def failures_noted(rows: list[Row], named: Row) -> Iterator[None]:
    """For a step that cannot run, adds a row that says why; the other steps go on."""
    try:
        yield
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        rows.append(named | {"error": f"{type(error).__name__}: {words}"[:300]})
    # Only now are the error and the tensors that its frames hold gone.
    clean()


def shown(rows: list[Row]) -> list[Row]:
    print(models_table.lines_of(rows), flush=True)
    return rows


# --- Doge -----------------------------------------------------------------------------------------


def make_doge(bench: Bench) -> Any:
    """A Doge model of random weights, in bfloat16, whose scores differ between keys."""
    sizes = bench.sizes
    torch.manual_seed(0)
    config = transformers.DogeConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=max(1, sizes.hidden // 512),
        keep_window_size=sizes.window,
        max_position_embeddings=2 * max(*sizes.prompts, sizes.long_training),
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.device(bench.device):
        model = transformers.DogeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):  # 0 in a new model, for which all scores are alike
                parameter.uniform_(0.5, 1.5)
    return dmt.enable_doge(model)


def random_tokens(bench: Bench, batch: int, length: int) -> Tensor:
    return torch.randint(1, bench.sizes.vocabulary, (batch, length), device=bench.device)


def training_step(model: Any, ids: Tensor) -> None:
    """Forward with the loss of the next token, and backward. No optimizer."""
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def doge_training(bench: Bench) -> list[Row]:
    sizes, rows = bench.sizes, list[Row]()
    model = make_doge(bench).train()
    for length, name in (
        (sizes.training, "dmattn"),
        (sizes.long_training, "dmattn"),
        (sizes.training, "sdpa"),
        (sizes.training, "eager"),
    ):
        clean()
        ids = random_tokens(bench, 1, length)
        step = functools.partial(training_step, model, ids)
        named = {"case": "Doge training step", "shape": f"S{length}", "contender": name}
        with failures_noted(rows, named):
            model.set_attn_implementation(name)
            few = 5 if name == "dmattn" else 2
            found = bench.steps(step, few, 2 * few, 1.5)
            model.zero_grad(set_to_none=True)
            memory = bench.peak_bytes(step) + weight_bytes(model)
            bench.profile(f"{named['shape']} {name}", step)
            rows.append(named | {"quantity": "step"} | found)
            rows.append(named | {"quantity": "memory", "bytes": memory})
        model.zero_grad(set_to_none=True)
    return rows


# Ways to generate, beside "dmattn", whose steps generate() compiles, and "sdpa".
PLAIN, NO_CUDNN = "dmattn, not compiled", "sdpa, cuDNN off"


def doge_generation(bench: Bench) -> list[Row]:
    sizes, rows = bench.sizes, list[Row]()
    model = make_doge(bench).eval()
    for prompt in sizes.prompts:
        others = (PLAIN, "sdpa", NO_CUDNN) if prompt == sizes.peer_prompt else ()
        for name in ("dmattn", *others):
            named = {"case": "Doge generate", "shape": f"B{sizes.batch} prompt {prompt}"}
            named |= {"contender": name}
            with failures_noted(rows, named), torch.no_grad():
                torch.backends.cuda.enable_cudnn_sdp(name != NO_CUDNN)
                rows += generation(bench, model, prompt, named)
            torch.backends.cuda.enable_cudnn_sdp(True)
            model.set_attn_implementation("dmattn")
    return rows


def generation(bench: Bench, model: Any, prompt: int, named: Row) -> list[Row]:
    """Time per token of generate() behind a prompt that the cache holds, and size of the cache.

    The cache is filled by dmattn for both contenders: transformers' own attention would make masks
    of batch x heads x prompt x prompt for the prompt.
    """
    name, config = named["contender"], model.config
    cache: Any = transformers.DynamicCache(config=config)
    implementation = "sdpa"
    count = bench.sizes.slow_tokens if name == "sdpa" else bench.sizes.new_tokens
    if name in ("dmattn", PLAIN):
        cache = dmt.DogeCache(config, compileable=name != PLAIN)
        implementation = "dmattn"
    text = random_tokens(bench, bench.sizes.batch, prompt)
    model.set_attn_implementation("dmattn")
    model(text[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    model.set_attn_implementation(implementation)

    def generate(count: int) -> None:
        nonlocal text
        mask = torch.ones_like(text)
        options = {"max_new_tokens": count, "do_sample": False, "past_key_values": cache}
        text = model.generate(text, attention_mask=mask, **options)

    generate(8)  # warms up
    length = text.shape[1]
    seconds = bench.seconds(functools.partial(generate, count))
    assert text.shape[1] == length + count
    bench.profile(f"8 tokens, {named['shape']} {named['contender']}", lambda: generate(8))
    return [
        named | {"quantity": "token", "ms": 1000 * seconds / count, "count": count},
        named | {"quantity": "cache", "bytes": cache_bytes(cache)},
    ]


def cache_bytes(cache: Any) -> int:
    """Bytes of memory of the tensors that a cache holds."""
    held: list[Tensor] = []
    for layer in cache.layers:
        owner = layer.kept if isinstance(cache, dmt.DogeCache) else layer
        held += [t for t in vars(owner).values() if isinstance(t, Tensor)]
    # A tensor's memory may be larger than the tensor: with room for drafts, or as part of another.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(storages.values())


# --- Llama ----------------------------------------------------------------------------------------


def llama_training(bench: Bench) -> list[Row]:
    """With as many heads for keys as for queries, as Llama 2 has them, and with a quarter."""
    rows = list[Row]()
    for group in (1, 4):
        heads = bench.sizes.llama_hidden // 128
        shape = f"B2 S{bench.sizes.llama_length} H{heads}/{max(1, heads // group)} D128"
        named = {"case": "Llama training step", "shape": shape}
        with failures_noted(rows, named | {"contender": "dmattn"}):
            for name, found in llama_steps(bench, group).items():
                rows.append(named | {"contender": name, "quantity": "step"} | found)
    return rows


def llama_steps(bench: Bench, group: int) -> dict[str, Row]:
    """Steps of two models in turn, so that the clocks of the chip are the same for both."""
    sizes = bench.sizes
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.llama_hidden,
        intermediate_size=sizes.llama_hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.llama_hidden // 128,
        num_key_value_heads=max(1, sizes.llama_hidden // 128 // group),
        max_position_embeddings=sizes.llama_length,
    )
    dmt.register()
    with torch.device(bench.device):
        first = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = random_tokens(bench, 2, sizes.llama_length)
    steps: dict[str, Call] = {}
    for name in ("dmattn", "sdpa"):
        model = first if name == "dmattn" else copy.deepcopy(first)
        model.set_attn_implementation(name)
        steps[name] = functools.partial(training_step, model, ids)
    found = bench.race(steps, 2.0, 8, 40)
    for name, step in steps.items():
        bench.profile(f"group {group}, {name}", step)
    return found


# --- backends -------------------------------------------------------------------------------------

Attend = Callable[[Data], Tensor]


def by_backend(backend: str | None, data: Data) -> Tensor:
    """dmattn, the selection of keys included where the case has one."""
    case = data.case
    return dmattn.flash_dmattn_func(
        data.q,
        data.k,
        data.v,
        attn_bias=data.bias,
        is_causal=case.causal,
        window_size=case.kept,
        backend=backend,
    )


def flex_by_hand(given: Any, data: Data) -> Tensor:
    """FlexAttention with a causal block mask: the given one, or one that is made here."""
    block_mask = causal_block_mask(data) if given is None else given
    options = {"block_mask": block_mask, "enable_gqa": data.case.nheads != data.case.nheads_k}
    return compiled_flex()(*data.heads_first(), **options).transpose(1, 2)


def causal_block_mask(data: Data) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    lengths = data.case.seqlen_q, data.case.seqlen_k
    compiled = data.q.device.type == "cuda"
    return create_block_mask(causal, None, None, *lengths, device=data.q.device, _compile=compiled)


def kernel_rows(bench: Bench, name: str, case: Case, contenders: dict[str, Attend]) -> list[Row]:
    """Forward and backward of each contender, in turn."""
    data, rows = make_data(case, bench.device), list[Row]()
    phases: dict[str, dict[str, Call]] = {"forward": {}, "backward": {}}
    for contender, attend in contenders.items():
        named = {"case": name, "shape": case.name, "contender": contender}
        with failures_noted(rows, named):
            for phase, call in both_phases(attend, data).items():
                call()
                phases[phase][contender] = call
            bench.wait()
    for phase, calls in phases.items():
        for contender, found in bench.race(calls, 1.0, 5, 40).items():
            named = {"case": name, "shape": case.name, "contender": contender}
            rows.append(named | {"quantity": phase} | found)
    return rows


def both_phases(attend: Attend, data: Data) -> dict[str, Call]:
    def forward() -> None:
        with torch.no_grad():
            attend(data)

    out = attend(data)
    wanted = data.wanted()
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, wanted, data.dout, retain_graph=True),
    }


def triton_backend(bench: Bench) -> list[Row]:
    sizes, name = bench.sizes, "triton backend"
    backends = (None, "triton") if bench.device.type == "cuda" else (None, "cpu")
    contenders: dict[str, Attend] = {
        backend or "dmattn": functools.partial(by_backend, backend) for backend in backends
    }
    n = sizes.kernels
    dense = Case("", f"S{n} H16 D128 causal", (), seqlen_q=n, seqlen_k=n, causal=True)
    running = dataclasses.replace(
        dense,
        name=f"S{n} H16/4 D128 w{sizes.kept}",
        nheads_k=4,
        kept=sizes.kept,
        running=True,
        bias="key",
    )
    return [row for case in (dense, running) for row in kernel_rows(bench, name, case, contenders)]


def flex_backend(bench: Bench) -> list[Row]:
    length = bench.sizes.flex
    words = f"S{length} H16 D128 causal"
    case = Case("", words, (), seqlen_q=length, seqlen_k=length, causal=True)
    given = causal_block_mask(make_data(case, bench.device))
    contenders: dict[str, Attend] = {
        "flex": functools.partial(by_backend, "flex"),
        "by hand": functools.partial(flex_by_hand, None),
        "by hand, block mask given": functools.partial(flex_by_hand, given),
    }
    return kernel_rows(bench, "flex backend", case, contenders)


CASES: dict[str, Callable[[Bench], list[Row]]] = {
    "doge training": doge_training,
    "doge generate": doge_generation,
    "llama training": llama_training,
    "triton": triton_backend,
    "flex": flex_backend,
}

# --- the run --------------------------------------------------------------------------------------


def environment(device: torch.device) -> Row:
    on_cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if on_cuda else "none",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dmattn": dmattn.__version__,
        "dtype": "bfloat16",
        "notes": [
            "Training steps are forward with loss, and backward, without an optimizer; their "
            "memory includes weights and gradients.",
            "Tokens are timed in generate(), behind a prompt that dmattn has put into the cache "
            "for either contender. From a DogeCache they are taken by a forward that generate() "
            "compiles, unless it says otherwise; generate() does not compile one over its default "
            "cache. For it, sdpa takes the kernels of cuDNN, which torch prepares anew for each "
            "number of keys.",
        ],
    }


def main() -> int:
    arguments = parse()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to time", file=sys.stderr)
        return 1
    chosen = {name: run for name, run in CASES.items() if named(name, arguments.cases)}
    if not chosen:
        print(f"--cases: none of {list(CASES)} is meant: nothing to time", file=sys.stderr)
        return 1
    start = time.monotonic()
    sizes = TINY if arguments.tiny else Sizes()
    bench = Bench(sizes, device, arguments.profile)
    results: Row = {**environment(device), "sizes": dataclasses.asdict(sizes), "rows": []}
    if arguments.json is None and not arguments.tiny:
        short = results["gpu"].lower().replace("nvidia", "").strip().replace(" ", "-")
        arguments.json = Path(__file__).parent / "results" / f"{short}-models.json"
    for name, run in chosen.items():
        begun, rows = time.monotonic(), list[Row]()
        with failures_noted(rows, {"case": name, "shape": "", "contender": ""}):
            rows += run(bench)
        results["rows"] += shown(rows)
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        results["seconds"] = round(time.monotonic() - start)
        if arguments.json is not None:  # if this process is ended later, nothing timed is lost
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(models_table.text(results))
    return 0


def named(case: str, words: list[str] | None) -> bool:
    return not words or any(word in case for word in words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", help=f"only those with one of these in {list(CASES)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="also print where the time went")
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU, as a check")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
