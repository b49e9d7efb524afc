"""The definition of attention, written plainly, and how far from it a result may be.

`attention` is a transcription of the definition in ordinary differentiable PyTorch operations. In
float64 it is the oracle; in the inputs' own precision it is the plain computation whose error sets
the tolerance. It shares no code with what it checks: not with the kernels, not with dmattn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor


def masked_logits(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
) -> Tensor:
    """(B, H, Sq, Sk): what the softmax sees, -inf where a key is not kept."""
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    grouped = (batch, nheads_k, nheads // nheads_k, seqlen_q, head_dim)
    grouped_q = q.transpose(1, 2).reshape(grouped)
    grouped_k = k.transpose(1, 2).unsqueeze(2)
    logits = torch.matmul(grouped_q * softmax_scale, grouped_k.transpose(-1, -2))
    logits = logits.reshape(batch, nheads, seqlen_q, seqlen_k)
    if softcap > 0:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + _in_precision(_all_heads(bias, nheads), logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~_all_heads(mask, nheads), float("-inf"))
    if is_causal:
        rows = torch.arange(seqlen_q, device=q.device)[:, None]
        cols = torch.arange(seqlen_k, device=q.device)[None, :]
        logits = logits.masked_fill(cols > rows + seqlen_k - seqlen_q, float("-inf"))
    return logits


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, Dv) and lse (B, H, Sq), in the precision of q.

    q (B, Sq, H, D), k (B, Sk, HK, D), v (B, Sk, HK, Dv); mask and bias ({B|1}, {H|HK|1}, {Sq|1},
    {Sk|1}); sinks (H,), one more logit for each row, without a value.
    """
    nheads, nheads_k, seqlen_k = q.shape[2], k.shape[2], k.shape[1]
    logits = masked_logits(q, k, mask, bias, softmax_scale, is_causal, softcap)
    if sinks is not None:
        logits = _with_sinks(logits, sinks)
    # A row that keeps nothing is computed on zeros and then silenced, so that its gradients are
    # zeros, not NaN.
    row_keeps = (logits > float("-inf")).any(dim=-1, keepdim=True)
    logits = torch.where(row_keeps, logits, torch.zeros_like(logits))
    probs = (torch.softmax(logits, dim=-1) * row_keeps)[..., :seqlen_k]
    lse = torch.logsumexp(logits, dim=-1).masked_fill(~row_keeps.squeeze(-1), float("-inf"))
    probs = probs.to(v.dtype).reshape(len(q), nheads_k, nheads // nheads_k, q.shape[1], seqlen_k)
    out = torch.matmul(probs, v.transpose(1, 2).unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2), lse


def _with_sinks(logits: Tensor, sinks: Tensor) -> Tensor:
    column = _in_precision(sinks, logits.dtype)[:, None, None]
    return torch.cat((logits, column.expand(*logits.shape[:3], 1)), dim=-1)


def _all_heads(operand: Tensor, nheads: int) -> Tensor:
    heads = operand.shape[1]
    return operand if heads in (1, nheads) else operand.repeat_interleave(nheads // heads, dim=1)


def _in_precision(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 bias in the precision of the logits; finite entries stay finite."""
    rounded = bias.to(dtype)
    overflowed = bias.isfinite() & ~rounded.isfinite()
    return torch.where(overflowed, torch.finfo(dtype).min, rounded)


@dataclasses.dataclass(frozen=True)
class Results:
    """What one forward and backward gave; None for what was not asked for."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None

    def items(self) -> list[tuple[str, Tensor]]:
        named = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return [(name, value) for name, value in named if value is not None]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention call, its output gradients, and in `wants` a letter of "qkvbs" per gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    dout: Tensor
    dlse: Tensor | None
    softmax_scale: float
    is_causal: bool
    softcap: float
    wants: str
    sinks: Tensor | None = None

    def with_(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


def solve(problem: Problem, dtype: torch.dtype | None = None) -> Results:
    """`attention` and its gradients by autograd, in `dtype` (None: that of the inputs)."""

    def leaf(x: Tensor, letter: str) -> Tensor:
        copy = x.detach().clone() if dtype is None else x.detach().to(dtype).clone()
        return copy.requires_grad_(letter in problem.wants)

    q, k, v = leaf(problem.q, "q"), leaf(problem.k, "k"), leaf(problem.v, "v")
    bias = None if problem.bias is None else leaf(problem.bias, "b")
    sinks = None if problem.sinks is None else leaf(problem.sinks, "s")
    with torch.enable_grad():
        numbers = (problem.softmax_scale, problem.is_causal, problem.softcap)
        out, lse = attention(q, k, v, problem.mask, bias, *numbers, sinks)
    leaves = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}
    wanted = {name: x for name, x in leaves.items() if x is not None and x.requires_grad}
    grads: tuple[Tensor | None, ...] = ()
    if wanted:
        outputs, cotangents = [out], [problem.dout.to(out.dtype)]
        if problem.dlse is not None and lse.requires_grad:
            outputs.append(lse)
            cotangents.append(problem.dlse.to(lse.dtype))
        grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    found = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(wanted.items(), grads, strict=True)
    }
    return Results(out.detach(), lse.detach(), **found)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The largest sums of absolute values behind any entry of each gradient.

    A gradient may be the small difference of large terms (a row that keeps one key has dq = 0
    exactly). fp32 sums give it only to within a few roundings of those terms, while the plain
    computation may be exact by luck.

    Attributes:
        all: sums of all terms.
        of_out: sums of the terms that come from delta alone, the dot product of a row's dout and
            out, which is subtracted in each dlogit of the row. A backward that keeps out and no
            probabilities computes delta from the rounded out, as FlashAttention's does (Dao et al.
            2022, appendix B.2), and so has an error of up to half a unit in the last place of out
            in each of these terms. The plain computation does not have this error: where values
            are almost equal, the terms of a row nearly cancel there.
    """

    all: dict[str, float]
    of_out: dict[str, float]


def roundoff(problem: Problem) -> Terms:
    """The sums of absolute values to which the roundings of each gradient are proportional."""
    q, k, v, dout = (x.double() for x in (problem.q, problem.k, problem.v, problem.dout))
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    if q.numel() == 0 or k.numel() == 0:  # only dlse has an effect, on the sinks
        sums = {} if problem.dlse is None else {"dsinks": float(problem.dlse.abs().sum())}
        return Terms(sums, {})
    bias = None if problem.bias is None else problem.bias.double()
    ratio = nheads // nheads_k
    k_heads, v_heads = (x.abs().repeat_interleave(ratio, dim=2) for x in (k, v))
    logits = masked_logits(
        q, k, problem.mask, bias, problem.softmax_scale, problem.is_causal, problem.softcap
    )
    if problem.sinks is not None:
        logits = _with_sinks(logits, problem.sinks.double())
    probs = torch.softmax(logits, dim=-1).nan_to_num_(0.0)
    sink_probs, probs = probs[..., seqlen_k:].sum(-1), probs[..., :seqlen_k]
    dprobs = torch.einsum("bihd,bjhd->bhij", dout.abs(), v_heads)
    row = (probs * dprobs).sum(-1)
    if problem.dlse is not None:
        row += problem.dlse.double().abs()
    out = torch.einsum("bhij,bjhd->bhid", probs, v.repeat_interleave(ratio, dim=2))
    row_of_out = torch.einsum("bhid,bihd->bhi", out.abs(), dout.abs())
    scale = abs(problem.softmax_scale)

    def group(x: Tensor) -> Tensor:
        return x.reshape(batch, seqlen_k, nheads_k, ratio, -1).sum(3)

    def largest(dlogits: Tensor, row: Tensor) -> dict[str, float]:
        sums = {
            "dq": torch.einsum("bhij,bjhd->bihd", dlogits, k_heads) * scale,
            "dk": group(torch.einsum("bhij,bihd->bjhd", dlogits, q.abs())) * scale,
        }
        if bias is not None:
            shape = batch, bias.shape[1], nheads // bias.shape[1], seqlen_q, seqlen_k
            sums["dbias"] = dlogits.reshape(shape).sum(2).sum_to_size(bias.shape)
        if problem.sinks is not None:
            sums["dsinks"] = (sink_probs * row).sum((0, 2))
        return {name: float(value.max()) for name, value in sums.items()}

    every = largest(probs * (dprobs + row[..., None]), row)
    every["dv"] = float(group(torch.einsum("bhij,bihd->bjhd", probs, dout.abs())).max())
    return Terms(every, largest(probs * row_of_out[..., None], row_of_out))


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One tensor's distance from the oracle, and how far it may be."""

    name: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3e}, allowed {self.allowed:.3e}"


