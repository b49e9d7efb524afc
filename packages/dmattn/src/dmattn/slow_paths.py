"""Notes for the user on what makes a problem slow, whichever backend computes it."""

from dmattn.key_lists import BLOCK_ROWS
from dmattn.ops.selection import chooses_on_host
from dmattn.problem import Problem

# Lists with room for more than this fraction of the keys get a note: gathering no longer pays.
_LONG_LIST = 0.5
# Below this number of keys no note is given: the room of lists is a multiple of 128 and says little
# about their lengths.
_FEW_KEYS = 1024
_PROBS = (
    "return_attn_probs computes the probabilities outside the kernels, (B, H, Sq, Sk) in memory"
)


def slow_paths(problem: Problem, window_size: int | None, has_probs: bool = False) -> list[str]:
    """The notes on a checked problem with its keys chosen, for `explain`.

    Args:
        problem: the problem.
        window_size: the argument by which its keys were chosen, or None.
        has_probs: whether the call also returns the probabilities.
    """
    notes = [] if window_size is None else _choices_on_host(problem)
    notes += [*_head_dims(problem), *_sinks(problem), *_long_lists(problem)]
    return [*notes, _PROBS] if has_probs else notes


def _choices_on_host(problem: Problem) -> list[str]:
    """A note if running top-w was computed on the host, for a GPU without compiled kernels."""
    if problem.key_lists is None or not problem.is_causal or not chooses_on_host(problem.k):
        return []
    return [
        f"window_size: no compiled kernels serve {problem.k.device}, so the host waits for the "
        "scores and chooses the keys itself, one key after the other"
    ]


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
    """A note if lists have room for many of the keys, as in a selection of long documents."""
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
