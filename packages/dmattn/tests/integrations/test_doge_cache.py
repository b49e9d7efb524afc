"""Generation with Doge models: with transformers' caches, and with DogeCache (kept keys only)."""

import copy
from typing import Any

import pytest
import torch
from doge_models import (
    VOCABULARY,
    WINDOW,
    close,
    left_padding,
    make_doge,
    tokens,
    with_equal_scores,
)
from hf_models import make_model
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache

from dmattn.integrations.transformers import DogeCache, enable_doge

PROMPT, NEW_TOKENS = 21, 64
ROOM = PROMPT + NEW_TOKENS

# How each cache is made. A StaticCache gives its length as an int before its first use, and as a
# tensor from then on, also after reset().
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=ROOM),
    "kept keys": DogeCache,
}
each_cache = pytest.mark.parametrize("cache", CACHES)


def generated(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Tensor:
    """Generated tokens, greedy by default, none of which occurs twice: see `tokens` for why."""
    options = {"do_sample": False, "no_repeat_ngram_size": 1, "eos_token_id": None} | options
    options = {"max_new_tokens": NEW_TOKENS, "attention_mask": torch.ones_like(ids)} | options
    out: Tensor = model.eval().generate(ids, past_key_values=cache, **options)
    return out


# --------------------------------------------------------------------------------- against eager


@pytest.mark.parametrize("settings", [{}, {"window": 200}, {"is_moe": True}])
@each_cache
def test_greedy_tokens(settings: dict[str, Any], cache: str) -> None:
    model = make_doge(**settings)
    ids = tokens(2, PROMPT)
    real = left_padding(ids, 0, 8) if not settings.get("is_moe") else torch.ones_like(ids)
    eager = generated(model, ids * real, attention_mask=real)
    enable_doge(model)
    entries = CACHES[cache](model.config)
    assert torch.equal(generated(model, ids * real, entries, attention_mask=real), eager)
    entries.reset()
    assert torch.equal(generated(model, ids * real, entries, attention_mask=real), eager)


@pytest.mark.parametrize("sliding_window", [WINDOW - 5, WINDOW + 9])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens_with_a_sliding_window(sliding_window: int, cache: str) -> None:
    model, ids = make_doge(sliding_window=sliding_window), tokens(2, 30)
    eager = generated(model, ids, max_new_tokens=30)
    enable_doge(model)
    entries = CACHES[cache](model.config)
    assert torch.equal(generated(model, ids, entries, max_new_tokens=30), eager)


def test_without_a_cache() -> None:
    model, ids = make_doge(layers=1), tokens(2, PROMPT)
    eager = generated(model, ids, use_cache=False, max_new_tokens=20)
    enable_doge(model, use_dynamic_mask_cache=True)
    assert torch.equal(generated(model, ids, use_cache=False, max_new_tokens=20), eager)


def test_beams_and_returned_sequences() -> None:
    model, ids = make_doge(), tokens(2, PROMPT)
    real = left_padding(ids, 0, 8)
    options = {"attention_mask": real, "max_new_tokens": 20}
    options |= {"num_beams": 3, "num_return_sequences": 2}
    eager = generated(model, ids, **options)
    enable_doge(model)
    assert torch.equal(generated(model, ids, DogeCache(model.config), **options), eager)


def test_sampling() -> None:
    model, ids = enable_doge(make_doge()), tokens(2, PROMPT)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 20}
    found = []
    for cache in (None, DogeCache(model.config)):
        torch.manual_seed(2)
        found.append(generated(model, ids, cache, **options))
    assert torch.equal(*found)


# ----------------------------------------------------------------- against a call of the whole text


@pytest.mark.parametrize("chunk", [1, 9])
@each_cache
def test_decoding_equals_the_whole_text(cache: str, chunk: int) -> None:
    """With equal scores, so that only the rule for ties decides, and with padding on the left."""
    model = enable_doge(with_equal_scores(make_doge())).eval()
    ids = torch.randint(1, VOCABULARY, (3, 60))
    real = left_padding(ids, 0, 5, 22)
    entries = CACHES[cache](model.config)
    with torch.no_grad():
        whole = model(ids, attention_mask=real).logits
        parts, stop = [], 18
        parts.append(model(ids[:, :18], attention_mask=real[:, :18], past_key_values=entries))
        while stop < 60:
            new = ids[:, stop : stop + chunk]
            stop += new.shape[1]
            parts.append(model(new, attention_mask=real[:, :stop], past_key_values=entries))
        found = torch.cat([part.logits for part in parts], 1)
    assert close(found[real == 1], whole[real == 1])
    assert entries.get_seq_length() == 60


