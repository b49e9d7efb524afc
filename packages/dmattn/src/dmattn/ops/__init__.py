"""The torch operators dmattn::fwd and dmattn::bwd, and their CPU and CUDA implementations."""
