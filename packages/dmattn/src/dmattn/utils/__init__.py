"""Masks built from attention biases, and the way from padded batches to packed sequences."""

from dmattn.utils.mask import create_mask, dynamic_mask, maybe_create_mask
from dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    pad_input,
    unpad_input,
    upad_input,
)

__all__ = [
    "create_mask",
    "dynamic_mask",
    "get_unpad_data",
    "index_first_axis",
    "maybe_create_mask",
    "pad_input",
    "unpad_input",
    "upad_input",
]
