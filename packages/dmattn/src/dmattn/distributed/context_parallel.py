"""Attention over a sequence in contiguous stretches, one on each rank of a process group.

Of everything before a stretch, its rows need only the `window_size` best keys of each head. So the
ranks exchange these keys, whatever the length of the sequence, and each rank attends to [the best
keys before its stretch, its stretch] as if that were the whole sequence. Every rank does the same
work.
"""

import zlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from dmattn.arguments import check_scores, check_window_size, checked_problem
from dmattn.backends.cuda.keys_written import KeysWritten
from dmattn.distributed import operators
from dmattn.distributed.groups import Group, Ranks, agree, prepare, process_group, ranks_of
from dmattn.functional import flash_dmattn_func
from dmattn.key_lists import smaller
from dmattn.ops.sharding import refuse_dtensors
from dmattn.problem import Problem
from dmattn.selection import (
    KeySelection,
    check_boundary_tensor,
    key_only_mask,
    read_boundaries,
    select_keys,
    to_int32,
)
from dmattn.validation import (
    check_bool,
    check_mask,
    check_same_device,
    in_functorch,
    is_one_or,
)

# States (the best keys of each stretch) are gathered from all ranks if they have at most this many
# bytes together, and combined in rounds otherwise. On few ranks one collective costs less time than
# several with a choice of keys in between.
GATHER_BYTES = 64 << 20


class _Given(NamedTuple):
    """The checked arguments of this rank."""

    problem: Problem  # k, v and score with one and the same number of heads
    nheads_k: int  # of the keys as they were given
    score: Tensor  # (B, N, S)
    window_size: int
    cu_seqlens: Tensor | None  # int32, of the whole sequence, on the device of the problem
    known_bounds: list[int] | None  # the same where the host may read them


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    *,
    window_size: int,
    group: Group = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    *,
    window_size: int,
    group: Group = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor,
    *,
    window_size: int,
    group: Group = None,
    attn_mask: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Causal attention with `window_size`, each rank holding a contiguous stretch of the sequence.

    The result is what `flash_dmattn_func(..., is_causal=True, window_size=w)` computes from the
    whole sequence, on each rank for its own rows, gradients included. Rank 0 holds the beginning.
    For each head and sequence of the batch a rank sends its w best keys with values and scores (in
    several rounds on many ranks), and in the backward as many gradients, however long the sequence
    is.

    Every rank of the group has to call this, and every rank has to run its backward if one does,
    in the same order where there are several calls. Before anything else the ranks check, on the
    host, that their arguments go together; the GPU does not wait for that. For this, a group that
    carries only tensors of GPUs gets a second group, by gloo, at the first call.

    Letters: B batch, S tokens of this rank, H query heads, HK key/value heads, D and Dv head
    dimension of keys and of values.

    Args:
        query: (B, S, H, D); dtypes and views as for `flash_dmattn_func`.
        key, value: (B, S, HK, D) and (B, S, HK, Dv), the same tokens as in query.
        attn_bias: ({B|1}, {H|HK|1}, 1, S) or ({B|1}, {H|HK|1}, S), the scores of these keys: the
            dtype of query, or float32. With H heads where HK < H, keys and values are copied for
            each query head.
        window_size: w, at least 1: how many keys each row keeps, of its own rank or of the ranks
            before.
        group: a process group, a DeviceMesh of one dimension, or a tuple of a DeviceMesh and one of
            its dimensions. None for all processes.
        attn_mask: True where a key may be attended to: bool or integer (B, S), padding, or bool
            ({B|1}, {H|HK|1}, 1, S), of the keys of this rank.
        cu_seqlens: int32 or int64 (documents + 1,), rising from 0 to the length of the whole
            sequence, the same on all ranks: documents packed one behind the other, which may cross
            the borders between ranks. Ranks may then hold stretches of unequal lengths. As for
            `select_keys`, the values of a tensor on the GPU of query are not checked.
        softmax_scale, softcap, deterministic: as for `flash_dmattn_func`.
        return_lse: also return the log-sum-exp of each row.

    Returns:
        out (B, S, H, Dv), and with return_lse a tuple of that and lse (B, H, S), as
        `flash_dmattn_func` returns them.

    Raises:
        TypeError, ValueError: an argument is wrong on some rank, or the ranks' arguments do not go
            together, such as stretches of unequal lengths without cu_seqlens. Raised on every rank,
            before keys are exchanged. Under torch.compile all ranks find out about wrong shapes and
            dtypes together; an error that a rank finds while it compiles is raised on that rank
            alone.
        RuntimeError: torch.distributed is not initialised, the call is within a transform of
            torch.func, another rank met an error of another kind while it checked its arguments, or
            a rank does not answer within the timeout of the group.
    """
    ranks = ranks_of(group)
    settings = {"softmax_scale": softmax_scale, "softcap": softcap, "deterministic": deterministic}
    arguments = (
        *(query, key, value, attn_bias),
        *(window_size, attn_mask, cu_seqlens, return_lse, settings),
    )
    lengths: list[int] = []
    if torch.compiler.is_compiling():
        given = _checked(*arguments)
    else:
        given, lengths = _agreed(process_group(group), arguments)
    problem = given.problem
    written = _asks_when_written(given, ranks)
    k, v, score, selection = _with_start_state(given, ranks, lengths, written)
    found = flash_dmattn_func(
        problem.q,
        k,
        v,
        attn_bias=score[:, :, None],
        softmax_scale=problem.softmax_scale,
        is_causal=True,
        softcap=problem.softcap,
        deterministic=problem.deterministic,
        return_lse=return_lse,
        selection=selection,
    )
    if written is not None:
        out = found[0] if return_lse else found
        if out.grad_fn is not None:
            written.ask_before(out.grad_fn)
    return found


def _asks_when_written(given: _Given, ranks: Ranks) -> KeysWritten | None:
    """For sending gradients of keys while those of queries are still being computed; or None."""
    if ranks.size == 1 or torch.compiler.is_compiling():
        return None
    if not given.score.is_cuda or not any(_needs(given)):
        return None
    return KeysWritten(given.score.device)


def _agreed(group: dist.ProcessGroup, arguments: tuple[Any, ...]) -> tuple[_Given, list[int]]:
    """The checked arguments, and the lengths of all ranks' stretches."""
    given = prepare(group, lambda: _checked(*arguments))
    problem = given.problem
    operands = problem.k, problem.v, given.score
    facts = operators.facts_of(*operands, given.cu_seqlens, given.window_size, _needs(given))
    # With scores or a mask of query heads, the keys of `problem` have as many heads: ranks compare
    # the number of heads that was passed.
    (batch, _, *key), (_, *value) = facts["key"], facts["value"]
    facts |= {"key": [batch, given.nheads_k, *key], "value": [given.nheads_k, *value]}
    facts["attn_bias"] = str(given.score.dtype)
    facts["heads that attn_bias and attn_mask tell apart"] = given.score.shape[1]
    facts |= {
        "query": [*problem.q.shape[2:], str(problem.q.dtype)],
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "deterministic": problem.deterministic,
    }
    bounds = given.known_bounds
    if bounds is not None:
        facts["cu_seqlens (checksum)"] = zlib.crc32(str(bounds).encode())
    lengths = [there["_seqlen"] for there in agree(group, facts)]
    if bounds is not None and bounds[-1] != sum(lengths):
        raise ValueError(
            f"cu_seqlens: got {bounds[-1]} as the last one, wanted {sum(lengths)}, the tokens of "
            f"all ranks: {' + '.join(map(str, lengths))}"
        )
    return given, lengths


