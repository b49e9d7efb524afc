"""q, k, v and dout as views: transposed, spaced, misaligned, shared."""

from __future__ import annotations

import pytest
import torch

from attention.cases import LAYOUTS, Case, build
from attention.driver import assert_close, check, run
from attention.targets import target
from dmattn import flash_dmattn_func

pytestmark = pytest.mark.each_family


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "head_dim,dtype", [(8, "f16"), (64, "bf16"), (72, "f16"), (128, "bf16"), (256, "f16")]
)
@pytest.mark.parametrize("mask", ["", "bk1k", "bhqk"])
def test_layout(layout: str, head_dim: int, dtype: str, mask: str) -> None:
    check(Case(131, 140, layout=layout, head_dim=head_dim, dtype=dtype, mask=mask, causal=True))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", ["misaligned", "offset"])
def test_one_misaligned(name: str, layout: str) -> None:
    """Each operand's alignment is its own: the others keep their vector loads."""
    problem = build(Case(131, 140, head_dim=128))
    moved = LAYOUTS[layout](getattr(problem, name))
    problem = problem.with_(**{name: moved})
    assert_close(problem, run(problem))


def test_packed_projection() -> None:
    """q, k and v as slices of one (batch, seqlen, 3, heads, head_dim) projection."""
    problem = build(Case(129, 129, nheads_k=4, head_dim=64, causal=True))
    packed = torch.stack((problem.q, problem.k, problem.v), dim=2)
    q, k, v = packed.unbind(2)
    problem = problem.with_(q=q, k=k, v=v)
    assert_close(problem, run(problem))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_last_stride_not_one(name: str) -> None:
    """A head_dim that is not innermost is read in place, or refused by naming the argument."""
    problem = build(Case(70, 90))
    turned = getattr(problem, name).transpose(1, 3).contiguous().transpose(1, 3)
    turned_problem = problem.with_(**{name: turned})
    if target().any_strides:
        assert_close(turned_problem, run(turned_problem))
        return
    # Also if no backend is named: no slower backend that takes such tensors is used instead.
    public = {"q": "query", "k": "key", "v": "value"}[name]
    for options in (target().options(), {"backend": target().backend_name}):
        with pytest.raises(ValueError, match=f"{public}.*stride"):
            flash_dmattn_func(turned_problem.q, turned_problem.k, turned_problem.v, **options)


def test_any_gradient_layout() -> None:
    """The layout of dout depends on what follows attention: head_dim may not be innermost."""
    problem = build(Case(70, 90, bias="bh1k"))
    turned = problem.dout.transpose(1, 3).contiguous().transpose(1, 3)
    problem = problem.with_(dout=turned)
    assert_close(problem, run(problem))


def test_dout_expanded() -> None:
    """The gradient of a sum arrives with all strides 0."""
    problem = build(Case(70, 90, bias="bh1k"))
    dout = torch.ones((), dtype=problem.dout.dtype, device=problem.dout.device).expand(
        problem.dout.shape
    )
    problem = problem.with_(dout=dout)
    assert_close(problem, run(problem))


def test_empty_batch_and_lengths() -> None:
    for case in (
        Case(0, 5),
        Case(5, 0, dlse=True),
        Case(0, 0),
        Case(5, 7, batch=0),
        Case(3, 0, causal=True),
    ):
        check(case.with_(bias="bk1k", mask="b11k"))
        check(case)
