"""Tests that only a GPU can run."""

from __future__ import annotations
