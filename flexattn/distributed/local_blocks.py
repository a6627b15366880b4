"""Block masks of local calls, which count queries and keys from the first ones of their pieces.

A piece may begin inside a block. A local block then overlaps up to four blocks of the full mask. If their kinds differ, a mask_mod
decides, which looks up the kinds of the full mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import ordered
from flexattn.dispatch.neutral import neutral_state
from flexattn.distributed.blocks import MASKED, WHOLE, Blocks
from flexattn.distributed.capture import refuse_making
from flexattn.distributed.layout import Run
from flexattn.distributed.mask import Piece
from flexattn.distributed.origin import Mod


class _LocalBlockMask:
    """A BlockMask with the attributes that `attention` reads."""

    def __init__(self, kinds: Tensor, sizes: tuple[int, int]) -> None:
        self.kv_num_blocks, self.kv_indices = ordered(kinds == MASKED)
        self.full_kv_num_blocks, self.full_kv_indices = ordered(kinds == WHOLE)
        turned = kinds.transpose(-1, -2)
        self.q_num_blocks, self.q_indices = ordered(turned == MASKED)
        self.full_q_num_blocks, self.full_q_indices = ordered(turned == WHOLE)
        self.BLOCK_SIZE = sizes
        self.mask_mod: Mod | None = None


class LocalBlocks:
    """The blocks of a call's pieces. Queries and keys count from the first ones of each piece."""

    def __init__(self, blocks: Blocks, pieces: Sequence[Piece], is_packed: bool, device: torch.device) -> None:
        self.sizes = blocks.size_q, blocks.size_kv
        parts = []
        for piece in pieces:
            kinds = blocks.kinds
            if is_packed and kinds.shape[0] > 1:
                kinds = kinds[piece.document : piece.document + 1]
            keys = Run(piece.kv_start, piece.kv_start + piece.keys.size)
            parts.append((kinds, Run(piece.q_start, piece.q_start + piece.rows.size), keys))
        self.lists_kinds = _stacked([_local_kinds(kinds, rows, keys, self.sizes) for kinds, rows, keys in parts]).to(device)
        self.is_packed = is_packed
        self.beyond: tuple[Tensor, Tensor] | None = None  # positions of the first query and the first key in their blocks
        if any(rows.start % blocks.size_q or keys.start % blocks.size_kv for _, rows, keys in parts):
            cuts = [kinds[..., _blocks_of(rows, self.sizes[0]), _blocks_of(keys, self.sizes[1])] for kinds, rows, keys in parts]
            self.table = _stacked(cuts).to(device)
            first = [(rows.start % blocks.size_q, keys.start % blocks.size_kv) for _, rows, keys in parts]
            offsets_q, offsets_kv = (
                torch.tensor(column, dtype=torch.int32, device="cpu").to(device) for column in zip(*first, strict=True)
            )
            self.beyond = (offsets_q, offsets_kv) if is_packed else (offsets_q[0], offsets_kv[0])
        self.masks: dict[tuple[int, int], tuple[_LocalBlockMask, Tensor | None]] = {}

    def block_mask(self, mask_mod: Mod, heads: Run) -> Any:
        """Returns the block mask of some query heads. mask_mod: a mod of the call's own heads and positions."""
        entry = self.masks.get(heads)
        if entry is None:
            refuse_making(self.lists_kinds.device)
            with neutral_state():
                table = None if self.beyond is None else _select_heads(self.table, heads).contiguous()
                entry = self.masks[heads] = _LocalBlockMask(_select_heads(self.lists_kinds, heads), self.sizes), table
        mask = copy.copy(entry[0])
        mask.mask_mod = mask_mod if entry[1] is None or self.beyond is None else self._exact(mask_mod, entry[1], self.beyond)
        return mask

    def _exact(self, mask_mod: Mod, table: Tensor, beyond: tuple[Tensor, Tensor]) -> Mod:
        (first_q, first_kv), (size_q, size_kv) = beyond, self.sizes
        has_rows, has_heads, is_packed = table.shape[0] > 1, table.shape[1] > 1, self.is_packed

        def exact(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
            row = (i + (first_q[b] if is_packed else first_q)) // size_q
            column = (j + (first_kv[b] if is_packed else first_kv)) // size_kv
            kind = table[b if has_rows else b * 0, h if has_heads else h * 0, row, column]
            return (kind == WHOLE) | ((kind == MASKED) & mask_mod(b, h, i, j, *rest, **named))

        return exact


def _select_heads(kinds: Tensor, heads: Run) -> Tensor:
    return kinds if kinds.shape[1] == 1 else kinds[:, slice(*heads)]


def _blocks_of(run: Run, size: int) -> slice:
    return slice(run.start // size, (run.stop - 1) // size + 1)


def _local_kinds(kinds: Tensor, rows: Run, keys: Run, sizes: tuple[int, int]) -> Tensor:
    """Returns the kinds of local blocks, which count from a piece's first query and key."""
    for dim, run, size in ((-2, rows, sizes[0]), (-1, keys, sizes[1])):
        starts = torch.arange(run.start, run.stop, size, device="cpu")
        first, last = starts // size, ((starts + size).clamp(max=run.stop) - 1) // size
        if torch.equal(first, last):
            kinds = kinds.index_select(dim, first)
            continue
        a, b = kinds.index_select(dim, first), kinds.index_select(dim, last)
        kinds = torch.where(a == b, a, MASKED)
    return kinds


def _stacked(kinds: Sequence[Tensor]) -> Tensor:
    """Returns kinds of several pieces in one tensor, padded with hidden blocks."""
    if len(kinds) == 1:
        return kinds[0]
    rows, columns = (max(t.shape[dim] for t in kinds) for dim in (-2, -1))
    return torch.cat([torch.nn.functional.pad(t, (0, columns - t.shape[-1], 0, rows - t.shape[-2])) for t in kinds])
