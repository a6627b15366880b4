"""Kernels for sm_100 in Gluon: TMA, tcgen05, tensor memory, warp specialisation. They were emulated, and never run on a GPU."""

from __future__ import annotations
