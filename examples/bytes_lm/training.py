"""Training: the loss, the schedule, and one run from start to end."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from bytes_lm.config import Config
from bytes_lm.device import clock, half_precision
from bytes_lm.model import BytesLM
from bytes_lm.parallel import Ranks
from bytes_lm.text import Text, even_windows, random_starts, windows_at

BITS = 1 / math.log(2)  # one nat in bits

# Ways to train the same model with the same kept keys. "window" selects the keys inside the
# attention, "dense" through a dense mask. "nudged" is "window" with the last bit of every initial
# weight changed, which shows how far rounding alone drives two runs apart.
MASK_PATHS = ("window", "dense", "nudged")


def make_model(config: Config, mask_path: str, device: torch.device) -> BytesLM:
    """The initial model of a run.

    Its weights depend on the seed alone, except that those of "nudged" differ in their last bit.
    """
    torch.manual_seed(config.seed)
    model = BytesLM(config, dense_mask=mask_path == "dense").to(device)
    if mask_path == "nudged":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.nextafter(parameter, 2 * parameter))  # zeros stay
    return model


def loss_nats(model: nn.Module, windows: Tensor, ranks: Ranks | None = None) -> Tensor:
    """Mean cross entropy, in nats per byte, of (B, S + 1) windows.

    With ranks it is that of this rank's bytes. On a GPU the arithmetic is bfloat16 by autocast;
    weights and their updates stay float32.
    """
    given, wanted = windows[:, :-1], windows[:, 1:]
    if ranks is not None:
        given, wanted = ranks.own(given), ranks.own(wanted)
    with half_precision(windows.device):
        logits = model(given, ranks=ranks)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


@torch.no_grad()
def heldout_bits(
    model: nn.Module, windows: Tensor, batch: int, ranks: Ranks | None = None
) -> float:
    """Mean loss over windows, in bits per byte."""
    model.eval()
    losses = [loss_nats(model, part, ranks) * len(part) for part in torch.split(windows, batch)]
    model.train()
    total = torch.stack(losses).sum()
    if ranks is not None:
        total = ranks.mean(total)
    return float(total) / len(windows) * BITS


@dataclass
class History:
    """What happened: losses in bits per byte, seconds of training without the evaluations."""

    train: list[float]
    heldout: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float


def differences(one: History, other: History) -> list[float]:
    """How far the training losses of two runs are apart, step by step."""
    return [abs(a - b) for a, b in zip(one.train, other.train, strict=True)]


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW. Only matrices decay, but neither the embedding nor the projection of the scores."""
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
    """Sums up the seconds between start() and stop(), both of which wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def start(self) -> None:
        self.started = clock(self.device)

    def read(self) -> float:
        """Seconds so far, while it runs."""
        return self.seconds + clock(self.device) - self.started

    def stop(self) -> None:
        self.seconds = self.read()


def train(
    model: nn.Module,
    text: Text,
    config: Config,
    device: torch.device,
    progress: bool = True,
    label: str = "",
    ranks: Ranks | None = None,
) -> History:
    """Train model in place; with ranks, each of them on its stretch of every context."""
    stream = text.train.to(device)
    checks = even_windows(text.heldout.to(device), 6 * config.batch, config.length)
    optimizer = make_optimizer(model, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, config.steps)
    )
    # Drawn for all steps at once: copying a few numbers to a GPU in each step would make the host
    # wait.
    generator = torch.Generator().manual_seed(config.seed)
    starts = random_starts(stream, (config.steps, config.batch), config.length, generator)
    check_steps = {math.ceil(config.steps * part / 40) for part in (1, 2, *range(4, 41, 4))}
    read_every = 10 if device.type == "cuda" else 1  # reading a loss makes the host wait
    losses: list[Tensor] = []
    heldout = [(0, heldout_bits(model, checks, config.batch, ranks))]
    watch = Stopwatch(device)
    bar = tqdm(starts.unbind(), label, unit="step", disable=not progress, dynamic_ncols=True)
    watch.start()
    for step, places in enumerate(bar, 1):
        loss = loss_nats(model, windows_at(stream, places, config.length), ranks)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if ranks is not None:
            ranks.average_gradients(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach() * BITS)
        if step in check_steps:
            watch.stop()
            heldout.append((step, heldout_bits(model, checks, config.batch, ranks)))
            watch.start()
        if progress and step % read_every == 0:
            speed = step * config.batch * config.length / watch.read()
            bar.set_postfix_str(
                f"train {losses[-1].item():.2f}, held-out {heldout[-1][1]:.2f} bits/byte, "
                f"{speed:,.0f} tokens/s",
                refresh=False,
            )
    watch.stop()
    tokens = config.steps * config.batch * config.length
    curve: list[float] = []
    if losses:
        found = torch.stack(losses)
        curve = (found if ranks is None else ranks.mean(found)).tolist()
    return History(curve, heldout, watch.seconds, tokens / watch.seconds)
