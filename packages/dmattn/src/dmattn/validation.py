"""Checks of single arguments, shared by every public function and class.

Each check returns the value in the form in which the code uses it from then on, or raises an error
that names the argument, what it got and what it wanted. Nothing in this module knows about
attention; the rules that relate several arguments to each other are in `dmattn.checks`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Private to torch. In a release that lacks them, torch's own errors say what cannot be read.
_IS_WRAPPED: Callable[[Tensor], bool] | None = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", None
)
_FUNCTORCH_LEVEL: Callable[[], Any] | None = getattr(
    torch._C._functorch, "maybe_current_level", None
)
# The floating dtypes that are computed with. torch cannot compute with those of 8 bits.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TINY, _LARGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def describe(value: object) -> str:
    """A short description of a value for error messages, without the contents of tensors."""
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)) and any(isinstance(entry, Tensor) for entry in value):
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    short = text if len(text) <= 40 else text[:37] + "..."
    return short if value is None else f"{short} ({type(value).__name__})"


def check_bool(name: str, value: Any) -> bool:
    """A Python or numpy bool, as a bool.

    Raises:
        TypeError: it is anything else; a string or a list would count as True by accident.
    """
    if isinstance(value, (bool, torch.SymBool)):
        return value  # type: ignore[return-value]  # torch treats a SymBool as a bool
    if _is_numpy_bool(value):
        return bool(value)
    raise TypeError(f"{name}: got {describe(value)}, wanted True or False")


def _is_numpy_bool(value: Any) -> bool:
    """Whether it is a numpy bool scalar: its type is named `bool_` before numpy 2, `bool` since."""
    return type(value).__name__ in ("bool_", "bool") and hasattr(value, "dtype")


def check_int(name: str, value: Any, least: int | None = None, wanted: str | None = None) -> int:
    """Anything that Python takes as an index (numpy integers too), as an int.

    Args:
        name: the argument's public name.
        value: what the caller gave.
        least: the smallest value allowed, if there is one.
        wanted: the end of the error message; "an int" or "an int of at least `least`" when None.

    Raises:
        TypeError: it is no integer, or a bool.
        ValueError: it is smaller than `least`, or does not fit 64 bits.
    """
    if wanted is None:
        wanted = "an int" if least is None else f"an int of at least {least}"
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        if isinstance(value, (bool, Tensor)) or _is_numpy_bool(value):
            raise TypeError(f"{name}: got {describe(value)}, wanted {wanted}")
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: got {describe(value)}, wanted {wanted}") from None
    if least is not None and value < least:
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    # A symbolic length always fits 64 bits. Comparing it would narrow its range, which an export
    # without an upper bound does not allow.
    if not isinstance(value, torch.SymInt) and not torch.compiler.is_compiling():
        if value >= 2**63:
            raise ValueError(f"{name}: got {describe(value)}, wanted less than 2**63: {wanted}")
        if value < -(2**63):
            raise ValueError(f"{name}: got {describe(value)}, wanted at least -2**63: {wanted}")
    result: int = value
    return result


def refuse_jit_trace(what: str) -> None:
    """Raise RuntimeError under torch.jit.trace, for calls that depend on lengths as plain numbers.

    The trace would keep the lengths of its example. `what`: the call, for the error message.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # has no types
        raise RuntimeError(
            f"torch.jit.trace: got {what}, whose lengths it would keep for inputs of every length; "
            "wanted torch.export.export or torch.compile"
        )


def check_number(name: str, value: Any, least: float | None = None) -> float:
    """A finite Python or numpy number, as a float.

    Raises:
        TypeError: it is no number, or a bool or a tensor.
        ValueError: it is infinite, NaN or smaller than `least`.
    """
    wanted = "a finite number" if least is None else f"a finite number of at least {least:g}"
    if not isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        if isinstance(value, (bool, str, Tensor)) or _is_numpy_bool(value):
            raise TypeError(f"{name}: got {describe(value)}, wanted {wanted}")
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{name}: got {describe(value)}, wanted {wanted}") from None
        except (TypeError, ValueError):
            raise TypeError(f"{name}: got {describe(value)}, wanted {wanted}") from None
    if not -math.inf < value < math.inf or (least is not None and value < least):
        raise ValueError(f"{name}: got {value}, wanted {wanted}")
    result: float = value
    return result


def check_float32(name: str, value: Any, least: float | None = None) -> float:
    """A finite number that is 0 or a normal number of float32, as a float.

    A number that becomes infinite or 0 in float32 could turn products that are 0 into NaN.

    Raises:
        TypeError: as `check_number`.
        ValueError: as `check_number`, or its size is not within the normal numbers of float32.
    """
    number = check_number(name, value, least)
    if number != 0 and not (_TINY <= number <= _LARGE or -_LARGE <= number <= -_TINY):
        raise ValueError(
            f"{name}: got {number}, wanted 0 or a number of {_TINY:.3g} to {_LARGE:.3g} in size, "
            "as float32 holds them"
        )
    return number


