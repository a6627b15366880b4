"""Tests of what users call: `flexattn` itself."""

from __future__ import annotations
