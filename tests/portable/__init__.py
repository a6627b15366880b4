"""Tests of the portable Triton kernels."""

from __future__ import annotations
