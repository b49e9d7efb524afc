"""Dynamic mask attention as a layer: every key gets a score, and each query keeps the best w keys.

    score[b, h, j] = exp(A[h] * softplus(dt_proj(v[b, j]))[h])

The score has two uses. It is added to the attention logits as a bias that depends only on the key,
through which it is learned. And it selects keys: query i attends to the `window_size`
highest-scored keys among 0..i. Dynamic mask attention is from Shi et al., "Trainable Dynamic Mask
Sparse Attention", arXiv 2508.02124. The parameter names and shapes are those of the Doge models,
whose attention weights can be loaded unchanged.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dmattn.cache import DynamicMaskCache
from dmattn.cache_checks import check_slots
from dmattn.checks import check_head_dim_number
from dmattn.functional import flash_dmattn_func
from dmattn.modules.linear import Float32Linear
from dmattn.modules.rotary import apply_rotary, rotary_embedding
from dmattn.scoring import attend_through_cache, key_scores
from dmattn.utils.mask import top_window_mask
from dmattn.validation import (
    DTYPES,
    check_bool,
    check_device,
    check_dtype,
    check_float32,
    check_int,
    check_number,
    check_optional_tensor,
    check_same_device,
    check_tensor,
    describe,
    is_one_or,
)

if TYPE_CHECKING:
    # Not imported at run time: there are builds of torch without torch.distributed.
    from dmattn.distributed.groups import Group


class DynamicMaskAttention(nn.Module):
    """Multi-head self-attention in which each query attends to the keys with the highest scores.

    Letters: B batch, S sequence length, H query heads, HK key/value heads, HS score heads
    (HK or H), D head dimension.

    Parameters and their shapes: `q_proj` (H*D, hidden), `k_proj` and `v_proj` (HK*D, hidden),
    `dt_proj` (HS, HK*D), `A` (HS,), `o_proj` (hidden, H*D); `q_norm` and `k_norm` (D,) when
    `qk_norm`. The linear layers have biases when `bias`. Each is called as a module, so that hooks
    run, and modules that adapters, quantization or sharding put in its place are used.

    Numerics: `dt_proj` and the scores are computed in float32 (float64 for a float64 layer), also
    under autocast and in a bfloat16 layer, and the attention gets the scores in that dtype. Rounded
    to bfloat16 many scores would be equal, and ties would decide which keys are kept. Rotary angles
    and the rotation are computed in float32 as well. The attention gets queries, keys and values in
    the dtype that `v_proj` returns: the layer's own, or the autocast dtype.

    Selection is not differentiated; the scores of the kept keys are. `A` starts at zero, so all
    scores are equal at first. Of equal scores the later key is kept, so training starts with a
    sliding window of the last `window_size` keys.

    Args:
        hidden_size: width of the input and the output.
        num_heads: H.
        num_kv_heads: HK, a divisor of H; H when None.
        head_dim: D, at most 256; hidden_size / num_heads when None.
        window_size: number of keys kept by each query, or None to keep all of them (the scores are
            then only added to the logits, and hide no key).
        bias: give the linear layers biases.
        qk_norm: apply RMSNorm over D to queries and keys, before the rotation.
        norm_eps: epsilon of these norms.
        rope_theta: base of the rotary embedding; None leaves queries and keys unrotated.
        exp_score: True: score = exp(A * softplus(dt_proj(v))); False: the same without exp.
            Published checkpoints differ in this.
        num_score_heads: HS: either num_kv_heads (the default, as in current checkpoints), one score
            per key and key/value head; or num_heads (as in the first checkpoints), one per key and
            query head.
        is_causal: True: query i sees keys 0..i. False: queries see all keys, and all of them keep
            the same keys.
        softcap: c of the soft cap c * tanh(x / c) on the scaled dot products x; 0 for none.
        dense_mask: form the boolean mask (B, HS, S, S) and attend with it, instead of selecting
            inside the attention. The result is the same; time and memory grow with the square of
            the length. It serves to compare the two, also in a trained layer, since the attribute
            is read in every call. Decoding from a cache ignores it.
        init_std: standard deviation of the initial weights of the linear layers.
        device, dtype: of the parameters.

    Raises:
        TypeError: a size or number has the wrong type, a flag is no bool, device is no device, or
            dtype is no floating dtype.
        ValueError: a size or number is out of range, sizes do not divide, `head_dim` is odd while
            rotary embedding is on, or num_score_heads is neither num_kv_heads nor num_heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        window_size: int | None = 2048,
        bias: bool = False,
        qk_norm: bool = True,
        norm_eps: float = 1e-6,
        rope_theta: float | None = 10000.0,
        exp_score: bool = True,
        num_score_heads: int | None = None,
        is_causal: bool = True,
        softcap: float = 0.0,
        dense_mask: bool = False,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rope_theta = _check_rope_theta(rope_theta)
        hidden_size = check_int("hidden_size", hidden_size, 1)
        num_heads, num_kv_heads, num_score_heads = _check_heads(
            num_heads, num_kv_heads, num_score_heads
        )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"hidden_size: got {hidden_size}, wanted a multiple of num_heads = {num_heads} "
                "when head_dim is not given"
            )
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        head_dim = _check_head_dim(head_dim, rotary=rope_theta is not None)
        if window_size is not None:
            wanted = "an int of at least 1, or None"
            window_size = check_int("window_size", window_size, 1, wanted)
        bias, qk_norm = check_bool("bias", bias), check_bool("qk_norm", qk_norm)

        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.has_bias = bias
        self.num_score_heads = num_score_heads
        self.window_size = window_size
        self.rope_theta = rope_theta
        self.exp_score = check_bool("exp_score", exp_score)
        self.is_causal = check_bool("is_causal", is_causal)
        self.softcap = check_float32("softcap", softcap, 0)
        self.dense_mask = check_bool("dense_mask", dense_mask)
        self.init_std = check_number("init_std", init_std, 0)
        norm_eps = check_number("norm_eps", norm_eps, 0)
        if device is not None:
            device = check_device(device)
        if dtype is not None and check_dtype("dtype", dtype) not in DTYPES:
            raise TypeError(f"dtype: got {dtype}, wanted a floating dtype of 16 to 64 bits")

        def linear(inputs: int, outputs: int, kind: type[nn.Linear] = nn.Linear) -> nn.Linear:
            return kind(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm() -> nn.Module:
            if not qk_norm:
                return nn.Identity()
            return nn.RMSNorm(head_dim, eps=norm_eps, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.dt_proj = linear(num_kv_heads * head_dim, num_score_heads, Float32Linear)
        self.A = nn.Parameter(torch.zeros(num_score_heads, device=device, dtype=dtype))
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        self.q_norm = norm()
        self.k_norm = norm()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set linear weights to draws from N(0, init_std**2), biases and `A` to 0, norms to 1."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.dt_proj, self.o_proj):
            layer.weight.normal_(0.0, self.init_std)
            if self.has_bias:
                layer.bias.zero_()
        self.A.zero_()
        for norm in (self.q_norm, self.k_norm):
            if isinstance(norm, nn.RMSNorm):
                norm.reset_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: DynamicMaskCache | None = None,
        slots: Tensor | None = None,
        group: "Group" = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden_states: floating (B, S, hidden_size).
            positions: int64 or int32, (S,) or ({B|1}, S): rotary positions. When None they are
                0..S-1 or, with a cache, continue from the tokens that it has seen, without counting
                padding. They rotate queries and keys, and do not change which keys are visible.
            attention_mask: (B, S), bool with False at padding, or any integers with 0 there. Padded
                keys are never attended to, nor counted among the kept keys. Outputs at padded
                positions are meaningless, and finite if hidden_states are. With a cache that holds
                tokens the mask may include those, (B, tokens before + S): only its last S columns
                are read.
            position_embeddings: (cos, sin) from `rotary_embedding`, to share them between layers;
                instead of positions.
            cache: for generating text, from `make_cache`, used by this layer only. If it is empty,
                hidden_states is a prompt, which fills it; otherwise any number of next tokens.
                Tokens at padding are not put in. Only if no gradient is needed, as under
                torch.no_grad.
            slots: int32 or int64 (B,), for a cache of more sequences: which entries of its batch
                hidden_states belong to, as in `DynamicMaskCache`.
            group: the ranks over which sequences are distributed, as for
                `dmattn.distributed.context_parallel_attention`: each holds a contiguous stretch of
                equal length of every sequence, this rank S tokens of each. None: the sequences are
                whole. Only for causal layers with a window. When positions are None, they continue
                from the ranks before; given positions are those of this rank's tokens.

        Returns:
            (B, S, hidden_size), in the dtype that `o_proj` returns: the layer's own, or autocast's.

        Raises:
            TypeError: an argument is of the wrong kind or dtype.
            ValueError: a shape or device does not fit, positions and position_embeddings are both
                given, either is given to a layer without rotary embedding, the layer cannot
                decode from the cache, slots are given without a cache, or the settings of the layer
                or a cache do not go with a group.
            RuntimeError: a cache is given where gradients would be needed.
            With a group, an error that one rank raises for its arguments is raised on all ranks, as
            by `context_parallel_attention`.
        """
        given = (hidden_states, positions, attention_mask, position_embeddings, cache, slots, group)
        if group is None or torch.compiler.is_compiling():
            operands = self._operands(*given)
        else:
            from dmattn.distributed.groups import prepare

            operands = prepare(group, lambda: self._operands(*given))
        query, key, value, score, attention_mask, slots = operands
        if cache is None:
            out = self._attend(query, key, value, score, attention_mask, group)
        else:
            out = attend_through_cache(
                query,
                key,
                value,
                score,
                cache,
                softcap=self.softcap,
                key_mask=attention_mask,
                slots=slots,
            )
            if not torch.compiler.is_compiling():
                cache.note_layer(self)  # not before: a call that fails changes nothing
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected

    def make_cache(
        self,
        batch: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        evict: bool = True,
        capacity: int | None = None,
    ) -> DynamicMaskCache:
        """An empty cache for this layer, to generate text with.

        It has HS key/value heads, one for each score head. With num_score_heads = num_heads, query
        heads keep different keys, and the cache holds keys and values once per query head.

        Args:
            batch: number of sequences.
            dtype: of keys and values. When None, the dtype that `v_proj` returns now: the layer's
                own, or that of autocast if it is on; then it has to be on in the calls of `forward`
                as well. If FSDP casts the layer's parameters, pass the dtype that it casts them to.
            device: of the cache; the layer's when None.
            evict: if True, the cache holds `window_size` keys per head, for texts of any length; if
                False, all keys of at most `capacity` tokens, for any causal layer, with or without
                a window.
            capacity: without evict, the most tokens per sequence.

        Returns:
            The cache; its scores are float32, or float64 for a float64 dtype.

        Raises:
            TypeError: an argument is of the wrong kind.
            ValueError: the layer is not causal, has no window to evict by, or capacity does not go
                with evict.
        """
        if not self.is_causal:
            raise ValueError("is_causal: got False, wanted a causal layer to decode from a cache")
        window = self.window_size
        if window is None and evict:
            raise ValueError(
                "window_size: got None, wanted a window by which a cache can evict; "
                "evict=False, capacity=... makes one that holds every key"
            )
        device = self.A.device if device is None else check_device(device)
        dtype = self._value_dtype(device) if dtype is None else check_dtype("dtype", dtype)
        cache = DynamicMaskCache(
            batch,
            1 if window is None else window,
            self.num_score_heads,
            self.head_dim,
            dtype,
            device,
            score_dtype=torch.promote_types(dtype, torch.float32),
            evict=evict,
            capacity=capacity,
        )
        if window is None:
            cache.window_size = cache.capacity
        return cache

    def key_scores(self, hidden_states: Tensor) -> Tensor:
        """The scores by which keys are kept, for inspection.

        Args:
            hidden_states: floating (B, S, hidden_size), as for `forward`.

        Returns:
            (B, HS, S), float32, or float64 when the values are.

        Raises:
            TypeError, ValueError: hidden_states has a wrong type, dtype or shape.
        """
        self._check_hidden_states(hidden_states)
        return self._score(self._split_heads(self.v_proj(hidden_states)))

    def _operands(
        self,
        hidden_states: Tensor,
        positions: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
        cache: DynamicMaskCache | None,
        slots: Tensor | None,
        group: "Group",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Query, key, value, score, token mask and slots of a call of `forward`, checked."""
        self._check_hidden_states(hidden_states)
        if cache is not None:
            self._check_cache(cache, None if slots is not None else hidden_states.shape[0])
            slots = _checked_slots(slots, hidden_states, cache)
        elif slots is not None:
            raise ValueError("slots: got a tensor without a cache, wanted None")
        if group is not None:
            self._check_group(cache)
        attention_mask = _token_mask(attention_mask, hidden_states, cache)
        self._check_positions(hidden_states, positions, position_embeddings)
        value = self._split_heads(self.v_proj(hidden_states))
        query = _normalize(self.q_norm, self._split_heads(self.q_proj(hidden_states)))
        key = _normalize(self.k_norm, self._split_heads(self.k_proj(hidden_states)))
        if self.rope_theta is not None:
            if position_embeddings is None:
                if positions is None:
                    positions = _next_positions(hidden_states, attention_mask, cache, slots)
                    if group is not None:
                        positions = positions + _tokens_before(hidden_states, group)
                position_embeddings = rotary_embedding(positions, self.head_dim, self.rope_theta)
            cos, sin = position_embeddings
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

        query, key, score = query.to(value.dtype), key.to(value.dtype), self._score(value)
        return query, key, value, score, attention_mask, slots

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        mask: Tensor | None,
        group: "Group",
    ) -> Tensor:
        keep = None if mask is None else mask[:, None, None, :]
        bias, window, seqlen = score[:, :, None, :], self.window_size, key.shape[1]
        if group is not None and window is not None:
            from dmattn.distributed.context_parallel import context_parallel_attention

            return context_parallel_attention(
                *(query, key, value, bias),
                window_size=window,
                group=group,
                attn_mask=keep,
                softcap=self.softcap,
            )
        if self.dense_mask and window is not None and seqlen > window:
            keep = top_window_mask(bias, window, seqlen, self.is_causal, keep)
            window = None
        return flash_dmattn_func(
            query,
            key,
            value,
            attn_mask=keep,
            attn_bias=bias,
            is_causal=self.is_causal,
            softcap=self.softcap,
            window_size=window,
        )

    def _check_cache(self, cache: Any, batch: int | None) -> None:
        """Raise unless `cache` is one for this layer and for `batch` sequences; None for any."""
        if not isinstance(cache, DynamicMaskCache):
            raise TypeError(f"cache: got {describe(cache)}, wanted a DynamicMaskCache or None")
        window = cache.capacity if self.window_size is None else self.window_size
        batch = cache.k.shape[0] if batch is None else batch
        wanted = (batch, window, self.num_score_heads, self.head_dim)
        found = (cache.k.shape[0], cache.window_size, cache.k.shape[2], cache.k.shape[3])
        if not all(n == m for n, m in zip(found, wanted, strict=True)):
            raise ValueError(
                f"cache: got one of (batch, window_size, nheads_k, head_dim) {found}, wanted "
                f"{wanted}, as make_cache makes it"
            )
        if not self.is_causal:
            raise ValueError(
                "cache: got one for a layer with is_causal=False, wanted None: a cache holds keys "
                "of earlier tokens"
            )
        if self.window_size is None and cache.evict:
            raise ValueError(
                "cache: got one with evict=True for a layer with window_size=None, which attends "
                "to all keys; wanted one with evict=False, as make_cache makes it"
            )
        if not torch.compiler.is_compiling():
            cache.check_layer(self)

    def _check_group(self, cache: Any) -> None:
        if cache is not None:
            raise ValueError("cache: got a cache beside group, wanted None")
        if not self.is_causal or self.window_size is None:
            raise ValueError(
                f"group: got one for a layer with is_causal={self.is_causal} and window_size="
                f"{self.window_size}, wanted a causal layer with a window: without one every key "
                "would have to be on every rank"
            )
        if self.dense_mask:
            raise ValueError(
                "dense_mask: got True beside group, wanted False; for dense masks there is ring "
                "attention: torch.distributed.tensor.experimental.context_parallel"
            )

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, S, heads*D) -> (B, S, heads, D)."""
        return x.view(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim)

    def _value_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that `v_proj` returns on this device; autocast leaves float64 alone."""
        weight = getattr(self.v_proj, "weight", None)
        dtype = self.A.dtype
        # The weight of a quantized layer is an integer tensor or a method; such a layer returns the
        # dtype of the other parameters.
        if isinstance(weight, Tensor) and weight.is_floating_point():
            dtype = weight.dtype
        kind = device.type
        if kind != "meta" and torch.is_autocast_enabled(kind) and dtype != torch.float64:
            return torch.get_autocast_dtype(kind)
        return dtype

    def _score(self, value: Tensor) -> Tensor:
        """(B, S, HK, D) values -> (B, HS, S) scores, in float32 or wider."""
        return key_scores(self.dt_proj(value.flatten(2)), self.A, self.exp_score)

    def _check_hidden_states(self, hidden_states: Any) -> None:
        shape = check_tensor("hidden_states", hidden_states).shape
        if not hidden_states.is_floating_point():
            raise TypeError(
                f"hidden_states: got dtype {hidden_states.dtype}, wanted a floating dtype"
            )
        if len(shape) != 3 or shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden_states: got shape {tuple(shape)}, wanted (batch, seqlen, "
                f"{self.hidden_size})"
            )

    def _check_positions(
        self, hidden_states: Tensor, positions: Any, position_embeddings: Any
    ) -> None:
        for name, given in (
            ("positions", positions),
            ("position_embeddings", position_embeddings),
        ):
            if given is not None and self.rope_theta is None:
                raise ValueError(f"{name}: got a value, wanted None as rope_theta is None")
        if position_embeddings is not None:
            if positions is not None:
                raise ValueError("positions: got a value beside position_embeddings, wanted one")
            _check_tables(position_embeddings, hidden_states)
        if positions is not None:
            _check_position_shape(positions, hidden_states)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"num_score_heads={self.num_score_heads}, head_dim={self.head_dim}, "
            f"window_size={self.window_size}, rope_theta={self.rope_theta}, "
            f"exp_score={self.exp_score}, is_causal={self.is_causal}, softcap={self.softcap}, "
            f"dense_mask={self.dense_mask}"
        )


