"""Operators that join and keep keys do what torch's operations do where gradients are needed."""

import itertools
import math
from typing import Any

import pytest
import torch
from selection_cases import make_scores
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import DynamicMaskCache, KeyState, flash_dmattn_func, known_calls
from dmattn.dispatch import select
from dmattn.key_lists import KeptKeys
from dmattn.key_state import Keys, gathered, kept_places
from dmattn.ops.keys import copy_keys, join_keys, keep_keys

FIELDS = ("k", "v", "score", "position", "seen", "has_start")


def rows(batch: int, keys: int, heads: int, head_dim: int = 8) -> Tensor:
    return torch.randn(batch, keys, heads, head_dim)


@pytest.mark.parametrize("masked", [False, True])
def test_operators(masked: bool) -> None:
    torch.manual_seed(0)
    first = rows(2, 5, 4), rows(2, 5, 4, 6), torch.randn(2, 4, 5)
    new = rows(2, 30, 2), rows(2, 30, 2, 6), torch.randn(1, 1, 30)
    mask = torch.rand(2, 2, 30) < 0.7 if masked else None
    order = torch.rand(2, 4, 5).argsort(2).to(torch.int32) if masked else None
    opcheck(torch.ops.dmattn.join_keys, (*first, *new, mask, 8, order))
    k, v, score = join_keys(first, new, mask, 8, False)
    end = select(score, None, 9, 30, True).end
    position = torch.randint(0, 100, (2, 4, 8), dtype=torch.int32) if masked else None
    seen = torch.tensor([100, 200], dtype=torch.int32) if masked else None
    place = torch.rand(2, 4, 38).argsort(2).to(torch.int32) if masked else None
    opcheck(torch.ops.dmattn.keep_keys, (37, end, place, k, v, score, position, seen, 9))


def test_entries_in_front_of_a_state_hold_no_key() -> None:
    first = rows(1, 3, 2), rows(1, 3, 2), torch.randn(1, 2, 3)
    new = rows(1, 4, 1), rows(1, 4, 1), torch.randn(1, 2, 4).bfloat16()
    mask = torch.tensor([[[True, False, True, True]]])
    k, v, score = join_keys(first, new, mask, 5, True)
    for joined, before, behind in ((k, first[0], new[0]), (v, first[1], new[1])):
        assert not joined[:, :2].any()
        assert torch.equal(joined[:, 2:5], before)
        assert torch.equal(joined[:, 5:], behind.expand(-1, -1, 2, -1))
    assert (score[:, :, :2] == -math.inf).all() and torch.equal(score[:, :, 2:5], first[2])
    assert torch.equal(score[:, :, 5:], new[2].float().masked_fill(~mask, -math.inf))
    with pytest.raises(ValueError, match="front: got 2, wanted at least 3"):
        join_keys(first, new, mask, 2, True)


def test_results_may_have_strides() -> None:
    """Context parallel attention has them in one buffer, with a key, value and score per row."""
    k, v, score = rows(2, 9, 3), rows(2, 9, 3, 6), torch.randn(2, 3, 9)
    packed = torch.full((2, 3, 12, 8 + 6 + 2), 7.0)
    views = packed[..., :8].transpose(1, 2), packed[..., 8:14].transpose(1, 2), packed[..., 14]
    copy_keys((k, v, score), views)
    assert not packed[:, :, :3, :14].any() and (packed[:, :, :3, 14] == -math.inf).all()
    for found, wanted in zip(views, (k, v, score), strict=True):
        assert torch.equal(found[:, 3:] if found.dim() == 4 else found[..., 3:], wanted)
    end = torch.where(score > 0.5, 9, 0).to(torch.int32)
    wanted = keep_keys(8, end, None, (k, v, score), None, None, 12, True)
    into = KeptKeys(*views, torch.empty_like(wanted.position), torch.empty_like(wanted.seen))
    keep_keys(8, end, None, (k, v, score), None, None, 12, True, into)
    assert all(torch.equal(a, b) for a, b in zip(into, wanted, strict=True))
    assert (packed[..., 15] == 7.0).all()


