"""Tests of the Gluon kernels for mma.sync: compiled and emulated."""

from __future__ import annotations
