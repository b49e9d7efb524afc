"""Reads from a shared library what the tests need: exported names, needed libraries, GPU code."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

SHT_DYNAMIC, SHT_DYNSYM = 6, 11
DT_NEEDED, DT_RUNPATH = 1, 29
FATBIN_MAGIC = 0xBA55ED50
FATBIN_PTX, FATBIN_ELF = 1, 2
ONE_ARCHITECTURE = 1 << 20  # flag of code that runs on one architecture only, such as sm_90a


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


class Library:
    """A 64-bit little-endian ELF file."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{path} is not a 64-bit little-endian ELF file"
        (offset,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self.data, 0x3A)
        headers = [
            struct.unpack_from("<IIQQQQI", self.data, offset + i * size) for i in range(count)
        ]
        strings = headers[names][4]
        self.sections = [
            Section(self._text(strings + name), kind, at, length, link)
            for name, kind, _, _, at, length, link in headers
        ]

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def _entries(self, kind: int, layout: str) -> list[tuple[int, tuple[int, ...]]]:
        """(offset of the string table, fields) of each entry of the sections of a kind."""
        return [
            (self.sections[section.link].offset, fields)
            for section in self.sections
            if section.kind == kind
            for fields in struct.iter_unpack(
                layout, self.data[section.offset : section.offset + section.size]
            )
        ]

    def dynamic(self, tag: int) -> list[str]:
        entries = self._entries(SHT_DYNAMIC, "<QQ")
        return [self._text(strings + value) for strings, (found, value) in entries if found == tag]

    def needed(self) -> list[str]:
        """Libraries that the loader has to find."""
        return self.dynamic(DT_NEEDED)

    def exported(self) -> set[str]:
        """Names that other libraries can link to."""
        entries = self._entries(SHT_DYNSYM, "<IBBHQQ")
        return {
            self._text(strings + name)
            for strings, (name, _, _, section, _, _) in entries
            if section != 0 and name != 0
        }

    def cuda_code(self) -> list[tuple[str, int]]:
        """(architecture, bytes) of each piece of GPU code, one per compiled file.

        The architecture is written as "sm_80", "sm_90a" or "compute_80".
        """
        return [
            code
            for section in self.sections
            if section.name == ".nv_fatbin"
            for code in _fatbin(self.data[section.offset : section.offset + section.size])
        ]


def _fatbin(data: bytes) -> list[tuple[str, int]]:
    """As `Library.cuda_code`, from containers that each have a header and entries of code."""
    found, at = [], 0
    while at + 16 <= len(data):
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != FATBIN_MAGIC:
            at += 8  # padding
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            if kind in (FATBIN_PTX, FATBIN_ELF):
                (flags,) = struct.unpack_from("<I", data, entry + 40)
                prefix = "compute" if kind == FATBIN_PTX else "sm"
                suffix = "a" if flags & ONE_ARCHITECTURE else ""
                found.append((f"{prefix}_{architecture}{suffix}", entry_size))
            entry += entry_header + entry_size
        at = end
    return found
