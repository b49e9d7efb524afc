"""Launches of the kernels: allocation of results and workspaces, grids, and order of launches.

Nothing here waits for the device. Nothing of size Sq x Sk is allocated, except the gradient of a
bias that has this size.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.backends.triton.kernels import backward as backward_kernels
from dmattn.backends.triton.kernels import forward as forward_kernels
from dmattn.backends.triton.operands import (
    LIST_PER_BLOCK,
    Operands,
    arrange,
    given_rows,
    rows_of,
)
from dmattn.backends.triton.tiles import (
    Tile,
    Tiles,
    is_old_nvidia,
    padded_head_dim,
    shared_bytes_of,
    tiles_for,
)
from dmattn.key_lists import num_blocks
from dmattn.problem import (
    Gradients,
    Needs,
    Problem,
    Results,
    empty_gradients,
    empty_results,
    is_per_key,
)


def forward(problem: Problem, for_backward: bool) -> Results:
    """Results of a checked problem; lse_rest only with a bias and `for_backward`."""
    results = empty_results(problem)
    out, lse = results.out, results.lse
    rest = results.lse_rest if problem.bias is not None and for_backward else None
    if problem.q.numel() == 0 or problem.k.numel() == 0 or problem.packing is not None:
        # If cu_seqlens are wrong, there may be rows of no sequence: they get the results of rows
        # that keep nothing.
        out.zero_()
        lse.fill_(-torch.inf)
        if rest is not None:
            rest.zero_()
    if problem.q.numel() > 0 and problem.k.numel() > 0:
        operands = arrange(problem)
        tile = _tiles(operands).forward
        blocks = _blocks(operands.seqlen_q, tile.rows)
        _launch(
            forward_kernels.forward,
            operands,
            tile,
            blocks * operands.nheads * operands.batch,
            **operands.list_arguments(),
            **rows_of("out", "m", out),
            **_lse(lse),
            lse_rest=rest,
            m_blocks=blocks,
        )
    return Results(out, lse, rest)


def backward(
    problem: Problem, results: Results, dout: Tensor, dlse: Tensor | None, needs: Needs
) -> Gradients:
    """The gradients of a checked problem, each only where `needs` says so."""
    grads = empty_gradients(problem, needs)
    if problem.packing is not None or problem.q.numel() == 0 or problem.k.numel() == 0:
        for grad in grads[:4]:
            grad.zero_()  # rows and keys of no sequence keep a gradient of 0
    if problem.q.numel() == 0 or problem.k.numel() == 0:
        return grads
    operands = arrange(problem)
    rows = _given_rows(operands, results, dout, dlse)
    dbias = _BiasGradient(operands, needs.bias)
    if needs.q or dbias.by_row is not None:
        _row_gradients(operands, rows, grads.q if needs.q else None, dbias)
    if needs.k or needs.v or dbias.by_key is not None:
        _key_gradients(operands, rows, grads, needs, dbias)
    if needs.bias and problem.bias is not None:
        if dbias.by_row is None and dbias.by_key is None:
            _dense_bias_gradient(operands, rows, grads.bias)
        else:
            dbias.write(grads.bias)
    return grads


class _BiasGradient:
    """The gradient of a bias that is the same for all rows, or for all keys: sums of dlogits.

    Both sums are None if the bias has rows and keys, or its gradient is not needed.

    Attributes:
        by_row: float32 (B, H, Sq): the sum of each row; None if not needed.
        by_key: float32 (B, heads, T): the sum of each key; None if not needed.
        by_head: whether the heads of by_key are query heads, not key heads.
    """

    def __init__(self, operands: Operands, needed: bool) -> None:
        problem = operands.problem
        bias = problem.bias if needed else None
        self.by_row: Tensor | None = None
        self.by_key: Tensor | None = None
        self.by_head = False
        self.packed = problem.packing is not None
        if bias is None:
            return
        q = problem.q
        if is_per_key(bias) if self.packed else bias.shape[2] == 1:
            group, heads = operands.group, bias.shape[0 if self.packed else 1]
            own_lists = _lists_by_head(operands)
            self.by_head = group > 1 and (heads == operands.nheads or own_lists)
            shape = (
                1 if self.packed else operands.batch,
                operands.nheads if self.by_head else operands.nheads_k,
                operands.total_k,
            )
            self.by_key = torch.zeros(shape, dtype=torch.float32, device=q.device)
        elif not self.packed and bias.shape[3] == 1:
            shape = (operands.batch, operands.nheads, operands.total_q)
            self.by_row = torch.zeros(shape, dtype=torch.float32, device=q.device)

    def write(self, target: Tensor) -> None:
        """Write the gradient to `target`, which has shape and dtype of the bias.

        It is summed over the dimensions in which the bias is broadcast, and rounded once.
        """
        wide = target[None, :, None] if self.packed else target  # (B, heads, Sq, Sk)
        if self.by_key is not None:
            total = self.by_key[:, :, None]
        else:
            assert self.by_row is not None
            total = self.by_row[..., None]
        heads = wide.shape[1]
        if heads not in (1, total.shape[1]):
            total = torch.unflatten(total, 1, (heads, -1)).sum(2)
        wide.copy_(total.sum_to_size(wide.shape))


class _GivenRows(NamedTuple):
    """The keyword arguments of the backward kernels that concern rows, and lse."""

    arguments: dict[str, Any]
    lse: Tensor


def _given_rows(
    operands: Operands, results: Results, dout: Tensor, dlse: Tensor | None
) -> _GivenRows:
    problem = operands.problem
    lse, rest = results.lse.contiguous(), results.lse_rest
    # If there is no rest, the operator passes a tensor of another rank.
    rest = None if rest is None or rest.dim() != lse.dim() else rest.contiguous()
    delta = torch.zeros_like(lse)
    tile = _tiles(operands).row_gradients
    blocks = _blocks(operands.seqlen_q, tile.rows)
    packing = problem.packing
    out = results.out.contiguous()
    with _on(problem.q):
        backward_kernels.row_delta[(blocks * operands.nheads * operands.batch,)](
            **rows_of("out", "m", out),
            **given_rows("dout", dout),
            **_lse(lse),
            dlse=None if dlse is None else dlse.contiguous(),
            delta=delta,
            cu_seqlens_q=None if packing is None else packing.cu_seqlens_q.contiguous(),
            seqlen_q=operands.seqlen_q,
            total_q=operands.total_q,
            nheads=operands.nheads,
            m_blocks=blocks,
            D=problem.q.shape[-1],
            BM=tile.rows,
            BD=padded_head_dim(problem.q.shape[-1]),
            num_warps=tile.warps,
        )
    arguments = {**given_rows("dout", dout), **_lse(lse), "lse_rest": rest, "delta": delta}
    return _GivenRows(arguments, lse)


def _row_gradients(
    operands: Operands, rows: _GivenRows, dq: Tensor | None, dbias: _BiasGradient
) -> None:
    q = operands.problem.q
    tile = _tiles(operands).row_gradients
    blocks = _blocks(operands.seqlen_q, tile.rows)
    _launch(
        backward_kernels.row_gradients,
        operands,
        tile,
        blocks * operands.nheads * operands.batch,
        **operands.list_arguments(),
        **rows.arguments,
        **{**rows_of("dq", "m", q if dq is None else dq), "dq": dq},
        dbias=dbias.by_row,
        m_blocks=blocks,
    )


def _key_gradients(
    operands: Operands, rows: _GivenRows, grads: Gradients, needs: Needs, dbias: _BiasGradient
) -> None:
    """Compute dk and dv, and the sums of dlogits by key.

    With a list for every block of rows they are summed in float32: in one launch, or, if the result
    must be repeatable, in a sequence of launches in each of which no key occurs twice.
    """
    problem, lists = operands.problem, operands.lists
    tile = _tiles(operands).key_gradients
    dk, dv = (grads.k if needs.k else None), (grads.v if needs.v else None)
    entries, list_blocks = operands.seqlen_k, 1
    if lists is not None:
        # Keys that are not listed get a gradient of 0.
        dk, dv = (None if t is None else t.zero_() for t in (dk, dv))
    if lists is not None and lists.kind == LIST_PER_BLOCK:
        dk, dv = (None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in (dk, dv))
        entries = lists.keys.shape[3]
        list_blocks = num_blocks(operands.seqlen_q, True)
    together = 1 if _lists_by_head(operands) else operands.group
    if lists is not None and lists.kind == LIST_PER_BLOCK and problem.deterministic:
        order = [
            (block, 1, head, operands.group)
            for block in range(list_blocks)
            for head in range(0, operands.group, together)
        ]
    else:
        order = [(0, list_blocks, 0, together)]
    blocks = _blocks(entries, tile.keys)
    sums = dbias.by_key
    for first_list_block, some, first_head, head_step in order:
        _launch(
            backward_kernels.key_gradients,
            operands,
            tile,
            blocks * some * (operands.nheads // head_step) * operands.batch,
            **operands.list_arguments(),
            **rows.arguments,
            **{**rows_of("dk", "n", _contiguous_like(problem.k)), "dk": dk},
            dv=dv,
            dbias=sums,
            dbias_b=0 if sums is None or problem.packing is not None else sums.stride(0),
            dbias_h=0 if sums is None else sums.stride(1),
            n_blocks=blocks,
            list_blocks=some,
            first_list_block=first_list_block,
            first_head=first_head,
            head_step=head_step,
            heads_together=together,
            DBIAS_BY_HEAD=dbias.by_head,
        )
    if dk is not None and dk is not grads.k:
        grads.k.copy_(dk)
    if dv is not None and dv is not grads.v:
        grads.v.copy_(dv)


def _dense_bias_gradient(operands: Operands, rows: _GivenRows, dbias: Tensor) -> None:
    """Compute the gradient of a bias that has rows and keys."""
    problem = operands.problem
    packed = problem.packing is not None
    wide = dbias[None] if packed else dbias
    tile = _tiles(operands).bias_gradient
    m_blocks = _blocks(operands.seqlen_q, tile.rows)
    n_blocks = _blocks(operands.seqlen_k, tile.keys)
    heads = wide.shape[1]
    batch = operands.batch if packed else wide.shape[0]
    _launch(
        backward_kernels.bias_gradient,
        operands,
        tile,
        m_blocks * n_blocks * heads * batch,
        **operands.mask_arguments(),
        **rows.arguments,
        dbias=dbias,
        dbias_b=0 if packed else wide.stride(0),
        dbias_h=wide.stride(1),
        dbias_m=wide.stride(2),
        m_blocks=m_blocks,
        n_blocks=n_blocks,
        sum_heads=operands.nheads // heads,
        sum_batch=operands.batch // batch,
    )


def _lists_by_head(operands: Operands) -> bool:
    """Whether query heads that share a key head have lists of their own."""
    return operands.group > 1 and operands.list_heads == operands.nheads


def _launch(kernel: Any, operands: Operands, tile: Tile, programs: int, **arguments: Any) -> None:
    if programs == 0:
        return
    with _on(operands.problem.q):
        kernel[(programs,)](
            **{**operands.arguments(), **arguments},
            BM=tile.rows,
            BN=tile.keys,
            BD=padded_head_dim(operands.problem.q.shape[-1]),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _tiles(operands: Operands) -> Tiles:
    q = operands.problem.q
    old, shared = is_old_nvidia(q.device), shared_bytes_of(q.device)
    return tiles_for(q.dtype, q.shape[-1], old, shared, operands.has_pairs)


def _on(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device of the tensor is the current one, on which triton launches."""
    if t.device.type == "cpu":
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = torch.get_device_module(t.device).device(
        t.device
    )
    return device


def _lse(lse: Tensor) -> dict[str, Any]:
    """Keyword arguments for lse, contiguous (B, H, Sq) or packed (H, Tq).

    Its strides are those of all other tensors with a number per row.
    """
    batch = lse.stride(0) if lse.dim() == 3 else 0
    return {"lse": lse, "lse_b": batch, "lse_h": lse.stride(-2)}


def _contiguous_like(t: Tensor) -> Tensor:
    """A contiguous tensor like t on the meta device: it has strides, but no memory."""
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _blocks(length: int, size: int) -> int:
    return -(-length // size)
