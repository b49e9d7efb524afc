"""How the w best keys of each rank's stretch reach the ranks behind it, and their gradients back.

The state of a stretch is its `window_size` best keys per head, in order of position, and the state
of two neighbouring stretches is the best of both their states: `dmattn.KeyState`, here without its
gradients, as rows of bytes. Rank r needs the state of ranks 0..r-1, which is found in one of two
ways:

* gather: every rank gets the states of all others and takes the best of those before it. This is
  one collective; each rank receives P - 1 states, but of two ranks only the second receives one.
* scan: in round t, rank r sends to rank r + 2^t the state of the 2^t ranks that end with itself.
  After ceil(log2 P) rounds each rank has the state of all ranks before it; it sends one state a
  round.

The backward goes the same way in reverse. All ranks enter the same collectives in the same order,
also those that have nothing to send, and rank 0, which needs no state. Letters: P ranks, B batch,
N heads, S tokens of this rank, m keys of a state as it is sent, W keys of a start state, R bytes of
a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dmattn.distributed import groups
from dmattn.distributed.beside import Beside
from dmattn.distributed.rows import Rows, take
from dmattn.ops.selection import select_keys


class Place(NamedTuple):
    """A rank in its group, and where the stretches of all ranks end in the sequence."""

    group: dist.ProcessGroup
    rank: int
    ends: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ends)

    @property
    def start(self) -> int:
        """Where the stretch of this rank starts."""
        return self.ends[self.rank - 1] if self.rank > 0 else 0


class Borders(NamedTuple):
    """Where the documents at both ends of this rank's stretch begin; int64 (), on the device."""

    first: Tensor  # the document of the first token
    last: Tensor  # the document of the last token


def rounds(size: int) -> int:
    """How many rounds the scan over `size` ranks takes."""
    return (size - 1).bit_length()


def best(score: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The places of the best of some keys; of equal scores the later one is better.

    Args:
        score: floating (B, N, L), -inf for keys that cannot be chosen. No gradient.
        window: how many to choose.

    Returns:
        int64 (B, N, min(window, L)): the places in ascending order, then 0 in entries without one;
        and bool, which entries are places of keys.
    """
    count = min(window, score.shape[2])
    lists = select_keys(score, None, window, 1, False, direct=True)
    known = torch.arange(count, device=score.device) < lists.count[:, :, 0, None]
    return lists.idx[:, :, 0, :count].long(), known


def best_scores(score: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that `best` finds: int64 (B, N, l) places to read from, 0 for none; the scores, -inf
    for none; and the places again, L for none.
    """
    at, known = best(score, window)
    return at, score.gather(2, at).where(known, -torch.inf), at.where(known, score.shape[2])


def without(score: Tensor, is_visible: Tensor | bool) -> Tensor:
    """The scores, or -inf where they are not visible."""
    if isinstance(is_visible, bool):
        return score if is_visible else torch.full_like(score, -torch.inf)
    return score.where(is_visible, -torch.inf)


# --- gather ---------------------------------------------------------------------------------------


class Sending(NamedTuple):
    """A collective on its way. The tensors that it reads and writes have to live until `wait`."""

    received: Tensor
    sent: Tensor
    end: torch.cuda.Event | None  # None on the CPU, where it has ended

    def wait(self) -> Tensor:
        """What was received. The current stream of the GPU waits, the host does not."""
        if self.end is not None:
            torch.cuda.current_stream(self.received.device).wait_event(self.end)
        return self.received


# With async_op=True a collective would run on a stream of the process group, and wait there for
# kernels of many thread blocks. So it runs on the stream `beside`, which has priority.


def start_gather(place: Place, own: Tensor, beside: Beside) -> Sending:
    """Send this rank's part of a state, contiguous (B, N, m, ...), to the ranks behind it.

    `own` is ready on the stream `beside`. What is received has a first dimension of ranks, in
    order: at least those before this one.
    """
    if place.size == 2:
        # No rank is behind the second one, and a single send takes less time: 0.021 ms for the
        # states of 2048 keys of 4 heads, where gathering them takes 0.037 (H200s, NVLink).
        before, count = own.new_empty((place.rank, *own.shape)), own.numel()
        received, sent = before.view(-1), own.view(-1)[: (1 - place.rank) * count]
        beside.follow()  # earlier work may still use the memory of `received`
        with beside:
            dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=[received.numel(), 0],
                input_split_sizes=[0, sent.numel()],
                group=place.group,
            )
        return Sending(before, own, beside.event())
    everybody = own.new_empty((place.size, *own.shape))
    beside.follow()
    with beside:
        groups.all_gather(everybody.view(-1), own.view(-1), group=place.group)
    return Sending(everybody, own, beside.event())


