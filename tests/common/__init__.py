"""Tests of what both families of Triton kernels share, and of what both must do."""

from __future__ import annotations
