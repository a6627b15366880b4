"""Triton kernels and their launchers. They take tensors and plain arguments and know nothing of what is above this folder."""
