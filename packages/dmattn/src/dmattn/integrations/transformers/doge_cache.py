"""A cache of transformers for Doge models that holds only the keys that are still kept."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from dmattn import DynamicMaskCache
from dmattn.scoring import attend_through_cache
from dmattn.validation import check_bool, check_int, check_tensor


class DogeCache(Cache):  # type: ignore[misc]  # has no types
    """A cache for models on which `enable_doge` was called; its size does not grow with the text.

    It holds, for each layer and key/value head, the `keep_window_size` keys that the next token may
    attend to, with their scores. A key that has left never returns, so the model gives the same
    results as with a cache of all keys. Pass it as `past_key_values` to the model or to `generate`,
    under torch.no_grad(). It takes prompts at once or in chunks, padded on either side, further
    turns of a dialogue, and the batch operations of generation, such as those of beam search. It
    cannot be cropped, so assisted generation refuses it.

    Args:
        config: of the model.
        compileable: let `generate` compile the steps that take one token, as it does for a
            StaticCache: on a GPU they are then replayed from a CUDA graph. The first such step
            takes the time of torch.compile. It is also needed for a model that is compiled by hand
            with mode="reduce-overhead".

    Raises:
        TypeError: config is not that of a Doge model, compileable is no bool, or keep_window_size
            no int.
        ValueError: the model has a sliding window, in which the keys that have left may be needed
            again, or keeps no keys at all (keep_window_size below 1).
    """

    def __init__(self, config: Any, compileable: bool = False) -> None:
        compileable = check_bool("compileable", compileable)
        text_config = getattr(config, "get_text_config", lambda decoder: config)(decoder=True)
        window_size = getattr(text_config, "keep_window_size", None)
        if window_size is None:
            raise TypeError(
                f"config: got {type(config).__name__}, wanted the config of a Doge model, with "
                "keep_window_size; transformers.DynamicCache serves other models"
            )
        if text_config.sliding_window is not None:
            raise ValueError(
                f"config: got sliding_window={text_config.sliding_window}, wanted None for a "
                "DogeCache; transformers.DynamicCache serves models with a sliding window"
            )
        window_size = check_int("config.keep_window_size", window_size, 1)
        layers = range(text_config.num_hidden_layers)
        super().__init__(layers=[DogeCacheLayer(window_size, compileable) for _ in layers])


class DogeCacheLayer(CacheLayerMixin):  # type: ignore[misc]  # has no types
    """The kept keys of one layer.

    Attributes:
        kept: the `DynamicMaskCache` that holds them; None before the first tokens.
        is_compileable: whether `generate` compiles the steps that take one token.
    """

    is_croppable = False
    is_sliding = False

    def __init__(self, window_size: int, compileable: bool = False) -> None:
        super().__init__()
        self.window_size = window_size
        self.is_compileable = compileable
        self.kept: DynamicMaskCache | None = None
        # The number of tokens put in. Compiled steps count theirs on the device: a number on the
        # host would change in each step, and so lead to another CUDA graph.
        self._seq_length = 0
        self._compiled_tokens: Tensor | None = None  # int64 scalar, made along with `kept`
        self._has_compiled_tokens = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        scale: float,
        real: Tensor | None,
    ) -> Tensor:
        """Put the next tokens of each sequence in, and compute their attention.

        Letters: B batch, T new tokens, H query heads, HK key/value heads, D head dimension.

        Args:
            query: (B, T, H, D).
            key, value: (B, T, HK, D).
            score: (B, HK, T), float32, or float64 beside float64 values.
            scale: of the logits.
            real: bool (B, T), False for padding, which is not put in; None where all are real.

        Returns:
            (B, T, H, D). Rows of padding are meaningless, and finite if their query is.

        Raises:
            TypeError, ValueError: the tensors do not fit the cache, which is then unchanged.
            RuntimeError: a gradient would be needed.
        """
        kept = self._kept_for(key)
        out = attend_through_cache(query, key, value, score, kept, scale, key_mask=real)
        if torch.compiler.is_compiling():
            assert self._compiled_tokens is not None
            self._compiled_tokens.add_(query.shape[1])
            self._has_compiled_tokens = True
        else:
            self._seq_length += query.shape[1]
        return out

    def get_seq_length(self) -> int | Tensor:
        """The number of tokens that were put in, padding included; not the number of keys held.

        While torch compiles it is a scalar tensor. After compiled steps the host waits for it.
        """
        if self._compiled_tokens is None:
            return self._seq_length
        if torch.compiler.is_compiling():
            return self._seq_length + self._compiled_tokens
        if self._has_compiled_tokens:
            self._seq_length += int(self._compiled_tokens)
            self._compiled_tokens.zero_()
            self._has_compiled_tokens = False
        return self._seq_length

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> NoReturn:
        """Raises RuntimeError: an enabled model does not describe by a mask what its rows see."""
        raise _not_enabled()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Raises RuntimeError: a layer that is not enabled would take these keys for all keys."""
        raise _not_enabled()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the cache for keys and values like these, (B, HK, any number, D)."""
        batch, heads, _, head_dim = key_states.shape
        dtype = value_states.dtype
        self.kept = DynamicMaskCache(
            batch,
            self.window_size,
            heads,
            head_dim,
            dtype,
            key_states.device,
            score_dtype=torch.promote_types(dtype, torch.float32),
            spare_rows=0,  # transformers has no use for `DynamicMaskCache.peek`
        )
        self._compiled_tokens = torch.zeros((), dtype=torch.int64, device=key_states.device)
        self._keep_in_place()
        self.is_initialized = True

    def reset(self) -> None:
        """Empty the cache; the next tokens may be of another batch, dtype or device."""
        self.kept, self.is_initialized, self._seq_length = None, False, 0
        self._compiled_tokens, self._has_compiled_tokens = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace entry i of the batch by a copy of the former entry beam_idx[i]; ints (B,)."""
        if self.kept is not None:
            beam_idx = check_tensor("beam_idx", beam_idx)
            self.kept.reorder(beam_idx.to(self.kept.k.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch, ints (N,), in this order."""
        if self.kept is not None:
            indices = check_tensor("indices", indices)
            self.kept.batch_select_indices(indices.to(self.kept.k.device))
            self._keep_in_place()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each entry of the batch `repeats` times, copies side by side."""
        if self.kept is not None:
            self.kept.batch_repeat_interleave(repeats)
            self._keep_in_place()

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raises RuntimeError: the keys that the removed tokens evicted are gone."""
        raise _not_croppable()

    def activate_past_recording(self) -> NoReturn:
        """Raises RuntimeError: it prepares for a crop."""
        raise _not_croppable()

    def offload(self) -> None:
        """Does nothing: the cache stays on its device, as its size does not grow."""

    def prefetch(self) -> None:
        """Does nothing: the cache was not moved."""

    def _kept_for(self, key: Tensor) -> DynamicMaskCache:
        if self.kept is None:
            self.lazy_initialization(key.transpose(1, 2), key)
        assert self.kept is not None
        batch = self.kept.k.shape[0]
        if batch != key.shape[0]:
            raise ValueError(
                f"past_key_values: got a DogeCache of {batch} sequences for {key.shape[0]}, wanted "
                "as many; batch_select_indices and batch_repeat_interleave change their number, "
                "and reset() forgets them"
            )
        # A tensor made under torch.inference_mode() cannot be changed outside of it. `kept` has no
        # such tensors, but the counter may be one. torch.compile cannot trace the test for it.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return self.kept
        assert self._compiled_tokens is not None
        if self._compiled_tokens.is_inference():
            self._compiled_tokens = self._compiled_tokens.clone()
            self._keep_in_place()
        return self.kept

    def _keep_in_place(self) -> None:
        """Tell torch.compile that the tensors keep their addresses and are changed in place.

        Only then does it make a CUDA graph of a step. Without a guard, so that new tensors only
        lead to another recording.
        """
        if not self.is_compileable or torch.compiler.is_compiling():
            return
        kept = self.kept
        assert kept is not None
        for t in (kept.k, kept.v, kept.score, kept.position, kept.seen, self._compiled_tokens):
            torch._dynamo.mark_static_address(t, guard=False)


def _not_enabled() -> RuntimeError:
    return RuntimeError(
        "past_key_values: got a DogeCache for a model that is not enabled; call "
        "dmattn.integrations.transformers.enable_doge(model) first (and keep its attention "
        'implementation "dmattn"), or use a transformers.DynamicCache'
    )


def _not_croppable() -> RuntimeError:
    return RuntimeError(
        "past_key_values: got a DogeCache where tokens may have to be taken back, as in assisted "
        "generation; it does not hold the keys that these pushed out. Use a "
        "transformers.DynamicCache instead"
    )
