"""The device code, written in triton. Importing a module of this folder imports triton."""
