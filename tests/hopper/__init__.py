"""Tests of the Gluon kernels for sm_90: compiled, emulated, and run if there is such a GPU."""

from __future__ import annotations
