"""Models of transformers and CUDA graphs on a GPU."""
