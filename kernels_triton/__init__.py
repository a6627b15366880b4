"""Triton kernels and their launchers, which take tensors and plain arguments and import nothing from the folders above."""

from __future__ import annotations
