"""The mask function of transformers' AttentionMaskInterface: what it makes is linear in the number of tokens.

transformers describes a mask by a function of indices, a mask of padding, and lengths. sdpa and eager evaluate them for every query
and key. Here the result is None where is_causal says it all, a row of booleans for one query, else a `Visible`, which keeps the
function for the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexattn.integrations.transformers.patterns import MaskFunction, Pattern, recognize


class Packed(NamedTuple):
    """Sequences one after another, rows included: int32 [sequences + 1] and the longest of them."""

    cu_seqlens: Tensor
    max_seqlen: int | None


class Band(NamedTuple):
    """A mask type and window of `attention`, both counted from the bottom-right diagonal."""

    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] = (-1, -1)


class Visible(BlockMask):
    """Keys that the queries of a batch see, as `attention` says it; transformers hands a BlockMask on as it is.

    `attention_forward` alone reads it: there are no lists of blocks in it, and nothing that takes a BlockMask apart works.

    Args:
        shape: (b, 1, queries, keys).
        band: keys outside it are hidden.
        mask_mod: keys for which it is false are hidden too; None: none are.
        packed: keys of other sequences are hidden too; None: there are none, or mask_mod says it.
    """

    def __init__(self, shape: tuple[int, int, int, int], band: Band, mask_mod: MaskFunction | None, packed: Packed | None = None):
        # BlockMask's own __init__ wants lists of blocks, which the kernels make for themselves.
        self.visible_shape = shape
        self.band = band
        self.visible_mod = mask_mod
        self.packed = packed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.visible_shape

    @property
    def ndim(self) -> int:
        return len(self.visible_shape)

    def __getitem__(self, index: Any) -> Visible:
        raise TypeError(
            f"attention_mask[{index!r}]: this model takes its mask apart, and flexattn's is no tensor; "
            'accepted: attn_implementation="sdpa" for this model'
        )

    def to(self, device: torch.device | str) -> Visible:
        """Returns the mask itself, which lives on the device of the inputs that it was made for."""
        return self

    def contiguous(self) -> Visible:
        """Returns the mask itself; transformers asks it of any mask that generate() makes ahead of a call."""
        return self

    def __repr__(self) -> str:
        return f"Visible(shape={self.visible_shape}, band={self.band}, masked={self.visible_mod is not None})"


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | Visible | None:
    """Mask of one kind of layers in the form that `attention_forward` takes, for transformers' AttentionMaskInterface.

    After transformers.masking_utils.sdpa_mask,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/masking_utils.py.

    Args:
        batch_size, q_length, kv_length: of the queries and keys that attention will get.
        q_offset, kv_offset: position of the first query and of the first key; q_offset is a 0-d tensor with a static cache.
        mask_function: mask_function(b, h, q_position, kv_position) -> whether the query sees the key; None is causal.
        attention_mask: bool [b, tokens so far], False where a token is padding; None: there is none.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may say a plain mask. Where neither is set for a plain mask,
            the model is about to compute with it, and gets a bool tensor [b, 1, q_length, kv_length].
        local_size: the window of a mask with one.
        use_vmap: whether mask_function takes 0-d positions alone.
        device: of the mask.
        options: dtype and config, which say nothing that mask_function does not.

    Returns:
        None, a bool tensor [b, 1, q_length, kv_length] (one query, or where the model computes with it), or a `Visible`.
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    if isinstance(q_offset, Tensor) and q_length > 1 and not torch.compiler.is_compiling():
        q_offset = int(q_offset)  # waits for the device, once for a prompt
    padding = None
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
    pattern, keys = None, None
    if isinstance(q_offset, int):
        pattern = recognize(mask_function)
        if pattern is None and torch.compiler.is_compiling() and allow_is_bidirectional_skip and local_size is not None:
            pattern = Pattern(local_size, local_size)  # no other mask allows both; Dynamo does not show its abs()
        if pattern is not None:
            keys = _keys(pattern, q_length, kv_length, q_offset - kv_offset)
    is_tensor = q_length == 1
    if pattern is not None and keys is not None:
        if padding is not None and not torch.compiler.is_compiling() and padding[:, :keys].all():
            padding = None
        skips = allow_is_causal_skip if pattern.is_causal else allow_is_bidirectional_skip
        is_tensor = not (skips or use_vmap or pattern.sequences is not None) or (is_tensor and padding is not None)
        if not is_tensor:
            return _say(pattern, (batch_size, q_length, keys), keys == kv_length, padding)
    if not is_tensor:
        mask_mod = _shifted(mask_function, padding, q_offset, kv_offset)
        return Visible((batch_size, 1, q_length, kv_length), Band(), mask_mod)
    made: Tensor = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    return made


def _keys(pattern: Pattern, q_length: int, kv_length: int, offset: int) -> int | None:
    """Returns how many keys to keep for the diagonal, `offset` keys before the first query's, to end in the bottom-right corner.

    None: no number of keys does that and hides none that the pattern shows.
    """
    if pattern.left is None and pattern.right is None:
        return kv_length
    keys = offset + q_length
    if keys == kv_length or (pattern.is_causal and 0 < keys < kv_length):
        return keys
    return None


def _say(pattern: Pattern, sizes: tuple[int, int, int], has_all_keys: bool, padding: Tensor | None) -> Visible | None:
    """Returns a pattern over sizes (b, queries, keys to keep) in the arguments of `attention`; None where is_causal says it."""
    batch_size, q_length, keys = sizes
    shape = (batch_size, 1, q_length, keys)
    left = -1 if pattern.left is None or pattern.left >= keys - 1 else pattern.left
    right = -1 if pattern.right is None else pattern.right
    band = Band("causal_bottom_right" if pattern.is_causal else "no_mask", (left, right))
    if pattern.sequences is not None:  # transformers looks for these only where there is no padding
        return Visible(shape, band, None, _packed(pattern.sequences.expand(batch_size, -1)))
    if padding is not None:
        return Visible(shape, band, lambda b, h, q_idx, kv_idx: padding[b, kv_idx])
    if has_all_keys and left == -1 and right <= 0:
        return None
    return Visible(shape, band, None)


def _packed(ids: Tensor) -> Packed:
    """Returns where sequences start among all rows' tokens, from the numbers [b, s] that tell them apart; waits for the device."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=ids.numel()).to(torch.int32)
    return Packed(cu_seqlens, int(cu_seqlens.diff().max()))


def _shifted(mask_function: MaskFunction, padding: Tensor | None, q_offset: int | Tensor, kv_offset: int) -> MaskFunction:
    """Returns mask_function of indices, which begin at 0, in place of positions, and without the keys that are padding."""
    if isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0 and padding is None:
        return mask_function

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return seen if padding is None else seen & padding[b, kv_idx]

    return visible
