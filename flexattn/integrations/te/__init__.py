"""TransformerEngine's attention under its own names, over this library's kernels; TransformerEngine need not be installed."""

from __future__ import annotations

from flexattn.integrations.te.score_mod import TEScoreMod

__all__ = ["TEScoreMod"]
