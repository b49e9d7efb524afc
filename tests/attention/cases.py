"""Test cases: a description that prints as a test's name, and the tensors that it stands for.

Operand shapes are written as four letters over (batch, heads, rows, keys): the dimension's letter
where the operand has it in full, `1` where it is broadcast, and `k` in the second place for
key/value heads: "bh1k" is (B, H, 1, Sk) and "1kqk" is (1, HK, Sq, Sk).
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import zlib

import torch
from torch import Tensor

from attention.oracle import Problem, masked_logits
from attention.targets import SEED_VARIABLE, on_cuda, target, target_device

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
}
OPERAND_SHAPES = [b + h + q + k for b in "b1" for h in "hk1" for q in "q1" for k in "k1"]


@dataclasses.dataclass(frozen=True)
class Case:
    seqlen_q: int = 128
    seqlen_k: int = 128
    batch: int = 2
    nheads: int = 4
    nheads_k: int = 2
    head_dim: int = 64
    dtype: str = "bf16"
    causal: bool = False
    softcap: float = 0.0
    scale: float | None = None
    mask: str = ""  # operand shape; "" for none
    mask_fill: str = "half"  # a key of MASK_FILLS
    bias: str = ""
    bias_fill: str = "normal"  # a key of BIAS_FILLS
    bias_f32: bool = False
    layout: str = "plain"  # a key of LAYOUTS, for q, k, v and dout
    operand_layout: str = "plain"  # a key of OPERAND_LAYOUTS, for mask and bias
    logits: float = 1.0  # q and k are scaled so that logits are about this large
    wants: str = "qkvbs"  # gradients asked for
    dlse: bool = False
    deterministic: bool = False
    seed: int = 0
    sinks: str = ""  # a key of SINK_FILLS; "" for none
    sinks_f32: bool = False
    value_dim: int = 0  # head dimension of the values; 0 for that of the keys

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.seqlen_q}x{self.seqlen_k}"
        shape += f"-h{self.nheads}.{self.nheads_k}-d{self.head_dim}"
        parts = [shape, self.dtype]
        for field in dataclasses.fields(self)[7:]:
            value = getattr(self, field.name)
            if value != field.default and not (
                field.name in _FILLS and not getattr(self, _FILLS[field.name])
            ):
                parts.append(field.name if value is True else f"{field.name}={value}")
        return "-".join(parts)

    def with_(self, **changes: object) -> Case:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


# Fields that have no effect without another one.
_FILLS = {"mask_fill": "mask", "bias_fill": "bias", "sinks_f32": "sinks"}


def case_id(value: object) -> str | None:
    return str(value) if isinstance(value, Case) else None


class _Maker:
    """Seeded random tensors on the device under test."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = target_device()
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(zlib.crc32(str(case).encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)


# --- q, k, v and dout: (batch, seqlen, heads, head_dim) -------------------------------------------


def _plain(x: Tensor) -> Tensor:
    return x.contiguous()


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _misaligned(x: Tensor) -> Tensor:
    """Rows are aligned to no more than 2 bytes, so that kernels load single elements."""
    padded = x.new_full((*x.shape[:3], x.shape[3] + 3), float("nan"))
    padded[..., 1:-2] = x
    return padded[..., 1:-2]


def _offset(x: Tensor) -> Tensor:
    """The strides would allow vector loads, but the base address does not."""
    flat = x.new_full((x.numel() + 8,), float("nan"))
    flat[1 : 1 + x.numel()] = x.flatten()
    return flat[1 : 1 + x.numel()].view(x.shape)


def _spaced(x: Tensor) -> Tensor:
    """Rows, heads and batches with other data (NaN) between them; vector loads still fit."""
    big = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2] + 1, x.shape[3] + 8), float("nan"))
    view = big[:, ::2, 1:, : x.shape[3]]
    view.copy_(x)
    return view


def _batch_shared(x: Tensor) -> Tensor:
    return x[:1].contiguous().expand(x.shape)


def _heads_shared(x: Tensor) -> Tensor:
    return x[:, :, :1].contiguous().expand(x.shape)


def _last_outermost(x: Tensor) -> Tensor:
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


LAYOUTS = {
    "plain": _plain,
    "heads_first": _heads_first,
    "misaligned": _misaligned,
    "offset": _offset,
    "spaced": _spaced,
    "batch_shared": _batch_shared,
    "heads_shared": _heads_shared,
}
if not on_cuda():  # CUDA kernels need a contiguous head_dim: see test_layouts
    LAYOUTS["head_dim_outermost"] = _last_outermost

