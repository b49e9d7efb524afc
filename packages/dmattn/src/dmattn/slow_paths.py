"""What makes a problem slow before a backend sees it, each in a sentence for a user."""

from dmattn.key_lists import BLOCK_ROWS
from dmattn.problem import Problem

# Lists that hold more than this part of the keys are no longer worth the gathering.
_LONG_LIST = 0.5
_FEW_KEYS = 1024  # up to here the room of the lists, a multiple of 128, says little


def slow_paths(problem: Problem) -> list[str]:
    """The notes on a problem as the public functions make it, for `explain`."""
    return [*_head_dims(problem), *_sinks(problem), *_long_lists(problem)]


def _head_dims(problem: Problem) -> list[str]:
    head_dim, value_dim = problem.k.shape[-1], problem.v.shape[-1]
    if head_dim == value_dim:
        return []
    copied = "value is" if value_dim < head_dim else "query and key are"
    return [
        f"head_dim is {head_dim} of key and {value_dim} of value, so {copied} copied to be padded"
    ]


def _sinks(problem: Problem) -> list[str]:
    if problem.sinks is None:
        return []
    return ["sinks take some passes of torch over the output and lse, beside the kernels' own"]


def _long_lists(problem: Problem) -> list[str]:
    """A selection such as documents, whose lists get as long as the documents."""
    if problem.key_lists is None:
        return []
    room, seqlen_k = problem.key_lists.idx.shape[3], problem.k.shape[1]
    if seqlen_k < _FEW_KEYS or room <= _LONG_LIST * seqlen_k:
        return []
    return [
        f"the selection has lists of up to {min(room, seqlen_k)} of {seqlen_k} keys for each "
        f"{BLOCK_ROWS} rows, and listed keys are gathered one by one; where most keys are kept a "
        "mask, or flash_dmattn_varlen_func for documents, reads them in tiles"
    ]
