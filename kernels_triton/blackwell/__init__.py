"""A forward for sm_100 in Gluon: TMA, tcgen05, tensor memory, warp specialisation. It was emulated, and not run on a GPU."""

from __future__ import annotations
