"""DynamicMaskCache: every decoded token equals the full computation."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from dmattn import DynamicMaskAttention, DynamicMaskCache, flash_dmattn_func, select_keys
from dmattn.cache_drafts import Rows

B, H, HK, D, N, W = 2, 4, 2, 8, 230, 16


def sequence(kind: str = "tied", length: int = N, dtype: torch.dtype = torch.float32) -> Any:
    """query, key, value (B, N, heads, D) and score (B, HK, N)."""
    torch.manual_seed(0)
    q = torch.randn(B, length, H, D).to(dtype)
    k, v = torch.randn(2, B, length, HK, D).to(dtype).unbind()
    score = torch.randn(B, HK, length)
    if kind == "tied":
        score = torch.round(score * 2)
    elif kind == "constant":
        score = torch.zeros_like(score)
    elif kind == "rising":
        score = score.sort(-1).values
    elif kind == "holes":
        score = score.masked_fill(torch.rand(score.shape) < 0.3, -math.inf)
        score[..., :3] = -math.inf
    return q, k, v, score


def make(evict: bool = True, window: int = W, dtype: torch.dtype = torch.float32) -> Any:
    capacity = None if evict else N
    return DynamicMaskCache(B, window, HK, D, dtype, "cpu", evict=evict, capacity=capacity)


def attend(q: Tensor, k: Tensor, v: Tensor, score: Tensor, window: int = W) -> Tensor:
    out: Tensor = flash_dmattn_func(q, k, v, None, score, is_causal=True, window_size=window)
    return out


def decode(cache: DynamicMaskCache, whole: Any, start: int, stop: int, step: int = 1) -> Tensor:
    q, k, v, score = whole
    outs = []
    for t in range(start, stop, step):
        now = slice(t, min(t + step, stop))
        outs.append(cache.append_and_attend(q[:, now], k[:, now], v[:, now], score[..., now]))
    return torch.cat(outs, 1)


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("kind", ["random", "tied", "constant", "rising", "holes"])
@pytest.mark.parametrize("prompt, step", [(0, 1), (0, 3), (7, 1), (W, 2), (100, 1), (N - 1, 4)])
def test_equals_the_full_computation(evict: bool, kind: str, prompt: int, step: int) -> None:
    whole = q, k, v, score = sequence(kind)
    cache = make(evict)
    cache.prefill(k[:, :prompt], v[:, :prompt], score[..., :prompt])
    assert_near(decode(cache, whole, prompt, N, step), attend(q, k, v, score)[:, prompt:])
    assert cache.seen.tolist() == [N, N] and not cache.is_empty


@pytest.mark.parametrize("window", [1, N - 1, N, N + 40])
def test_windows_at_the_edges(window: int) -> None:
    whole = q, k, v, score = sequence()
    for evict in (True, False):
        assert_near(decode(make(evict, window), whole, 0, N), attend(q, k, v, score, window))


def test_entries_are_the_selected_keys() -> None:
    whole = _, k, _, score = sequence()
    cache = make()
    decode(cache, whole, 0, N)
    keep = select_keys(score, W, query_len=1).to_mask()[:, :, 0]
    for b in range(B):
        for h in range(HK):
            kept = cache.position[b, h].sort()
            assert torch.equal(kept.values.long(), keep[b, h].nonzero()[:, 0])
            assert torch.equal(cache.score[b, h], score[b, h, cache.position[b, h]])
            assert torch.equal(cache.k[b, :, h], k[b, cache.position[b, h], h])


@pytest.mark.parametrize("kind", ["tied", "holes"])
def test_prefill_from_the_selection_of_the_prompt(kind: str) -> None:
    _, k, v, score = sequence(kind)
    plain, shared = make(), make()
    plain.prefill(k, v, score)
    shared.prefill(k, v, score, selection=select_keys(score, W))
    for name in ("k", "v", "score", "position", "seen"):
        assert torch.equal(getattr(plain, name), getattr(shared, name)), name
    assert (plain.position[plain.score == -math.inf] == -1).all()


def test_prefill_replaces() -> None:
    whole = q, k, v, score = sequence()
    cache = make()
    decode(cache, whole, 0, 50)
    cache.prefill(k[:, :30], v[:, :30], score[..., :30])
    assert_near(decode(cache, whole, 30, 60), attend(q, k, v, score)[:, 30:60])


def ragged_reference(whole: Any, lengths: list[int], more: int) -> list[Tensor]:
    q, k, v, score = whole
    return [
        attend(*(x[b : b + 1, : n + more] for x in (q, k, v)), score[b : b + 1, :, : n + more])
        for b, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
def test_ragged_prompts(evict: bool, side: str) -> None:
    whole = sequence()
    lengths, longest, more = [60, 25], 60, 40
    cache = make(evict)
    if side == "right":
        prompt = [x[:, :longest] for x in whole[1:3]] + [whole[3][..., :longest]]
        cache.prefill(*prompt, lengths=torch.tensor(lengths))
    else:
        shift = [longest - n for n in lengths]
        rows = [
            torch.stack([x[b].roll(s, 0) for b, s in enumerate(shift)])[:, :longest]
            for x in (whole[1], whole[2], whole[3].mT)
        ]
        real = torch.arange(longest) >= torch.tensor(shift)[:, None]
        cache.prefill(rows[0], rows[1], rows[2].mT, attn_mask=real)
    assert cache.seen.tolist() == lengths
    want = ragged_reference(whole, lengths, more)
    for t in range(more):
        at = [torch.stack([x[b, n + t] for b, n in enumerate(lengths)])[:, None] for x in whole[:3]]
        score = torch.stack([whole[3][b, :, n + t] for b, n in enumerate(lengths)])[..., None]
        out = cache.append_and_attend(*at, score)
        for b, n in enumerate(lengths):
            assert_near(out[b, 0], want[b][0, n + t])


@pytest.mark.parametrize("evict", [True, False])
def test_ragged_steps(evict: bool) -> None:
    """Each sequence takes only those tokens of a call that are active for it, at its own pace."""
    q, k, v, score = sequence()
    want, cache = attend(q, k, v, score), make(evict)
    done = [0, 0]
    for step in range(60):
        active = torch.rand(B, 3) < (0.5 if step % 4 else 0.0)
        place = torch.zeros(B, 3, dtype=torch.int64)
        for b in range(B):
            place[b] = done[b] + active[b].cumsum(0) - 1
        index = place.clamp(min=0)
        rows = torch.arange(B)[:, None]
        new_score = score.mT[rows, index].mT
        out = cache.append_and_attend(
            q[rows, index], k[rows, index], v[rows, index], new_score, active=active
        )
        assert torch.isfinite(out).all()
        for b in range(B):
            assert_near(out[b, active[b]], want[b, place[b, active[b]]])
            done[b] += int(active[b].sum())
        assert cache.seen.tolist() == done
    first = (x[:, :1] for x in (q, k, v))
    cache.append_and_attend(*first, score[..., :1], active=torch.tensor([True, False]))
    assert cache.seen.tolist() == [done[0] + 1, done[1]]


def test_reorder_reset_and_clone() -> None:
    whole = q, k, v, score = sequence()
    cache = make()
    decode(cache, whole, 0, 40)
    swapped, pointer = cache.clone(), cache.k.data_ptr()
    swapped.reorder(torch.tensor([1, 0]))
    want = attend(q, k, v, score)[:, 40:80]
    assert_near(decode(swapped, [x.flip(0) for x in whole], 40, 80).flip(0), want)
    assert_near(decode(cache, whole, 40, 80), want)
    cache.reorder(torch.tensor([1, 1]))
    assert torch.equal(cache.k[0], cache.k[1]) and torch.equal(cache.score[0], cache.score[1])
    cache.reset()
    assert cache.is_empty and cache.k.data_ptr() == pointer
    assert_near(decode(cache, whole, 0, 30), attend(q, k, v, score)[:, :30])


@pytest.mark.parametrize("evict", [True, False])
def test_beams_widen_and_sequences_drop_out(evict: bool) -> None:
    whole = q, k, v, score = sequence()
    want = attend(q, k, v, score)[:, 40:60]
    wide, picked, cache = make(evict), make(evict), make(evict)
    for made in (wide, picked, cache):
        decode(made, whole, 0, 40)
    wide.batch_repeat_interleave(3)
    three = [x.repeat_interleave(3, 0) for x in whole]
    assert_near(decode(wide, three, 40, 60), want.repeat_interleave(3, 0))
    beams = torch.tensor([1, 1, 0, 1])
    picked.batch_select_indices(beams)
    assert_near(decode(picked, [x[beams] for x in whole], 40, 60), want[beams])
    cache.batch_select_indices(torch.tensor([1]).int())
    assert_near(decode(cache, [x[1:] for x in whole], 40, 60), want[1:])
    assert cache.seen.tolist() == [60] and wide.position.shape[0] == 6


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("way", ["clone", "deepcopy", "save"])
def test_copies_go_on_where_the_cache_was(evict: bool, way: str) -> None:
    whole = q, k, v, score = sequence()
    cache = make(evict)
    decode(cache, whole, 0, 40)
    if way == "save":
        file = io.BytesIO()
        torch.save([cache], file)
        file.seek(0)
        (other,) = torch.load(file, weights_only=True)
    else:
        other = cache.clone() if way == "clone" else copy.deepcopy(cache)
    want = attend(q, k, v, score)[:, 40:80]
    assert_near(decode(other, whole, 40, 80), want)
    assert cache.seen.tolist() == [40, 40]
    assert_near(decode(cache, whole, 40, 80), want)
    assert repr(other) == repr(cache) and other.is_empty is False


@torch.no_grad()
@pytest.mark.parametrize("evict", [True, False])
def test_inside_of_inference_mode_and_outside(evict: bool) -> None:
    """A cache works in both, although tensors made in inference mode cannot be written outside."""
    whole = sequence("tied")
    modes = [torch.inference_mode, torch.no_grad]
    with torch.inference_mode():
        cache = make(evict)
        cache.prefill(*(t[:, :40] for t in whole[1:3]), whole[3][..., :40])
    copies = (
        lambda c: c.clone(),
        copy.deepcopy,
        lambda c: pickle.loads(pickle.dumps(c)),
        lambda c: c.batch_select_indices(torch.tensor([0, 1])) or c,
        lambda c: c.batch_repeat_interleave(1) or c,
    )
    for i, step in enumerate((1, 3, 12, 1, 9)):
        with modes[i % 2]():
            cache = copies[i](cache)
        for mode in modes:
            want = decode(cache.clone(), whole, 40, 52, step)
            with mode():
                assert torch.equal(decode(cache.clone(), whole, 40, 52, step), want)
                cache.reorder(torch.tensor([0, 1]))
                cache.peek(*(t[:, 40:43] for t in whole[:3]), whole[3][..., 40:43])
            cache.commit(torch.tensor([0, 0]))


@pytest.mark.parametrize("evict", [True, False])
def test_steps_compile_once(evict: bool) -> None:
    """No Python number changes from step to step, so no step needs another graph."""
    q, k, v, score = sequence()
    cache, graphs = make(evict), 0

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    torch._dynamo.reset()
    step = torch.compile(cache.append_and_attend, backend=count, fullgraph=True)
    outs = [
        step(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], score[..., t : t + 1])
        for t in range(40)
    ]
    assert_near(torch.cat(outs, 1), attend(q, k, v, score)[:, :40])
    assert graphs <= (2 if evict else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    whole = q, k, v, score = sequence("random", dtype=dtype)
    got = decode(make(dtype=dtype), whole, 0, 60)
    assert got.dtype == dtype
    torch.testing.assert_close(got, attend(q, k, v, score)[:, :60], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_scores_that_are_never_kept(bad: float) -> None:
    whole = q, k, v, score = sequence("random")
    score[..., ::3] = bad
    for evict in (True, False):
        cache = make(evict)
        cache.prefill(k[:, :20], v[:, :20], score[..., :20])
        got = decode(cache, whole, 20, 80)
        assert_near(got, attend(q, k, v, score)[:, 20:80])
        if evict:
            assert torch.isfinite(cache.score).all()


def test_nothing_kept_gives_zero() -> None:
    q, k, v, score = sequence()
    out = make().append_and_attend(
        q[:, :1], k[:, :1], v[:, :1], torch.full_like(score[..., :1], -math.inf)
    )
    assert not out.any()


def test_soft_cap_and_scale_reach_the_attention() -> None:
    q, k, v, score = sequence()
    cache = make()
    options: dict[str, Any] = {"softmax_scale": 0.9, "softcap": 2.0}
    cache.prefill(k[:, :50], v[:, :50], score[..., :50])
    now = slice(50, 51)
    out = cache.append_and_attend(q[:, now], k[:, now], v[:, now], score[..., now], **options)
    seen = (x[:, :51] for x in (q, k, v))
    want = flash_dmattn_func(*seen, None, score[..., :51], is_causal=True, window_size=W, **options)
    assert_near(out, want[:, 50:])


@pytest.mark.parametrize("active", [None, "some"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_operator(active: str | None, tokens: int) -> None:
    q, k, v, score = (x[..., :tokens] if x.dim() == 3 else x[:, :tokens] for x in sequence())
    cache = make()
    mask = None if active is None else torch.rand(B, tokens) < 0.5
    tensors = (cache.k, cache.v, cache.score, cache.position, cache.seen)
    opcheck(
        torch.ops.dmattn.cache_append_and_attend,
        (q, k, v, score, mask, *tensors, 0.3, 0.0),
    )


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 8, 9])
def test_tokens_may_lie_in_the_cache_itself(tokens: int, evict: bool) -> None:
    """Then the first tokens may overwrite the entries from which the later ones are read."""
    for seed in range(10):
        cache = make(evict)
        decode(cache, sequence(), 0, 30, 5)
        other = cache.clone()
        query = torch.randn(B, tokens, HK, D)
        torch.manual_seed(seed)
        score = torch.randn(B, HK, tokens) + 2
        last = slice(0, tokens)
        given = cache.k[:, last], cache.v[:, last], score
        copies = [t.clone() for t in given]
        got = cache.append_and_attend(query, *given)
        assert torch.equal(got, other.append_and_attend(query, *copies))
        assert torch.equal(cache.k, other.k) and torch.equal(cache.v, other.v)
        asked = make(evict)
        decode(asked, sequence(), 0, 30, 5)
        other = asked.clone()
        queries = asked.v[:, last]
        want = other.append_and_attend(queries.clone(), *copies)
        assert torch.equal(asked.append_and_attend(queries, *copies), want)


def test_a_query_may_be_the_entry_that_leaves() -> None:
    cache = make()
    decode(cache, sequence(), 0, 30, 5)
    cache.score[:, :, 0] = cache.score.amin() - 1
    other, query = cache.clone(), cache.k[:, :1]
    k, v = (torch.randn(B, 1, HK, D) for _ in range(2))
    new = k, v, torch.full((B, HK, 1), float(cache.score.amax()) + 1)
    want = other.append_and_attend(query.clone(), *new)
    assert torch.equal(cache.append_and_attend(query, *new), want)
    assert torch.equal(cache.k[:, :1], k)


def test_operators_of_a_draft() -> None:
    q, k, v, score = (x[..., :4] if x.dim() == 3 else x[:, :4] for x in sequence())
    cache = make()
    rows = Rows.find(cache._tensors(), None)
    tensors = (rows.k, rows.v, cache.score, cache.position, cache.seen)
    opcheck(torch.ops.dmattn.cache_draft, (q, k, v, score, *tensors, 0.3, 0.0))
    _, draft = torch.ops.dmattn.cache_draft(q, k, v, score, *tensors, 0.3, 0.0)
    opcheck(torch.ops.dmattn.cache_commit, (draft, torch.arange(B), *tensors))
    opcheck(torch.ops.dmattn.cache_seen, (cache.seen,))


@pytest.mark.parametrize("evict", [True, False])
def test_bad_steps_leave_the_cache_unchanged(evict: bool) -> None:
    whole = sequence()
    cache = make(evict)
    decode(cache, whole, 0, 20)
    before = cache.clone()
    q, k, v, score = (x[..., :1] if x.dim() == 3 else x[:, :1] for x in whole)
    bad: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
        ([q[..., :4], k, v, score], {}, ValueError, r"query: got shape \(2, 1, 4, 4\), wanted"),
        ([q[:, :, :3], k, v, score], {}, ValueError, "query: got 3 heads, wanted a multiple of 2"),
        ([q[:1], k, v, score], {}, ValueError, "query: got shape"),
        ([q, k[:, :, :1], v, score], {}, ValueError, r"key: got shape .*, wanted \(2, 1, 2, 8\)"),
        ([q, k, v.double(), score], {}, TypeError, "value: got dtype torch.float64, wanted"),
        ([q, k, v, score.half()], {}, TypeError, "score: got dtype torch.float16, wanted"),
        ([q, k, v, score[:, :1]], {}, ValueError, "score: got shape"),
        ([q.to("meta"), k, v, score], {}, ValueError, "query: got device meta, wanted cpu"),
        ([None, k, v, score], {}, TypeError, "query: got None, wanted a torch.Tensor"),
        ([q, None, v, score], {}, TypeError, "key: got None, wanted a torch.Tensor"),
        ([q, k, v, score], {"active": torch.ones(3).bool()}, ValueError, "active: got shape"),
        ([q, k, v, score], {"active": torch.ones(2)}, TypeError, "active: got dtype"),
        ([q.requires_grad_(), k, v, score], {}, RuntimeError, "require gradients"),
    ]
    for given, options, error, message in bad:
        with pytest.raises(error, match=message):
            cache.append_and_attend(*given, **options)
    with pytest.raises(RuntimeError, match="require gradients"):
        cache.prefill(k.clone().requires_grad_(), v, score)
    prompts: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"lengths": torch.ones(3).int()}, ValueError, "lengths: got shape"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths: got dtype"),
        ({"attn_mask": torch.ones(2, 2).bool()}, ValueError, "attn_mask: got shape"),
    ]
    if evict:
        other = select_keys(score, W + 1)
        prompts.append(({"selection": other}, ValueError, "selection: got window_size 17"))
    for options, error, message in prompts:
        with pytest.raises(error, match=message):
            cache.prefill(k, v, score, **options)
    with pytest.raises(TypeError, match="beam_idx: got dtype"):
        cache.reorder(torch.ones(2))
    for name in ("k", "v", "score", "position", "seen"):
        assert torch.equal(getattr(cache, name), getattr(before, name)), name


def test_capacity() -> None:
    whole = q, k, v, score = sequence()
    cache = make(evict=False)
    cache.prefill(k[:, :-2], v[:, :-2], score[..., :-2])
    before = cache.clone()
    with pytest.raises(ValueError, match=r"key: got 3 tokens after 228, wanted .* capacity of 230"):
        cache.append_and_attend(q[:, :3], k[:, :3], v[:, :3], score[..., :3])
    longer = [torch.cat([x, x], 1) for x in (k, v)]
    with pytest.raises(ValueError, match="key: got 460 tokens after 0"):
        cache.prefill(*longer, torch.cat([score, score], -1))
    assert torch.equal(cache.k, before.k) and torch.equal(cache.seen, before.seen)
    assert_near(decode(cache, whole, N - 2, N), attend(q, k, v, score)[:, -2:])


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"window_size": 0}, ValueError, "window_size: got 0"),
        ({"batch": -1}, ValueError, "batch: got -1, wanted an int of at least 0"),
        ({"nheads_k": 0}, ValueError, "nheads_k: got 0, wanted an int of at least 1"),
        ({"head_dim": 2.5}, TypeError, "head_dim: got 2.5"),
        ({"head_dim": 300}, ValueError, "head_dim: got 300, wanted 1 to 256"),
        ({"window_size": 2.5}, TypeError, "window_size: got 2.5"),
        ({"window_size": True}, TypeError, "window_size: got True"),
        ({"evict": "no"}, TypeError, "evict: got 'no' .*, wanted True or False"),
        ({"evict": False, "capacity": 5.5}, TypeError, "capacity: got 5.5"),
        ({"dtype": torch.float8_e4m3fn}, TypeError, "dtype: got torch.float8_e4m3fn, wanted"),
        ({"dtype": "float32"}, TypeError, "dtype: got 'float32' .*, wanted a torch.dtype"),
        ({"device": None}, TypeError, "device: got None, wanted a torch.device"),
        ({"device": "xpu"}, ValueError, "device: got xpu, wanted"),
        ({"evict": False}, ValueError, "capacity: got None, wanted an int, with evict=False"),
        ({"capacity": 9}, ValueError, "capacity: got 9 .*, wanted None"),
        ({"spare_rows": 33}, ValueError, "spare_rows: got 33, wanted at most 32"),
        ({"spare_rows": -1}, ValueError, "spare_rows: got -1, wanted an int of at least 0"),
        ({"spare_rows": True}, TypeError, "spare_rows: got True"),
        (
            {"spare_rows": 5, "evict": False, "capacity": 8},
            ValueError,
            "spare_rows: got 5, wanted None or 0 with evict=False",
        ),
        (
            {"evict": False, "capacity": 0},
            ValueError,
            "capacity: got 0, wanted an int of at least 1",
        ),
        ({"dtype": torch.int32}, TypeError, "dtype: got torch.int32, wanted torch.float16"),
        ({"score_dtype": torch.float16}, TypeError, "wanted torch.float32$"),
    ],
)
def test_bad_caches(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"batch": 2, "window_size": 4, "nheads_k": 2, "head_dim": 8}
    good |= {"dtype": torch.float32, "device": "cpu"}
    with pytest.raises(error, match=message):
        DynamicMaskCache(**(good | changes))
    assert "window_size=4" in repr(DynamicMaskCache(**good))


def layer(**options: Any) -> DynamicMaskAttention:
    torch.manual_seed(1)
    made = DynamicMaskAttention(32, 4, 2, **{"window_size": 6, "init_std": 0.3, **options})
    torch.nn.init.normal_(made.A)
    return made


@pytest.mark.parametrize("prompt", [1, 4, 20])
@pytest.mark.parametrize("step", [1, 3])
@torch.no_grad()
def test_layer_generates_what_it_was_trained_on(prompt: int, step: int) -> None:
    attention, x = layer(softcap=5.0), torch.randn(B, 31, 32)
    whole = attention(x)
    cache = attention.make_cache(B)
    outs = [attention(x[:, :prompt], cache=cache)]
    for t in range(prompt, 31, step):
        outs.append(attention(x[:, t : t + step], cache=cache))
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_layer_with_padded_prompts(side: str) -> None:
    attention, x, lengths = layer(), torch.randn(B, 40, 32), [20, 9]
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]
    prompt = x[:, :20]
    if side == "left":
        mask = mask.flip(1)
        prompt = torch.stack([x[b].roll(20 - n, 0)[:20] for b, n in enumerate(lengths)])
    cache = attention.make_cache(B)
    attention(prompt, attention_mask=mask, cache=cache)
    for t in range(10):
        now = torch.stack([x[b, n + t] for b, n in enumerate(lengths)])[:, None]
        out = attention(now, cache=cache)
        for b, n in enumerate(lengths):
            want = attention(x[b : b + 1, : n + t + 1])[0, -1]
            torch.testing.assert_close(out[b, 0], want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_cache_of_a_layer_has_the_dtype_of_its_values() -> None:
    assert layer().make_cache(B).k.dtype == torch.float32
    assert layer(dtype=torch.bfloat16).make_cache(B).k.dtype == torch.bfloat16
    attention, x = layer(), torch.randn(B, 31, 32)
    with torch.autocast("cpu", torch.bfloat16):
        whole, cache = attention(x), attention.make_cache(B)
        assert cache.k.dtype == torch.bfloat16
        assert cache.score.dtype == torch.float32
        outs = [attention(x[:, :20], cache=cache)]
        outs += [attention(x[:, t : t + 1], cache=cache) for t in range(20, 31)]
        assert layer(dtype=torch.float64).make_cache(B).k.dtype == torch.float64
        assert attention.make_cache(B, torch.float32).k.dtype == torch.float32
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "options, evict",
    [
        ({}, True),
        ({}, False),
        ({"num_score_heads": 4}, True),
        ({"num_score_heads": 4}, False),
        ({"window_size": None}, False),
        ({"window_size": None, "num_score_heads": 4}, False),
    ],
)
@pytest.mark.parametrize("prompt", [4, 20])
@torch.no_grad()
def test_layers_of_every_kind_decode(options: dict[str, Any], evict: bool, prompt: int) -> None:
    attention, x = layer(**options), torch.randn(B, 26, 32)
    mask = torch.ones(B, 26, dtype=torch.bool)
    mask[0, :3] = False
    whole = attention(x, (mask.cumsum(1) - 1).clamp(min=0), mask)
    cache = attention.make_cache(B, evict=evict, capacity=None if evict else 26)
    outs = [attention(x[:, :prompt], attention_mask=mask[:, :prompt], cache=cache)]
    outs += [attention(x[:, t : t + 2], cache=cache) for t in range(prompt, 26, 2)]
    got = torch.cat(outs, 1)
    torch.testing.assert_close(got[1], whole[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[0, 3:], whole[0, 3:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_layer_takes_the_masks_of_generation_loops() -> None:
    """They are int64, and cover all tokens so far: padding, prompt and what was generated."""
    attention, x = layer(), torch.randn(B, 30, 32)
    mask = torch.ones(B, 30, dtype=torch.int64)
    mask[0, :7], mask[1, 24:] = 0, 0
    caches = [attention.make_cache(B) for _ in range(2)]
    for cache in caches:
        attention(x[:, :20], attention_mask=mask[:, :20], cache=cache)
    for t in range(20, 30, 2):
        now = x[:, t : t + 2]
        long = attention(now, attention_mask=mask[:, : t + 2], cache=caches[0])
        short = attention(now, attention_mask=mask[:, t : t + 2].bool(), cache=caches[1])
        assert torch.equal(long, short)
    assert caches[0].seen.tolist() == [23, 24]
    with pytest.raises(ValueError, match=r"got shape \(2, 1\), wanted \(2, 2\) or \(2, tokens bef"):
        attention(now, attention_mask=mask[:, :1], cache=caches[0])
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(2, 9\), wanted \(2, 2\)$"):
        attention(now, attention_mask=mask[:, :9], cache=attention.make_cache(B))


@torch.no_grad()
def test_layers_do_not_share_a_cache() -> None:
    first, second, x = layer(), layer(), torch.randn(B, 3, 32)
    cache = first.make_cache(B)
    first(x, cache=cache)
    before = cache.clone()
    with pytest.raises(ValueError, match="cache: got one that holds the keys of another layer"):
        second(x, cache=cache)
    assert torch.equal(cache.seen, before.seen) and torch.equal(cache.k, before.k)
    with pytest.raises(ValueError, match="cache: got one that holds the keys of another layer"):
        second(x, cache=before)
    first(x, cache=before)
    second(x, cache=copy.deepcopy(cache))  # whose layer may have been copied as well
    cache.reset(torch.arange(B - 1))
    with pytest.raises(ValueError, match="cache: got one that holds the keys of another layer"):
        second(x, cache=cache)
    cache.reset(torch.arange(B))
    second(x, cache=cache)
    cache.reset()
    first(x, cache=cache)


@torch.no_grad()
def test_a_call_that_fails_does_not_make_a_cache_its_layers() -> None:
    first, second = (DynamicMaskAttention(32, 4, 2, window_size=5) for _ in range(2))
    cache = first.make_cache(2)
    first(torch.randn(2, 7, 32), cache=cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):  # of no layer
        with pytest.raises(ValueError, match="positions: got shape"):
            second(torch.randn(2, 1, 32), cache=copied, positions=torch.arange(3))
        first(torch.randn(2, 1, 32), cache=copied)
        with pytest.raises(ValueError, match="cache: got one that holds the keys of another"):
            second(torch.randn(2, 1, 32), cache=copied)


@torch.no_grad()
def test_layer_attends_before_it_fills_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = layer(), torch.randn(B, 9, 32)
    cache = attention.make_cache(B)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr("dmattn.scoring.flash_dmattn_func", fail)
    with pytest.raises(torch.OutOfMemoryError):
        attention(x, cache=cache)
    assert cache.is_empty and not cache.seen.any()


@torch.no_grad()
@pytest.mark.parametrize(
    "options,message",
    [
        ({"window_size": W, "is_causal": False}, "cache: got one for a layer with is_causal=False"),
        ({"window_size": None}, "cache: got one with evict=True for a layer with window_size=None"),
    ],
)
def test_layers_that_take_no_such_cache(options: dict[str, Any], message: str) -> None:
    cache = DynamicMaskAttention(32, 4, 2, window_size=W).make_cache(B)
    with pytest.raises(ValueError, match=message):
        DynamicMaskAttention(32, 4, 2, **options)(torch.randn(B, 3, 32), cache=cache)
    assert cache.is_empty


def test_layer_refuses_caches_that_do_not_fit() -> None:
    attention, x = layer(), torch.randn(B, 3, 32)
    with pytest.raises(RuntimeError, match="cache: got one with gradients enabled"):
        attention(x, cache=attention.make_cache(B))
    with torch.no_grad():
        with pytest.raises(
            ValueError, match=r"cache: got one of .*\(2, 16, 2, 8\), wanted \(2, 6, 2, 8\)"
        ):
            attention(x, cache=make())
        with pytest.raises(
            ValueError, match=r"cache: got one of .*\(2, 6, 2, 8\), wanted \(1, 6, 2, 8\)"
        ):
            attention(x[:1], cache=attention.make_cache(B))
    with pytest.raises(ValueError, match="is_causal: got False, wanted a causal layer"):
        layer(is_causal=False).make_cache(B)
    with pytest.raises(ValueError, match=r"window_size: got None, wanted a window .* evict=False"):
        layer(window_size=None).make_cache(B)
    with torch.no_grad(), pytest.raises(TypeError, match=r"cache: got 5 .*, wanted a Dynamic"):
        attention(x, cache=5)


@pytest.mark.parametrize("t", [2, 12])
@torch.no_grad()
def test_skipped_tokens_of_nan_change_nothing(t: int) -> None:
    """Their own output is NaN then; nothing else is."""
    q, k, v, score = (x.clone() for x in sequence(length=t + 20))
    cache = make()
    cache.append_and_attend(q[:, :20], k[:, :20], v[:, :20], score[..., :20])
    before, active = cache.clone(), torch.tensor([True, False])
    q, k, v, score = q[:, 20:], k[:, 20:], v[:, 20:], score[..., 20:]
    q[1] = k[1] = v[1] = float("nan")
    out = cache.append_and_attend(q, k, v, score, active=active)
    assert out[0].isfinite().all()
    assert torch.equal(cache.k[1], before.k[1]) and cache.seen.tolist() == [20 + t, 20]
    q[1] = 0
    assert before.append_and_attend(q, k, v, score, active=active).isfinite().all()
