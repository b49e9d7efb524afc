"""Uses the installed wheels of dmattn and dmattn-kernels as somebody would who has just got them.

Exit status 0 means that both are imported from this environment, that they fit each other, and that
attention on the CPU gives the right results.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import dmattn
import dmattn_kernels
from dmattn.backends.cuda.kernels import load_kernels


def check_places() -> None:
    packages = Path(sysconfig.get_paths()["platlib"]).resolve()
    for module, name in ((dmattn, "dmattn"), (dmattn_kernels, "dmattn-kernels")):
        place = Path(str(module.__file__)).resolve()
        if packages not in place.parents:
            sys.exit(f"{name}: got the one in {place}, wanted the one installed in {packages}")
        print(f"{name} {metadata.version(name)} from {place.parent}")


def check_kernels() -> None:
    """The kernels can be loaded and have the ABI that dmattn needs; load_kernels raises if not."""
    load_kernels()
    print(f"ABI version {dmattn_kernels.abi_version()}, {dmattn_kernels.architectures()}")
    print(f"backends here: {dmattn.get_available_backends()}")


def check_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 60, 2, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = dmattn.flash_dmattn_func(q, k, v, is_causal=True)
    expected = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    weights = torch.randn_like(out)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, (q, k, v), weights),
        torch.autograd.grad(expected, (q, k, v), weights),
        strict=True,
    )
    largest = max((found - wanted).abs().max().item() for found, wanted in pairs)
    print(f"largest difference from torch, forward and backward: {largest:.1e}")
    if not largest < 1e-10:
        sys.exit("attention on the CPU differs from torch's")
    scores = torch.randn(1, 2, 1, 60, dtype=torch.float64)
    dmattn.flash_dmattn_func(q, k, v, attn_bias=scores, is_causal=True, window_size=8)


if __name__ == "__main__":
    check_places()
    check_kernels()
    check_attention()
