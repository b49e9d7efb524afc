"""Serve the bytes of a small language model to requests as they come.

    python examples/serve_bytes_lm.py

Requests arrive at random times, with prompts of 16 to 4096 bytes out of the standard library, and
want a few bytes each. The engine (bytes_lm/serving.py) works on some of them at a time: they join
the running batch when a slot is free, their prompts are read in chunks beside the decoding of the
others, and they leave the batch when they are done.

At the end each answer is compared with two others. The engine's answer to the same request alone
has to be equal. The model without the engine has matrix products of other shapes, so that in
bfloat16 its answer may differ where two bytes are equally likely except for rounding; the program
then prints how close the two bytes were. It writes to --output-dir

    serving.png    when each request waited, was read and was answered, and the times as curves
    serving.json   throughput, time to first byte and time per byte as percentiles

The model is trained for --steps steps first, so that its answers look like text; the times do not
depend on its weights.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train_bytes_lm.py

import torch

from bytes_lm.command import run
from bytes_lm.config import GPU_CONFIG, Config
from bytes_lm.device import choose_device, device_name, half_precision
from bytes_lm.folder import make_folder
from bytes_lm.generation import continue_text
from bytes_lm.model import BytesLM
from bytes_lm.serving import Answer, Engine, Request
from bytes_lm.text import Text, load_text
from bytes_lm.training import make_model, train

PERCENTILES = (50, 90, 99)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/serve_bytes_lm"))
    for name, default, words in (
        ("requests", 32, "how many requests come"),
        ("slots", 8, "requests that are worked on at a time"),
        ("chunk", 512, "bytes of a prompt that go in at a time"),
        ("count", 48, "the most bytes that a request wants"),
        ("steps", 60, "steps of training before"),
        ("seed", 0, "of the requests and the model"),
    ):
        least = 0 if name in ("steps", "seed") else 1
        text = f"{words}; default {default}"
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=text)
    parser.add_argument(
        "--rate", type=float, default=8.0, help="requests a second on average; default 8"
    )
    parser.add_argument(
        "--longest", type=at_least(16), default=4096, help="longest prompt; default 4096"
    )
    arguments = parser.parse_args(argv)
    if not 0.001 <= arguments.rate < float("inf"):
        parser.error(f"--rate: got {arguments.rate}, wanted a number from 0.001 up")
    return arguments


def at_least(least: int) -> Any:
    """A number from `least` up, for argparse."""

    def number(given: str) -> int:
        try:
            if least <= int(given) < 2**63:
                return int(given)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"got {given}, wanted a whole number from {least} up")

    return number


def make_requests(text: Text, arguments: argparse.Namespace) -> list[Request]:
    """Requests whose prompts have lengths from 16 bytes up, even on a logarithmic scale."""
    generator = torch.Generator().manual_seed(arguments.seed)
    gaps = torch.empty(arguments.requests).exponential_(arguments.rate, generator=generator)
    requests = []
    for arrival in gaps.cumsum(0).tolist():
        drawn = float(torch.rand((), generator=generator))
        length = round(16 * (arguments.longest / 16) ** drawn)
        start = int(torch.randint(len(text.heldout) - length, (), generator=generator))
        count = int(torch.randint(1, arguments.count + 1, (), generator=generator))
        requests.append(Request(arrival, text.heldout[start : start + length], count))
    return requests


def percentiles(values: Sequence[float]) -> dict[str, float]:
    quantiles = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
    found = torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist()
    return {f"p{p}": x for p, x in zip(PERCENTILES, found, strict=True)}


def summary(answers: Sequence[Answer], device: torch.device) -> dict[str, Any]:
    """Times in seconds."""
    firsts = [answer.times[0] - answer.request.arrival for answer in answers]
    gaps = [b - a for answer in answers for a, b in pairwise(answer.times)]
    seconds = max(answer.times[-1] for answer in answers)
    read = sum(len(answer.request.prompt) for answer in answers)
    written = sum(len(answer.text) for answer in answers)
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "requests": len(answers),
        "seconds": seconds,
        "bytes_read_per_second": read / seconds,
        "bytes_written_per_second": written / seconds,
        "time_to_first_byte": percentiles(firsts),
        "time_per_byte": percentiles(gaps or [0.0]),
    }


def count_equal_alone(engine: Engine, answers: Sequence[Answer]) -> int:
    """How many answers are those that the engine gives to their requests one by one."""
    return sum(engine.serve_alone(answer.request).text == answer.text for answer in answers)


def compare_by_itself(
    model: BytesLM, answers: Sequence[Answer], device: torch.device
) -> dict[str, Any]:
    """How many answers the model gives without the engine, and how close the others were.

    A batch adds terms in another order than a single sequence, and a prompt in chunks in another
    order than a prompt at once. So where two bytes are equally likely except for rounding, the
    other one may be chosen, and the texts differ from there on. The margin is the distance of the
    logits of the two bytes, as a share of the largest logit. bfloat16 rounds to 0.004 of that in
    each layer.
    """
    margins = []
    for answer in answers:
        prompt = answer.request.prompt.to(device)
        written = continue_text(model, prompt, answer.request.count, temperature=0.0).text
        if written != bytes(answer.text):
            margins.append(margin(model, prompt, written, bytes(answer.text)))
    return {"equal_by_itself": len(answers) - len(margins), "margins_where_others_part": margins}


@torch.no_grad()
def margin(model: BytesLM, prompt: torch.Tensor, first: bytes, second: bytes) -> float:
    """How far apart the logits of the first two bytes are in which two continuations differ."""
    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    common = torch.tensor(list(first[:same]), dtype=torch.int64, device=prompt.device)
    with half_precision(prompt.device):
        logits = model(torch.cat((prompt.long(), common))[None])[0, -1].float()
    apart = (logits[first[same]] - logits[second[same]]).abs()
    return float(apart / logits.abs().max())


def print_summary(found: dict[str, Any]) -> None:
    print(
        f"served     {found['requests']} requests in {found['seconds']:.1f} s on "
        f"{found['device']}\n"
        f"throughput {found['bytes_read_per_second']:,.0f} bytes/s read, "
        f"{found['bytes_written_per_second']:,.0f} bytes/s written"
    )
    for name, words in (("time_to_first_byte", "first byte"), ("time_per_byte", "per byte  ")):
        times = ", ".join(f"{p} {1000 * x:.1f} ms" for p, x in found[name].items())
        print(f"{words} {times}")
    print(
        f"equal      {found['equal_alone']} of {found['requests']} answers are those that requests "
        f"get alone\n"
        f"           {found['equal_by_itself']} of {found['requests']} those of the model by itself"
    )
    for apart in found["margins_where_others_part"]:
        print(f"           one parts where two bytes are {apart:.4f} of the largest logit apart")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, serve, write the files, and return what serving.json holds."""
    arguments = parse_arguments(argv)
    device = choose_device(arguments.device)
    make_folder(arguments.output_dir)
    config = GPU_CONFIG if device.type == "cuda" else Config()
    config = replace(config, steps=arguments.steps, seed=arguments.seed)
    text = load_text()
    if arguments.longest >= len(text.heldout):
        raise SystemExit(
            f"--longest: got {arguments.longest}, wanted less than the {len(text.heldout)} bytes "
            "that prompts are taken from"
        )
    model = make_model(config, "window", device)
    if config.steps > 0:
        train(model, text, config, device, progress=False)
    with Engine(model, arguments.slots, arguments.chunk) as engine:
        answers = engine.serve(make_requests(text, arguments))
        found = summary(answers, device)
        found["equal_alone"] = count_equal_alone(engine, answers)
    found |= compare_by_itself(model, answers, device)

    from bytes_lm.pictures import plot_serving  # not at the top: --help needs no matplotlib

    plot_serving(arguments.output_dir / "serving.png", answers)
    (arguments.output_dir / "serving.json").write_text(json.dumps(found, indent=1) + "\n")
    print_summary(found)
    return found


if __name__ == "__main__":
    run(main)