def test_the_first_keys_may_lie_anywhere() -> None:
    first = rows(2, 3, 2), rows(2, 3, 2), torch.randn(2, 2, 3)
    new = rows(2, 1, 2), rows(2, 1, 2), torch.randn(2, 2, 1)
    order = torch.tensor([[2, 0, 1], [0, 2, 1]]).expand(2, -1, -1)
    k, v, score = join_keys(first, new, None, 4, True, order.to(torch.int32))
    for h, places in enumerate(order[0].tolist()):
        assert torch.equal(k[:, 1:4, h], first[0][:, places, h])
        assert torch.equal(v[:, 1:4, h], first[1][:, places, h])
        assert torch.equal(score[:, h, 1:4], first[2][:, h, places])
    assert torch.equal(k[:, 4:], new[0]) and not k[:, :1].any()


@pytest.mark.parametrize("kind", ["random", "tied", "minus_inf", "nan", "rising", "falling"])
@pytest.mark.parametrize("seqlen", [1, 6, 7, 8, 90])
def test_kept_keys_are_those_that_torch_finds(kind: str, seqlen: int) -> None:
    score, window = make_scores(kind, 2, 3, seqlen), 7
    k, v = rows(2, seqlen, 3), rows(2, seqlen, 3)
    end = select(score, None, window, seqlen, True).end
    wanted = gathered(Keys(k, v, score, None), kept_places(end, window))
    for direct in (True, False):
        args = (seqlen - 1, end, None, (k, v, score), None, None, window)
        found = keep_keys(*args, direct)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=False))
        assert found.seen.tolist() == [seqlen] * 2


def test_the_last_keys_are_kept_where_there_are_too_many() -> None:
    k, score = rows(1, 9, 1), torch.arange(9.0)[None, None]
    end = torch.full((1, 1, 9), 9, dtype=torch.int32)
    found = keep_keys(8, end, None, (k, k, score), None, None, 4, True)
    assert found.score.tolist() == [[[5, 6, 7, 8]]] and torch.equal(found.k, k[:, 5:])


def test_kept_keys_may_lie_anywhere() -> None:
    k, score = rows(1, 4, 1), torch.arange(4.0)[None, None]
    end = torch.tensor([[[4, 0, 4, 4]]], dtype=torch.int32)
    place = torch.tensor([[[2, 1, 3, 0]]], dtype=torch.int32)
    position, seen = torch.tensor([[[70, 71, 72]]], dtype=torch.int32), torch.tensor([80])
    found = keep_keys(3, end, place, (k, k, score), position, seen.int(), 5, True)
    assert found.score.tolist() == [[[-math.inf, -math.inf, 2, 3, 0]]]
    assert found.position.tolist() == [[[-1, -1, 72, 80, 70]]] and found.seen.tolist() == [81]


