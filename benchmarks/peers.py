"""The contenders: ours and PyTorch's own, each doing the whole job of a case, masks included."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

import dmattn
import dmattn.cache as cache_module
from benchmarks.cases import CHUNK, WINDOWS_A_SIDE, Case
from benchmarks.timing import Call

TILE = 128  # rows and keys of a tile of the masks that keep whole tiles


@dataclasses.dataclass(frozen=True)
class Data:
    """Random tensors of a case: q (B, Sq, H, D), k and v (B, Sk, HK, D), bias as in cases.py.

    With packed sequences the batch is 1.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    # bool (B, HK, 1, Sk), (B, HK, Sq, Sk) for running top-w, (1, 1, Sq, Sk) of tiles, or Case.mask
    mask: Tensor | None
    dout: Tensor
    cache: dmattn.DynamicMaskCache | None = None  # full, for the cases with Case.steps_cache
    new_score: Tensor | None = None  # of the tokens that go into it
    bounds: Tensor | None = None  # int32 (n + 1,): where the n packed sequences begin and end

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k and v as (B, H, S, D), the layout of PyTorch's own attention."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of q, k and v as (T, H, D). Indexing them instead would copy in the backward."""
        return self.q.squeeze(0), self.k.squeeze(0), self.v.squeeze(0)

    def wanted(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.bias) if x is not None and x.requires_grad]


def make_data(case: Case, device: torch.device) -> Data:
    generator = torch.Generator(device)
    generator.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(generator=generator).requires_grad_(case.backward)

    q = normal(case.batch, case.seqlen_q, case.nheads, case.head_dim)
    k, v = (normal(case.batch, case.seqlen_k, case.nheads_k, case.head_dim) for _ in range(2))
    bias = mask = None
    if case.bias == "dense":
        batch = 1 if "batch" in case.shared else case.batch
        nheads = 1 if "heads" in case.shared else case.nheads
        bias = normal(batch, nheads, case.seqlen_q, case.seqlen_k)
        if case.bias_is_float32:
            bias = bias.detach().float().requires_grad_(case.backward)
    elif case.bias:
        of_heads = case.bias == "key of heads"
        bias = normal(case.batch, case.nheads if of_heads else case.nheads_k, 1, case.seqlen_k)
    if case.group.startswith("key mask"):
        assert case.kept is not None
        chosen = torch.rand(
            case.batch, case.nheads_k, 1, case.seqlen_k, generator=generator, device=device
        )
        mask = torch.zeros(chosen.shape, dtype=torch.bool, device=device)
        mask.scatter_(3, chosen.topk(case.kept, dim=3).indices, True)
    if case.tiles is not None:
        rows, cols = case.seqlen_q // TILE, case.seqlen_k // TILE
        chosen = torch.rand(rows, cols, generator=generator, device=device) < case.tiles
        mask = chosen.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)[None, None]
    if case.mask == "padding":
        mask = padding(case, device)
    elif case.mask == "windows":
        mask = shifted_windows(case, device)
    data = Data(case, q, k, v, bias, mask, torch.randn_like(q.detach()))
    if "dmattn_given_mask" in case.contenders:
        data = dataclasses.replace(data, mask=running_top_mask(data))
    if case.steps_cache:
        cache = full_cache(data)
        # High enough for the token to be kept each time.
        score = cache.score.new_ones(case.batch, case.nheads_k, case.seqlen_q)
        data = dataclasses.replace(data, cache=cache, new_score=score)
    if case.lengths:
        bounds = torch.tensor((0, *case.lengths)).cumsum(0).to(device, torch.int32)
        data = dataclasses.replace(data, bounds=bounds)
    return data


def padding(case: Case, device: torch.device) -> Tensor:
    """(B, 1, 1, Sk): keeps the first keys of each text, from few to all, `kept` on average."""
    assert case.kept is not None
    fewest = 2 * case.kept - case.seqlen_k
    lengths = torch.linspace(fewest, case.seqlen_k, case.batch, device=device).round()
    places = torch.arange(case.seqlen_k, device=device)
    return (places < lengths[:, None])[:, None, None]


