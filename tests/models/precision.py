"""How far a model in bfloat16 may be from the same model in float32.

The reference is eager attention in float32 with the same weights, those of bfloat16. How far
rounding leads in bfloat16 is what eager attention in bfloat16 shows: dmattn may be twice as far
from the reference as that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.targets import target_device

Outcome = dict[str, Tensor]

# Entries that a tensor needs for the size of its error not to be chance.
MANY = 1000


class Models(NamedTuple):
    """The same weights three times, on the device under test."""

    exact: Any  # eager, float32
    eager: Any  # eager, bfloat16
    ours: Any  # dmattn, bfloat16


def models(model: Any, enable: Callable[[Any], Any]) -> Models:
    """Of a model in float32, which is changed; `enable` turns dmattn on."""
    eager = model.to(target_device(), torch.bfloat16)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(eager).float()
    return Models(exact, eager, enable(copy.deepcopy(eager)))


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    device = target_device()
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}


def logits_and_gradients(model: Any, real: Tensor, **inputs: Any) -> Outcome:
    """Logits of the real tokens, and all gradients of a loss that they alone feel."""
    model.zero_grad()
    logits = model(**on_device(inputs)).logits[real.to(target_device()).bool()].float()
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    (logits * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients | {"logits": logits.detach()}


def check(made: Models, run: Callable[[Any], Outcome]) -> None:
    """Each outcome of dmattn at most twice as far from the reference as that of eager."""
    exact, eager, ours = (run(model) for model in made)
    check_outcomes(exact, eager, ours)


def check_outcomes(exact: Outcome, eager: Outcome, ours: Outcome) -> None:
    """Errors are norms over a whole tensor, relative to that of the exact one.

    That of a tensor with few entries, or one that is next to nothing beside the others (such as the
    gradient of a bias that softmax does not feel), is chance. It may be as large as that of eager
    in any tensor.
    """
    assert exact.keys() == eager.keys() == ours.keys()
    sizes = {name: _rms(t) for name, t in exact.items()}
    least = max(sizes.values()) / 1000
    allowed = {name: _rms(eager[name] - t) / max(sizes[name], least) for name, t in exact.items()}
    largest = max(allowed.values())
    wrong = []
    for name, t in exact.items():
        assert bool(ours[name].isfinite().all()), name
        error = _rms(ours[name] - t) / max(sizes[name], least)
        sure = t.numel() >= MANY and sizes[name] > least
        limit = 2 * (allowed[name] if sure else largest)
        if not error <= limit:
            wrong.append(f"{name}: error {error:.2e}, wanted at most {limit:.2e}")
    assert not wrong, "\n".join(wrong)


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())
