"""KeyState: stretches, each called with the state of those before, give the whole sequence."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import KINDS, brute_force, make_scores
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch_releases import TRACES_EXTREMES

from dmattn import KeyState, explain, flash_dmattn_func, select_keys

FIELDS = ("k", "v", "score", "position", "seen", "has_start")


def kept_by_rows(scores: Tensor, window: int, mask: Tensor | None, bounds: list[int]) -> Tensor:
    """bool (B, heads, S, S): brute force for each document by itself."""
    seqlen = scores.shape[2]
    keep = torch.zeros(*scores.shape[:2], seqlen, seqlen, dtype=torch.bool)
    for a, b in itertools.pairwise(bounds):
        part = None if mask is None else mask[..., a:b]
        keep[..., a:b, a:b] = brute_force(scores[..., a:b], window, b - a, True, part)
    return keep


def in_stretches(
    cuts: list[int], tensors: tuple[Tensor, ...], mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, KeyState]:
    """out, lse and the last state, one call for each stretch between the cuts."""
    state, outs, lses = None, [], []
    q, k, v, bias = tensors
    for a, b in itertools.pairwise(cuts):
        out, lse, state = flash_dmattn_func(
            q[:, a:b],
            k[:, a:b],
            v[:, a:b],
            None if mask is None else mask[..., None, a:b],
            bias[..., a:b],
            is_causal=True,
            return_lse=True,
            state=state,
            return_state=True,
            **options,
        )
        outs.append(out)
        lses.append(lse)
    assert state is not None
    return torch.cat(outs, 1), torch.cat(lses, 2), state


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A window, and where a sequence is cut: stretches of 0, 1, w - 1, w, w + 1, and others."""
    window = draw(st.sampled_from((1, 2, 5, 16, 130)))
    length = st.sampled_from((0, 1, window - 1, window, window + 1)) | st.integers(0, 140)
    lengths = draw(st.lists(length, min_size=1, max_size=5))
    return window, [0, *itertools.accumulate(lengths)]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    split=splits(),
    kind=st.sampled_from(KINDS),
    score_heads=st.sampled_from((1, 2, 4)),
    masked=st.sampled_from((None, (2, 1), (1, 2), (2, 4))),
    documents=st.lists(st.floats(0, 1), max_size=4),
    softcap=st.sampled_from((0.0, 2.0)),
)
def test_any_split_gives_what_the_whole_sequence_does(
    seed: int,
    split: tuple[int, list[int]],
    kind: str,
    score_heads: int,
    masked: tuple[int, int] | None,
    documents: list[float],
    softcap: float,
) -> None:
    torch.manual_seed(seed)
    window, cuts = split
    seqlen = cuts[-1]
    bounds = [0, *sorted(round(x * seqlen) for x in documents), seqlen]
    scores = make_scores(kind, 2, score_heads, seqlen).double()
    mask = None if masked is None else torch.rand(*masked, seqlen) < 0.7
    heads = max(2, score_heads, 1 if masked is None else masked[1])
    full_scores = scores.repeat_interleave(heads // score_heads, 1)
    full_mask = mask
    if mask is not None:
        full_mask = mask.repeat_interleave(heads // mask.shape[1], 1).expand(2, -1, -1)
    keep = kept_by_rows(full_scores, window, full_mask, bounds)

    def leaves() -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        q = torch.randn(2, seqlen, 4, 4, dtype=torch.float64)
        k, v = torch.randn(2, 2, seqlen, 2, 4, dtype=torch.float64).unbind(0)
        return tuple(t.clone().requires_grad_() for t in (q, k, v, scores))

    whole, parts = leaves(), leaves()
    bias = torch.nan_to_num(whole[3], nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    expected = flash_dmattn_func(
        *whole[:3], keep, bias[:, :, None], is_causal=True, softcap=softcap, return_lse=True
    )
    *found, state = in_stretches(
        cuts,
        parts,
        mask,
        window_size=window,
        softcap=softcap,
        cu_seqlens=torch.tensor(bounds) if documents else None,
    )
    grads = [torch.randn_like(x).nan_to_num() for x in expected]
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10, equal_nan=kind == "inf")
    if kind != "inf":  # a logit of INF makes NaN of both
        torch.autograd.backward(expected, grads)
        torch.autograd.backward(found, grads)
        for x, y in zip(whole, parts, strict=True):
            torch.testing.assert_close(y.grad, x.grad, rtol=1e-9, atol=1e-9)
    check_kept(state, keep, parts, full_scores)
    assert state.seen.tolist() == [seqlen] * 2


def check_kept(state: KeyState, keep: Tensor, tensors: tuple[Tensor, ...], scores: Tensor) -> None:
    """The state holds what the last row keeps, in order, and nothing else."""
    _, k, v, _ = tensors
    group = state.k.shape[2] // k.shape[2]
    for b, h in itertools.product(range(2), range(state.k.shape[2])):
        kept = keep[b, h, -1].nonzero().flatten() if keep.shape[2] > 0 else torch.zeros(0).long()
        spare = state.window_size - len(kept)
        assert state.position[b, h].tolist() == [-1] * spare + kept.tolist()
        assert torch.equal(state.k[b, spare:, h], k[b, kept, h // group])
        assert torch.equal(state.v[b, spare:, h], v[b, kept, h // group])
        assert torch.equal(state.score[b, h, spare:], scores[b, h, kept])
        assert not state.k[b, :spare, h].any() and not state.v[b, :spare, h].any()
        assert torch.equal(state.score[b, h, :spare], torch.full((spare,), -math.inf).double())


def states_of(
    cuts: list[int], tensors: tuple[Tensor, ...], window: int, mask: Tensor, bounds: list[int]
) -> list[KeyState]:
    _, k, v, scores = tensors
    return [
        KeyState.of(
            k[:, a:b],
            v[:, a:b],
            scores[..., a:b],
            window,
            mask[:, a:b],
            [x - a for x in bounds],
        )
        for a, b in itertools.pairwise(cuts)
    ]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    split=splits(),
    kind=st.sampled_from(KINDS),
    documents=st.lists(st.floats(0, 1), max_size=2),
)
def test_states_merge_in_any_grouping(
    seed: int, split: tuple[int, list[int]], kind: str, documents: list[float]
) -> None:
    torch.manual_seed(seed)
    window, cuts = split
    seqlen = cuts[-1]
    bounds = [0, *sorted(round(x * seqlen) for x in documents), seqlen]
    q, k = torch.randn(2, seqlen, 2, 4), torch.randn(2, seqlen, 2, 4)
    tensors = (q, k, k + 1, make_scores(kind, 2, 2, seqlen))
    mask = torch.rand(2, seqlen) < 0.8
    states = states_of(cuts, tensors, window, mask, bounds)
    left, right = states[0], states[-1]
    for state in states[1:]:
        left = left.merge(state)
    for state in states[-2::-1]:
        right = state.merge(right)
    (whole,) = states_of([0, seqlen], tensors, window, mask, bounds)
    by_calls = in_stretches(cuts, tensors, mask[:, None], window_size=window, cu_seqlens=bounds)[2]
    for name in FIELDS:
        wanted = getattr(whole, name)
        for state in (left, right, by_calls):
            assert torch.equal(getattr(state, name), wanted), name


def stretch(length: int, **changes: Any) -> dict[str, Any]:
    q, k = torch.randn(2, length, 4, 8), torch.randn(2, length, 2, 8)
    given = {"query": q, "key": k, "value": k, "attn_bias": torch.randn(2, 2, length)}
    return given | {"is_causal": True, "window_size": 5, "return_state": True} | changes


def some_state() -> KeyState:
    state: KeyState = flash_dmattn_func(**stretch(9))[1]
    return state


@pytest.mark.parametrize(
    "changes,error,words",
    [
        ({"window_size": 6}, ValueError, "window_size 5, wanted 6"),
        ({"window_size": None}, ValueError, "window_size: got None"),
        ({"is_causal": False}, ValueError, "is_causal: got False"),
        ({"state": 3}, TypeError, "wanted a dmattn.KeyState"),
        ({"query": torch.randn(2, 8, 4, 8)}, ValueError, "in front of the stretch"),
        ({"attn_bias": torch.randn(2, 2, 7, 7)}, ValueError, "one score per key"),
        ({"attn_mask": torch.ones(2, 1, 7, 7).bool()}, ValueError, "rows of their own"),
        (
            {"attn_bias": torch.randn(2, 4, 7)},
            ValueError,
            "state: got a state of 2 heads, wanted 4, as",
        ),
        ({"attn_mask": torch.ones(2, 4, 1, 7).bool()}, ValueError, "of 2 heads, wanted 4, as"),
        ({"cu_seqlens": [0, 9, 4]}, ValueError, "boundaries that never fall"),
        ({"cu_seqlens": [0.5]}, TypeError, "cu_seqlens"),
        ({"cu_seqlens": [-(2**70), 4]}, ValueError, r"cu_seqlens: got .* wanted at least -2\*\*63"),
        ({"return_attn_probs": True}, ValueError, "return_attn_probs"),
        ({"return_state": "yes"}, TypeError, "return_state"),
    ],
)
def test_what_does_not_fit_a_state_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        flash_dmattn_func(**stretch(7, state=some_state()) | changes)


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda t: t.double(), "dtype"),
        (lambda t: t.to("meta"), "device"),
        (lambda t: t[:1], "shape"),
    ],
)
def test_a_state_of_other_tensors_is_refused(change: Any, words: str) -> None:
    state = some_state()
    other = KeyState(
        *[change(t) if t.is_floating_point() else t for t in pytree.tree_leaves(state)]
    )
    with pytest.raises((TypeError, ValueError), match=rf"state.k: got {words}"):
        flash_dmattn_func(**stretch(7, state=other))
    with pytest.raises((TypeError, ValueError), match=rf"later.k: got {words}"):
        state.merge(other)


@pytest.mark.parametrize(
    "mask,scores",
    [
        (torch.ones(2, 3, 1, 9), (2, 2, 9)),
        (torch.ones(2, 4, 1, 9), (2, 6, 9)),
        (torch.ones(2, 0, 1, 9), (2, 2, 9)),
        (torch.ones(3, 9), (2, 2, 9)),
        (torch.ones(2, 9, device="meta"), (2, 2, 9)),
    ],
)
def test_a_mask_that_does_not_fit_the_keys_of_a_state_is_refused(
    mask: Tensor, scores: tuple[int, ...]
) -> None:
    key = torch.randn(2, 9, 2, 8)
    with pytest.raises(ValueError, match="attn_mask: got"):
        KeyState.of(key, key, torch.randn(scores), 5, mask.bool())


def test_documents_need_sequences_that_have_seen_as_much() -> None:
    state = some_state()
    leaves, spec = pytree.tree_flatten(state)
    leaves[4] = torch.tensor([9, 8], dtype=torch.int32)
    uneven = pytree.tree_unflatten(leaves, spec)
    with pytest.raises(ValueError, match="unequal lengths"):
        flash_dmattn_func(**stretch(7, state=uneven, cu_seqlens=[0, 12]))
    flash_dmattn_func(**stretch(7, state=uneven))


@pytest.mark.parametrize(
    "key,value,error,words",
    [
        ((1, 9, 2, 8, torch.float8_e4m3fn), None, TypeError, "key: got .*float8_e4m3fn, wanted"),
        ((1, 9, 2, 8, torch.int32), None, TypeError, "key: got .*int32, wanted"),
        ((1, 9, 2, 300, torch.float32), None, ValueError, "key: got head_dim 300, wanted 1 to 256"),
        (
            (1, 9, 2, 8, torch.float32),
            (1, 9, 2, 0, torch.float32),
            ValueError,
            "value: got head_dim 0, wanted 1 to 256",
        ),
    ],
)
def test_keys_that_no_call_attends_to_make_no_state(
    key: Any, value: Any, error: type[Exception], words: str
) -> None:
    k, v = (torch.empty(at[:-1], dtype=at[-1]) for at in (key, value or key))
    with pytest.raises(error, match=words):
        KeyState.of(k, v, torch.randn(1, 2, 9), 2)


def test_a_state_has_a_window() -> None:
    key = torch.randn(1, 9, 2, 8)
    with pytest.raises(TypeError, match=r"window_size: got None, wanted .* keeps by score$"):
        KeyState.of(key, key, torch.randn(1, 2, 9), None)  # type: ignore[arg-type]


def test_boundaries_of_any_size_are_compared_as_they_are() -> None:
    """The difference of two boundaries may not fit in 64 bits."""
    given = stretch(7, state=some_state())
    want, _ = flash_dmattn_func(**given, cu_seqlens=[-5, 20])
    for bounds in ([-(2**63), 20], torch.tensor([-(2**63), 2**63 - 1])):
        got, _ = flash_dmattn_func(**given, cu_seqlens=bounds)
        assert torch.equal(got, want)


def test_boundaries_far_before_a_state_are_in_the_past() -> None:
    given = stretch(7)
    found = []
    for far in (0, -1, -(2**63)):
        state, rows = None, []
        for _ in range(2):
            out, state = flash_dmattn_func(**given | {"state": state}, cu_seqlens=[far, 3])
            rows.append(out)
        found.append(torch.cat(rows, 1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_state_leaves_its_graph_and_its_device() -> None:
    key = torch.randn(1, 9, 2, 8, requires_grad=True)
    state = KeyState.of(key, key, torch.randn(1, 2, 9), 4)
    assert state.k.requires_grad and not any(
        t.requires_grad for t in pytree.tree_leaves(state.detach())
    )
    assert torch.equal(state.detach().k, state.k)
    assert state.cpu() is state and state.to("cpu") is state
    assert {t.device.type for t in pytree.tree_leaves(state.to("meta"))} == {"meta"}
    state.to("cpu").k.sum().backward()
    assert key.grad is not None


def test_a_state_is_a_tree_of_tensors_that_can_be_saved(tmp_path: Any) -> None:
    state = some_state()
    assert len(pytree.tree_leaves(state)) == len(FIELDS)
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(getattr(loaded, name), getattr(state, name)) for name in FIELDS)
    assert "window_size=5" in repr(state)


def test_one_graph_of_any_size_with_a_mask() -> None:
    def state(key: Tensor, score: Tensor, mask: Tensor) -> KeyState:
        return KeyState.of(key, key, score, 3, attn_mask=mask)

    compiled = torch.compile(state, backend="eager", fullgraph=True, dynamic=True)
    key, mask = torch.randn(2, 7, 2, 8), torch.rand(2, 1, 1, 7) < 0.7
    for heads in (2, 4):
        given = key, torch.randn(2, heads, 7), mask.expand(-1, heads, -1, -1)
        assert torch.equal(compiled(*given).position, state(*given).position)


def test_states_are_made_and_merged_in_compiled_code() -> None:
    def both(given: dict[str, Any], cu_seqlens: Tensor, state: KeyState) -> tuple[KeyState, ...]:
        key, value, score = given["key"], given["value"], given["attn_bias"]
        made = KeyState.of(key, value, score, 4, cu_seqlens=cu_seqlens)
        return made, state.merge(KeyState.of(key, value, score, state.k.shape[1]))

    operands = stretch(9), torch.tensor([0, 3, 7, 9]), some_state()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(compiled(*operands), both(*operands), strict=True):
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_compiled_and_checkpointed_calls_take_and_return_states() -> None:
    state, given = some_state(), stretch(7)
    q, k = given["query"].requires_grad_(), given["key"].requires_grad_()

    def step(q: Tensor, k: Tensor, state: KeyState) -> Any:
        return flash_dmattn_func(**{**given, "query": q, "key": k, "state": state})

    out, new = step(q, k, state)
    wanted = torch.autograd.grad(out.sum() + new.k.sum(), (q, k))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for found_out, found in (
        compiled(q, k, state),
        checkpoint(step, q, k, state, use_reentrant=False),
    ):
        torch.testing.assert_close(found_out, out)
        assert torch.equal(found.position, new.position)
        grads = torch.autograd.grad(found_out.sum() + found.k.sum(), (q, k))
        for x, y in zip(grads, wanted, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 150, 400, 900])])