def in_stretches(
    cuts: list[int], tensors: list[Tensor], mask: Tensor | None, grad: bool, **options: Any
) -> tuple[list[Tensor], list[KeyState]]:
    q, k, v, bias = (t.detach().requires_grad_(grad) for t in tensors)
    state, outs, states = None, [], []
    for a, b in itertools.pairwise(cuts):
        out, state = flash_dmattn_func(
            *(q[:, a:b], k[:, a:b], v[:, a:b], None if mask is None else mask[:, :, None, a:b]),
            *(bias[..., a:b],),
            is_causal=True,
            state=state,
            return_state=True,
            **options,
        )
        outs.append(out)
        states.append(state)
    return outs, states


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("masked", [None, (2, 1), (1, 4)])
@pytest.mark.parametrize("score_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["tied", "nan", "minus_inf"])
def test_states_are_the_same_with_and_without_gradients(
    kind: str, score_heads: int, masked: tuple[int, int] | None, documents: bool
) -> None:
    torch.manual_seed(1)
    cuts = [0, 1, 6, 13, 13, 61, 62]
    tensors = [rows(2, 62, 4), rows(2, 62, 2), rows(2, 62, 2)]
    tensors.append(make_scores(kind, 1, score_heads, 62)[:, :, None])
    mask = None if masked is None else torch.rand(*masked, 62) < 0.6
    options: dict[str, Any] = {"window_size": 6}
    if documents:
        options["cu_seqlens"] = torch.tensor([0, 3, 20, 21, 62])
    known_calls.forget()
    want = in_stretches(cuts, tensors, mask, True, **options)
    for _ in range(2):  # the second time, the kinds of the calls are known
        found = in_stretches(cuts, tensors, mask, False, **options)
        for a, b in zip(want[0], found[0], strict=True):
            assert torch.equal(a, b)
        for one, other in zip(want[1], found[1], strict=True):
            for name in FIELDS:
                a, b = getattr(one, name), getattr(other, name)
                assert a.dtype == b.dtype and torch.equal(a, b), name


def test_states_merge_alike_with_and_without_gradients() -> None:
    torch.manual_seed(2)
    k, v, score = rows(2, 40, 2), rows(2, 40, 2), make_scores("nan", 2, 2, 40)
    bounds = torch.tensor([0, 31, 40])

    def merged(grad: bool) -> KeyState:
        made = [t.clone().requires_grad_(grad) for t in (k, v, score)]
        parts = [
            KeyState.of(*(t[:, a:b] for t in made[:2]), made[2][..., a:b], 5, None, bounds - a)
            for a, b in ((0, 17), (17, 20), (20, 40))
        ]
        return parts[0].merge(parts[1]).merge(parts[2])

    for name in FIELDS:
        assert torch.equal(getattr(merged(True), name), getattr(merged(False), name)), name


# Views, and `promote_types`, which torch computes on the host.
_VIEWS = ("squeeze", "unsqueeze", "slice", "detach", "promote_types")


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_stretch_behind_a_state_is_four_operators() -> None:
    """Besides views."""
    q, k, v, score = rows(2, 20, 4), rows(2, 20, 2), rows(2, 20, 2), torch.randn(2, 2, 1, 20)
    options: dict[str, Any] = {"is_causal": True, "window_size": 6, "return_state": True}
    _, state = flash_dmattn_func(q, k, v, None, score, **options)
    with _Names() as mode:
        flash_dmattn_func(q, k, v, None, score, state=state, **options)
    made = [name for name in mode.names if name not in _VIEWS]
    assert made == ["join_keys", "select_keys", "fwd", "keep_keys"]


def test_calls_behind_states_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    known_calls.forget()
    torch.manual_seed(3)
    tensors = [rows(1, 60, 4), rows(1, 60, 2), rows(1, 60, 2), torch.randn(1, 2, 1, 60)]
    cuts = [0, 20, 40]
    in_stretches(cuts, tensors, None, False, window_size=6)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("checked again")

    want = in_stretches([0, 20, 40, 60], tensors, None, False, window_size=6)[0]
    with monkeypatch.context() as patch:
        patch.setattr("dmattn.functional._checked_call", never)
        found = in_stretches([0, 20, 40, 60], tensors, None, False, window_size=6)[0]
        for changed in ({"window_size": 7}, {"window_size": 6, "softcap": 1.0}):
            with pytest.raises(AssertionError, match="checked again"):
                in_stretches([0, 20], tensors, None, False, **changed)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    _, (state, _) = in_stretches(cuts, tensors, None, False, window_size=6)
    wrong = KeyState(state.k.half(), *(getattr(state, name) for name in FIELDS[1:]))
    first = [t[:, :20] for t in tensors[:3]]
    for given, error in ((wrong, TypeError), ("no state", TypeError)):
        with pytest.raises(error, match="state"):
            flash_dmattn_func(
                *first,
                attn_bias=tensors[3][..., :20],
                is_causal=True,
                window_size=6,
                state=given,  # type: ignore[arg-type]
                return_state=True,
            )


@pytest.mark.parametrize("active", [False, True])
def test_a_chunk_for_a_cache_is_the_same_under_a_mode(active: bool) -> None:
    """Under a mode that intercepts calls, operators are called, which write to new tensors."""
    torch.manual_seed(4)

    def fed(mode: TorchDispatchMode | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        cache, outs = DynamicMaskCache(2, 6, 2, 8, torch.float32, "cpu"), []
        for tokens in (10, 1, 12):
            q, k, v = (torch.randn(2, tokens, n, 8, generator=generator) for n in (4, 2, 2))
            score = torch.randn(2, 2, tokens, generator=generator)
            which = torch.rand(2, tokens, generator=generator) < 0.7 if active else None
            if mode is None:
                outs.append(cache.append_and_attend(q, k, v, score, active=which))
            else:
                with mode:
                    outs.append(cache.append_and_attend(q, k, v, score, active=which))
        return [*outs, cache.k, cache.v, cache.score, cache.position, cache.seen]

    for a, b in zip(fed(None), fed(_Names()), strict=True):
        assert torch.equal(a, b)