# The largest error among few entries is a matter of luck: for tensors of fewer entries than this,
# the plain computation is made five times, with different numbers.
FEW = 1000
# Roundings that a sum over keys, rows or head_dim may accumulate, in units of its absolute sum.
ROUNDINGS = 8


def sum_eps(problem: Problem) -> float:
    """One rounding of the dtype of sums: float32, or float64 for float64 inputs."""
    return torch.finfo(torch.promote_types(problem.q.dtype, torch.float32)).eps


def deviations(problem: Problem, found: Results) -> list[Deviation]:
    """Every tensor of `found` compared with the float64 oracle.

    The allowed error is twice the largest error of the plain computation in the inputs' precision,
    plus half a unit in the last place of the largest value (the rounding to the result's own dtype,
    which nobody can avoid), plus a few roundings of the sums behind it and the effect of rounding
    the output (`Terms`). Infinities must be where the oracle has them.

    Further plain computations and `roundoff` can only allow more, and take most of the time. So
    they are left out if everything is close enough without them.
    """
    wanted = dict(solve(problem, torch.float64).items())
    assert [name for name, _ in found.items()] == list(wanted), (
        "not the results that were asked for"
    )
    plain = plain_errors(problem, wanted)
    if all(math.isfinite(error) for error in plain.values()):
        rows = _against(problem, found, wanted, plain, Terms({}, {}))
        if all(row.ok for row in rows):
            return rows
    return all_allowances(problem, found)


