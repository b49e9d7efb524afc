"""Train a small causal language model on bytes, with dynamic mask attention.

    python examples/train_bytes_lm.py

The text is what every machine with Python has: the sources of the standard library, about one file
in ten held out. Nothing is downloaded. With a GPU that dmattn has kernels for, the model and its
context are larger; otherwise everything runs on the CPU in a few minutes. At the end the loss on
the held-out files is compared with their unigram entropy, the best that a model without memory
could reach, the model continues a text, and three files are left in --output-dir:

    loss_curve.png   training and held-out loss
    mask.png         which characters a learned attention head keeps
    metrics.json     configuration, losses, speed

With --mask-path both, the same model is trained three times from the same seed on the same text:
with the keys selected inside the attention, with the keys selected through a dense boolean mask,
and once more like the first time, but from initial weights whose last bit is changed. The third run
shows how far rounding alone drives two runs apart. A fourth file shows the differences:

    loss_paths.png   the losses, and their differences

On one GPU, with a context of 16384: --length 16384 --batch 2

On several GPUs (or processes on a CPU), each with a stretch of every context:

    torchrun --nproc-per-node 2 examples/train_bytes_lm.py --context-parallel
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

# Set before torch starts OpenMP, whose threads then sleep while they wait. By default they spin and
# so take the cores from the threads that work as soon as anything else runs on the machine (on two
# shared cores a step took up to nine times as long).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import Tensor

from bytes_lm.command import run
from bytes_lm.config import GPU_CONFIG, Config, complaint
from bytes_lm.device import choose_device, device_name, half_precision
from bytes_lm.folder import make_folder
from bytes_lm.generation import continue_text
from bytes_lm.model import BytesLM, count_parameters
from bytes_lm.parallel import Ranks, join_ranks
from bytes_lm.text import Text, choose_passage, load_text, unigram_entropy
from bytes_lm.training import MASK_PATHS, History, differences, make_model, train


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/train_bytes_lm"))
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument(
        "--mask-path",
        choices=("window", "dense", "both"),
        default="window",
        help="select keys inside the attention, through a dense mask, or compare the two",
    )
    parser.add_argument(
        "--context-parallel",
        action="store_true",
        help="spread each context over the processes that torchrun has started",
    )
    parser.add_argument(
        "--generate",
        type=int,
        default=160,
        metavar="N",
        help="bytes to write at the end; default 160",
    )
    parser.add_argument("--prompt", help="what they continue; held-out text unless given")
    for field in fields(Config):
        on_gpu = getattr(GPU_CONFIG, field.name)
        both = f"default {field.default}"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            help=both if on_gpu == field.default else f"{both} on a CPU, {on_gpu} on a GPU",
        )
    arguments = parser.parse_args(argv)
    if arguments.generate < 0:
        parser.error(f"--generate: got {arguments.generate}, wanted 0 or more")
    if arguments.context_parallel and arguments.mask_path != "window":
        parser.error(
            f"--mask-path: got {arguments.mask_path} beside --context-parallel, wanted window"
        )
    if arguments.prompt == "":
        parser.error("--prompt: got nothing, wanted at least one byte")
    return arguments


def choose_config(arguments: argparse.Namespace, device: torch.device) -> Config:
    config = GPU_CONFIG if device.type == "cuda" else Config()
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 40e9:
        config = replace(config, batch=2)
    given = {field.name: getattr(arguments, field.name) for field in fields(Config)}
    config = replace(config, **{name: value for name, value in given.items() if value is not None})
    wrong = complaint(config)
    if wrong is not None:
        raise SystemExit(wrong)
    if arguments.mask_path != "window" and config.window >= config.length:
        raise SystemExit(
            f"--mask-path {arguments.mask_path}: got a window of {config.window} for a context of "
            f"{config.length}, wanted a smaller one: nothing would be masked"
        )
    return config


def read_text(config: Config) -> Text:
    """The corpus, if it is longer than one context."""
    text = load_text()
    longest = min(len(text.train), len(text.heldout)) - 1
    if config.length > longest:
        raise SystemExit(
            f"--length: got {config.length}, wanted at most {longest}, the shorter of the two texts"
        )
    return text


def describe(text: Text, entropy: float, config: Config, device: torch.device) -> None:
    print(
        f"text       {len(text.train) / 1e6:.1f} MB in {text.train_files} files to train on, "
        f"{len(text.heldout) / 1e6:.1f} MB in {text.heldout_files} files held out\n"
        f"entropy    {entropy:.3f} bits/byte: the best loss without looking at other bytes\n"
        f"model      {count_parameters(config) / 1e6:.2f} M parameters, {config.layers} "
        f"layers; each query keeps {config.window} of up to {config.length} bytes\n"
        f"training   {config.steps} steps of {config.batch} x {config.length} bytes "
        f"on {device_name(device)}"
    )


def train_paths(
    mask_path: str,
    text: Text,
    config: Config,
    device: torch.device,
    progress: bool,
    ranks: Ranks | None,
) -> tuple[BytesLM, dict[str, History]]:
    """Train on one mask path or on all; returns the model of the first one, and all histories."""
    paths = MASK_PATHS if mask_path == "both" else (mask_path,)
    first = make_model(config, paths[0], device)
    with half_precision(device):
        first.make_caches(1)  # raises before the training if text could not be generated after it
    histories = {paths[0]: train(first, text, config, device, progress, paths[0], ranks)}
    for path in paths[1:]:
        model = make_model(config, path, device)
        histories[path] = train(model, text, config, device, progress, path)
    return first, histories


def draw(
    output: Path,
    model: BytesLM,
    histories: Mapping[str, History],
    passage: Tensor,
    config: Config,
    entropy: float,
) -> list[Path]:
    """Draw the pictures into the folder `output`; returns their paths."""
    # Not imported at the top: --help and wrong options need no matplotlib.
    from bytes_lm.pictures import plot_loss, plot_mask, plot_paths

    size, device = count_parameters(config), device_name(passage.device)
    title = f"{size / 1e6:.2g} M parameters, context {config.length}, {device}"
    pictures = [output / "loss_curve.png", output / "mask.png"]
    plot_loss(pictures[0], next(iter(histories.values())), config, entropy, title)
    plot_mask(pictures[1], model, passage, config)
    if len(histories) > 1:
        pictures.append(output / "loss_paths.png")
        plot_paths(pictures[2], histories, title)
    return pictures


def compare_paths(histories: Mapping[str, History]) -> dict[str, dict[str, Any]]:
    """What metrics.json says about each run and its distance from the first one; prints it too."""
    first = next(iter(histories.values()))
    found = {}
    for name, history in histories.items():
        gaps = differences(history, first)
        found[name] = {
            "final_heldout_bits": history.heldout[-1][1],
            "tokens_per_second": history.tokens_per_second,
            "max_difference_bits": max(gaps, default=0.0),
            "mean_difference_bits": sum(gaps) / max(1, len(gaps)),
            "heldout_bits": history.heldout,
            "train_bits": history.train,
        }
        print(
            f"{name:10} held-out loss {found[name]['final_heldout_bits']:.4f} bits/byte; training "
            f"losses {found[name]['mean_difference_bits']:.1e} bits from the first run on average, "
            f"{found[name]['max_difference_bits']:.1e} at most; {history.tokens_per_second:,.0f} "
            "tokens/s"
        )
    return found


def write_text(model: BytesLM, prompt: Tensor, count: int) -> dict[str, Any]:
    """Print `count` bytes that continue the prompt; returns what metrics.json says about them."""
    written = continue_text(model, prompt, count)
    given, text = (raw.decode("utf-8", "replace") for raw in (bytes(prompt.tolist()), written.text))
    print(f"\n--- it continues {given!r} with:\n{text}\n---")
    if written.bytes_per_second is not None:
        print(f"generated  {written.bytes_per_second:,.0f} bytes/s, from the cache")
    return {"prompt": given, "text": text, "bytes_per_second": written.bytes_per_second}


def train_as_one_of(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Train as a rank other than the first, which does nothing else.

    Returns the configuration and the losses.
    """
    device = choose_device(arguments.device)
    config = choose_config(arguments, device)
    check_stretches(config, ranks)
    _, histories = train_paths(arguments.mask_path, read_text(config), config, device, False, ranks)
    history = histories[arguments.mask_path]
    return {
        "config": asdict(config),
        "heldout_bits": history.heldout,
        "train_bits": history.train,
    }