def _next_positions(
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    cache: DynamicMaskCache | None,
    slots: Tensor | None,
) -> Tensor:
    """(S,) or (B, S): positions that continue from the tokens that the cache has seen."""
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    if cache is None:
        return positions
    if attention_mask is not None:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    seen = cache.seen if slots is None else cache.seen.index_select(0, slots)
    return positions + seen[:, None]


def _checked_slots(slots: Any, hidden_states: Tensor, cache: DynamicMaskCache) -> Tensor | None:
    """slots, checked, as int64 (B,), one for each sequence of hidden_states; or None."""
    if slots is None:
        return None
    found = check_slots(slots, len(cache.seen), cache.seen.device)
    batch = hidden_states.shape[0]
    if len(found) != batch:
        raise ValueError(f"slots: got {len(found)}, wanted {batch}, one for each sequence")
    return found


def _tokens_before(hidden_states: Tensor, group: "Group") -> int:
    """The number of tokens of each sequence that the ranks before this one hold."""
    from dmattn.distributed.groups import ranks_of

    rank: int = ranks_of(group).rank
    return rank * hidden_states.shape[1]


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), computed in the dtype of the norm's weight, from which x may differ in autocast."""
    y: Tensor = norm(x.to(norm.weight.dtype)) if isinstance(norm, nn.RMSNorm) else norm(x)
    return y