def shifted_windows(case: Case, device: torch.device) -> Tensor:
    """(B, 1, S, S) of Swin: an image is rolled by half a window, so that the windows at its far
    sides hold parts that do not belong together."""
    side = math.isqrt(case.seqlen_q)
    part = torch.zeros(WINDOWS_A_SIDE * side, dtype=torch.int32, device=device)
    part[-side:], part[-(side // 2) :] = 1, 2
    image = (3 * part[:, None] + part).view(WINDOWS_A_SIDE, side, WINDOWS_A_SIDE, side)
    windows = image.transpose(1, 2).reshape(WINDOWS_A_SIDE**2, 1, side**2)
    same = windows[..., None] == windows[..., None, :]
    return same.repeat(case.batch // len(same), 1, 1, 1)


def padded_batch(data: Data) -> Data:
    """The packed sequences as a batch, with zeros behind those shorter than the longest."""

    def padded(packed: Tensor) -> Tensor:
        sequences = list(packed.detach().squeeze(0).split_with_sizes(data.case.lengths))
        return pad_sequence(sequences, batch_first=True).requires_grad_(packed.requires_grad)

    q, k, v, dout = (padded(x) for x in (data.q, data.k, data.v, data.dout))
    return dataclasses.replace(data, q=q, k=k, v=v, dout=dout)


def full_cache(data: Data) -> dmattn.DynamicMaskCache:
    """A cache with room for `kept` keys and as many in it."""
    case = data.case
    assert case.kept == case.seqlen_k and data.bias is not None
    cache = dmattn.DynamicMaskCache(
        case.batch, case.kept, case.nheads_k, case.head_dim, data.k.dtype, data.k.device
    )
    cache.prefill(data.k, data.v, data.bias[:, :, 0].float())
    return cache


# --- ours -----------------------------------------------------------------------------------------


def dmattn_plain(data: Data) -> Tensor:
    case = data.case
    return dmattn.flash_dmattn_func(
        data.q,
        data.k,
        data.v,
        attn_bias=data.bias,
        is_causal=case.causal,
        softcap=case.softcap,
    )


def dmattn_masked(data: Data, deterministic: bool = False) -> Tensor:
    return dmattn.flash_dmattn_func(
        data.q,
        data.k,
        data.v,
        attn_mask=data.mask,
        attn_bias=data.bias,
        is_causal=data.case.causal,
        deterministic=deterministic,
    )


def dmattn_no_bias(data: Data) -> Tensor:
    """As if there were neither bias nor mask."""
    return dmattn.flash_dmattn_func(data.q, data.k, data.v, is_causal=data.case.causal)


def dmattn_sliding(data: Data, deterministic: bool = False) -> Tensor:
    """Attention to the last keys; the selection of these is made within the call."""
    case = data.case
    assert case.kept is not None
    last = dmattn.sliding_window(case.seqlen_k, case.kept, device=data.k.device)
    return dmattn.flash_dmattn_func(
        data.q, data.k, data.v, is_causal=True, selection=last, deterministic=deterministic
    )


def dmattn_window(data: Data, deterministic: bool = False) -> Tensor:
    """Selection and attention; for one query row, causal and other calls select the same keys."""
    return dmattn.flash_dmattn_func(
        data.q,
        data.k,
        data.v,
        attn_bias=data.bias,
        is_causal=data.case.causal,
        window_size=data.case.kept,
        deterministic=deterministic,
    )


def dmattn_select(data: Data) -> Tensor:
    assert data.bias is not None and data.case.kept is not None
    return dmattn.select_keys(data.bias, data.case.kept).end


def dmattn_cache_step(data: Data) -> Tensor:
    assert data.cache is not None and data.new_score is not None
    return data.cache.append_and_attend(data.q, data.k[:, :1], data.v[:, :1], data.new_score)


def _next_tokens(data: Data, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert data.new_score is not None
    now = slice(0, tokens)
    return data.q[:, now], data.k[:, now], data.v[:, now], data.new_score[..., now]


def dmattn_one_token(data: Data) -> Tensor:
    assert data.cache is not None
    return data.cache.append_and_attend(*_next_tokens(data, 1))


def dmattn_in_turn(data: Data) -> Tensor:
    """All tokens by the decode kernel, one after the other."""
    return _append(data, 1 << 30)


def dmattn_at_once(data: Data) -> Tensor:
    """All tokens as one block."""
    return _append(data, 0)


def _append(data: Data, few_tokens: int) -> Tensor:
    assert data.cache is not None
    before = cache_module.FEW_TOKENS
    cache_module.FEW_TOKENS = few_tokens
    try:
        return data.cache.append_and_attend(*_next_tokens(data, data.case.seqlen_q))
    finally:
        cache_module.FEW_TOKENS = before


def dmattn_draft(data: Data) -> Tensor:
    """Attention of a draft of all tokens, then half of them are put into the cache."""
    cache, tokens = data.cache, data.case.seqlen_q
    assert cache is not None
    out = cache.peek(*_next_tokens(data, tokens))
    cache.commit(torch.full_like(cache.seen, tokens // 2))
    return out


def _chunks(data: Data, whole: Tensor | None = None) -> Iterator[Tensor]:
    """The rows of `dmattn_window` by chunks, each behind the state of those before it.

    Written into their places in `whole`, if it is given.
    """
    case, state = data.case, None
    assert data.bias is not None
    for start in range(0, case.seqlen_k, CHUNK):
        now = slice(start, start + CHUNK)
        out, state = dmattn.flash_dmattn_func(
            data.q[:, now],
            data.k[:, now],
            data.v[:, now],
            attn_bias=data.bias[..., now],
            is_causal=True,
            window_size=case.kept,
            state=state,
            return_state=True,
            out=None if whole is None else whole[:, now],
        )
        yield out


def dmattn_chunks(data: Data) -> Tensor:
    """All rows in one tensor."""
    whole = torch.empty_like(data.q)
    for _ in _chunks(data, whole):
        pass
    return whole


def dmattn_chunks_handed_on(data: Data) -> Tensor:
    """The rows of each chunk are left where they are, as for the layer's projection to read."""
    for rows in _chunks(data):
        last = rows
    return last


def dmattn_varlen(data: Data) -> Tensor:
    assert data.bounds is not None
    q, k, v = data.packed()
    bounds, longest = data.bounds, max(data.case.lengths)
    bias = None if data.bias is None else data.bias.view(-1, data.case.seqlen_k).t()
    out = dmattn.flash_dmattn_varlen_func(
        q, k, v, bounds, bounds, longest, longest, attn_bias=bias, is_causal=data.case.causal
    )
    return out.unsqueeze(0)


def dmattn_padded_batch(data: Data) -> Tensor:
    """Attention over the batch that `padded_batch` has made."""
    assert data.bounds is not None
    places = torch.arange(data.k.shape[1], device=data.k.device)
    mask = places < data.bounds.diff()[:, None]
    return dmattn.flash_dmattn_func(
        data.q, data.k, data.v, attn_mask=mask[:, None, None], is_causal=data.case.causal
    )


def running_top_mask(data: Data) -> Tensor:
    """bool (B, HK, Sq, Sk) by torch.topk: what peers without a kernel for running top-w need."""
    case = data.case
    assert data.bias is not None and case.kept is not None
    seen = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=data.q.device).tril_()
    scores = data.bias.detach().masked_fill(~seen, float("-inf"))
    top = scores.topk(case.kept, dim=3, sorted=False)
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return mask.scatter_(3, top.indices, top.values > float("-inf"))


# --- PyTorch's ------------------------------------------------------------------------------------


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: SDPBackend,
    added: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """SDPA by one backend: q (B, Sq, H, D), k and v (B, Sk, HK, D); returns (B, Sq, H, D)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    if ratio > 1 and backend is SDPBackend.EFFICIENT_ATTENTION:  # it has no grouped heads
        k, v, ratio = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1), 1
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, is_causal=causal, enable_gqa=ratio > 1
        )
    return out.transpose(1, 2)


def _sdpa(
    data: Data, backend: SDPBackend, added: Tensor | None = None, causal: bool = False
) -> Tensor:
    return sdpa(data.q, data.k, data.v, backend, added, causal)


def sdpa_here(data: Data) -> Tensor:
    """SDPA by the backend that the caller has chosen; without grouped heads."""
    q, k, v = data.heads_first()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=data.case.causal)
    return out.transpose(1, 2)


def sdpa_flash(data: Data) -> Tensor:
    return _sdpa(data, SDPBackend.FLASH_ATTENTION, causal=data.case.causal)


def _added(data: Data, bias: Tensor | None) -> Tensor | None:
    """Mask and bias as PyTorch takes them: one operand, whose gradient is that of the bias.

    Rows of a bias have to start on 16 bytes. Where they do not, a padded copy is made, as users of
    PyTorch do.
    """
    if bias is None:
        return data.mask
    bias = bias.to(data.q.dtype)
    keys, more = bias.shape[3], -bias.shape[3] % 8
    if more:
        bias = F.pad(bias, (0, more))
    if data.mask is not None:
        bias = bias.masked_fill(~F.pad(data.mask, (0, more)), float("-inf"))
    return bias[..., :keys]


def sdpa_cudnn(data: Data) -> Tensor:
    """Without the bias, if there is one."""
    return _sdpa(data, SDPBackend.CUDNN_ATTENTION, _added(data, None), causal=data.case.causal)


def sdpa_cudnn_few_keys(data: Data) -> Tensor:
    """The first w keys for all rows: no choice, no bias, not causal."""
    few = slice(0, data.case.kept)
    return _sdpa(
        dataclasses.replace(data, k=data.k[:, few], v=data.v[:, few]), SDPBackend.CUDNN_ATTENTION
    )


def sdpa_efficient(data: Data) -> Tensor:
    added = _added(data, data.bias)
    return _sdpa(data, SDPBackend.EFFICIENT_ATTENTION, added, causal=data.case.causal)


def sdpa_cudnn_no_dbias(data: Data) -> Tensor:
    assert data.bias is not None
    return _sdpa(data, SDPBackend.CUDNN_ATTENTION, _added(data, data.bias.detach()))


def _materialised(data: Data, mask: Tensor) -> Tensor:
    """Mask and key bias as one additive (B, H, Sq, Sk), without a gradient for the bias."""
    case = data.case
    assert data.bias is not None
    added = data.bias.detach().masked_fill(~mask, float("-inf"))
    return added.repeat_interleave(case.nheads // case.nheads_k, dim=1)


def sdpa_efficient_key_mask(data: Data) -> Tensor:
    assert data.mask is not None
    case, mask = data.case, data.mask
    if case.causal:
        mask = mask & mask.new_ones(case.seqlen_q, case.seqlen_k).tril()
    added = _materialised(data, mask).expand(-1, -1, case.seqlen_q, -1)
    return _sdpa(data, SDPBackend.EFFICIENT_ATTENTION, added)


def sdpa_efficient_window(data: Data) -> Tensor:
    return _sdpa(data, SDPBackend.EFFICIENT_ATTENTION, _materialised(data, running_top_mask(data)))


def _gathered(data: Data, index: Tensor) -> Data:
    """k and v reduced to the keys at index (B, HK, w)."""
    where = index.transpose(1, 2)[..., None].expand(-1, -1, -1, data.case.head_dim)
    return dataclasses.replace(data, k=data.k.gather(1, where), v=data.v.gather(1, where))


def gather_sdpa_flash(data: Data) -> Tensor:
    """Kept keys gathered by torch, then flash over them: no bias at all, since flash takes none."""
    assert data.mask is not None and data.case.kept is not None
    index = data.mask[:, :, 0].to(torch.uint8).topk(data.case.kept, dim=2, sorted=False).indices
    return _sdpa(_gathered(data, index), SDPBackend.FLASH_ATTENTION)


def topk_gather_sdpa(data: Data) -> Tensor:
    """Decoding: the best keys by torch.topk, gathered, flash over them; no bias."""
    assert data.bias is not None and data.case.kept is not None
    index = data.bias[:, :, 0].topk(data.case.kept, dim=2, sorted=False).indices
    return _sdpa(_gathered(data, index), SDPBackend.FLASH_ATTENTION)


def torch_cache_step(data: Data) -> Tensor:
    """Decoding from a cache of w keys: torch replaces the lowest one, then flash; no bias."""
    cache = data.cache
    assert cache is not None and data.new_score is not None
    slot = cache.score.argmin(dim=2, keepdim=True)
    cache.score.scatter_(2, slot, data.new_score)
    where = slot.transpose(1, 2)[..., None].expand(-1, -1, -1, data.case.head_dim)
    cache.k.scatter_(1, where, data.k[:, :1])
    cache.v.scatter_(1, where, data.v[:, :1])
    return _sdpa(dataclasses.replace(data, k=cache.k, v=cache.v), SDPBackend.FLASH_ATTENTION)


@functools.cache
def torch_varlen_call(causal: bool, grouped: bool) -> Callable[..., Any]:
    """varlen_attn as this torch wants it called; its arguments differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no varlen_attn") from error
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if causal:
        options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if grouped and "enable_gqa" in known:  # before 2.12 grouped heads need no argument
        options["enable_gqa"] = True
    return functools.partial(varlen_attn, **options)


def torch_varlen(data: Data) -> Tensor:
    assert data.bounds is not None
    case, bounds, longest = data.case, data.bounds, max(data.case.lengths)
    attend = torch_varlen_call(case.causal, case.nheads != case.nheads_k)
    out: Tensor = attend(*data.packed(), bounds, bounds, longest, longest)
    return out.unsqueeze(0)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import flex_attention

    functorch_config.donated_buffer = False  # the timed backward runs more than once
    # Each case is compiled anew. Beyond this limit torch would run it uncompiled, which is slow.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=False)


def flex(data: Data) -> Tensor:
    bias = data.bias
    assert bias is not None

    by_batch, by_head = (int(size > 1) for size in bias.shape[:2])

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b * by_batch, h * by_head, i, j]

    return compiled_flex()(*data.heads_first(), score_mod=add_bias).transpose(1, 2)


def flex_softcap(data: Data) -> Tensor:
    cap = data.case.softcap

    def bound(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return compiled_flex()(*data.heads_first(), score_mod=bound).transpose(1, 2)


@functools.cache
def _blocks(
    case: Case, kept: Callable[..., Tensor], batch: int = 1, nheads: int = 1, device: str = "cuda"
) -> Any:
    """FlexAttention's table of blocks, made once for a case, and without a dense mask.

    `create_block_mask` has to be compiled as a whole for that, and the sort at its end then takes
    minutes in ptxas (seen with torch 2.11). Here only what looks at single keys is compiled.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lengths = case.seqlen_q, case.seqlen_k
    count = torch.compile(_kept_in_blocks, dynamic=False)(kept, batch, nheads, *lengths, device)
    some, every = _listed((count > 0) & (count < TILE * TILE)), _listed(count == TILE * TILE)
    return BlockMask.from_kv_blocks(
        *some, *every, BLOCK_SIZE=TILE, mask_mod=kept, seq_lengths=lengths
    )


def _kept_in_blocks(
    kept: Callable[..., Tensor], batch: int, nheads: int, seqlen_q: int, seqlen_k: int, device: str
) -> Tensor:
    """How many pairs of a row and a key each block of 128 x 128 keeps: (B, H, blocks, blocks)."""
    from torch.nn.attention.flex_attention import create_mask

    def within(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = kept(b, h, i.clamp(max=seqlen_q - 1), j.clamp(max=seqlen_k - 1))
        return found & (i < seqlen_q) & (j < seqlen_k)

    rows, keys = (-(-length // TILE) for length in (seqlen_q, seqlen_k))
    mask = create_mask(within, batch, nheads, rows * TILE, keys * TILE, device=device)
    return mask.view(batch, nheads, rows, TILE, keys, TILE).sum((3, 5))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of bool (..., blocks) the number of those that are True, and their indices before others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


_rules: dict[Case, Callable[..., Tensor]] = {}


def flex_tiles(data: Data) -> Tensor:
    """With a rule that reads a table of tiles; the table of blocks is given (not timed)."""
    if data.case not in _rules:
        assert data.mask is not None
        table = data.mask[0, 0, ::TILE, ::TILE].contiguous()
        _rules[data.case] = lambda b, h, i, j: table[i // TILE, j // TILE]
    table_of_blocks = _blocks(data.case, _rules[data.case])
    return compiled_flex()(*data.heads_first(), block_mask=table_of_blocks).transpose(1, 2)


def flex_sliding(data: Data) -> Tensor:
    window = data.case.kept
    assert window is not None
    rule = _rules.setdefault(data.case, lambda b, h, i, j: (i >= j) & (i - j < window))
    blocks = _blocks(data.case, rule)
    return compiled_flex()(*data.heads_first(), block_mask=blocks).transpose(1, 2)


def flex_window(data: Data) -> Tensor:
    """Running top-w; the row at which each key leaves and the table of blocks are given."""
    case, bias = data.case, data.bias
    assert bias is not None and case.kept is not None
    if case not in _rules:
        end = dmattn.select_keys(bias.detach(), case.kept).end
        group = case.nheads // end.shape[1]
        _rules[case] = lambda b, h, i, j: (i >= j) & (i < end[b, h // group, j])
    blocks = _blocks(case, _rules[case], case.batch, case.nheads)
    return _flex_with_key_bias(data, blocks)


def flex_packed(data: Data) -> Tensor:
    """Causal packed sequences; the table of blocks is given."""
    case = data.case
    assert data.bounds is not None and case.causal
    if case not in _rules:
        lengths = data.bounds.diff()
        sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        _rules[case] = lambda b, h, i, j: (i >= j) & (sequence[i] == sequence[j])
    return _flex_with_key_bias(data, _blocks(case, _rules[case]))


def _flex_with_key_bias(data: Data, blocks: Any) -> Tensor:
    case, bias = data.case, data.bias
    assert bias is not None
    group = case.nheads // bias.shape[1]

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h // group, 0, j]

    grouped = case.nheads != case.nheads_k
    out = compiled_flex()(
        *data.heads_first(), score_mod=add_bias, block_mask=blocks, enable_gqa=grouped
    )
    return out.transpose(1, 2)


CONTENDERS: dict[str, tuple[str, Callable[[Data], Tensor]]] = {
    "dmattn": ("dmattn", dmattn_plain),
    "dmattn_masked": ("dmattn", dmattn_masked),
    "dmattn_no_bias": ("dmattn, without it", dmattn_no_bias),
    "dmattn_sliding": ("dmattn, selection included", dmattn_sliding),
    **{
        f"dmattn_{name}_deterministic": (
            "dmattn, deterministic",
            functools.partial(call, deterministic=True),
        )
        for name, call in (
            ("masked", dmattn_masked),
            ("sliding", dmattn_sliding),
            ("window", dmattn_window),
        )
    },
    "dmattn_given_mask": ("dmattn, dense mask given", dmattn_masked),
    "dmattn_window": ("dmattn, selection included", dmattn_window),
    "dmattn_select": ("dmattn.select_keys", dmattn_select),
    "dmattn_cache_step": ("dmattn.DynamicMaskCache", dmattn_cache_step),
    "dmattn_one_token": ("dmattn.DynamicMaskCache, one token", dmattn_one_token),
    "dmattn_in_turn": ("dmattn.DynamicMaskCache, one after the other", dmattn_in_turn),
    "dmattn_at_once": ("dmattn.DynamicMaskCache, at once", dmattn_at_once),
    "dmattn_draft": ("dmattn.DynamicMaskCache, peek and commit", dmattn_draft),
    "dmattn_chunks": ("dmattn, chunks put together, selection included", dmattn_chunks),
    "dmattn_chunks_handed_on": (
        "dmattn, chunks handed on, selection included",
        dmattn_chunks_handed_on,
    ),
    "dmattn_varlen": ("dmattn, packed", dmattn_varlen),
    "dmattn_padded_batch": ("dmattn, padded batch given", dmattn_padded_batch),
    "sdpa_flash": ("SDPA flash", sdpa_flash),
    "sdpa_flash_all_keys": ("SDPA flash over all keys, no bias", sdpa_flash),
    "sdpa_cudnn": ("SDPA cuDNN", sdpa_cudnn),
    "sdpa_efficient": ("SDPA efficient", sdpa_efficient),
    "sdpa_cudnn_no_dbias": ("SDPA cuDNN, no dbias", sdpa_cudnn_no_dbias),
    "sdpa_efficient_key_mask": (
        "SDPA efficient, materialised mask, no dbias",
        sdpa_efficient_key_mask,
    ),
    "sdpa_efficient_window": ("torch.topk mask + SDPA efficient, no dbias", sdpa_efficient_window),
    "gather_sdpa_flash": ("torch gather + SDPA flash, no bias", gather_sdpa_flash),
    "torch_top_mask": ("torch.topk mask", running_top_mask),
    "torch_cache_step": ("torch argmin + scatter + SDPA flash, no bias", torch_cache_step),
    "topk_gather_sdpa": ("torch.topk + gather + SDPA flash, no bias", topk_gather_sdpa),
    "torch_varlen": ("torch varlen_attn, packed", torch_varlen),
    "sdpa_cudnn_few_keys": ("SDPA cuDNN over w keys alone, no bias", sdpa_cudnn_few_keys),
    "flex": ("FlexAttention", flex),
    "flex_softcap": ("FlexAttention", flex_softcap),
    "flex_tiles": ("FlexAttention, blocks given", flex_tiles),
    "flex_sliding": ("FlexAttention, blocks given", flex_sliding),
    "flex_window": ("FlexAttention, selection and blocks given", flex_window),
    "flex_packed": ("FlexAttention, blocks given", flex_packed),
}


def calls(name: str, data: Data) -> dict[str, Call]:
    """What to time for one contender: "forward", and "backward" where the case has one."""
    compute = CONTENDERS[name][1]
    if name == "dmattn_padded_batch":  # made before the timing, as its label says
        data = padded_batch(data)
    if not data.case.backward:
        return {"forward": lambda: compute(data)}

    def forward() -> None:
        with torch.no_grad():
            compute(data)

    out = compute(data)
    wanted = [x for x in data.wanted() if _reaches(out, x)]
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, wanted, data.dout, retain_graph=True),
    }


def _reaches(out: Tensor, leaf: Tensor) -> bool:
    """Whether the contender's result has a gradient for this input at all."""
    seen, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is leaf:
            return True
        nodes += [parent for parent, _ in node.next_functions]
    return False
