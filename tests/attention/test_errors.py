"""Bad input: refused before anything is launched, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build
from attention.driver import run
from attention.targets import on_cuda, synchronize, target, target_device


def _tensors() -> dict[str, Any]:
    problem = build(Case(16, 24, 2, 4, 2, 64, mask="bhqk", bias="bhqk"))
    assert problem.mask is not None and problem.bias is not None
    return {
        "query": problem.q,
        "key": problem.k,
        "value": problem.v,
        "attn_mask": problem.mask,
        "attn_bias": problem.bias,
    }


# What is wrong; the argument that is changed, which the message must name (or, for query, key and
# value, another one of them); the change; the exception.
BAD: list[tuple[str, str, Callable[[Tensor], object], type[Exception]]] = [
    ("rank 3", "query", lambda x: x[0], ValueError),
    ("rank 5", "key", lambda x: x[None], ValueError),
    ("float32", "query", lambda x: x.float(), TypeError),
    ("integers", "value", lambda x: x.int(), TypeError),
    ("another dtype", "key", lambda x: x.half(), TypeError),
    ("another head_dim", "key", lambda x: x[..., :32], ValueError),
    ("another seqlen", "value", lambda x: x[:, :-1], ValueError),
    ("another batch", "key", lambda x: x[:1], ValueError),
    ("heads that do not divide", "key", lambda x: x[:, :, :1].expand(-1, -1, 3, -1), ValueError),
    ("mask of bytes", "attn_mask", lambda x: x.to(torch.uint8), TypeError),
    ("mask of floats", "attn_mask", lambda x: x.float(), TypeError),
    ("mask too long", "attn_mask", lambda x: torch.cat((x, x), dim=3), ValueError),
    ("mask heads", "attn_mask", lambda x: x[:, :3], ValueError),
    ("bias of bools", "attn_bias", lambda x: x > 0, TypeError),
    ("bias of float64", "attn_bias", lambda x: x.double(), TypeError),
    ("bias of the other half", "attn_bias", lambda x: x.half(), TypeError),
    ("bias rows", "attn_bias", lambda x: x[:, :, :5], ValueError),
    ("bias rank", "attn_bias", lambda x: x[0], ValueError),
    ("not a tensor", "query", lambda x: x.tolist(), TypeError),
]
if on_cuda():
    BAD += [
        ("on the processor", "key", lambda x: x.cpu(), (ValueError, RuntimeError)),  # type: ignore[list-item]
        ("mask on the processor", "attn_mask", lambda x: x.cpu(), (ValueError, RuntimeError)),  # type: ignore[list-item]
    ]


@pytest.mark.parametrize("what,name,spoil,error", BAD, ids=[f"{b[1]}: {b[0]}" for b in BAD])
def test_bad_tensor(
    what: str, name: str, spoil: Callable[[Tensor], object], error: type[Exception]
) -> None:
    tensors: dict[str, Any] = dict(_tensors())
    value = tensors[name]
    assert isinstance(value, Tensor)
    tensors[name] = spoil(value)
    with pytest.raises(error) as caught:
        dmattn.flash_dmattn_func(**tensors, **target().options())
    message = str(caught.value)
    family = {
        "query": ("query", "key", "value"),
        "key": ("key", "value"),
        "value": ("value", "key"),
    }
    assert any(word in message for word in family.get(name, (name,))), message
    synchronize()


@pytest.mark.cuda
def test_head_dim_too_large() -> None:
    q = torch.zeros(1, 4, 2, 264, dtype=torch.bfloat16, device=target_device())
    with pytest.raises((ValueError, RuntimeError), match="264"):
        dmattn.flash_dmattn_func(q, q, q)


@pytest.mark.parametrize(
    "argument,value",
    [
        ("softmax_scale", float("nan")),
        ("softmax_scale", "big"),
        ("softcap", float("inf")),
    ],
)
def test_bad_number(argument: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=argument):
        dmattn.flash_dmattn_func(**{**_tensors(), argument: value}, **target().options())


def test_good_call_after_bad_ones() -> None:
    problem = build(Case(40, 50))
    with pytest.raises(ValueError, match="query"):
        dmattn.flash_dmattn_func(problem.q[0], problem.k, problem.v)
    assert bool(run(problem).out.isfinite().all())
