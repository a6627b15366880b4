"""Launching of kernels: the one place that launches, interprets or records a kernel, and its caches."""

from __future__ import annotations

from flexattn.kernels_triton.runtime import sources

sources.read_by_margin()  # must precede the import of the first kernel
