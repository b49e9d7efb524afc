"""Rotary position embedding (RoPE; Su et al., RoFormer, arXiv 2104.09864).

Pairs of channels are rotated by an angle that grows with the position. The pairing is the
half-split one of the Llama and Doge families: channel i forms a pair with channel i + D/2. Angles,
cosines, sines and the rotation are computed in float32 whatever the dtype of the input: a bfloat16
angle is off by whole radians a few hundred positions in.
"""

import torch
from torch import Tensor

from dmattn.validation import (
    check_floating,
    check_int,
    check_number,
    check_same_device,
    check_tensor,
    check_tensor_dtype,
    is_one_or,
)


def rotary_embedding(
    positions: Tensor, head_dim: int, theta: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles at `positions`.

    Args:
        positions: int64 or int32 tensor of any shape (...); usually (S,) or (B, S).
        head_dim: D, even and positive.
        theta: base of the wavelengths, > 0. Pair i is rotated by position * theta ** (-2 i / D)
            radians.

    Returns:
        (cos, sin), each float32 of shape (..., D/2), on the device of positions.

    Raises:
        TypeError: positions is no int32 or int64 tensor, or head_dim or theta is no number.
        ValueError: head_dim is not even and positive, or theta is not positive.
    """
    check_tensor("positions", positions)
    check_tensor_dtype("positions", positions, (torch.int64, torch.int32))
    head_dim = check_int("head_dim", head_dim, 2, "an even positive number")
    if head_dim % 2:
        raise ValueError(f"head_dim: got {head_dim}, wanted an even positive number")
    theta = check_number("theta", theta)
    if not theta > 0:
        raise ValueError(f"theta: got {theta}, wanted a positive number")
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-pair / head_dim)
    # An outer product written as a multiplication: autocast would run a matmul in bfloat16.
    angles = positions.to(torch.float32)[..., None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of x by the given angles.

    Args:
        x: floating tensor (B, S, H, D).
        cos, sin: floating (S, D/2) or ({B|1}, S, D/2), from `rotary_embedding`.

    Returns:
        (B, S, H, D) in the wider of x.dtype and the dtype of cos, so float32 for half inputs;
        the caller rounds it once.

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: shapes or devices do not fit together, or D is odd.
    """
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(name, t)
        check_same_device(name, t, x.device, "x")
    if x.dim() != 4:
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted (batch, seqlen, heads, head_dim)")
    batch, seqlen, _, head_dim = x.shape
    if head_dim % 2 or head_dim == 0:
        raise ValueError(f"x: got head_dim {head_dim}, wanted an even positive number")
    for name, table in (("cos", cos), ("sin", sin)):
        shape = table.shape
        fits = len(shape) in (2, 3) and shape[-2] == seqlen and shape[-1] == head_dim // 2
        if not fits or not (len(shape) == 2 or is_one_or(shape[0], batch)):
            raise ValueError(
                f"{name}: got shape {tuple(shape)}, wanted {(seqlen, head_dim // 2)} or "
                f"{(batch, seqlen, head_dim // 2)} for x of shape {tuple(x.shape)}"
            )
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
