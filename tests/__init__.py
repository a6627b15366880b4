"""The tests, in folders that are called as what they test, with what they share in `support`."""

from __future__ import annotations
