"""What makes a problem slower on the compiled kernels than one like it, in sentences for a user."""

from torch import Tensor

from dmattn.checks import HEAD_DIM_MULTIPLE
from dmattn.problem import Problem, has_rows

_TILE_HEAD_DIMS = (64, 128, 256)
# Over so few keys there are kernels that read masks and biases as they are (docs/kernels/short.md).
_FEW_KEYS, _FEW_KEYS_HEAD_DIMS = 64, (32, 64)
_ODD_ROWS = (
    "attn_bias has rows that do not start on 16 bytes, which Hopper's copy engine does not take: "
    "up to 1.6 times the time. A view of a tensor whose rows are padded to a multiple of 16 bytes "
    "has rows that do"
)


def slow_paths(problem: Problem) -> list[str]:
    """The notes on a checked problem that the kernels take."""
    if _has_few_keys(problem):
        return [*_head_dim(problem, _FEW_KEYS_HEAD_DIMS), *_settings(problem)]
    notes = _head_dim(problem, _TILE_HEAD_DIMS)
    return [*notes, *_masks(problem), *_biases(problem), *_settings(problem)]


def _has_few_keys(problem: Problem) -> bool:
    if problem.packing is not None or problem.key_lists is not None or problem.softcap > 0:
        return False
    if problem.mask is not None and not has_rows(problem.mask):
        return False
    has_rows_of_a_tile = problem.q.shape[1] > 1  # a single one is for decoding
    few_keys, narrow = (
        problem.k.shape[1] <= _FEW_KEYS,
        problem.q.shape[-1] <= _FEW_KEYS_HEAD_DIMS[-1],
    )
    return has_rows_of_a_tile and few_keys and narrow


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
        notes.append(f"head_dim {head_dim} costs as much as {tile}, the next one that has tiles")
    return notes


def _masks(problem: Problem) -> list[str]:
    mask = problem.mask
    if mask is None:
        return []
    if has_rows(mask):
        return [
            "attn_mask has rows of its own: it is packed into bits first, and only tiles of which "
            "it keeps nothing are skipped; of one that is alike for all rows single keys are"
        ]
    nheads, nheads_k = problem.q.shape[-2], problem.k.shape[-2]
    heads = mask.shape[1 if problem.packing is None else 0]
    if heads == nheads != nheads_k:
        group = nheads // nheads_k
        return [
            f"attn_mask differs among the {group} query heads of a key head, so the backward takes "
            f"{group} launches"
        ]
    return []


def _biases(problem: Problem) -> list[str]:
    bias = problem.bias
    if bias is None or not has_rows(bias):
        return []
    mask = problem.mask
    beside_keys = mask is not None and not has_rows(mask)
    if bias.dtype == problem.q.dtype and bias.stride(-1) == 1 and not beside_keys:
        return [] if _starts_rows_on_16_bytes(bias) else [_ODD_ROWS]
    return [
        "attn_bias has rows of its own and is read element by element: it is float32, its last "
        "stride is not 1, or attn_mask is alike for all rows"
    ]


def _starts_rows_on_16_bytes(bias: Tensor) -> bool:
    places = (bias.storage_offset(), *bias.stride()[:-1])
    return all(place * bias.element_size() % 16 == 0 for place in places)


def _settings(problem: Problem) -> list[str]:
    notes = []
    if problem.packing is not None:
        notes.append("packed sequences are not split over the GPU: it alone knows their lengths")
    if problem.softcap > 0:
        notes.append(
            "with softcap the backward uses kernels that may spill registers, except on Hopper "
            "where there is neither a mask nor a bias"
        )
    # Over few keys nothing but the gradient of a bias is a sum of several parts.
    if problem.deterministic and not (_has_few_keys(problem) and problem.bias is None):
        notes.append("deterministic: the parts of gradients are added one after another")
    return notes