def test_few_graphs_serve_stretches_of_all_lengths(cu_seqlens: Tensor | None) -> None:
    """A graph for the first length, one for the others, and one more for a length of few rows."""

    def step(given: dict[str, Any], state: KeyState) -> Any:
        return flash_dmattn_func(**given, state=state, cu_seqlens=cu_seqlens)

    torch._dynamo.reset()
    counter, found = CompileCounter(), some_state()
    compiled, state = torch.compile(step, backend=counter, fullgraph=True), found
    for length in (150, 140, 310, 90, 260, 200):
        given = stretch(length)
        (out, state), (found_out, found) = step(given, state), compiled(given, found)
        torch.testing.assert_close(found_out, out)
        for name in FIELDS:
            assert torch.equal(getattr(found, name), getattr(state, name)), name
    assert counter.frame_count <= (3 if TRACES_EXTREMES else 4)


def test_half_precision_scores_are_kept_exactly() -> None:
    given = stretch(40)
    bias = given["attn_bias"].bfloat16()
    whole = {name: given[name].bfloat16() for name in ("query", "key", "value")}
    (out, state) = flash_dmattn_func(**given | whole | {"attn_bias": bias})
    parts, before = [], None
    for now in (slice(0, 13), slice(13, 40)):
        part = {name: t[:, now] for name, t in whole.items()}
        found, before = flash_dmattn_func(
            **given | part | {"attn_bias": bias[..., now], "state": before}
        )
        parts.append(found)
    torch.testing.assert_close(torch.cat(parts, 1), out)
    assert before is not None and torch.equal(before.position, state.position)
    assert before.score.dtype == torch.float32 and torch.equal(before.score, state.score)


