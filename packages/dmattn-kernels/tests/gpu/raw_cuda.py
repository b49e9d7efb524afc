"""Device memory through the driver alone, and kernel calls through `dmattn_kernels` alone.

There is no torch in the process. So nothing but the library's own kernels runs, every finding of
compute-sanitizer is about them, and initcheck sees each byte that the host wrote.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import numpy.typing as npt

import dmattn_kernels as kernels

Array = npt.NDArray[np.generic]
# A tensor as the Python module takes it: address, element type, shape and strides.
View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Element types: numpy has no bfloat16, so those arrays hold its bits.
CODES = {
    "f16": kernels.FLOAT16,
    "bf16": kernels.BFLOAT16,
    "f32": kernels.FLOAT32,
    "bool": kernels.BOOL,
    "i32": kernels.INT32,
    "i64": kernels.INT64,
}
_HOST = {
    "f16": np.float16,
    "f32": np.float32,
    "bool": np.bool_,
    "i32": np.int32,
    "i64": np.int64,
}


def to_bits(x: Array, dtype: str) -> Array:
    """Numbers or bool values as an array of the bytes that the device wants."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.asarray(x).astype(_HOST[dtype])


def from_bits(x: Array, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A strided device tensor; `view` is what the Python module takes."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def view(self) -> View:
        return self.address, CODES[self.dtype], self.shape, self.stride

    def swapped(self) -> Buffer:
        """A view with the last two dimensions exchanged."""
        shape, stride = self.shape, self.stride
        return Buffer(
            self.address,
            self.dtype,
            (*shape[:-2], shape[-1], shape[-2]),
            (*stride[:-2], stride[-1], stride[-2]),
        )


class Gpu:
    """The primary context of device 0 and the memory taken from it."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._taken: list[int] = []

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")

    def allocate(self, size: int, fill: int | None = None) -> int:
        """`size` bytes; `fill` sets each, None leaves them unwritten for initcheck."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self._taken.append(address.value)
        if fill is not None:
            self._call(
                "cuMemsetD8_v2", address, ctypes.c_ubyte(fill), ctypes.c_size_t(max(size, 1))
            )
        return address.value

    def workspace(self, size: int, fill: int | None, arrivals: int = 0) -> int:
        """allocate() for a workspace, whose first `arrivals` words of 64 bits are always written.

        Kernels read these words whatever they hold, which initcheck would report.
        """
        address = self.allocate(size, fill)
        if fill is None and arrivals:
            words = ctypes.c_size_t(min(8 * arrivals, size))
            self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0xFF), words)
        return address

    def upload(self, values: Array, dtype: str, skip: int = 0) -> Buffer:
        """A contiguous tensor; `skip` puts it that many elements into its allocation."""
        bits = to_bits(values, dtype)
        padded = np.concatenate((np.zeros(skip, bits.dtype), bits.ravel()))
        address = self.allocate(padded.nbytes)
        if padded.nbytes:
            source = padded.ctypes.data_as(ctypes.c_void_p)
            self._call(
                "cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(padded.nbytes)
            )
        strides = tuple(s // bits.itemsize for s in np.empty(bits.shape, bits.dtype).strides)
        broadcast = tuple(0 if n == 1 else s for n, s in zip(bits.shape, strides, strict=True))
        return Buffer(
            address + skip * bits.itemsize, dtype, bits.shape, (*broadcast[:-1], strides[-1])
        )

    def output(self, shape: tuple[int, ...], dtype: str, fill: int | None) -> Buffer:
        like: Array = np.empty(shape, _HOST.get(dtype, np.uint16))
        strides = tuple(s // like.itemsize for s in like.strides)
        return Buffer(self.allocate(like.nbytes, fill), dtype, shape, strides)

    def download(
        self, buffer: Buffer, first: int = 0, count: int | None = None
    ) -> npt.NDArray[np.float64]:
        """All of a contiguous tensor, or `count` of its elements from `first` on, flat."""
        shape = buffer.shape if count is None else (count,)
        host: Array = np.empty(shape, _HOST.get(buffer.dtype, np.uint16))
        self._call("cuCtxSynchronize")
        if host.nbytes:
            self._call(
                "cuMemcpyDtoH_v2",
                host.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_uint64(buffer.address + first * host.itemsize),
                ctypes.c_size_t(host.nbytes),
            )
        return from_bits(host, buffer.dtype)

    def release(self) -> None:
        """Frees everything: later accesses to it are errors that memcheck sees."""
        self._call("cuCtxSynchronize")
        for address in self._taken:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
        self._taken.clear()
