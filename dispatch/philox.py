"""Philox4x32 on torch tensors: the random numbers of dropout, equal in every backend and every format.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011) and its Random123 library; Triton's
`tl.philox` is the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
DROPOUT_ROUNDS = 7  # the least number of rounds that passes BigCrush (table 2 of that paper).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Columns of an rng_state with a row for each sequence of a call. Such a call is a part of a larger one, and draws the same
# numbers as the larger one. The columns are the positions there of the first query and the first key, and the index there of the
# first head, batch index * heads + head. The first key is a multiple of 8, because one draw serves eight keys. If there is a
# sixth column, it has the remainder, 0 to 7, and each key takes a draw.
ORIGIN = ("seed", "offset", "first query", "first key", "first head")


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four 32-bit output words for `key` and `counter`. All are int64 tensors of values below 2**32, and broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        # The int64 product wraps modulo 2**64, so it has all 64 bits of the unsigned product of two words.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ k0, product1 & WORD, _high(product0) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def rounded_dropout(dropout_p: float) -> float:
    """Returns the dropout probability, rounded to 16 bits."""
    return round(dropout_p * 2**16) / 2**16


def dropout_keep(rng_state: Tensor, dropout_p: float, head_index: Tensor, rows: range, cols: range) -> Tensor:
    """Returns the attention weights that survive dropout, bool [..., len(rows), len(cols)].

    rng_state: int64 [2], seed and offset, never read on the host. Or [b, 5 or 6] for a part of a larger call, as in `ORIGIN`.
    head_index: int64 [...], batch index * number of query heads + head. With an `ORIGIN`, it is [b, h] and only the head.
    rows, cols: query and key positions in their sequence, with step 1.

    The Philox key is the seed's low and high word, and the counter is (j // 8, i, head_index, offset mod 2**32). Key position j
    uses word j % 8 // 2. An odd j uses the whole word, and an even j only its lower half, shifted up. The weight is kept if and
    only if that number is at least rounded_dropout(dropout_p) * 2**32.
    """
    device = head_index.device
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    if rng_state.dim() == 2:
        seed, offset, first_row, first_column, first_head, *beyond = rng_state.unbind(1)
        start = sum(beyond, first_column + cols.start)
        groups = (start // 8)[:, None] + torch.arange((len(cols) + 14) // 8, device=device)  # one more if both ends cut a group.
        seed, offset, i = seed[:, None, None, None], offset[:, None, None, None], i + first_row[:, None, None, None]
        keep = _kept((seed, offset), dropout_p, (groups[:, None, None], i, (head_index + first_head[:, None])[..., None, None]))
        places = (start % 8)[:, None] + torch.arange(len(cols), device=device)
        return keep.gather(-1, places[:, None, None].expand(*keep.shape[:-1], -1))
    seed, offset = rng_state
    groups = torch.arange(cols.start // 8, -(-cols.stop // 8), device=device)
    keep = _kept((seed, offset), dropout_p, (groups, i, head_index[..., None, None]))
    skipped = cols.start % 8
    return keep[..., skipped : skipped + len(cols)]


def _kept(state: tuple[Tensor, Tensor], dropout_p: float, counter: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Returns the kept keys, bool [..., 8 * groups]. The first part of the counter has the groups of eight keys in its last dim."""
    seed, offset = state
    words = philox4x32((seed & WORD, _high(seed)), (*counter, offset & WORD), DROPOUT_ROUNDS)
    threshold = int(rounded_dropout(dropout_p) * 2**32)  # with a float, torch would compare in fp32.
    return torch.stack([half >= threshold for word in words for half in ((word << 16) & WORD, word)], dim=-1).flatten(-2)


def _high(x: Tensor) -> Tensor:
    return (x >> 32) & WORD
