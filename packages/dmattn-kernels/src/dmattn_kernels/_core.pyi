"""Types of the compiled module."""

from typing import Any, Final, TypeAlias

# A tensor has one of two forms. Either it is a tuple (data_ptr, dtype, shape, stride): device
# address, one of the dtype codes below, extents, strides in elements. Or it is a tensor of a
# framework, on the device of the call and of a type for which `reads` is true. The constructor or
# function that gets such a tensor copies its description and keeps no reference to it. None is an
# absent tensor.
_Tensor: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]] | Any
# (end, idx, count, full) of dmattn_key_selection; full is None when the selection is not causal.
_Selection: TypeAlias = tuple[_Tensor, _Tensor, _Tensor, _Tensor | None]

FLOAT16: Final[int]
BFLOAT16: Final[int]
FLOAT32: Final[int]
BOOL: Final[int]
INT32: Final[int]
INT64: Final[int]
HEADER_ABI_VERSION: Final[int]  # of the header that this module was compiled against

class FwdParams:
    """One forward call. Shapes and dtypes as in dmattn_fwd_params of dmattn/dmattn.h.

    The constructor raises TypeError for an argument that is no tensor in one of the two forms, and
    ValueError for a tensor of more than 4 dimensions or on another device. Shapes, strides and
    dtypes are checked by the methods.
    """

    def __init__(
        self,
        device: int,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        mask: _Tensor | None,
        bias: _Tensor | None,
        out: _Tensor,
        lse: _Tensor,
        softmax_scale: float,
        softcap: float,
        is_causal: bool,
        num_splits: int = 0,
        selection: _Selection | None = None,
        lse_rest: _Tensor | None = None,
        cu_seqlens_q: _Tensor | None = None,
        cu_seqlens_k: _Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        window: int = 0,
    ) -> None: ...
    def workspace_size(self) -> int:
        """Bytes of device scratch that `launch` needs.

        Raises ValueError, TypeError (a dtype) or RuntimeError (no GPU, no kernel for it).
        """
    def enqueue(self, stream: int) -> int:
        """Launches the call if it needs no scratch, and returns the bytes of scratch it needs.

        If they are not 0, nothing has been launched: call `launch` then, which does not check and
        plan the call a second time. Raises what `workspace_size` and `launch` raise.
        """
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """Enqueues the call on `stream` (a cudaStream_t) without waiting for it.

        `workspace` is the device address, a multiple of 256, of `bytes` bytes of scratch. Releases
        the GIL. Raises what `workspace_size` raises, and RuntimeError for an error of the CUDA
        runtime.
        """

