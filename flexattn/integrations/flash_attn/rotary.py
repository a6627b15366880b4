"""Rotary embedding of tokens at explicit positions (Su et al., "RoFormer", https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.validation import are_values_read


class Rotary(NamedTuple):
    """Tables of cosines and sines [positions, r / 2], and the first position of each sequence's new tokens, [b]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    starts: Tensor


def rotate(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Returns x [t, h, d] with its first r dims rotated, computed in at least float32.

    Args:
        x: the tokens.
        rotary: the tables; dims 0 and 1, 2 and 3, ... are rotated together if interleaved, else 0 and r / 2, 1 and r / 2 + 1, ...
        positions: int64 [t], the tables' row of each token; positions beyond the tables use the last row.
    """
    rows, r = rotary.cos.shape[0], 2 * rotary.cos.shape[-1]
    if are_values_read(positions) and bool((positions >= rows).any()):
        raise ValueError(
            f"rotary_cos and rotary_sin have {rows} rows but a token is at position {int(positions.max())}; accepted: tables with "
            "a row for each position"
        )
    positions = positions.clamp(0, max(rows - 1, 0))  # an index out of range would end the process on a GPU
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[positions][:, None].to(wide) for table in (rotary.cos, rotary.sin))
    pairs = x[..., :r].to(wide).reshape(*x.shape[:-1], *((r // 2, 2) if rotary.is_interleaved else (2, r // 2)))
    a, b = pairs.unbind(-1 if rotary.is_interleaved else -2)
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if rotary.is_interleaved else -2)
    return torch.cat((rotated.flatten(-2).to(x.dtype), x[..., r:]), -1)