@pytest.mark.parametrize("settings", [{}, {"window": 200}])
def test_prompts_in_chunks(settings: dict[str, Any]) -> None:
    model, ids = enable_doge(make_doge(**settings)), tokens(2, 40)
    options = {"attention_mask": left_padding(ids, 0, 19), "max_new_tokens": 20}
    whole = generated(model, ids, DogeCache(model.config), **options)
    chunks = generated(model, ids, DogeCache(model.config), prefill_chunk_size=7, **options)
    assert torch.equal(chunks, whole)


def test_chunks_leave_what_single_tokens_leave() -> None:
    """The same entries, including their positions in the text, by which later ties are decided."""
    model, ids = enable_doge(make_doge()).eval(), tokens(2, 50)
    real = left_padding(ids, 0, 27)
    entries = []
    for chunk in (10, 1):
        cache = DogeCache(model.config)
        with torch.no_grad():
            for start in range(0, 50, chunk):
                stop = start + chunk
                model(ids[:, start:stop], attention_mask=real[:, :stop], past_key_values=cache)
        entries.append([layer.kept for layer in cache.layers])
    for a, b in zip(*entries, strict=True):
        assert torch.equal(a.seen, b.seen)
        assert a.seen.tolist() == [50, 23]
        places, order = a.position.sort(-1)
        other_places, other_order = b.position.sort(-1)
        assert torch.equal(places, other_places)
        assert close(a.score.gather(-1, order), b.score.gather(-1, other_order))


def test_dialogue() -> None:
    """A second generate() with the cache of the first call, and with a copy of that cache."""
    model, ids = enable_doge(make_doge()), tokens(2, 45)
    real = left_padding(ids, 0, 8)
    cache = DogeCache(model.config)
    first = {"attention_mask": real[:, :20], "max_new_tokens": 10}
    answer = generated(model, ids[:, :20], cache, **first)
    text = torch.cat([answer, ids[:, 20:]], 1)
    mask = torch.nn.functional.pad(real[:, :20], (0, 35), value=1)
    second = {"attention_mask": mask, "max_new_tokens": 20}
    whole = generated(model, text, **second)
    twin = copy.deepcopy(cache)
    assert torch.equal(generated(model, text, cache, **second), whole)
    assert torch.equal(generated(model, text, twin, **second), whole)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_prompt_under_inference_mode(chunk: int) -> None:
    model, ids = enable_doge(make_doge()).eval(), tokens(length=WINDOW + 9)
    cache = DogeCache(model.config)
    with torch.inference_mode():
        model(ids[:, :-chunk], past_key_values=cache)
    with torch.no_grad():
        logits = model(ids[:, -chunk:], past_key_values=cache).logits
        assert close(logits, model(ids).logits[:, -chunk:])


