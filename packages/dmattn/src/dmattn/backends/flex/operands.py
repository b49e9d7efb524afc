"""From a problem to FlexAttention's two functions, score_mod and mask_mod.

FlexAttention has one dense layout, (B, H, Sq, D) for all rows and (B, HK, Sk, D) for all keys;
packed sequences are one such problem of batch 1. The keys that a row may see are an interval, from
`first` to `last`: causality limits `last`, packing limits both. If row i stands at the position of
key i, `last` is the row index itself, and no tensor is read for it; nor for a sliding window, which
is a number. Everything else is a tensor that the two functions index by batch, head, row and key.

Dimensions of size 1 are dropped, so that the gradient of a bias has no more entries than the bias.
A string with a letter for each remaining dimension says how a tensor is indexed: b batch, h query
head, g key head (of a group of query heads), q row, k key, c key counted from the first key of the
row's sequence.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmattn.backends.flex.kept import Kept, Sources
from dmattn.problem import Packing, Problem, is_per_key, lse_dtype


class Spec(NamedTuple):
    """What is fixed in one compiled kernel in addition to shapes and dtypes."""

    softmax_scale: float
    softcap: float
    group: int  # number of query heads per key head
    limit: float  # scores of larger size are reduced, see `score`
    first: bool  # whether `Operands.first` is given
    last: bool  # whether `Operands.last` is given
    diagonal: bool  # whether the last key of a row is the one of its own index
    window: int  # how many keys, up to its last one, a row may see; 0 for all
    end: str | None  # the letters of the dimensions; None if there is no such tensor
    mask: str | None
    bias: str | None
    shift: bool  # whether `Operands.shift` is given
    head_dim: int
    dtype: torch.dtype
    needs: tuple[bool, bool]  # whether gradients are needed: of query, key or value; of the bias


class Operands(NamedTuple):
    """The tensors that score_mod and mask_mod read; None where the spec has none."""

    first: Tensor | None = None  # int32 (Sq,): the first key of the sequence of a row
    # int32 (Sq,): the last key that a row may see, which under causality is its position. None if
    # that is the index of the row.
    last: Tensor | None = None
    room: Tensor | None = None  # int32 (Sq,): the largest column c of a row's mask or bias
    end: Tensor | None = None  # int32: a key is kept by rows at positions before this number
    mask: Tensor | None = None  # bool
    bias: Tensor | None = None  # in the dtype of lse
    shift: Tensor | None = None  # (B, H, Sq), in the dtype of lse: subtracted from all scores


class Arranged(NamedTuple):
    """A problem as FlexAttention takes it."""

    q: Tensor  # (B, H, Sq, D), a view
    k: Tensor  # (B, HK, Sk, D), a view
    v: Tensor  # (B, HK, Sk, D), a view
    # As in `Operands`, but mask and bias with four dimensions ({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}),
    # and end with three ({B|1}, {H|HK|1}, Sk).
    mask: Tensor | None
    bias: Tensor | None
    end: Tensor | None
    first: Tensor | None
    last: Tensor | None
    room: Tensor | None
    is_causal: bool
    # Causal, and row i stands at the position of key i: its last key is its own index, and `last`
    # is None.
    diagonal: bool
    window: int  # as in `Spec`
    sources: Sources  # the tensors of the caller that `first`, `last` and `end` are made of
    packed_rows: tuple[bool, bool]  # whether mask and bias have columns c, counted for each row

    @property
    def last_keys(self) -> Tensor | None:
        """`last` as a tensor also if `diagonal`; None if there is no limit."""
        if not self.diagonal:
            return self.last
        return torch.arange(self.q.shape[2], dtype=torch.int32, device=self.q.device)


def arrange(problem: Problem, can_be_told: bool = True) -> Arranged:
    """A checked problem as FlexAttention takes it.

    Args:
        problem: with at least one row and one key.
        can_be_told: as in `Sources`, for the tensors of the problem.
    """
    q, k, v, mask, bias = problem.q, problem.k, problem.v, problem.mask, problem.bias
    first = last = room = end = None
    own = (False, False)
    sources, window = Sources(), 0
    diagonal = problem.is_causal and rows_are_keys(problem)
    if problem.packing is not None:
        own = (mask is not None and not is_per_key(mask), bias is not None and not is_per_key(bias))
        sources = Sources(problem.packing[:2], can_be_told)
        first, last = _packed_limits(problem, problem.packing, sources)
        if any(own):
            room = torch.full_like(first, max(problem.packing.max_seqlen_k - 1, 0))
        q, k, v = q[None], k[None], v[None]
        mask, bias = (None if t is None else _four_dimensions(t) for t in (mask, bias))
    elif problem.is_causal and not diagonal:
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        last = torch.arange(seqlen_k - seqlen_q, seqlen_k, dtype=torch.int32, device=q.device)
    if problem.key_lists is not None and problem.is_causal and problem.sliding > 0:
        window = problem.sliding
    elif problem.key_lists is not None and problem.is_causal:
        end = problem.key_lists.end
        sources = Sources((end,), can_be_told)
    elif problem.key_lists is not None:  # not causal: all rows keep the same keys
        mask = (problem.key_lists.end > 0)[:, :, None]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if mask is None else _without_repeats(mask)
    return Arranged(
        *(q, k, v, mask, bias, end, first, last, room),
        *(problem.is_causal, diagonal, window, sources, own),
    )


def rows_are_keys(problem: Problem) -> bool:
    """Whether row i stands at the position of key i, in the same sequence.

    For packed sequences that needs the same boundaries for rows and keys, as one tensor or at the
    same address: the host does not read the values.
    """
    if problem.packing is None:
        return problem.q.shape[1] == problem.k.shape[1]
    a, b = problem.packing[:2]
    same = a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
    return same and a.shape == b.shape and problem.q.shape[0] == problem.k.shape[0]


def _without_repeats(mask: Tensor) -> Tensor:
    """A mask with size 1 in the dimensions in which it was expanded."""
    for dim in range(mask.dim()):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _four_dimensions(t: Tensor) -> Tensor:
    """A packed mask or bias in four dimensions: with a batch of 1, and one row if it is per key."""
    return t[None, :, None] if is_per_key(t) else t[None]


_LIMITS = Kept(8)


def _packed_limits(
    problem: Problem, packing: Packing, sources: Sources
) -> tuple[Tensor, Tensor | None]:
    """`first` and `last` of each row, from boundaries that stay on the device.

    Wrong boundaries give wrong intervals, but FlexAttention reads no keys outside the tensors.
    """
    rows, causal, diagonal = problem.q.shape[0], problem.is_causal, rows_are_keys(problem)

    def make() -> tuple[Tensor, Tensor | None]:
        stops_q, stops_k = packing.cu_seqlens_q[1:], packing.cu_seqlens_k[1:]
        row = torch.arange(rows, dtype=torch.int32, device=stops_q.device)
        if len(stops_q) == 0:
            return row + 1, None if causal and diagonal else row
        sequence = torch.searchsorted(stops_q, row, right=True).clamp(max=len(stops_q) - 1)
        first = packing.cu_seqlens_k[:-1][sequence]
        if causal and diagonal:
            return first, None
        last = stops_k[sequence] - 1
        if causal:
            last = torch.minimum(last, last - (stops_q[sequence] - 1 - row))
        return first, last

    found: tuple[Tensor, Tensor | None] = _LIMITS.get(
        (rows, causal, diagonal), sources, problem.q.device, make
    )
    return found


def operands(
    problem: Problem, given: Arranged, shift: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Spec, Operands]:
    """The tensors to index, without their dimensions of size 1, and how they are indexed.

    Args:
        problem: for its settings.
        given: the problem from `arrange`.
        shift: (B, H, Sq), to be subtracted from the scores; or None.
        needs: as in `Spec`. The bias is the only one of the tensors that may require a gradient,
            which `bias_gradient` converts.
    """
    heads, heads_k = given.q.shape[1], given.k.shape[1]
    found: dict[str, tuple[str | None, Tensor | None]] = {}
    columns = dict(zip(("mask", "bias"), given.packed_rows, strict=True))
    for name in ("end", "mask", "bias"):
        t: Tensor | None = getattr(given, name)
        found[name] = (None, None)
        if t is not None:
            letters = "bhk" if name == "end" else "bhqc" if columns.get(name) else "bhqk"
            found[name] = _squeezed(t, letters, heads, heads_k)
    dtype = lse_dtype(given.q.dtype)
    bias = found["bias"][1]
    spec = Spec(
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        group=heads // heads_k,
        limit=torch.finfo(dtype).max / 4,
        first=given.first is not None,
        last=given.last is not None,
        diagonal=given.diagonal,
        window=given.window,
        end=found["end"][0],
        mask=found["mask"][0],
        bias=found["bias"][0],
        shift=shift is not None,
        head_dim=given.q.shape[-1],
        dtype=given.q.dtype,
        needs=needs,
    )
    return spec, Operands(
        given.first,
        given.last,
        given.room if any(given.packed_rows) else None,
        found["end"][1],
        found["mask"][1],
        # The bias has to be a leaf of autograd: at least up to torch 2.13, torch.compile loses the
        # gradients of other tensors that a score_mod reads.
        None if bias is None else bias.detach().to(dtype).requires_grad_(needs[1]),
        shift,
    )


def _squeezed(t: Tensor, letters: str, heads: int, heads_k: int) -> tuple[str, Tensor]:
    """t without its dimensions of size 1, contiguous, and the letters of the others."""
    if t.shape[1] == heads_k and heads_k != heads:
        letters = letters.replace("h", "g")
    kept = [i for i, size in enumerate(t.shape) if size > 1]
    if not kept:  # at least one index is needed, also for the gradient to be summed
        return "h", t.reshape(1).expand(heads).contiguous()
    shape = [t.shape[i] for i in kept]
    return "".join(letters[i] for i in kept), t.reshape(shape).contiguous()


def bias_gradient(found: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of a bias of this shape, from that of `Operands.bias`."""
    return (found.sum() if shape.numel() == 1 else found).reshape(shape)


