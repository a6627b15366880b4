"""Tests of the checkout itself: documentation, packaging, imports, and the tests' own tools."""

from __future__ import annotations
