"""The operators dmattn::join_start_state and dmattn::join_start_state_backward.

    join_start_state(k, v, score, cu_seqlens, <settings>)
        -> (k, v, score, bounds, own, places)
    join_start_state_backward(dk, dv, dscore, own, places, <settings>) -> (dk, dv, dscore)

The first puts the start state of this rank in front of its own keys, and in front of that empty
entries, which make both together whole blocks of rows, so that the lists of the rank's own rows can
be cut out of the lists of all rows.
It is one node of autograd on every rank, so that the backward of every rank enters the same
collectives. Being opaque to compilers, it runs under torch.compile as it is. While the state is on
its way the rank's own keys are copied to their place.

Plain eager calls use the same functions without the operator, as in `dmattn.dispatch`. The first
rank, which has no start state, then copies nothing. With the operator it has to copy its keys,
since an operator may not return its inputs.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dmattn.backends.cuda.keys_written import KeysWritten
from dmattn.dispatch import is_batch, is_direct, select
from dmattn.distributed import exchange
from dmattn.distributed.beside import Beside
from dmattn.distributed.exchange import Borders, Place
from dmattn.distributed.groups import agree, by_name
from dmattn.distributed.rows import Field, Rows
from dmattn.key_lists import KeptKeys, Selection, behind_rows, whole_blocks
from dmattn.ops.keys import keep_keys
from dmattn.ops.register import Operator, register
from dmattn.ops.selection import select_keys


class Settings(NamedTuple):
    """The arguments of the operators that come after the tensors."""

    group: str  # its name
    ranks: int  # P
    window: int  # w
    sent: int  # m, the keys that each rank sends
    width: int  # W, the most keys of a start state
    is_scan: bool
    needs: list[bool]  # gradients of k, v and score
    lengths: list[int]  # of the stretches of all ranks, where these have agreed; else none


_SETTINGS = (
    "str group, int ranks, SymInt window, SymInt sent, SymInt width, bool is_scan, "
    "bool[3] needs, SymInt[] lengths"
)
_JOIN = (
    f"(Tensor k, Tensor v, Tensor score, Tensor? cu_seqlens, {_SETTINGS}) -> "
    "(Tensor k_joined, Tensor v_joined, Tensor score_joined, Tensor bounds, Tensor own, "
    "Tensor places)"
)
_BACKWARD = (
    f"(Tensor dk, Tensor dv, Tensor dscore, Tensor own, Tensor places, {_SETTINGS}) -> "
    "(Tensor dk_own, Tensor dv_own, Tensor dscore_own)"
)

Keys = tuple[Tensor, Tensor, Tensor]  # k, v and score
Joined = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _layout(*parts: Tensor) -> Rows:
    """The layout of rows of k (B, S, N, D), v (B, S, N, Dv), score (B, N, S), or some of them."""
    return Rows([Field(t.shape[3] if t.dim() == 4 else 1, t.dtype) for t in parts])


def _empty_joined(
    k: Tensor,
    v: Tensor,
    score: Tensor,
    cu_seqlens: Tensor | None,
    *settings: Any,
) -> Joined:
    """Uninitialised tensors for the results."""
    given = Settings(*settings)
    batch, seqlen, heads, _ = k.shape
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] + 1
    return (
        *_with_room((k, v), whole_blocks(given.width)),
        score.new_empty((batch, heads, whole_blocks(given.width) + seqlen)),
        k.new_empty((documents,), dtype=torch.int32),
        k.new_empty((batch, heads, given.sent), dtype=torch.int64),
        _empty_places(k, given),
    )


def _with_room(keys: tuple[Tensor, Tensor], before: int) -> tuple[Tensor, Tensor]:
    """Uninitialised keys and values, as many as these and `before` more."""
    k, v = keys
    batch, seqlen, heads, _ = k.shape
    return (
        k.new_empty((batch, before + seqlen, heads, k.shape[3])),
        v.new_empty((batch, before + seqlen, heads, v.shape[3])),
    )


def _empty_places(k: Tensor, given: Settings) -> Tensor:
    steps = (exchange.rounds(given.ranks), 2) if given.is_scan else (1, 1)
    return k.new_empty((*steps, k.shape[0], k.shape[2], given.width), dtype=torch.int64)


def join_start_state(
    k: Tensor,
    v: Tensor,
    score: Tensor,
    cu_seqlens: Tensor | None,
    settings: Settings,
    written: KeysWritten | None,
) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """Keys, values and scores with the start state in front, and which of them each row keeps.

    By the operator, or in plain eager calls by the same functions.

    Args:
        k, v: (B, S, N, D) and (B, S, N, Dv), of this rank.
        score: (B, N, S).
        cu_seqlens: int32 (documents + 1,), of the whole sequence, or None.
        settings: the same on all ranks.
        written: records an event when attention's backward has written the gradients of what is
            returned; None if nobody waits for it.

    Returns:
        k (B, F + S, N, D), v and score likewise. F rows are in front of those of this rank: whole
        blocks with room for W keys; in a plain eager call without a scan none on the first rank.
        And the lists of the S rows.
    """
    given = (k, v, score, cu_seqlens, *settings)
    if not torch.compiler.is_compiling() and is_direct(k, v, score, cu_seqlens):
        *joined, _, _, _, end, idx, count, full = _Eager.apply(written, *given)  # type: ignore[no-untyped-call]
        return (*joined, Selection(end, idx, count, full))
    *joined, bounds, _, _ = torch.ops.dmattn.join_start_state(*given)
    return (*joined, _lists(joined[2].detach(), cu_seqlens, bounds, settings, k.shape[1]))


def _lists(
    score: Tensor, cu_seqlens: Tensor | None, bounds: Tensor, given: Settings, seqlen: int
) -> Selection:
    """Which keys the last `seqlen` rows keep, by the scores of all keys (B, N, F + S)."""
    if cu_seqlens is None:
        return select(score, None, given.window, seqlen, True, cleared=False)
    rows = score.shape[2]
    return behind_rows(select(score, None, given.window, rows, True, bounds), rows - seqlen)


def _join(
    k: Tensor,
    v: Tensor,
    score: Tensor,
    cu_seqlens: Tensor | None,
    *settings: Any,
) -> Joined:
    given = Settings(*settings)
    place = _place(k, v, score, cu_seqlens, given)
    return _join_at(place, (k, v, score), cu_seqlens, given, may_alias=False, choose=False)[0]


def _join_at(
    place: Place,
    keys: Keys,
    cu_seqlens: Tensor | None,
    given: Settings,
    may_alias: bool,
    choose: bool,
) -> tuple[Joined, Selection | None]:
    """The results of the operator, and which keys each row keeps, if asked to `choose` them.

    Scores travel before keys and values, so that keys are chosen while keys and values are still on
    their way; meanwhile this rank's own keys are copied to their place.

    `may_alias`: whether the first rank may return the keys as they are, with nothing in front.
    """
    (k, v, score), seqlen = keys, keys[0].shape[1]
    borders = None if cu_seqlens is None else _borders(place, cu_seqlens)
    before = 0 if may_alias and place.rank == 0 else whole_blocks(given.width)
    # Of the rows that travel. In a scan they have scores, by which they are combined on their way.
    layout = _layout(*keys) if given.is_scan else _layout(k, v)
    travel = Beside(k.device, urgent=True)
    own = _own_state(place, layout, keys, given, borders, travel)
    sending = None
    if not given.is_scan:
        sending = tuple(exchange.start_gather(place, t, travel) for t in (own.score, own.rows))
    joined_k, joined_v = _with_room((k, v), before) if before > 0 else (k, v)
    beside = Beside(k.device)
    try:
        if before > 0:
            with beside:
                _last(joined_k, seqlen).copy_(k)
                _last(joined_v, seqlen).copy_(v)
        if sending is None:
            rows, its_score, places = exchange.scan(place, layout, own.rows, borders)
        else:
            its_score, at = exchange.choose_gathered(place, sending[0].wait(), given.width, borders)
            places = _empty_places(k, given) if at is None else at[None, None]
        travel.follow()  # waits for the choice of rows, or for the rows of a scan
        joined_score = score if before == 0 else _behind(its_score, score, before)
        bounds = _bounds(place, cu_seqlens, before, seqlen, k)
        lists = _lists(joined_score, cu_seqlens, bounds, given, seqlen) if choose else None
        with travel:
            if sending is not None:
                rows = exchange.take_gathered(place, sending[1].wait(), at)
            own_at = _as_index(own.at, place)
            if before > 0:
                for joined, part in zip((joined_k, joined_v), layout.parts(rows), strict=False):
                    _put_in_front(joined, part.transpose(1, 2), before)
    finally:
        beside.join()
        travel.join()
    travel.hand_over(own_at)
    return (joined_k, joined_v, joined_score, bounds, own_at, places), lists


def _behind(first: Tensor, score: Tensor, before: int) -> Tensor:
    """(B, N, before + S): -inf, then the scores of a start state, then other scores."""
    empty = before - first.shape[2]
    if empty == 0:
        return torch.cat((first, score), 2)
    return torch.cat((first.new_full((*first.shape[:2], empty), -torch.inf), first, score), 2)


def _put_in_front(joined: Tensor, rows: Tensor, before: int) -> None:
    """Put (B, l, N, width) into the last of the first `before` entries, zeros before them."""
    empty = before - rows.shape[1]
    joined[:, empty:before].copy_(rows)
    if empty > 0:
        joined[:, :empty].zero_()


def _place(
    k: Tensor, v: Tensor, score: Tensor, cu_seqlens: Tensor | None, given: Settings
) -> Place:
    """Where this rank stands; the ranks agree now if they have not done so before."""
    group, lengths = by_name(given.group), given.lengths
    if len(lengths) == 0:
        facts = facts_of(k, v, score, cu_seqlens, given.window, given.needs)
        facts["is_scan"] = given.is_scan
        lengths = [there["_seqlen"] for there in agree(group, facts)]
    return Place(group, dist.get_rank(group), tuple(accumulate(lengths)))


def facts_of(
    k: Tensor,
    v: Tensor,
    score: Tensor,
    cu_seqlens: Tensor | None,
    window: int,
    needs: list[bool],
) -> dict[str, Any]:
    """What ranks have to have in common for the exchange, for `agree`."""
    facts = {
        "key": [k.shape[0], *k.shape[2:], str(k.dtype), k.device.type],
        "value": [*v.shape[2:], str(v.dtype)],
        "attn_bias": [score.shape[1], str(score.dtype)],
        "window_size": window,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.shape[0],
        "requires_grad of key, value and attn_bias": list(needs),
        "_seqlen": k.shape[1],
    }
    if cu_seqlens is None:
        facts["tokens of a rank, without cu_seqlens"] = k.shape[1]
    return facts


def _borders(place: Place, cu_seqlens: Tensor) -> Borders:
    end = place.ends[place.rank]
    token = torch.tensor([place.start, end - 1], dtype=cu_seqlens.dtype, device="cpu")
    token = token.to(cu_seqlens.device, non_blocking=True)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    first, last = cu_seqlens[document.clamp(min=0)].long().unbind()
    return Borders(first, last)


def _as_index(own: Tensor, place: Place) -> Tensor:
    """The keys as int64 (B, N, m), 0 for none.

    Made in the forward, since in the backward other ranks wait. Uninitialised on the last rank, for
    whose keys nobody sends gradients.
    """
    is_last = place.rank == place.size - 1
    return own.new_empty(own.shape, dtype=torch.int64) if is_last else own.clamp(min=0).long()


class _OwnState(NamedTuple):
    """The state of a rank's stretch."""

    at: Tensor  # int32 (B, N, m): its keys, -1 for none
    rows: Tensor  # uint8 (B, N, m, R)
    score: Tensor  # (B, N, m), -inf for no key; in a scan a part of the rows
    found_from: tuple[Tensor, ...]  # has to live until the others are computed


