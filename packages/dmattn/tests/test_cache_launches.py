"""DynamicMaskCache and states: few operations per call, and drafts without a copy of the cache.

Every operation counted here launches at least one kernel on a GPU, where launching takes nearly all
the time of small calls.
"""

import collections
import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import DynamicMaskCache, KeyState, flash_dmattn_func
from dmattn.cache_drafts import SPARE_ROWS, Draft

B, HK, D, W = 2, 2, 8, 40
NAMES = ("k", "v", "score", "position", "seen")

# Operators that make views or allocate memory, and launch nothing.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "as_strided", "expand", "transpose", "permute", "slice"),
        *("select", "squeeze", "unsqueeze", "detach", "alias", "split", "unbind"),
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
        "promote_types",
        "arange",  # made once for all calls on a stream, except under a dispatch mode
    )
)


class Launches(TorchDispatchMode):
    """Counts the operators that launch something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if op._schema.name not in _FREE:
            self.names[op._schema.name.partition("::")[2]] += 1
        return op(*args, **(kwargs or {}))


def count(call: Callable[[], Any]) -> collections.Counter[str]:
    call()  # the first call also makes what all calls share
    with Launches() as launches:
        call()
    return launches.names


def tokens(t: int, nheads: int = 4, kind: str = "tied", batch: int = B) -> list[Tensor]:
    """query, key, value (B, t, heads, D) and score (B, HK, t)."""
    q = torch.randn(batch, t, nheads, D)
    k, v = torch.randn(2, batch, t, HK, D).unbind()
    score = torch.randn(batch, HK, t)
    if kind == "tied":
        score = torch.round(score * 2)
    elif kind == "constant":
        score = torch.zeros_like(score)
    elif kind == "holes":
        score = torch.round(score * 2).masked_fill(torch.rand(score.shape) < 0.2, -math.inf)
        score[torch.rand(score.shape) < 0.2] = math.nan
    return [q, k, v, score]


def make(window: int = W, **options: Any) -> DynamicMaskCache:
    return DynamicMaskCache(B, window, HK, D, torch.float32, "cpu", **options)


def content(cache: DynamicMaskCache) -> list[Tensor]:
    order = cache.position.argsort(-1)
    rows = [t.take_along_dim(order.mT[..., None], 1) for t in (cache.k, cache.v)]
    return [*rows, cache.score.gather(-1, order), cache.position.gather(-1, order), cache.seen]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# --- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "tied", "constant", "holes"])
@pytest.mark.parametrize(
    ("before", "most", "nheads"),
    [(200, 8, 8), (0, 5, 2), (37, 6, 12), (60, 1, 8), (41, 12, 6), (90, SPARE_ROWS, 14)],
)
def test_a_draft_behind_the_entries_is_the_sequence_that_goes_on(
    kind: str, before: int, most: int, nheads: int
) -> None:
    torch.manual_seed(0)
    cache = make()
    cache.append_and_attend(*tokens(before, nheads, kind))
    for t in (most, max(1, most - 3), most):
        cache.append_and_attend(*tokens(2, nheads, kind))  # leaves keys in no order
        held, draft = cache.clone(), tokens(t, nheads, kind)
        out = cache.peek(*draft, softcap=2.0)
        assert isinstance(cache._draft, Draft) and cache._draft.rows.k._base is cache.k._base
        assert out.is_contiguous()
        assert_equal(content(cache), content(held))
        steps = [
            [x[:, i : i + 1] for x in draft[:3]] + [draft[3][..., i : i + 1]] for i in range(t)
        ]
        want = torch.cat([held.append_and_attend(*step, softcap=2.0) for step in steps], 1)
        torch.testing.assert_close(out, want, rtol=0, atol=3e-6)
        twin, n = cache.clone(), torch.tensor([t // 2, t])
        cache.commit(n)
        twin.append_and_attend(*draft, active=torch.arange(t) < n[:, None])
        assert_equal(content(cache), content(twin))


def test_a_draft_without_spare_rows_is_copied() -> None:
    torch.manual_seed(0)
    cache = make()
    cache.append_and_attend(*tokens(100))
    saved = io.BytesIO()
    torch.save(cache, saved)
    saved.seek(0)
    draft = tokens(7)
    want = cache.peek(*draft)
    for other in (torch.load(saved, weights_only=True), copy.deepcopy(cache), cache.clone()):
        assert torch.equal(other.peek(*draft), want)
        assert isinstance(other._draft, Draft) and other._draft.rows.spare == SPARE_ROWS
    # The stride between slots is as before, but there are no spare rows behind the last slot.
    size = 1 + sum((n - 1) * m for n, m in zip(cache.k.shape, cache.k.stride(), strict=True))
    without = cache.k.new_zeros(size).as_strided(cache.k.shape, cache.k.stride()).copy_(cache.k)
    for k in (without, cache.k.contiguous()):
        cache.k = k
        torch.testing.assert_close(cache.peek(*draft), want, rtol=0, atol=3e-6)
        assert not isinstance(cache._draft, Draft)
    few = make(window=5)
    few.append_and_attend(*tokens(9))
    assert few.peek(*tokens(5)).shape == (B, 5, 4, D)
    few.commit(torch.tensor([5, 4]))
    assert few.seen.tolist() == [14, 13]


@pytest.mark.parametrize("spare_rows", [0, 5, SPARE_ROWS])
def test_rows_for_drafts_are_as_many_as_asked_for(spare_rows: int) -> None:
    torch.manual_seed(0)
    cache = make(spare_rows=spare_rows)
    twin = make()
    before, draft = tokens(50), tokens(7)
    for one in (cache, twin):
        one.append_and_attend(*before)
    found = [cache, cache.clone(), copy.deepcopy(cache)]
    found[1].reorder(torch.tensor([1, 0]))
    found[1].reorder(torch.tensor([1, 0]))
    for one in found:
        rows = one.window_size + spare_rows
        assert one.k.untyped_storage().nbytes() == B * rows * one.k[0, 0].nbytes
        out = one.peek(*draft)
        torch.testing.assert_close(out, twin.peek(*draft), rtol=0, atol=3e-6)
        assert isinstance(one._draft, Draft) == (spare_rows >= 7)
        one.commit(torch.tensor([7, 3]))
        assert one.seen.tolist() == [57, 53]


def test_a_draft_as_long_as_the_cache() -> None:
    """Every entry leaves, and tokens of the draft push one another out."""
    torch.manual_seed(0)
    cache = make(window=3)
    cache.append_and_attend(*tokens(5))
    in_turn, draft = cache.clone(), tokens(9)
    draft[3][:] = torch.arange(9)
    out = cache.peek(*draft)
    assert isinstance(cache._draft, Draft)
    for t in range(9):
        step = [x[:, t : t + 1] for x in draft[:3]] + [draft[3][..., t : t + 1]]
        want = in_turn.append_and_attend(*step)
        torch.testing.assert_close(out[:, t : t + 1], want, rtol=0, atol=3e-6)
    cache.commit(torch.tensor([9, 9]))
    for name in NAMES:
        assert torch.equal(getattr(cache, name), getattr(in_turn, name)), name


def test_a_draft_that_fails_leaves_none_to_commit() -> None:
    """The draft before it cannot be committed either: it has been overwritten."""
    cache = make()
    cache.append_and_attend(*tokens(100))
    before = cache.clone()
    cache.peek(*tokens(4))
    with pytest.raises(ValueError, match="query"):  # refused: nothing has happened yet
        cache.peek(*tokens(4, 3))
    cache._room_for = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        cache.peek(*tokens(4))
    del cache._room_for
    with pytest.raises(ValueError, match="without a draft"):
        cache.commit(torch.tensor([1, 1]))
    assert_equal(content(cache), content(before))


def test_numbers_that_no_cache_holds_do_not_lead_outside() -> None:
    cache = make()
    cache.append_and_attend(*tokens(100))
    cache.position.copy_(torch.randint(-(2**31), 2**31, cache.position.shape))
    assert torch.isfinite(cache.peek(*tokens(6))).all()


# --- chunks ---------------------------------------------------------------------------------------


def test_keys_lie_in_order_where_the_cache_says_so() -> None:
    torch.manual_seed(0)
    cache, seen = make(), collections.Counter[bool]()
    one, pad = torch.tensor([1]), torch.rand(B, 70) < 0.8

    def on(t: int, slot: bool = False) -> list[Tensor]:
        return tokens(t, kind="holes", batch=1 if slot else B)

    for call in (
        lambda: cache.append_and_attend(*on(20)),
        lambda: cache.append_and_attend(*on(70), active=pad),
        lambda: cache.append_and_attend(*on(30, True), slots=one),
        lambda: cache.reset(one),
        lambda: cache.prefill(*on(25, True)[1:], slots=one),
        lambda: cache.reorder(torch.tensor([1, 0])),
        lambda: cache.prefill(*on(70)[1:], attn_mask=pad),
        lambda: cache.prefill(*on(15)[1:], lengths=torch.tensor([3, 15])),
        lambda: cache.append_and_attend(*on(1)),
        lambda: cache.append_and_attend(*on(30, True), slots=one),
        lambda: cache.append_and_attend(*on(30)),
        lambda: (cache.peek(*on(3)), cache.commit(torch.tensor([1, 3]))),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([3, 0])),
        cache.reset,
    ):
        call()
        seen[cache._in_order] += 1
        empty = cache.position < 0
        assert (cache.score[empty] == -math.inf).all()
        assert not cache.k.transpose(1, 2)[empty].any()
        if cache._in_order:
            rises = cache.position.diff(dim=-1) > 0
            assert (rises | empty[..., :-1]).all()
            assert (empty.int().diff(dim=-1) <= 0).all()
    assert min(seen[True], seen[False]) >= 4


# --- how many operations --------------------------------------------------------------------------


@torch.no_grad()
def test_a_draft_takes_few_operations() -> None:
    cache = make()
    cache.append_and_attend(*tokens(100))
    draft, n = tokens(8, 8), torch.tensor([3, 8])
    one = tokens(1, 8)
    assert sum(count(lambda: cache.append_and_attend(*one)).values()) == 1
    looked = count(lambda: cache.peek(*draft))
    assert looked == {"cache_draft": 1}, looked
    with Launches() as launches:
        cache.commit(n)
    for name in ("lt", "gt", "bitwise_or", "index"):  # on the CPU the values of n are checked
        launches.names[name] -= 1
    assert +launches.names == {"cache_commit": 1}, launches.names


@torch.no_grad()
def test_a_chunk_takes_few_operations() -> None:
    cache, chunk = make(), tokens(100, 8)
    names = count(lambda: cache.append_and_attend(*chunk))
    assert names["select_keys"] == names["build_key_lists"] == names["fwd"] == 1, names
    assert names["sort"] == 0 and sum(names.values()) <= 17, names
    cache.append_and_attend(*tokens(1))
    with Launches() as launches:
        cache.append_and_attend(*chunk)
    assert launches.names["sort"] == 1 and sum(launches.names.values()) <= 25, launches.names


@torch.no_grad()
def test_a_stretch_behind_a_state_takes_few_operations() -> None:
    q, k, v, score = tokens(100, 8)
    states: list[KeyState | None] = [None]

    def stretch() -> None:
        _, state = flash_dmattn_func(
            q, k, v, None, score, is_causal=True, window_size=W, state=states[-1], return_state=True
        )
        states.append(state)

    assert sum(count(stretch).values()) <= 17  # of a stretch behind a state
    states[:] = [None]
    with Launches() as launches:
        stretch()
    assert launches.names["sort"] == 0 and sum(launches.names.values()) <= 20, launches.names
