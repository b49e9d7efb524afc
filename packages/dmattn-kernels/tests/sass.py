"""Disassembles a library's kernels for one chip, and finds their loops of matrix products."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from toolkit import find_tool

INSTRUCTION_BYTES = 16
ENDS = {"EXIT", "RET", "BRA", "BRX", "JMP", "JMX"}


@dataclass(frozen=True)
class Instruction:
    name: str  # with its modifiers, such as BRA.U.ANY
    operands: str
    is_predicated: bool

    @property
    def opcode(self) -> str:
        return self.name.split(".")[0]

    @property
    def runs_on(self) -> bool:
        """Whether the next instruction may run after this one. BRA.DIV jumps if threads diverge."""
        return self.opcode not in ENDS or self.is_predicated or ".DIV" in self.name

    @property
    def is_matrix_product(self) -> bool:
        return self.opcode == "HGMMA"

    @property
    def is_local_memory(self) -> bool:
        return self.opcode in ("LDL", "STL")

    @property
    def target(self) -> int | None:
        """The number of the instruction that a jump goes to. A call is no jump, as it returns."""
        if self.opcode not in ("BRA", "JMP"):
            return None
        return int(self.operands.split(",")[-1], 16) // INSTRUCTION_BYTES


@dataclass(frozen=True)
class Kernel:
    """A kernel and the functions that were compiled into it, as nvdisasm shows them."""

    name: str
    instructions: list[Instruction]

    @cached_property
    def flow(self) -> nx.DiGraph:
        """A graph of the numbers of instructions, with edges to those that may run next."""
        graph = nx.DiGraph()
        for number, instruction in enumerate(self.instructions):
            graph.add_node(number)
            if instruction.runs_on:
                graph.add_edge(number, number + 1)
            if instruction.target is not None:
                graph.add_edge(number, instruction.target)
        return graph

    def product_loops(self) -> list[set[int]]:
        """The innermost loops with matrix products, as numbers of instructions."""
        return list(self._innermost(self.flow))

    def _innermost(self, graph: nx.DiGraph) -> Iterator[set[int]]:
        for loop in nx.strongly_connected_components(graph):
            if len(loop) == 1 or not any(self.instructions[n].is_matrix_product for n in loop):
                continue
            # Without the instructions at which the loop is entered, a cycle that is left is an
            # inner loop.
            entries = {
                n for n in loop if any(before not in loop for before in graph.predecessors(n))
            }
            inner = list(self._innermost(graph.subgraph(loop - entries)))
            yield from inner or [loop]


def _tool(name: str) -> str:
    found = find_tool(name)
    if found is None:
        raise FileNotFoundError(f"{name}: not found; `pip install nvidia-cuda-{name}` brings it")
    return found


def _disassemble(cubin: Path) -> list[Any]:
    command = [_tool("nvdisasm"), "-json", str(cubin)]
    functions = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[1]
    assert isinstance(functions, list)
    return functions


def kernels(library: Path, chip: str, name: str) -> Iterator[Kernel]:
    """The kernels for `chip`, such as "sm_90a", whose mangled names contain `name`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [_tool("cuobjdump"), "-xelf", chip, str(library.resolve())]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
        cubins = [path for path in Path(folder).iterdir() if name.encode() in path.read_bytes()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for functions in pool.map(_disassemble, sorted(cubins)):
                yield from _kernels(functions, name)


def _kernels(functions: list[Any], name: str) -> Iterator[Kernel]:
    found: dict[str, list[Instruction]] = {}
    for function in functions:
        # Functions that begin elsewhere are compiled into the kernel before them.
        if function["start"] == 0:
            current = found.setdefault(function["function-name"], [])
        assert function["start"] == len(current) * INSTRUCTION_BYTES
        current += [
            Instruction(x["opcode"], x.get("operands", ""), "predicate" in x)
            for x in function["sass-instructions"]
        ]
    return (Kernel(key, instructions) for key, instructions in found.items() if name in key)
