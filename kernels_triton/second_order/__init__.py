"""Kernels for forward-mode and second derivatives, in plain Triton. No GPU has run them yet: see `dispatch.triton_second_order`."""
