"""Launching: one place that launches, interprets or records a kernel, and what it keeps."""

from __future__ import annotations