def test_batches_change() -> None:
    model, ids = enable_doge(make_doge()).eval(), tokens(4, 40)
    cache = DogeCache(model.config)
    with torch.no_grad():
        model(ids[:2, :30], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        cache.reorder_cache(torch.tensor([0, 0, 2]))
        rows = torch.tensor([1, 1, 0])
        found = model(ids[1:, 30:], past_key_values=cache).logits
        text = torch.cat([ids[rows, :30], ids[1:, 30:]], 1)
        assert close(found, model(text).logits[:, 30:])


def test_size_does_not_grow() -> None:
    model = enable_doge(make_doge()).eval()
    cache = DogeCache(model.config)
    with torch.no_grad():
        model(tokens(2, 200), past_key_values=cache)
    assert all(layer.kept.k.shape == (2, WINDOW, 2, 8) for layer in cache.layers)
    assert cache.get_seq_length() == 200


def test_the_default_cache() -> None:
    model, ids = enable_doge(make_doge(), use_dynamic_mask_cache=True), tokens()
    found = model(ids, labels=ids)
    found.loss.backward()  # the new default is not used for training
    assert isinstance(found.past_key_values, DynamicCache)
    with torch.no_grad():
        assert isinstance(model(ids).past_key_values, DogeCache)

    def cache_of_generate(**options: Any) -> Any:
        options = {"max_new_tokens": 3, "return_dict_in_generate": True} | options
        return model.generate(ids[:1], **options).past_key_values

    assert isinstance(cache_of_generate(), DogeCache)
    assert isinstance(cache_of_generate(prompt_lookup_num_tokens=2), DynamicCache)
    assert isinstance(cache_of_generate(cache_implementation="static"), StaticCache)
    assert isinstance(cache_of_generate(cache_implementation="dynamic"), DynamicCache)
    given = DynamicCache(config=model.config)
    assert cache_of_generate(past_key_values=given) is given
    options = {"max_new_tokens": 3, "return_dict_in_generate": True}
    in_second_place = GenerationConfig(prompt_lookup_num_tokens=2, **options)
    found = model.generate(ids[:1], in_second_place)
    assert isinstance(found.past_key_values, DynamicCache)
    # Settings that a given generation config leaves open are taken from that of the model.
    for name, kind in (("static", StaticCache), ("dynamic", DynamicCache)):
        model.generation_config.cache_implementation = name
        found = model.generate(ids[:1], generation_config=GenerationConfig(**options))
        assert isinstance(found.past_key_values, kind)
    model.generation_config.cache_implementation = None
    enable_doge(model)
    assert isinstance(cache_of_generate(), DynamicCache)


# -------------------------------------------------------------------------------------- bad inputs


def filled() -> tuple[Any, DogeCache, Tensor]:
    model, ids = enable_doge(make_doge()).eval(), tokens()
    cache = DogeCache(model.config)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
    return model, cache, ids


def content(cache: DogeCache) -> list[Tensor]:
    return [
        t.clone()
        for layer in cache.layers
        for t in (layer.kept.k, layer.kept.v, layer.kept.score, layer.kept.position)
    ]


def check_refused(cache: DogeCache, error: type[Exception], words: str, call: Any) -> None:
    before, length = content(cache), cache.get_seq_length()
    with pytest.raises(error, match=words):
        call()
    assert all(torch.equal(a, b) for a, b in zip(content(cache), before, strict=True))
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("trainable", [0, 1])
def test_gradients_are_refused(trainable: int) -> None:
    """Before the cache of any layer has changed, also if only the second layer needs gradients."""
    model, cache, ids = filled()
    for index, layer in enumerate(model.model.layers):
        layer.requires_grad_(index == trainable)
    model.model.embed_tokens.requires_grad_(False)
    model.model.norm.requires_grad_(False)

    def call() -> None:
        model(ids[:, 30:], past_key_values=cache)

    check_refused(cache, RuntimeError, r"past_key_values: .*torch.no_grad\(\)", call)
    model.requires_grad_(False)
    call()


def test_models_that_are_not_enabled_are_refused() -> None:
    model, cache, ids = filled()
    others = {"eager": model, "dmattn": make_doge(), "llama": make_model("llama").eval()}
    model.set_attn_implementation("eager")
    others["dmattn"].set_attn_implementation("dmattn")
    words = r"past_key_values: got a DogeCache for a model that is not enabled; .*enable_doge"
    for other in others.values():
        check_refused(
            cache, RuntimeError, words, lambda m=other: m(ids[:, 30:] % 60, past_key_values=cache)
        )
    dense = torch.ones(2, 1, 20, 50, dtype=torch.bool)
    check_refused(
        cache,
        RuntimeError,
        words,
        lambda: model(ids[:, 30:], attention_mask=dense, past_key_values=cache),
    )


@pytest.mark.parametrize("window", [0, -3])
def test_a_model_that_keeps_no_keys_has_no_cache(window: int) -> None:
    with pytest.raises(ValueError, match=rf"config.keep_window_size: got {window}, wanted .* 1"):
        DogeCache(make_doge(window=window).config)


@torch.no_grad()
def test_what_does_not_fit_is_refused() -> None:
    model, cache, ids = filled()
    new = ids[:, 30:]
    check_refused(
        cache,
        ValueError,
        r"attention_mask: got shape \(2, 20\), wanted \(2, 50\)",
        lambda: model(new, attention_mask=torch.ones_like(new), past_key_values=cache),
    )
    check_refused(
        cache,
        ValueError,
        r"attention_mask: got shape \(2, 1, 20, 50\), wanted \(2, 50\) beside a DogeCache",
        lambda: model(new, attention_mask=torch.ones(2, 1, 20, 50).bool(), past_key_values=cache),
    )
    check_refused(
        cache,
        ValueError,
        "cu_seq_lens_q: got boundaries of packed documents beside a cache",
        lambda: model(new, cu_seq_lens_q=torch.tensor([0, 20]), past_key_values=cache),
    )
    check_refused(
        cache,
        ValueError,
        r"got a DogeCache of 2 sequences for 1, .*reset",
        lambda: model(new[:1], past_key_values=cache),
    )
    other = enable_doge(make_doge(window=WINDOW + 1)).eval()
    check_refused(
        cache,
        ValueError,
        "got a DogeCache of 2 layers that keep 16 keys, wanted 2 layers that keep 17 keys",
        lambda: other(new, past_key_values=cache),
    )
    # Layers keep the number of keys with which they were made.
    changed = enable_doge(make_doge()).eval()
    changed.config.keep_window_size = 4
    small = DogeCache(changed.config)
    words = "layers that keep 4 keys, wanted 2 layers that keep 16 keys, .* config was changed"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        changed(new, past_key_values=small)
    assert small.get_seq_length() == 0
    check_refused(cache, TypeError, r"indices: got \[1\]", lambda: cache.batch_select_indices([1]))
    check_refused(cache, TypeError, r"beam_idx: got \[1, 0\]", lambda: cache.reorder_cache([1, 0]))
    for call in (
        lambda: cache.crop(-1),
        lambda: generated(model, ids, cache, prompt_lookup_num_tokens=2),
    ):
        check_refused(cache, RuntimeError, "assisted generation; .*DynamicCache", call)


@torch.no_grad()
def test_rows_that_see_later_keys() -> None:
    """Without causality rows keep other keys than a DogeCache holds, so it is not used."""
    model, cache, ids = filled()
    words = "is_causal: got False beside a DogeCache, wanted True"
    check_refused(
        cache,
        ValueError,
        words,
        lambda: model(ids[:, 30:], past_key_values=cache, is_causal=False),
    )
    wanted = model(ids, is_causal=False, use_cache=False).logits
    enable_doge(model, use_dynamic_mask_cache=True)
    found = model(ids, is_causal=False)
    assert isinstance(found.past_key_values, DynamicCache)
    assert torch.equal(found.logits, wanted)


def test_configs_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"config: got LlamaConfig, .*keep_window_size"):
        DogeCache(make_model("llama").config)
    model = make_doge(sliding_window=9)
    with pytest.raises(ValueError, match="config: got sliding_window=9, wanted None"):
        DogeCache(model.config)
    with pytest.raises(ValueError, match="config: got sliding_window=9, wanted None"):
        enable_doge(model, use_dynamic_mask_cache=True)
    assert model.config._attn_implementation == "eager"
    assert "forward" not in model.model.__dict__


def test_bytes_of_an_entry() -> None:
    """Per entry key and value, and 4 bytes each for score and position, as documented.

    There are no spare rows for drafts behind the entries.
    """
    model = enable_doge(make_doge()).bfloat16()
    cache = DogeCache(model.config)
    with torch.no_grad():
        model(tokens(2, PROMPT), past_key_values=cache)
    kept = cache.layers[0].kept
    assert kept.k.dtype == torch.bfloat16 and kept.score.dtype == torch.float32
    held = sum(t.untyped_storage().nbytes() for t in vars(kept).values() if isinstance(t, Tensor))
    batch, entries, heads, head_dim = kept.k.shape
    assert entries == WINDOW
    assert held == batch * entries * heads * (2 * 2 * head_dim + 4 + 4) + kept.seen.nbytes
