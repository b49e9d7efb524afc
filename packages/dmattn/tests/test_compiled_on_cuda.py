"""Every way to call the package under torch.compile on CUDA, traced without a GPU.

Code that asks torch.cuda something behind `t.is_cuda` breaks the graph on a GPU alone, which tests
with tensors on the CPU cannot see. Here tensors are fake ones on CUDA, see `fake_cuda.py`: nothing
is computed, but the graphs are those of a GPU. They have to be whole (fullgraph=True), hold no
tensor on the CPU, and be as few as the documentation promises: one more when a length changes for
the first time, none for further lengths, and one for all steps of a cache.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import check_graphs, fake_gpu
from torch import Tensor
from torch_releases import TORCH

from dmattn import (
    DynamicMaskAttention,
    DynamicMaskCache,
    KeySelection,
    KeyState,
    create_mask,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    get_available_backends,
    packed_documents,
    select_keys,
    sliding_window,
    top_window_mask,
)
from dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward
from dmattn.utils.padding import index_first_axis, pad_input

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="tried with fake tensors of torch 2.13")

B, H, HK, D, W = 2, 4, 2, 64, 64
LENGTHS = (300, 310, 520)  # the second graph serves the third length
LONGEST = 200  # of packed sequences
Case = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]


@pytest.fixture
def gpu() -> Iterator[None]:
    with fake_gpu():
        yield


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def single(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def flags(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=torch.bool)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype)


def longs(*shape: int) -> Tensor:
    return ints(*shape, dtype=torch.int64)


def qkv(rows: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = rows if keys is None else keys
    return half(B, rows, H, D), half(B, keys, HK, D), half(B, keys, HK, D)


def packed(rows: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = rows if keys is None else keys
    return half(rows, H, D), half(keys, HK, D), half(keys, HK, D)


# --- the harness itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        torch.cuda.is_current_stream_capturing,
        lambda: torch.cuda.get_device_capability(0) > (8, 0),
        lambda: torch.cuda.current_stream().cuda_stream > 0,
    ],
)
def test_a_question_to_cuda_would_be_noticed(gpu: None, ask: Callable[[], bool]) -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        check_graphs(lambda q: q + 1 if q.is_cuda and ask() else q, [(half(3),)])


def test_a_tensor_on_the_cpu_would_be_noticed(gpu: None) -> None:
    with pytest.raises(RuntimeError, match="on cpu"):
        check_graphs(lambda q: q + torch.arange(3).to("cuda"), [(half(3),)])


def test_a_read_by_the_host_would_be_noticed(gpu: None) -> None:
    with pytest.raises(RuntimeError):
        check_graphs(lambda q: q + 1 if bool((q > 0).any()) else q, [(half(3),)])


# --- attention ------------------------------------------------------------------------------------


def attention(make: Callable[[int], tuple[Any, ...]], *names: str, **options: Any) -> Case:
    """`flash_dmattn_func` of query, key, value, and what else `make` returns under these names."""

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        return flash_dmattn_func(q, k, v, **dict(zip(names, others, strict=True)), **options)

    return call, make


def selected(make: Callable[[int], tuple[Any, ...]], select: Callable[..., KeySelection]) -> Case:
    """`flash_dmattn_func` with a selection of what `make` returns behind query, key and value.

    The first of that is the bias as well, if it has the form of one.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        chosen = select(k, *others)
        bias = others[0] if others and others[0].is_floating_point() else None
        return flash_dmattn_func(
            q, k, v, attn_bias=bias, is_causal=chosen.is_causal, selection=chosen
        )

    return call, make


def varlen(make: Callable[[int], tuple[Any, ...]], *names: str, **options: Any) -> Case:
    """`flash_dmattn_varlen_func` of packed sequences; `make` also returns the boundaries."""

    def call(q: Tensor, k: Tensor, v: Tensor, bounds: Any, keys: Any, *others: Any) -> Any:
        more = dict(zip(names, others, strict=True))
        return flash_dmattn_varlen_func(q, k, v, bounds, keys, LONGEST, LONGEST, **more, **options)

    return call, make


