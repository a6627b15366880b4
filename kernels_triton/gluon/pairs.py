"""Tiles of a head dim in one or two parts, with a second part if QK1 > 0: their loads and stores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.gluon.descriptors import Step, load_rows, ragged_descriptor, store_rows
from flexattn.kernels_triton.gluon.operands import allocate_blocks, allocate_tiles


class Pair(NamedTuple):
    """The descriptors, or the tiles, of both parts; without a second part the first is repeated."""

    first: TensorDescriptor | gl.shared_memory_descriptor | None
    second: TensorDescriptor | gl.shared_memory_descriptor | None


class Origin(NamedTuple):
    """First row of a head of one sequence, as an argument of `load_rows`."""

    token: gl.tensor
    head: gl.tensor


@gluon.jit
def origin_of(step: Step, start, h, b):
    # start: the sequence's first token
    return Origin(token=start + b * step.tokens, head=h + b * step.heads)


@gluon.jit
def origin_of_head(origin: Origin, heads):
    # Returns the origin `heads` heads later
    return Origin(token=origin.token, head=origin.head + heads)


@gluon.jit
def load_head(descriptor, origin: Origin, head, length, row, barrier, tile):
    # Loads rows of the head that is `head` heads after the origin, see `load_rows`
    load_rows(descriptor, origin.token, length, row, origin.head + head, 0, barrier, tile)


@gluon.jit
def allocate_pair(NUM: gl.constexpr, descriptors: Pair, META: gl.constexpr):
    first = allocate_tiles(NUM, descriptors.first)
    if META.QK1 > 0:
        return Pair(first=first, second=allocate_tiles(NUM, descriptors.second))
    else:
        return Pair(first=first, second=first)


@gluon.jit
def allocate_key_pair(descriptors: Pair, META: gl.constexpr):
    first = allocate_blocks(META.STAGES, descriptors.first, META.BLOCK_N)
    if META.QK1 > 0:
        return Pair(first=first, second=allocate_blocks(META.STAGES, descriptors.second, META.BLOCK_N))
    else:
        return Pair(first=first, second=first)


def pair_descriptor(x: Tensor, rows: int, widths: tuple[int, int], heads: int = 1) -> Pair:
    """Returns the descriptors of both parts of x, in tiles of `rows` tokens. widths: of the parts; the second is 0 if there is one
    part.
    """
    first = ragged_descriptor(x, rows, widths[0], heads)
    return Pair(first=first, second=ragged_descriptor(x, rows, widths[1], heads) if widths[1] else first)


@gluon.constexpr_function
def pair_bytes(first, second, QK1):
    # Returns bytes of a tile of both parts. The arguments are numbers, because Triton 3.6 passes tuples to such a function without
    # fields.
    return first + (second if QK1 > 0 else 0)


@gluon.jit
def load_pair(descriptors: Pair, origin: Origin, length, row, barrier, tiles: Pair, slot, META: gl.constexpr):
    load_rows(descriptors.first, origin.token, length, row, origin.head, 0, barrier, tiles.first.index(slot))
    if META.QK1 > 0:
        load_rows(descriptors.second, origin.token, length, row, origin.head, META.QK0, barrier, tiles.second.index(slot))


@gluon.jit
def store_pair(descriptors: Pair, origin: Origin, length, row, tiles: Pair, slot, META: gl.constexpr):
    store_rows(descriptors.first, origin.token, length, row, origin.head, 0, tiles.first.index(slot))
    if META.QK1 > 0:
        store_rows(descriptors.second, origin.token, length, row, origin.head, META.QK0, tiles.second.index(slot))
