"""Arguments of kinds that no call takes: the error names the argument, and says what was wanted."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dmattn import (
    DynamicMaskAttention,
    DynamicMaskCache,
    KeySelection,
    KeyState,
    create_mask,
    dynamic_mask,
    explain,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    key_scores,
    maybe_create_mask,
    packed_documents,
    select_keys,
    sliding_window,
    top_window_mask,
)
from dmattn.modules import apply_rotary, rotary_embedding
from dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
    upad_input,
)

Q, K, V = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
BIAS, MASK = torch.randn(2, 2, 1, 7), torch.ones(2, 1, 1, 7, dtype=torch.bool)
TOKENS, BOUNDS = torch.ones(2, 7, dtype=torch.bool), torch.tensor([0, 3, 7], dtype=torch.int32)
HIDDEN, LAYER = torch.randn(2, 7, 16), DynamicMaskAttention(16, 4, 2, window_size=3)
PACKED = {"query": Q[0], "key": K[0, :6], "value": V[0, :6], "attn_bias": BIAS[0, :, 0, :6].T}
TOP = {"attention_bias": BIAS, "attention_mask": MASK, "window_size": 3, "min_dtype": None}


def a_cache() -> DynamicMaskCache:
    cache = DynamicMaskCache(2, 3, 2, 8, torch.float32, "cpu")
    cache.prefill(K, V, BIAS[:, :, 0])
    return cache


def commit(n: Any) -> None:
    cache = a_cache()
    cache.peek(Q, K[:, :6], V[:, :6], BIAS[:, :, 0, :6])
    cache.commit(n)


def through_cache(**arguments: Any) -> None:
    with torch.no_grad():
        LAYER(**{"cache": LAYER.make_cache(2), **arguments})


# Each call with valid arguments; the arguments that are missing are None, or have a default.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "flash_dmattn_func": (
        flash_dmattn_func,
        {"query": Q, "key": K, "value": V, "attn_mask": MASK, "attn_bias": BIAS},
    ),
    "window_size": (
        flash_dmattn_func,
        {"query": Q, "key": K, "value": V, "attn_bias": BIAS, "is_causal": True, "window_size": 3},
    ),
    "flash_dmattn_varlen_func": (
        flash_dmattn_varlen_func,
        {
            **PACKED,
            "cu_seqlens_q": torch.tensor([0, 6], dtype=torch.int32),
            "cu_seqlens_k": None,
            "max_seqlen_q": 6,
            "max_seqlen_k": 6,
        },
    ),
    "flash_dmattn_func_auto": (flash_dmattn_func_auto, {}),
    "select_keys": (select_keys, {"attn_bias": BIAS, "window_size": 3}),
    "sliding_window": (sliding_window, {"key_len": 7, "window_size": 3}),
    "packed_documents": (packed_documents, {"cu_seqlens": BOUNDS}),
    "from_intervals": (KeySelection.from_intervals, {"end": torch.full((2, 1, 7), 7)}),
    "KeyState.of": (KeyState.of, {"key": K, "value": V, "attn_bias": BIAS, "window_size": 3}),
    "merge": (KeyState.of(K, V, BIAS, 3).merge, {"later": KeyState.of(K, V, BIAS, 3)}),
    "top_window_mask": (top_window_mask, {"attention_bias": BIAS, "window_size": 3}),
    "create_mask": (create_mask, {**TOP, "batch_size": 2, "query_len": 6, "key_len": 7}),
    "maybe_create_mask": (
        maybe_create_mask,
        {**TOP, "batch_size": 2, "query_len": 6, "key_len": 7},
    ),
    "dynamic_mask": (dynamic_mask, TOP),
    "index_first_axis": (index_first_axis, {"input": K, "indices": torch.tensor([0, 1])}),
    "index_put_first_axis": (
        index_put_first_axis,
        {"values": K, "indices": torch.tensor([0, 1]), "first_axis_dim": 4},
    ),
    "unpad_input": (unpad_input, {"hidden_states": K, "attention_mask": TOKENS}),
    "unpad_input_for_concatenated_sequences": (
        unpad_input_for_concatenated_sequences,
        {"hidden_states": K, "attention_mask_in_length": TOKENS.long()},
    ),
    "pad_input": (
        pad_input,
        {"hidden_states": HIDDEN[0, :2], "indices": torch.tensor([0, 5]), "batch": 2, "seqlen": 4},
    ),
    "get_unpad_data": (get_unpad_data, {"attention_mask": TOKENS}),
    "upad_input": (
        upad_input,
        {
            "query_layer": Q,
            "key_layer": K,
            "value_layer": V,
            "attention_mask": TOKENS,
            "query_length": 6,
        },
    ),
    "DynamicMaskCache": (
        DynamicMaskCache,
        {
            "batch": 2,
            "window_size": 3,
            "nheads_k": 2,
            "head_dim": 8,
            "dtype": torch.float32,
            "device": "cpu",
        },
    ),
    "prefill": (a_cache().prefill, {"key": K, "value": V, "score": BIAS[:, :, 0]}),
    "append_and_attend": (
        a_cache().append_and_attend,
        {"query": Q, "key": K[:, :6], "value": V[:, :6], "score": BIAS[:, :, 0, :6]},
    ),
    "commit": (commit, {"n": torch.tensor([1, 2])}),
    "reorder": (a_cache().reorder, {"beam_idx": torch.tensor([1, 0])}),
    "reset": (a_cache().reset, {}),
    "DynamicMaskAttention": (DynamicMaskAttention, {"hidden_size": 16, "num_heads": 4}),
    "forward": (LAYER.forward, {"hidden_states": HIDDEN}),
    "forward through a cache": (through_cache, {"hidden_states": HIDDEN, "slots": None}),
    "make_cache": (LAYER.make_cache, {"batch": 2}),
    "key_scores": (key_scores, {"dt": torch.randn(2, 7, 2), "A": torch.randn(2)}),
    "rotary_embedding": (rotary_embedding, {"positions": torch.arange(7), "head_dim": 4}),
    "apply_rotary": (
        apply_rotary,
        {"x": Q, "cos": torch.randn(6, 4), "sin": torch.randn(6, 4)},
    ),
}

# None of these is a valid argument of any of the calls, but for the exceptions below.
JUNK: tuple[Any, ...] = (
    "x",
    {},
    1j,
    object(),
    float("nan"),
    2**70,
    np.ones((2, 7)),
    torch.randn(0),
    torch.randn(1, 1, 1, 1, 1),
    torch.randn(2, 7, 2, 8, dtype=torch.complex64),
    torch.randn(2, 7).to_sparse(),
    torch.nested.nested_tensor([torch.zeros(2, 6), torch.zeros(2, 5)]),
    torch.ones(9, dtype=torch.int32, device="meta"),
)
# These arguments take numbers of any size.
TAKES_LARGE = {
    *("softmax_scale", "softcap", "norm_eps", "rope_theta", "theta", "init_std", "min_dtype")
}
# Of two arguments that exclude or need each other, or have to fit, the error names the second one.
NAMED_INSTEAD = {
    *(("cu_seqlens", "window_size"), ("state", "window_size"), ("selection", "window_size")),
    *(("document_ids", "cu_seqlens"), ("cu_seqlens", "query"), ("cu_seqlens", "key_len")),
    *(("query_layer", "key_layer"), ("attention_bias", "attention_mask")),
}
# These arguments take tensors of any dtype and shape.
TAKES_TENSORS = {"input", "values", "hidden_states", "key_layer", "value_layer", "positions"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", CALLS)
def test_each_argument_is_named(call: str) -> None:
    function, given = CALLS[call]
    function(**given)
    names = list(given) if call in ("commit", "forward through a cache") else []
    names = names or [name for name in inspect.signature(function).parameters if name != "group"]
    for name in names:
        for junk in JUNK:
            if isinstance(junk, int) and name in TAKES_LARGE:
                continue
            if isinstance(junk, torch.Tensor) and name in TAKES_TENSORS:
                continue
            with pytest.raises((TypeError, ValueError)) as found:
                function(**{**given, name: junk})
            subject, _, rest = str(found.value).partition(": got ")
            is_named = subject == name or (name, subject) in NAMED_INSTEAD
            assert is_named and "wanted" in rest, (name, junk, str(found.value))


F8 = Q.to(torch.float8_e4m3fn)
BAD: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str]] = [
    (flash_dmattn_func, (Q, K, V, None, None, np.True_), TypeError, "softmax_scale: got"),
    (flash_dmattn_func_auto, (3,), TypeError, r"backend: got 3 \(int\), wanted one of 'cuda', "),
    (index_first_axis, (K, torch.tensor([2])), ValueError, "indices: got 2, wanted .* below 2"),
    (index_put_first_axis, (K, torch.tensor([0, -1]), 3), ValueError, "indices: got -1, wanted"),
    (pad_input, (K, torch.tensor([0, 8]), 2, 4), ValueError, "indices: got 8, wanted .* below 8"),
    (
        upad_input,
        (Q, K, V.to("meta"), TOKENS, 6),
        ValueError,
        "value_layer: got device meta, wanted cpu as query_layer",
    ),
    (apply_rotary, (Q.long(), Q[0, :, 0, :4], Q[0, :, 0, :4]), TypeError, "x: got dtype torch.int"),
    (
        apply_rotary,
        (Q[..., :7], Q[0, :, 0, :3], Q[0, :, 0, :3]),
        ValueError,
        "x: got head_dim 7, w",
    ),
    (
        apply_rotary,
        (Q[..., :1], Q[0, :, 0, :0], Q[0, :, 0, :0]),
        ValueError,
        "x: got head_dim 1, w",
    ),
    # torch cannot compute with eight bits.
    (apply_rotary, (F8, Q[0, :, 0, :4], Q[0, :, 0, :4]), TypeError, "x: got dtype torch.float8"),
    (select_keys, (F8[:, 0], 3), TypeError, "attn_bias: got dtype torch.float8"),
    (KeyState.of, (K, V, F8[:, 0], 3), TypeError, "attn_bias: got dtype torch.float8"),
    (key_scores, (F8[:, 0], F8[0, 0, 0]), TypeError, "dt: got dtype torch.float8"),
    (create_mask, (F8, None, 2, 6, 7, 2), TypeError, "attention_bias: got dtype torch.float8"),
    (create_mask, (BIAS, None, 3, 6, 7, 2), ValueError, r"attention_bias: got .*\(3\|1, heads\|1"),
    (create_mask, (BIAS.expand(2, 2, 5, 7), None, 2, 6, 7, 2), ValueError, "attention_bias: got"),
]


@pytest.mark.parametrize("function, arguments, error, message", BAD)
def test_values_that_do_not_fit(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        function(*arguments)


def test_sizes_and_kinds_of_a_layer() -> None:
    with pytest.raises(TypeError, match=r"dtype: got torch.int32, wanted a floating dtype"):
        DynamicMaskAttention(16, 4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dtype: got torch.float8_e4m3fn, wanted a floating dtype"):
        DynamicMaskAttention(16, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"num_score_heads: got True \(bool\), wanted an int"):
        DynamicMaskAttention(16, 1, num_score_heads=True)
    with pytest.raises(TypeError, match=r"device: got 'gpu' \(str\), wanted a torch.device"):
        LAYER.make_cache(2, device="gpu")


@pytest.mark.parametrize("bounds", [BOUNDS.to("meta"), BOUNDS.long().to("meta")])
def test_boundaries_without_values_for_keys_that_have_some(bounds: torch.Tensor) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: select_keys(BIAS, 3, cu_seqlens=bounds),
        lambda: KeyState.of(K, V, BIAS, 3, cu_seqlens=bounds),
        lambda: packed_documents(bounds, key_len=7, device="cpu"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"cu_seqlens: got device meta, .* wanted cpu"):
            call()


def test_states_and_selections_of_what_is_no_tensor() -> None:
    """Fields that are no tensors, such as a tree_map may leave in a state or a selection."""
    options: dict[str, Any] = {"attn_bias": BIAS, "is_causal": True}
    state, chosen = KeyState.of(K, V, BIAS, 3), select_keys(BIAS, 3, query_len=6)
    for name in ("k", "v", "score", "position", "seen", "has_start"):
        wrong = replace(state, **{name: None})
        with pytest.raises(TypeError, match=rf"state.{name}: got None, wanted a torch.Tensor"):
            flash_dmattn_func(Q, K, V, **options, window_size=3, state=wrong)
    wrong = replace(state, k=torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"state.k: got shape \(\), wanted \(2, 3, 2, 8\)"):
        flash_dmattn_func(Q, K, V, **options, window_size=3, state=wrong)
    for name in ("end", "idx", "count", "full"):
        with pytest.raises(TypeError, match=rf"selection.{name}: got \(\) \(tuple\), wanted a"):
            flash_dmattn_func(Q, K, V, **options, selection=replace(chosen, **{name: ()}))


def test_fake_tensors_are_not_read() -> None:
    with FakeTensorMode():
        key, score, q = torch.empty(2, 7, 2, 8), torch.empty(2, 2, 7), torch.empty(2, 7, 4, 8)
        bounds, places = torch.empty(3, dtype=torch.int32), torch.empty(2, dtype=torch.int64)
        attend = partial(flash_dmattn_func, q, key, key, attn_bias=score, is_causal=True)
        assert attend(window_size=3, cu_seqlens=bounds).shape == q.shape
        assert select_keys(score, 3, cu_seqlens=bounds).end.shape == (2, 2, 7)
        assert packed_documents(bounds, key_len=7).end.shape == (1, 1, 7)
        assert pad_input(key[:, 0], places, 2, 3).shape == (2, 3, 2, 8)
        cache = DynamicMaskCache(3, 3, 2, 8, torch.float32, "cpu")
        cache.prefill(key, key, score, slots=places)
        assert cache.append_and_attend(q, key, key, score, slots=places).shape == q.shape
        of_all = [t.new_empty((3, *t.shape[1:])) for t in (q, key, key, score)]
        assert cache.peek(*of_all).shape == of_all[0].shape
        cache.commit(torch.empty(3, dtype=torch.int64))


def test_what_is_returned_depends_on_true_and_false_alone() -> None:
    assert len(flash_dmattn_func(Q, K, V, return_lse=np.True_)) == 2
    for name in ("return_lse", "return_attn_probs"):
        with pytest.raises(TypeError, match=rf"{name}: got 1 \(int\), wanted True or False"):
            flash_dmattn_func(Q, K, V, **{name: 1})
        with pytest.raises(TypeError, match=rf"{name}: got 1 \(int\), wanted True or False"):
            explain(Q, K, V, **{name: 1})
