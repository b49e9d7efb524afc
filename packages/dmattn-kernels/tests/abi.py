"""The structs of dmattn/dmattn.h for ctypes, and shorthand for filling them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from typing import TypeVar

OK, INVALID_VALUE, INVALID_DTYPE, UNSUPPORTED, NO_DEVICE, CUDA = range(6)
FLOAT16, BFLOAT16, FLOAT32, BOOL, INT32, INT64 = range(1, 7)

# An address that nothing reads, aligned well enough for any tensor and for a workspace.
SOME_ADDRESS = 1 << 40


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


def _fields(names: str, kind: type) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


_HEAD = [
    ("struct_size", ctypes.c_size_t),
    *_fields("device is_causal", ctypes.c_int32),
    *_fields("softmax_scale softcap", ctypes.c_float),
]


class Selection(ctypes.Structure):
    _fields_ = _fields("end idx count full", Tensor)


_PACKING = [
    *_fields("cu_seqlens_q cu_seqlens_k", Tensor),
    *_fields("max_seqlen_q max_seqlen_k", ctypes.c_int32),
]


class FwdParams(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        *_fields("q k v mask bias out softmax_lse", Tensor),
        *_fields("num_splits reserved", ctypes.c_int32),
        ("selection", Selection),
        ("softmax_lse_rest", Tensor),
        *_PACKING,
        *_fields("window reserved_end", ctypes.c_int32),
    ]


class BwdParams(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        *_fields("q k v mask bias out softmax_lse dout dsoftmax_lse dq dk dv dbias", Tensor),
        *_fields("deterministic reserved", ctypes.c_int32),
        ("selection", Selection),
        ("softmax_lse_rest", Tensor),
        *_PACKING,
        *_fields("window reserved_end", ctypes.c_int32),
        ("keys_written", ctypes.c_void_p),
    ]


class SelectParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device is_causal window reserved", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int64),
        *_fields("scores key_mask", Tensor),
        ("selection", Selection),
        ("cu_seqlens", Tensor),
    ]


class BuildKeyListsParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device reserved", ctypes.c_int32),
        *_fields("seqlen_q reach", ctypes.c_int64),
        ("selection", Selection),
        ("needed", Tensor),
    ]


class CacheAppendParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device evict", ctypes.c_int32),
        *_fields("softmax_scale softcap", ctypes.c_float),
        *_fields("k_new v_new score_new active k_cache v_cache score position seen q out", Tensor),
    ]


class CacheDraftParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device reserved", ctypes.c_int32),
        *_fields("softmax_scale softcap", ctypes.c_float),
        *_fields("q k_new v_new score_new k_cache v_cache score position seen draft out", Tensor),
    ]


class CacheCommitParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device reserved", ctypes.c_int32),
        *_fields("draft count k_cache v_cache score position seen", Tensor),
    ]


class JoinKeysParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device reserved", ctypes.c_int32),
        *_fields("k_first v_first score_first k_new v_new score_new mask_new k v score", Tensor),
        ("place_first", Tensor),
    ]


class KeepKeysParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *_fields("device starts_early", ctypes.c_int32),
        ("row", ctypes.c_int64),
        *_fields("end place k v score position seen", Tensor),
        *_fields("k_kept v_kept score_kept position_kept seen_kept", Tensor),
    ]


Params = (
    FwdParams
    | BwdParams
    | SelectParams
    | BuildKeyListsParams
    | CacheAppendParams
    | CacheDraftParams
    | CacheCommitParams
    | JoinKeysParams
    | KeepKeysParams
)
P = TypeVar(
    "P",
    FwdParams,
    BwdParams,
    SelectParams,
    BuildKeyListsParams,
    CacheAppendParams,
    CacheDraftParams,
    CacheCommitParams,
    JoinKeysParams,
    KeepKeysParams,
)
CALLS: dict[type[Params], tuple[str, str]] = {
    FwdParams: ("dmattn_fwd_workspace_size", "dmattn_fwd"),
    BwdParams: ("dmattn_bwd_workspace_size", "dmattn_bwd"),
    SelectParams: ("dmattn_select_workspace_size", "dmattn_select_keys"),
    BuildKeyListsParams: ("dmattn_build_key_lists_workspace_size", "dmattn_build_key_lists"),
    CacheAppendParams: ("dmattn_cache_append_workspace_size", "dmattn_cache_append"),
    CacheDraftParams: ("dmattn_cache_draft_workspace_size", "dmattn_cache_draft"),
    CacheCommitParams: ("dmattn_cache_commit_workspace_size", "dmattn_cache_commit"),
    JoinKeysParams: ("dmattn_join_keys_workspace_size", "dmattn_join_keys"),
    KeepKeysParams: ("dmattn_keep_keys_workspace_size", "dmattn_keep_keys"),
}


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def tensor(
    shape: Sequence[int],
    dtype: int = BFLOAT16,
    stride: Sequence[int] | None = None,
    data: int | None = SOME_ADDRESS,
) -> Tensor:
    stride = contiguous(shape) if stride is None else stride
    view = Tensor(data=data, dtype=dtype, ndim=len(shape))
    view.shape[: len(shape)] = list(shape)
    view.stride[: len(stride)] = list(stride)
    return view


def fwd_params(
    batch: int = 2,
    seqlen_q: int = 128,
    seqlen_k: int = 128,
    nheads: int = 4,
    nheads_k: int = 2,
    head_dim: int = 64,
    dtype: int = BFLOAT16,
    **fields: object,
) -> FwdParams:
    """A valid forward call of these extents, with these fields of the struct changed or added."""
    q = tensor((batch, seqlen_q, nheads, head_dim), dtype)
    k = tensor((batch, seqlen_k, nheads_k, head_dim), dtype)
    params = FwdParams(struct_size=ctypes.sizeof(FwdParams), softmax_scale=0.125, q=q, k=k, v=k)
    params.out = q
    params.softmax_lse = tensor((batch, nheads, seqlen_q), FLOAT32)
    return replace(params, fields)


def bwd_params(gradients: str = "dq dk dv", **arguments: object) -> BwdParams:
    """A valid backward call that asks for these gradients; arguments as for `fwd_params`.

    Gradients that are not among the arguments are contiguous.
    """
    names = {field[0] for field in BwdParams._fields_}
    forward = {k: v for k, v in arguments.items() if k not in names}
    fields = {k: v for k, v in arguments.items() if k in names}
    like = fwd_params(**forward)  # type: ignore[arg-type]
    params = BwdParams(struct_size=ctypes.sizeof(BwdParams), softmax_scale=0.125)
    for name in ("q", "k", "v", "out", "softmax_lse"):
        setattr(params, name, getattr(like, name))
    params.dout = like.q
    replace(params, fields)
    for name in set(gradients.split()) - set(fields):
        source = getattr(params, name[1:])
        setattr(params, name, tensor(source.shape[: source.ndim], source.dtype))
    return params


def packed_fields(
    sequences: int = 3,
    total_q: int = 500,
    total_k: int = 700,
    max_seqlen_q: int = 300,
    max_seqlen_k: int = 400,
    nheads: int = 4,
    nheads_k: int = 2,
    head_dim: int = 64,
    dtype: int = BFLOAT16,
) -> dict[str, object]:
    """The fields that turn a valid call of `fwd_params` into one over packed sequences."""
    q = tensor((total_q, nheads, head_dim), dtype)
    k = tensor((total_k, nheads_k, head_dim), dtype)
    cu_seqlens = tensor((sequences + 1,), INT32)
    return {
        "q": q,
        "k": k,
        "v": k,
        "out": q,
        "softmax_lse": tensor((nheads, total_q), FLOAT32),
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def packed_fwd_params(**arguments: object) -> FwdParams:
    """A valid forward call over packed sequences.

    Arguments are those of `packed_fields`, and fields of the struct to be changed or added.
    """
    return fwd_params(**_packed(arguments))  # type: ignore[arg-type]


def packed_bwd_params(gradients: str = "dq dk dv", **arguments: object) -> BwdParams:
    """The backward of `packed_fwd_params`, with these gradients asked for."""
    fields = _packed(arguments)
    return bwd_params(gradients, **({"dout": fields["q"]} | fields))


def _packed(arguments: dict[str, object]) -> dict[str, object]:
    names = inspect.signature(packed_fields).parameters
    sizes = {k: v for k, v in arguments.items() if k in names}
    fields = {k: v for k, v in arguments.items() if k not in names}
    return packed_fields(**sizes) | fields  # type: ignore[arg-type]


def selection(
    seqlen_q: int, seqlen_k: int, capacity: int, batch: int = 1, heads: int = 1, causal: bool = True
) -> Selection:
    """A selection whose arrays have the shapes that follow from these lengths."""
    lists = (batch, heads, -(-seqlen_q // 128) if causal else 1)
    found = Selection(
        end=tensor((batch, heads, seqlen_k), INT32),
        idx=tensor((*lists, capacity), INT32),
        count=tensor(lists, INT32),
    )
    if causal:
        found.full = tensor(lists, INT32)
    return found


def select_params(**fields: object) -> SelectParams:
    """A valid call that selects the best 100 of 1000 keys for 300 rows, with changed fields."""
    params = SelectParams(
        struct_size=ctypes.sizeof(SelectParams),
        is_causal=1,
        window=100,
        seqlen_q=300,
        scores=tensor((2, 4, 1000), FLOAT32),
        selection=selection(300, 1000, 256, batch=2, heads=4),
    )
    return replace(params, fields)


def build_key_lists_params(**fields: object) -> BuildKeyListsParams:
    """A valid call for lists of up to 256 of 1000 keys for 300 rows, with changed fields."""
    params = BuildKeyListsParams(
        struct_size=ctypes.sizeof(BuildKeyListsParams),
        seqlen_q=300,
        selection=selection(300, 1000, 256, batch=2, heads=4),
    )
    return replace(params, fields)


def cache_append_params(**fields: object) -> CacheAppendParams:
    """A valid call for 3 tokens and a cache of 64 entries, with changed fields."""
    params = CacheAppendParams(struct_size=ctypes.sizeof(CacheAppendParams), evict=1)
    for name, shape, dtype in (
        ("k_new", (2, 3, 4, 64), BFLOAT16),
        ("v_new", (2, 3, 4, 64), BFLOAT16),
        ("score_new", (2, 4, 3), FLOAT32),
        ("active", (2, 3), BOOL),
        ("k_cache", (2, 64, 4, 64), BFLOAT16),
        ("v_cache", (2, 64, 4, 64), BFLOAT16),
        ("score", (2, 4, 64), FLOAT32),
        ("position", (2, 4, 64), INT32),
        ("seen", (2,), INT32),
        ("q", (2, 3, 8, 64), BFLOAT16),
        ("out", (2, 3, 8, 64), BFLOAT16),
    ):
        setattr(params, name, tensor(shape, dtype))
    return replace(params, fields)


# A cache of 64 entries with 8 rows behind them, and a draft of 3 tokens.
_DRAFTED = (
    ("k_cache", (2, 72, 4, 64), BFLOAT16),
    ("v_cache", (2, 72, 4, 64), BFLOAT16),
    ("score", (2, 4, 64), FLOAT32),
    ("position", (2, 4, 64), INT32),
    ("seen", (2,), INT32),
    ("draft", (2, 4, 3, 4), INT32),
)


def cache_draft_params(**fields: object) -> CacheDraftParams:
    """A valid draft of 3 tokens, with changed fields."""
    params = CacheDraftParams(struct_size=ctypes.sizeof(CacheDraftParams))
    for name, shape, dtype in (
        *_DRAFTED,
        ("k_new", (2, 3, 4, 64), BFLOAT16),
        ("v_new", (2, 3, 4, 64), BFLOAT16),
        ("score_new", (2, 4, 3), FLOAT32),
        ("q", (2, 3, 8, 64), BFLOAT16),
        ("out", (2, 3, 8, 64), BFLOAT16),
    ):
        setattr(params, name, tensor(shape, dtype))
    return replace(params, fields)


def cache_commit_params(**fields: object) -> CacheCommitParams:
    """A valid commit of the draft of `cache_draft_params`, with changed fields."""
    params = CacheCommitParams(struct_size=ctypes.sizeof(CacheCommitParams))
    for name, shape, dtype in (*_DRAFTED, ("count", (2,), INT64)):
        setattr(params, name, tensor(shape, dtype))
    return replace(params, fields)


def join_keys_params(**fields: object) -> JoinKeysParams:
    """A valid call for a state of 64 keys and a stretch of 100, with changed fields."""
    params = JoinKeysParams(struct_size=ctypes.sizeof(JoinKeysParams))
    for name, shape, dtype in (
        ("k_first", (2, 64, 4, 64), BFLOAT16),
        ("v_first", (2, 64, 4, 128), BFLOAT16),
        ("score_first", (2, 4, 64), FLOAT32),
        ("k_new", (2, 100, 2, 64), BFLOAT16),
        ("v_new", (2, 100, 2, 128), BFLOAT16),
        ("score_new", (1, 1, 100), BFLOAT16),
        ("mask_new", (2, 4, 100), BOOL),
        ("k", (2, 200, 4, 64), BFLOAT16),
        ("v", (2, 200, 4, 128), BFLOAT16),
        ("score", (2, 4, 200), FLOAT32),
        ("place_first", (2, 4, 64), INT32),
    ):
        setattr(params, name, tensor(shape, dtype))
    return replace(params, fields)


def keep_keys_params(**fields: object) -> KeepKeysParams:
    """A valid call that keeps 64 of 200 keys, 50 of them of a state, with changed fields."""
    params = KeepKeysParams(struct_size=ctypes.sizeof(KeepKeysParams), row=199)
    for name, shape, dtype in (
        ("end", (2, 4, 200), INT32),
        ("place", (2, 4, 200), INT32),
        ("k", (2, 200, 4, 64), BFLOAT16),
        ("v", (2, 200, 4, 128), BFLOAT16),
        ("score", (2, 4, 200), FLOAT32),
        ("position", (2, 4, 50), INT32),
        ("seen", (2,), INT32),
        ("k_kept", (2, 64, 4, 64), BFLOAT16),
        ("v_kept", (2, 64, 4, 128), BFLOAT16),
        ("score_kept", (2, 4, 64), FLOAT32),
        ("position_kept", (2, 4, 64), INT32),
        ("seen_kept", (2,), INT32),
    ):
        setattr(params, name, tensor(shape, dtype))
    return replace(params, fields)


def replace(params: P, fields: dict[str, object]) -> P:
    for name, value in fields.items():
        setattr(params, name, value)
    return params


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare argument and result types of the exported functions."""
    size = ctypes.POINTER(ctypes.c_size_t)
    for params, (size_name, launch_name) in CALLS.items():
        pointer = ctypes.POINTER(params)
        getattr(library, size_name).argtypes = [pointer, size]
        launch = getattr(library, launch_name)
        launch.argtypes = [pointer, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.dmattn_select_capacity.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
    library.dmattn_select_capacity.restype = ctypes.c_int64
    library.dmattn_device_architecture.argtypes = [
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_char_p),
    ]
    for name in ("last_error", "version", "architectures"):
        getattr(library, f"dmattn_{name}").restype = ctypes.c_char_p
    return library
