"""A backward's programs: the block of queries or keys that each has, and what it reads of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.preprocess import statistics_tile
from flexattn.kernels_triton.common.primitives import load_large, packed_start
from flexattn.kernels_triton.hopper.block_ranges import blocks_of_keys, blocks_of_queries
from flexattn.kernels_triton.hopper.tile_scheduler import Sequence, block_of, sequence_of


class BackwardWork(NamedTuple):
    """The programs, one for each block of a head's queries or keys, and their order."""

    table_ptr: Any  # `work_table`'s; None without lengths
    num_heads: int
    group_size: int
    blocks: int
    heads_per_section: int


class LargeLse(NamedTuple):
    """What `load_large` reads: `large_rows`."""

    is_any_ptr: Any
    lse_ptr: Any


class Block(NamedTuple):
    """One program's block of queries or keys, and the blocks of the other side that it goes through."""

    first_row: Any
    b: Any
    h: Any  # of a block of keys, the first of its group
    h_kv: Any
    sequence: Sequence
    shift: Any  # the band's diagonal
    large: Any  # `load_large`
    first_head: Any  # the batch element's, in dropout's count
    num_blocks: Any  # of one head
    block_range: Any  # what `key_block` or `query_block` finds them by
    first_statistics: Any  # the first tile of the head's statistics


@gluon.jit
def _large(args, sequence: Sequence, META: gl.constexpr):
    num_tokens = args.lengths_q.num_tokens
    return load_large(args.large.is_any_ptr, args.large.lse_ptr, args.work.num_heads, num_tokens, sequence.start_q, META)


@gluon.jit
def query_block_of_program(args, META: gl.constexpr):
    # args: of a kernel for dq
    work, band = args.work, args.band
    m_block, h, b = block_of(work.table_ptr, work.num_heads, work.blocks, work.heads_per_section, True, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    shift = (len_kv - len_q) * band.bottom_right
    first_row = gl.minimum(m_block * META.BLOCK_M, len_q)
    num_blocks, block_range = blocks_of_keys(first_row, b, h, len_kv, shift, band.left, band.right, args.lists, META)
    num_blocks = gl.where(first_row < len_q, num_blocks, 0)
    place_q = packed_start(args.lengths_q, b, sequence.start_q)
    return Block(
        first_row=first_row,
        b=b,
        h=h,
        h_kv=h // work.group_size,
        sequence=sequence,
        shift=shift,
        large=_large(args, sequence, META),
        first_head=b * work.num_heads,
        num_blocks=num_blocks,
        block_range=block_range,
        first_statistics=statistics_tile(b, h, work.num_heads, place_q, args.tiles_of_statistics, META, META.STATISTICS),
    )


@gluon.jit
def key_block_of_program(args, META: gl.constexpr):
    # args: of a kernel for dk and dv
    work, band = args.work, args.band
    heads = work.num_heads // work.group_size
    n_block, h_kv, b = block_of(work.table_ptr, heads, work.blocks, work.heads_per_section, False, META)
    sequence = sequence_of(args.lengths_q, args.lengths_kv, b, META)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    shift = (len_kv - len_q) * band.bottom_right
    first_row = gl.minimum(n_block * META.BLOCK_N, len_kv)
    h = h_kv * work.group_size
    num_blocks, block_range = blocks_of_queries(first_row, b, h, len_q, shift, band.left, band.right, args.lists, META)
    place_q = packed_start(args.lengths_q, b, sequence.start_q)
    return Block(
        first_row=first_row,
        b=b,
        h=h,
        h_kv=h_kv,
        sequence=sequence,
        shift=shift,
        large=_large(args, sequence, META),
        first_head=b * work.num_heads,
        num_blocks=gl.where(first_row < len_kv, num_blocks, 0),
        block_range=block_range,
        first_statistics=statistics_tile(b, h, work.num_heads, place_q, args.tiles_of_statistics, META, META.BLOCK_M),
    )
