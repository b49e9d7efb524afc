"""Attention on NVIDIA GPUs: memory from torch, work by the kernels of dmattn_kernels.

This is the path of every training step and decoded token, so the host work per call is kept small.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn.ops.lists import KeyLists, Selection
from dmattn.ops.shapes import (
    HEAD_DIM_MULTIPLE,
    check_backward_inputs,
    check_inputs,
    check_selected_bias,
    check_selection,
    empty_backward_outputs,
    lse_shape,
)
from dmattn.ops.varlen_shapes import Packing, check_packed_inputs

ABI_VERSION = 1
_MIN_CAPABILITY = (8, 0)

# A tensor as the kernels take it: data pointer, dtype code, shape, strides in elements.
_View = tuple[int, int, torch.Size, tuple[int, ...]]

_checked_devices: set[int] = set()


class Kernels(NamedTuple):
    """The compiled module, and its numbers for the dtypes."""

    core: Any
    dtype_codes: dict[torch.dtype, int]


class CacheTensors(NamedTuple):
    """The state of a cache, all contiguous."""

    k: Tensor  # (B, entries, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, entries), -inf where there is no key
    position: Tensor  # int32 (B, HK, entries), -1 where there is no key
    seen: Tensor  # int32 (B,): tokens so far


class CacheTokens(NamedTuple):
    """What is put into a cache."""

    k: Tensor  # (B, T, HK, D)
    v: Tensor  # as k
    score: Tensor  # (B, HK, T)
    active: Tensor | None  # bool (B, T), False for a token to skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    selection: Selection | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The CUDA implementation of dmattn::fwd: out (B, Sq, H, D) and lse (B, H, Sq), float32.

    `lse_rest`, as lse, is written where given; see `shapes.empty_lse_rest`.

    Raises:
        TypeError, ValueError: as `shapes.check_inputs` and `shapes.check_selection`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_inputs(q, k, v, mask, bias)
    batch, seqlen_q, seqlen_k, nheads, _, head_dim = dims
    if selection is not None:
        check_selection(selection, mask, dims, is_causal, q.device)
    device = q.get_device()
    if device not in _checked_devices:
        check_device(device)
    operands = (q, k, v, mask, bias)
    numbers = (softmax_scale, softcap, is_causal)
    rows = (batch, nheads, seqlen_q)
    return _forward(operands, numbers, head_dim, rows, seqlen_k > 0, selection, lse_rest, ())


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    selection: Selection | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA implementation of dmattn::bwd: dq, dk, dv, dbias, each only where `needs` says so.

    Raises:
        TypeError, ValueError: as `shapes.check_inputs`, `shapes.check_backward_inputs` and
            `shapes.check_selection`; a bias with rows has no gradient with a selection.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_inputs(q, k, v, mask, bias)
    check_selection(selection, mask, dims, is_causal, q.device)
    check_selected_bias(selection, bias, needs[3])
    device = q.get_device()
    check_device(device)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    if dims.batch == 0 or dims.seqlen_q == 0 or dims.seqlen_k == 0:
        return _zero_gradients(q, k, v, bias, needs)
    operands, results = (q, k, v, mask, bias), (out, lse, dout, dlse, lse_rest)
    numbers = (softmax_scale, softcap, is_causal, deterministic)
    return _backward(operands, results, numbers, dims.head_dim, needs, selection, ())


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The CUDA implementation of dmattn::varlen_fwd: out (Tq, H, D) and lse (H, Tq), float32.

    `lse_rest`, as lse, is written where given; see `shapes.empty_lse_rest`.

    Raises:
        TypeError, ValueError: as `varlen_shapes.check_packed_inputs`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_packed_inputs(q, k, v, mask, bias, packing)
    check_device(q.get_device())
    packing = _contiguous(packing)
    operands = (q, k, v, mask, bias)
    numbers = (softmax_scale, softcap, is_causal)
    rows, has_keys = lse_shape(q), dims.total_k > 0
    return _forward(operands, numbers, dims.head_dim, rows, has_keys, None, lse_rest, packing)


def varlen_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    needs: Sequence[bool],
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The CUDA implementation of dmattn::varlen_bwd: dq, dk, dv, dbias, each only where needed.

    Raises:
        TypeError, ValueError: as `varlen_shapes.check_packed_inputs` and
            `shapes.check_backward_inputs`.
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    dims = check_packed_inputs(q, k, v, mask, bias, packing)
    check_backward_inputs(dout, dlse, q, out, lse, needs)
    packing = _contiguous(packing)
    check_device(q.get_device())
    if dims.total_q == 0 or dims.total_k == 0:
        return _zero_gradients(q, k, v, bias, needs)
    operands, results = (q, k, v, mask, bias), (out, lse, dout, dlse, lse_rest)
    numbers = (softmax_scale, softcap, is_causal, deterministic)
    return _backward(operands, results, numbers, dims.head_dim, needs, None, packing)


# Query, key, value, mask, bias.
_Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
# out, lse, dout, dlse, lse_rest.
_Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _forward(
    operands: _Operands,
    numbers: tuple[float, float, bool],
    head_dim: int,
    rows: tuple[int, ...],
    has_keys: bool,
    selection: Selection | None,
    lse_rest: Tensor | None,
    packing: Packing | tuple[()],
) -> tuple[Tensor, Tensor]:
    """What both forwards do once they have looked at their arguments.

    `numbers`: softmax_scale, softcap, is_causal. `rows`: the shape of lse. `packing`: of packed
    sequences, contiguous.
    """
    q, k, v, mask, bias = operands
    if head_dim % HEAD_DIM_MULTIPLE:
        q, k, v = _pad(q), _pad(k), _pad(v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(rows, dtype=torch.float32)
    if not has_keys:
        if lse_rest is not None:
            lse_rest.zero_()
        return out.zero_()[..., :head_dim].contiguous(), lse.fill_(float("-inf"))
    if 0 not in rows:
        core, codes = load_kernels()
        device = q.get_device()
        params = core.FwdParams(
            device,
            _view(q, codes),
            _view(k, codes),
            _view(v, codes),
            None if mask is None else _view(mask, codes),
            None if bias is None else _view(bias, codes),
            _view(out, codes),
            _view(lse, codes),
            *numbers,
            0,
            None if selection is None else _views(selection, codes),
            None if lse_rest is None else _view(lse_rest, codes),
            *(_packing_views(packing, codes) if packing else ()),
        )
        _launch(params, q, device)
    if head_dim % HEAD_DIM_MULTIPLE:
        out = out[..., :head_dim].contiguous()
    return out, lse


def _backward(
    operands: _Operands,
    results: _Results,
    numbers: tuple[float, float, bool, bool],
    head_dim: int,
    needs: Sequence[bool],
    selection: Selection | None,
    packing: Packing | tuple[()],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What both backwards do once they have looked at their arguments, where there is work.

    `numbers`: softmax_scale, softcap, is_causal, deterministic.
    """
    q, k, v, mask, bias = operands
    out, lse, dout, dlse, lse_rest = results
    padded = head_dim % HEAD_DIM_MULTIPLE != 0
    if padded:
        q, k, v, out, dout = _pad(q), _pad(k), _pad(v), _pad(out), _pad(dout)
    elif dout.stride(-1) != 1:
        dout = dout.contiguous()  # such as the expanded gradient of a sum
    out, lse = out.contiguous(), lse.contiguous()  # as forward made them, unless a compiler moved
    dlse = None if dlse is None else dlse.contiguous()
    lse_rest = None if lse_rest is None else lse_rest.contiguous()
    dq, dk, dv, dbias = empty_backward_outputs(q, k, v, bias, needs)
    core, codes = load_kernels()
    device = q.get_device()
    params = core.BwdParams(
        device,
        _view(q, codes),
        _view(k, codes),
        _view(v, codes),
        None if mask is None else _view(mask, codes),
        None if bias is None else _view(bias, codes),
        _view(out, codes),
        _view(lse, codes),
        _view(dout, codes),
        None if dlse is None else _view(dlse, codes),
        _view(dq, codes) if needs[0] else None,
        _view(dk, codes) if needs[1] else None,
        _view(dv, codes) if needs[2] else None,
        _view(dbias, codes) if needs[3] and bias is not None else None,
        *numbers,
        None if selection is None else _views(selection, codes),
        None if lse_rest is None else _view(lse_rest, codes),
        *(_packing_views(packing, codes) if packing else ()),
    )
    _launch(params, q, device)
    if padded:
        dq, dk, dv = (
            g[..., :head_dim].contiguous() if need else g
            for g, need in zip((dq, dk, dv), needs, strict=False)
        )
    return dq, dk, dv, dbias


