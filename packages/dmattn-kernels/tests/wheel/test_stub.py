"""_core.pyi against the compiled module: names, order and defaults of every argument.

Callers pass many arguments by position, and bool, int and float convert into each other: a stub
that is wrong about their order would let a type checker approve calls that mean something else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dmattn_kernels
from conftest import PACKAGE

STUB = PACKAGE / "src" / "dmattn_kernels" / "_core.pyi"

# (name, default value, ... where there is no default)
Arguments = list[tuple[str, object]]


def arguments_of(function: ast.FunctionDef) -> Arguments:
    names = [argument.arg for argument in function.args.args]
    defaults: list[object] = [ast.literal_eval(value) for value in function.args.defaults]
    missing: list[object] = [...] * (len(names) - len(defaults))
    return list(zip(names, missing + defaults, strict=True))


def stub_functions(path: Path = STUB) -> Iterator[tuple[str, Arguments]]:
    """("FwdParams.launch", arguments) and so on."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, arguments_of(node)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", arguments_of(member)


def compiled_arguments(name: str) -> Arguments:
    """The arguments in the signature that pybind11 writes at the head of a docstring."""
    found: object = dmattn_kernels._core
    for part in name.split("."):
        found = getattr(found, part)
    (signature,) = re.findall(r"^\w+(\(.*\)) -> .*$", str(found.__doc__), re.MULTILINE)
    # Annotations may be any expressions, so Python's own parser reads the signature.
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return arguments_of(function)


FUNCTIONS = dict(stub_functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stub_names_the_arguments_in_their_order(name: str) -> None:
    assert FUNCTIONS[name] == compiled_arguments(name)


def test_stub_has_every_method() -> None:
    caches = ("CacheAppendParams", "CacheDraftParams", "CacheCommitParams")
    keys = ("BuildKeyListsParams", "JoinKeysParams", "KeepKeysParams")
    for name in ("FwdParams", "BwdParams", "SelectParams", *keys, *caches):
        methods = [m for m in dir(getattr(dmattn_kernels._core, name)) if not m.startswith("_")]
        assert [m for m in methods if f"{name}.{m}" not in FUNCTIONS] == []
