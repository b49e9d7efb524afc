"""One training run, and one timing, each as a plain function that other processes can call."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bytes_lm.config import Config
from bytes_lm.device import clock
from bytes_lm.training import learning_rate_factor, make_optimizer
from quality.attentions import TOP, cache_bytes, make_model
from quality.tasks import BITS, RecallConfig, RecallTask, Task, TextTask, loss_nats


@dataclass(frozen=True)
class Run:
    """What to train: a task, an attention, and the configuration with its seed."""

    task: str
    attention: str
    config: Config
    recall: RecallConfig | None = field(default=None)  # None: text
    evaluated: int = 256  # sequences, none of them trained on
    evaluations: int = 12

    @property
    def name(self) -> str:
        return f"{self.task}, {self.attention}, seed {self.config.seed}"


def make_task(run: Run, device: torch.device) -> Task:
    if run.recall is None:
        return TextTask(run.config, device, run.evaluated)
    return RecallTask(run.config, run.recall, device, run.evaluated)


class Trainer:
    """A model, its optimizer and its task."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.config = run.config
        self.task = make_task(run, device)
        self.model = make_model(run.attention, run.config, device)
        self.optimizer = make_optimizer(self.model, run.config)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, run.config.steps)
        )

    def step(self, number: int) -> Tensor:
        """The loss before the step, in bits."""
        loss = loss_nats(self.model, self.task.batch(number))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach() * BITS


def train(run: Run, device_type: str, deadline: float | None, progress: bool) -> dict[str, Any]:
    """Train, and return what the results say about the run.

    deadline: the time.time() at which training stops, even if it is not complete; "complete" in the
    result says whether it is.
    """
    device = torch.device(device_type)
    trainer = Trainer(run, device)
    steps = run.config.steps
    check_steps = {max(1, steps * part // run.evaluations) for part in range(1, run.evaluations)}
    losses: list[Tensor] = []
    curve = [point(0, trainer.task.evaluate(trainer.model))]
    start = time.perf_counter()
    bar = tqdm(range(steps), run.name, unit="step", disable=not progress, dynamic_ncols=True)
    for step in bar:
        if deadline is not None and time.time() > deadline:
            break
        losses.append(trainer.step(step))
        if len(losses) in check_steps:
            curve.append(point(len(losses), trainer.task.evaluate(trainer.model)))
            bar.set_postfix_str(f"held-out {curve[-1]['loss']:.2f} bits", refresh=False)
    final = trainer.task.evaluate(trainer.model)
    curve.append(point(len(losses), final))
    done = len(losses)
    return {
        "task": run.task,
        "attention": run.attention,
        "seed": run.config.seed,
        "complete": done == steps,
        "steps": done,
        "seconds": time.perf_counter() - start,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "final": final,
        "curve": curve,
        "train_loss": thinned(losses),
        "mean_age": mean_ages(run, trainer),
    }


def point(step: int, found: dict[str, Any]) -> dict[str, Any]:
    """One point of the curve: the overall numbers, without those by distance or by place."""
    return {"step": step} | {name: found[name] for name in ("loss", "recall") if name in found}


def thinned(losses: list[Tensor], most: int = 200) -> list[list[float]]:
    """[last step, mean loss] of at most `most` stretches of steps."""
    if not losses:
        return []
    values = torch.stack(losses).double().cpu()
    parts = values.tensor_split(min(most, len(values)))
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return [[end, part.mean().item()] for end, part in zip(ends, parts, strict=True)]


@torch.no_grad()
def mean_ages(run: Run, trainer: Trainer) -> list[list[float]] | None:
    """How far back the kept keys of the last query lie on average, by layer and score head.

    A sliding window of w keys gives (w - 1) / 2. None for attentions without scores.
    """
    if run.attention != TOP:
        return None
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args: seen.append(m.key_scores(args[0])))
        for layer in trainer.model.attention_layers()
    ]
    batch = trainer.task.batch(0)
    loss_nats(trainer.model, batch)
    for hook in hooks:
        hook.remove()
    window = run.config.window
    # Of equal scores the later key stays: a stable sort of the reversed scores has it first.
    ages = (s.flip(-1).sort(dim=-1, descending=True, stable=True).indices for s in seen)
    return [age[..., :window].double().mean((0, 2)).tolist() for age in ages]


def time_steps(run: Run, device_type: str, steps: int = 20, warmup: int = 5) -> dict[str, Any]:
    """The time of a training step with nothing else on the device, and the size of the cache."""
    device = torch.device(device_type)
    trainer = Trainer(run, device)
    for step in range(warmup):
        trainer.step(step)
    times = []
    for step in range(steps):
        start = clock(device)
        trainer.step(warmup + step)
        times.append(clock(device) - start)
    times.sort()
    return {
        "task": run.task,
        "attention": run.attention,
        "step_ms": 1e3 * times[len(times) // 2],
        "step_ms_quartiles": [1e3 * times[len(times) // 4], 1e3 * times[3 * len(times) // 4]],
        "cache_bytes": cache_bytes(run.attention, run.config, run.config.length),
        "config": asdict(run.config),
    }
