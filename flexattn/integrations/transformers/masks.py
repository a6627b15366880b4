"""Mask function for transformers' AttentionMaskInterface; its results take memory linear in the number of tokens.

transformers describes a mask by a function of indices, a mask of padding, and lengths. sdpa and eager evaluate them for every query
and key. flexattn returns a `Visible`, which keeps the function for the kernels, or a row of booleans for one query.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from flexattn.dispatch.neutral import is_traced
from flexattn.dispatch.spec import MaskType

MaskFunction = Callable[..., Any]


class Pattern(NamedTuple):
    """Conjunction of masks: query i sees keys i - left to i + right (None: open) of its own sequence (None: only one)."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None  # [b, s], sequence ids of each row's tokens

    @property
    def is_causal(self) -> bool:
        return self.right == 0


def recognize(mask_function: MaskFunction) -> Pattern | None:
    """Returns the pattern of a mask function composed by transformers.masking_utils, or None for any other function.

    Any other function runs unchanged, so a pattern that is not recognised costs time but never changes a result.
    """
    from transformers import masking_utils

    if torch.compiler.is_compiling():  # Dynamo hides a function's captures
        if mask_function is masking_utils.causal_mask_function:
            return Pattern(right=0)
        return Pattern() if mask_function is masking_utils.bidirectional_mask_function else None
    left, right, sequences = None, None, None
    for part in _conjuncts(mask_function, masking_utils.and_masks):
        if part is masking_utils.bidirectional_mask_function:
            continue
        if part is masking_utils.causal_mask_function:
            new_left, new_right = None, 0
        elif (window := _captured(part, masking_utils.sliding_window_overlay, "sliding_window")) is not None:
            new_left, new_right = window - 1, None
        elif (window := _captured(part, masking_utils.sliding_window_bidirectional_overlay, "sliding_window")) is not None:
            new_left, new_right = window, window
        else:
            ids = _captured(part, masking_utils.packed_sequence_mask_function, "packed_sequence_mask")
            if ids is None or sequences is not None:
                return None
            sequences = ids
            continue
        left, right = _min(left, new_left), _min(right, new_right)
    return Pattern(left, right, sequences)


def _conjuncts(mask_function: MaskFunction, and_masks: MaskFunction) -> Iterator[MaskFunction]:
    parts = _captured(mask_function, and_masks, "mask_functions")
    if parts is None:
        yield mask_function
        return
    for part in parts:
        yield from _conjuncts(part, and_masks)


def _captured(function: MaskFunction, factory: MaskFunction, name: str) -> Any:
    """Returns the value that `function` captures as `name`, if `factory` made the function, else None."""
    code = getattr(function, "__code__", None)
    if code is None or code not in factory.__code__.co_consts:
        return None
    return inspect.getclosurevars(function).nonlocals.get(name)


