"""Kernels whose thread blocks wait for each other, while another one occupies half of the SMs."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import dmattn
from toolkit import find_tool

pytest.importorskip("dmattn_kernels")

# A kernel whose thread blocks stay until words[0] is set, or give up after a time. words: [whether
# to end, how many have started, how many gave up].
HOLD = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 words, .param .u64 nanoseconds)
{
  .reg .pred %p<3>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [words];
  ld.param.u64 %rd2, [nanoseconds];
  cvta.to.global.u64 %rd1, %rd1;
  atom.global.add.u32 %r1, [%rd1+4], 1;
  mov.u64 %rd3, %globaltimer;
AGAIN:
  ld.volatile.global.u32 %r2, [%rd1];
  setp.ne.u32 %p1, %r2, 0;
  @%p1 bra END;
  mov.u64 %rd4, %globaltimer;
  sub.u64 %rd5, %rd4, %rd3;
  setp.lt.u64 %p2, %rd5, %rd2;
  @%p2 bra AGAIN;
  atom.global.add.u32 %r3, [%rd1+8], 1;
END:
  ret;
}
\0"""
SMEM = 200 << 10  # bytes of such a thread block: no other one with large tiles fits beside it
LIMIT_NS = 5_000_000_000
MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def holding_code() -> bytes:
    """HOLD, as machine code if there is ptxas, since the driver's compiler may be switched off."""
    ptxas = find_tool("ptxas")
    if ptxas is None:
        return HOLD
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "hold.ptx"), Path(folder, "hold.cubin")
        source.write_bytes(HOLD.rstrip(b"\0"))
        subprocess.run([ptxas, f"-arch=sm_{major}{minor}", "-o", code, source], check=True)
        return code.read_bytes()


def hold(words: torch.Tensor, blocks: int, stream: torch.cuda.Stream) -> None:
    """Start so many of these thread blocks, one on each SM."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        status = getattr(driver, name)(*args)
        assert status == 0, f"{name} failed with CUDA error {status}"

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(holding_code()))
    call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"hold"))
    call("cuFuncSetAttribute", function, MAX_DYNAMIC_SMEM, SMEM)
    values = ctypes.c_uint64(words.data_ptr()), ctypes.c_uint64(LIMIT_NS)
    arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    on = ctypes.c_void_p(stream.cuda_stream)
    call("cuLaunchKernel", function, blocks, 1, 1, 32, 1, 1, SMEM, on, arguments, None)


@pytest.mark.parametrize(
    "softcap, window", [(0.0, None), (20.0, None), (0.0, 300)], ids=["plain", "softcap", "top-w"]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_turns_do_not_need_every_sm(head_dim: int, softcap: float, window: int | None) -> None:
    """Half of the SMs are held by blocks that leave once the deterministic backward has ended."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, 2048, 16, head_dim)
    q, k, v, dout = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = None
    if window:
        bias = torch.randn((1, 16, 1, 2048), device="cuda", generator=draw).requires_grad_()
        leaves.append(bias)
    words = torch.zeros(3, dtype=torch.int32, device="cuda")
    half = torch.cuda.get_device_properties(0).multi_processor_count // 2

    def backward() -> tuple[torch.Tensor, ...]:
        out = dmattn.flash_dmattn_func(
            *(q, k, v),
            attn_bias=bias,
            is_causal=True,
            softcap=softcap,
            window_size=window,
            deterministic=True,
            backend="cuda",
        )
        return torch.autograd.grad(out, leaves, dout)

    want = backward()
    backward()  # afterwards all memory is allocated and all code is loaded
    torch.cuda.synchronize()
    others, side = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    hold(words, half, others)
    with torch.cuda.stream(side):
        while int(words[1]) < half:
            pass
    found = backward()
    words[:1].fill_(1)
    torch.cuda.synchronize()
    assert int(words[2]) == 0, "the backward ended only after the others had given up"
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
