"""dq of the fused backward: fp32 sums in global memory, to which warps add by atomics. `gluon.dq_conversion` converts them to dq.

The sums are in cores of 8 queries and 8 columns: [rows / 8, columns / 8, odd column, row, pair of columns]. So an atomic of a warp
is 128 bytes in a row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_to_sums(sums_ptr, dq, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr):
    # Adds a tile of dq, its columns from FIRST on, to the sums at sums_ptr; columns past HEAD_DIM have none
    ROWS: gl.constexpr = dq.shape[0]
    WIDTH: gl.constexpr = dq.shape[1]
    cores = gl.permute(gl.reshape(dq, [ROWS // 8, 8, WIDTH // 8, 4, 2]), (0, 2, 4, 1, 3))
    values = gl.reshape(cores, [ROWS * WIDTH])
    place = gl.arange(0, ROWS * WIDTH, layout=values.type.layout)
    if WIDTH < HEAD_DIM or WIDTH > HEAD_DIM:
        core = place // 64
        column = FIRST // 8 + core % (WIDTH // 8)
        place = (core // (WIDTH // 8) * (HEAD_DIM // 8) + column) * 64 + place % 64
    if FIRST + WIDTH > HEAD_DIM:
        gl.atomic_add(sums_ptr + place, values, mask=column < HEAD_DIM // 8, sem="relaxed")
    else:
        gl.atomic_add(sums_ptr + place, values, sem="relaxed")
