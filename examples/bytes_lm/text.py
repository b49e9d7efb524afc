"""The corpus: the sources of Python's standard library, some files held out."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class Text:
    """The corpus: two uint8 streams made of different files."""

    train: Tensor
    heldout: Tensor
    train_files: int
    heldout_files: int


def load_text(root: Path | None = None) -> Text:
    """The Python sources below root (the standard library's folder by default).

    A file is held out when the checksum of its path says so, so that the split does not move when
    files are added. Raises RuntimeError when there is too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name or not path.is_file():
            continue
        parts[zlib.crc32(name.encode()) % 10 == 0].append(path.read_bytes())
    streams = {held: b"\n".join(files) for held, files in parts.items()}
    for held, stream in streams.items():
        if len(stream) < 100_000:
            raise RuntimeError(
                f"found {len(stream)} bytes of {'held-out' if held else 'training'} text in *.py "
                f"below {root}, wanted at least 100000"
            )
    train, heldout = (
        torch.frombuffer(bytearray(streams[held]), dtype=torch.uint8) for held in (False, True)
    )
    return Text(train, heldout, len(parts[False]), len(parts[True]))


def unigram_entropy(stream: Tensor) -> float:
    """Entropy of the byte frequencies of a uint8 stream, in bits per byte."""
    counts = torch.bincount(stream.to(torch.int32), minlength=VOCABULARY).to(torch.float64)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log2()).sum())


def random_starts(
    stream: Tensor, shape: tuple[int, ...], length: int, generator: torch.Generator
) -> Tensor:
    """int64 places at which length + 1 bytes begin, on the stream's device."""
    return torch.randint(len(stream) - length, shape, generator=generator).to(stream.device)


def windows_at(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """(count, length + 1) int64 bytes from (count,) places; the last column is only predicted."""
    return stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()


def even_windows(stream: Tensor, count: int, length: int) -> Tensor:
    """(count, length + 1) int64 bytes at evenly spaced places, the same ones at every call."""
    count = min(count, max(1, len(stream) // (length + 1)))
    start = torch.linspace(0, len(stream) - length - 1, count, dtype=torch.float64)
    return windows_at(stream, start.long().to(stream.device), length)


def choose_passage(stream: Tensor, length: int) -> Tensor:
    """(length,) bytes of readable text: from a class or function on, a third into the stream."""
    data = stream.numpy().tobytes()
    start = len(data) // 3
    for _ in range(200):
        start = data.find(b"\n\n\n", start + 1) + 3
        passage = data[start : start + length]
        if len(passage) == length and passage.isascii() and passage.startswith((b"def", b"class")):
            return stream[start : start + length]
    return stream[:length]
