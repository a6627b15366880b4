"""Random calls of attention() against an oracle of their own: `python -m tests.fuzz`."""

from __future__ import annotations
