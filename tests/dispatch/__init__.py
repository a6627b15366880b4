"""Tests of the choice of a backend and of a kernel family, and of the backends in plain torch."""

from __future__ import annotations
