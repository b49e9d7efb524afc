"""Timings of the whole job, next to PyTorch's own attention backends, in one run."""
