"""Places of a backward's statistics that are stored in tiles of queries."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of_program(blocks, num_heads):
    # Returns (block, head, batch) of a program of the kernels before and after a backward. The backward begins with the first
    # heads, and these kernels with the last. So each kernel begins with the data that the previous kernel left in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return program % blocks, program // blocks % num_heads, program // blocks // num_heads


@triton.jit
def statistics_tile(b, h, num_heads, place_q, tiles, META: tl.constexpr, SIZE: tl.constexpr):
    # Returns the first tile of a head and a sequence with this `packed_start`. Each sequence begins a new tile, and tile 0 belongs
    # to no query.
    if META.IS_RAGGED_Q:
        return 1 + h * tiles + (place_q + b * SIZE) // SIZE
    else:
        return 1 + (b * num_heads + h) * tiles