def _token_mask(mask: Any, hidden_states: Tensor, cache: DynamicMaskCache | None) -> Tensor | None:
    """The attention mask of `forward` as bool (B, S), True for real tokens; None without one."""
    if check_optional_tensor("attention_mask", mask) is None:
        return None
    batch, seqlen, _ = hidden_states.shape
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"attention_mask: got dtype {mask.dtype}, wanted torch.bool or integers "
            "(True or 1 = attend)"
        )
    decoding = cache is not None and not cache.is_empty
    fits = mask.dim() == 2 and mask.shape[0] == batch
    if fits and decoding and mask.shape[1] > seqlen:
        mask = mask[:, mask.shape[1] - seqlen :]
    if not fits or mask.shape[1] != seqlen:
        more = f" or ({batch}, tokens before + {seqlen})" if decoding else ""
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, wanted ({batch}, {seqlen}){more}"
        )
    check_same_device("attention_mask", mask, hidden_states.device, "hidden_states")
    real: Tensor = mask.bool()
    return real


def _check_position_shape(positions: Any, hidden_states: Tensor) -> None:
    """Raise unless the shape and device of positions fit hidden_states (B, S, hidden_size)."""
    batch, seqlen, _ = hidden_states.shape
    shape = check_tensor("positions", positions).shape
    fits = len(shape) in (1, 2) and shape[-1] == seqlen
    if not fits or not (len(shape) == 1 or is_one_or(shape[0], batch)):
        raise ValueError(
            f"positions: got shape {tuple(shape)}, wanted ({seqlen},), (1, {seqlen}) or "
            f"({batch}, {seqlen})"
        )
    check_same_device("positions", positions, hidden_states.device, "hidden_states")


