"""The three attentions that are compared, in one model with the same initial weights."""

import torch
from torch import Tensor, nn

from bytes_lm.config import Config
from bytes_lm.model import BytesLM
from dmattn import KeySelection, flash_dmattn_func, sliding_window
from dmattn.modules import DynamicMaskAttention
from dmattn.modules.rotary import apply_rotary

# Their names in results and pictures.
FULL, SLIDING, TOP = "full", "sliding window", "running top-w"
ATTENTIONS = (FULL, SLIDING, TOP)


class PlainAttention(nn.Module):
    """Causal attention without scores: to all keys, or to the last `window` ones.

    It takes over the projections and norms of a DynamicMaskAttention, so that the two start from
    the same weights; the score's own parameters are left out.
    """

    def __init__(self, source: DynamicMaskAttention, window: int | None) -> None:
        super().__init__()
        self.head_dim, self.window = source.head_dim, window
        self.q_proj, self.k_proj, self.v_proj = source.q_proj, source.k_proj, source.v_proj
        self.q_norm, self.k_norm, self.o_proj = source.q_norm, source.k_norm, source.o_proj
        self._selections: dict[tuple[int, torch.device], KeySelection] = {}

    def forward(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: None
    ) -> Tensor:
        """(B, S, width) -> (B, S, width): whole sequences, on one device."""
        assert not any(value is not None for value in others.values()), "a cache, padding or ranks"
        cos, sin = position_embeddings

        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim)

        def normalized(norm: nn.Module, y: Tensor) -> Tensor:
            z: Tensor = norm(y.float())  # the norms and the rotation are float32
            return apply_rotary(z, cos, sin)

        value = heads(self.v_proj(x))
        query = normalized(self.q_norm, heads(self.q_proj(x))).to(value.dtype)
        key = normalized(self.k_norm, heads(self.k_proj(x))).to(value.dtype)
        selection = None if self.window is None else self._last_keys(x.shape[1], x.device)
        out = flash_dmattn_func(query, key, value, is_causal=True, selection=selection)
        y: Tensor = self.o_proj(out.flatten(2))
        return y

    def _last_keys(self, length: int, device: torch.device) -> KeySelection | None:
        """The sliding window, made once for each length; None where it holds all keys."""
        assert self.window is not None
        if length <= self.window:
            return None
        if (length, device) not in self._selections:
            self._selections[length, device] = sliding_window(length, self.window, device=device)
        return self._selections[length, device]


def make_model(attention: str, config: Config, device: torch.device) -> BytesLM:
    """The initial model: for each seed the same weights, whatever the attention."""
    torch.manual_seed(config.seed)
    model = BytesLM(config)
    if attention != TOP:
        window = None if attention == FULL else config.window
        for block in model.blocks:
            assert isinstance(block.attention, DynamicMaskAttention)
            block.attention = PlainAttention(block.attention, window)
    return model.to(device)


def cache_bytes(attention: str, config: Config, length: int) -> int:
    """Bytes of the cache with which one sequence of `length` tokens is continued, in bfloat16.

    The cache holds the keys and values of all layers, and for running top-w also the scores and
    positions of the kept keys.
    """
    if attention == TOP:
        with torch.device("meta"):
            layer = BytesLM(config).attention_layers()[0]
        cache = layer.make_cache(1, torch.bfloat16, "cpu")
        held = (cache.k, cache.v, cache.score, cache.position)
        return config.layers * sum(t.nbytes for t in held)
    keys = length if attention == FULL else min(length, config.window)
    head_dim = config.width // config.heads
    return config.layers * keys * config.kv_heads * head_dim * 2 * torch.bfloat16.itemsize