At = tuple[Tensor, Tensor, Tensor, Tensor]  # batch, query head, row and key of a score


def score(spec: Spec, tensors: Operands, x: Tensor, at: At) -> Tensor:
    """The logit of a scaled dot product x, less the shift if there is one.

    FlexAttention multiplies logits by log2(e), by which the largest numbers would overflow. So, if
    there is a bias, the part of a logit beyond +-`limit` is divided by 4. That keeps the order of
    logits, and `actual` reverts it.
    """
    x = x if x.dtype == torch.float64 else x.float()
    if spec.softcap > 0:
        x = torch.tanh(x / spec.softcap) * spec.softcap
    if tensors.bias is not None:
        x = x + _entry(tensors.bias, spec.bias, spec, tensors, at)
    if tensors.shift is not None:
        b, h, row, _ = at
        x = x - tensors.shift[b, h, row]
        # A score this far below the lse has weight 0. Without the bound, the lse that FlexAttention
        # computes for a row that has almost nothing but its sink would be so low, and rounded by so
        # much, that 2 to the power of the error could overflow.
        lowest = -1000.0 if x.dtype == torch.float64 else -200.0
        x = torch.where(x == -math.inf, x, x.clamp(min=lowest))
    if tensors.bias is not None:
        near = x.clamp(-spec.limit, spec.limit) * 0.75 + x * 0.25
        x = torch.where(x.abs() <= spec.limit, x, near)
    return x


