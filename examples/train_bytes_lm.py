"""Train a small causal language model on bytes, with dynamic mask attention.

    python examples/train_bytes_lm.py

The text is what every machine with Python has: the sources of the standard library, about one file
in ten held out. Nothing is downloaded. With a GPU that dmattn has kernels for, the model and its
context are larger; otherwise everything runs on the CPU in a few minutes. At the end the loss on
the held-out files is compared with their unigram entropy, the best that a model without memory
could reach, and three files are left in --output-dir:

    loss_curve.png   training and held-out loss
    mask.png         which characters a learned attention head keeps
    metrics.json     configuration, losses, speed
"""

import argparse
import json
import math
import os
import sysconfig
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

# Before torch starts OpenMP: threads that wait by spinning take the cores from those that work as
# soon as anything else runs beside (on two shared cores, up to nine times the time for a step).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from dmattn import get_available_backends
from dmattn.modules import DynamicMaskAttention, rotary_embedding
from dmattn.utils.mask import top_window_mask

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

BITS = 1 / math.log(2)  # one nat in bits
VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class Config:
    """What to train. The defaults are those for a CPU."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    length: int = 256  # context, in bytes
    window: int = 64  # keys that each query keeps
    batch: int = 8
    steps: int = 700
    lr: float = 4e-3
    seed: int = 0


GPU_CONFIG = Config(
    layers=8,
    width=512,
    heads=8,
    kv_heads=2,
    length=4096,
    window=512,
    batch=8,
    steps=1000,
    lr=1.5e-3,
)


# ---------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Text:
    """The corpus: two uint8 streams made of different files."""

    train: Tensor
    heldout: Tensor
    train_files: int
    heldout_files: int


def load_text(root: Path | None = None) -> Text:
    """The Python sources below root (the standard library's folder by default).

    A file is held out when the checksum of its path says so, so that the split does not move when
    files are added. Raises RuntimeError when there is too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name or not path.is_file():
            continue
        parts[zlib.crc32(name.encode()) % 10 == 0].append(path.read_bytes())
    streams = {held: b"\n".join(files) for held, files in parts.items()}
    for held, stream in streams.items():
        if len(stream) < 100_000:
            raise RuntimeError(
                f"found {len(stream)} bytes of {'held-out' if held else 'training'} text in *.py "
                f"below {root}, wanted at least 100000"
            )
    train, heldout = (
        torch.frombuffer(bytearray(streams[held]), dtype=torch.uint8) for held in (False, True)
    )
    return Text(train, heldout, len(parts[False]), len(parts[True]))


def unigram_entropy(stream: Tensor) -> float:
    """Entropy of the byte frequencies of a uint8 stream, in bits per byte."""
    counts = torch.bincount(stream.to(torch.int32), minlength=VOCABULARY).to(torch.float64)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log2()).sum())


def random_windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """(count, length + 1) int64 bytes at random places; the last column is only predicted."""
    start = torch.randint(len(stream) - length, (count, 1), generator=generator)
    index = start.to(stream.device) + torch.arange(length + 1, device=stream.device)
    return stream[index].long()


