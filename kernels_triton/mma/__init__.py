"""Kernels in Gluon for GPUs with mma.sync and cp.async: A100, A10, L4, RTX 30 and 40; compute capability 8.0, 8.6, 8.9 and 12.0."""

from __future__ import annotations
