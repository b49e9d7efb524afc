"""Tensors of a made-up framework, read through DLPack's C exchange interface."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest

import dmattn_kernels
from abi import SOME_ADDRESS
from calls import LSE, K, Q, module_params
from dmattn_kernels import _core

FLOAT, BFLOAT, INT, BOOL = 2, 4, 0, 6
CPU, CUDA, ROCM = 1, 2, 10


class DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DlTensor))


class Api(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("describe", DESCRIBE),
        ("current_stream", ctypes.c_void_p),
    )


def capsule(api: Api) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    made: object = new(ctypes.addressof(api), b"dlpack_exchange_api", None)
    return made


@DESCRIBE
def describe(tensor: Framework, to: ctypes._Pointer[DlTensor]) -> int:
    to[0] = tensor.described
    return 0


class Framework:
    """A tensor of a framework that has the interface, in version 1."""

    api: ClassVar = Api(1, 3, None, (ctypes.c_void_p * 3)(), describe, None)
    __dlpack_c_exchange_api__: ClassVar = capsule(api)

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
        dtype: tuple[int, int] = (BFLOAT, 16),
        device: tuple[int, int] = (CUDA, 0),
        offset: int = 0,
        lanes: int = 1,
    ) -> None:
        n = len(shape)
        self.shape = (ctypes.c_int64 * n)(*shape)
        self.strides = None if stride is None else (ctypes.c_int64 * n)(*stride)
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.described = DlTensor(
            SOME_ADDRESS,
            *device,
            n,
            *dtype,
            lanes,
            ctypes.cast(self.shape, pointer),
            None if self.strides is None else ctypes.cast(self.strides, pointer),
            offset,
        )


class Child(Framework):
    pass


class Later(Framework):
    """A table of functions in a version that we do not know; it points to one that we know."""

    api: ClassVar = Api(
        2, 0, ctypes.addressof(Framework.api), (ctypes.c_void_p * 3)(), DESCRIBE(), None
    )
    __dlpack_c_exchange_api__: ClassVar = capsule(api)


class TooNew(Framework):
    api: ClassVar = Api(2, 0, None, (ctypes.c_void_p * 3)(), describe, None)
    __dlpack_c_exchange_api__: ClassVar = capsule(api)


class WithoutViews(Framework):
    api: ClassVar = Api(1, 3, None, (ctypes.c_void_p * 3)(), DESCRIBE(), None)
    __dlpack_c_exchange_api__: ClassVar = capsule(api)


def test_types_that_can_be_read() -> None:
    found = [_core.reads(x) for x in (Framework, Child, Later, TooNew, WithoutViews, int, tuple)]
    assert found == [True, True, True, False, False, False, False]
    assert not _core.reads(Framework(Q))  # type: ignore[arg-type]  # not a type


def test_types_are_not_kept_without_end() -> None:
    """Types that a program creates can be freed again, and tensors of all of them are read."""

    def read_by_a_new_type() -> weakref.ref[type]:
        class Passing(Framework):
            pass

        assert _core.reads(Passing)
        with pytest.raises(ValueError, match=r"v has shape \(2, 128, 2, 64\)"):
            params(Passing, k=Passing((2, 127, 2, 64))).workspace_size()
        return weakref.ref(Passing)

    made = [read_by_a_new_type() for _ in range(100)]
    gc.collect()
    assert sum(kind() is not None for kind in made) <= 64


def params(
    make: Callable[..., Framework] = Framework, **changed: Framework
) -> dmattn_kernels.FwdParams:
    """A forward call whose tensors all come from a framework."""
    tensors: dict[str, object] = {"q": make(Q), "k": make(K), "v": make(K), "out": make(Q)}
    return module_params(**(tensors | {"lse": make(LSE, None, (FLOAT, 32))} | changed))


@pytest.mark.parametrize("kind", [Framework, Child, Later])
def test_shapes_strides_and_dtypes_arrive(kind: type[Framework]) -> None:
    """The library's errors about wrong ones show that they arrive."""
    for changed, words in (
        ({"k": kind((2, 127, 2, 64))}, r"v has shape \(2, 128, 2, 64\); wanted \(2, 127, 2, 64\)"),
        ({"q": kind(Q, (9999, 512, 128, 2))}, r"q has strides \(9999, 512, 128, 2\)"),
        ({"out": kind(Q, (0, 256, 64, 1))}, r"out has strides \(0, 256"),
        ({"k": kind(K, None, (FLOAT, 16))}, r"k has dtype float16 \(1\); wanted bfloat16"),
        ({"mask": kind((2, 4, 128, 128), None, (INT, 32))}, r"mask has dtype int32"),
        ({"bias": kind((128, 128), None, (FLOAT, 32))}, "bias has 2 dimensions; wanted 4"),
        ({"mask": kind((2, 3, 128, 128), None, (BOOL, 8))}, r"mask has shape \(2, 3, 128, 128\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            params(kind, **changed).workspace_size()


def test_the_offset_belongs_to_the_address() -> None:
    wrong = params(k=Framework(K, offset=1))
    with pytest.raises((ValueError, RuntimeError), match=r"k has data pointer|device is 0"):
        wrong.launch(SOME_ADDRESS, 1 << 50, 0)


@pytest.mark.parametrize(
    "changed, error, words",
    [
        ({"device": (CUDA, 1)}, ValueError, "q is on a device of DLPack type 2 and number 1; want"),
        ({"device": (CPU, 0)}, ValueError, "q is on a device of DLPack type 1 and number 0; want"),
        ({"device": (ROCM, 0)}, ValueError, "q is on a device of DLPack type 10"),
        ({"dtype": (FLOAT, 64)}, TypeError, r"q has the DLPack dtype \(2, 64\); wanted float16, "),
        ({"lanes": 2}, TypeError, r"q has the DLPack dtype"),
    ],
)
def test_what_cannot_be_read_is_named(
    changed: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        params(q=Framework(Q, **changed))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q has 5 dimensions; wanted 1 to 4"):
        params(q=Framework((1, *Q)))


def test_a_refusal_of_the_framework_is_an_error() -> None:
    @DESCRIBE
    def refuse(tensor: object, to: object) -> int:
        return -1

    class Refusing(Framework):
        api: ClassVar = Api(1, 3, None, (ctypes.c_void_p * 3)(), refuse, None)
        __dlpack_c_exchange_api__: ClassVar = capsule(api)

    with pytest.raises(ValueError, match="q cannot be described by its framework"):
        params(q=Refusing(Q))


class Signed(Framework):
    """A tensor of a framework that has views with a flipped sign, as torch has."""

    negative = False

    def is_neg(self) -> bool:
        return self.negative


STRIDE = (32768, 256, 64, 1)


def test_a_kind_is_all_but_the_address() -> None:
    made = [
        (Signed(Q, STRIDE), None),
        (None, Signed(Q, STRIDE)),
        (Signed(Q, STRIDE), Signed(Q, STRIDE)),
        (Signed(Q, STRIDE),),
        (Signed(K, STRIDE), None),
        (Signed(Q[1:], STRIDE[1:]), None),
        (Signed(Q, (32768, 64, 8192, 1)), None),
        (Signed(Q, STRIDE, (FLOAT, 16)), None),
        (Signed(Q, STRIDE, (FLOAT, 32)), None),
        (Signed(Q, STRIDE, lanes=2), None),
        (Signed(Q, STRIDE, device=(CPU, 0)), None),
        (Signed(Q, STRIDE, device=(CUDA, 1)), None),
    ]
    kinds = [_core.kind_of((int, Signed), *tensors) for tensors in made]
    assert None not in kinds and len(set(kinds)) == len(made)
    assert kinds[0] == _core.kind_of((Signed,), Signed(Q, STRIDE, offset=64), None)


def test_tensors_without_a_kind() -> None:
    class Sub(Signed):
        pass

    class Unreadable(WithoutViews, Signed):
        pass

    negative = Signed(Q, STRIDE)
    negative.negative = True
    types = (Signed, Unreadable, int)
    for tensor in (negative, Sub(Q, STRIDE), Unreadable(Q, STRIDE), 3, Signed((1,) * 9, (1,) * 9)):
        assert _core.kind_of(types, Signed(Q, STRIDE), tensor) is None
    for wrong in ((), (Signed,), (types, *[None] * 9)):
        with pytest.raises(TypeError, match="wanted a tuple of types, and up to 8 tensors"):
            _core.kind_of(*wrong)


def test_one_call_takes_what_the_constructor_takes() -> None:
    q, k, lse = Framework(Q), Framework(K), Framework(LSE, None, (FLOAT, 32))
    settings = (0.125, 0.0, False, 0, None, None, None, None, 0, 0, 0)
    with pytest.raises(
        ValueError, match=r"v has shape \(2, 128, 2, 64\); wanted \(2, 127, 2, 64\)"
    ):
        _core.enqueue_fwd(0, q, Framework((2, 127, 2, 64)), k, None, None, q, lse, *settings, 0)
    call = (0, q, k, k, None, None, q, lse, *settings)
    with pytest.raises(TypeError, match="got 19 arguments; wanted 20"):
        _core.enqueue_fwd(*call)
    for place, value in ((8, "1"), (10, 1), (11, 1.5), (0, None)):
        with pytest.raises(TypeError):
            _core.enqueue_fwd(*call[:place], value, *call[place + 1 :], 0)
    with pytest.raises(ValueError, match="4294967296 does not fit 32 bits"):
        _core.enqueue_fwd(*call[:11], 1 << 32, *call[12:], 0)
