"""Tiny Doge models with random weights, and texts in which no two scores are alike."""

from typing import Any

import torch
from hf_models import EPSILON, relative_error, with_rounded_weights
from torch import Tensor
from transformers import DogeConfig, DogeForCausalLM

from dmattn.integrations.transformers import enable_doge

VOCABULARY = 257
WINDOW = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def make_doge(window: int = WINDOW, layers: int = 2, **settings: Any) -> Any:
    """A model with eager attention for training, float32, whose scores differ between keys."""
    torch.manual_seed(11)
    sizes = {"keep_window_size": window, "num_hidden_layers": layers}
    model = DogeForCausalLM(DogeConfig(**_SIZES | sizes | settings)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
            elif name.endswith(".A"):
                parameter.uniform_(0.5, 1.5)
    model.set_attn_implementation("eager")
    return model


def with_equal_scores(model: Any) -> Any:
    """A = 0, as at the start of training: every score is 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):
                parameter.zero_()
    return model


def tokens(batch: int = 2, length: int = 50) -> Tensor:
    """Texts in which no token occurs twice. In the first layer two occurrences of a token would
    have the same score up to rounding, so that rounding would decide which of them is kept."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(VOCABULARY - 1, generator=generator)[:length] for _ in range(batch)]
    return torch.stack(rows) + 1


def left_padding(ids: Tensor, *lengths: int) -> Tensor:
    place = torch.arange(ids.shape[1])
    return (place >= torch.tensor(lengths)[:, None]).long()


def outcome(
    model: Any, ids: Tensor, real: Tensor | None = None, **inputs: Any
) -> dict[str, Tensor]:
    """Logits of real tokens and the gradients of all parameters, by name."""
    model.zero_grad()
    labels = ids
    if real is not None:
        # Predictions made at padding mean nothing, including the one of the first real token.
        before = torch.nn.functional.pad(real[:, :-1], (1, 0))
        labels = ids.masked_fill((real & before) == 0, -100)
    found = model(ids, labels=labels, **inputs)
    found.loss.backward()
    logits = found.logits.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None for g in gradients.values())
    return gradients | {"logits": logits if real is None else logits[real == 1]}


def check_parity(model: Any, ids: Tensor, real: Tensor | None = None, **inputs: Any) -> None:
    """Assert that dmattn differs from eager by at most three times the rounding noise of eager.

    The noise is how far eager is from itself when the weights are perturbed by a rounding, the
    maximum of four such perturbations: the gradient of `A` consists of a few sums in which nearly
    everything cancels, so it is a matter of chance how much rounding error remains in them.
    """
    eager = outcome(model, ids, real, **inputs)
    twins = [outcome(with_rounded_weights(model), ids, real, **inputs) for _ in range(4)]
    noise = max(relative_error(twin, eager) for twin in twins)
    ours = outcome(enable_doge(model), ids, real, **inputs)
    assert relative_error(ours, eager) <= 3 * noise + 4 * EPSILON


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of sums: logits of size 1 result from about a hundred roundings."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) <= 16 * EPSILON * max(1.0, float(b.abs().max()))