def _own_state(
    place: Place,
    layout: Rows,
    keys: Keys,
    given: Settings,
    borders: Borders | None,
    travel: Beside,
) -> _OwnState:
    """The state of this rank's stretch; uninitialised on the last rank, which sends none.

    It is ready on the stream `travel`, which sends it while the current stream goes on to choose
    keys for the rank's own rows; for a scan, it is ready on the current stream.
    """
    k, v, score = keys
    batch, heads, seqlen = score.shape
    shape = (batch, heads, given.sent)
    at = k.new_empty(shape, dtype=torch.int32)
    rows = k.new_empty((*shape, layout.nbytes), dtype=torch.uint8)
    to_k, to_v, *to_score = layout.parts(rows)
    its_score = to_score[0][..., 0] if given.is_scan else score.new_empty(shape)
    own = _OwnState(at, rows, its_score, ())
    if place.rank == place.size - 1:  # no rank is behind it that would read its rows
        return own
    if seqlen == 0:
        rows.zero_()
        its_score.fill_(-torch.inf)
        at.fill_(-1)
        return own
    if borders is not None:
        token = torch.arange(place.start, place.start + seqlen, device=score.device)
        score = exchange.without(score, token >= borders.last)
    window = min(given.window, given.sent)
    end = select_keys(score, None, window, 1, False, direct=True, cleared=False).end
    seen = at.new_empty((batch,))
    kept = KeptKeys(to_k.transpose(1, 2), to_v.transpose(1, 2), its_score, at, seen)
    travel.follow()
    with nullcontext() if given.is_scan else travel:
        keep_keys(seqlen - 1, end, None, (k, v, score), None, None, given.sent, True, kept)
    return own._replace(found_from=(end, score, seen))


