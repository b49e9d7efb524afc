"""Steps of a cache in code that torch's own compiler, inductor, has made.

Inductor may compute something late, from tensors that have changed since: see `change_cache` in
`dmattn.cache_calls`. Other backends of torch.compile do not.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn import DynamicMaskAttention, DynamicMaskCache
from dmattn.modules.rotary import rotary_embedding

B, H, HK, D, HIDDEN, W = 2, 4, 2, 8, 32, 6
START = 10  # tokens in a cache before the first compiled step
# Compiled code adds up in another order; the largest differences seen were 5e-6.
ROUNDING = {"rtol": 2e-5, "atol": 2e-5}


def layer() -> DynamicMaskAttention:
    return DynamicMaskAttention(HIDDEN, H, HK, D, window_size=W, init_std=0.3).eval()


def check_steps(
    step: Callable[..., Tensor], caches: list[DynamicMaskCache], hidden: Tensor, tokens: int
) -> None:
    """Two compiled steps are those that are not compiled, and leave the caches alike."""
    others = [cache.clone() for cache in caches]
    compiled = torch.compile(step, fullgraph=True)
    for first in (START, START + tokens):
        now = hidden[:, first : first + tokens]
        torch.testing.assert_close(compiled(now, *caches), step(now, *others), **ROUNDING)
    for cache, other in zip(caches, others, strict=True):
        for name in ("k", "v", "score", "position", "seen"):
            torch.testing.assert_close(getattr(cache, name), getattr(other, name))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3])
def test_positions_follow_from_the_cache(tokens: int) -> None:
    torch.manual_seed(0)
    attention, hidden = layer(), torch.randn(B, 20, HIDDEN)
    cache = attention.make_cache(B, evict=False, capacity=40)
    attention(hidden[:, :START], cache=cache)
    check_steps(lambda x, own: attention(x, cache=own), [cache], hidden, tokens)


@torch.no_grad()
@pytest.mark.parametrize("evict,tokens", [(True, 1), (False, 3)])
def test_layers_share_positions(evict: bool, tokens: int) -> None:
    torch.manual_seed(0)
    first, second, hidden = layer(), layer(), torch.randn(B, 20, HIDDEN)

    def step(x: Tensor, own: DynamicMaskCache, others: DynamicMaskCache) -> Tensor:
        positions = own.seen[:, None] + torch.arange(x.shape[1])
        shared: Any = rotary_embedding(positions, D, 10000.0)
        x = x + first(x, position_embeddings=shared, cache=own)
        return x + second(x, position_embeddings=shared, cache=others)

    options = {} if evict else {"evict": False, "capacity": 40}
    caches = [attention.make_cache(B, **options) for attention in (first, second)]
    step(hidden[:, :START], *caches)
    check_steps(step, caches, hidden, tokens)


@torch.no_grad()
@pytest.mark.parametrize("is_draft", [False, True])
def test_what_was_computed_from_seen_stays(is_draft: bool) -> None:
    torch.manual_seed(0)
    cache = DynamicMaskCache(B, W, HK, D, dtype=torch.float32, device="cpu", spare_rows=4)
    tokens = 3 if is_draft else 1

    def given(count: int) -> tuple[Tensor, ...]:
        k, v = (torch.randn(B, count, HK, D) for _ in range(2))
        return torch.randn(B, count, H, D), k, v, torch.randn(B, HK, count)

    def step(own: DynamicMaskCache, q: Tensor, *new: Tensor) -> Tensor:
        turned = own.seen.float().cos()[:, None, None, None]
        if is_draft:
            out = own.peek(q * turned, *new)
            own.commit(torch.full((B,), 2, dtype=torch.int32))
        else:
            out = own.append_and_attend(q * turned, *new)
        return out * turned

    cache.append_and_attend(*given(START))
    other, now = copy.deepcopy(cache), given(tokens)
    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(cache, *now), step(other, *now), **ROUNDING)
    assert torch.equal(cache.seen, other.seen)
