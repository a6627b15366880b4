"""Kernels in plain Triton, for every GPU."""

from __future__ import annotations