def changes_scores(spec: Spec) -> bool:
    """Whether `score` is anything but the scaled dot product."""
    return spec.softcap > 0 or spec.bias is not None or spec.shift


def actual(lse: Tensor, limit: float) -> Tensor:
    """The actual lse of rows, from one of logits that `score` reduced beyond `limit`.

    Limited to the largest finite number. -inf, the lse of a row that keeps nothing, becomes 0.
    """
    far = (lse - lse.clamp(-limit, limit) * 0.75) * 4.0
    most = torch.finfo(lse.dtype).max
    found = torch.where(lse.abs() <= limit, lse, far.clamp(-most, most))
    return found.masked_fill(lse == -torch.inf, 0.0)


def keep(spec: Spec, tensors: Operands, at: At) -> Tensor:
    """Whether a row keeps a key."""
    _, _, row, key = at
    kept = key >= 0
    last = row if spec.diagonal else None if tensors.last is None else tensors.last[row]
    if last is not None:
        kept = key <= last
    if spec.window > 0:
        assert last is not None
        kept = kept & (last - key < spec.window)
    if tensors.first is not None:
        kept = kept & (key >= tensors.first[row])
    if tensors.end is not None:
        assert last is not None  # there are intervals only under causality
        kept = kept & (last < _entry(tensors.end, spec.end, spec, tensors, at))
    if tensors.mask is not None:
        kept = kept & _entry(tensors.mask, spec.mask, spec, tensors, at)
    return kept


def _entry(t: Tensor, letters: str | None, spec: Spec, tensors: Operands, at: At) -> Tensor:
    """The entry, for the score at `at`, of a tensor whose dimensions have these letters."""
    b, h, row, key = at
    index = []
    for letter in letters or "":
        if letter == "b":
            index.append(b)
        elif letter == "h":
            index.append(h)
        elif letter == "g":
            index.append(h // spec.group)
        elif letter == "q":
            index.append(row)
        elif letter == "k":
            index.append(key)
        else:
            index.append(_column(tensors, row, key))
    return t[tuple(index)]


def _column(tensors: Operands, row: Tensor, key: Tensor) -> Tensor:
    """The column c of a key, counted from the first key of the row's sequence.

    Clamped, so that it is in bounds for keys of other sequences as well.
    """
    assert tensors.first is not None and tensors.room is not None
    return torch.minimum((key - tensors.first[row]).clamp(min=0), tensors.room[row])


def padded_head_dim(t: Tensor, head_dim: int) -> Tensor:
    """t with zeros appended up to this head_dim."""
    return t if t.shape[-1] == head_dim else pad(t, (0, head_dim - t.shape[-1]))
