"""The operators registered with torch, for compilers, transforms and tensor subclasses."""
