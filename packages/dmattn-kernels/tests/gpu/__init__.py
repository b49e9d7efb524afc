"""The GPU suite: the compiled kernels, through the public Python API, against a float64 oracle."""

OUT_OF_MEMORY = "OutOfMemoryError"  # torch's: in the reason of a test that found no memory