def even_windows(stream: Tensor, count: int, length: int) -> Tensor:
    """(count, length + 1) int64 bytes at evenly spaced places, the same ones at every call."""
    count = min(count, max(1, len(stream) // (length + 1)))
    start = torch.linspace(0, len(stream) - length - 1, count, dtype=torch.float64)
    index = start.long().to(stream.device)[:, None]
    return stream[index + torch.arange(length + 1, device=stream.device)].long()


# --------------------------------------------------------------------------------------- model


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 32 * round(width * 8 / 3 / 32)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised input and added to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = DynamicMaskAttention(
            config.width, config.heads, config.kv_heads, window_size=config.window
        )
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config.width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), position_embeddings=rotary)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class BytesLM(nn.Module):
    """Decoder over bytes: (B, S) int64 tokens -> (B, S, 256) logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.mlp.gate, block.mlp.up):
                nn.init.normal_(layer.weight, std=config.width**-0.5)
            # Layers that add to the residual stream start small: its variance stays near one.
            for layer in (block.attention.o_proj, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.5 * (config.width * config.layers) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = rotary_embedding(positions, self.head_dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return F.linear(self.norm(x), self.embedding.weight)  # the head is the embedding


def half_precision(device: torch.device) -> torch.autocast:
    """On a GPU the arithmetic is bfloat16 by autocast; weights and their updates stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def loss_nats(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy, in nats per byte, of (B, S + 1) windows.

    On a GPU the arithmetic is bfloat16 by autocast; weights and their updates stay float32.
    """
    with half_precision(windows.device):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def heldout_bits(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Mean loss over windows, in bits per byte."""
    model.eval()
    losses = [loss_nats(model, part) * len(part) for part in torch.split(windows, batch)]
    model.train()
    return float(torch.stack(losses).sum()) / len(windows) * BITS


@torch.no_grad()
def continue_text(model: nn.Module, prompt: Tensor, count: int, temperature: float = 0.7) -> bytes:
    """Draw count bytes after a (S,) prompt."""
    model.eval()
    tokens = prompt.long()[None]
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        with half_precision(tokens.device):
            logits = model(tokens)[:, -1]
        probabilities = (logits.float() / temperature).softmax(-1).cpu()
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
    model.train()
    return bytes(tokens[0, len(prompt) :].tolist())


# ------------------------------------------------------------------------------------ training


@dataclass
class History:
    """What happened: losses in bits per byte, seconds of training without the evaluations."""

    train: list[float]
    heldout: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW; only matrices decay, and neither the embedding nor the scores' projection does."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and not name.endswith(("embedding.weight", "dt_proj.weight"))
        (decayed if matrix else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    cuda = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=cuda)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warmup over the first twentieth, then a cosine down to a twentieth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


class Stopwatch:
    """Seconds between start and stop, summed up; waits for the device at both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        self.started = self.now()

    def stop(self) -> None:
        self.seconds += self.now() - self.started


def train(
    model: nn.Module, text: Text, config: Config, device: torch.device, progress: bool = True
) -> History:
    """Train model in place."""
    stream = text.train.to(device)
    checks = even_windows(text.heldout.to(device), 6 * config.batch, config.length)
    optimizer = make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, config.steps)
    )
    generator = torch.Generator().manual_seed(config.seed)
    check_steps = {math.ceil(config.steps * part / 40) for part in (1, 2, *range(4, 41, 4))}
    read_every = 10 if device.type == "cuda" else 1  # reading a loss makes the host wait
    losses: list[Tensor] = []
    heldout = [(0, heldout_bits(model, checks, config.batch))]
    watch = Stopwatch(device)
    bar = tqdm(range(1, config.steps + 1), unit="step", disable=not progress, dynamic_ncols=True)
    watch.start()
    for step in bar:
        windows = random_windows(stream, config.batch, config.length, generator)
        loss = loss_nats(model, windows)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach() * BITS)
        if step in check_steps:
            watch.stop()
            heldout.append((step, heldout_bits(model, checks, config.batch)))
            watch.start()
        if progress and step % read_every == 0:
            seconds = watch.seconds + watch.now() - watch.started
            bar.set_postfix_str(
                f"train {losses[-1].item():.2f}, held-out {heldout[-1][1]:.2f} bits/byte, "
                f"{step * config.batch * config.length / seconds:,.0f} tokens/s",
                refresh=False,
            )
    watch.stop()
    tokens = config.steps * config.batch * config.length
    curve = torch.stack(losses).tolist() if losses else []
    return History(curve, heldout, watch.seconds, tokens / watch.seconds)


# ------------------------------------------------------------------------------------ pictures


def running_mean(values: Sequence[float], share: float = 0.015) -> list[float]:
    """Mean of each value and its neighbours, up to a share of all values on either side."""
    reach = max(1, round(share * len(values)))
    reaches = (min(reach, i, len(values) - 1 - i) for i in range(len(values)))  # fewer at the ends
    parts = (values[i - near : i + near + 1] for i, near in enumerate(reaches))
    return [sum(part) / len(part) for part in parts]


def plot_loss(path: Path, history: History, config: Config, entropy: float, title: str) -> None:
    """Training and held-out loss over the steps, with the unigram entropy as a line."""
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(history.train) + 1)
    ax.plot(steps, history.train, color="#c6dbef", lw=0.8, label="training, each step")
    ax.plot(steps, running_mean(history.train), color="#6baed6", label="training, running mean")
    checked, heldout = zip(*history.heldout, strict=True)
    ax.plot(checked, heldout, color="#08306b", marker="o", ms=4, lw=1.2, label="held-out files")
    ax.axhline(entropy, color="#d94801", ls="--", lw=1.2)
    ax.annotate(
        f"unigram entropy {entropy:.2f}",
        (1, entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 4),
        textcoords="offset points",
        ha="right",
        color="#d94801",
    )
    final = history.heldout[-1]
    ax.annotate(
        f"{final[1]:.2f}",
        final,
        xytext=(0, -14),
        textcoords="offset points",
        ha="center",
        color="#08306b",
        weight="bold",
    )
    ax.set(xlabel="training step", ylabel="loss, bits per byte", title=title)
    ax.set_ylim(0, 8.5)
    ax.set_xlim(0, config.steps * 1.02)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def kept_keys(scores: Tensor, window: int) -> Tensor:
    """(S,) scores -> (S, S) bool: keys that each query keeps, as the attention selects them."""
    return top_window_mask(scores[None, None, None], window, len(scores), is_causal=True)[0, 0]


@torch.no_grad()
def choose_head(model: BytesLM, tokens: Tensor) -> tuple[int, int, Tensor]:
    """The layer and score head that reach back furthest on (S,) tokens, and its scores (S,)."""
    seen: list[Tensor] = []
    hooks = []
    for block in model.blocks:
        assert isinstance(block, Block)
        hooks.append(
            block.attention.register_forward_pre_hook(
                lambda module, args: seen.append(module.key_scores(args[0])[0])
            )
        )
    with half_precision(tokens.device):
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    age = torch.arange(len(tokens), device=tokens.device)
    age = age[:, None] - age
    best: tuple[float, int, int, Tensor] | None = None
    for layer, scores in enumerate(seen):
        for head, row in enumerate(scores):
            attention = model.blocks[layer].attention
            assert isinstance(attention, DynamicMaskAttention)
            keep = kept_keys(row, attention.window_size or len(row))
            reach = float((age * keep).sum() / keep.sum())
            if best is None or reach > best[0]:
                best = (reach, layer, head, row)
    assert best is not None
    return best[1:]


def choose_passage(stream: Tensor, length: int) -> Tensor:
    """(length,) bytes of readable text: from a class or function on, a third into the stream."""
    data = stream.numpy().tobytes()
    start = len(data) // 3
    for _ in range(200):
        start = data.find(b"\n\n\n", start + 1) + 3
        passage = data[start : start + length]
        if len(passage) == length and passage.isascii() and passage.startswith((b"def", b"class")):
            return stream[start : start + length]
    return stream[:length]


def draw_mask(ax: Axes, keep: Tensor, window: int) -> None:
    """The whole mask: one row a query, one column a key."""
    size = len(keep)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    colours = ListedColormap(["#ffffff", "#e4e4e4", "#08519c"])
    ax.imshow((visible.int() + (keep & visible).int()).numpy(), cmap=colours, vmin=0, vmax=2)
    ax.set(xlabel="key position", ylabel="query position")
    ax.set_title(f"each query keeps {window} of up to {size} keys")
    ax.legend(
        handles=[
            Patch(facecolor="#08519c", label="kept"),
            Patch(facecolor="#e4e4e4", label="seen, dropped"),
        ],
        frameon=False,
        loc="upper right",
    )


def draw_text(ax: Axes, passage: bytes, kept: Tensor, columns: int = 72, rows: int = 20) -> None:
    """The end of the passage as text, the kept characters white on dark ground."""
    cells, row, column = [], 0, 0
    for char, is_kept in zip(passage.decode("latin-1"), kept.tolist(), strict=True):
        if column == columns:
            row, column = row + 1, 0
        cells.append((row, column, char, is_kept))
        row, column = (row + 1, 0) if char == "\n" else (row, column + 1)
    first = max(0, cells[-1][0] + 1 - rows)
    signs = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", " ": "\N{MIDDLE DOT}"}
    for row, column, char, is_kept in cells:
        if row < first:
            continue
        top = row - first
        if is_kept:
            ax.add_patch(Rectangle((column, top + 0.04), 1, 0.92, color="#08519c", lw=0))
        ax.text(
            column + 0.5,
            top + 0.54,
            signs.get(char, char),
            family="monospace",
            fontsize=9,
            ha="center",
            va="center",
            color="white" if is_kept else "#c8c8c8" if char in signs else "#666666",
        )
    ax.set(xlim=(0, columns), ylim=(min(rows, cells[-1][0] + 1), 0), aspect=2, anchor="NW")
    ax.axis("off")


def plot_mask(path: Path, model: BytesLM, passage: Tensor, config: Config) -> None:
    """One learned mask on real text: as a matrix, and as the characters that it keeps."""
    layer, head, scores = choose_head(model, passage.long())
    keep = kept_keys(scores, config.window).cpu()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.2), layout="constrained", width_ratios=(1, 1.5)
    )
    draw_mask(left, keep, min(config.window, len(keep)))
    draw_text(right, bytes(passage.tolist()), keep[-1])
    shown = "" if len(keep) <= 20 * 72 else " (the end of the context)"
    right.set_title(f"the characters that the last query keeps{shown}", loc="left")
    figure.suptitle(
        f"A learned mask: layer {layer + 1} of {config.layers}, "
        f"key/value head {head + 1} of {config.kv_heads}"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


# ---------------------------------------------------------------------------------------- main


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/train_bytes_lm"))
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    for field in fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            help=f"default {field.default} on a CPU, {getattr(GPU_CONFIG, field.name)} on a GPU",
        )
    return parser.parse_args(argv)


def choose_device(wanted: str) -> torch.device:
    """The device to train on; says so when a GPU has to stay idle."""
    usable = torch.cuda.is_available() and "cuda" in get_available_backends()
    if wanted == "cuda" and not usable:
        raise SystemExit("--device cuda: no GPU that dmattn has kernels for; see the README")
    if wanted == "auto" and torch.cuda.is_available() and not usable:
        print("There is a GPU, but dmattn has no kernels for it here: training on the CPU.")
    return torch.device("cuda" if usable and wanted != "cpu" else "cpu")


def choose_config(arguments: argparse.Namespace, device: torch.device) -> Config:
    config = GPU_CONFIG if device.type == "cuda" else Config()
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 40e9:
        config = replace(config, batch=2)
    given = {field.name: getattr(arguments, field.name) for field in fields(Config)}
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, write the three files, and return what metrics.json holds."""
    arguments = parse_arguments(argv)
    device = choose_device(arguments.device)
    config = choose_config(arguments, device)
    output: Path = arguments.output_dir
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)

    text = load_text()
    entropy = unigram_entropy(text.heldout)
    model = BytesLM(config).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"text       {len(text.train) / 1e6:.1f} MB in {text.train_files} files to train on, "
        f"{len(text.heldout) / 1e6:.1f} MB in {text.heldout_files} files held out\n"
        f"entropy    {entropy:.3f} bits/byte: the best loss without looking at other bytes\n"
        f"model      {size / 1e6:.2f} M parameters, {config.layers} layers; each query keeps "
        f"{config.window} of up to {config.length} bytes\n"
        f"training   {config.steps} steps of {config.batch} x {config.length} bytes "
        f"on {device_name(device)}"
    )
    history = train(model, text, config, device, progress=not arguments.no_progress)

    final = history.heldout[-1][1]
    title = f"{size / 1e6:.2g} M parameters, context {config.length}, {device_name(device)}"
    plot_loss(output / "loss_curve.png", history, config, entropy, title)
    passage = choose_passage(text.heldout, min(config.length, 2048)).to(device)
    plot_mask(output / "mask.png", model, passage, config)
    metrics = {
        "config": asdict(config),
        "device": device_name(device),
        "torch": torch.__version__,
        "parameters": size,
        "train_bytes": len(text.train),
        "heldout_bytes": len(text.heldout),
        "unigram_entropy_bits": entropy,
        "final_heldout_bits": final,
        "below_unigram_entropy": final < entropy,
        "tokens_per_second": history.tokens_per_second,
        "train_seconds": history.seconds,
        "heldout_bits": history.heldout,
        "train_bits": history.train,
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")

    prompt = passage[: min(64, config.length // 2)]
    written = continue_text(model, prompt, 120).decode("utf-8", "replace")
    print(f"\n--- it continues {bytes(prompt.tolist()).decode()!r} with:\n{written}\n---")
    print(
        f"speed      {history.tokens_per_second:,.0f} tokens/s, {history.seconds:.0f} s\n"
        f"pictures   {output / 'loss_curve.png'}, {output / 'mask.png'}\n"
        f"verdict    held-out loss {final:.3f} bits/byte, "
        f"{'below' if final < entropy else 'NOT below'} the unigram entropy of {entropy:.3f}"
    )
    return metrics


if __name__ == "__main__":
    main()
