"""Masks built from attention biases."""

from dmattn.utils.mask import create_mask, dynamic_mask, maybe_create_mask

__all__ = ["create_mask", "dynamic_mask", "maybe_create_mask"]
