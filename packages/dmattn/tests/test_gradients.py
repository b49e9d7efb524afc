"""Which gradients are computed, when, and at what cost, on the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_cases import Case, random_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import flash_dmattn_func
from dmattn.backends.cpu import attention as cpu
from dmattn.backends.cpu import key_blocks
from dmattn.problem import Needs, Problem


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that run, and the largest tensor that any of them makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), args))
        if not func.is_view:
            made = result if isinstance(result, (tuple, list)) else (result,)
            sizes = [t.numel() for t in made if isinstance(t, Tensor)]
            self.largest = max([self.largest, *sizes])
        return result


def needs_of(watch: Watch) -> Sequence[bool]:
    (args,) = [args for name, args in watch.calls if name == "dmattn::bwd"]
    needs = args[5]
    assert isinstance(needs, (list, tuple))
    return list(needs)


@pytest.mark.parametrize(
    "wanted", [(0,), (1,), (2,), (3,), (4,), (0, 1, 2), (0, 2, 4), (1, 3), (0, 1, 2, 3, 4)]
)
@pytest.mark.parametrize("bias_shape", [(2, 4, 9, 11), (1, 2, 1, 11)])
def test_each_gradient_only_when_asked_for(
    wanted: tuple[int, ...], bias_shape: tuple[int, ...]
) -> None:
    """For several subsets of operands: their gradients are right, and no others are computed."""
    case = random_case(bias_shape=bias_shape, mask_shape=(2, 1, 1, 11), softcap=2.0)
    case.options["sinks"] = torch.randn(4, dtype=torch.float64)
    oracle = case.reference()
    expected = (oracle.dq, oracle.dk, oracle.dv, oracle.dbias, oracle.dsinks)
    given = [case.query, case.key, case.value, case.attn_bias, case.options["sinks"]]
    leaves = [
        t if t is None else t.clone().requires_grad_(i in wanted) for i, t in enumerate(given)
    ]
    q, k, v, bias, sinks = leaves
    assert q is not None and k is not None and v is not None
    out, lse = flash_dmattn_func(
        q, k, v, case.attn_mask, bias, softcap=2.0, return_lse=True, sinks=sinks
    )
    with Watch() as watch:
        torch.autograd.backward((out, lse), (case.dout, case.dlse))
    assert needs_of(watch) == [i in wanted for i in range(5)]
    for i, leaf in enumerate(leaves):
        assert leaf is not None
        assert (leaf.grad is not None) == (i in wanted)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, expected[i], rtol=0, atol=1e-13)


def test_unneeded_gradients_are_empty() -> None:
    case = random_case(bias_shape=(2, 4, 9, 11))
    problem = Problem(*case.inputs)
    grads = cpu.backward(problem, cpu.forward(problem), case.dout, None, Needs(*[False] * 4))
    assert [tuple(g.shape) for g in grads[:4]] == [(0,)] * 4


def test_gradcheck() -> None:
    case = random_case(1, 3, 4, 2, 1, 2, mask_shape=(1, 2, 3, 4), bias_shape=(1, 1, 3, 4))
    leaves = case.requiring_grad()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_dmattn_func(q, k, v, case.attn_mask, bias, softcap=2.0, return_lse=True)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    inputs: Any = (leaves.query, leaves.key, leaves.value, leaves.attn_bias)
    assert torch.autograd.gradcheck(attend, inputs)


def test_second_derivatives_are_refused() -> None:
    leaves = random_case().requiring_grad()
    out = flash_dmattn_func(*leaves.inputs)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves.query, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(dq.sum(), leaves.query)


def long_case(seqlen: int) -> Case:
    return random_case(1, seqlen, seqlen, 2, 1, 8, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["none", "key mask", "key bias", "causal"])
def test_memory_is_linear_in_the_lengths(kind: str) -> None:
    seqlen = 3000
    case = long_case(seqlen)
    if kind == "key mask":
        case.attn_mask = torch.rand(1, 2, 1, seqlen) < 0.9
    if kind == "key bias":
        case.attn_bias = torch.randn(1, 1, 1, seqlen)
    problem = Problem(*case.inputs, is_causal=kind == "causal")
    with Watch() as watch:
        cpu.backward(problem, cpu.forward(problem), case.dout, case.dlse, Needs(*[True] * 4))
    assert watch.largest <= key_blocks._BLOCK_ELEMENTS < seqlen * seqlen / 4


def test_dropped_keys_cost_nothing() -> None:
    """A key-only mask shortens the matrix products to the keys that some row of the head keeps."""
    case = long_case(1000)
    case.attn_mask = torch.zeros(1, 1, 1, 1000, dtype=torch.bool)
    case.attn_mask[..., ::50] = True
    problem = Problem(*case.inputs, is_causal=True)
    with Watch() as watch:
        cpu.backward(problem, cpu.forward(problem), case.dout, None, Needs(*[True] * 4))
    assert watch.largest == 2 * 1000 * 20
