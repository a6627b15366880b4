"""Lists of keys by key or by block of keys: the queries that list each of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Inputs, Lengths, Pointer
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.launch import kernel, launch
from flexattn.kernels_triton.sparse import tiles
from flexattn.kernels_triton.sparse.lists import KeyLists, key_lists, load_entries_at, query_of_token
from flexattn.kernels_triton.sparse.weights import Chunk

MOST_BYTES = 2**30
"""Memory for the values of a chunk of queries. A chunk has at least one query."""


class SlotArguments(NamedTuple):
    lengths: Lengths
    slots_ptr: Pointer


@kernel
def _sparse_slots_kernel(args: SlotArguments, META: tl.constexpr):
    # Writes the slot of each packed query.
    slot = tl.program_id(0)
    longest = args.lengths.max_seqlen
    start, length = load_sequence(args.lengths, slot // longest, META.IS_RAGGED_Q)
    if slot % longest < length:
        tl.store(args.slots_ptr + start + slot % longest, slot)


class Listed(NamedTuple):
    """The entries of a chunk by unit, which is a key or a block of keys, in the order of the queries."""

    keys_ptr: Pointer  # int32 [list heads, tokens * entries]: the unit of each entry, or the number of units if it is not seen
    order_ptr: Pointer  # int64, likewise: the entries by unit
    starts_ptr: Pointer  # int32 [list heads, units + 1]: the first of each unit
    heads: int  # list heads; 1: all key heads share the lists
    tokens: int  # tokens of the chunk
    entries: int  # entries of a query
    units: int  # units of all sequences


class EntryArguments(NamedTuple):
    inputs: Inputs
    lists: KeyLists
    chunk: Chunk
    listed: Listed


@kernel
def _sparse_entries_kernel(args: EntryArguments, KV_BLOCK: tl.constexpr, BY_BLOCK: tl.constexpr, META: tl.constexpr):
    # Writes the key or block of each entry of a query. BLOCK_M is at least the heads of a group.
    inputs, lists, listed = args.inputs, args.lists, args.listed
    head = tl.program_id(0) % lists.heads
    local = tl.program_id(0) // lists.heads
    query, _, is_query = query_of_token(args.chunk.first + local, head, args.chunk.slots_ptr, inputs, lists, KV_BLOCK, META)
    target = units_of_token(local, head, listed)
    for first in range(0, listed.entries, META.BLOCK_N):
        place = first + tl.arange(0, META.BLOCK_N)
        if BY_BLOCK:
            blocks = tl.cdiv(query.len_kv, KV_BLOCK)
            is_seen = is_query & (place < query.num_entries // KV_BLOCK)
            index = tl.load(lists.indices_ptr + query.list_row * lists.length + place, mask=is_seen, other=-1)
            is_seen = is_seen & (index >= 0) & (index < blocks)
            unit = query.b * tl.cdiv(inputs.lengths_kv.max_seqlen, KV_BLOCK) + index
        else:
            j, is_seen = load_entries_at(place, lists, query, inputs, KV_BLOCK, META)
            is_seen = is_seen & is_query
            unit = (query.start_kv if META.IS_RAGGED_KV else query.b * inputs.lengths_kv.num_tokens) + j
        tl.store(target + place, tl.where(is_seen, unit, listed.units), mask=place < listed.entries)


@triton.jit
def units_of_token(local, h_kv, listed: Listed):
    # Returns a pointer to the units of a token's entries.
    list_head = tl.where(listed.heads > 1, h_kv, 0)
    return listed.keys_ptr + (tl.cast(list_head, tl.int64) * listed.tokens + local) * listed.entries


class Unit(NamedTuple):
    """A key or a block of keys of one key head, inside a kernel. Its entries are `begin` .. `end` of the order."""

    order_ptr: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    h_kv: tl.tensor


@triton.jit
def unit_at(number, h_kv, listed: Listed):
    list_head = tl.cast(tl.where(listed.heads > 1, h_kv, 0), tl.int64)
    starts = listed.starts_ptr + list_head * (listed.units + 1) + number
    order_ptr = listed.order_ptr + list_head * listed.tokens * listed.entries
    return Unit(order_ptr=order_ptr, begin=tl.load(starts), end=tl.load(starts + 1), h_kv=h_kv)


class ListedRows(NamedTuple):
    """Query heads that list a block, inside a kernel."""

    is_row: tl.tensor
    entry: tl.tensor  # number in the query's list
    local: tl.tensor  # the query's number in the chunk
    b: tl.tensor
    row: tl.tensor  # the query's row in the tensor or, in dense tensors, in the batch entry
    h: tl.tensor


@triton.jit
def listed_rows(unit: Unit, place, in_group, inputs: Inputs, chunk: Chunk, listed: Listed, META: tl.constexpr):
    # Returns head `in_group` of the group, for the queries at `place` in the order.
    tokens = inputs.lengths_q.num_tokens
    is_row = (place < unit.end) & (in_group < inputs.group_size)
    entry = tl.load(unit.order_ptr + place, mask=is_row, other=0).to(tl.int32)  # a chunk has fewer than 2**31 values
    local = entry // listed.entries
    token = chunk.first + local
    return ListedRows(
        is_row=is_row,
        entry=entry % listed.entries,
        local=local,
        b=token * 0 if META.IS_RAGGED_Q else token // tokens,
        row=token if META.IS_RAGGED_Q else token % tokens,
        h=unit.h_kv * inputs.group_size + in_group,
    )


@triton.jit
def row_offsets(x, rows: ListedRows, META: tl.constexpr):
    # Returns the offsets of rows in a tensor with q's layout.
    return (rows.b.to(tl.int64) * x.stride_b + rows.row.to(tl.int64) * x.stride_s + rows.h.to(tl.int64) * x.stride_h) * META.ALIGN


class Chunks:
    """The chunks of a call's queries, with the entries of each chunk by unit."""

    def __init__(self, problem: Problem, bytes_of_query: int, *, by_block: bool, is_sorted: bool):
        x = self.problem = problem
        indices = x.kv_indices
        assert indices is not None
        self.by_block, self.is_sorted = by_block, is_sorted
        self.num_tokens = x.q.shape[:-2].numel()
        self.list_heads, length = indices.shape[-2:]
        self.entries = length if by_block else length * x.kv_block
        self.units = x.batch * cdiv(x.longest_kv, x.kv_block) if by_block else x.num_keys
        self.size = cdiv(self.num_tokens, cdiv(self.num_tokens, max(1, MOST_BYTES // bytes_of_query)))
        self.slots = self._slots()
        make = functools.partial(torch.empty, device=x.device)
        self.keys = make(self.list_heads * self.size * self.entries, dtype=torch.int32)
        if is_sorted:
            self.ordered, self.order = torch.empty_like(self.keys), make(self.keys.shape, dtype=torch.int64)
            self.starts = make((self.list_heads, self.units + 1), dtype=torch.int32)
            self.places = torch.arange(self.units + 1, dtype=torch.int32, device=x.device).repeat(self.list_heads, 1)

    def _slots(self) -> Tensor | None:
        x = self.problem
        if x.q.dim() == 4:
            return None
        slots = torch.full((self.num_tokens,), -1, dtype=torch.int32, device=x.device)
        tile = tiles.entries_tile(x)
        launch(_sparse_slots_kernel, x.batch * x.longest_q, x.device, tile, (SlotArguments(x.lengths_q, slots), x.meta(tile)))
        return slots

    def whole(self) -> Chunk:
        """Returns all queries as one chunk."""
        return Chunk(first=0, slots_ptr=self.slots, p_ptr=None, ds_ptr=None, lines=0)

    def __iter__(self) -> Iterator[tuple[Chunk, Listed]]:
        for first in range(0, self.num_tokens, self.size):
            chunk = self.whole()._replace(first=first)
            yield chunk, self._listed(chunk)

    def _listed(self, chunk: Chunk) -> Listed:
        x = self.problem
        tokens = min(self.size, self.num_tokens - int(chunk.first))
        shape = (self.list_heads, tokens * self.entries)
        keys = self.keys[: shape[0] * shape[1]].view(shape)
        listed = Listed(
            keys_ptr=keys,
            order_ptr=None,
            starts_ptr=None,
            heads=self.list_heads,
            tokens=tokens,
            entries=self.entries,
            units=self.units,
        )
        tile = tiles.entries_tile(x)
        meta = x.meta(tile)
        args = EntryArguments(inputs=x.inputs(meta), lists=key_lists(x), chunk=chunk, listed=listed)
        launch(_sparse_entries_kernel, self.list_heads * tokens, x.device, tile, (args, x.kv_block, self.by_block, meta))
        if not self.is_sorted:
            return listed
        ordered, order = (t[: keys.numel()].view(shape) for t in (self.ordered, self.order))
        torch.sort(keys, dim=1, stable=True, out=(ordered, order))
        starts = torch.searchsorted(ordered, self.places, out_int32=True, out=self.starts)
        return listed._replace(order_ptr=order, starts_ptr=starts)
