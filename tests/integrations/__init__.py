"""Tests of other libraries' spellings."""

from __future__ import annotations