def _last(joined: Tensor, seqlen: int) -> Tensor:
    """The entries of this rank's own keys, a view."""
    dim = _DIM_OF_KEYS[joined.dim()]
    return joined.narrow(dim, joined.shape[dim] - seqlen, seqlen)


_DIM_OF_KEYS = {4: 1, 3: 2}  # of k and v (B, L, N, D), and of score (B, N, L)


def _bounds(
    place: Place, cu_seqlens: Tensor | None, before: int, seqlen: int, like: Tensor
) -> Tensor:
    """Boundaries of documents among `before` keys of the start state and the rank's own.

    The first document includes the start state. int32 (0,), on the device of `like`, where there
    are no documents.
    """
    if cu_seqlens is None:
        return like.new_empty((0,), dtype=torch.int32)
    inside = (cu_seqlens - place.start).clamp(max=seqlen) + before
    inside = inside.masked_fill(cu_seqlens <= place.start, 0)
    bounds = torch.nn.functional.pad(inside, (1, 0)).to(torch.int32)
    bounds[-1:].fill_(before + seqlen)
    return bounds


def _empty_own(
    dk: Tensor, dv: Tensor, dscore: Tensor, own: Tensor, places: Tensor, *settings: Any
) -> Keys:
    given = Settings(*settings)
    needs = given.needs
    batch, joined, heads, head_dim = dk.shape
    seqlen = joined - whole_blocks(given.width)
    return (
        dk.new_empty((batch, seqlen, heads, head_dim) if needs[0] else (0,)),
        dv.new_empty((batch, seqlen, heads, dv.shape[3]) if needs[1] else (0,)),
        dscore.new_empty((batch, heads, seqlen) if needs[2] else (0,)),
    )


