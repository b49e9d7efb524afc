"""Recognising the attention pattern that one of transformers' mask functions describes.

transformers describes a mask by a Python function of (batch, head, query, key) indices, a closure
made by one of the factories of `transformers.masking_utils`. The code object of a closure shows
which factory made it, and its cells hold the arguments of the factory. Functions from anywhere else
are not recognised.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils as hf

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """Which keys the rows of a call may see, apart from padding.

    Attributes:
        is_causal: True: a row sees no key behind its own position. False: every row sees every key,
            and all other attributes are None.
        window: a row sees only the last `window` positions, its own included.
        chunk: positions are cut into chunks of this size, and a row sees only its own chunk.
        left_padding: integer (B,), the position at which the first chunk of each sequence begins;
            given together with chunk.
        document_ids: integer (B, S), a number for each position; a row sees only keys with the
            number of its own position. Along each sequence the numbers rise from 0, by at most 1
            from one position to the next.
    """

    is_causal: bool
    window: int | None = None
    chunk: int | None = None
    left_padding: Tensor | None = None
    document_ids: Tensor | None = None


def recognise(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function; None if it is not known."""
    if function is hf.bidirectional_mask_function:
        return Pattern(is_causal=False)
    conditions = _conditions(function)
    # With a window or documents alone, rows also see keys behind them: such patterns are not
    # recognised.
    if conditions is None or not conditions.get("is_causal"):
        return None
    if "chunk" in conditions and "document_ids" in conditions:
        # As in older releases, chunks are counted from the start of the sequence, not of documents.
        ids = conditions["document_ids"]
        position = torch.arange(ids.shape[1], device=ids.device)
        conditions["document_ids"] = _cut(
            ids, position, conditions.pop("left_padding"), conditions.pop("chunk")
        )
    return Pattern(**conditions)


def _conditions(function: MaskFunction) -> dict[str, Any] | None:
    """The attributes of the `Pattern` of a mask function, as far as it sets them; or None."""
    if function is hf.causal_mask_function:
        return {"is_causal": True}
    made_with = _cells(function)
    if _is_made_by(_SLIDING_WINDOW, function):
        return {"window": made_with["sliding_window"]}
    if _is_made_by(_CHUNKED, function):
        return {"chunk": made_with["chunk_size"], "left_padding": made_with["left_padding"]}
    if _is_made_by(_PACKED, function):
        return {"document_ids": made_with["packed_sequence_mask"]}
    if not _is_made_by(_AND, function):
        return None
    parts = made_with["mask_functions"]
    if len(parts) == 2 and _is_made_by(_PACKED, parts[0]) and _is_made_by(_REMAPPED, parts[1]):
        return _in_documents(*parts)
    together: dict[str, Any] = {}
    for part in parts:
        found = _conditions(part)
        if found is None or not together.keys().isdisjoint(found):
            return None
        together |= found
    return together


def _in_documents(packed: MaskFunction, remapped: MaskFunction) -> dict[str, Any] | None:
    """The attributes for packed documents: the same document, and a condition within documents.

    The condition is on positions counted from the start of each document. These rise by 1 within a
    document, so causality and windows mean the same as for positions in the whole sequence. Chunks
    within documents are treated as documents.
    """
    inner = _conditions(_cells(remapped)["mask_function"])
    if inner is None or "document_ids" in inner:
        return None
    ids = _cells(packed)["packed_sequence_mask"]
    chunk, left_padding = inner.pop("chunk", None), inner.pop("left_padding", None)
    if chunk is not None:
        ids = _cut(ids, _cells(remapped)["position_ids"], left_padding, chunk)
    return inner | {"document_ids": ids}


def _cut(ids: Tensor, position: Tensor, left_padding: Tensor, chunk: int) -> Tensor:
    """(B, S): document ids after documents are cut wherever a chunk of positions begins."""
    starts = ((position - left_padding[:, None]) % chunk == 0).expand(ids.shape).clone()
    starts[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    starts[:, 0] = False
    return starts.cumsum(1)


def _cells(function: MaskFunction) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _is_made_by(code: Any, function: MaskFunction) -> bool:
    return getattr(function, "__code__", None) is code


def _code(closure: Any) -> Any:
    """The code object, which is the same for all closures made by one factory."""
    return closure.__code__


_AND = _code(hf.and_masks(hf.causal_mask_function))
_SLIDING_WINDOW = _code(hf.sliding_window_overlay(1))
_CHUNKED = _code(hf.chunked_overlay(1, None))
_PACKED = _code(hf.packed_sequence_mask_function(None))
# Releases without it count the positions of packed documents from the start of the sequence.
_remap = getattr(hf, "remap_positions_for_packed_sequence", None)
_REMAPPED = object() if _remap is None else _code(_remap(hf.causal_mask_function, None))