def _checked(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    window_size: Any,
    attn_mask: Any,
    cu_seqlens: Any,
    return_lse: Any,
    settings: dict[str, Any],
) -> _Given:
    window_size = check_window_size(window_size, may_be_left_out=False)
    if not torch.compiler.is_compiling():
        _check_plain(query=query, key=key, value=value, attn_bias=attn_bias, attn_mask=attn_mask)
    check_bool("return_lse", return_lse)  # not used here, but refused before ranks exchange keys
    scores = check_scores(attn_bias)
    bias = scores.unsqueeze(2) if scores.dim() == 3 else scores
    problem = checked_problem(query, key, value, None, bias, sinks=None, is_causal=True, **settings)
    seqlen = problem.k.shape[1]
    if problem.q.shape[1] != seqlen:
        raise ValueError(
            f"query: got {problem.q.shape[1]} rows for {seqlen} keys, wanted the rows of the same "
            "tokens"
        )
    if bias.shape[2] != 1 or bias.shape[3] != seqlen:
        raise ValueError(
            f"attn_bias: got shape {tuple(scores.shape)}, wanted (batch|1, nheads|nheads_k|1, 1, "
            f"{seqlen}) or (batch|1, nheads|nheads_k|1, {seqlen}), a score for each key of this "
            f"rank{_DENSE_WAY}"
        )
    assert problem.bias is not None
    nheads_k = problem.k.shape[2]
    problem, score = _same_heads(problem, _masked(problem.bias.squeeze(2), attn_mask, problem))
    if cu_seqlens is None:
        return _Given(problem, nheads_k, score, window_size, None, None)
    bounds, known = _whole_bounds(cu_seqlens, score.device)
    return _Given(problem, nheads_k, score, window_size, bounds, known)


def _check_plain(**tensors: Any) -> None:
    """Raise within a transform of torch.func, in which each rank may make another number of calls,
    and for a DTensor, which may hold other tokens than those of this rank.
    """
    if in_functorch():
        raise RuntimeError(
            "context parallel attention: got a call within a transform of torch.func, such as grad "
            "or vmap, wanted one outside of them; torch.autograd.grad finds gradients, and several "
            "sequences are one batch"
        )
    refuse_dtensors(" of the tokens of this rank", **tensors)


