"""Tests of score and mask modifications: from a callable to the code in kernels."""

from __future__ import annotations
