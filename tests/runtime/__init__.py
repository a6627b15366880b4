"""Tests of launching: compiled, kept on disk, recorded, interpreted."""

from __future__ import annotations
