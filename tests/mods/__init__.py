"""Tests of score and mask modifications: from a callable to what kernels inline."""

from __future__ import annotations
