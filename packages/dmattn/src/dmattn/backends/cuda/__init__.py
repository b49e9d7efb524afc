"""Attention on NVIDIA GPUs, by the kernels of dmattn_kernels."""
