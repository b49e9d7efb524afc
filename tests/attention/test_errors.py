"""Bad input on CUDA tensors: refused before any launch, with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from attention.cases import Case, build
from attention.targets import target_device
from attention.driver import run

pytestmark = pytest.mark.cuda


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


# what is wrong, which argument the message must name, which exception
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
    ("on the processor", "key", lambda x: x.cpu(), (ValueError, RuntimeError)),  # type: ignore[list-item]
    ("mask of bytes", "attn_mask", lambda x: x.to(torch.uint8), TypeError),
    ("mask of floats", "attn_mask", lambda x: x.float(), TypeError),
    ("mask too long", "attn_mask", lambda x: torch.cat((x, x), dim=3), ValueError),
    ("mask heads", "attn_mask", lambda x: x[:, :3], ValueError),
    ("mask on the processor", "attn_mask", lambda x: x.cpu(), (ValueError, RuntimeError)),  # type: ignore[list-item]
    ("bias of bools", "attn_bias", lambda x: x > 0, TypeError),
    ("bias of float64", "attn_bias", lambda x: x.double(), TypeError),
    ("bias of the other half", "attn_bias", lambda x: x.half(), TypeError),
    ("bias rows", "attn_bias", lambda x: x[:, :, :5], ValueError),
    ("bias rank", "attn_bias", lambda x: x[0], ValueError),
    ("not a tensor", "query", lambda x: x.tolist(), TypeError),
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
        dmattn.flash_dmattn_func(**tensors)
    message = str(caught.value)
    family = {
        "query": ("query", "key", "value"),
        "key": ("key", "value"),
        "value": ("value", "key"),
    }
    assert any(word in message for word in family.get(name, (name,))), message
    torch.cuda.synchronize()


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
        dmattn.flash_dmattn_func(**{**_tensors(), argument: value})


def test_small_workspace_is_refused() -> None:
    """Through the C interface's own binding: too few bytes raise and launch nothing."""
    core = pytest.importorskip("dmattn_kernels")._core
    problem = build(Case(64, 512, bias="bk1k", mask="bk1k"))
    out = torch.full_like(problem.q, 7.0)
    lse = torch.full((2, 4, 64), 7.0, device=out.device)

    def view(x: Tensor | None) -> object:
        codes = {torch.bfloat16: core.BFLOAT16, torch.float32: core.FLOAT32, torch.bool: core.BOOL}
        return None if x is None else (x.data_ptr(), codes[x.dtype], x.shape, x.stride())

    tensors = (problem.q, problem.k, problem.v, problem.mask, problem.bias, out, lse)
    params = core.FwdParams(0, *map(view, tensors), 0.125, 0.0, False)
    size = params.workspace_size()
    assert size > 0
    scratch = torch.empty(size, dtype=torch.uint8, device=out.device)
    with pytest.raises(ValueError, match="workspace"):
        params.launch(scratch.data_ptr(), size - 1, 0)
    torch.cuda.synchronize()
    assert bool((out == 7).all()) and bool((lse == 7).all())


def test_good_call_after_bad_ones() -> None:
    problem = build(Case(40, 50))
    with pytest.raises(ValueError, match="query"):
        dmattn.flash_dmattn_func(problem.q[0], problem.k, problem.v)
    assert bool(run(problem).out.isfinite().all())