def all_allowances(problem: Problem, found: Results) -> list[Deviation]:
    """`deviations`, with nothing left out."""
    wanted = dict(solve(problem, torch.float64).items())
    plain = plain_errors(problem, wanted)
    if any(value.numel() < FEW for _, value in found.items()):
        for sibling in _rolled(problem):
            errors = plain_errors(sibling, dict(solve(sibling, torch.float64).items()))
            plain = {name: max(plain[name], error) for name, error in errors.items()}
    return _against(problem, found, wanted, plain, roundoff(problem))


def _doubt(problem: Problem, overflows: bool = False) -> float:
    """How far off results may be because logits are rounded, relative to the results.

    The relative change of a probability is as large as the change of its logit. For float64 inputs
    the oracle is also the plain computation, so its own roundings count. For float32 inputs one
    rounding counts that the plain computation does not have: kernels take exponentials to the base
    of 2, for which the logit and the log-sum-exp are converted and rounded once more, each by half
    a unit in its last place. (Compared with 16 bits that is nothing.) Only the largest logit of a
    row counts then: keys that are far below it have next to no probability. Logits above 2^53, from
    a bias, do not count, since nothing is left to round beside them.

    overflows: the logits exceed the range of 16 bits, so that there is no plain computation to
    measure by. Then they are computed in float32, with four roundings: two of the sum over
    head_dim, one of the scale and the bias, and the one of the base of 2.
    """
    exact = problem.q.dtype == torch.float64
    if problem.k.shape[1] == 0:
        return 0.0
    if not (overflows or exact or problem.q.dtype == torch.float32):
        return 0.0
    q, k = (x.float() if overflows else x for x in (problem.q, problem.k))
    logits = masked_logits(
        q,
        k,
        None if exact else problem.mask,
        problem.bias,
        problem.softmax_scale,
        problem.is_causal,
        problem.softcap,
    )
    sizes = logits.abs() if exact else logits.amax(-1).abs()
    sizes = sizes[sizes < 2.0**53]
    largest = float(sizes.max()) if sizes.numel() else 0.0
    roundings = ROUNDINGS if exact else 4 if overflows else 1
    return roundings * sum_eps(problem) * (1 + largest)


def _against(
    problem: Problem,
    found: Results,
    wanted: dict[str, Tensor],
    plain: dict[str, float],
    terms: Terms,
) -> list[Deviation]:
    rows, usual = [], _doubt(problem)
    is_narrow = problem.q.dtype.itemsize == 2
    overflows = is_narrow and not all(map(math.isfinite, plain.values()))
    beyond_range = _doubt(problem, overflows=True) if overflows else usual
    for name, value in found.items():
        plain_error = plain[name]
        # If the plain computation overflows, it sets no limit. Then one rounding of its dtype is
        # the limit or, for the log-sum-exp, one rounding of the dtype of that.
        finite = wanted[name][wanted[name].isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        doubt, size = usual, max(1.0, largest)
        if not math.isfinite(plain_error):
            dtype = value.dtype if name == "lse" else problem.q.dtype
            plain_error = torch.finfo(dtype).eps * max(largest, terms.all.get(name, 0.0))
            doubt = beyond_range
            if is_narrow and name == "lse":
                size = 1.0  # it is off by as much as a logit
        allowed = 2 * plain_error + torch.finfo(value.dtype).eps / 2 * largest
        allowed += ROUNDINGS * sum_eps(problem) * (1 + terms.all.get(name, 0.0))
        allowed += torch.finfo(problem.q.dtype).eps / 2 * terms.of_out.get(name, 0.0)
        allowed += doubt * size
        rows.append(Deviation(name, max_error(value, wanted[name]), allowed))
    return rows


def plain_errors(problem: Problem, exact: dict[str, Tensor]) -> dict[str, float]:
    """max |plain - exact| for each result of the computation in the inputs' own precision."""
    return {name: max_error(value, exact[name]) for name, value in solve(problem).items()}


def _rolled(problem: Problem) -> list[Problem]:
    """The same problem with q and dout rolled along head_dim: other numbers of the same sizes."""
    return [
        dataclasses.replace(problem, q=problem.q.roll(i, 3), dout=problem.dout.roll(2 * i + 1, 3))
        for i in range(1, 5)
    ]


def max_error(value: Tensor, exact: Tensor) -> float:
    """max |value - exact|; infinite where the two disagree about infinities or value is NaN."""
    if tuple(value.shape) != tuple(exact.shape):
        raise AssertionError(f"shape {tuple(value.shape)}, expected {tuple(exact.shape)}")
    if value.numel() == 0:
        return 0.0
    same = value.double() == exact  # also true of equal infinities
    return float(
        torch.where(same, 0.0, (value.double() - exact).abs()).nan_to_num(math.inf, math.inf).max()
    )
