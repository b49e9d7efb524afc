"""The implementations of attention, a folder each, and the registry that chooses among them."""
