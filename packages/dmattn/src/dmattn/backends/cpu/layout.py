"""How the CPU implementation sees its tensors, and the compaction of key-only masks.

Everything is brought to five dimensions (B, HK, G, Sq, Sk), of which a matrix product sees
(B*HK, G*Sq, Sk): the G query heads of a key head become further rows. When a mask says the same for
every query, the keys it drops are removed before anything is computed, and their gradient is zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dmattn.checks import Dims, lse_dtype

# Compaction copies the kept keys and values, which pays once a good part of the keys falls away.
_COMPACT_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class Layout:
    """One attention problem. Sk counts the keys left after compaction."""

    dims: Dims  # as given, before compaction
    dtype: torch.dtype  # of all arithmetic
    q: Tensor  # (B, Sq, H, D), as given
    k: Tensor  # (B*HK, Sk, D), contiguous, in `dtype`
    v: Tensor  # (B*HK, Sk, D), contiguous, in `dtype`
    mask: Tensor | None  # bool ({B|1}, {HK|1}, {G|1}, {Sq|1}, {Sk|1})
    bias: Tensor | None  # shapes as mask, in its own dtype
    kept: Tensor | None  # int64 ({B|1}, {HK|1}, Sk): where the keys come from; None = no compaction
    softmax_scale: float
    softcap: float
    is_causal: bool

    @property
    def batch(self) -> int:
        return self.dims.batch

    @property
    def nheads_k(self) -> int:
        return self.dims.nheads_k

    @property
    def group(self) -> int:
        return self.dims.nheads // self.dims.nheads_k

    @property
    def seqlen_q(self) -> int:
        return self.dims.seqlen_q

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[1]

    @property
    def causal_offset(self) -> int:
        """Row i sees the keys at positions up to i + causal_offset."""
        return self.dims.seqlen_k - self.dims.seqlen_q

    def rows_of(self, t: Tensor) -> Tensor:
        """(B, Sq, H, D) -> (B, HK, G, Sq, D), a view."""
        return torch.unflatten(t, 2, (self.nheads_k, self.group)).permute(0, 2, 3, 1, 4)

    def per_row(self, t: Tensor) -> Tensor:
        """(B, H, Sq) -> (B, HK, G, Sq), a view."""
        return torch.unflatten(t, 1, (self.nheads_k, self.group))

    def fold_rows(self, t: Tensor, rows: slice) -> Tensor:
        """(B, Sq, H, D) -> the block's (B*HK, G*M, D), in the arithmetic dtype."""
        block = self.rows_of(t)[..., rows, :].to(self.dtype)
        return block.flatten(2, 3).flatten(0, 1)

    def fold_lse(self, t: Tensor, rows: slice) -> Tensor:
        """(B, H, Sq) -> the block's (B*HK, G*M, 1)."""
        return self.per_row(t)[..., rows].flatten(2, 3).flatten(0, 1).unsqueeze(-1)

    def unfold_rows(self, block: Tensor) -> Tensor:
        """(B*HK, G*M, X) -> (B, HK, G, M, X), a view."""
        rows = block.shape[1] // self.group
        return block.view(self.batch, self.nheads_k, self.group, rows, block.shape[2])

    def block_of(self, t: Tensor, rows: slice, keys: slice) -> Tensor:
        """The part of a five-dimensional mask, bias or dbias that meets a block, a view."""
        if t.shape[3] > 1:
            t = t[..., rows, :]
        return t[..., keys] if t.shape[4] > 1 else t

    def position_range(self, keys: slice) -> tuple[int, int]:
        """Lowest and highest position, in the original sequence, of a block of keys."""
        if self.kept is None:
            return keys.start, keys.stop - 1
        low, high = self.kept[..., keys].aminmax()
        return int(low), int(high)

    def beyond_causal(self, rows: slice, keys: slice) -> Tensor:
        """Bool ({B|1}, {HK|1}, 1, M, N): the keys that come after what the row may see."""
        if self.kept is None:
            positions = torch.arange(keys.start, keys.stop)
        else:
            positions = self.kept[..., None, None, keys]
        last_seen = torch.arange(rows.start, rows.stop)[:, None] + self.causal_offset
        return positions > last_seen

    def add_to_bias(self, dbias: Tensor, ds: Tensor, rows: slice, keys: slice) -> None:
        """Add ds (B*HK, G*M, N), summed over what the bias is broadcast over, to its block."""
        target = self.block_of(dbias, rows, keys)
        target += self.unfold_rows(ds).sum_to_size(target.shape)

    def keys_to_input(self, grad: Tensor, target: Tensor) -> None:
        """Write dk or dv (B*HK, Sk, D) to (B, Sk, HK, D), rounding once; dropped keys get 0."""
        by_head = target.transpose(1, 2)
        grad = torch.unflatten(grad, 0, (self.batch, self.nheads_k))
        if self.kept is None:
            by_head.copy_(grad)
            return
        target.zero_()
        index = self.kept[..., None].expand(grad.shape)
        by_head.scatter_(2, index, grad.to(target.dtype))

    def bias_to_input(self, grad: Tensor, target: Tensor) -> None:
        """Write dbias, in the shape of `bias`, to the shape as given, rounding once."""
        shape = _grouped_shape(tuple(target.shape), self.dims)
        if self.kept is not None and shape[4] > 1:
            index = self.kept[:, :, None, None, :].expand(grad.shape)
            full = grad.new_zeros((*grad.shape[:4], self.dims.seqlen_k))
            grad = full.scatter_(4, index, grad)
        target.copy_(grad.sum_to_size(shape).reshape(target.shape))


