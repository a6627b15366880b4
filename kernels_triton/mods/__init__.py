"""Lowering of a mod's graph to Triton functions, and block masks and tables that these compute before a kernel."""

from __future__ import annotations
