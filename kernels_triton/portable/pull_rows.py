"""Rows that lie in the memory of several ranks, read where they are: an exchange by one kernel, without messages."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_TILE = Tile(1, 1, 4, 1)
_WORDS = 4096  # words that a program moves: 32 KiB, all in flight at once
_COLUMNS = 256  # words of one row that a program reads at once
WIDE_BYTES = 16  # bytes of the widest load; rows that begin elsewhere come in words of 8 bytes, or less


class Words(NamedTuple):
    """Places of rows, all in words: row r of a source begins at `r * source_stride + source_column`.

    In out it begins at `r * out_stride`, and those of source n n steps further. width: words of a row.
    """

    width: int
    out_stride: int
    out_step: int
    source_stride: int
    source_column: int


class Arguments(NamedTuple):
    out_ptr: WidePointer
    sources_ptr: Pointer  # int64 [sources], addresses
    moves_ptr: Pointer  # int32 [programs, 4]: the source, its first row, the first row in out, and how many
    words: Words  # in units of META.ALIGN


class PullMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    ROWS: int
    COLUMNS: int
    ALIGN: int


@kernel
def _pull_kernel(args: Arguments, META: tl.constexpr):
    ALIGN: tl.constexpr = META.ALIGN
    move = args.moves_ptr + 4 * tl.program_id(0)
    source = tl.load(move)
    first_read = tl.load(move + 1)
    first_written = tl.load(move + 2)
    count = tl.load(move + 3)
    word: tl.constexpr = args.out_ptr.dtype
    base = tl.multiple_of(tl.load(args.sources_ptr + source).to(word), 16)
    read = base + tl.cast(first_read, tl.int64) * (args.words.source_stride * ALIGN) + args.words.source_column * ALIGN
    written = (
        args.out_ptr + tl.cast(first_written, tl.int64) * (args.words.out_stride * ALIGN) + source * (args.words.out_step * ALIGN)
    )
    rows = tl.arange(0, META.ROWS)[:, None]
    width = args.words.width * ALIGN
    for start in range(0, width, META.COLUMNS):
        columns = start + tl.arange(0, META.COLUMNS)[None, :]
        inside = (rows < count) & (columns < width)
        words = tl.load(read + rows * (args.words.source_stride * ALIGN) + columns, mask=inside)
        tl.store(written + rows * (args.words.out_stride * ALIGN) + columns, words, mask=inside)


def rows_of_program(width: int) -> int:
    """Returns how many rows of so many words one program moves, a power of two."""
    return _WORDS // min(_COLUMNS, triton.next_power_of_2(width))


def pull_rows(out: Tensor, sources: Tensor, moves: Tensor, words: Words) -> None:
    """Writes rows of several sources to `out`.

    Args:
        out: a tensor of whole numbers, the words in which rows are moved; it may begin anywhere.
        sources: int64 [sources], the addresses of their first words, each a multiple of 16.
        moves: int32 [programs, 4], of each program the source, its first row, the first row in out, and how many rows: at most
            `rows_of_program(words.width)`. No row of out is in two of them, if their sources write to the same columns.
        words: where rows lie.
    """
    wide = WIDE_BYTES // out.element_size()
    align = wide if all(n % wide == 0 for n in words) and out.data_ptr() % WIDE_BYTES == 0 else 1
    columns = min(_COLUMNS, triton.next_power_of_2(words.width))
    meta = PullMeta(ROWS=rows_of_program(words.width), COLUMNS=columns, ALIGN=align)
    args = Arguments(out, sources, moves, Words(*(n // align for n in words)))
    launch(_pull_kernel, moves.shape[0], out.device, _TILE, (args, meta))
