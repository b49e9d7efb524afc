"""How far a model in bfloat16 may be from the same model in float32.

The reference is eager attention in float32 with the same weights, rounded to bfloat16. Eager
attention in bfloat16 shows the effect of rounding: dmattn may be twice as far from the reference as
that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.targets import target_device

Outcome = dict[str, Tensor]

# With fewer entries than this, the size of a tensor's error is a matter of chance.
MANY = 1000


class Models(NamedTuple):
    """The same weights three times, on the device under test."""

    exact: Any  # eager, float32
    eager: Any  # eager, bfloat16
    ours: Any  # dmattn, bfloat16


def models(model: Any, enable: Callable[[Any], Any]) -> Models:
    """Made from a float32 model, which is changed; `enable` turns dmattn on."""
    eager = model.to(target_device(), torch.bfloat16)
    eager.set_attn_implementation("eager")
    exact = copy.deepcopy(eager).float()
    return Models(exact, eager, enable(copy.deepcopy(eager)))


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    device = target_device()
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in inputs.items()}


def logits_and_gradients(model: Any, real: Tensor, **inputs: Any) -> Outcome:
    """Logits of the real tokens, and all gradients of a loss that depends on these alone."""
    model.zero_grad()
    logits = model(**on_device(inputs)).logits[real.to(target_device()).bool()].float()
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    (logits * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients | {"logits": logits.detach()}


def check(made: Models, run: Callable[[Any], Outcome]) -> None:
    """Assert that each outcome of dmattn is at most twice as far from the reference as eager's."""
    exact, eager, ours = (run(model) for model in made)
    check_outcomes(exact, eager, ours)


def check_outcomes(exact: Outcome, eager: Outcome, ours: Outcome) -> None:
    """Errors are norms over a whole tensor, relative to that of the exact one.

    For a tensor with few entries, or one that is tiny compared with the others (such as the
    gradient of a bias that cancels in the softmax), the error is a matter of chance. Its limit is
    taken from the largest error that eager has in any tensor.
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
