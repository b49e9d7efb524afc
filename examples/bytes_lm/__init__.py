"""The parts of the training example; `train_bytes_lm.py` beside this folder puts them together."""
