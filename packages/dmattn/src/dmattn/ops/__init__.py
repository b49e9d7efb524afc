"""The operators that torch knows, for compilers, transforms and tensor subclasses."""