def _join_backward(
    dk: Tensor, dv: Tensor, dscore: Tensor, own: Tensor, places: Tensor, *settings: Any
) -> Keys:
    given = Settings(*settings)
    seqlen = dk.shape[1] - whole_blocks(given.width)
    needed = [t for t, need in zip((dk, dv, dscore), given.needs, strict=True) if need]
    grads = _own_gradients(needed, own, places, given, seqlen, may_change=False, after=None)
    return tuple(  # type: ignore[return-value]
        t.new_empty(0) if grad is None else grad
        for t, grad in zip((dk, dv, dscore), grads, strict=True)
    )


def _own_gradients(
    needed: list[Tensor],
    own: Tensor,
    places: Tensor,
    given: Settings,
    seqlen: int,
    may_change: bool,
    after: torch.cuda.Event | None,
) -> list[Tensor | None]:
    """The gradients of this rank's own keys, to which those from the ranks behind are added.

    On a GPU, where `after` is given, gradients travel while attention's backward still does what it
    has left to do: the gradients of queries.

    Args:
        needed: the gradients of the joined k, v and score, those of them that `given` needs.
        own, places: as the forward returned them.
        given: its settings.
        seqlen: S.
        may_change: whether to add to `needed` in place, and to return views of it, rather than
            copy the gradients.
        after: an event behind which the gradients are there; None: they are there behind all that
            the current stream was given.
    """
    group, width = by_name(given.group), given.width
    # Where the stretches end plays no part here.
    place = Place(group, dist.get_rank(group), (0,) * given.ranks)
    layout = _layout(*needed)
    parts = [_of_state(t, seqlen, width) for t in needed]
    beside = Beside(own.device, urgent=True, after=after)
    try:
        with beside:
            if given.is_scan:
                theirs = exchange.scan_back(place, layout, parts, places)
            else:
                theirs = exchange.send_back(place, layout, parts, places[0, 0], given.sent)
        grads = [_last(t, seqlen) for t in needed]
        if not may_change:
            grads = [t.clone(memory_format=torch.contiguous_format) for t in grads]
        elif given.needs[2]:
            grads[-1] = grads[-1].contiguous()  # small; the heads' parts lie apart in memory
        is_first_copied = not may_change or grads[0].dim() == 3
        if seqlen > 0 and place.rank < given.ranks - 1:
            beside.join()
            beside.hand_over(*theirs)
            # The three gradients are added to at the same time, each on a stream of its own.
            third = Beside(own.device)
            if is_first_copied:  # by the current stream
                beside.follow()
            streams: tuple[AbstractContextManager[None], ...] = (beside, third, nullcontext())
            for stream, grad, part in zip(streams, grads, theirs, strict=False):
                with stream:
                    _add(grad, own, part if given.is_scan else _summed(part))
            third.join()
    finally:
        beside.join()
    found = iter(grads)
    return [next(found) if need else None for need in given.needs]


