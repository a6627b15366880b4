"""Launching of kernels: the one place that launches, interprets or records a kernel, and its caches."""

from __future__ import annotations