class BwdParams:
    """One backward call, see `FwdParams`. Of dq, dk, dv and dbias those not wanted are None."""

    def __init__(
        self,
        device: int,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        mask: _Tensor | None,
        bias: _Tensor | None,
        out: _Tensor,
        lse: _Tensor,
        dout: _Tensor,
        dlse: _Tensor | None,
        dq: _Tensor | None,
        dk: _Tensor | None,
        dv: _Tensor | None,
        dbias: _Tensor | None,
        softmax_scale: float,
        softcap: float,
        is_causal: bool,
        deterministic: bool,
        selection: _Selection | None = None,
        lse_rest: _Tensor | None = None,
        cu_seqlens_q: _Tensor | None = None,
        cu_seqlens_k: _Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        window: int = 0,
        keys_written: int = 0,  # a cudaEvent_t, recorded once dk, dv and dbias are written
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class SelectParams:
    """One selection of keys by score, as dmattn_select_params of dmattn/dmattn.h.

    The arrays of `selection` are written.
    """

    def __init__(
        self,
        device: int,
        scores: _Tensor,
        key_mask: _Tensor | None,
        selection: _Selection,
        window: int,
        seqlen_q: int,
        is_causal: bool,
        cu_seqlens: _Tensor | None = None,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class BuildKeyListsParams:
    """Key lists from given intervals, as dmattn_build_key_lists_params of dmattn/dmattn.h.

    Of `selection`, end is read, and idx, count and full are written; so is `needed`.
    """

    def __init__(
        self,
        device: int,
        selection: _Selection,
        seqlen_q: int,
        reach: int = 0,
        needed: _Tensor | None = None,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class CacheAppendParams:
    """New tokens for a cache of keys, as dmattn_cache_append_params of dmattn/dmattn.h.

    The cache, `k_cache` to `seen`, is changed in place. With `q`, which needs `evict`, the queries
    of each token attend to what the cache holds once that token is in, and `out` is written.
    """

    def __init__(
        self,
        device: int,
        k_new: _Tensor,
        v_new: _Tensor,
        score_new: _Tensor,
        active: _Tensor | None,
        k_cache: _Tensor,
        v_cache: _Tensor,
        score: _Tensor,
        position: _Tensor,
        seen: _Tensor,
        evict: bool,
        q: _Tensor | None = None,
        out: _Tensor | None = None,
        softmax_scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class CacheDraftParams:
    """Tokens that attend without being put in, as dmattn_cache_draft_params of dmattn/dmattn.h.

    Their keys and values are written to the rows of `k_cache` and `v_cache` behind the entries. The
    output `draft` is an input of `CacheCommitParams`.
    """

    def __init__(
        self,
        device: int,
        q: _Tensor,
        k_new: _Tensor,
        v_new: _Tensor,
        score_new: _Tensor,
        k_cache: _Tensor,
        v_cache: _Tensor,
        score: _Tensor,
        position: _Tensor,
        seen: _Tensor,
        draft: _Tensor,
        out: _Tensor,
        softmax_scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class CacheCommitParams:
    """Put the first tokens of a draft in, as dmattn_cache_commit_params of dmattn/dmattn.h.

    `count` holds the number of tokens to put in for each sequence. The cache, `k_cache` to `seen`,
    is changed in place.
    """

    def __init__(
        self,
        device: int,
        draft: _Tensor,
        count: _Tensor,
        k_cache: _Tensor,
        v_cache: _Tensor,
        score: _Tensor,
        position: _Tensor,
        seen: _Tensor,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class JoinKeysParams:
    """The keys of two stretches joined into one, as dmattn_join_keys_params of dmattn/dmattn.h.

    `k`, `v` and `score` are written.
    """

    def __init__(
        self,
        device: int,
        k_first: _Tensor,
        v_first: _Tensor,
        score_first: _Tensor,
        k_new: _Tensor,
        v_new: _Tensor,
        score_new: _Tensor,
        mask_new: _Tensor | None,
        k: _Tensor,
        v: _Tensor,
        score: _Tensor,
        place_first: _Tensor | None = None,
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

class KeepKeysParams:
    """The keys that a row of a selection keeps, as dmattn_keep_keys_params of dmattn/dmattn.h.

    `k_kept` to `seen_kept` are written.
    """

    def __init__(
        self,
        device: int,
        row: int,
        end: _Tensor,
        place: _Tensor | None,
        k: _Tensor,
        v: _Tensor,
        score: _Tensor,
        position: _Tensor | None,
        seen: _Tensor | None,
        k_kept: _Tensor,
        v_kept: _Tensor,
        score_kept: _Tensor,
        position_kept: _Tensor,
        seen_kept: _Tensor | None = None,
        starts_early: bool = False,  # may run beside the call enqueued right before, see the header
    ) -> None: ...
    def workspace_size(self) -> int:
        """See `FwdParams.workspace_size`."""
    def enqueue(self, stream: int) -> int:
        """See `FwdParams.enqueue`."""
    def launch(self, workspace: int, bytes: int, stream: int) -> None:
        """See `FwdParams.launch`."""

def enqueue_fwd(*arguments: Any) -> int:
    """A forward in a single call: makes the parameters, gets the scratch, and launches.

    Takes all arguments of the constructor of `FwdParams`, by position, and then the stream. The
    scratch is allocated by the framework of the first tensor, on the framework's current stream,
    which has to be the given stream. Returns 0 if the call was launched. Otherwise nothing was
    launched, and it returns the bytes of scratch that it needs and did not get: the caller then has
    to use `FwdParams`. Raises what the constructor and the methods of `FwdParams` raise.
    """

def enqueue_bwd(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `BwdParams`."""

def enqueue_select(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `SelectParams`."""

def enqueue_build_key_lists(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `BuildKeyListsParams`."""

def enqueue_cache_append(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `CacheAppendParams`."""

def enqueue_cache_draft(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `CacheDraftParams`."""

def enqueue_cache_commit(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `CacheCommitParams`."""

def enqueue_join_keys(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `JoinKeysParams`."""

def enqueue_keep_keys(*arguments: Any) -> int:
    """As `enqueue_fwd`, with the arguments of `KeepKeysParams`."""

def kind_of(types: tuple[type, ...], *tensors: Any) -> bytes | None:
    """The kind of some tensors, as bytes.

    Takes a tuple of types, and then up to 8 tensors, each of which may be None. Two lists of
    tensors have the same kind exactly if they agree in which of them are None and in all shapes,
    strides, dtypes and devices. Returns None if a tensor has a type that is not among the given
    ones (a subclass is another type), if its framework cannot describe it, or if its `is_neg()` is
    true.
    """

def reads(type: type) -> bool:
    """Whether tensors of this type may be passed as they are, instead of as tuples.

    They may if the type has DLPack's C exchange interface, as torch.Tensor has from torch 2.10 on.
    """

def select_capacity(window: int, seqlen_k: int, is_causal: bool) -> int:
    """Entries that each list of a selection needs room for; 0 for a window below 1."""

def abi_version() -> int: ...
def version() -> str: ...
def cuda_version() -> int:
    """1000 * major + 10 * minor of the CUDA toolkit that compiled the library."""

def architectures() -> list[str]:
    """What the library contains, such as ["sm_80", "sm_90", "sm_90a", "compute_89"]."""

def device_architecture(device: int) -> str:
    """The set of kernels that serves this GPU: "sm80", "sm89" or "sm90".

    DMATTN_ARCH in the environment overrides the choice. Raises RuntimeError where there is no such
    GPU or no kernel for it.
    """
