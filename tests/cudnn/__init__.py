"""Tests of cuDNN graphs, their plans and their launchers, without a GPU."""

from __future__ import annotations
