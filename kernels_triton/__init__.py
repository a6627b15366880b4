"""Triton kernels and their launchers. They take tensors and plain arguments, and import nothing of the folders above."""
