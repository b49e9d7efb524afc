"""The GPU suite: the compiled kernels, through the public Python API, against a float64 oracle."""
