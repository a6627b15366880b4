"""Tests of the benchmark, of committed results and of the playground."""

from __future__ import annotations