def _zero_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = empty_backward_outputs(q, k, v, bias, needs)
    for grad in grads:
        grad.zero_()
    return grads


def select(
    scores: Tensor,
    key_mask: Tensor | None,
    window: int,
    seqlen_q: int,
    is_causal: bool,
    selection: Selection,
    cu_seqlens: Tensor | None = None,
) -> None:
    """The CUDA implementation of dmattn::select_keys: fills `selection`, which has keys and rows.

    `cu_seqlens`: int32, contiguous.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = scores.get_device()
    check_device(device)
    core, codes = load_kernels()
    params = core.SelectParams(
        device,
        _view(scores, codes),
        None if key_mask is None else _view(key_mask, codes),
        _views(selection, codes),
        min(window, scores.shape[2]),
        seqlen_q,
        is_causal,
        None if cu_seqlens is None else _view(cu_seqlens, codes),
    )
    _launch(params, scores, device)


def build_key_lists(end: Tensor, seqlen_q: int, reach: int, lists: KeyLists) -> None:
    """The CUDA implementation of dmattn::build_key_lists: fills `lists`, of which there are some.

    `end`: int32 ({B|1}, heads, Sk), contiguous. `reach`: 0 where it is unknown.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = end.get_device()
    check_device(device)
    core, codes = load_kernels()
    selection = Selection(end, lists.idx, lists.counts, lists.full)
    params = core.BuildKeyListsParams(
        device, _views(selection, codes), seqlen_q, reach, _view(lists.needed, codes)
    )
    _launch(params, end, device)