def takes_all(place: Place, width: int, count: int) -> bool:
    """Whether the states before this rank are no more than a start state has room for."""
    return place.rank * count <= width


def choose_gathered(
    place: Place, everybody: Tensor, width: int, borders: Borders | None
) -> tuple[Tensor, Tensor | None]:
    """Which rows are the start state of this rank, by the scores of all ranks, (P, B, N, m).

    Returns:
        The scores (B, N, l) of its l <= W rows, -inf where there is no key; and int64 (B, N, l),
        the place of each row among the rank * m rows of the ranks before, rank * m for none. None
        instead of the places if all of these rows are taken.
    """
    rank, count = place.rank, everybody.shape[3]
    score = _one_after_the_other(everybody[:rank])
    if borders is not None:
        ends = torch.tensor(place.ends[:rank], device="cpu").to(score.device, non_blocking=True)
        score = without(score, (ends > borders.first).repeat_interleave(count))
    if takes_all(place, width, count):
        return score, None
    _, chosen, places = best_scores(score, width)
    return chosen, places


def take_gathered(place: Place, everybody: Tensor, places: Tensor | None) -> Tensor:
    """The rows of the start state, uint8 (B, N, l, R), out of those of all ranks, (P, B, N, m, R).

    `places`: as `choose_gathered` returns them. Entries without a key get the row of some key.
    """
    rows = _one_after_the_other(everybody[: place.rank])
    return rows if places is None else take(rows, places.clamp(max=rows.shape[2] - 1))


def _one_after_the_other(everybody: Tensor) -> Tensor:
    """(ranks, B, N, m, ...) as (B, N, ranks * m, ...)."""
    return everybody.movedim(0, 2).flatten(2, 3)


