"""The parts of the comparison of attentions; `compare_attention.py` beside this folder runs it."""
