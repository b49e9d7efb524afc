"""Attention on NVIDIA GPUs: memory from torch, work by the kernels of dmattn_kernels.

This is the path of every training step and decoded token, so the host work per call is kept small.
"""

import torch
from torch import Tensor

from dmattn.backends import sinks
from dmattn.backends.cuda import bias_rows
from dmattn.backends.cuda.kernels import BACKWARD, FORWARD, check_device, launch, parts
from dmattn.backends.cuda.keys_written import take_asked
from dmattn.backends.cuda.outputs import finished, is_written_in_place
from dmattn.checks import HEAD_DIM_MULTIPLE
from dmattn.key_lists import Selection, without_spare_lists
from dmattn.problem import (
    NO_PACKING,
    Gradients,
    Needs,
    Packing,
    Problem,
    Results,
    empty_gradients,
)


def forward(problem: Problem, for_backward: bool = True, out: Tensor | None = None) -> Results:
    """Results of a checked problem; lse in float32, lse_rest only with a bias and `for_backward`.

    Where `out` is given, the results hold it.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    device = q.get_device()
    check_device(device)
    bias = _as_kernels_read(problem, backward=False)
    head_dim = q.shape[-1]
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v = _pad(q), _pad(k), _pad(v)
    if out is not None and not padded and is_written_in_place(out, is_decoded(problem)):
        found = out
    else:
        found = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = _empty_rows(q)
    rest = torch.empty_like(lse) if for_backward and bias is not None else None
    if k.numel() == 0:
        found = found.zero_()[..., :head_dim].contiguous() if out is None else out.zero_()
        return Results(found, lse.fill_(-torch.inf), None if rest is None else rest.zero_())
    if q.numel() > 0:
        packing = problem.packing and _contiguous(problem.packing)
        lists = _lists(problem)
        launch(
            FORWARD,
            q,
            *(device, q, k, v, mask, bias, found, lse),
            *problem.kernel_settings,
            0,  # splits: the library chooses
            lists and parts(lists),
            rest,
            *(packing or NO_PACKING),
            known_window(problem),
        )
    if padded:
        found = found[..., :head_dim]
    if out is not None:
        found = finished(out, found)
    elif padded:
        found = found.contiguous()
    return Results(found, lse, rest)


def is_decoded(problem: Problem) -> bool:
    """Whether there is a single row for each batch and head, which has kernels of its own."""
    return problem.packing is None and problem.q.shape[1] == 1


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem, each only where `needs` says so.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    device = q.get_device()
    check_device(device)
    if q.numel() == 0 or k.numel() == 0:
        grads = empty_gradients(problem, needs)
        for grad in grads[:4]:
            grad.zero_()
        return grads
    bias = _as_kernels_read(problem, backward=True)
    dbias_of_rows = None
    if needs.bias and _takes_dlse_for_dbias(problem):
        dbias_of_rows = sinks.bias_gradient_of_rows(problem, results, dout, dlse)
        needs = needs._replace(bias=False)
    # As forward made them, unless a compiler moved them.
    out, lse = results.out.contiguous(), results.lse.contiguous()
    rest = results.lse_rest
    rest = None if rest is None or rest.dim() != lse.dim() else rest.contiguous()
    head_dim = q.shape[-1]
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v, out, dout = _pad(q), _pad(k), _pad(v), _pad(out), _pad(dout)
        problem = problem._replace(q=q, k=k, v=v)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()  # such as the expanded gradient of a sum
    dlse = None if dlse is None else dlse.contiguous()
    lists, asked = _lists(problem), take_asked()
    # Who asked when gradients are written would not know of the copy behind the kernels.
    has_room = needs.bias and asked is None and bias_rows.pads_gradient(problem)
    of_its_own = needs._replace(bias=needs.bias and not has_room)
    dq, dk, dv, dbias, _ = empty_gradients(problem, of_its_own)
    if has_room and bias is not None:
        dbias = bias_rows.empty_gradient(bias)
    packing = problem.packing and _contiguous(problem.packing)
    launch(
        BACKWARD,
        q,
        *(device, q, k, v, mask, bias, out, lse, dout, dlse),
        dq if needs.q else None,
        dk if needs.k else None,
        dv if needs.v else None,
        dbias if needs.bias and bias is not None else None,
        *problem.kernel_settings,
        problem.deterministic,
        lists and parts(lists),
        rest,
        *(packing or NO_PACKING),
        known_window(problem),
        0 if asked is None else asked.event.cuda_event,
    )
    if has_room:
        dbias = dbias.contiguous()
    if asked is not None:
        asked.written(dk, dv, dbias)
    if padded:
        dq, dk, dv = (
            g[..., :head_dim].contiguous() if need else g
            for g, need in zip((dq, dk, dv), needs, strict=False)
        )
    return Gradients(dq, dk, dv, dbias if dbias_of_rows is None else dbias_of_rows)


def _takes_dlse_for_dbias(problem: Problem) -> bool:
    """Whether the kernels would take dlse for the gradient of the bias, in spite of sinks."""
    bias = problem.bias
    return (
        problem.sinks is not None
        and problem.packing is None
        and bias is not None
        and bias.shape[-1] == 1
    )


def _as_kernels_read(problem: Problem, backward: bool) -> Tensor | None:
    bias = problem.bias
    if bias is None or not bias_rows.copies(problem, backward):
        return bias
    return bias_rows.with_aligned_rows(bias)


def _empty_rows(q: Tensor) -> Tensor:
    """Uninitialised lse. With strides, as torch has less to do then."""
    if q.dim() == 4:
        batch, rows, nheads, _ = q.shape
        shape, stride = (batch, nheads, rows), (nheads * rows, rows, 1)
        return q.new_empty_strided(shape, stride, dtype=torch.float32)
    rows, nheads, _ = q.shape
    return q.new_empty_strided((nheads, rows), (rows, 1), dtype=torch.float32)


def _lists(problem: Problem) -> Selection | None:
    """Keep the result referenced until after the launch, or its memory may become the workspace."""
    if problem.key_lists is None:
        return None
    return without_spare_lists(problem.key_lists, problem.q.shape[1], problem.is_causal)


def known_window(problem: Problem) -> int:
    """What is known of the key lists, for kernels that need not read them then; 0 for nothing."""
    return min(problem.sliding, problem.k.shape[1])


def _contiguous(packing: Packing) -> Packing:
    """Keep the result referenced until after the launch, or its memory may become the workspace."""
    cu_seqlens_q, cu_seqlens_k, *longest = packing
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *longest)


def _pad(t: Tensor) -> Tensor:
    """A contiguous copy with zeros up to the next multiple of 8 along head_dim."""
    head_dim = t.shape[-1]
    padded = t.new_zeros((*t.shape[:-1], head_dim + -head_dim % HEAD_DIM_MULTIPLE))
    padded[..., :head_dim] = t
    return padded
