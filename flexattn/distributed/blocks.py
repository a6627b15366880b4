"""Block masks of full sequences, on the host. Plans use them to balance work and to find the keys to fetch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.block_mask import Kept, block_lists, checked_tensors
from flexattn.dispatch.neutral import neutral_state
from flexattn.distributed import capture
from flexattn.distributed.layout import Run, joined

HIDDEN, MASKED, WHOLE = 0, 1, 2  # kinds of a block: no query sees a key, the mask_mod decides, or each query sees each key
_NAME = "_flexattn_kinds"


@dataclass(frozen=True, eq=False)
class Blocks:
    """A block mask of the full sequence, on the host. `kinds` is int8 [b | 1, h | 1, blocks of queries, blocks of keys].

    mask_mod is None in an unpickled plan.
    """

    kinds: Tensor
    size_q: int
    size_kv: int
    mask_mod: Callable[..., object] | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def digest(self) -> str:
        """Returns a text that is equal for equal blocks, in any process."""
        shape = f"{tuple(self.kinds.shape)} {self.size_q} {self.size_kv}".encode()
        return hashlib.sha256(shape + self.kinds.contiguous().numpy().tobytes()).hexdigest()[:16]

    @functools.cached_property
    def seen(self) -> Tensor:
        """Blocks that at least one head sees a part of: bool [b | 1, blocks of queries, blocks of keys]."""
        return (self.kinds != HIDDEN).any(1)

    def __getstate__(self) -> dict[str, object]:
        return {"kinds": self.kinds, "size_q": self.size_q, "size_kv": self.size_kv, "mask_mod": None}

    def keys(self, row: int | None, queries: Run, keys: Run) -> Iterator[Run]:
        """Yields the runs within `keys` that a head of some query may see. row: a row of the batch. None: all rows."""
        if not queries.size or not keys.size:
            return
        seen = self.seen.any(0) if row is None else self.seen[row if self.seen.shape[0] > 1 else 0]
        first, last = keys.start // self.size_kv, (keys.stop - 1) // self.size_kv + 1
        rows = slice(queries.start // self.size_q, (queries.stop - 1) // self.size_q + 1)
        columns = seen[rows, first:last].any(0).nonzero()[:, 0].tolist()
        runs = joined(Run(first + column, first + column + 1) for column in columns)
        for run in runs:
            yield Run(max(run.start * self.size_kv, keys.start), min(run.stop * self.size_kv, keys.stop))

    def counts(self, row: int | None, first: Tensor, last: Tensor) -> Tensor:
        """Returns for each query how many keys in [first, last) lie in blocks that it sees a part of.

        The counts are float64: the mean over all heads and, if row is None, over all rows of the batch.
        """
        kinds = self.kinds if row is None else self.kinds[row : row + 1] if self.kinds.shape[0] > 1 else self.kinds
        share = (kinds != HIDDEN).double().mean((0, 1))  # [blocks of queries, blocks of keys]
        before = torch.nn.functional.pad(share.cumsum(1) * self.size_kv, (1, 0))  # visible keys before each block
        share = torch.nn.functional.pad(share, (0, 1))
        block = torch.arange(len(first), device="cpu") // self.size_q

        def up_to(key: Tensor) -> Tensor:
            column = key // self.size_kv
            return before[block, column] + share[block, column] * (key % self.size_kv)

        return up_to(last.clamp(min=first)) - up_to(first)


def read_blocks(block_mask: Any, longest: tuple[int, int]) -> Blocks:
    """Returns the blocks of a BlockMask. They are read on the host once for each mask.

    longest: numbers of queries and keys that the mask must cover. Raises TypeError if it is no mask, ValueError if it is too small.
    """
    counts = getattr(block_mask, "kv_num_blocks", None)
    batch, heads = (1, 1) if counts is None else counts.shape[:2]
    device = torch.device("cpu") if counts is None else counts.device
    tensors, block_size = checked_tensors(block_mask, batch, heads, longest, device)
    kept: Kept | None = getattr(block_mask, _NAME, None)
    if kept is None or not kept.is_current(tensors) or kept.value.mask_mod is not block_mask.mask_mod:
        capture.refuse_making(device)
        # imported here, so that importing flexattn does not import the reference
        from flexattn.dispatch.reference import block_kinds

        with neutral_state():
            lists = block_lists(block_mask, batch, heads, *longest, device)
            kept = Kept(tensors, Blocks(block_kinds(lists.tensors).cpu(), *block_size, block_mask.mask_mod))
        object.__setattr__(block_mask, _NAME, kept)
    blocks: Blocks = kept.value
    return blocks
