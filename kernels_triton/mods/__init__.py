"""From a mod's graph to Triton functions, and what is computed with these ahead of a kernel."""

from __future__ import annotations
