"""Mods and dropout of local calls. Both see the batch row, the head and the positions in the full sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Mod = Callable[..., Tensor]


class Origin(NamedTuple):
    """Origin of a call's indices in the full sequence. Values are tensors, so that other values do not cause another trace.

    For packed documents each is int32 [sequences of the call]. Else each is a 0-d tensor, and document is None.
    """

    document: Tensor | None
    q_start: Tensor
    kv_start: Tensor
    diagonal: Tensor  # j - i on the full sequence's diagonal, in the call's own positions


def moved_mod(mod: Mod | None, places: int, origin: Origin) -> Mod | None:
    """Returns the mod with positions of the full sequence.

    places: number of arguments before the batch index: 1 for a score_mod, 0 for a mask_mod.
    """
    if mod is None:
        return None
    document, q_start, kv_start, _ = origin

    def moved(*arguments: Tensor, **named: Tensor) -> Tensor:
        first, (b, h, i, j), rest = arguments[:places], arguments[places : places + 4], arguments[places + 4 :]
        if document is None:
            return mod(*first, b, h, i + q_start, j + kv_start, *rest, **named)
        return mod(*first, document[b], h, i + q_start[b], j + kv_start[b], *rest, **named)

    return moved


def mod_of_heads(mod: Mod | None, places: int, first_head: Tensor) -> Mod | None:
    """Returns the mod for a part of the heads. first_head: the first of them, a 0-d tensor."""
    if mod is None:
        return None

    def moved(*arguments: Tensor, **named: Tensor) -> Tensor:
        first, (b, h), rest = arguments[:places], arguments[places : places + 2], arguments[places + 2 :]
        return mod(*first, b, h + first_head, *rest, **named)

    return moved


def rng_state_of(rng_state: Tensor, origin: Origin, batch: int, heads: tuple[int, int], by_eights: bool) -> Tensor:
    """Returns the rng_state of a call, int64 [b, 5 or 6], which drops the same weights as one process. See `attention`.

    rng_state: int64 [2], for the full sequence. batch: batch size of a dense call. heads: the first head of the call, and the
    number of all heads. by_eights: whether each first key is at a multiple of 8.
    """
    document, q_start, kv_start, _ = origin
    if document is None:
        document = torch.arange(batch, device=rng_state.device)
    columns = [*rng_state, q_start, kv_start, document * heads[1] + heads[0]]
    if not by_eights:
        columns[3:] = [kv_start - kv_start % 8, columns[4], kv_start % 8]
    return torch.stack([column.to(torch.int64).expand(document.shape[0]) for column in columns], 1)


def with_alibi(mod: Mod | None, slopes: Tensor, origin: Origin) -> Mod:
    """Returns a score_mod that applies `mod`, if any, and subtracts slope * |distance from the full sequence's diagonal|.

    slopes: float32 [h] or [sequences of the call, h]. It replaces bias_type "alibi" if a call has another diagonal.
    """
    diagonal, is_packed, has_rows = origin.diagonal, origin.document is not None, slopes.dim() == 2

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *rest: Tensor, **named: Tensor) -> Tensor:
        if mod is not None:
            score = mod(score, b, h, i, j, *rest, **named)
        slope = slopes[b, h] if has_rows else slopes[h]
        return score - slope * (j - i - (diagonal[b] if is_packed else diagonal)).abs()

    return biased