def _of_state(joined: Tensor, seqlen: int, width: int) -> Tensor:
    """(B, N, W, D) or (B, N, W, 1): the gradients of a start state, a view.

    They are those of the last entries in front of the `seqlen` own keys. If the first rank has no
    entries in front, there is no start state.
    """
    dim = _DIM_OF_KEYS[joined.dim()]
    width = min(width, joined.shape[dim] - seqlen)
    state = joined.narrow(dim, joined.shape[dim] - seqlen - width, width)
    return state[..., None] if joined.dim() == 3 else state.transpose(1, 2)


def _summed(part: Tensor) -> Tensor:
    """(ranks, B, N, m, width) summed over the ranks, and rounded once."""
    if part.shape[0] == 1:
        return part[0]
    return part.sum(0, dtype=torch.promote_types(part.dtype, torch.float32)).to(part.dtype)


def _add(grad: Tensor, own: Tensor, rows: Tensor) -> None:
    """Add rows (B, N, m, width) to the gradients of the keys at int64 (B, N, m).

    Each key occurs once. Rows without a key are added to key 0 and are zeros, since nothing attends
    to them; so the order of the additions makes no difference.
    """
    if grad.dim() == 3:
        grad.scatter_add_(2, own, rows[..., 0])
    else:
        index = own[..., None].expand(*own.shape, grad.shape[3])
        grad.transpose(1, 2).scatter_add_(2, index, rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Joined) -> None:
    ctx.settings = inputs[4:]
    *_, bounds, own, places = output
    ctx.mark_non_differentiable(bounds, own, places)
    ctx.save_for_backward(own, places)