def _check_tables(position_embeddings: Any, hidden_states: Tensor) -> None:
    """Raise unless they are two tensors on the right device; `apply_rotary` checks the shapes."""
    if not isinstance(position_embeddings, (tuple, list)) or len(position_embeddings) != 2:
        raise TypeError(
            f"position_embeddings: got {describe(position_embeddings)}, wanted (cos, sin)"
        )
    for name, table in zip(("cos", "sin"), position_embeddings, strict=True):
        check_tensor(name, table)
        check_same_device(name, table, hidden_states.device, "hidden_states")


def _check_heads(num_heads: Any, num_kv_heads: Any, num_score_heads: Any) -> tuple[int, int, int]:
    """The numbers of heads as ints, with defaults: HK = H, and HS = HK."""
    num_heads = check_int("num_heads", num_heads, 1)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    num_kv_heads = check_int("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads: got {num_kv_heads}, wanted a divisor of num_heads = {num_heads}"
        )
    num_score_heads = num_kv_heads if num_score_heads is None else num_score_heads
    num_score_heads = check_int("num_score_heads", num_score_heads, 1)
    if num_score_heads not in (num_kv_heads, num_heads):
        raise ValueError(
            f"num_score_heads: got {num_score_heads}, wanted num_kv_heads = {num_kv_heads} or "
            f"num_heads = {num_heads}"
        )
    return num_heads, num_kv_heads, num_score_heads


def _check_head_dim(head_dim: Any, rotary: bool) -> int:
    found = check_head_dim_number(head_dim)
    if rotary and found % 2:
        raise ValueError(f"head_dim: got {found}, wanted an even number for rotary embedding")
    return found


def _check_rope_theta(rope_theta: Any) -> float | None:
    if rope_theta is None:
        return None
    rope_theta = check_number("rope_theta", rope_theta)
    if not rope_theta > 0:
        raise ValueError(f"rope_theta: got {rope_theta}, wanted a positive number or None")
    return float(rope_theta)
