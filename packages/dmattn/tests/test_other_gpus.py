"""GPUs that the compiled kernels do not serve make selections and caches by operations of torch.

None of them is needed here. That all tensors are made on the device of the input is tested with
"meta" as torch's default device: whatever is made without naming a device then has no values. Which
implementation is chosen is tested with tensors on the CPU that claim to be on CUDA.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dmattn import explain, explain_varlen, select_keys
from dmattn.backends.cpu import attention, selection
from dmattn.backends.cpu import cache as cpu_cache
from dmattn.backends.cuda import kernels
from dmattn.backends.cuda import selection as cuda_selection
from dmattn.cache_state import CacheTensors, CacheTokens
from dmattn.ops import cache as ops_cache
from dmattn.ops.keys import copy_keys, join_keys, keep_keys
from dmattn.ops.selection import (
    build_key_lists,
    chooses_on_host,
    document_ends,
    prepared_select,
)
from dmattn.ops.selection import select_keys as select
from dmattn.problem import Problem

OPERATORS = (
    *("fwd", "bwd", "select_keys", "build_key_lists", "document_ends", "join_keys", "keep_keys"),
    *("cache_append", "cache_append_and_attend", "cache_draft", "cache_commit"),
)
BOUNDS = torch.tensor([0, 100, 100, 300], dtype=torch.int32)
SCORES = torch.randn(2, 2, 300, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(300).expand(2, 1, 300) % 3 > 0
END = select_keys(SCORES, 40).end


def assert_makes_all_on_the_device(function: Callable[[], Any]) -> None:
    """No tensor of `function`, whose inputs are on the CPU, is made on torch's default device."""
    expected = [t for t in pytree.tree_leaves(function()) if t is not None]
    with torch.device("meta"):
        found = [t for t in pytree.tree_leaves(function()) if t is not None]
    for a, b in zip(found, expected, strict=True):
        assert a.device.type == "cpu" and a.dtype == b.dtype
        assert torch.equal(a, b)


def test_a_forgotten_device_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_makes_all_on_the_device(lambda: torch.zeros(300))


@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("causal", [True, False])
def test_selections_stay_on_the_device(
    causal: bool, mask: Tensor | None, bounds: Tensor | None
) -> None:
    if bounds is None or causal:
        settings = (40, 300, causal, bounds)
        assert_makes_all_on_the_device(lambda: select(SCORES, mask, *settings, direct=True))