def make_layout(
    dims: Dims,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
) -> Layout:
    """Arrange validated inputs of dmattn::fwd, and drop the keys that no query may see."""
    mask5 = None if mask is None else mask.reshape(_grouped_shape(tuple(mask.shape), dims))
    bias5 = None if bias is None else bias.reshape(_grouped_shape(tuple(bias.shape), dims))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    kept = None
    if mask5 is not None and (bias5 is None or bias5.shape[3] == 1):
        kept = _kept_keys(mask5)
    if kept is not None and mask5 is not None:
        mask5 = mask5.take_along_dim(kept[:, :, None, None, :], 4)
        if bias5 is not None and bias5.shape[4] > 1:
            bias5 = bias5.take_along_dim(kept[:, :, None, None, :], 4)
        k, v = k.take_along_dim(kept[..., None], 2), v.take_along_dim(kept[..., None], 2)
    dtype = lse_dtype(q.dtype)
    return Layout(
        dims=dims,
        dtype=dtype,
        q=q,
        k=k.to(dtype).contiguous().flatten(0, 1),
        v=v.to(dtype).contiguous().flatten(0, 1),
        mask=mask5,
        bias=bias5,
        kept=kept,
        softmax_scale=softmax_scale,
        softcap=softcap,
        is_causal=is_causal,
    )


def _grouped_shape(shape: tuple[int, ...], dims: Dims) -> tuple[int, int, int, int, int]:
    """({B|1}, {H|HK|1}, {Sq|1}, {Sk|1}) with its heads as ({HK|1}, {G|1})."""
    batch, heads, rows, keys = shape
    if heads == dims.nheads:
        return batch, dims.nheads_k, dims.nheads // dims.nheads_k, rows, keys
    return batch, heads, 1, rows, keys


def _kept_keys(mask: Tensor) -> Tensor | None:
    """For a key-only mask, the keys that any head of a group keeps, then as many dropped ones as
    make the lists equally long: int64 ({B|1}, {HK|1}, n). None where it would not pay.
    """
    if mask.shape[3] != 1 or mask.shape[4] <= 1:
        return None
    any_of_group = mask.any(2).squeeze(2)
    longest = int(any_of_group.sum(-1).amax()) if any_of_group.numel() else 0
    if longest > _COMPACT_BELOW * mask.shape[4]:
        return None
    order = any_of_group.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return order[..., :longest]
