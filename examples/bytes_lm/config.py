"""What to train, on a CPU and on a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """What to train. The defaults are those for a CPU."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    length: int = 256  # context, in bytes
    window: int = 64  # keys that each query keeps
    batch: int = 8
    steps: int = 700
    lr: float = 4e-3
    seed: int = 0


GPU_CONFIG = Config(
    layers=8,
    width=512,
    heads=8,
    kv_heads=2,
    length=4096,
    window=512,
    batch=8,
    steps=1000,
    lr=1.5e-3,
)
