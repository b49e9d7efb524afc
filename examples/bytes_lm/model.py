"""The model: a decoder over bytes with dynamic mask attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bytes_lm.config import Config
from bytes_lm.parallel import Ranks
from bytes_lm.text import VOCABULARY
from dmattn import DynamicMaskCache
from dmattn.modules import DynamicMaskAttention, rotary_embedding


class SwiGLU(nn.Module):
    """Gated feed-forward layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 32 * round(width * 8 / 3 / 32)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised input and added to it."""

    def __init__(self, config: Config, dense_mask: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = DynamicMaskAttention(
            config.width,
            config.heads,
            config.kv_heads,
            window_size=config.window,
            dense_mask=dense_mask,
        )
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = SwiGLU(config.width)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: DynamicMaskCache | None,
        real: Tensor | None,
        slots: Tensor | None,
        ranks: Ranks | None,
    ) -> Tensor:
        x = x + self.attention(
            self.attention_norm(x),
            attention_mask=real,
            position_embeddings=rotary,
            cache=cache,
            slots=slots,
            group=None if ranks is None else ranks.group,
        )
        x = x + self.mlp(self.mlp_norm(x))
        return x


class BytesLM(nn.Module):
    """Decoder over bytes: (B, S) int64 tokens -> (B, S, 256) logits of the next byte."""

    def __init__(self, config: Config, dense_mask: bool = False) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        blocks = [Block(config, dense_mask) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        for block in blocks:
            for layer in (block.mlp.gate, block.mlp.up):
                nn.init.normal_(layer.weight, std=config.width**-0.5)
            # Layers that add to the residual stream start small: its variance stays near one.
            for layer in (block.attention.o_proj, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.5 * (config.width * config.layers) ** -0.5)

    def attention_layers(self) -> list[DynamicMaskAttention]:
        """The attention layers of all blocks, from the input to the output."""
        return [m for m in self.modules() if isinstance(m, DynamicMaskAttention)]

    def make_caches(self, batch: int) -> list[DynamicMaskCache]:
        """One cache for each layer, to generate text with; under autocast in half precision."""
        return [layer.make_cache(batch) for layer in self.attention_layers()]

    def forward(
        self,
        tokens: Tensor,
        caches: list[DynamicMaskCache] | None = None,
        real: Tensor | None = None,
        slots: Tensor | None = None,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """With caches, under torch.no_grad: tokens go on from those that the caches have seen.

        real: bool (B, S), False for padding, which stands behind the tokens.
        slots: int64 (B,), which sequences of the caches these are; all when None.
        ranks: the ranks that share each sequence; tokens are then this rank's stretch of it.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if ranks is not None:
            positions = positions + ranks.rank * tokens.shape[1]
        if caches is not None:
            # A tensor on the device, so that replays of a CUDA graph read its current value.
            seen = caches[0].seen
            seen = seen if slots is None else seen.index_select(0, slots)
            positions = positions + seen[:, None]
        rotary = rotary_embedding(positions, self.head_dim)
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            cache = None if caches is None else caches[number]
            x = block(x, rotary, cache, real, slots, ranks)
        return F.linear(self.norm(x), self.embedding.weight)  # the head has the embedding's weights


def count_parameters(config: Config) -> int:
    with torch.device("meta"):  # shapes without numbers
        return sum(parameter.numel() for parameter in BytesLM(config).parameters())