def check_stretches(config: Config, ranks: Ranks) -> None:
    if config.length % ranks.size != 0:
        raise SystemExit(
            f"--length: got {config.length}, wanted a multiple of {ranks.size}, the number of "
            "processes that share a context"
        )


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, write the files, and return what metrics.json holds."""
    arguments = parse_arguments(argv)
    if not arguments.context_parallel:
        return train_and_report(arguments, None)
    ranks = join_ranks(choose_device(arguments.device).type == "cuda")
    try:
        run = train_and_report if ranks.rank == 0 else train_as_one_of
        return run(arguments, ranks)
    finally:
        dist.destroy_process_group()


def train_and_report(arguments: argparse.Namespace, ranks: Ranks | None) -> dict[str, Any]:
    device = choose_device(arguments.device)
    config = choose_config(arguments, device)
    if ranks is not None:
        check_stretches(config, ranks)
    output: Path = arguments.output_dir
    make_folder(output)

    text = read_text(config)
    entropy = unigram_entropy(text.heldout)
    describe(text, entropy, config, device)
    if ranks is not None:
        print(
            f"ranks      {ranks.size}, each with {config.length // ranks.size} bytes of a context"
        )
    model, histories = train_paths(
        arguments.mask_path, text, config, device, not arguments.no_progress, ranks
    )
    passage = choose_passage(text.heldout, min(config.length, 2048)).to(device)
    pictures = draw(output, model, histories, passage, config, entropy)

    history = next(iter(histories.values()))
    final = history.heldout[-1][1]
    metrics = {
        "config": asdict(config),
        "device": device_name(device),
        "torch": torch.__version__,
        "parameters": count_parameters(config),
        "train_bytes": len(text.train),
        "heldout_bytes": len(text.heldout),
        "unigram_entropy_bits": entropy,
        "final_heldout_bits": final,
        "below_unigram_entropy": final < entropy,
        "tokens_per_second": history.tokens_per_second,
        "train_seconds": history.seconds,
        "heldout_bits": history.heldout,
        "train_bits": history.train,
        "mask_path": arguments.mask_path,
        "ranks": 1 if ranks is None else ranks.size,
    }
    if len(histories) > 1:
        metrics["mask_paths"] = compare_paths(histories)
    if arguments.generate > 0:
        prompt = passage[:64]
        if arguments.prompt is not None:
            # In an argument that is not UTF-8, Python represents the odd bytes by surrogates.
            given = arguments.prompt.encode(errors="surrogateescape")
            prompt = torch.tensor(list(given), dtype=torch.uint8, device=device)
        metrics["generated"] = write_text(model, prompt, arguments.generate)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(
        f"speed      {history.tokens_per_second:,.0f} tokens/s, {history.seconds:.0f} s\n"
        f"pictures   {', '.join(str(picture) for picture in pictures)}\n"
        f"verdict    held-out loss {final:.3f} bits/byte, "
        f"{'below' if final < entropy else 'NOT below'} the unigram entropy of {entropy:.3f}"
    )
    return metrics


if __name__ == "__main__":
    run(main)
