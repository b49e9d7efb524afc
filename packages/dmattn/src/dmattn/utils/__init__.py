"""Masks built from attention biases, and conversion between padded batches and packed sequences."""

from dmattn.utils.mask import create_mask, dynamic_mask, maybe_create_mask, top_window_mask
from dmattn.utils.padding import (
    get_unpad_data,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
    upad_input,
)

__all__ = [
    "create_mask",
    "dynamic_mask",
    "get_unpad_data",
    "index_first_axis",
    "index_put_first_axis",
    "maybe_create_mask",
    "pad_input",
    "top_window_mask",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
    "upad_input",
]
