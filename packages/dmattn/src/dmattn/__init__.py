"""Dynamic mask attention for PyTorch: masked and biased attention on CUDA and on the CPU."""

from dmattn.backends.registry import get_available_backends
from dmattn.cache import DynamicMaskCache
from dmattn.functional import explain, flash_dmattn_func, flash_dmattn_func_auto
from dmattn.modules import DynamicMaskAttention
from dmattn.scoring import key_scores
from dmattn.selection import KeySelection, packed_documents, select_keys, sliding_window
from dmattn.utils.mask import create_mask, dynamic_mask, maybe_create_mask, top_window_mask
from dmattn.varlen import explain_varlen, flash_dmattn_varlen_func

__version__ = "0.1.0"

__all__ = [
    "DynamicMaskAttention",
    "DynamicMaskCache",
    "KeySelection",
    "create_mask",
    "dynamic_mask",
    "explain",
    "explain_varlen",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "get_available_backends",
    "key_scores",
    "maybe_create_mask",
    "packed_documents",
    "select_keys",
    "sliding_window",
    "top_window_mask",
]