_DENSE_WAY = (
    "; attention with rows of their own needs all keys on every rank, which is what ring attention "
    "is for: torch.distributed.tensor.experimental.context_parallel"
)


def _masked(score: Tensor, attn_mask: Any, problem: Problem) -> Tensor:
    """({B|1}, heads, S): the scores, -inf where a key is masked."""
    if attn_mask is None:
        return score
    batch, seqlen, nheads = problem.q.shape[:3]
    mask = check_mask("attn_mask", attn_mask)
    by_key = mask.dim() == 2 and mask.shape[0] == batch
    if mask.dim() == 4:
        by_key = mask.shape[2] == 1 or mask.stride(2) == 0
    if not by_key:
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, wanted (batch, {seqlen}) or (batch|1, "
            f"nheads|nheads_k|1, 1, {seqlen}), alike for all query rows{_DENSE_WAY}"
        )
    keep = key_only_mask(mask, seqlen)
    check_same_device("attn_mask", keep, score.device, "query")
    heads = keep.shape[1]
    if not is_one_or(keep.shape[0], batch) or heads not in (1, problem.k.shape[2], nheads):
        raise ValueError(
            f"attn_mask: got shape {tuple(mask.shape)}, wanted batch {batch} or 1 and {nheads}, "
            f"{problem.k.shape[2]} or 1 heads"
        )
    most = max(heads, score.shape[1])
    return _repeated(score, most, 1).masked_fill(~_repeated(keep, most, 1), -torch.inf)


def _same_heads(problem: Problem, score: Tensor) -> tuple[Problem, Tensor]:
    """Keys, values and scores with the same heads: HK, or H where the scores have H."""
    batch, _, nheads_k, _ = problem.k.shape
    heads = max(nheads_k, score.shape[1])
    problem = problem.replace(k=_repeated(problem.k, heads, 2), v=_repeated(problem.v, heads, 2))
    return problem, _repeated(score, heads, 1).expand(batch, -1, -1)


def _repeated(t: Tensor, heads: int, dim: int) -> Tensor:
    """`t` with each head repeated as often as it takes to have this many along `dim`."""
    if t.shape[dim] == heads:
        return t
    return t.repeat_interleave(heads // t.shape[dim], dim)


def _whole_bounds(cu_seqlens: Any, device: torch.device) -> tuple[Tensor, list[int] | None]:
    """The boundaries as int32 on a device, and as a list where the host may read them."""
    if isinstance(cu_seqlens, Tensor):
        stays = cu_seqlens.is_cuda and cu_seqlens.device == device
        if stays or torch.compiler.is_compiling():
            check_boundary_tensor(cu_seqlens)
            return to_int32(cu_seqlens).to(device), None
    bounds = read_boundaries(cu_seqlens, None)
    return torch.tensor(bounds, dtype=torch.int32, device="cpu").to(
        device, non_blocking=True
    ), bounds


def _needs(given: _Given) -> list[bool]:
    """Which of key, value and score need a gradient."""
    on = torch.is_grad_enabled()
    problem = given.problem
    return [on and t.requires_grad for t in (problem.k, problem.v, given.score)]


def _with_start_state(
    given: _Given, ranks: Ranks, lengths: list[int], written: KeysWritten | None
) -> tuple[Tensor, Tensor, Tensor, KeySelection]:
    """Keys, values and scores with the start state in front, and which of them each row keeps.

    The start state is the best keys of all stretches before that of this rank.
    """
    problem, score, window = given.problem, given.score, given.window_size
    k, v, seqlen = problem.k, problem.v, problem.k.shape[1]
    if ranks.size == 1:
        return k, v, score, select_keys(score, window, cu_seqlens=given.cu_seqlens)
    # All ranks have to send the same number of keys. Stretches of unequal lengths are possible with
    # cu_seqlens alone; under torch.compile, nothing here knows how long those of other ranks are.
    longest = seqlen if given.cu_seqlens is None else max([1, *lengths]) if lengths else window
    count = smaller(window, longest)
    width = smaller(window, ranks.size * count)
    is_scan = ranks.size * count * _row_bytes(k, v, score) > GATHER_BYTES
    settings = operators.Settings(
        ranks.name,
        ranks.size,
        window,
        width if is_scan else count,
        width,
        is_scan,
        _needs(given),
        lengths,
    )
    k, v, score, lists = operators.join_start_state(
        k, v, score, given.cu_seqlens, settings, written
    )
    return k, v, score, KeySelection(*lists, window, True, k.shape[1] - seqlen)


def _row_bytes(k: Tensor, v: Tensor, score: Tensor) -> int:
    """Bytes of one token of a state, in all heads and sequences of the batch."""
    batch, _, heads, head_dim = k.shape
    row = (head_dim + v.shape[3]) * k.element_size() + score.element_size()
    return batch * heads * row
