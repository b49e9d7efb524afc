"""Boundaries of packed documents, as model code passes them to attention."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dmattn.key_lists import check_boundaries
from dmattn.selection import check_boundary_tensor, to_int32
from dmattn.validation import can_be_read, check_longest, has_values, read_integers


def check_bounds(
    name: str, given: Any, total: int, waits: bool = False
) -> tuple[Tensor, int | None]:
    """Boundaries of documents, checked by the names of the caller.

    Args:
        name: the argument's public name.
        given: what the caller gave.
        total: the number of tokens.
        waits: whether the host may wait for a device to read the values.

    Returns:
        The boundaries, int32 (documents + 1,), and the length of the longest document; None in its
        place where the host has not read the values. These are then not checked.

    Raises:
        TypeError: they are no tensor of int32 or int64.
        ValueError: they have no or several dimensions, or are read and do not rise from 0 to total.
    """
    bounds = check_boundary_tensor(given, name)
    longest = None
    if can_be_read(bounds) or (waits and has_values(bounds)):
        values = read_integers(bounds)
        check_boundaries(values, total, name)
        longest = max((b - a for a, b in pairwise(values)), default=0)
    return to_int32(bounds), longest


def check_bounds_and_longest(
    name: str, given: Any, longest_name: str, longest: Any, total: int
) -> tuple[Tensor, int]:
    """Boundaries as from `check_bounds`, and the length of the longest document.

    Args:
        name, given, total: as for `check_bounds`.
        longest_name: the public name of the length.
        longest: the length that the caller gave; None to read it from the boundaries, for which the
            host waits.

    Raises:
        TypeError: as `check_bounds`, or the length is no integer.
        ValueError: as `check_bounds`, or the length is known to be too small.
    """
    bounds, found = check_bounds(name, given, total, waits=longest is None)
    if longest is None and found is not None:
        return bounds, found
    most = check_longest(longest_name, longest, bounds)
    if found is not None and most < found:
        raise ValueError(f"{longest_name}: got {most}, wanted at least {found}")
    documents = len(bounds) - 1
    if found is None and not torch.compiler.is_compiling() and documents * most < total:
        raise ValueError(
            f"{longest_name}: got {most}, wanted the length of the longest of {documents} "
            f"documents with {total} tokens together"
        )
    return bounds, most
