"""Triton kernels and their launchers, which take tensors and plain arguments and import nothing from the folders above."""

from __future__ import annotations

from flexattn.kernels_triton.runtime import sources

sources.read_by_margin()  # must precede the import of the first kernel
