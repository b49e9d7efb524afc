"""The parts of torch that this backend uses: FlexAttention, compiled on GPUs, eager on the CPU.

On a GPU the public `torch.nn.attention.flex_attention` is compiled. On the CPU that function
returns no lse when compiled and, in newer releases of torch, no gradients at all. So there the
operator behind it is called, whose eager implementation is the definition of FlexAttention and
forms all scores. That operator, the mode in which torch runs score_mod and mask_mod, the limit on
compilations, and torch's dispatch keys are private. This is the only module of the backend that
uses private parts, and `missing` says what a release of torch lacks.
"""

import functools
import importlib
import itertools
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmattn.backends.flex.blocks import BLOCK, block_table
from dmattn.backends.flex.kept import Kept, outside_of_autograd
from dmattn.backends.flex.limits import Blocks
from dmattn.backends.flex.operands import Arranged, Operands, Spec, changes_scores, keep, score

_MODULE = "torch.nn.attention.flex_attention"
_OPERATOR = "torch._higher_order_ops.flex_attention"
_MODE = "torch._dynamo._trace_wrapped_higher_order_op"
_USED = (
    (_MODULE, "flex_attention"),
    (_MODULE, "BlockMask"),
    (_OPERATOR, "flex_attention"),
)

# The backend of torch.compile on a GPU. Tests replace it to look at the graphs without a GPU.
COMPILER: Any = "inductor"


@functools.cache
def missing() -> str | None:
    """What this release of torch lacks, in words for a user; None if it has everything.

    Parts of torch._dynamo are only checked where they are used: importing it takes seconds, and
    imports triton, which then reads its settings.
    """
    for module, name in _USED:
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return f"torch {torch.__version__} has no {module}.{name}"
    return None


def _lacks(name: str) -> RuntimeError:
    return RuntimeError(
        f"backend: got 'flex', which cannot run here: torch {torch.__version__} has no {name}"
    )


def as_if_called_directly() -> Any:
    """A context in which autograd and vmap work as they do outside of an operator.

    Inside an operator torch has switched both off, but FlexAttention needs them.
    """
    return torch._C._ForceDispatchKeyGuard(*_keys_of_a_new_thread())


