"""The mask function of transformers' AttentionMaskInterface: what it makes is linear in the number of tokens.

transformers describes a mask by a function of indices, a mask of padding, and lengths. sdpa and eager evaluate them for every query
and key. Here the result is a `Visible`, which keeps the function for the kernels, or a row of booleans for one query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.neutral import is_traced
from flexattn.dispatch.spec import MaskType
from flexattn.integrations.transformers.patterns import MaskFunction, Pattern, recognize


class Packed(NamedTuple):
    """Sequences one after another, rows included: int32 [sequences + 1] and the longest of them."""

    cu_seqlens: Tensor
    max_seqlen: int | None


class Band(NamedTuple):
    """A mask type and window of `attention`, both counted from the bottom-right diagonal."""

    attn_mask_type: MaskType = "no_mask"
    window_size: tuple[int, int] = (-1, -1)


class Visible:
    """Keys that the queries of a batch see, in the arguments of `attention`.

    `attention_forward` alone reads it. transformers hands it on as it does a mask of four dims; a model that computes with it, or
    takes it apart, gets an error, as it is neither a tensor nor a BlockMask.

    Args:
        shape: (b, 1, queries, keys).
        keys: how many of the keys to keep, from the first.
        band: keys outside it are hidden, counted among those kept.
        shown: keys for which this function of indices is false are hidden too; None: none are.
        padding: bool [b, keys or more], false for keys that are hidden too; None: none are.
        packed: keys of other sequences are hidden too; None: there are none, or `shown` says it.
    """

    ndim = 4

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        keys: int,
        band: Band,
        shown: MaskFunction | None = None,
        padding: Tensor | None = None,
        packed: Packed | None = None,
    ) -> None:
        self.shape = shape
        self.keys = keys
        self.band = band
        self.shown = shown
        self.padding = padding
        self.packed = packed

    @property
    def mask_mod(self) -> MaskFunction | None:
        """Function of indices that is false for keys hidden by `shown` or by padding; None: there are none."""
        shown, padding = self.shown, self.padding
        if padding is None:
            return shown
        if shown is None:
            return lambda b, h, q_idx, kv_idx: padding[b, kv_idx]
        return lambda b, h, q_idx, kv_idx: shown(b, h, q_idx, kv_idx) & padding[b, kv_idx]

    def to(self, device: torch.device | str | int, **options: Any) -> Visible:
        """Returns the mask with its tensors on another device, as models in parts on several GPUs ask for; `shown` stays as it is.

        Raises TypeError for anything but a device: that is asked by a model that computes with its mask.
        """
        if not isinstance(device, (torch.device, str, int)) or options.keys() - {"non_blocking", "copy"}:
            raise TypeError(f"attention_mask.to({device!r}): {_APART}")
        padding = None if self.padding is None else self.padding.to(device, **options)
        packed = None
        if self.packed is not None:
            packed = self.packed._replace(cu_seqlens=self.packed.cu_seqlens.to(device, **options))
        return Visible(self.shape, self.keys, self.band, self.shown, padding, packed)

    def contiguous(self) -> Visible:
        """Returns the mask itself; transformers asks it of any mask that generate() makes ahead of a call."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"attention_mask.{name}: {_APART}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"attention_mask[{index!r}]: {_APART}")


_APART = (
    "this model computes with its mask, and flexattn's is no tensor but what its attention function reads; "
    'accepted: attn_implementation="eager" for this model'
)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | Visible | None = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_torch_fix: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    config: Any = None,
    **unknown: Any,
) -> Tensor | Visible:
    """Mask of one kind of layers in the form that `attention_forward` takes, for transformers' AttentionMaskInterface.

    After transformers.masking_utils.sdpa_mask,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/masking_utils.py.

    Args:
        batch_size, q_length, kv_length: of the queries and keys that attention will get.
        q_offset, kv_offset: position of the first query and of the first key; q_offset is a 0-d tensor with a static cache.
        mask_function: mask_function(b, h, q_position, kv_position) -> whether the query sees the key; None is causal.
        attention_mask: bool [b, tokens so far], False where a token is padding; None: there is none; or what this function made,
            which comes back where generate() made it ahead of the call.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether an implementation may do without a plain mask. Where not, the
            model is about to compute with it, and gets a bool tensor [b, 1, q_length, kv_length].
        local_size: the window of a mask with one.
        use_vmap: whether mask_function takes 0-d positions alone.
        allow_torch_fix: not read; it has no effect in transformers either.
        device: of the mask.
        dtype, config: not read; mask_function says all that the mask depends on, and a bool tensor has its own dtype.
        unknown: raises, unless all are None.

    Returns:
        A `Visible`, or a bool tensor [b, 1, q_length, kv_length] (one query that does not see all keys, or as said above).

    Raises:
        TypeError: an argument that is not known.
    """
    if given := sorted(name for name, value in unknown.items() if value is not None):
        raise TypeError(
            f"attention_mask() has no argument {', '.join(given)}, which may change the mask; accepted: the arguments of "
            'transformers.masking_utils.sdpa_mask; run this model with attn_implementation="eager"'
        )
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if isinstance(attention_mask, Visible):
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function
    if isinstance(q_offset, Tensor) and q_length > 1 and not is_traced():
        q_offset = int(q_offset)  # waits for the device, once for a prompt
    shape = (batch_size, 1, q_length, kv_length)
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
        if padding is not None and not is_traced() and padding[:, :keys].all():
            padding = None
        skips = allow_is_causal_skip if pattern.is_causal else allow_is_bidirectional_skip
        is_tensor = not (skips or use_vmap or pattern.sequences is not None) or (is_tensor and padding is not None)
        if not is_tensor:
            return _say(pattern, shape, keys, padding)
    if not is_tensor:
        return Visible(shape, kv_length, Band(), _shifted(mask_function, q_offset, kv_offset), padding)
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


def _say(pattern: Pattern, shape: tuple[int, int, int, int], keys: int, padding: Tensor | None) -> Visible:
    """Returns a pattern over the first keys in the arguments of `attention`."""
    left = -1 if pattern.left is None or pattern.left >= keys - 1 else pattern.left
    right = -1 if pattern.right is None else pattern.right
    band = Band("causal_bottom_right" if pattern.is_causal else "no_mask", (left, right))
    if pattern.sequences is not None:  # transformers looks for these only where there is no padding
        return Visible(shape, keys, band, packed=_packed(pattern.sequences.expand(shape[0], -1)))
    return Visible(shape, keys, band, padding=padding)


def _packed(ids: Tensor) -> Packed:
    """Returns where sequences start among all rows' tokens, from the numbers [b, s] that tell them apart; waits for the device."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=ids.numel()).to(torch.int32)
    return Packed(cu_seqlens, None if is_traced() else int(cu_seqlens.diff().max()))


def _shifted(mask_function: MaskFunction, q_offset: int | Tensor, kv_offset: int) -> MaskFunction:
    """Returns mask_function of indices, which begin at 0, in place of positions."""
    if isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0:
        return mask_function
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)