def two_stretches(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    options = {"attn_bias": bias, "is_causal": True, "window_size": W, "return_state": True}
    first, state = flash_dmattn_func(q, k, v, **options)
    second, state = flash_dmattn_func(q, k, v, **options, state=state)
    return first, second, state


def merged_states(k: Tensor, v: Tensor, scores: Tensor) -> KeyState:
    return KeyState.of(k, v, scores, W).merge(KeyState.of(k, v, scores, W))


def autocast(*operands: Tensor) -> Any:
    with torch.autocast("cuda", torch.float16):
        return flash_dmattn_func(*operands, is_causal=True, window_size=W)


def with_bias(n: int) -> tuple[Any, ...]:
    return *qkv(n), half(B, HK, 1, n)


CAUSAL, WINDOW = {"is_causal": True}, {"is_causal": True, "window_size": W}
MASK, BIAS = "attn_mask", "attn_bias"
CASES: dict[str, Case] = {
    "plain": attention(qkv),
    "causal": attention(lambda n: qkv(n, n + 7), **CAUSAL, softcap=3.0, return_lse=True),
    "deterministic": attention(qkv, **CAUSAL, deterministic=True),
    "head dimensions": attention(
        lambda n: (half(B, n, H, 36), half(B, n, HK, 36), half(B, n, HK, 20)), **CAUSAL
    ),
    "padding": attention(lambda n: (*qkv(n), longs(B, n)), MASK),
    "key mask": attention(lambda n: (*qkv(n), flags(B, HK, 1, n)), MASK, **CAUSAL),
    "dense mask": attention(lambda n: (*qkv(n), flags(B, 1, n, n)), MASK),
    "key bias": attention(lambda n: (*qkv(n), single(B, HK, 1, n)), BIAS, **CAUSAL),
    "row bias": attention(lambda n: (*qkv(n), half(1, H, n, 1)), BIAS),
    "dense bias": attention(lambda n: (*qkv(n), half(1, H, n, n)), BIAS),
    "sinks": attention(lambda n: (*qkv(n), single(H)), "sinks", **CAUSAL, return_lse=True),
    "float32": attention(
        lambda n: (single(B, n, H, D), single(B, n, HK, D), single(B, n, HK, D)), **CAUSAL
    ),
    "autocast": (autocast, lambda n: (*(single(B, n, H, D) for _ in "qkv"), None, single(B, H, n))),
    "window": attention(with_bias, BIAS, **WINDOW),
    "window of all rows": attention(with_bias, BIAS, window_size=W),
    "window and more": attention(
        lambda n: (*qkv(n), longs(B, n), half(B, HK, n), single(H)),
        *(MASK, BIAS, "sinks"),
        **WINDOW,
        return_lse=True,
    ),
    "window, rows of their own": attention(
        lambda n: (*qkv(n), flags(B, 1, n, n), half(B, HK, n, n)), MASK, BIAS, **WINDOW
    ),
    "window, more rows than keys": attention(
        lambda n: (*qkv(n + 9, n), half(B, HK, 1, n)), BIAS, **WINDOW, return_lse=True
    ),
    "window, documents": attention(
        lambda n: (*with_bias(n), longs(5)), BIAS, "cu_seqlens", **WINDOW
    ),
    "probabilities": attention(with_bias, BIAS, **WINDOW, return_attn_probs=True),
    "state": attention(
        lambda n: (*qkv(n), flags(B, n), half(B, HK, 1, n), ints(5)),
        *(MASK, BIAS, "cu_seqlens"),
        **WINDOW,
        return_state=True,
    ),
    "two stretches": (two_stretches, with_bias),
    "merged states": (merged_states, lambda n: (*qkv(n)[1:], half(B, HK, n))),
    "sliding window": selected(qkv, lambda k: sliding_window(k.shape[1], W, device=k.device)),
    "masked sliding window": selected(
        lambda n: (*qkv(n), longs(B, n)), lambda k, m: sliding_window(k.shape[1], W, attn_mask=m)
    ),
    "documents": selected(
        lambda n: (*qkv(n), longs(5)), lambda k, c: packed_documents(c, key_len=k.shape[1])
    ),
    "documents by number": selected(
        lambda n: (*qkv(n), longs(B, n)),
        lambda k, ids: packed_documents(document_ids=ids, window_size=W),
    ),
    "selection": selected(
        lambda n: (*qkv(n), half(B, HK, 1, n), flags(B, n)),
        lambda k, scores, mask: select_keys(scores, W, attn_mask=mask),
    ),
    "selection for all rows": selected(with_bias, lambda k, s: select_keys(s, W, False)),
    "selection in documents": selected(
        lambda n: (*with_bias(n), ints(5)), lambda k, s, c: select_keys(s, W, cu_seqlens=c)
    ),
    "intervals": selected(
        lambda n: (*qkv(n), longs(B, HK, n)),
        lambda k, end: KeySelection.from_intervals(end, reach=W),
    ),
    "selection beside a mask": (
        lambda q, k, v, s, m: flash_dmattn_func(q, k, v, m, s, selection=select_keys(s, W, False)),
        lambda n: (*with_bias(n), flags(B, n)),
    ),
    "packed": varlen(lambda n: (*packed(n), ints(4), None), return_lse=True),
    "packed, two boundaries": varlen(
        lambda n: (*packed(n, n + 5), ints(4), ints(4)), **CAUSAL, softcap=2.0
    ),
    "packed, key mask": varlen(lambda n: (*packed(n), ints(4), None, flags(n, 1)), MASK, **CAUSAL),
    "packed, key bias": varlen(lambda n: (*packed(n), ints(4), None, half(n, HK)), BIAS, **CAUSAL),
    "packed, row bias": varlen(
        lambda n: (*packed(n), ints(4), None, half(n, H, LONGEST), single(H)), BIAS, "sinks"
    ),
    "packed window": varlen(
        lambda n: (*packed(n), ints(4), None, flags(n, HK), half(n, HK), single(H)),
        *(MASK, BIAS, "sinks"),
        **WINDOW,
    ),
    "packed window, two boundaries": varlen(
        lambda n: (*packed(n, n + 5), ints(4), ints(4), half(n + 5, HK)),
        BIAS,
        **WINDOW,
        return_lse=True,
    ),
    "packed window of all rows": varlen(
        lambda n: (*packed(n), ints(4), None, half(n, HK)), BIAS, window_size=W
    ),
    "vmap": (
        torch.func.vmap(lambda q, k, v, s: flash_dmattn_func(q, k, v, None, s, **WINDOW)),
        lambda n: (half(3, B, n, H, D), *half(2, 3, B, n, HK, D), half(3, B, HK, 1, n)),
    ),
    "layer of flash-dmattn": (
        lambda q, k, v, s: flash_dynamic_mask_attention_forward(
            torch.nn.Identity(), q, k, v, None, s, keep_window_size=W
        )[0],
        lambda n: (half(B, H, n, D), *half(2, B, HK, n, D), half(B, HK, n)),
    ),
    "padded again": (
        lambda x, place: index_first_axis(pad_input(x, place, 2, 300).flatten(0, 1), place),
        lambda n: (half(n, H, D), longs(n)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_and_their_gradients(gpu: None, name: str) -> None:
    function, make = CASES[name]
    check_graphs(function, [make(n) for n in LENGTHS], backward=True)


@pytest.mark.parametrize("name", ["window", "packed, key bias"])
def test_the_second_graph_serves_further_lengths(gpu: None, name: str) -> None:
    function, make = CASES[name]
    check_graphs(function, [make(n) for n in LENGTHS], backward=True, most=2)


# Without gradients, operators without a backward stand in for operations of torch.
@pytest.mark.parametrize(
    "name", ["plain", "window", "state", "two stretches", "merged states", "packed window"]
)
def test_calls_without_gradients(gpu: None, name: str) -> None:
    function, make = CASES[name]
    check_graphs(function, [make(n) for n in LENGTHS])


@pytest.mark.parametrize("backend", ["cuda", "triton", "flex"])
def test_backends_by_name(gpu: None, backend: str) -> None:
    """A graph has the operators, within which the backend runs."""

    def call(*operands: Any) -> Any:
        options = {**WINDOW, "return_lse": True, "backend": backend}
        return flash_dmattn_func(*operands, **options)

    calls = [(*qkv(n), None, half(B, HK, n)) for n in LENGTHS]
    check_graphs(call, calls, backward=True)


@pytest.mark.parametrize("backend", ["cuda", "cpu", "flex"])
def test_backends_are_asked_for_within_compiled_code(gpu: None, backend: str) -> None:
    def call(q: Tensor) -> Tensor:
        found: Tensor = flash_dmattn_func_auto(backend)(q, q, q)
        return found * len(get_available_backends())

    check_graphs(call, [(half(B, n, H, D),) for n in LENGTHS])


@pytest.mark.parametrize("causal", [True, False])
def test_masks(gpu: None, causal: bool) -> None:
    def make(bias: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        n = bias.shape[3]
        chosen = select_keys(bias, W, causal)
        masks = create_mask(bias, padding, B, n, n, W), dynamic_mask(bias, None, W)
        return *masks, top_window_mask(bias, W, n, causal), chosen.to_mask()

    check_graphs(make, [(half(B, HK, 1, n), flags(B, n)) for n in LENGTHS])


def test_a_selection_made_before(gpu: None) -> None:
    """Of the same number of blocks; another number is a further size that changes."""
    call, _ = attention(qkv, BIAS, "selection", **CAUSAL)
    calls = [(*with_bias(n), select_keys(half(B, HK, n), W)) for n in (300, 310, 330)]
    check_graphs(call, calls)


@pytest.mark.parametrize("strict", [True, False])
def test_export(gpu: None, strict: bool) -> None:
    length = torch.export.Dim("length", min=W + 1)
    layer = small_layer()
    program = torch.export.export(
        layer, (half(B, 300, 64),), dynamic_shapes=({1: length},), strict=strict
    )
    assert program.module()(half(B, 400, 64)).shape == (B, 400, 64)


# --- the cache ------------------------------------------------------------------------------------


def make_cache(evict: bool) -> DynamicMaskCache:
    options: dict[str, Any] = {} if evict else {"evict": False, "capacity": 200}
    return DynamicMaskCache(B, 16, HK, D, torch.bfloat16, "cuda", **options)


def tokens(count: int, batch: int = B) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = single(batch, HK, count)
    return half(batch, count, H, D), *half(2, batch, count, HK, D).unbind(), scores


def prompt(count: int, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return tokens(count, batch)[1:]


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("evict", [True, False])
def test_steps_of_a_cache_are_one_graph(gpu: None, evict: bool, count: int) -> None:
    """Also behind prompts, steps and chunks that were not compiled."""
    cache = make_cache(evict)
    check_graphs(cache.append_and_attend, [tokens(count)] * 3)
    cache = make_cache(evict)
    cache.prefill(*prompt(30))
    for before in (2, 20):
        cache.append_and_attend(*tokens(before))
    check_graphs(cache.append_and_attend, [tokens(count)] * 3)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("evict", [True, False])
def test_steps_of_some_slots_and_tokens(gpu: None, evict: bool, count: int) -> None:
    cache = make_cache(evict)

    def some_tokens(active: Tensor, *given: Tensor) -> Any:
        return cache.append_and_attend(*given, active=active, softcap=3.0)

    check_graphs(some_tokens, [(flags(B, count), *tokens(count))] * 3)
    check_graphs(some_tokens, [(flags(B), *tokens(count))] * 3)

    def some_slots(slots: Tensor, active: Tensor, *given: Tensor) -> Any:
        return cache.append_and_attend(*given, slots=slots, active=active)

    check_graphs(some_slots, [(ints(1), flags(1, count), *tokens(count, 1))] * 3)


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("evict", [True, False])
def test_drafts_are_one_graph(gpu: None, evict: bool, count: int) -> None:
    cache = make_cache(evict)

    def draft(n: Tensor, *given: Tensor) -> Any:
        out = cache.peek(*given)
        cache.commit(n)
        return out

    check_graphs(draft, [(longs(B), *tokens(count))] * 3)
    cache.peek(*tokens(count))  # a draft with rows behind the cache, committed by compiled code

    def commit(n: Tensor) -> Tensor:
        cache.commit(n)
        return cache.seen + n

    check_graphs(commit, [(longs(B),)])


Change = Callable[..., Any]
CHANGES: dict[str, tuple[Change, Callable[[int], tuple[Any, ...]]]] = {
    "prompt": (lambda cache, *given: cache.prefill(*given), prompt),
    "padded prompt": (
        lambda cache, mask, *given: cache.prefill(*given, attn_mask=mask),
        lambda n: (flags(B, n), *prompt(n)),
    ),
    "prompt of some length": (
        lambda cache, lengths, *given: cache.prefill(*given, lengths=lengths),
        lambda n: (ints(B), *prompt(n)),
    ),
    "prompt of some slots": (
        lambda cache, slots, *given: cache.prefill(*given, slots=slots),
        lambda n: (longs(1), *prompt(n, 1)),
    ),
    "prompt and selection": (
        lambda cache, *given: cache.prefill(*given, select_keys(given[2], 16)),
        prompt,
    ),
    "chunk": (lambda cache, *given: cache.append_and_attend(*given), tokens),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("evict", [True, False])
def test_one_graph_for_all_lengths_of_prompts(gpu: None, evict: bool, name: str) -> None:
    cache = make_cache(evict)
    change, make = CHANGES[name]

    def changed(*given: Any) -> Any:
        return change(cache, *given), cache.seen + 1

    check_graphs(changed, [make(n) for n in (20, 40, 60, 30)])


@pytest.mark.parametrize("evict", [True, False])
def test_slots_are_moved_and_emptied(gpu: None, evict: bool) -> None:
    cache = make_cache(evict)

    def change(beams: Tensor, one: Tensor, *given: Tensor) -> Any:
        cache.reorder(beams)
        cache.reorder(one, slots=one)
        cache.reset(one)
        cache.prefill(*given[1:])
        cache.batch_select_indices(beams)
        branch = cache.clone()
        out = branch.append_and_attend(*given)
        cache.reset()
        return out, cache.append_and_attend(*given), make_cache(evict).append_and_attend(*given)

    check_graphs(change, [(longs(B), ints(1), *tokens(20))] * 3)


def test_a_compiled_prompt_of_some_slots_is_counted_later(gpu: None) -> None:
    """The host no longer knows a bound of the tokens, so it takes that of a full cache."""
    cache = make_cache(False)
    change, make = CHANGES["prompt of some slots"]
    check_graphs(lambda *given: (change(cache, *given), cache.seen + 1), [make(50)])
    assert cache._held_length() == cache.capacity


def test_a_captured_prompt_is_counted_later(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a CUDA graph put the prompt in without the host, also into an emptied cache."""
    cache = make_cache(False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        cache.prefill(*prompt(50))
    cache.reset()
    assert cache._held_length() == cache.capacity


# --- the layer ------------------------------------------------------------------------------------


def small_layer(window: int | None = 16, **options: Any) -> DynamicMaskAttention:
    options = {"dtype": torch.bfloat16, "window_size": window, **options}
    return DynamicMaskAttention(64, H, HK, **options, device="cuda")


@pytest.mark.parametrize(
    "options",
    [{}, {"window": None}, {"dense_mask": True}, {"is_causal": False, "num_score_heads": H}],
)
def test_training_a_layer(gpu: None, options: dict[str, Any]) -> None:
    layer = small_layer(**options)
    calls = [(half(B, n, 64), longs(B, n)) for n in LENGTHS]
    check_graphs(lambda x, mask: layer(x, attention_mask=mask), calls, backward=True)


def test_a_layer_under_autocast(gpu: None) -> None:
    layer = small_layer(dtype=torch.float32)

    def call(x: Tensor) -> Any:
        with torch.autocast("cuda", torch.float16):
            return layer(x)

    check_graphs(call, [(single(B, n, 64),) for n in LENGTHS])


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize(("window", "evict"), [(16, True), (None, False)])
@torch.no_grad()
def test_generating_with_a_layer(gpu: None, window: int | None, evict: bool, count: int) -> None:
    """All steps behind a prompt are one graph, for all slots and for one."""
    layer = small_layer(window)
    cache = layer.make_cache(B, evict=evict, capacity=None if evict else 400)
    layer(half(B, 30, 64), cache=cache)

    def step(x: Tensor, going_on: Tensor) -> Any:
        return layer(x, attention_mask=going_on, cache=cache)

    check_graphs(step, [(half(B, count, 64), flags(B, count))] * 3)

    def one(x: Tensor, slots: Tensor) -> Any:
        return layer(x, cache=cache, slots=slots)

    check_graphs(one, [(half(1, count, 64), longs(1))] * 3)


@pytest.mark.parametrize("evict", [True, False])
@torch.no_grad()
def test_prompts_of_a_layer(gpu: None, evict: bool) -> None:
    """At once, and by chunks that attend to those before."""
    layer = small_layer()
    cache = layer.make_cache(B, evict=evict, capacity=None if evict else 800)

    def read(x: Tensor, mask: Tensor) -> Any:
        cache.reset()
        first = layer(x, attention_mask=mask, cache=cache)
        return first, layer(x[:, :40], cache=cache)

    check_graphs(read, [(half(B, n, 64), longs(B, n)) for n in LENGTHS])


# --- several GPUs and transformers ----------------------------------------------------------------


@pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 4)])
def test_context_parallel(gpu: None, rank: int, world: int) -> None:
    """The ranks of torch's fake process group, which sends nothing."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    layer = small_layer()
    torch.distributed.init_process_group(
        "fake", store=fake.FakeStore(), rank=rank, world_size=world
    )
    try:
        group = torch.distributed.group.WORLD
        calls = [(half(B, n, 64), flags(B, n)) for n in LENGTHS]

        def attend(x: Tensor, mask: Tensor) -> Any:
            return layer(x, attention_mask=mask, group=group)

        check_graphs(attend, calls, backward=True)
    finally:
        torch.distributed.destroy_process_group()


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "num_key_value_heads": HK,
}


def model_of(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.18")
    import dmattn.integrations.transformers as integration

    integration.register()
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    made = getattr(transformers, f"{kind}ForCausalLM")
    with torch.device("cuda"):
        model = made._from_config(config, attn_implementation="dmattn", dtype=torch.bfloat16)
    return integration.enable_doge(model) if kind == "Doge" else model


@pytest.mark.parametrize("kind", ["Llama", "Doge"])
@torch.no_grad()
def test_texts_of_a_model(gpu: None, kind: str) -> None:
    model = model_of(kind, **({"keep_window_size": 16} if kind == "Doge" else {}))

    def train(ids: Tensor, mask: Tensor) -> Any:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    check_graphs(train, [(longs(B, n), longs(B, n)) for n in LENGTHS])


@torch.no_grad()
def test_packed_documents_of_a_model(gpu: None) -> None:
    model = model_of("Mistral", sliding_window=16)

    def train(ids: Tensor, places: Tensor, bounds: Tensor) -> Any:
        packing = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        packing |= {"max_length_q": LONGEST, "max_length_k": LONGEST}
        return model(input_ids=ids, position_ids=places, use_cache=False, **packing).logits

    calls = [(longs(1, n), longs(1, n), ints(4)) for n in LENGTHS]
    check_graphs(train, calls)


@torch.no_grad()
def test_generating_with_a_doge_model(gpu: None) -> None:
    """The steps of a DogeCache are one graph."""
    model = model_of("Doge", keep_window_size=16)
    import dmattn.integrations.transformers as integration

    cache = integration.DogeCache(model.config, compileable=True)
    model(input_ids=longs(B, 30), attention_mask=longs(B, 30), past_key_values=cache)
    calls = [(longs(B, 1),)] * 3
    check_graphs(lambda ids: model(input_ids=ids, past_key_values=cache).logits, calls)


@torch.no_grad()
def test_generating_with_a_static_cache(gpu: None) -> None:
    model = model_of("Llama")
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=100)
    model(input_ids=longs(B, 30), attention_mask=longs(B, 30), past_key_values=cache)

    def step(ids: Tensor, place: Tensor) -> Any:
        return model(input_ids=ids, position_ids=place, past_key_values=cache).logits

    check_graphs(step, [(longs(B, 1), longs(B, 1))] * 3)