def _gradients(ctx: Any, dk: Tensor, dv: Tensor, dscore: Tensor, *_: Any) -> tuple[Any, ...]:
    return _by_operator((dk, dv, dscore), ctx.saved_tensors, ctx.settings)


def _by_operator(
    joined: Keys, of_forward: tuple[Tensor, Tensor], settings: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The gradients of all inputs of the operator; `of_forward`: own and places."""
    needs = Settings(*settings).needs
    found = torch.ops.dmattn.join_start_state_backward(*joined, *of_forward, *settings)
    grads = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return (*grads, *[None] * (1 + len(settings)))


class _Eager(torch.autograd.Function):
    """The operator without torch's dispatcher, and without the copies that an operator has to make.

    The first rank gets its own keys back. No rank copies gradients: those of the joined keys are
    new tensors made by attention, and autograd hands them to nobody else. But a hook on the node of
    attention that keeps them sees what the exchange adds to them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        written: KeysWritten | None,
        k: Tensor,
        v: Tensor,
        score: Tensor,
        cu_seqlens: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, ...]:
        given = Settings(*settings)
        place = _place(k, v, score, cu_seqlens, given)
        # Detached, keys that are returned as they are are no views for autograd, but still notice
        # changes in place.
        keys = k.detach(), v.detach(), score.detach()
        may_alias = not given.is_scan
        found, lists = _join_at(place, keys, cu_seqlens, given, may_alias, choose=True)
        assert lists is not None
        ctx.settings = settings
        ctx.mark_non_differentiable(*found[3:], *lists)
        # Not by save_for_backward: tensors that hooks for saved tensors restore would be there only
        # after the event that the second stream waits for. Nobody differentiates these or changes
        # them.
        ctx.own_and_places = found[4], found[5]
        ctx.set_materialize_grads(False)  # else zeros are made for the places, which nobody uses
        ctx.kinds = [(t.shape, t.dtype, t.device) for t in found[:3]]
        ctx.seqlen, ctx.written = k.shape[1], written
        return (*found, *lists)

    @staticmethod
    def backward(
        ctx: Any, dk: Tensor | None, dv: Tensor | None, dscore: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        given, found = Settings(*ctx.settings), (dk, dv, dscore)
        # With a graph of the backward, or batches of gradients, the operator does what is needed,
        # or raises an error.
        goes_direct = (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and is_direct(*found)
            and not any(grad is not None and is_batch(grad) for grad in found)
        )
        joined = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device), need in zip(
                found, ctx.kinds, given.needs, strict=True
            )
            if need or not goes_direct
        ]
        if not goes_direct:
            missing = whole_blocks(given.width) + ctx.seqlen - joined[0].shape[1]
            dk, dv, dscore = (_with_zeros_in_front(t, missing) for t in joined)
            return None, *_by_operator((dk, dv, dscore), ctx.own_and_places, ctx.settings)
        written = ctx.written
        after = written.event if written is not None and written.covers(joined) else None
        own, places = ctx.own_and_places
        grads = _own_gradients(joined, own, places, given, ctx.seqlen, True, after)
        return (None, *grads, *[None] * (1 + len(ctx.settings)))


def _with_zeros_in_front(joined: Tensor, count: int) -> Tensor:
    """Gradients with zeros in front, for `count` more keys that nothing attends to."""
    dim = _DIM_OF_KEYS[joined.dim()]
    shape = [count if i == dim else size for i, size in enumerate(joined.shape)]
    return torch.cat((joined.new_zeros(shape), joined), dim) if count > 0 else joined


def _no_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError("context parallel attention has first derivatives only")


register(Operator("dmattn::join_start_state", _JOIN, _join, _empty_joined))
register(Operator("dmattn::join_start_state_backward", _BACKWARD, _join_backward, _empty_own))
torch.library.register_autograd(
    "dmattn::join_start_state", _gradients, setup_context=_setup_context
)
torch.library.register_autograd("dmattn::join_start_state_backward", _no_double_backward)
