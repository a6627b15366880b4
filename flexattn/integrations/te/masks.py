"""TransformerEngine's rules for mask types, windows and mask tensors, and their conversion to `flexattn.attention`'s arguments.

The rules are those of `check_set_window_size` and `get_cu_seqlens` in `transformer_engine/pytorch/attention/dot_product_attention/
utils.py`, and of DotProductAttention's documentation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from flexattn.dispatch.spec import as_index
from flexattn.integrations.te.names import AttnMaskType
from flexattn.masks import reading
from flexattn.validation import are_values_read, check_meaning, check_name, describe

ARBITRARY = "arbitrary"
MASK_TYPES = (*AttnMaskType, ARBITRARY)
Window = tuple[int, int]


def mask_type_of(name: object) -> str:
    """Returns a mask type in its standard spelling: "causal,padding", "padding,causal" and "causal_padding" are "padding_causal".

    Raises ValueError if the name is not in `MASK_TYPES`.
    """
    standard = str(name).replace(",", "_")
    standard = "padding_causal" if standard == "causal_padding" else standard
    if not isinstance(name, str) or standard not in MASK_TYPES:
        check_name("attn_mask_type", name, MASK_TYPES)
    return standard


def window_of(attn_mask_type: str, window_size: object) -> Window:
    """Returns the window (left, right), -1 for open, that results from a mask type and a requested window.

    A causal type has 0 on its right: None and (-1, 0) are (-1, 0), and (-1, -1) or (left, right) with left >= 0 become (left, 0)
    with a warning. With another type None means (-1, -1), and (-1, 0) becomes (-1, -1) with a warning.

    Raises ValueError for any other side below 0; TransformerEngine raises an AssertionError.
    """
    is_causal = "causal" in attn_mask_type
    if window_size is None:
        return (-1, 0) if is_causal else (-1, -1)
    sides = [as_index(side) for side in window_size] if isinstance(window_size, (tuple, list)) else []
    ints = [side for side in sides if side is not None]
    if len(sides) != 2 or len(ints) != 2:
        raise ValueError(f"window_size is {window_size!r}; accepted: None, or a pair of ints (left, right), -1 for open")
    left, right = ints
    if is_causal and right != 0 and (left >= 0 or (left, right) == (-1, -1)):
        return _warn_replaced(attn_mask_type, (left, right), (left, 0))
    if not is_causal and (left, right) == (-1, 0):
        return _warn_replaced(attn_mask_type, (left, right), (-1, -1))
    if (is_causal and (left < -1 or right != 0)) or (not is_causal and (left, right) != (-1, -1) and min(left, right) < 0):
        accepted = "(-1, 0), or (left, 0) with left >= 0" if is_causal else "(-1, -1), or (left, right) with both >= 0"
        raise ValueError(f"window_size is {(left, right)} with attn_mask_type {attn_mask_type!r}; accepted: {accepted}")
    return left, right


def _warn_replaced(attn_mask_type: str, requested: Window, used: Window) -> Window:
    if not torch.compiler.is_compiling():
        warnings.warn(f"window_size is {requested} with attn_mask_type {attn_mask_type!r}; {used} is used instead", stacklevel=4)
    return used


def masks_of(attn_mask_type: str, window_size: Window, bottom_right_diagonal: bool | None) -> dict[str, object]:
    """Returns `flexattn.attention`'s arguments for a mask type, a window of `window_of` and a diagonal.

    bottom_right_diagonal: None means True. A causal type's name determines the diagonal instead.
    """
    mask = "no_mask" if attn_mask_type == ARBITRARY else attn_mask_type
    diagonal = None if "causal" in attn_mask_type else bottom_right_diagonal is None or bool(bottom_right_diagonal)
    return {"attn_mask_type": mask, "window_size": window_size, "bottom_right_diagonal": diagonal}


def lengths_of(attention_mask: object, batch: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns cu_seqlens_q and cu_seqlens_kv, int32 [b + 1], of a padding mask: cumulative counts of the visible tokens.

    Hidden tokens must be the last of their sequence. This is only checked on a CPU and with FLEXATTN_CHECK=1, to avoid a wait.

    Args:
        attention_mask: bool [b, 1, 1, s], True for a hidden token; or a pair of them, for the queries and for the keys.
        batch: b.
        sizes: the tokens of a row of q, and of k.

    Raises:
        ValueError, TypeError: if the mask has another shape or dtype, or if hidden tokens precede visible tokens.
        ValueError: if one mask is for queries and keys of different lengths.
    """
    if isinstance(attention_mask, (tuple, list)) and len(attention_mask) == 2:
        masks = attention_mask
    else:
        masks = (attention_mask, attention_mask)
    cumulative = []
    for name, mask, size in zip(("queries", "keys"), masks, sizes, strict=True):
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or tuple(mask.shape) != (batch, 1, 1, size):
            raise ValueError(
                f"attention_mask is {describe(mask)} for the {name}; accepted with padding: a bool tensor of shape "
                f"{(batch, 1, 1, size)}, True for hidden tokens, or a pair of them, for the queries and for the keys"
            )
        rows = mask[:, 0, 0]
        if are_values_read(mask) and bool((rows[:, :-1] & ~rows[:, 1:]).any()):
            raise ValueError(
                f"attention_mask hides tokens of the {name} before visible ones; accepted: hidden tokens at the end of a "
                "sequence (for others, use attn_mask_type 'arbitrary' and a mask [b, 1, sq, skv])"
            )
        ends = (~rows).sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        cumulative.append(torch.nn.functional.pad(ends, (1, 0)))
        if masks[0] is masks[1]:
            return cumulative[0], cumulative[0]
    return cumulative[0], cumulative[1]


