"""The implementations of attention, one folder each, and the registry that chooses among them."""
