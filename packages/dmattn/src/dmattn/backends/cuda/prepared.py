"""Calls of a known kind on NVIDIA GPUs, which need nothing but allocations and a launch.

`dmattn.backends.cuda.attention` computes the same for any problem, and checks in each call for the
special cases that these calls are known not to have.
"""

import torch
from torch import Tensor

from dmattn.backends.base import Operands, Prepared
from dmattn.backends.cuda.attention import is_decoded, known_window
from dmattn.backends.cuda.bias_rows import copies, pads_gradient
from dmattn.backends.cuda.kernels import BACKWARD, FORWARD, at_once, launch, parts
from dmattn.backends.cuda.keys_written import take_asked
from dmattn.backends.cuda.outputs import finished, is_written_in_place
from dmattn.checks import HEAD_DIM_MULTIPLE
from dmattn.key_lists import num_blocks
from dmattn.problem import Problem


def suits(problem: Problem) -> bool:
    """Whether calls of the kind of this problem need nothing but allocations and a launch."""
    lists, rows = problem.key_lists, problem.q.shape[1]
    return (
        problem.sinks is None
        and problem.packing is None
        and (lists is None or lists.idx.shape[2] == num_blocks(rows, problem.is_causal))
        and problem.q.shape[-1] % HEAD_DIM_MULTIPLE == 0
        and not (copies(problem, backward=False) or copies(problem, backward=True))
        and not pads_gradient(problem)
        and problem.q.numel() > 0
        and problem.k.numel() > 0
    )


class PreparedCall(Prepared):
    """For problems for which `suits` is true, on a device that the kernels support."""

    def __init__(self, backend: str, problem: Problem) -> None:
        super().__init__(backend, problem)
        q, k, v = problem.q, problem.k, problem.v
        batch, rows, nheads, _ = q.shape
        self._device = q.get_device()
        self._enqueue_forward, self._enqueue_backward = at_once(FORWARD), at_once(BACKWARD)
        self._is_plain_q, self._is_plain_k, self._is_plain_v = (
            _is_plain(q),
            _is_plain(k),
            _is_plain(v),
        )
        # Allocated with explicit strides, which takes torch less time.
        self._lse_shape = (batch, nheads, rows)
        self._lse_stride = (nheads * rows, rows, 1)
        self._scale, self._softcap, self._is_causal = problem.kernel_settings
        self._deterministic = problem.deterministic
        self._window = known_window(problem)
        self._is_decoded = is_decoded(problem)

    def forward(
        self, operands: Operands, for_backward: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v, mask, bias, lists = operands
        if out is not None and is_written_in_place(out, self._is_decoded):
            found = out
        else:
            found = _new_like(q, self._is_plain_q)
        lse = q.new_empty_strided(self._lse_shape, self._lse_stride, dtype=torch.float32)
        rest = torch.empty_like(lse) if for_backward and bias is not None else None
        device = self._device
        # One by one, since joining tuples takes longer. 0 splits: the library chooses their number.
        given = (
            device, q, k, v, mask, bias, found, lse,
            self._scale, self._softcap, self._is_causal, 0, lists and parts(lists), rest,
            None, None, 0, 0, self._window, torch._C._cuda_getCurrentRawStream(device),
        )  # fmt: skip
        if self._enqueue_forward(*given) != 0:
            launch(FORWARD, q, *given[:-1])
        return found if out is None else finished(out, found), lse, rest

    def backward(
        self,
        operands: Operands,
        results: tuple[Tensor, Tensor, Tensor | None],
        dout: Tensor,
        dlse: Tensor | None,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        q, k, v, mask, bias, lists = operands
        out, lse, rest = results
        if dout.stride(-1) != 1:
            dout = dout.contiguous()  # such as the expanded gradient of a sum
        if dlse is not None:
            dlse = dlse.contiguous()
        needs_q, needs_k, needs_v, needs_bias = needs
        dq = _new_like(q, self._is_plain_q) if needs_q else None
        dk = _new_like(k, self._is_plain_k) if needs_k else None
        dv = _new_like(v, self._is_plain_v) if needs_v else None
        dbias = _contiguous_like(bias) if needs_bias and bias is not None else None
        # Contiguous, as forward made them, unless saved-tensor hooks have changed the strides.
        out, lse = out.contiguous(), lse.contiguous()
        rest = None if rest is None else rest.contiguous()
        device, asked = self._device, take_asked()
        given = (
            device, q, k, v, mask, bias, out, lse, dout, dlse, dq, dk, dv, dbias,
            self._scale, self._softcap, self._is_causal, self._deterministic,
            lists and parts(lists), rest, None, None, 0, 0, self._window,
            0 if asked is None else asked.event.cuda_event,
            torch._C._cuda_getCurrentRawStream(device),
        )  # fmt: skip
        if self._enqueue_backward(*given) != 0:
            launch(BACKWARD, q, *given[:-1])
        if asked is not None:
            asked.written(dk, dv, dbias)
        return dq, dk, dv, dbias


def _is_plain(t: Tensor) -> bool:
    """Whether torch.empty_like(t) is contiguous without a memory format, as for most tensors."""
    same: bool = torch.empty_like(t, device="meta").stride() == _contiguous_like(t, "meta").stride()
    return same


def _new_like(t: Tensor, is_plain: bool) -> Tensor:
    """Contiguous memory like `t`. torch takes less time if no memory format has to be passed."""
    return torch.empty_like(t) if is_plain else _contiguous_like(t)


def _contiguous_like(t: Tensor, device: str | None = None) -> Tensor:
    return torch.empty_like(t, device=device, memory_format=torch.contiguous_format)
