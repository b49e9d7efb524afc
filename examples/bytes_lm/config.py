"""What to train, on a CPU and on a GPU."""

import math
from dataclasses import asdict, dataclass

# The largest head_dim that dmattn supports, and the least values of options that are whole numbers.
LARGEST_HEAD_DIM = 256
LEAST = {
    "layers": 1,
    "width": 8,
    "heads": 1,
    "kv_heads": 1,
    "length": 1,
    "window": 1,
    "batch": 1,
    "steps": 0,
    "seed": 0,
}


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


def complaint(config: Config) -> str | None:
    """Why this configuration cannot be trained, in terms of the options; None if it can."""
    for name, least in LEAST.items():
        got = asdict(config)[name]
        if not least <= got < 2**63:
            return f"--{name.replace('_', '-')}: got {got}, wanted a number from {least} up"
    if not (math.isfinite(config.lr) and config.lr > 0):
        return f"--lr: got {config.lr}, wanted a positive number"
    if config.heads % config.kv_heads != 0:
        return f"--heads: got {config.heads}, wanted a multiple of --kv-heads = {config.kv_heads}"
    # The rotary embedding rotates pairs of numbers of a head, so head_dim has to be even.
    if config.width % (2 * config.heads) != 0:
        return f"--width: got {config.width}, wanted a multiple of 2 * --heads = {2 * config.heads}"
    if config.width // config.heads > LARGEST_HEAD_DIM:
        largest = LARGEST_HEAD_DIM * config.heads
        return (
            f"--width: got {config.width}, wanted at most {LARGEST_HEAD_DIM} * --heads = {largest}"
        )
    return None