def pick(rows: Tensor, score: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of (B, N, L) rows by score (B, N, L): rows, scores, and int64 places, L for none."""
    at, chosen, places = best_scores(score, width)
    return take(rows, at), chosen, places


def send_back(
    place: Place, layout: Rows, parts: Sequence[Tensor], places: Tensor, count: int
) -> list[Tensor]:
    """Send the gradients of a start state to the ranks whose keys it holds.

    Args:
        place: this rank.
        layout: of the gradients' rows.
        parts: the gradients of the start state, each (B, N, W, width).
        places: int64 (B, N, W) as `choose_gathered` returns them; not read where it returns None.
        count: m.

    Returns:
        The gradients that each later rank has sent to this one, each part
        (P - 1 - rank, B, N, m, width).
    """
    rank, (batch, heads, width) = place.rank, parts[0].shape[:3]
    if takes_all(place, width, count):
        back = parts[0].new_empty((rank, batch, heads, count, layout.nbytes), dtype=torch.uint8)
        first = width - rank * count
        for number in range(rank):
            begin = first + number * count
            layout.fill(back[number], [part[:, :, begin : begin + count] for part in parts])
    else:
        rows = scattered(_with_zeros(layout.pack(parts)), places, rank * count)
        by_head = rows.view(batch, heads, rank, count, layout.nbytes)
        back = by_head.permute(2, 0, 1, 3, 4).contiguous()
    later = place.size - 1 - rank
    received = back.new_empty((later, batch, heads, count, layout.nbytes))
    one = batch * heads * count * layout.nbytes
    dist.all_to_all_single(
        received.view(-1),
        back.view(-1),
        output_split_sizes=[0] * (place.size - later) + [one] * later,
        input_split_sizes=[one] * rank + [0] * (place.size - rank),
        group=place.group,
    )
    return layout.parts(received)


def scattered(drows: Tensor, places: Tensor, count: int) -> Tensor:
    """Gradients of chosen rows as gradients of all rows among which they were chosen.

    Args:
        drows: uint8 (B, N, W + 1, R), the last row zeros.
        places: int64 (B, N, W), where the rows were chosen; count for none.
        count: L.

    Returns:
        uint8 (B, N, L, R).
    """
    batch, heads, width = places.shape
    came_to = places.new_full((batch, heads, count + 1), width)
    number = torch.arange(width, device=places.device).expand(batch, heads, width)
    came_to.scatter_(2, places, number)
    return take(drows, came_to[..., :count])


# --- scan -----------------------------------------------------------------------------------------


def shift(place: Place, rows: Tensor, distance: int) -> Tensor:
    """Rows of the rank that is `distance` before this one; zeros where there is none."""
    to, by = place.rank + distance, place.rank - distance
    sends, receives = 0 <= to < place.size, 0 <= by < place.size
    received = torch.empty_like(rows) if receives else torch.zeros_like(rows)
    flat, n = rows.reshape(-1), rows.numel()
    dist.all_to_all_single(
        received.view(-1) if receives else flat.new_empty(0),
        flat if sends else flat[:0],
        output_split_sizes=[n if rank == by else 0 for rank in range(place.size)],
        input_split_sizes=[n if rank == to else 0 for rank in range(place.size)],
        group=place.group,
    )
    return received


def scan(
    place: Place, layout: Rows, own: Tensor, borders: Borders | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The start state of this rank, in rounds.

    Args:
        place: this rank.
        layout: of the rows; the score is their last part.
        own: uint8 (B, N, W, R), the state of this rank's stretch.
        borders: of documents; None where there is only one.

    Returns:
        The start state of this rank, uint8 (B, N, W, R); its score (B, N, W), -inf where there is
        no key; and int64 (rounds, 2, B, N, W): for each round, the places of the rows of the start
        state, and of the state up to this rank, among the 2 W rows that they were chosen from.
    """
    width = own.shape[2]
    upto, before = own, None
    before_score = torch.full_like(_score(layout, own), -torch.inf)
    upto_score = _score(layout, own)
    all_places = []
    for number in range(rounds(place.size)):
        distance = 2**number
        theirs = shift(place, upto, distance)
        by = place.rank - distance
        border = place.ends[by] if by >= 0 else 0
        first, last = (None, None) if borders is None else borders
        seen, theirs_upto = (
            _seen(_score(layout, theirs), border, document) for document in (first, last)
        )
        old = own if before is None else before
        before, before_score, places = pick(
            torch.cat((theirs, old), 2), torch.cat((seen, before_score), 2), width
        )
        upto, upto_score, upto_places = pick(
            torch.cat((theirs, upto), 2), torch.cat((theirs_upto, upto_score), 2), width
        )
        _score(layout, upto).copy_(upto_score)
        all_places += [places, upto_places]
    assert before is not None
    return before, before_score, torch.stack(all_places).view(-1, 2, *own.shape[:3])


def scan_back(
    place: Place, layout: Rows, parts: Sequence[Tensor], all_places: Tensor
) -> list[Tensor]:
    """The gradients of this rank's own state, each part (B, N, W, width).

    Args:
        place: this rank.
        layout: of the gradients' rows.
        parts: the gradients of the start state, each (B, N, W, width).
        all_places: as `scan` returns them.
    """
    before, width = layout.pack(parts), parts[0].shape[2]
    upto = torch.zeros_like(before)
    for number in reversed(range(rounds(place.size))):
        places = all_places[number]
        parts_before = layout.parts(scattered(_with_zeros(before), places[0], 2 * width))
        parts_upto = layout.parts(scattered(_with_zeros(upto), places[1], 2 * width))
        theirs = [
            _sum(a[:, :, :width], b[:, :, :width])
            for a, b in zip(parts_before, parts_upto, strict=True)
        ]
        came = layout.parts(shift(place, layout.pack(theirs), -(2**number)))
        mine = [_sum(a[:, :, width:], b) for a, b in zip(parts_upto, came, strict=True)]
        before = layout.pack([part[:, :, width:] for part in parts_before])
        upto = layout.pack(mine)
    return layout.parts(upto)


def _seen(score: Tensor, border: int, document: Tensor | None) -> Tensor:
    """Scores of keys that lie before `border`, as tokens of a document behind it see them.

    All are -inf where the document begins at the border or behind it.

    Args:
        score: (B, N, L).
        border: the first token behind the keys; 0 where there are none.
        document: int64 (), where the document begins; None: where the sequence begins.
    """
    if border == 0:
        return without(score, False)
    return score if document is None else without(score, document < border)


def _score(layout: Rows, rows: Tensor) -> Tensor:
    """The scores (B, N, L) in some rows, a view."""
    return layout.parts(rows)[-1][..., 0]


def _with_zeros(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, 1))


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Added in float32 or wider, not rounded."""
    return _wide(a) + _wide(b)
