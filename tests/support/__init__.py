"""Code that tests share; none of it is a test."""

from __future__ import annotations
