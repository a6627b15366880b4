"""Kernels for forward-mode and second derivatives, in plain Triton."""