# --- mask and bias: four dimensions, each full or 1 -----------------------------------------------


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def _every_third_key(x: Tensor) -> Tensor:
    filler = True if x.dtype is torch.bool else float("nan")
    big = x.new_full((*x.shape[:3], 3 * x.shape[3] + 2), filler)
    big[..., 1 : 1 + 3 * x.shape[3] : 3] = x
    return big[..., 1 : 1 + 3 * x.shape[3] : 3]


def _odd_pitch(x: Tensor) -> Tensor:
    filler = True if x.dtype is torch.bool else float("nan")
    big = x.new_full((*x.shape[:3], x.shape[3] + 3), filler)
    big[..., 1:-2] = x
    return big[..., 1:-2]


def _heads_apart(x: Tensor) -> Tensor:
    """The stride of heads is not a multiple of the stride of rows."""
    filler = True if x.dtype is torch.bool else float("nan")
    rows = x.shape[2] * x.shape[3]
    big = x.new_full((*x.shape[:2], rows + 3), filler)
    big[..., 1 : 1 + rows] = x.flatten(2)
    return big[..., 1 : 1 + rows].unflatten(2, x.shape[2:])


OPERAND_LAYOUTS = {
    "plain": _plain,
    "transposed": _transposed,
    "keys_outermost": _last_outermost,
    "every_third_key": _every_third_key,
    "odd_pitch": _odd_pitch,
    "heads_apart": _heads_apart,
}


def _operand_shape(case: Case, letters: str) -> tuple[int, int, int, int]:
    heads = {"h": case.nheads, "k": case.nheads_k, "1": 1}[letters[1]]
    return (
        case.batch if letters[0] == "b" else 1,
        heads,
        case.seqlen_q if letters[2] == "q" else 1,
        case.seqlen_k if letters[3] == "k" else 1,
    )


def _kept_fraction(fraction: float):  # type: ignore[no-untyped-def]
    return lambda make, shape: make.uniform(*shape) < fraction


