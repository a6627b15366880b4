"""Kernels compiled for a GPU that need not be there, and reports on the compiler's code."""

from __future__ import annotations
