"""Notes for the user on what makes a problem slower on the compiled kernels than similar ones."""

from torch import Tensor

from dmattn.backends.cuda import few_keys
from dmattn.backends.cuda.attention import is_decoded
from dmattn.backends.cuda.bias_rows import copies, starts_rows_on_16_bytes
from dmattn.backends.cuda.few_keys import has_few_keys
from dmattn.backends.cuda.outputs import is_written_in_place
from dmattn.checks import HEAD_DIM_MULTIPLE
from dmattn.problem import Problem, has_rows

_TILE_HEAD_DIMS = (64, 128, 256)
_PADDED_VIEW = (
    "a view of a tensor whose rows are padded to a multiple of 16 bytes, with keys side by side, "
    "is read as it is"
)
_ODD_ROWS = (
    "attn_bias has rows that do not start on 16 bytes, which Hopper's copy engine does not take: "
    f"up to 1.6 times the time; {_PADDED_VIEW}"
)


def slow_paths(problem: Problem) -> list[str]:
    """The notes on a checked problem that the kernels take."""
    if has_few_keys(problem):
        return [*_head_dim(problem, few_keys.HEAD_DIMS), *_settings(problem)]
    notes = _head_dim(problem, _TILE_HEAD_DIMS)
    notes += [*_masks(problem), *_lists(problem), *_biases(problem)]
    return [*notes, *_settings(problem)]


def slow_outputs(problem: Problem, out: Tensor) -> list[str]:
    """The notes on an `out` of the caller that the kernels do not write directly."""
    head_dim = problem.q.shape[-1]
    if out.shape[-1] != head_dim or head_dim % HEAD_DIM_MULTIPLE != 0:
        return ["out is filled by a copy, from an output whose head_dim is padded"]
    if out.numel() > 0 and not is_written_in_place(out, is_decoded(problem)):
        return ["out has rows that do not start on 16 bytes, so it is filled by a copy"]
    return []


def _head_dim(problem: Problem, tiles: tuple[int, ...]) -> list[str]:
    head_dim = problem.q.shape[-1]
    notes = []
    if head_dim % HEAD_DIM_MULTIPLE != 0:
        notes.append(
            f"head_dim {head_dim} is no multiple of {HEAD_DIM_MULTIPLE}, so query, key and value "
            "are copied to be padded"
        )
    if head_dim not in tiles:
        tile = next(size for size in tiles if head_dim <= size)
        notes.append(
            f"head_dim {head_dim} costs as much as {tile}, the next one that has tiles in all "
            "kernels; on Hopper some have them for 96 and 192, too"
        )
    return notes


def _masks(problem: Problem) -> list[str]:
    mask = problem.mask
    if mask is None:
        return []
    if has_rows(mask):
        return [
            "attn_mask has rows of its own, or a selection became such a mask: it is packed into "
            "bits first, and only tiles of which it keeps nothing are skipped; of a mask that is "
            "alike for all rows single keys are"
        ]
    bias = problem.bias
    if problem.packing is None and bias is not None and has_rows(bias) and bias.shape[-1] > 1:
        return [
            "attn_mask is alike for all rows, but attn_bias is not: only tiles of which the mask "
            "keeps nothing are skipped; without such a bias single keys are"
        ]
    return _launches_of_heads(
        "attn_mask differs", mask.shape[1 if problem.packing is None else 0], problem
    )


def _lists(problem: Problem) -> list[str]:
    if problem.key_lists is None:
        return []
    heads = problem.key_lists.end.shape[1]
    notes = _launches_of_heads("the kept keys differ", heads, problem)
    if notes or problem.bias is None or has_rows(problem.bias):
        return notes
    return _launches_of_heads("on Hopper: attn_bias differs", problem.bias.shape[1], problem)


def _launches_of_heads(what: str, heads: int, problem: Problem) -> list[str]:
    nheads, nheads_k = problem.q.shape[-2], problem.k.shape[-2]
    if not heads == nheads != nheads_k:
        return []
    group = nheads // nheads_k
    return [
        f"{what} among the {group} query heads of a key head, so the backward takes {group} "
        "launches"
    ]


def _biases(problem: Problem) -> list[str]:
    bias = problem.bias
    if bias is None or not has_rows(bias):
        return []
    notes = []
    if copies(problem, backward=False):
        notes.append(f"attn_bias is copied first; {_PADDED_VIEW}")
    elif bias.stride(-1) != 1:
        notes.append("attn_bias is read number by number: its last stride is not 1")
    elif not (_starts_on_16_bytes(bias) and starts_rows_on_16_bytes(bias)):
        notes.append(_ODD_ROWS)
        if copies(problem, backward=True):
            notes.append("attn_bias is copied first in the backward")
    if bias.dtype != problem.q.dtype:
        notes.append(
            "attn_bias has rows of its own and is float32: except on Hopper it is read number by "
            "number, as it is there in a backward beside a mask with rows or of single query heads"
        )
    return notes


def _starts_on_16_bytes(bias: Tensor) -> bool:
    return bias.storage_offset() * bias.element_size() % 16 == 0


def _settings(problem: Problem) -> list[str]:
    notes = []
    if problem.packing is not None:
        notes.append("packed sequences are not split over the GPU: it alone knows their lengths")
    if problem.softcap > 0:
        notes.append(
            "with softcap the backward uses kernels that may spill registers, except on Hopper "
            "without a mask, a bias and kept keys (a sliding window has others above head_dim 128)"
        )
    # With few keys only the gradient of a bias is a sum of several parts.
    if problem.deterministic and not (has_few_keys(problem) and problem.bias is None):
        notes.append("deterministic: the parts of gradients are added one after another")
    return notes