def _one_key(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    if shape[3] == 0:
        return make.uniform(*shape) < 1
    chosen = make.uniform(*shape[:3], 1) * shape[3]
    return torch.arange(shape[3], device=make.device) == chosen.long()


def _banded(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    rows = torch.arange(shape[2], device=make.device)[:, None]
    cols = torch.arange(shape[3], device=make.device)[None, :]
    offset = cols - rows - (shape[3] - shape[2])
    return ((offset <= 5) & (offset > -37)).expand(shape).clone()


def _blocks(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    """Whole 64 x 64 cells kept, dropped, or mixed: a third each."""
    cells = make.uniform(shape[0], shape[1], -(-shape[2] // 64), -(-shape[3] // 64))
    cells = cells.repeat_interleave(64, 2)[:, :, : shape[2]].repeat_interleave(64, 3)[
        ..., : shape[3]
    ]
    return (cells < 1 / 3) | ((cells < 2 / 3) & (make.uniform(*shape) < 0.5))


def _dead_heads(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    keep = make.uniform(*shape) < 0.3
    keep[:, ::2] = False
    return keep


def _dead_rows(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    return (make.uniform(*shape) < 0.5) & (make.uniform(*shape[:3], 1) < 0.5)


def _prefix(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    """Padding by length: the first keys, whose number differs between batch entries and heads."""
    length = make.uniform(*shape[:3], 1) * (shape[3] + 1)
    return (torch.arange(shape[3], device=make.device) < length.long()).expand(shape).clone()


def _suffix(make: _Maker, shape: tuple[int, ...]) -> Tensor:
    return _prefix(make, shape).flip(3)


MASK_FILLS = {
    "none": _kept_fraction(0.0),
    "one_key": _one_key,
    "percent": _kept_fraction(0.01),
    "half": _kept_fraction(0.5),
    "most": _kept_fraction(0.97),
    "all": _kept_fraction(2.0),
    "banded": _banded,
    "blocks": _blocks,
    "dead_heads": _dead_heads,
    "dead_rows": _dead_rows,
    "prefix": _prefix,
    "suffix": _suffix,
}


def _with_entries(fraction: float, entry: float):  # type: ignore[no-untyped-def]
    def fill(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = torch.finfo(dtype).min if math.isnan(entry) else entry
        return make.normal(*shape).to(dtype).masked_fill(make.uniform(*shape) < fraction, value)

    return fill


def _lowest_rows(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every third row is finfo.min throughout; in a key bias, every second head.

    That is a finite number, so keys stay.
    """
    bias = make.normal(*shape).to(dtype)
    target = bias[:, :, ::3] if shape[2] > 1 else bias[:, ::2]
    target.fill_(torch.finfo(dtype).min)
    return bias


def _stretches(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A bias that is extreme along three stretches of keys, which begin and end within tiles: in
    the thousands, minus infinity, and finfo.min."""
    bias = make.normal(*shape).to(dtype)
    bias[..., 150:180] *= 1000
    bias[..., 300:310] = -math.inf
    bias[..., 400:530] = torch.finfo(dtype).min
    return bias


def _slopes(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A bias that grows with the position of the key, as in ALiBi, at a rate of each head.

    128 neighbouring keys differ by up to 115, 512 or 8. On Hopper the first and the last are near
    enough to each other for the products to add their bias, until it is too large.
    """
    rates = torch.tensor([0.9, 4.0, 1 / 16], device=make.device)
    rate = rates[torch.arange(shape[1], device=make.device) % 3].reshape(1, -1, 1, 1)
    return make.normal(*shape) + rate * torch.arange(shape[3], device=make.device)


BIAS_FILLS = {
    "normal": lambda make, shape, dtype: make.normal(*shape),
    "wide": lambda make, shape, dtype: make.normal(*shape) * 30,
    "huge": lambda make, shape, dtype: make.normal(*shape) * 1e4,
    "zero": lambda make, shape, dtype: make.normal(*shape) * 0,
    "some_minus_inf": _with_entries(0.3, float("-inf")),
    "all_minus_inf": _with_entries(2.0, float("-inf")),
    "some_lowest": _with_entries(0.3, float("nan")),
    "all_lowest": _with_entries(2.0, float("nan")),
    "lowest_rows": _lowest_rows,
    "stretches": _stretches,
    "slopes": _slopes,
}


def _some_minus_inf(make: _Maker, heads: int) -> Tensor:
    return make.normal(heads).masked_fill(
        torch.arange(heads, device=make.device) % 2 == 0, -math.inf
    )


SINK_FILLS = {
    "normal": lambda make, heads: make.normal(heads),
    "high": lambda make, heads: make.normal(heads) + 8,
    "wide": lambda make, heads: make.normal(heads) * 300,
    "minus_inf": lambda make, heads: make.normal(heads) - math.inf,
    "some_minus_inf": _some_minus_inf,
}


def build(case: Case) -> Problem:
    """The tensors of a case, the same ones every time."""
    make, dtype = _Maker(case), DTYPES[case.dtype]
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    # Independent normal entries give logits of standard deviation scale * sqrt(head_dim).
    spread = math.sqrt(case.logits / max(abs(scale) * math.sqrt(case.head_dim), 1e-6))
    if case.scale is not None:
        spread = 1.0
    lay, lay_operand = LAYOUTS[case.layout], OPERAND_LAYOUTS[case.operand_layout]
    q_shape = (case.batch, case.seqlen_q, case.nheads, case.head_dim)
    k_shape = (case.batch, case.seqlen_k, case.nheads_k, case.head_dim)
    value_dim = case.value_dim or case.head_dim
    v_shape, out_shape = (*k_shape[:3], value_dim), (*q_shape[:3], value_dim)
    q, k = (lay((make.normal(*shape) * spread).to(dtype)) for shape in (q_shape, k_shape))
    v, dout = (lay(make.normal(*shape).to(dtype)) for shape in (v_shape, out_shape))
    mask = bias = dlse = sinks = None
    if case.mask:
        mask = lay_operand(MASK_FILLS[case.mask_fill](make, _operand_shape(case, case.mask)))
    if case.bias:
        bias_dtype = torch.float32 if case.bias_f32 else dtype
        shape = _operand_shape(case, case.bias)
        bias = lay_operand(BIAS_FILLS[case.bias_fill](make, shape, bias_dtype).to(bias_dtype))
    if case.dlse:
        dlse = make.normal(case.batch, case.nheads, case.seqlen_q)
        dlse = dlse.to(torch.promote_types(dtype, torch.float32))
    if case.sinks:
        sinks = SINK_FILLS[case.sinks](make, case.nheads)
        sinks = sinks.to(torch.promote_types(dtype, torch.float32) if case.sinks_f32 else dtype)
    absent = ("" if bias is not None else "b") + ("" if sinks is not None else "s")
    wants = "".join(x for x in case.wants if x not in absent)
    numbers = (scale, case.causal, case.softcap)
    problem = Problem(q, k, v, mask, bias, dout, dlse, *numbers, wants, sinks)
    has_lowest = "lowest" in case.bias_fill or case.bias_fill == "stretches"
    return _silence_coarse_rows(problem) if has_lowest else problem


def _silence_coarse_rows(problem: Problem) -> Problem:
    """Zeroes the output gradients of rows whose every logit is near finfo.min.

    The fp32 lse of such a row cannot tell one key from n (1e38 + log n = 1e38), so a backward that
    starts from lse cannot weigh its keys: it only has to stay finite there, which test_bias asks
    for separately.
    """
    logits = masked_logits(
        problem.q.double(),
        problem.k.double(),
        problem.mask,
        None if problem.bias is None else problem.bias.double(),
        problem.softmax_scale,
        problem.is_causal,
        problem.softcap,
    )
    if logits.numel() == 0:
        return problem
    highest = logits.amax(-1)
    coarse = (highest.abs() > 1e5) & highest.isfinite()
    dout = problem.dout.masked_fill(coarse.transpose(1, 2)[..., None], 0)
    dlse = None if problem.dlse is None else problem.dlse.masked_fill(coarse, 0)
    return problem.with_(dout=dout, dlse=dlse)


# --- random cases ---------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 17, 63, 64, 65, 100, 127, 128, 129, 191, 255, 257, 300)
# Lengths at which thread blocks have several tiles, and calls are cut into rounds, splits, chunks.
LONG_LENGTHS = (1, 77, 128, 197, 300, 385, 512, 640, 1000, 1024, 1500, 2047, 2500, 3072, 4095)


def seeds(count: int, first: int = 0) -> range:
    """`count` seeds of random cases, from `first` plus DMATTN_TEST_SEED on (0 if it is not set)."""
    begin = first + int(os.environ.get(SEED_VARIABLE, "0"))
    return range(begin, begin + count)


def random_case(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Case:
    """A case with every feature drawn at random; the same one for the same seed and lengths."""
    draw = random.Random(seed)
    nheads_k = draw.choice((1, 1, 2, 3))
    nheads = nheads_k * draw.choice((1, 1, 2, 4, 8))
    seqlen_q, seqlen_k = draw.choice(lengths), draw.choice(lengths)
    mask = draw.choice(("", *OPERAND_SHAPES)) if draw.random() < 0.7 else ""
    bias = draw.choice(("", *OPERAND_SHAPES)) if draw.random() < 0.7 else ""
    case = Case(
        seqlen_q,
        seqlen_q if draw.random() < 0.2 else seqlen_k,
        batch=draw.choice((1, 2, 3)),
        nheads=nheads,
        nheads_k=nheads_k,
        head_dim=draw.choice((8, 32, 40, 64, 64, 72, 96, 128, 128, 136, 160, 192, 256)),
        dtype=draw.choice(target().dtypes),
        causal=draw.random() < 0.5,
        softcap=draw.choice((0.0, 0.0, 0.7, 15.0)),
        scale=draw.choice((None, None, None, 0.31, 0.02)),
        mask=mask,
        mask_fill=draw.choice(tuple(MASK_FILLS)),
        bias=bias,
        bias_fill=draw.choice(tuple(BIAS_FILLS)),
        bias_f32=draw.random() < 0.3,
        layout=draw.choice(("plain", "plain", *LAYOUTS)),
        operand_layout=draw.choice(("plain", "plain", *OPERAND_LAYOUTS)),
        logits=draw.choice((0.01, 1.0, 1.0, 4.0)),
        wants="".join(x for x in "qkvb" if draw.random() < 0.8) + "s",
        dlse=draw.random() < 0.4,
        deterministic=draw.random() < 0.5,
        seed=seed,
        sinks=draw.choice(("", "", *SINK_FILLS)),
        sinks_f32=draw.random() < 0.5,
        value_dim=draw.choice((0, 0, 0, 8, 64, 72, 256)),
    )
    return case if draw.random() < 0.8 else case.with_(wants=case.wants[:-1])
