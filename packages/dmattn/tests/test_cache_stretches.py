"""DynamicMaskCache: many tokens per call, drafts and slots give what each sequence gives alone."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch_releases import TRACES_EXTREMES

from dmattn import DynamicMaskAttention, DynamicMaskCache, flash_dmattn_func
from dmattn.cache import FEW_TOKENS

B, H, HK, D, N, W = 3, 4, 2, 8, 170, 16
NAMES = ("k", "v", "score", "position", "seen")
MANY = FEW_TOKENS + 1


def sequence(kind: str = "tied", batch: int = B) -> Any:
    """query, key, value (B, N, heads, D) and score (B, HK, N)."""
    torch.manual_seed(0)
    q = torch.randn(batch, N, H, D)
    k, v = torch.randn(2, batch, N, HK, D).unbind()
    score = torch.randn(batch, HK, N)
    if kind == "tied":
        score = torch.round(score * 2)
    elif kind == "holes":
        score = score.masked_fill(torch.rand(score.shape) < 0.3, -math.inf)
        score[..., ::7] = math.nan
    return q, k, v, score


def make(evict: bool = True, batch: int = B, window: int = W) -> DynamicMaskCache:
    capacity = None if evict else N
    return DynamicMaskCache(
        batch, window, HK, D, torch.float32, "cpu", evict=evict, capacity=capacity
    )


def part(whole: Any, start: int, stop: int, rows: Any = slice(None)) -> list[Tensor]:
    return [x[rows, start:stop] for x in whole[:3]] + [whole[3][rows, :, start:stop]]


def attend(whole: Any, window: int = W) -> Tensor:
    q, k, v, score = whole
    out: Tensor = flash_dmattn_func(q, k, v, None, score, is_causal=True, window_size=window)
    return out


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=3e-6)


def assert_same_content(got: DynamicMaskCache, want: DynamicMaskCache) -> None:
    """The same entries, in whatever order."""
    orders = [c.position.argsort(-1) for c in (got, want)]
    for name in ("score", "position"):
        a, b = (getattr(c, name).gather(-1, o) for c, o in zip((got, want), orders, strict=True))
        assert torch.equal(a, b), name
    for name in ("k", "v"):
        a, b = (
            getattr(c, name).take_along_dim(o.mT[..., None], 1)
            for c, o in zip((got, want), orders, strict=True)
        )
        assert torch.equal(a, b), name
    assert torch.equal(got.seen, want.seen)


def unchanged(cache: DynamicMaskCache, before: DynamicMaskCache) -> bool:
    return all(torch.equal(getattr(cache, name), getattr(before, name)) for name in NAMES)


LENGTHS = (
    (N,),
    (100, 70),
    (1, W - 1, W, W + 1, 0, N - 3 * W - 1),
    (30, FEW_TOKENS, MANY, 1, N - 31 - FEW_TOKENS - MANY),
)


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("kind", ["random", "tied", "holes"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_text_in_chunks_is_the_text(evict: bool, kind: str, lengths: tuple[int, ...]) -> None:
    whole, cache, outs = sequence(kind), make(evict), []
    for a, b in itertools.pairwise((0, *itertools.accumulate(lengths))):
        outs.append(cache.append_and_attend(*part(whole, a, b)))
    assert_near(torch.cat(outs, 1), attend(whole))
    prefilled = make(evict)
    prefilled.prefill(*part(whole, 0, N)[1:])
    if kind == "holes" and not evict:  # it also holds keys that are never chosen
        assert cache.seen.tolist() == [N] * B
    else:
        assert_same_content(cache, prefilled)


@pytest.mark.parametrize("window", [1, 5, N, N + 30])
def test_windows_at_the_edges(window: int) -> None:
    whole = sequence()
    for evict in (True, False):
        cache = make(evict, window=window)
        outs = [cache.append_and_attend(*part(whole, a, b)) for a, b in ((0, 60), (60, N))]
        assert_near(torch.cat(outs, 1), attend(whole, window))


@pytest.mark.parametrize("evict", [True, False])
def test_tokens_that_are_none_may_stand_anywhere(evict: bool) -> None:
    whole, at_once, in_turn = sequence(), make(evict), make(evict)
    real = torch.rand(B, 60) < 0.6
    real[1] = False
    at_once.append_and_attend(*part(whole, 0, 30))
    in_turn.append_and_attend(*part(whole, 0, 30))
    got = at_once.append_and_attend(*part(whole, 30, 90), active=real)
    for t in range(60):
        step = part(whole, 30 + t, 31 + t)
        want = in_turn.append_and_attend(*step, active=real[:, t])
        assert_near(got[:, t][real[:, t]], want[:, 0][real[:, t]])
    assert torch.isfinite(got).all()
    assert_same_content(at_once, in_turn)


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("tokens", [2, MANY, 40])
def test_a_draft_is_looked_at_and_then_put_in_by_parts(evict: bool, tokens: int) -> None:
    whole, cache = sequence(), make(evict)
    cache.append_and_attend(*part(whole, 0, 50))
    before, twin = cache.clone(), cache.clone()
    draft = part(whole, 50, 50 + tokens)
    out = cache.peek(*draft, softmax_scale=0.4, softcap=3.0)
    assert unchanged(cache, before)
    assert_near(out, before.append_and_attend(*draft, 0.4, 3.0))
    for t in draft:  # the cache has a copy
        t.zero_()
    n = torch.tensor([0, 1, tokens])
    cache.commit(n)
    taken = torch.arange(tokens) < n[:, None]
    again = sequence()
    twin.append_and_attend(*part(again, 50, 50 + tokens), active=taken)
    assert_same_content(cache, twin)
    assert not cache.is_empty
    for b, first in enumerate((50, 51, 50 + tokens)):
        steps = part(again, first, first + 1)
        got = cache.append_and_attend(*steps, active=torch.arange(B) == b)
        assert_near(got[b], attend(again)[b, first : first + 1])


def test_what_cannot_be_committed_is_refused() -> None:
    whole, cache = sequence(), make()
    cache.append_and_attend(*part(whole, 0, 20))
    fitting = torch.tensor([1, 0, 2])
    with pytest.raises(ValueError, match="n: got a commit without a draft"):
        cache.commit(fitting)
    cache.peek(*part(whole, 20, 24))
    before = cache.clone()
    for n, error, words in (
        (torch.tensor([1, 5, 0]), ValueError, "n: got 5, wanted 0 to 4"),
        (torch.tensor([1, -1, 0]), ValueError, "n: got -1, wanted 0 to 4"),
        (torch.tensor([1, 1]), ValueError, "n: got shape"),
        (torch.tensor([1.0, 1.0, 1.0]), TypeError, "n: got dtype"),
        (3, TypeError, "n: got 3"),
    ):
        with pytest.raises(error, match=words):
            cache.commit(n)  # type: ignore[arg-type]
    assert unchanged(cache, before)
    cache.commit(fitting)
    with pytest.raises(ValueError, match="without a draft"):
        cache.commit(fitting)
    for change in (
        lambda: cache.append_and_attend(*part(whole, 20, 21)),
        lambda: cache.reorder(torch.arange(B)),
        lambda: cache.reset(torch.tensor([1])),
        lambda: cache.prefill(*part(whole, 0, 20)[1:]),
    ):
        cache.peek(*part(whole, 20, 24))
        change()
        with pytest.raises(ValueError, match="without a draft"):
            cache.commit(fitting)


def test_a_draft_that_has_no_room_is_refused() -> None:
    whole, cache = sequence(), make(False)
    cache.append_and_attend(*part(whole, 0, N - 2))
    cache.peek(*part(whole, 0, 4))
    before = cache.clone()
    with pytest.raises(ValueError, match="capacity"):
        cache.commit(torch.tensor([0, 3, 0]))
    assert unchanged(cache, before)
    cache.commit(torch.tensor([0, 2, 1]))
    assert cache.seen.tolist() == [N - 2, N, N - 1]


@pytest.mark.parametrize("evict", [True, False])
def test_slots_go_on_as_if_each_were_alone(evict: bool) -> None:
    """Sequences join, grow by few and many tokens, and leave, and the others do not notice."""
    whole = sequence("tied", 5)
    want = attend(whole)
    cache = make(evict)
    first, others = torch.tensor([1]), torch.tensor([2, 0])
    cache.prefill(*part(whole, 0, 40, [3])[1:], slots=first)
    out = cache.append_and_attend(*part(whole, 0, 33, [0, 4]), slots=others)
    assert_near(out, want[[0, 4], :33])
    assert cache.seen.tolist() == [33, 40, 33]
    out = cache.append_and_attend(*part(whole, 40, 42, [3]), slots=first)
    assert_near(out, want[[3], 40:42])
    out = cache.append_and_attend(*part(whole, 33, 60, [0, 4]), slots=others.int())
    assert_near(out, want[[0, 4], 33:60])
    before = cache.clone()
    cache.reset(first)
    assert cache.seen.tolist() == [60, 0, 60] and (cache.position[1] == -1).all()
    assert not cache.k[1].any() and (cache.score[1] == -math.inf).all()
    for name in NAMES:
        assert torch.equal(getattr(cache, name)[[0, 2]], getattr(before, name)[[0, 2]]), name
    out = cache.append_and_attend(*part(whole, 0, 50, [2]), slots=first)
    assert_near(out, want[[2], :50])
    cache.reorder(torch.tensor([2]), slots=first)  # a copy of what another slot holds
    out = cache.append_and_attend(*part(whole, 60, 61, [4, 0, 0]))
    assert_near(out, want[[4, 0, 0], 60:61])
    some = torch.tensor([[True, False], [False, False]])
    cache.append_and_attend(*part(whole, 61, 63, [4, 0]), active=some, slots=torch.tensor([0, 1]))
    assert cache.seen.tolist() == [62, 61, 61]


def test_slots_that_are_none_are_refused() -> None:
    whole, cache = sequence(), make()
    cache.append_and_attend(*part(whole, 0, 20))
    before, two = cache.clone(), part(whole, 20, 21, [0, 1])
    for slots, error, words in (
        ([0, 1], TypeError, "slots: got"),
        (torch.tensor([0.0, 1.0]), TypeError, "slots: got dtype"),
        (torch.tensor([0, B]), ValueError, f"slots: got {B}, wanted 0 to {B - 1}"),
        (torch.tensor([-1, 0]), ValueError, "slots: got -1"),
        (torch.tensor([1, 1]), ValueError, "each named once"),
        (torch.tensor([0, 1, 2, 0]), ValueError, "wanted at most 3"),
        (torch.tensor([0]), ValueError, "query: got shape|key: got shape"),
        (torch.tensor([[0, 1]]), ValueError, "slots: got shape"),
    ):
        with pytest.raises(error, match=words):
            cache.append_and_attend(*two, slots=slots)
        if "key: got" not in words:
            with pytest.raises(error, match=words):
                cache.reset(slots)
        with pytest.raises(error, match=words):
            cache.prefill(*two[1:], slots=slots)
    with pytest.raises(ValueError, match=r"beam_idx: got shape \(2,\), wanted \(1,\)"):
        cache.reorder(torch.tensor([0, 1]), slots=torch.tensor([2]))
    assert unchanged(cache, before)
    none = torch.zeros(0, dtype=torch.long)
    assert cache.append_and_attend(*part(whole, 0, 2, []), slots=none).shape == (0, 2, H, D)
    assert unchanged(cache, before)


@pytest.mark.parametrize("evict", [True, False])
def test_no_slots_are_no_prompt(evict: bool) -> None:
    cache, none = make(evict), torch.zeros(0, dtype=torch.long)
    long = [torch.zeros(0, N + 1, HK, D)] * 2 + [torch.zeros(0, HK, N + 1)]
    cache.prefill(*long, slots=none)
    assert cache.is_empty
    cache.peek(*part(sequence(), 0, 2))
    cache.prefill(*long, slots=none)
    cache.commit(torch.full((B,), 2))  # nothing has changed, so the draft still stands
    assert cache.seen.tolist() == [2] * B


@torch.no_grad()
@pytest.mark.parametrize("score_heads", [2, 4])
@pytest.mark.parametrize("evict", [True, False])
def test_a_layer_takes_its_prompt_in_chunks_and_in_slots(evict: bool, score_heads: int) -> None:
    torch.manual_seed(0)
    layer = DynamicMaskAttention(32, 4, 2, window_size=W, num_score_heads=score_heads).eval()
    layer.A.normal_()
    x = torch.randn(B, 130, 32)
    whole = layer(x)
    make_cache = {"evict": evict, "capacity": None if evict else 130}
    cache = layer.make_cache(B, **make_cache)
    outs = [layer(x[:, a:b], cache=cache) for a, b in ((0, 50), (50, 90), (90, 92), (92, 130))]
    assert_near(torch.cat(outs, 1), whole)
    # Ragged: each sequence has other tokens in each chunk, padded on the left.
    cache, lengths, outs = layer.make_cache(B, **make_cache), [0] * B, [[] for _ in range(B)]
    for chunk in ([20, 9, 31], [0, 31, 12], [30, 1, 17]):
        longest = max(chunk)
        padded, real = torch.zeros(B, longest, 32), torch.zeros(B, longest, dtype=torch.bool)
        for b, n in enumerate(chunk):
            padded[b, longest - n :] = x[b, lengths[b] : lengths[b] + n]
            real[b, longest - n :] = True
            lengths[b] += n
        out = layer(padded, attention_mask=real, cache=cache)
        for b, n in enumerate(chunk):
            outs[b].append(out[b, longest - n :])
    for b in range(B):
        assert_near(torch.cat(outs[b]), whole[b, : lengths[b]])
    # One slot starts anew, and the others do not move.
    slot = torch.tensor([2])
    cache.reset(slot)
    assert_near(layer(x[:1, :40], cache=cache, slots=slot), whole[:1, :40])
    assert_near(layer(x[:1, 40:41], cache=cache, slots=slot), whole[:1, 40:41])
    assert cache.seen.tolist() == [50, 41, 41]
    with pytest.raises(ValueError, match="slots: got a tensor without a cache"):
        layer(x, slots=slot)
    for wrong in (slot, torch.tensor([0, 1])):
        with pytest.raises(ValueError, match=f"slots: got {len(wrong)}, wanted 3"):
            layer(x, cache=cache, slots=wrong)


@torch.no_grad()
@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("call", ["append_and_attend", "prefill"])
def test_few_graphs_serve_chunks_of_all_lengths(call: str, evict: bool) -> None:
    whole, cache, twin = sequence(), make(evict), make(evict)
    torch._dynamo.reset()
    counter, skip = CompileCounter(), 1 if call == "prefill" else 0
    compiled = torch.compile(getattr(cache, call), backend=counter, fullgraph=True)
    for length in (90, 70, 120, 40, 150) if evict else (40, 30, 50, 20, 25):
        tokens = part(whole, 0, length)[skip:]
        compiled(*tokens)
        getattr(twin, call)(*tokens)
        assert unchanged(cache, twin)
    assert counter.frame_count <= (2 if TRACES_EXTREMES else 4)


@torch.no_grad()
@pytest.mark.parametrize("evict", [True, False])
def test_compiled_code_puts_in_the_active_tokens_alone(evict: bool) -> None:
    tokens, cache, twin = part(sequence(), 0, 30), make(evict), make(evict)
    active = torch.rand(B, 30) < 0.5
    torch._dynamo.reset()
    compiled = torch.compile(cache.append_and_attend, backend="aot_eager", fullgraph=True)
    found, wanted = (call(*tokens, active=active) for call in (compiled, twin.append_and_attend))
    assert_near(found[active], wanted[active])
    assert unchanged(cache, twin)
