"""Attention by the public API, on every backend and device: one suite for all of them."""
