"""Tests of the emulator of Gluon kernels."""

from __future__ import annotations
