"""Tests of the Gluon kernels for sm_100: compiled and emulated."""

from __future__ import annotations
