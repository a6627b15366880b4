"""Direct reads of rows in the memory of several ranks: one kernel exchanges them, without messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(1, 1, 4, 1)
_WORDS = 4096  # words of a program: 32 KiB, all in flight at once
_COLUMNS = 256  # words of one row that a program reads at once
_FIELDS = 8  # numbers of a `Block` in a table
_UNITS = ((8, 2), (8, 1), (4, 1), (2, 1), (1, 1))  # bytes of a word, and words of a load: the widest that fits is used
MOST_OUTS = 4


class Block(NamedTuple):
    """Rows of one source, or if `source` is negative, of the local tensor that belongs to the output.

    They begin at `read` in the source and at `written` in the output, and have one stride in each. `out` and `source` are indices,
    `rows` is a count, and all other fields are in bytes.
    """

    out: int
    source: int
    read: int
    written: int
    rows: int
    width: int
    read_stride: int
    written_stride: int


class Table(NamedTuple):
    """Blocks in the layout that the kernel reads, from `make_table`."""

    blocks: Tensor
    word: int
    align: int
    columns: int


class Addresses(NamedTuple):
    """Addresses of tensors; missing ones repeat the first."""

    first: int
    second: int
    third: int
    fourth: int


class Arguments(NamedTuple):
    outs: Addresses
    local_tensors: Addresses  # for each output, the tensor that blocks with a negative source read
    sources_ptr: Pointer  # int64 [sources], addresses
    blocks_ptr: Pointer


class PullMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    WORD: int
    ALIGN: int
    ROWS: int
    COLUMNS: int


@triton.jit
def _address_at(addresses, which):
    x = addresses
    return tl.where(which < 2, tl.where(which == 0, x.first, x.second), tl.where(which == 2, x.third, x.fourth))


@kernel
def _pull_kernel(args: Arguments, META: tl.constexpr):
    ALIGN: tl.constexpr = META.ALIGN
    block = args.blocks_ptr + 8 * tl.program_id(0)
    which = tl.load(block)
    out = _address_at(args.outs, which)
    source = tl.load(block + 1)
    source = tl.where(source < 0, _address_at(args.local_tensors, which), tl.load(args.sources_ptr + tl.maximum(source, 0)))
    read_at = tl.load(block + 2)
    written_at = tl.load(block + 3)
    count = tl.load(block + 4)
    width = tl.load(block + 5) * ALIGN
    read_stride = tl.load(block + 6)
    written_stride = tl.load(block + 7)
    if META.WORD == 8:
        word: tl.constexpr = tl.pointer_type(tl.int64)
    elif META.WORD == 4:
        word: tl.constexpr = tl.pointer_type(tl.int32)  # type: ignore[no-redef]
    elif META.WORD == 2:
        word: tl.constexpr = tl.pointer_type(tl.int16)  # type: ignore[no-redef]
    else:
        word: tl.constexpr = tl.pointer_type(tl.int8)  # type: ignore[no-redef]
    # If loads are this wide, the addresses of sources and tensors are multiples of 16 bytes.
    read = tl.multiple_of(source.to(word), META.WORD * ALIGN) + read_at * ALIGN
    written = tl.multiple_of(out.to(word), META.WORD * ALIGN) + written_at * ALIGN
    rows = tl.arange(0, META.ROWS)[:, None]
    for start in range(0, width, META.COLUMNS):
        columns = start + tl.arange(0, META.COLUMNS)[None, :]
        inside = (rows < count) & (columns < width)
        words = tl.load(read + rows * (read_stride * ALIGN) + columns, mask=inside)
        tl.store(written + rows * (written_stride * ALIGN) + columns, words, mask=inside)


def make_table(blocks: Sequence[Block], first_source: int) -> Table:
    """Returns a table of blocks, on the CPU, in which programs take turns among the sources, because all of these can send at
    once.

    first_source: the source that the first program reads. If ranks begin with different sources, they do not all read the same one.
    """
    sizes = [n for block in blocks for n in (block.read, block.written, block.width, block.read_stride, block.written_stride)]
    word, align = next((word, align) for word, align in _UNITS if all(n % (word * align) == 0 for n in sizes))
    columns = min(_COLUMNS, triton.next_power_of_2(max((block.width // word for block in blocks), default=0) or 1))
    rows, unit = _WORDS // columns, word * align
    parts: dict[int, list[tuple[int, ...]]] = {}
    for out, source, read, written, count, *row_fields in blocks:
        width, read_stride, written_stride = row_fields
        for first_row in range(0, count, rows):
            places = (read + first_row * read_stride) // unit, (written + first_row * written_stride) // unit
            part = (out, source, *places, min(rows, count - first_row), width // unit, read_stride // unit, written_stride // unit)
            parts.setdefault(source, []).append(part)
    sources = sorted(parts, key=lambda source: (source < first_source, source))
    longest = max(map(len, parts.values()), default=0)
    in_turns = [parts[source][i] for i in range(longest) for source in sources if i < len(parts[source])]
    return Table(torch.tensor(in_turns, dtype=torch.int64, device="cpu").view(-1, _FIELDS), word, align, columns)


def pull_rows(outs: Sequence[Tensor], local_tensors: Sequence[Tensor], sources: Tensor, table: Table) -> None:
    """Writes rows of several sources to `outs`.

    Args:
        outs: up to 4 tensors.
        local_tensors: for each output the tensor that blocks with a negative source read; arbitrary if there are no such blocks.
        sources: int64 [sources], addresses. They and the tensors' addresses are multiples of the bytes of one load.
        table: its blocks on the same device; no two blocks write the same element.
    """
    unit = table.word * table.align
    addresses = [[x.data_ptr() for x in tensors] for tensors in (outs, local_tensors)]
    assert all(address % unit == 0 for tensors in addresses for address in tensors), (addresses, unit)
    meta = PullMeta(WORD=table.word, ALIGN=table.align, ROWS=_WORDS // table.columns, COLUMNS=table.columns)
    written, local = (Addresses(*tensors, *tensors[:1] * (MOST_OUTS - len(tensors))) for tensors in addresses)
    args = Arguments(written, local, sources, table.blocks)
    launch(_pull_kernel, table.blocks.shape[0], sources.device, _TILE, (args, meta))