@pytest.mark.parametrize("reach", [None, 60])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_lists_stay_on_the_device(
    reach: int | None, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_STEP_ENTRIES", step)
    assert_makes_all_on_the_device(lambda: build_key_lists(END, 290, 256, reach, direct=True))


@pytest.mark.parametrize("module", [selection, cuda_selection])
def test_ends_of_documents_stay_on_the_device(module: Any) -> None:
    assert_makes_all_on_the_device(lambda: module.document_ends(BOUNDS, 300))
    assert torch.equal(module.document_ends(BOUNDS, 300), document_ends(BOUNDS, 300))


def rows(count: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, count, heads, 8), torch.randn(2, count, heads, 8)
    return k, v, torch.randn(2, heads, count)


@pytest.mark.parametrize("seen", [None, torch.tensor([7, 9], dtype=torch.int32)])
@pytest.mark.parametrize("held", [0, 5])
def test_copies_of_keys_stay_on_the_device(held: int, seen: Tensor | None) -> None:
    first, new, place = rows(5), rows(20, 1), torch.arange(5, dtype=torch.int32).flip(0)
    mask = torch.rand(2, 1, 20) < 0.8
    place = place.expand(2, 2, 5)
    assert_makes_all_on_the_device(lambda: join_keys(first, new, mask, 8, True, place))
    keys = rows(25)
    end = select_keys(keys[2], 6).end
    position = torch.arange(held, dtype=torch.int32).expand(2, 2, held) if held else None
    given = (24, end, torch.arange(25, dtype=torch.int32).expand(2, 2, 25), keys, position, seen, 6)
    assert_makes_all_on_the_device(lambda: keep_keys(*given, direct=True))

    def copied() -> Any:
        into = tuple(t.new_empty(t.shape) for t in keys)
        copy_keys(keys, into)  # type: ignore[arg-type]  # a tuple of three
        return into

    assert_makes_all_on_the_device(copied)


def cache(entries: int = 6, spare: int = 3, dtype: torch.dtype = torch.float32) -> CacheTensors:
    """A cache that holds 4 keys in each of 2 slots."""
    k, v, score = (t.to(dtype) for t in rows(entries + spare))
    position = torch.arange(entries, dtype=torch.int32).expand(2, 2, entries).clone()
    score, position[..., 4:] = score[..., :entries].contiguous(), -1
    score[..., 4:] = -torch.inf
    return CacheTensors(k, v, score, position, torch.full((2,), 4, dtype=torch.int32))


def copy_of(held: CacheTensors) -> CacheTensors:
    return CacheTensors(*(t.clone() for t in held))


@pytest.mark.parametrize("active", [None, torch.tensor([[True, True, False], [True, False, True]])])
@pytest.mark.parametrize("evict", [True, False])
def test_caches_stay_on_the_device(evict: bool, active: Tensor | None) -> None:
    held, new, q = cache(spare=0), CacheTokens(*rows(3), active), torch.randn(2, 3, 4, 8)

    def appended() -> Any:
        state = copy_of(held)
        out = cpu_cache.append_to_cache(new, state, evict, q if evict else None)
        return state, out

    assert_makes_all_on_the_device(appended)


def test_drafts_stay_on_the_device() -> None:
    held, new, q = cache(), CacheTokens(*rows(3), None), torch.randn(2, 3, 4, 8)

    def drafted() -> Any:
        state = copy_of(held)
        out, draft = cpu_cache.draft_tokens(q, new, state, 0.25, 0.0)
        cpu_cache.commit_draft(draft, state.seen - 2, state)
        return out, draft, state

    assert_makes_all_on_the_device(drafted)


@pytest.mark.parametrize("kind", ["causal", "listed", "mask", "listed, not causal"])
def test_attention_in_blocks_stays_on_the_device(kind: str) -> None:
    q, (k, v, score) = torch.randn(2, 290, 4, 8), rows(300)
    causal = kind in ("causal", "listed")
    lists = select_keys(score, 40, causal, query_len=290).lists if "listed" in kind else None
    mask = MASK[:, :, None] if kind == "mask" else None
    problem = Problem(q, k, v, mask, score[:, :, None], is_causal=causal, key_lists=lists)
    assert_makes_all_on_the_device(lambda: attention.forward(problem))


class OnCuda(Tensor):
    """A tensor on the CPU that claims to be on the first CUDA device."""

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def claimed(given: Any) -> Any:
    """`given`, with all its tensors as `OnCuda`."""
    return pytree.tree_map_only(Tensor, lambda t: t.as_subclass(OnCuda), given)


def calls_of_all_operators() -> dict[str, Callable[[], Any]]:
    """A call of each operator but attention, directly or by torch's dispatcher, in `OnCuda`."""
    scores, mask, bounds, end = claimed((SCORES, MASK, BOUNDS, END))
    first, new, keys, small = claimed((rows(5), rows(20), rows(300), rows(3)))
    held, spare, q = claimed((cache(spare=0), cache(), torch.randn(2, 3, 4, 8)))
    taken = CacheTokens(*small, None)
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: torch.ops.dmattn.cache_append(*taken, *held, True),
        "attend": lambda: torch.ops.dmattn.cache_append_and_attend(q, *taken, *held, 1.0, 0.0),
        "draft": lambda: torch.ops.dmattn.cache_draft(q, *small, *spare, 1.0, 0.0),
        "commit": lambda: torch.ops.dmattn.cache_commit(
            claimed(torch.zeros(2, 2, 3, 4, dtype=torch.float64)), spare.seen, *spare
        ),
        "prepared": lambda: prepared_select(
            claimed(select(SCORES, None, 40, 300, True)), 40, 300, True
        )(scores, None),
    }
    for direct in (True, False):
        ways: dict[str, Callable[..., Any]] = {
            "select": lambda way: select(scores, mask, 40, 300, True, bounds, direct=way),
            "select of all": lambda way: select(scores, None, 40, 300, False, direct=way),
            "lists": lambda way: build_key_lists(end, 290, 256, 60, direct=way),
            "join": lambda way: join_keys(first, new, None, 8, way),
            "keep": lambda way: keep_keys(299, end, None, keys, None, None, 40, way),
        }
        for name, call in ways.items():
            calls[f"{name}, direct={direct}"] = lambda call=call, way=direct: call(way)
    return calls


