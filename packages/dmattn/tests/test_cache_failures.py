"""A DynamicMaskCache is unchanged after a call that it refuses, or that fails."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import DynamicMaskCache, select_keys

B, H, HK, D, W, CAPACITY = 2, 4, 2, 8, 4, 12
NAMES = ("k", "v", "score", "position", "seen")


def make(evict: bool, **changes: Any) -> DynamicMaskCache:
    given: dict[str, Any] = {"batch": B, "window_size": W, "nheads_k": HK, "head_dim": D}
    given |= {"dtype": torch.float32, "device": "cpu", "evict": evict}
    given |= {} if evict else {"capacity": CAPACITY}
    return DynamicMaskCache(**(given | changes))


def tokens(count: int, seed: int = 0) -> list[Tensor]:
    """query, key, value (B, T, heads, D) and score (B, HK, T)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, count, n, D) for n in (H, HK, HK)] + [(B, HK, count)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def prefilled(evict: bool, count: int) -> DynamicMaskCache:
    cache = make(evict)
    cache.prefill(*tokens(count)[1:])
    return cache


def assert_equal(got: DynamicMaskCache, want: DynamicMaskCache) -> None:
    for name in NAMES:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.is_empty == want.is_empty


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize(
    "number, error, message",
    [
        ({"softcap": None}, TypeError, "softcap: got None, wanted a finite number of at least 0"),
        ({"softcap": -30.0}, ValueError, "softcap: got -30.0, wanted"),
        ({"softcap": math.nan}, ValueError, "softcap: got nan, wanted"),
        ({"softcap": math.inf}, ValueError, "softcap: got inf, wanted"),
        ({"softcap": torch.tensor(1.0)}, TypeError, "softcap: got a tensor of shape"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale: got nan, wanted a finite"),
        ({"softmax_scale": "no"}, TypeError, "softmax_scale: got 'no' .*, wanted a finite"),
        ({"softmax_scale": True}, TypeError, "softmax_scale: got True .*, wanted a finite"),
    ],
)
def test_wrong_numbers(
    evict: bool, held: int, number: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = prefilled(evict, held)
    before = cache.clone()
    with pytest.raises(error, match=message):
        cache.append_and_attend(*tokens(1), **number)
    assert_equal(cache, before)
    assert torch.equal(cache.append_and_attend(*tokens(1)), before.append_and_attend(*tokens(1)))
    assert cache.seen.tolist() == [held + 1] * B


@pytest.mark.parametrize("active", [None, torch.tensor([[True, False, True], [False, True, True]])])
@pytest.mark.parametrize("held", [0, 5])
def test_an_attention_that_fails_takes_its_tokens_back(
    monkeypatch: pytest.MonkeyPatch, active: Tensor | None, held: int
) -> None:
    """The attention of the third token runs out of memory, when all three have been added."""
    import dmattn.cache as module

    cache = prefilled(False, held)
    before, twin, calls, attend = cache.clone(), cache.clone(), [], module.flash_dmattn_func

    def fail_at_last(*given: Any, **named: Any) -> Tensor:
        calls.append(cache.seen.tolist())
        if len(calls) == 3:
            raise torch.OutOfMemoryError("none left")
        out: Tensor = attend(*given, **named)
        return out

    monkeypatch.setattr(module, "flash_dmattn_func", fail_at_last)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append_and_attend(*tokens(3), active=active)
    added = [3, 3] if active is None else active.sum(1).tolist()
    assert calls[2] == [held + n for n in added]
    assert_equal(cache, before)
    monkeypatch.undo()
    got, want = (c.append_and_attend(*tokens(3), active=active) for c in (cache, twin))
    assert torch.equal(got, want)
    assert_equal(cache, twin)


def test_a_failing_prompt_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prefilled(True, 9)
    before = cache.clone()

    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(Tensor, "gather", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.prefill(*tokens(7, seed=1)[1:])
    monkeypatch.undo()
    assert_equal(cache, before)


@pytest.mark.parametrize("evict", [True, False])
def test_no_tokens(evict: bool) -> None:
    cache = make(evict)
    for held in (0, 3):
        cache.prefill(*tokens(held)[1:])
        before = cache.clone()
        out = cache.append_and_attend(*tokens(0))
        assert out.shape == (B, 0, H, D) and out.is_contiguous()
        assert_equal(cache, before)


def test_room_is_for_tokens_and_not_for_padding() -> None:
    cache = make(False, capacity=6)
    real = torch.tensor([[False, False, True], [True, True, True]])
    cache.prefill(*tokens(3)[1:], attn_mask=real)
    first = torch.tensor([True, False])
    for _ in range(3):  # 4 tokens in each sequence
        cache.append_and_attend(*tokens(1), active=first)
    cache.append_and_attend(*tokens(1), active=~first)
    assert cache.seen.tolist() == [4, 4]
    for _ in range(5):  # nothing comes in
        cache.append_and_attend(*tokens(1), active=first & ~first)
    cache.append_and_attend(*tokens(2))
    assert cache.seen.tolist() == [6, 6]
    before = cache.clone()
    with pytest.raises(ValueError, match=r"key: got 1 tokens after 6, wanted .* capacity of 6"):
        cache.append_and_attend(*tokens(2), active=torch.tensor([[False, True], [False, False]]))
    assert_equal(cache, before)


@pytest.mark.parametrize("count", [3, 9])
def test_compiled_code_leaves_out_what_does_not_fit(count: int) -> None:
    """It cannot raise, as a CUDA graph cannot. Few tokens and many go in by different ways."""
    compiled, plain = make(False, capacity=10), make(False, capacity=10)
    torch._dynamo.reset()
    step = torch.compile(compiled.append_and_attend, backend="aot_eager", fullgraph=True)
    fits = torch.ones(B, count, dtype=torch.bool)
    for done in range(0, 15, count):
        given = tokens(count)
        fits[:] = torch.arange(done, done + count) < 10
        out, wanted = step(*given), plain.append_and_attend(*given, active=fits)
        torch.testing.assert_close(out[fits], wanted[fits])
        assert_equal(compiled, plain)
    assert compiled.seen.tolist() == [10] * B


def test_a_padded_prompt_may_be_longer_than_the_capacity() -> None:
    whole = tokens(30)
    real = torch.arange(30).expand(B, -1) % 3 == 0  # ten tokens
    cache, short = make(False), make(False)
    cache.prefill(*whole[1:], attn_mask=real)
    short.prefill(whole[1][:, ::3], whole[2][:, ::3], whole[3][..., ::3])
    assert_equal(cache, short)
    cache.append_and_attend(*tokens(2))
    with pytest.raises(ValueError, match="key: got 1 tokens after 12"):
        cache.append_and_attend(*tokens(1))
    real = torch.arange(30).expand(B, -1) % 2 == 0
    with pytest.raises(ValueError, match=r"key: got 15 tokens after 0, wanted .* capacity of 12"):
        cache.prefill(*whole[1:], attn_mask=real)
    assert cache.seen.tolist() == [12, 12]


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"lengths": [1, 2]}, TypeError, r"lengths: got \[1, 2\] \(list\), wanted a torch.Tensor"),
        ({"lengths": torch.tensor([-1, 3])}, ValueError, "lengths: got -1, wanted 0 to 5"),
        ({"lengths": torch.tensor([3, 6])}, ValueError, "lengths: got 6, wanted 0 to 5"),
        ({"lengths": torch.zeros(2).to_sparse()}, ValueError, "lengths: got a tensor of layout"),
        ({"attn_mask": [True]}, TypeError, "attn_mask: got .*list.*, wanted a torch.Tensor"),
        ({"attn_mask": torch.ones(B, 5)}, TypeError, "attn_mask: got dtype torch.float32"),
        ({"selection": [1]}, TypeError, r"selection: got \[1\] .*, wanted a dmattn.KeySelection"),
        ({"selection": select_keys(torch.randn(B, HK, 5), 3)}, ValueError, "window_size 3"),
        ({"selection": select_keys(torch.randn(B, HK, 6), W)}, ValueError, "selection: got"),
        ({"selection": select_keys(torch.randn(B, 4, 5), W)}, ValueError, "selection: got"),
    ],
)
def test_wrong_prompts(
    evict: bool, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = prefilled(evict, 3)
    before = cache.clone()
    with pytest.raises(error, match=message):
        cache.prefill(*tokens(5, seed=1)[1:], **given)
    assert_equal(cache, before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("evict", [True, False])
def test_wrong_tokens(evict: bool) -> None:
    cache = prefilled(evict, 3)
    before = cache.clone()
    q, k, v, score = tokens(1)
    nested = torch.nested.nested_tensor([q[0], q[1]])
    steps: list[tuple[list[Any], Any, type[Exception], str]] = [
        ([nested, k, v, score], None, ValueError, "query: got a tensor of layout nested"),
        ([q, k.to_sparse(), v, score], None, ValueError, "key: got a tensor of layout"),
        ([q, k, [1], score], None, TypeError, r"value: got \[1\] \(list\), wanted a torch.Tensor"),
        ([q, k, v, score[0]], None, ValueError, r"score: got shape \(2, 1\), wanted \(2, 2, 1\)"),
        ([q, k, v, score], [True, True], TypeError, "active: got .*list.*, wanted a torch.Tensor"),
        ([q, k, v, score], torch.ones(2, 1).int(), TypeError, "active: got dtype torch.int32"),
        ([q, k, v, score], torch.ones(2, 1, device="meta").bool(), ValueError, "active: got dev"),
    ]
    for given, active, error, message in steps:
        with pytest.raises(error, match=message):
            cache.append_and_attend(*given, active=active)
        assert_equal(cache, before)


def test_wrong_beams() -> None:
    cache = prefilled(True, 3)
    before = cache.clone()
    indices: list[tuple[Any, type[Exception], str]] = [
        ([0, 1], TypeError, r"got \[0, 1\] \(list\), wanted a torch.Tensor"),
        (None, TypeError, "got None, wanted a torch.Tensor"),
        (torch.tensor([0, 2]), ValueError, "got 2, wanted 0 to 1"),
        (torch.tensor([-1, 0]), ValueError, "got -1, wanted 0 to 1"),
        (torch.tensor([[0, 1]]), ValueError, r"got shape \(1, 2\), wanted \(N,\)"),
        (torch.tensor([0, 1]).to_sparse(), ValueError, "got a tensor of layout torch.sparse"),
    ]
    for index, error, message in indices:
        with pytest.raises(error, match="beam_idx: " + message):
            cache.reorder(index)
        with pytest.raises(error, match="indices: " + message):
            cache.batch_select_indices(index)
    with pytest.raises(ValueError, match=r"beam_idx: got shape \(3,\), .*batch_select_indices"):
        cache.reorder(torch.tensor([0, 1, 1]))
    for repeats, wrong in ((0, ValueError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(wrong, match=f"repeats: got {repeats}"):
            cache.batch_repeat_interleave(repeats)  # type: ignore[arg-type]
    assert_equal(cache, before)


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("garbage", [-(2**31), -1, 2**31 - 1])
def test_impossible_counters_lead_nowhere(evict: bool, garbage: int) -> None:
    cache = prefilled(evict, 3)
    cache.seen.fill_(garbage)
    cache.position.fill_(garbage)
    assert torch.isfinite(cache.append_and_attend(*tokens(2))).all()


def test_autocast_is_named() -> None:
    q, k, v, score = tokens(1)
    half = [t.bfloat16() for t in (q, k, v)]
    named = pytest.raises(TypeError, match=r"query: got dtype torch.bfloat16, .*torch.autocast")
    with torch.autocast("cpu", torch.bfloat16), named:
        make(True).append_and_attend(*half, score)
    made_there = make(True, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"query: got dtype torch.float32, .*torch.autocast"):
        made_there.append_and_attend(q, k, v, score)


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_autocast_changes_no_cache_of_float32(evict: bool, count: int) -> None:
    cache, other = prefilled(evict, 3), prefilled(evict, 3)
    step = tokens(count, 1)
    with torch.autocast("cpu", torch.bfloat16):
        drafted, out = cache.peek(*step), cache.append_and_attend(*step)
    torch.testing.assert_close(out, drafted)
    assert torch.equal(out, other.append_and_attend(*step))
