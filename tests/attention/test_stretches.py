"""A sequence in stretches, and many tokens, drafts and slots of a cache, on each device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmattn
from attention.selections import make_scores
from attention.targets import target_device
from dmattn.key_lists import KeptKeys
from dmattn.ops.keys import keep_keys

pytestmark = pytest.mark.default_backend

B, H, HK, D = 2, 4, 2, 64


def sequence(length: int, kind: str = "random") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query, key, value (B, S, heads, D) in bfloat16 and score (B, HK, S) in float32."""
    device = target_device()
    q = torch.randn(B, length, H, D, device=device).bfloat16()
    k, v = torch.randn(2, B, length, HK, D, device=device).bfloat16().unbind()
    return q, k, v, make_scores(kind, B, HK, length)


def part(whole: tuple[Tensor, ...], start: int, stop: int) -> list[Tensor]:
    return [x[:, start:stop] for x in whole[:3]] + [whole[3][..., start:stop]]


def new_cache(window: int) -> dmattn.DynamicMaskCache:
    return dmattn.DynamicMaskCache(B, window, HK, D, torch.bfloat16, target_device())


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["random", "tied", "minus_inf", "nan"])
@pytest.mark.parametrize("window,lengths", [(100, (1, 99, 100, 0, 101, 500)), (300, (700, 133))])
@pytest.mark.parametrize("documents", [False, True])
def test_stretches_are_the_sequence(
    kind: str, window: int, lengths: tuple[int, ...], documents: bool
) -> None:
    cuts = [0, *itertools.accumulate(lengths)]
    tensors = sequence(cuts[-1], kind)
    bounds = [0, 40, 41, 350, cuts[-1]] if documents else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=target_device())
    mask = torch.rand(B, 1, 1, cuts[-1], device=target_device()) < 0.9
    options: dict[str, Any] = {
        "is_causal": True,
        "window_size": window,
        "cu_seqlens": cu_seqlens,
        "return_lse": True,
        "return_state": True,
    }
    whole = [x.clone().requires_grad_() for x in tensors]
    out, lse, last = dmattn.flash_dmattn_func(*whole[:3], mask, whole[3], **options)
    pieces = [x.clone().requires_grad_() for x in tensors]
    state, outs, lses = None, [], []
    for a, b in itertools.pairwise(cuts):
        q, k, v, bias = part(tuple(pieces), a, b)
        found = dmattn.flash_dmattn_func(q, k, v, mask[..., a:b], bias, state=state, **options)
        outs.append(found[0])
        lses.append(found[1])
        state = found[2]
    assert state is not None
    for name in ("position", "seen", "score", "k", "v", "has_start"):
        assert torch.equal(getattr(state, name), getattr(last, name)), name
    assert_near(torch.cat(outs, 1), out)
    assert_near(torch.cat(lses, 2), lse)
    dout = torch.randn_like(out)
    out.backward(dout)
    torch.cat(outs, 1).backward(dout)
    for x, y in zip(pieces, whole, strict=True):
        assert x.grad is not None and y.grad is not None
        size = float(y.grad.float().abs().amax())  # sums of many terms of either sign
        assert float((x.grad.float() - y.grad.float()).abs().amax()) <= 2e-2 * size


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "window,lengths", [(100, (1, 99, 100, 0, 101, 500)), (300, (700, 133)), (300, (4000, 3000))]
)
@pytest.mark.parametrize("documents", [False, True])
def test_a_state_that_is_found_beside_attention(
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    lengths: tuple[int, ...],
    documents: bool,
    score_dtype: torch.dtype,
) -> None:
    """Kept keys are found while attention runs; results are those of finding them afterwards."""
    cuts = [0, *itertools.accumulate(lengths)]
    q, k, v, score = sequence(cuts[-1], "tied")
    score, device = score.to(score_dtype)[:, :, None], target_device()
    bounds = torch.tensor([0, 40, 41, 350, cuts[-1]], device=device) if documents else None
    mask = torch.rand(B, 1, 1, cuts[-1], device=device) < 0.9

    def in_turn() -> list[Tensor]:
        state, found = None, []
        for a, b in itertools.pairwise(cuts):
            now = slice(a, b)
            out, state = dmattn.flash_dmattn_func(
                *(q[:, now], k[:, now], v[:, now], mask[..., now], score[..., now]),
                is_causal=True,
                window_size=window,
                state=state,
                return_state=True,
                cu_seqlens=bounds,
            )
            found.append(out)
        assert state is not None
        return [*found, state.k, state.v, state.score, state.position, state.seen]

    with monkeypatch.context() as patch:
        patch.setattr("dmattn.stretches.Stretch.room_for_state", lambda *_: None)
        want = in_turn()
    for _ in range(5):
        for x, y in zip(in_turn(), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_cache_that_is_filled_beside_attention(
    monkeypatch: pytest.MonkeyPatch, is_ragged: bool
) -> None:
    """Its entries are written in place, while the attention over their old contents still runs."""
    whole = sequence(6000, "tied")
    real = torch.rand(B, 6000, device=target_device()) < 0.8 if is_ragged else None

    def behind(*arguments: Any) -> KeptKeys:
        return keep_keys(*arguments[:9])  # without `beside_attention`

    def in_chunks() -> list[Tensor]:
        cache, outs = new_cache(128), []
        for start, stop in ((0, 200), (200, 201), (201, 3000), (3000, 6000)):
            active = None if real is None else real[:, start:stop]
            outs.append(cache.append_and_attend(*part(whole, start, stop), active=active))
        return [*outs, cache.k, cache.v, cache.score, cache.position, cache.seen]

    with monkeypatch.context() as patch:
        patch.setattr("dmattn.cache_blocks.keep_keys", behind)
        want = in_chunks()
    for _ in range(5):
        for x, y in zip(in_chunks(), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["random", "tied"])
def test_many_tokens_at_once_are_those_in_turn(kind: str) -> None:
    whole = sequence(700, kind)
    at_once, in_turn = new_cache(128), new_cache(128)
    for cache in (at_once, in_turn):
        cache.prefill(*part(whole, 0, 200)[1:])
    real = torch.rand(B, 500, device=target_device()) < 0.8
    got = at_once.append_and_attend(*part(whole, 200, 700), active=real)
    for t in range(0, 500, 4):
        active = real[:, t : t + 4]
        want = in_turn.append_and_attend(*part(whole, 200 + t, 204 + t), active=active)
        assert_near(got[:, t : t + 4][active], want[active])
    orders = [c.position.argsort(-1) for c in (at_once, in_turn)]
    for name in ("score", "position"):
        x, y = (getattr(c, name) for c in (at_once, in_turn))
        assert torch.equal(x.gather(-1, orders[0]), y.gather(-1, orders[1])), name
    assert torch.equal(at_once.seen, in_turn.seen)


@pytest.mark.parametrize("kind", ["random", "tied", "minus_inf", "nan"])
def test_drafts_are_tokens_in_turn(kind: str) -> None:
    """Also with equal scores, and while the cache has room."""
    whole, cache = sequence(400, kind), new_cache(128)
    start, n = 100, torch.zeros(B, dtype=torch.int32, device=target_device())
    cache.append_and_attend(*part(whole, 0, start))
    for tokens in (5, 8, 1, 20, 40, 8, 31):
        in_turn, draft = cache.clone(), part(whole, start, start + tokens)
        out = cache.peek(*draft)
        for t in range(tokens):
            want = in_turn.append_and_attend(
                *[x[:, t : t + 1] for x in draft[:3]], draft[3][..., t : t + 1]
            )
            assert_near(out[:, t : t + 1], want)
        cache.commit(n + tokens)
        for name in ("score", "position", "seen", "k", "v"):
            assert torch.equal(getattr(cache, name), getattr(in_turn, name)), name
        start += tokens


@pytest.mark.parametrize(
    "heads,heads_k,head_dim,window,tokens",
    [(8, 1, 128, 130, 8), (4, 4, 256, 40, 32), (6, 2, 64, 7, 9), (16, 2, 256, 300, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "tied", "nan"])
def test_drafts_of_any_shape(
    kind: str, dtype: torch.dtype, heads: int, heads_k: int, head_dim: int, window: int, tokens: int
) -> None:
    """Several row blocks, and more tokens than entries; a different number of tokens is committed
    for each sequence."""
    device, length = target_device(), window + 20 + tokens
    q = torch.randn(B, length, heads, head_dim, device=device).to(dtype)
    k, v = torch.randn(2, B, length, heads_k, head_dim, device=device).to(dtype).unbind()
    whole = (q, k, v, make_scores(kind, B, heads_k, length).to(dtype))
    cache = dmattn.DynamicMaskCache(B, window, heads_k, head_dim, dtype, device, dtype)
    cache.append_and_attend(*part(whole, 0, window + 20))
    in_turn, committed = cache.clone(), cache.clone()
    draft = part(whole, window + 20, length)
    out = cache.peek(*draft, softcap=3.0)
    n = torch.tensor([tokens // 2, tokens - 1], device=device)
    for t in range(tokens):
        step = [x[:, t : t + 1] for x in draft[:3]] + [draft[3][..., t : t + 1]]
        assert_near(out[:, t : t + 1], in_turn.append_and_attend(*step, softcap=3.0))
        committed.append_and_attend(*step, active=t < n)
    cache.commit(n)
    for name in ("score", "position", "seen", "k", "v"):
        assert torch.equal(getattr(cache, name), getattr(committed, name)), name


def attend_to(cache: dmattn.DynamicMaskCache, q: Tensor) -> Tensor:
    """One query (B, 1, heads, D) over all entries, in float64."""
    heads_k = cache.score.shape[1]
    q = q.double().unflatten(2, (heads_k, -1))
    k, v = (x[:, : cache.score.shape[-1]].double() for x in (cache.k, cache.v))
    logits = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * q.shape[-1] ** -0.5
    logits = logits + cache.score.double()[:, :, None, None]
    return torch.einsum("bhgqk,bkhd->bqhgd", logits.softmax(-1), v).flatten(2, 3)


@pytest.mark.parametrize(
    "heads,heads_k,head_dim",
    [(4, 1, 128), (2, 2, 64), (7, 1, 64), (9, 1, 128), (16, 4, 128), (6, 2, 256), (1, 1, 256)],
)
@pytest.mark.parametrize("window", [40, 300, 700, 2304, 4200])
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_steps_and_drafts_over_any_number_of_splits(
    kind: str, window: int, heads: int, heads_k: int, head_dim: int
) -> None:
    """The token, and the entries that do not leave, are terms added to the splits' results."""
    device, dtype, tokens = target_device(), torch.bfloat16, 5
    q = torch.randn(B, tokens, heads, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, B, window + tokens, heads_k, head_dim, device=device, dtype=dtype)
    score = make_scores(kind, B, heads_k, window + tokens)
    in_turn = dmattn.DynamicMaskCache(B, window, heads_k, head_dim, dtype, device)
    in_turn.prefill(k[:, :window], v[:, :window], score[..., :window])
    drafted = in_turn.clone()
    new = [q, k[:, window:], v[:, window:], score[..., window:]]
    outs = drafted.peek(*new)
    for t in range(tokens):
        step = [x[:, t : t + 1] for x in new[:3]] + [new[3][..., t : t + 1]]
        out = in_turn.append_and_attend(*step)
        assert_near(out, attend_to(in_turn, step[0]))
        assert_near(outs[:, t : t + 1], out)
    drafted.commit(torch.full((B,), tokens, dtype=torch.int32, device=device))
    for name in ("score", "position", "seen", "k", "v"):
        assert torch.equal(getattr(drafted, name), getattr(in_turn, name)), name


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.cuda
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("tokens", [5, 40])
def test_graph_of_stretches_and_drafts(tokens: int, draft: bool) -> None:
    """Captured once and replayed for each stretch, the same as the calls themselves."""
    whole = sequence(1000)
    cache, eager = new_cache(64), new_cache(64)
    now = [x.clone() for x in part(whole, 0, tokens)]
    n = torch.full((B,), 2, dtype=torch.int32, device=target_device())

    def step(on: dmattn.DynamicMaskCache) -> Tensor:
        if not draft:
            return on.append_and_attend(*now)
        out = on.peek(*now)
        on.commit(n)
        return out

    graph, out = captured(lambda: step(cache))
    cache.reset()
    for start in range(0, 1000 - tokens, tokens):
        for x, source in zip(now, part(whole, start, start + tokens), strict=True):
            x.copy_(source)
        n.random_(-1, tokens + 3)  # what is out of range counts as 0 or all
        graph.replay()
        want = step(eager)
        assert torch.equal(out, want)
    assert torch.equal(cache.seen, eager.seen)
    assert torch.equal(cache.position.sort().values, eager.position.sort().values)


@pytest.mark.cuda
def test_graph_of_slots() -> None:
    whole = sequence(400)
    cache = dmattn.DynamicMaskCache(4, 64, HK, D, torch.bfloat16, target_device())
    slots = torch.tensor([3, 1], device=target_device())
    now = [x.clone() for x in part(whole, 0, 50)]

    def step() -> Tensor:
        return cache.append_and_attend(*now, slots=slots)

    graph, out = captured(step)
    cache.reset()
    alone = new_cache(64)
    for start in range(0, 400, 50):
        for x, source in zip(now, part(whole, start, start + 50), strict=True):
            x.copy_(source)
        graph.replay()
        assert torch.equal(out, alone.append_and_attend(*now))
    assert cache.seen.tolist() == [0, 400, 0, 400]


@pytest.mark.cuda
def test_the_host_does_not_wait() -> None:
    whole = sequence(300)
    cache, state = new_cache(64), None
    n = torch.ones(B, dtype=torch.int32, device=target_device())
    slots = torch.tensor([1], device=target_device())
    bounds = torch.tensor([0, 100, 300], device=target_device())
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append_and_attend(*part(whole, 0, 100))
        cache.peek(*part(whole, 100, 104))
        cache.commit(n)
        cache.reset(slots)
        cache.append_and_attend(*[x[:1] for x in part(whole, 0, 30)], slots=slots)
        for a, b in ((0, 100), (100, 300)):
            q, k, v, score = part(whole, a, b)
            _, state = dmattn.flash_dmattn_func(
                *(q, k, v, None, score),
                is_causal=True,
                window_size=64,
                state=state,
                return_state=True,
                cu_seqlens=bounds,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
