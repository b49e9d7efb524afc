"""Attention on the CPU, in torch operations, with memory linear in both lengths."""
