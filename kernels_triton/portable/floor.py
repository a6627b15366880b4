"""The check that every row's lse is above a floor: one kernel with a device-side assertion, which the host does not wait for."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import asserting_kernel, launch

_TILE = Tile(2048, 1, 4, 1)  # rows of a program; no keys


class Arguments(NamedTuple):
    lse_ptr: Pointer  # fp32, num_rows contiguous values
    num_rows: int


class FloorMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    ROWS: int
    FLOOR: float
    TEXT: str  # the assertion's message


@asserting_kernel
def _floor_kernel(args: Arguments, META: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * META.ROWS + tl.arange(0, META.ROWS)
    lse = tl.load(args.lse_ptr + rows, mask=rows < args.num_rows, other=0.0)
    is_low = lse <= META.FLOOR  # False for NaN, for example from a NaN in q
    tl.device_assert(tl.max(is_low.to(tl.int32), 0) == 0, META.TEXT)


def check_floor(lse: Tensor, floor: float, text: str) -> None:
    """Fails a device-side assertion with the message `text` if a value of `lse`, fp32 and contiguous, is not above `floor`."""
    rows = lse.numel()
    args = Arguments(lse_ptr=lse, num_rows=rows)
    launch(_floor_kernel, cdiv(rows, _TILE.block_m), lse.device, _TILE, (args, FloorMeta(_TILE.block_m, floor, text)))