CALLS = tuple(calls_of_all_operators())


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call on a machine where the compiled kernels are not installed."""
    monkeypatch.setitem(sys.modules, "dmattn_kernels", None)
    monkeypatch.setattr(kernels, "checked_devices", set())
    kernels.load_kernels.cache_clear()
    torch.manual_seed(0)
    yield calls_of_all_operators()[request.param]
    kernels.load_kernels.cache_clear()


def test_without_kernels_for_the_gpu_torch_takes_over(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "unserved", lambda device: "wanted a newer GPU")
    call()


def test_a_gpu_that_they_serve_needs_them_installed(
    call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "unserved", lambda device: None)
    with pytest.raises(RuntimeError, match="dmattn-kernels: got none that can be loaded"):
        call()


def test_results_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unserved", lambda device: "wanted a newer GPU")
    wanted = select(SCORES, MASK, 40, 300, True, BOUNDS, direct=True)
    given = claimed((SCORES, MASK))
    found = select(*given, 40, 300, True, claimed(BOUNDS), direct=True)
    assert all(map(torch.equal, found, wanted))
    again = prepared_select(claimed(wanted), 40, 300, True)(*given)
    assert all(map(torch.equal, again, select(SCORES, MASK, 40, 300, True)))
    keys = rows(300)
    kept = keep_keys(299, claimed(END), None, claimed(keys), None, None, 40, True)
    assert all(map(torch.equal, kept, keep_keys(299, END, None, keys, None, None, 40, True)))


@pytest.mark.parametrize("device", ["CPU", "CUDA", "XPU"])
def test_operators_are_registered_for_every_device(device: str) -> None:
    for name in OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dmattn::{name}", device), name


def test_the_fake_of_a_draft_has_the_dtype_of_its_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = []
    for reason in ("wanted a newer GPU", None):
        monkeypatch.setattr(kernels, "unserved", lambda device, reason=reason: reason)
        found.append(ops_cache._drafts_by_kernels(claimed(SCORES)))
    assert found == [False, True] and not ops_cache._drafts_by_kernels(SCORES)
    monkeypatch.setattr(kernels, "unserved", lambda device: pytest.fail("there is no such device"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops_cache._drafts_by_kernels(claimed(SCORES))


def test_what_is_chosen_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = claimed(SCORES)
    monkeypatch.setattr(kernels, "unserved", lambda device: "wanted a newer GPU")
    assert chooses_on_host(on_gpu)
    monkeypatch.setattr(kernels, "unserved", lambda device: None)
    assert not chooses_on_host(on_gpu)
    assert not chooses_on_host(SCORES) and not chooses_on_host(SCORES.to("meta"))


def test_explain_says_that_keys_are_chosen_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmattn.slow_paths.chooses_on_host", lambda t: True)
    q, (k, v, score) = torch.randn(2, 300, 2, 8), rows(300)
    words = "slow: window_size: no compiled kernels serve cpu, so the host waits for the scores"
    assert words in explain(q, k, v, None, score, is_causal=True, window_size=40)
    assert words not in explain(q, k, v, None, score, is_causal=True, window_size=300)
    assert words not in explain(q, k, v, None, score, window_size=40)
    chosen = select_keys(score, 40)
    assert words not in explain(q, k, v, None, score, is_causal=True, selection=chosen)
    packed = (q[0], k[0], v[0], BOUNDS, BOUNDS, 200, 200)
    options = {"attn_bias": score[0].mT, "window_size": 40}
    assert words in explain_varlen(*packed, is_causal=True, **options)
    assert words not in explain_varlen(*packed, **options)
