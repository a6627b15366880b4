"""Kernels in Gluon for sm_90: TMA, wgmma, warp specialisation."""

from __future__ import annotations
