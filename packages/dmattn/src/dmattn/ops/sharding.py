"""The rules by which DTensor may shard attention, and the choice of keys, over a device mesh.

Attention is independent over batch entries and over heads, so it may be sharded along either of
them; key/value heads stay on the rank of the query heads that they serve. Packed sequences are
computed whole on every rank. The rules are registered when a DTensor is first seen, since importing
DTensor takes a while.
"""

import functools
import sys
from typing import Any

import torch

from dmattn.ops.arguments import AXES, BATCH, BWD_NAMES, FWD_NAMES, HEADS
from dmattn.problem import Needs

_DTENSOR = "torch.distributed.tensor"


def register_for(*tensors: object) -> None:
    """Register the rules if one of these is a DTensor. Does nothing while torch compiles."""
    if not torch.compiler.is_compiling() and any(map(is_dtensor, tensors)):
        _register()


def is_dtensor(t: object) -> bool:
    """Whether t is a DTensor. Does not import DTensor: whoever has one has already imported it."""
    kind = getattr(sys.modules.get(_DTENSOR), "DTensor", None)
    return kind is not None and isinstance(t, kind)


def refuse_dtensors(of_what: str, **arguments: object) -> None:
    """Raise TypeError if an argument is a DTensor, although a plain tensor is wanted.

    Args:
        of_what: the words after "a plain tensor" in the error message, such as " for a state".
        arguments: the arguments by name.
    """
    for name, value in arguments.items():
        if is_dtensor(value):
            raise TypeError(
                f"{name}: got a DTensor, wanted a plain tensor{of_what}, such as what its "
                "to_local() returns"
            )


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(torch.ops.dmattn.fwd.default)(_forward_rules)
    register_sharding(torch.ops.dmattn.bwd.default)(_backward_rules)
    register_sharding(torch.ops.dmattn.select_keys.default)(_selection_rules)


def _forward_rules(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The rules of dmattn::fwd: placements of its results and arguments along one mesh dimension.

    As `register_sharding` expects them: a list of (placements of results, of arguments).
    """
    rules = []
    named = dict(zip(FWD_NAMES, arguments, strict=False))
    for split in _splits(named):
        places = [_place(name, value, split) for name, value in named.items()]
        outputs = [_shard(AXES[name], split) for name in ("out", "lse")]
        with_rest = named.get("bias") is not None
        outputs.append(_shard(AXES["lse_rest"] if with_rest else None, split))
        rules.append((outputs, places))
    return rules


def _backward_rules(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    from torch.distributed.tensor import Partial

    named = dict(zip(BWD_NAMES, arguments, strict=False))
    rules = []
    for split in _splits(named):
        places = [_place(name, value, split) for name, value in named.items()]
        outputs = []
        for name, need in zip(Needs._fields, named["needs"], strict=True):
            operand = named.get(name)
            if not need or operand is None:
                outputs.append(_shard(None, split))
                continue
            place = _place(name, operand, split)
            # If ranks share an operand, their gradients of it have to be added up.
            shared = split is not None and place.is_replicate()
            outputs.append(Partial() if shared else place)
        rules.append((outputs, places))
    return rules


def _selection_rules(
    scores: Any, key_mask: Any, window: int, seqlen_q: int, is_causal: bool, *others: Any
) -> list[tuple[list[Any], list[Any]]]:
    """The rules of dmattn::select_keys.

    Its results have the larger batch, and the larger number of heads, of scores and key_mask.
    """
    rules = []
    for split in _even_splits(scores, key_mask):
        result = _shard((BATCH, HEADS), split)
        full = result if is_causal else _shard(None, split)
        places = [_place("scores", t, split) for t in (scores, key_mask)]
        rest = [_place("cu_seqlens", t, split) for t in others]
        rules.append(([result, result, result, full], [*places, None, None, None, *rest]))
    return rules


def _even_splits(*tensors: Any) -> list[int | None]:
    """The splits of tensors ({B|1}, {heads|1}, Sk) into equal parts: None, BATCH, HEADS.

    None, which is no split at all, is always among them.
    """
    given = [t for t in tensors if t is not None]
    ranks = max(given[0].mesh.shape)
    splits: list[int | None] = [None]
    for split in (BATCH, HEADS):
        size = max(t.shape[split] for t in given)
        if size > 1 and size % ranks == 0:
            splits.append(split)
    return splits


def _splits(named: dict[str, Any]) -> list[int | None]:
    """The splits of attention into equal parts: None (no split), and BATCH or HEADS if possible."""
    if named.get("cu_seqlens_q") is not None:
        return [None]
    ranks = max(named["q"].mesh.shape)
    splits: list[int | None] = [None]
    if named["q"].shape[0] % ranks == 0:
        splits.append(BATCH)
    if named["k"].shape[2] % ranks == 0:
        splits.append(HEADS)
    return splits


def _place(name: str, value: Any, split: int | None) -> Any:
    """The placement of an argument: sharded, or whole on all ranks if it is broadcast there."""
    dims = AXES.get(name)
    if value is None or name == "needs" or not hasattr(value, "shape"):
        return None
    if dims is None or split is None:
        return _shard(None, split)
    dim = dims[split]
    stands_for_none = name != "sinks" and len(value.shape) < 3
    whole = dim is None or stands_for_none or value.shape[dim] == 1
    return _shard(None if whole else dims, split)


def _shard(dims: tuple[int | None, int] | None, split: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    dim = None if dims is None or split is None else dims[split]
    return Replicate() if dim is None else Shard(dim)
