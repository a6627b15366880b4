"""Scales of tensors in FP8 as arguments of kernels."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.kernels_triton.common.arguments import Pointer


class Descale(NamedTuple):
    """A `Scale` as a kernel argument."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_block: int
    block_rows: int  # at least 1


class Descales(NamedTuple):
    q: Descale
    k: Descale
    v: Descale
    dout: Descale | None = None  # in a backward