def check_tensor(name: str, value: Any, wanted: str = "a torch.Tensor") -> Tensor:
    """A dense tensor.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is a sparse, mkldnn or nested tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {describe(value)}, wanted {wanted}")
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise ValueError(f"{name}: got a tensor of layout {kind}, wanted torch.strided (dense)")
    return value


def check_optional_tensor(name: str, value: Any) -> Tensor | None:
    """A dense tensor or None; errors as `check_tensor`."""
    return None if value is None else check_tensor(name, value, "a torch.Tensor or None")


def check_mask(name: str, value: Any) -> Tensor:
    """A bool mask, True = attend, from a bool tensor or from an integer one (batch, seqlen).

    Integers, as tokenizers return them, mean True where they are not 0. Integer masks of other
    ranks are refused, since they might be meant to be added to the logits.

    Raises:
        TypeError: it is no tensor, or of another dtype.
        ValueError: it is a sparse, mkldnn or nested tensor.
    """
    mask = check_tensor(name, value)
    if mask.dtype == torch.bool:
        return mask
    if mask.dim() == 2 and is_integer(mask.dtype):
        return mask != 0
    hint = "; pass mask.bool()" if is_integer(mask.dtype) else ""
    raise TypeError(f"{name}: got dtype {mask.dtype}, wanted torch.bool (True = attend){hint}")


def check_longest(name: str, value: Any, bounds: Tensor) -> int:
    """The length of the longest sequence, as an int.

    Args:
        name: the argument's public name.
        value: what the caller gave: an integer, a tensor of one, or None to take the length from
            the boundaries. For the latter two the host waits for the device.
        bounds: integer (sequences + 1,), the boundaries of the sequences.

    Raises:
        TypeError: it is neither an integer, nor a tensor of one.
        ValueError: it is negative.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and is_integer(value.dtype):
        value = int(value)
    if value is None:
        value = int(bounds.diff().max()) if len(bounds) > 1 else 0
    return check_int(name, value, 0)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is an integer one; torch.bool does not count as one."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_tensor_dtype(
    name: str, t: Tensor, allowed: Sequence[torch.dtype], hint: str = ""
) -> None:
    """Raise TypeError unless the tensor has one of these dtypes; `hint` ends the message."""
    if t.dtype not in allowed:
        raise TypeError(f"{name}: got dtype {t.dtype}, wanted {one_of(allowed)}{hint}")


def check_floating(name: str, t: Any, wanted: str | None = None) -> Tensor:
    """A tensor of one of `DTYPES`; raises TypeError for anything else."""
    tensor = check_tensor(name, t, wanted or "a torch.Tensor")
    if tensor.dtype not in DTYPES:
        wanted = wanted or "a floating dtype of 16 to 64 bits"
        raise TypeError(f"{name}: got dtype {tensor.dtype}, wanted {wanted}")
    return tensor


def check_dtype(name: str, value: Any) -> torch.dtype:
    """A torch.dtype; raises TypeError for anything else, such as its name."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: got {describe(value)}, wanted a torch.dtype")
    return value


def check_device(value: Any, wanted: str = "a torch.device or its name") -> torch.device:
    """The argument `device` as a torch.device; raises TypeError if torch cannot make one of it."""
    if torch.compiler.is_compiling():
        return torch.device(value)
    try:
        return torch.device(value)
    except (TypeError, RuntimeError, ValueError):
        raise TypeError(f"device: got {describe(value)}, wanted {wanted}") from None


def check_same_device(name: str, t: Tensor, device: torch.device, owner: str) -> None:
    """Raise ValueError unless the tensor is on the device of the argument called `owner`."""
    if t.device != device:
        raise ValueError(f"{name}: got device {t.device}, wanted {device} as {owner}")


def check_shape(name: str, t: Tensor, wanted: Sequence[int]) -> None:
    """Raise ValueError unless the tensor has exactly this shape."""
    shape = t.shape
    if len(shape) != len(wanted) or not all(n == m for n, m in zip(shape, wanted, strict=True)):
        raise ValueError(f"{name}: got shape {tuple(shape)}, wanted {tuple(wanted)}")


def can_be_read(t: Tensor) -> bool:
    """Whether the host can look at the values without waiting for a device."""
    return t.is_cpu and has_values(t)


def has_values(t: Tensor) -> bool:
    """Whether the host can read the values of a tensor at all.

    Not under a compiler, of fake tensors, on the meta device, nor of tensors that a torch.func
    transform has wrapped, which may stand for several.
    """
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    if _IS_WRAPPED is not None and _IS_WRAPPED(t):
        return False
    return type(t) in (Tensor, torch.nn.Parameter)


def in_functorch() -> bool:
    """Whether this call is within a transform of torch.func, such as torch.func.grad."""
    return _FUNCTORCH_LEVEL is not None and _FUNCTORCH_LEVEL() is not None


def read_integers(t: Tensor) -> list[int]:
    """The values of an integer tensor of one dimension for which `has_values` is true."""
    if in_functorch():
        return [int(n) for n in t]  # within torch.func.grad, older torch reads single numbers only
    values: list[int] = t.tolist()
    return values


def check_can_move(name: str, t: Tensor, device: torch.device | None) -> None:
    """Raise ValueError for a tensor on the meta device that is wanted on another device."""
    if t.is_meta and device is not None and device.type != "meta":
        raise ValueError(f"{name}: got device meta, where there are no values, wanted {device}")


def is_one_or(size: int, n: int) -> bool:
    """Whether a dimension of this size broadcasts to n.

    Written as comparisons: `size in (1, n)` is False under torch.compile if one of the two is a
    fixed number and the other a dynamic length that happens to be equal. For a data-dependent
    length torch.compile cannot decide whether it is 1, but it can know that it equals n; so
    equality with n is tested first, except for plain ints, which need no guard.
    """
    return (isinstance(size, int) and size == 1) or size == n or size == 1


def one_of(options: Sequence[object]) -> str:
    """The options as words, such as "a, b or c"."""
    names = [str(option) for option in options]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
