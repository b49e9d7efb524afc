"""Dynamic mask attention as a layer: every key gets a score, and each query keeps the best w.

    score[b, h, j] = exp(A[h] * softplus(dt_proj(v[b, j]))[h])

The score does two things. It is added to the attention logits as a key-only bias, which is how it
learns; and it selects: query i attends to the `window_size` highest-scored keys among 0..i. The
parameter names and shapes are those of the Doge models, so their attention weights load as they
are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmattn.cache import DynamicMaskCache
from dmattn.functional import flash_dmattn_func
from dmattn.modules.rotary import apply_rotary, rotary_embedding
from dmattn.selection import select_keys
from dmattn.utils.mask import top_window_mask

# exp(80) is 5.5e34. A score above it would drown every logit anyway; without the limit the score,
# and with it the attention output, would overflow to INF while the parameters are still finite.
_MAX_EXPONENT = 80.0


class DynamicMaskAttention(nn.Module):
    """Multi-head self-attention over the keys that a learned score keeps.

    Letters: B batch, S sequence length, H query heads, HK key/value heads, HS score heads
    (HK or H), D head dimension.

    Parameters and their shapes: `q_proj` (H*D, hidden), `k_proj` and `v_proj` (HK*D, hidden),
    `dt_proj` (HS, HK*D), `A` (HS,), `o_proj` (hidden, H*D); `q_norm` and `k_norm` (D,) when
    `qk_norm`. The linear layers have biases when `bias`.

    Numerics: scores are always computed in float32 (float64 for a float64 layer), also under
    autocast and in a bfloat16 layer, and are handed to the attention in that dtype. Rounded to
    bfloat16 they would be full of ties, and ties decide which keys are kept. Rotary angles and the
    rotation are float32 too. Queries, keys and values are in the dtype that `v_proj` returns: the
    layer's own, or the autocast dtype.

    Selection is not differentiated; the scores of the kept keys are. `A` starts at zero, so every
    score starts equal; of equal scores the later key wins, so training starts from a plain sliding
    window of the last `window_size` keys.

    Args:
        hidden_size: width of the input and the output.
        num_heads: H.
        num_kv_heads: HK, a divisor of H; H when None.
        head_dim: D; hidden_size / num_heads when None.
        window_size: keys kept by each query, or None to keep all of them (the scores then only
            weigh keys, and mask nothing).
        bias: give the linear layers biases.
        qk_norm: RMSNorm over D on queries and keys, before the rotation.
        norm_eps: epsilon of these norms.
        rope_theta: base of the rotary embedding; None leaves queries and keys unrotated.
        exp_score: True for the score above, False for the same without exp. Published checkpoints
            differ in this.
        num_score_heads: HS: num_kv_heads (the default, and current checkpoints), one score per key
            and key/value head; or num_heads (the first checkpoints), one per query head.
        is_causal: query i sees keys 0..i. False: all keys, and the same kept keys for every query.
        softcap: bound c of the tanh soft cap on the scaled dot products, 0 for none.
        dense_mask: form the boolean mask (B, HS, S, S) and attend through that, instead of
            selecting inside the attention. The function is the same; time and memory grow with the
            square of the length. To compare the two, also in a trained layer: it is read at every
            call. Decoding from a cache has no such mask.
        init_std: standard deviation of the initial weights of the linear layers.
        device, dtype: of the parameters.

    Raises:
        ValueError: a size is not positive, sizes do not divide, `head_dim` is odd while rotary
            embedding is on, or num_score_heads is neither num_kv_heads nor num_heads.
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
        _require_positive("hidden_size", hidden_size)
        _require_positive("num_heads", num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _require_positive("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads: got {num_kv_heads}, wanted a divisor of num_heads = {num_heads}"
            )
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size: got {hidden_size}, wanted a multiple of num_heads = {num_heads} "
                    "when head_dim is not given"
                )
            head_dim = hidden_size // num_heads
        _require_positive("head_dim", head_dim)
        num_score_heads = num_kv_heads if num_score_heads is None else num_score_heads
        if num_score_heads not in (num_kv_heads, num_heads):
            raise ValueError(
                f"num_score_heads: got {num_score_heads}, wanted num_kv_heads = {num_kv_heads} or "
                f"num_heads = {num_heads}"
            )
        if window_size is not None:
            _require_positive("window_size", window_size)
        if rope_theta is not None and not rope_theta > 0:
            raise ValueError(f"rope_theta: got {rope_theta}, wanted a positive number or None")
        if rope_theta is not None and head_dim % 2:
            raise ValueError(
                f"head_dim: got {head_dim}, wanted an even number for rotary embedding"
            )
        if not softcap >= 0:
            raise ValueError(f"softcap: got {softcap}, wanted a number >= 0")

        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.has_bias = bias
        self.num_score_heads = num_score_heads
        self.window_size = window_size
        self.rope_theta = rope_theta
        self.exp_score = exp_score
        self.is_causal = is_causal
        self.softcap = softcap
        self.dense_mask = dense_mask
        self.init_std = init_std

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        def norm() -> nn.Module:
            if not qk_norm:
                return nn.Identity()
            return nn.RMSNorm(head_dim, eps=norm_eps, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.dt_proj = linear(num_kv_heads * head_dim, num_score_heads)
        self.A = nn.Parameter(torch.zeros(num_score_heads, device=device, dtype=dtype))
        self.o_proj = linear(num_heads * head_dim, hidden_size)
        self.q_norm = norm()
        self.k_norm = norm()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Linear weights from N(0, init_std**2), biases and `A` zero, norm weights one."""
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
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden_states: floating (B, S, hidden_size).
            positions: int64 or int32, (S,) or (B, S): rotary positions; 0..S-1 when None, and with
                a cache the number of tokens before, padding not counted. They turn queries and
                keys, and do not change which keys are visible.
            attention_mask: bool (B, S), False at padding. Padded keys are never attended to nor
                counted among the kept. Outputs at padded positions are finite and meaningless.
            position_embeddings: (cos, sin) from `rotary_embedding`, to share them between layers;
                in place of positions.
            cache: for generating text, from `make_cache`, of this layer alone. While it is empty
                hidden_states is a prompt, which fills it; after that, the next tokens, one or a
                few. Tokens at padding are not put in. Under torch.no_grad only.

        Returns:
            (B, S, hidden_size), in the dtype that `o_proj` returns: the layer's own, or autocast's.

        Raises:
            TypeError: attention_mask is not bool, or positions not integer.
            ValueError: a shape does not fit, positions and position_embeddings are both given,
                either is given to a layer without rotary embedding, or the layer cannot decode
                from the cache.
            RuntimeError: a cache is given where gradients would be needed.
        """
        self._check_inputs(hidden_states, positions, attention_mask, position_embeddings)
        if cache is not None:
            self._check_cache(cache, hidden_states.shape[0])
        value = self._split_heads(self.v_proj(hidden_states))
        query = _normalize(self.q_norm, self._split_heads(self.q_proj(hidden_states)))
        key = _normalize(self.k_norm, self._split_heads(self.k_proj(hidden_states)))
        if self.rope_theta is not None:
            if position_embeddings is None:
                if positions is None:
                    positions = _next_positions(hidden_states, attention_mask, cache)
                position_embeddings = rotary_embedding(positions, self.head_dim, self.rope_theta)
            cos, sin = position_embeddings
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

        query, key, score = query.to(value.dtype), key.to(value.dtype), self._score(value)
        if cache is None:
            out = self._attend(query, key, value, score, attention_mask)
        else:
            out = self._decode(query, key, value, score, attention_mask, cache)
        projected: Tensor = self.o_proj(out.flatten(2))
        return projected

    def make_cache(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> DynamicMaskCache:
        """An empty cache of `window_size` keys per key/value head, to generate text with.

        Args:
            batch: sequences.
            dtype: of keys and values. What `v_proj` returns when None: the dtype of its weight, or
                autocast's where that is on, as it has to be in the calls of `forward` then.
            device: of the cache; that of the weight of `v_proj` when None.

        Raises:
            ValueError: the layer is not causal, has no window, or scores per query head.
        """
        weight = self.v_proj.weight
        device = weight.device if device is None else torch.device(device)
        dtype = self._value_dtype(device) if dtype is None else dtype
        if self.window_size is None or not self.is_causal:
            raise ValueError(
                f"window_size: got {self.window_size} with is_causal={self.is_causal}, wanted a "
                "causal layer with a window to decode from a cache"
            )
        if self.num_score_heads != self.num_kv_heads:
            raise ValueError(
                f"num_score_heads: got {self.num_score_heads}, wanted num_kv_heads = "
                f"{self.num_kv_heads} to decode from a cache"
            )
        return DynamicMaskCache(
            batch,
            self.window_size,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            device,
            score_dtype=torch.promote_types(dtype, torch.float32),
        )

    def key_scores(self, hidden_states: Tensor) -> Tensor:
        """The scores by which keys are kept, for looking at them.

        Args:
            hidden_states: floating (B, S, hidden_size), as for `forward`.

        Returns:
            (B, HS, S), float32, or float64 when the values are.

        Raises:
            ValueError: hidden_states has another shape.
        """
        self._check_inputs(hidden_states, None, None, None)
        return self._score(self._split_heads(self.v_proj(hidden_states)))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, score: Tensor, mask: Tensor | None
    ) -> Tensor:
        keep = None if mask is None else mask[:, None, None, :]
        bias, window, seqlen = score[:, :, None, :], self.window_size, key.shape[1]
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

    def _decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score: Tensor,
        mask: Tensor | None,
        cache: DynamicMaskCache,
    ) -> Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, score)):
            raise RuntimeError("cache: got one with gradients enabled, wanted torch.no_grad()")
        if not cache.is_empty:
            return cache.append_and_attend(
                query, key, value, score, softcap=self.softcap, active=mask
            )
        if self.window_size is None or key.shape[1] <= self.window_size:
            cache.prefill(key, value, score, attn_mask=mask)
            return self._attend(query, key, value, score, mask)
        selection = select_keys(score, self.window_size, attn_mask=mask)
        cache.prefill(key, value, score, selection, attn_mask=mask)
        return flash_dmattn_func(
            query,
            key,
            value,
            attn_bias=score[:, :, None, :],
            is_causal=True,
            softcap=self.softcap,
            selection=selection,
        )

    def _check_cache(self, cache: DynamicMaskCache, batch: int) -> None:
        wanted = (batch, self.window_size, self.num_kv_heads, self.head_dim)
        found = (cache.k.shape[0], cache.window_size, cache.k.shape[2], cache.k.shape[3])
        if found != wanted or not self.is_causal or self.num_score_heads != self.num_kv_heads:
            raise ValueError(
                f"cache: got one of (batch, window_size, nheads_k, head_dim) {found}, wanted "
                f"{wanted} and a causal layer with a score per key/value head; see make_cache"
            )

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, S, heads*D) -> (B, S, heads, D)."""
        return x.view(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim)

    def _value_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype that `v_proj` returns on this device; autocast leaves float64 alone."""
        dtype = self.v_proj.weight.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            return torch.get_autocast_dtype(device.type)
        return dtype

    def _score(self, value: Tensor) -> Tensor:
        """(B, S, HK, D) values -> (B, HS, S) scores, in float32 or wider."""
        dtype = torch.promote_types(value.dtype, torch.float32)
        with torch.autocast(value.device.type, enabled=False):
            step = F.softplus(
                F.linear(
                    value.flatten(2).to(dtype),
                    self.dt_proj.weight.to(dtype),
                    self.dt_proj.bias.to(dtype) if self.has_bias else None,
                )
            )
            score = self.A.to(dtype) * step
            if self.exp_score:
                score = score.clamp(max=_MAX_EXPONENT).exp()
        return score.transpose(1, 2).contiguous()  # unit stride along keys

    def _check_inputs(
        self,
        hidden_states: Tensor,
        positions: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None,
    ) -> None:
        shape = tuple(hidden_states.shape)
        if len(shape) != 3 or shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden_states: got shape {shape}, wanted (batch, seqlen, {self.hidden_size})"
            )
        if attention_mask is not None:
            if attention_mask.dtype != torch.bool:
                raise TypeError(
                    f"attention_mask: got dtype {attention_mask.dtype}, wanted torch.bool "
                    "(True = attend)"
                )
            if attention_mask.shape != shape[:2]:
                raise ValueError(
                    f"attention_mask: got shape {tuple(attention_mask.shape)}, wanted {shape[:2]}"
                )
        for name, given in (
            ("positions", positions),
            ("position_embeddings", position_embeddings),
        ):
            if given is not None and self.rope_theta is None:
                raise ValueError(f"{name}: got a value, wanted None as rope_theta is None")
        if positions is not None:
            if position_embeddings is not None:
                raise ValueError("positions: got a value beside position_embeddings, wanted one")
            if positions.shape not in (shape[1:2], shape[:2]):
                raise ValueError(
                    f"positions: got shape {tuple(positions.shape)}, wanted {shape[1:2]} or "
                    f"{shape[:2]}"
                )

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"num_score_heads={self.num_score_heads}, head_dim={self.head_dim}, "
            f"window_size={self.window_size}, rope_theta={self.rope_theta}, "
            f"exp_score={self.exp_score}, is_causal={self.is_causal}, softcap={self.softcap}, "
            f"dense_mask={self.dense_mask}"
        )


def _next_positions(
    hidden_states: Tensor, attention_mask: Tensor | None, cache: DynamicMaskCache | None
) -> Tensor:
    """(S,) or (B, S): counted on from the tokens that the cache has seen."""
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    if cache is None:
        return positions
    if attention_mask is not None:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return positions + cache.seen[:, None]


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), in the dtype of the norm's weight: under autocast the two differ."""
    y: Tensor = norm(x.to(norm.weight.dtype)) if isinstance(norm, nn.RMSNorm) else norm(x)
    return y


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name}: got {value}, wanted a positive number")
