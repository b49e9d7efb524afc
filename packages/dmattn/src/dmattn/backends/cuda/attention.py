"""Attention on NVIDIA GPUs: torch allocates the memory, the kernels of dmattn_kernels compute.

Training steps and decoded tokens go through this module, so it is written for little host time per
call.
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
    """The results of a checked problem, with lse in float32.

    lse_rest is only computed for a problem with a bias, if `for_backward`. If `out` is given, the
    output is written there, and `out` is part of the results.

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
    """Whether there is a single row for each batch entry and head: decoding has its own kernels."""
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
    # Contiguous, as forward made them, unless a compiler has changed the strides.
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
    # Not if an event was asked for: it would be recorded before the padded gradient is copied.
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
    """Whether the kernels would compute the bias gradient from dlse, which is wrong with sinks."""
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
    """Uninitialised lse; allocated with explicit strides, which takes torch less time."""
    if q.dim() == 4:
        batch, rows, nheads, _ = q.shape
        shape, stride = (batch, nheads, rows), (nheads * rows, rows, 1)
        return q.new_empty_strided(shape, stride, dtype=torch.float32)
    rows, nheads, _ = q.shape
    return q.new_empty_strided((nheads, rows), (rows, 1), dtype=torch.float32)


def _lists(problem: Problem) -> Selection | None:
    """The key lists of a problem without spare ones.

    The caller has to keep the result referenced until after the launch, or its memory may be given
    to the workspace.
    """
    if problem.key_lists is None:
        return None
    return without_spare_lists(problem.key_lists, problem.q.shape[1], problem.is_causal)


def known_window(problem: Problem) -> int:
    """The window of a known sliding window, whose key lists kernels need not read; else 0."""
    return min(problem.sliding, problem.k.shape[1])


def _contiguous(packing: Packing) -> Packing:
    """The packing with contiguous boundaries.

    The caller has to keep the result referenced until after the launch, or its memory may be given
    to the workspace.
    """
    cu_seqlens_q, cu_seqlens_k, *longest = packing
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), *longest)


def _pad(t: Tensor) -> Tensor:
    """A contiguous copy with zeros appended up to the next multiple of 8 along head_dim."""
    head_dim = t.shape[-1]
    padded = t.new_zeros((*t.shape[:-1], head_dim + -head_dim % HEAD_DIM_MULTIPLE))
    padded[..., :head_dim] = t
    return padded
