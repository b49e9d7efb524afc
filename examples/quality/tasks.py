"""What is learned: the next byte of Python sources, and associative recall over a distance."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bytes_lm.config import Config
from bytes_lm.device import half_precision
from bytes_lm.model import BytesLM
from bytes_lm.text import Text, even_windows, load_text, random_starts, unigram_entropy, windows_at

BITS = 1 / math.log(2)  # one nat in bits
NO_TARGET = -100  # cross_entropy leaves these out


class Batch(NamedTuple):
    """tokens: (B, S) int64. targets: (B, S) int64, what to predict at each token, or NO_TARGET."""

    tokens: Tensor
    targets: Tensor


class Task(Protocol):
    """One thing to learn: where its batches come from, and how well a model does it."""

    def batch(self, step: int) -> Batch: ...

    def evaluate(self, model: BytesLM) -> dict[str, Any]: ...


def loss_nats(model: BytesLM, batch: Batch) -> Tensor:
    """Mean cross entropy where there is a target."""
    logits = logits_of(model, batch.tokens)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=NO_TARGET)


def logits_of(model: BytesLM, tokens: Tensor) -> Tensor:
    with half_precision(tokens.device):
        logits: Tensor = model(tokens)
    return logits.float()


# -------------------------------------------------------------------------------------- text


@functools.cache
def _corpus() -> Text:
    return load_text()


class TextTask:
    """The next byte of the standard library's sources; held-out files to evaluate on."""

    def __init__(self, config: Config, device: torch.device, evaluated: int) -> None:
        text = _corpus()
        self.config = config
        self.stream = text.train.to(device)
        self.checks = even_windows(text.heldout.to(device), evaluated, config.length)
        self.entropy = unigram_entropy(text.heldout)
        generator = torch.Generator().manual_seed(config.seed)
        shape = (max(1, config.steps), config.batch)
        self.starts = random_starts(self.stream, shape, config.length, generator)

    def batch(self, step: int) -> Batch:
        windows = windows_at(self.stream, self.starts[step % len(self.starts)], self.config.length)
        return Batch(windows[:, :-1], windows[:, 1:])

    @torch.no_grad()
    def evaluate(self, model: BytesLM) -> dict[str, Any]:
        """Held-out loss in bits per byte, over all and by the place in the context."""
        losses = []
        for windows in torch.split(self.checks, self.config.batch):
            logits = logits_of(model, windows[:, :-1])
            losses.append(F.cross_entropy(logits.mT, windows[:, 1:], reduction="none"))
        by_place = torch.cat(losses).double().mean(0) * BITS
        places = by_place.tensor_split(min(8, len(by_place)))
        return {"loss": by_place.mean().item(), "by_place": [p.mean().item() for p in places]}


# ------------------------------------------------------------------------------------ recall


@dataclass(frozen=True)
class RecallConfig:
    """Multi-query associative recall: pairs of a key and a value first, then questions.

    All other tokens of a sequence are noise. The 256 tokens of the model are shared out: first
    those of keys, then those of values, then those of noise. In training the number of pairs
    differs from sequence to sequence: with few pairs a model learns sooner to tell them apart. With
    `joined` a pair is one token, so that the model need not connect a value with the key before it.
    Questions and answers have tokens of their own then.
    """

    pairs: int = 4
    fewest_pairs: int = 2
    questions: int = 128
    keys: int = 16
    values: int = 16
    joined: bool = False
    nearest: int = 0  # so many tokens behind the pairs are without questions


class Recall(NamedTuple):
    """A batch of recall. distance: (B, S), at a question the tokens back to what it asks for.

    That is the value, or the pair if it is joined. At all other tokens distance is 0.
    """

    batch: Batch
    distance: Tensor


def draw_recall(
    recall: RecallConfig, batch: int, length: int, generator: torch.Generator
) -> Recall:
    """Draw sequences, on the generator's device."""
    device = generator.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    keys = uniform(batch, recall.keys).argsort(1)[:, : recall.pairs]  # no key twice
    values = integers(recall.values, batch, recall.pairs)
    if recall.joined:
        told = keys * recall.values + values
        question = recall.keys * recall.values + keys
        answer = recall.keys * (recall.values + 1) + values
        noise = recall.keys * (recall.values + 1) + recall.values
    else:
        question, answer = keys, recall.keys + values
        told = torch.stack((question, answer), -1).flatten(1)
        noise = recall.keys + recall.values
    head, size = told.shape[1], told.shape[1] // recall.pairs
    tokens = noise + integers(256 - noise, batch, length)
    # As many pairs as this sequence has, then noise in the place of the others.
    count = recall.fewest_pairs + integers(1 + recall.pairs - recall.fewest_pairs, batch, 1)
    is_told = torch.arange(head, device=device) // size < count
    tokens[:, :head] = torch.where(is_told, told, tokens[:, :head])
    first = head + recall.nearest
    place = first + uniform(batch, length - first).argsort(1)[:, : recall.questions]
    asked = (uniform(batch, recall.questions) * count).long()
    tokens.scatter_(1, place, question.gather(1, asked))
    targets = torch.full_like(tokens, NO_TARGET).scatter_(1, place, answer.gather(1, asked))
    distance = torch.zeros_like(tokens).scatter_(1, place, place - (size * (asked + 1) - 1))
    return Recall(Batch(tokens, targets), distance)


class RecallTask:
    """Recall with questions at all distances, evaluated by distance."""

    def __init__(
        self, config: Config, recall: RecallConfig, device: torch.device, evaluated: int
    ) -> None:
        self.config, self.recall = config, recall
        self.generator = torch.Generator(device).manual_seed(config.seed)
        # The same questions for all seeds, about all pairs and at all distances, whatever training
        # leaves out.
        fixed = torch.Generator(device).manual_seed(2**31)
        everywhere = replace(recall, nearest=0, fewest_pairs=recall.pairs)
        parts = max(1, evaluated // config.batch)
        self.checks = [
            draw_recall(everywhere, config.batch, config.length, fixed) for _ in range(parts)
        ]

    def batch(self, step: int) -> Batch:
        return draw_recall(self.recall, self.config.batch, self.config.length, self.generator).batch

    @torch.no_grad()
    def evaluate(self, model: BytesLM) -> dict[str, Any]:
        """Loss in bits per answer, and the share of right ones, over all and by distance.

        A distance bin is half a window wide.
        """
        width = max(1, self.config.window // 2)
        bins = -(-self.config.length // width)
        asked, right = torch.zeros(2, bins, dtype=torch.float64)
        loss = 0.0
        for (tokens, targets), distance in self.checks:
            logits = logits_of(model, tokens)
            here = targets != NO_TARGET
            loss += float(F.cross_entropy(logits[here], targets[here])) * BITS
            hit = (logits[here].argmax(-1) == targets[here]).double().cpu()
            at = (distance[here] // width).cpu()
            asked += torch.bincount(at, minlength=bins)
            right += torch.bincount(at, weights=hit, minlength=bins)
        return {
            "loss": loss / len(self.checks),
            "recall": float(right.sum() / asked.sum()),
            "bin_width": width,
            "asked": asked.tolist(),
            "recall_by_distance": (right / asked.clamp(min=1)).tolist(),
        }