def _min(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


class Packed(NamedTuple):
    """Packed sequences, over all rows: int32 [sequences + 1], and the longest length."""

    cu_seqlens: Tensor
    max_seqlen: int | None


class Band(NamedTuple):
    """A mask type and window of `attention`, both relative to the bottom-right diagonal."""

    attn_mask_type: MaskType = "no_mask"
    window_size: tuple[int, int] = (-1, -1)


@dataclasses.dataclass(eq=False, repr=False)
class Visible:
    """Keys that the queries of a batch see, as arguments of `attention`.

    Only `attention_forward` reads it. transformers passes it on like a mask of four dims. A model that computes with it, or indexes
    it, gets an error, because it is neither a tensor nor a BlockMask.

    Args:
        shape: (b, 1, queries, keys).
        keys: number of keys to use, from the first.
        band: visible band, relative to the keys in use.
        shown: function of indices, False for keys that are also hidden. None: no such function.
        padding: bool [b, keys or more], False for keys that are also hidden. None: no padding.
        packed: packed sequences; keys of other sequences are also hidden. None: one sequence per row, or `shown` separates them.
    """

    shape: tuple[int, int, int, int]
    keys: int
    band: Band
    shown: MaskFunction | None = None
    padding: Tensor | None = None
    packed: Packed | None = None
    agreed: list[Tensor] = dataclasses.field(default_factory=list)  # offsets that `has_offsets` found equal
    ndim: ClassVar[int] = 4

    @property
    def mask_mod(self) -> MaskFunction | None:
        """Function of indices that is False for keys hidden by `shown` or by padding. None: no such keys."""
        shown, padding = self.shown, self.padding
        if padding is None:
            return shown
        if shown is None:
            return lambda b, h, q_idx, kv_idx: padding[b, kv_idx]
        return lambda b, h, q_idx, kv_idx: shown(b, h, q_idx, kv_idx) & padding[b, kv_idx]

    def has_offsets(self, others: tuple[Packed, Packed]) -> bool:
        """Returns whether sequences of queries and keys are those of `packed`. The first layer that asks waits for the device."""
        if self.packed is None or is_traced():
            return False
        own, offsets = self.packed.cu_seqlens, [x.cu_seqlens for x in others]
        if not self.agreed or any(x is not y for x, y in zip(offsets, self.agreed, strict=True)):
            self.agreed = offsets if all(x.shape == own.shape and bool((x == own).all()) for x in offsets) else []
        return bool(self.agreed)

    def to(self, device: torch.device | str | int, **options: Any) -> Visible:
        """Returns the mask with its tensors on another device, for models split over several GPUs; `shown` is unchanged.

        Raises TypeError for anything but a device, because only models that compute with their mask pass that.
        """
        if not isinstance(device, (torch.device, str, int)) or options.keys() - {"non_blocking", "copy"}:
            raise TypeError(f"attention_mask.to({device!r}): {_NOT_A_TENSOR}")
        padding = None if self.padding is None else self.padding.to(device, **options)
        packed = None
        if self.packed is not None:
            packed = self.packed._replace(cu_seqlens=self.packed.cu_seqlens.to(device, **options))
        return dataclasses.replace(self, padding=padding, packed=packed, agreed=[])

    def contiguous(self) -> Visible:
        """Returns the mask itself; transformers calls it on any mask that generate() makes in advance."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"attention_mask.{name}: {_NOT_A_TENSOR}")

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(f"attention_mask[{index!r}]: {_NOT_A_TENSOR}")


_EXTENDED = ("deepseek_v4",)
"""Types of models whose layers append numbers to their mask, 0 or -inf for each key that they compress from others."""

_NOT_A_TENSOR = (
    "this model computes with its mask, but flexattn's mask is not a tensor; only its attention function reads it; "
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
    config: object = None,
    **unknown: object,
) -> Tensor | Visible:
    """Mask of one kind of layers in `attention_forward`'s form, for transformers' AttentionMaskInterface.

    After transformers.masking_utils.sdpa_mask,
    https://github.com/huggingface/transformers/blob/v5.17.0/src/transformers/masking_utils.py.

    Args:
        batch_size, q_length, kv_length: batch, number of queries and number of keys of the attention call.
        q_offset, kv_offset: position of the first query and of the first key; q_offset is a 0-d tensor with a static cache.
        mask_function: mask_function(b, h, q_position, kv_position) -> whether the query sees the key. None: causal.
        attention_mask: bool [b, tokens so far], False for padding. None: no padding. A result of this function, which generate()
            may compute in advance, is returned unchanged.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether an implementation may skip a plain mask. If not, the model
            computes with the mask, and receives a bool tensor [b, 1, q_length, kv_length].
        local_size: the window of a mask with a window.
        use_vmap: whether mask_function only accepts 0-d positions.
        allow_torch_fix: ignored, as in transformers.
        device: device of the mask.
        dtype, config: the dtype of numbers for a model whose layers extend their mask, and the model's config. Otherwise ignored:
            mask_function determines the mask, and its dtype is bool.
        unknown: raises, unless all are None.

    Returns:
        A `Visible`, or a bool tensor [b, 1, q_length, kv_length]. It is a tensor if a single query does not see all keys, or if the
        model computes with the mask. If its layers extend the mask, it has numbers instead: 0, or the lowest for hidden keys.

    Raises:
        TypeError: if an argument is unknown.
    """
    if unknown_names := sorted(name for name, value in unknown.items() if value is not None):
        raise TypeError(
            f"attention_mask() has no argument {', '.join(unknown_names)}, which may change the mask; accepted: the arguments of "
            'transformers.masking_utils.sdpa_mask; otherwise run this model with attn_implementation="eager"'
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
            pattern = Pattern(local_size, local_size)  # only this mask allows both; Dynamo hides its abs()
        if pattern is not None and pattern.sequences is not None:
            pattern = pattern if padding is None and _are_runs(pattern.sequences, q_length, kv_length) else None
        if pattern is not None:
            keys = _usable_keys(pattern, q_length, kv_length, q_offset - kv_offset)
    is_extended = getattr(config, "model_type", None) in _EXTENDED
    is_tensor = q_length == 1 or is_extended
    if pattern is not None and keys is not None and not is_extended:
        if padding is not None and not is_traced() and padding[:, :keys].all():
            padding = None
        skips = allow_is_causal_skip if pattern.is_causal else allow_is_bidirectional_skip
        is_tensor = not (skips or use_vmap or pattern.sequences is not None) or (is_tensor and padding is not None)
        if not is_tensor:
            return _to_visible(pattern, shape, keys, padding)
    if not is_tensor:
        return Visible(shape, kv_length, Band(), _from_positions(mask_function, q_offset, kv_offset), padding)
    dense_mask: Tensor = sdpa_mask(
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
    if is_extended:
        dtype = dtype or torch.float32
        return torch.zeros((), dtype=dtype, device=device).where(dense_mask, torch.finfo(dtype).min)
    return dense_mask


def _usable_keys(pattern: Pattern, q_length: int, kv_length: int, offset: int) -> int | None:
    """Returns the number of keys to use, so that the mask's diagonal ends in the bottom-right corner.

    offset: index of the first query's key. None: every such number hides keys that the pattern shows.
    """
    if pattern.left is None and pattern.right is None:
        return kv_length
    keys = offset + q_length
    if keys == kv_length or (pattern.is_causal and 0 < keys < kv_length):
        return keys
    return None


def _to_visible(pattern: Pattern, shape: tuple[int, int, int, int], keys: int, padding: Tensor | None) -> Visible:
    """Returns a pattern over the first keys as arguments of `attention`."""
    left = -1 if pattern.left is None or pattern.left >= keys - 1 else pattern.left
    right = -1 if pattern.right is None else pattern.right
    band = Band("causal_bottom_right" if pattern.is_causal else "no_mask", (left, right))
    if pattern.sequences is not None:
        return Visible(shape, keys, band, packed=_packed(pattern.sequences.expand(shape[0], -1)))
    return Visible(shape, keys, band, padding=padding)


def _are_runs(ids: Tensor, q_length: int, kv_length: int) -> bool:
    """Returns whether ids [b, s] are of all queries and keys, with equal ids side by side; waits for the device."""
    if is_traced() or not ids.shape[-1] == q_length == kv_length:
        return False
    runs, kinds = ((x.diff() != 0).sum(-1) for x in (ids, ids.sort(-1).values))
    return bool((runs == kinds).all())


def _packed(ids: Tensor) -> Packed:
    """Returns the offsets of sequences among all rows' tokens, from sequence ids [b, s]; waits for the device."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    cu_seqlens = torch.nn.functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=ids.numel()).to(torch.int32)
    return Packed(cu_seqlens, int(cu_seqlens.diff().max()))


def _from_positions(mask_function: MaskFunction, q_offset: int | Tensor, kv_offset: int) -> MaskFunction:
    """Returns mask_function as a function of indices, which start at 0, instead of positions."""
    if isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0:
        return mask_function
    return lambda b, h, q_idx, kv_idx: mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)
