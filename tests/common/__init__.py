"""Tests of the code that both families of Triton kernels share, and of their common requirements."""

from __future__ import annotations
