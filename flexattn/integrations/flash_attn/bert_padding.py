"""Removal and restoration of a batch's padding, under FlashAttention's names.

The signatures are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/bert_padding.py.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from flexattn.validation import describe


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows of input [n, ...] at indices, int64 [m], as [m, ...]."""
    return input[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Returns a batch's tokens without padding, packed one after another.

    The call waits for the device, because the lengths determine the results' shapes.

    Args:
        hidden_states: [b, s, ...].
        attention_mask: [b, s], bool or 0 and 1: 1 for each token.
        unused_mask: like attention_mask: 1 for each token that stays in the batch but is not attended to.

    Returns:
        (tokens, indices, cu_seqlens, max_seqlen, lengths). tokens are [total, ...], and indices their positions in [b * s], int64.
        cu_seqlens is int32 [b + 1]. lengths are the sequences' lengths without the unused tokens, int32 [b].
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(f"{name} is {describe(mask)}; accepted: shape {tuple(hidden_states.shape[:2])}, as of hidden_states")
    present = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = present.sum(-1)
    indices = present.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0), (1, 0)).int()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1).int()


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Returns tokens [total, ...] in their padded positions in [batch, seqlen, ...], with zeros elsewhere.

    Args:
        hidden_states, indices: `unpad_input`'s first two results.
        batch, seqlen: the batch's shape.
    """
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])
