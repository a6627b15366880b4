"""Tests of the subcommands of `python -m flexattn`."""

from __future__ import annotations