def test_explain_takes_a_state() -> None:
    assert "cpu" in explain(**stretch(7, state=some_state()))


def test_boundaries_as_a_list_whatever_the_default_device() -> None:
    """A list is read and checked on the host, also where new tensors are made elsewhere."""
    given = stretch(20, cu_seqlens=[0, 9, 20])
    out, state = flash_dmattn_func(**given)
    with torch.device("meta"):
        found, its_state = flash_dmattn_func(**given)
        with pytest.raises(ValueError, match="boundaries that never fall"):
            flash_dmattn_func(**given | {"cu_seqlens": [0, 9, 4]})
    assert found.equal(out) and its_state.position.equal(state.position)
    scores = given["attn_bias"]
    chosen = select_keys(scores, 4, cu_seqlens=[0, 9, 20])
    with torch.device("meta"):
        assert select_keys(scores, 4, cu_seqlens=[0, 9, 20]).end.equal(chosen.end)


def test_the_states_of_vmap_are_shown() -> None:
    k, bias = torch.randn(3, 1, 6, 2, 8), torch.randn(3, 1, 2, 1, 6)
    many = torch.func.vmap(lambda k, bias: KeyState.of(k, k, bias, 3))(k, bias)
    assert "(3, 1, 3, 2, 8)" in repr(many)


def test_a_fall_of_boundaries_is_shown() -> None:
    q, bias = torch.randn(1, 6, 2, 8), torch.randn(1, 2, 1, 6)
    with pytest.raises(ValueError, match="cu_seqlens: got 2 at index 2 behind 5, wanted"):
        flash_dmattn_func(
            *(q, q, q), attn_bias=bias, is_causal=True, window_size=3, cu_seqlens=[0, 5, 2, 6]
        )
    with pytest.raises(ValueError, match=r"window_size: got None.*selection=dmattn.packed_docum"):
        flash_dmattn_func(q, q, q, is_causal=True, cu_seqlens=[0, 2, 6])
