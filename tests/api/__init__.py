"""Tests of the public functions of `flexattn`."""

from __future__ import annotations