@functools.cache
def _keys_of_a_new_thread() -> tuple[Any, Any]:
    """The dispatch keys that torch includes and excludes by default, read on a new thread."""
    found: list[tuple[Any, Any]] = []

    def look() -> None:
        tls = torch._C
        found.append((tls._dispatch_tls_local_include_set(), tls._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def is_called_directly() -> bool:
    """Whether this call comes neither from an operator of torch nor from code that it compiled.

    Also False in inference mode, which cannot be told apart.
    """
    excluded: bool = torch._C._dispatch_tls_local_exclude_set().has(
        torch._C.DispatchKey.AutogradOther
    )
    return not excluded


def attend(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Operands,
    table: Any,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """out (B, H, Sq, D) and lse (B, H, Sq), differentiable.

    On a GPU the first call of each kind is compiled, which takes many seconds.

    Args:
        spec, tensors: from `operands`.
        q, k, v: from `arrange`.
        table: from `block_mask`.
        blocks: from `device_blocks`.
    """
    if runs_compiled(q):
        return compiled(spec, q, k, v, tensors, table, blocks)
    return by_formula(spec, q, k, v, tensors)


def runs_compiled(q: Tensor) -> bool:
    """Whether a compiled kernel computes a problem with this query; it needs a `block_mask`."""
    return q.is_cuda


def block_mask(given: Arranged) -> Any:
    """A BlockMask without mask_mod; None if it is not read, or if every row keeps every key.

    Making one takes over a hundred small kernels, more time than attention over a few thousand
    keys. So it is kept for later calls, except for problems with a mask: masks are usually new in
    every call.
    """
    if not runs_compiled(given.q):
        return None
    lengths = (given.q.shape[2], given.k.shape[2])
    blocks = (lengths[0] // BLOCK + 1) * (lengths[1] // BLOCK + 1)

    def make() -> Any:
        table = block_table(given)
        if table is None:
            return None
        return _flex().BlockMask.from_kv_blocks(*table, BLOCK_SIZE=BLOCK, seq_lengths=lengths)

    heads = (given.q.shape[1], given.k.shape[1])
    if given.mask is not None or blocks > _MOST_KEPT_BLOCKS:
        return outside_of_autograd(make)
    place = (lengths, heads, given.is_causal, given.diagonal, given.window)
    return _TABLES.get(place, given.sources, given.q.device, make)


_TABLES = Kept(8)
_MOST_KEPT_BLOCKS = 2**20  # tables with more blocks, at 16 bytes each, are not kept


def compiled(
    spec: Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Operands,
    table: Any,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """`attend` by the kernel that torch.compile makes of FlexAttention."""

    def score_mod(x: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score(spec, tensors, x, (b, h, row, key))

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return keep(spec, tensors, (b, h, row, key))

    own_mask = None
    if table is not None:
        own_mask = object.__new__(type(table))  # as copy.copy does, in a tenth of the time
        vars(own_mask).update(vars(table), mask_mod=mask_mod)
    given = score_mod if changes_scores(spec) else None
    config, name = torch._dynamo.config, _limit_name()
    limit = getattr(config, name)  # set by hand: config.patch creates a class in every call
    setattr(config, name, _MOST_COMPILATIONS)
    try:
        out, lse = _kernel_of(spec, blocks, COMPILER)(q, k, v, given, own_mask, spec.softmax_scale)
    finally:
        setattr(config, name, limit)
    return out, lse


@functools.cache
def _kernel_of(spec: Spec, blocks: Blocks, compiler: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """FlexAttention, compiled for one spec and one choice of block sizes.

    Each spec gets a function with a code object and a name of its own, for two reasons:
    torch.compile counts compilations by code object and gives up after a few, and it remembers by
    the name of a function which numbers have changed, and takes those as variables from then on.
    For one spec only lengths lead to another compilation, once when a length changes for the first
    time.
    """
    name = f"flex_attention_{next(_NUMBERS)}"
    code = _call.__code__.replace(co_name=name)
    function = types.FunctionType(code, _call.__globals__, name, (blocks.options,))
    return torch.compile(function, fullgraph=True, backend=compiler)


_NUMBERS = itertools.count()
# The limit on compilations for one spec. Each length that changes for the first time, or is 1,
# takes one. torch's own limit of 8, beyond which it raises an error, could be reached.
_MOST_COMPILATIONS = 64


_LIMIT_NAMES = ("recompile_limit", "cache_size_limit")  # since torch 2.7, and before


@functools.cache
def _limit_name() -> str:
    """The name of torch's setting that limits the compilations of one function."""
    for name in _LIMIT_NAMES:
        if hasattr(torch._dynamo.config, name):
            return name
    raise _lacks(f"torch._dynamo.config.{_LIMIT_NAMES[0]}")


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    blocks: tuple[tuple[str, int], ...] = (),
) -> tuple[Tensor, Tensor]:
    flex = _flex()
    # Not the kernel for few rows (flex decoding), which does not support all heads and masks.
    options = {"FORCE_USE_FLEX_ATTENTION": True, **dict(blocks)}
    if hasattr(flex, "AuxRequest"):  # newer releases warn that return_lse is deprecated
        out, aux = flex.flex_attention(
            q, k, v, score_mod, block_mask, scale, q.shape[1] != k.shape[1],
            kernel_options=options, return_aux=flex.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse
    out, lse = flex.flex_attention(
        q, k, v, score_mod, block_mask, scale, q.shape[1] != k.shape[1], True, options
    )
    return out, lse


def _flex() -> Any:
    import torch.nn.attention.flex_attention as flex

    return flex


def by_formula(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, tensors: Operands
) -> tuple[Tensor, Tensor]:
    """`attend` by torch's own definition of FlexAttention, which takes memory for Sq * Sk scores.

    Computed and returned in float32, or float64 for float64 inputs.
    """
    operator = importlib.import_module(_OPERATOR).flex_attention
    mode = _mode()
    names = [name for name, t in zip(Operands._fields, tensors, strict=True) if t is not None]
    given = tuple(t for t in tensors if t is not None)

    def read(buffers: tuple[Tensor, ...]) -> Operands:
        return Operands(**dict(zip(names, buffers, strict=True)))

    def score_mod(
        x: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor, *buffers: Tensor
    ) -> Tensor:
        with mode():
            return score(spec, read(buffers), x, (b, h, row, key))

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor, *buffers: Tensor) -> Tensor:
        with mode():
            return keep(spec, read(buffers), (b, h, row, key))

    wide = [t.to(torch.float64 if t.dtype == torch.float64 else torch.float32) for t in (q, k, v)]
    out, lse, *_ = operator(
        *wide,
        score_mod,
        (*_no_blocks(q.shape[2], k.shape[2]), mask_mod),
        spec.softmax_scale,
        {},
        given,
        tuple(t.detach() for t in given),
    )
    return out, lse * math.log(2)


@functools.cache
def _mode() -> Any:
    """The mode in which torch runs functions that index a tensor by tensors under vmap."""
    try:
        return importlib.import_module(_MODE).TransformGetItemToIndex
    except (ImportError, AttributeError):
        raise _lacks(f"{_MODE}.TransformGetItemToIndex") from None


def _no_blocks(seqlen_q: int, seqlen_k: int) -> tuple[Any, ...]:
    """The fields of a BlockMask of one block, without mask_mod; the operator does not read them."""
    mask = _flex().BlockMask.from_kv_blocks(
        torch.ones((1, 1, 1), dtype=torch.int32),
        torch.zeros((1, 1, 1, 1), dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        seq_lengths=(seqlen_q, seqlen_k),
    )
    parts: tuple[Any, ...] = mask.as_tuple()
    return parts[:-1]