def check_unread_mask(attention_mask: object, masks: Mapping[str, object], shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError if the mask, which a type without padding does not read, hides a key that type and window show.

    The values are read if that needs no wait: on a CPU, and with FLEXATTN_CHECK=1. TransformerEngine ignores such a mask, and
    Megatron-Core passes one.

    Args:
        attention_mask: bool, True for a hidden pair, with up to four dims that broadcast to `shape`.
        masks: the arguments of `masks_of`.
        shape: (b, h, sq, skv).
    """
    attn_mask_type, window = str(masks["attn_mask_type"]), cast("Window", masks["window_size"])
    hint = "accepted: None, a mask of the same keys, or attn_mask_type 'arbitrary' with a mask that also hides later keys"
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype is not torch.bool:
        raise ValueError(
            f"attention_mask is {describe(attention_mask)} with attn_mask_type {attn_mask_type!r}, which does not read it; {hint}"
        )
    hidden = _four_dims(attention_mask, shape)
    if not are_values_read(attention_mask):
        return
    sq, skv = shape[2:]
    shift = skv - sq if "bottom_right" in attn_mask_type or masks["bottom_right_diagonal"] else 0
    is_seen = torch.ones(sq, skv, dtype=torch.bool, device=attention_mask.device)
    if window[0] >= 0:
        is_seen = is_seen.triu(shift - window[0])
    if window[1] >= 0:
        is_seen = is_seen.tril(shift + window[1])
    if bool((hidden & is_seen).any()):
        raise ValueError(f"attention_mask hides keys that attn_mask_type {attn_mask_type!r} shows and does not read it; {hint}")


def mask_mod_of(attention_mask: object, shape: tuple[int, int, int, int]) -> Callable[..., Tensor]:
    """Returns the mask_mod of a mask for attn_mask_type "arbitrary".

    Args:
        attention_mask: bool, True for a hidden pair, with up to four dims that broadcast to `shape`.
        shape: (b, h, sq, skv).

    Raises:
        ValueError, TypeError: if the mask has another dtype or shape.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype is not torch.bool:
        raise ValueError(f"attention_mask is {describe(attention_mask)}; accepted: a bool tensor that broadcasts to {shape}")
    check_meaning("attention_mask", attention_mask)
    return reading(_four_dims(attention_mask, shape), hides=True)


def _four_dims(attention_mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Returns the mask with four dims. Raises ValueError if it does not broadcast to the shape."""
    sizes = (*(1,) * (4 - attention_mask.dim()), *attention_mask.shape)
    if len(sizes) > 4 or any(has not in (size, 1) for has, size in zip(sizes, shape, strict=True)):
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; accepted: one that broadcasts to {shape}")
    return attention_mask.reshape(sizes)