def append_to_cache(
    new: CacheTokens,
    cache: CacheTensors,
    evict: bool,
    q: Tensor | None = None,
    softmax_scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor | None:
    """Put tokens into a cache; with q (B, T, H, D), the attention of each to what is then held.

    Attention needs evict.

    Raises:
        RuntimeError: no usable kernels, or a GPU that they do not serve.
    """
    device = cache.k.get_device()
    if device not in _checked_devices:
        check_device(device)
    core, codes = load_kernels()
    out = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    if new.k.shape[0] == 0 or new.k.shape[1] == 0:
        return out
    params = core.CacheAppendParams(
        device,
        _view(new.k, codes),
        _view(new.v, codes),
        _view(new.score, codes),
        None if new.active is None else _view(new.active, codes),
        *(_view(t, codes) for t in cache),
        evict,
        None if q is None else _view(q, codes),
        None if out is None else _view(out, codes),
        softmax_scale,
        softcap,
    )
    _launch(params, cache.k, device)
    return out


@functools.cache
def load_kernels() -> Kernels:
    """The compiled module dmattn_kernels._core, imported at the first call.

    Raises:
        RuntimeError: it is not installed, cannot be loaded, or speaks another ABI version.
    """
    try:
        core: Any = importlib.import_module("dmattn_kernels._core")
    except ImportError as error:
        raise RuntimeError(
            "dmattn-kernels: got none that can be loaded, wanted it for tensors on CUDA; "
            f"pip install dmattn-kernels ({error})"
        ) from error
    found = core.abi_version()
    if found != ABI_VERSION:
        raise RuntimeError(
            f"dmattn-kernels: got ABI version {found}, wanted {ABI_VERSION}; "
            "install the dmattn-kernels release that this dmattn asks for"
        )
    codes = {
        torch.float16: core.FLOAT16,
        torch.bfloat16: core.BFLOAT16,
        torch.float32: core.FLOAT32,
        torch.bool: core.BOOL,
        torch.int32: core.INT32,
    }
    return Kernels(core, codes)


def check_device(device: int) -> None:
    """Make sure that the kernels serve CUDA device number `device`.

    Raises:
        RuntimeError: the kernels cannot be loaded, or the GPU is older than sm_80.
    """
    if device in _checked_devices:
        return
    load_kernels()
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        raise RuntimeError(
            f"query: got a tensor on cuda:{device} ({torch.cuda.get_device_name(device)}, "
            f"sm_{capability[0]}{capability[1]}), wanted a GPU of sm_80 (Ampere) or later"
        )
    _checked_devices.add(device)


def _view(t: Tensor, codes: dict[torch.dtype, int]) -> _View:
    return t.data_ptr(), codes[t.dtype], t.shape, t.stride()


def _views(
    selection: Selection, codes: dict[torch.dtype, int]
) -> tuple[_View, _View, _View, _View | None]:
    end, idx, count, full = selection
    last = _view(full, codes) if full.dim() == 3 else None
    return _view(end, codes), _view(idx, codes), _view(count, codes), last


def _contiguous(packing: Packing) -> Packing:
    """The caller holds on to it until the launch: a copy's memory would serve the workspace."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)


def _packing_views(
    packing: Packing, codes: dict[torch.dtype, int]
) -> tuple[_View, _View, int, int]:
    """The last arguments of the parameter structs."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    return _view(cu_seqlens_q, codes), _view(cu_seqlens_k, codes), max_seqlen_q, max_seqlen_k


def _pad(t: Tensor) -> Tensor:
    """A contiguous copy with zeros up to the next multiple of 8 along head_dim."""
    head_dim = t.shape[-1]
    padded = t.new_zeros((*t.shape[:-1], head_dim + -head_dim % HEAD_DIM_MULTIPLE))
    padded[..., :head_dim] = t
    return padded


def _launch(params: Any, q: Tensor, device: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device)
    size = params.enqueue(stream)
    if size > 0:
        # Freed on return: the caching allocator reuses it only for later work of the same stream.
        workspace = q.new_empty(size, dtype=torch.uint8)
        params.launch(workspace.data_ptr(), size, stream)
