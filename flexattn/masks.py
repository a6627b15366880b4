"""Turns mask tensors into other arguments of `attention`: a bool tensor into a mask_mod, a float tensor into a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from flexattn.dispatch.neutral import sizes_of
from flexattn.validation import check_tensor, describe

if TYPE_CHECKING:
    from flexattn.mods.trace import Mod


def mask_dtypes(q: Tensor) -> tuple[torch.dtype, ...]:
    """Returns the accepted dtypes of float masks: float32 and q's dtype, and under autocast all dtypes of 16 bits."""
    if q.dtype != torch.float64 and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        return (torch.float32, torch.float16, torch.bfloat16)
    return (torch.float32, q.dtype) if q.dtype.itemsize > 1 else (torch.float32,)


def mask_arguments(
    name: str, mask: Any, lead: Sequence[Any], scores: Sequence[Any], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> dict[str, Any]:
    """Returns bias_type and bias for a float mask, and mask_mod for a bool mask, which is True if a query sees a key.

    name: name of the argument in errors. lead: the batch dims. scores: heads, queries and keys. dtypes: accepted for a float mask.
    Raises TypeError if the dtype is wrong, and ValueError if the device is or the shape does not broadcast to all of these dims.
    """
    whole = (*lead, *scores)
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *dtypes):
        _refuse_kind(name, mask, whole, dtypes)
    check_tensor(name, mask, (mask.dtype,), device)
    fits = mask.dim() <= max(len(whole), 4) and all(
        size in (1, full) for size, full in zip(mask.shape[::-1], ((1,) * 4 + whole)[::-1], strict=False)
    )
    if not fits:
        hint = ""
        if len(lead) == 1 and tuple(mask.shape) == (lead[0], scores[-1]):
            hint = f". Pass {name}[:, None, None, :] if it is [batch, keys]."
        elif len(lead) == 1 and tuple(mask.shape) == (lead[0], *scores[1:]):
            hint = f". Pass {name}[:, None] if it is [batch, queries, keys]."
        raise ValueError(f"{name} is {describe(mask)}; accepted: {_accepted(whole)}{hint}")
    mask = mask.reshape(*(1,) * (len(lead) + 3 - mask.dim()), *mask.shape)
    batch = mask.shape[:-3]
    if any(n != 1 for n in batch):
        mask = mask.expand(*lead, *mask.shape[-3:])
    mask = one_batch(mask)[:1] if all(n == 1 for n in batch) else one_batch(mask)
    if mask.dtype != torch.bool:
        return {"bias_type": "post_scale_bias", "bias": mask}
    return {"mask_mod": reading(mask)}


def _refuse_kind(name: str, mask: object, whole: Sequence[int], dtypes: tuple[torch.dtype, ...]) -> NoReturn:
    kinds = f"bool, {' or '.join(dict.fromkeys(map(str, dtypes)))}, with {_accepted(whole)}"
    if not isinstance(mask, Tensor):
        hint = ". Pass a function as mask_mod=." if callable(mask) else ""
        raise TypeError(f"{name} is {describe(mask)}; accepted: a tensor of {kinds}{hint}")
    is_of_ints = not mask.is_floating_point() and not mask.is_complex()
    hint = f"{name}.bool() if 1 is a key that a query sees" if is_of_ints else f"{name}.to({dtypes[0]})"
    raise TypeError(f"{name} is {describe(mask)}; accepted: {kinds}. Convert it with {hint}.")


def _accepted(whole: Sequence[int]) -> str:
    """Returns the words for the accepted dims of a mask."""
    return f"dims that broadcast to {list(whole)}"


def one_batch(x: Tensor) -> Tensor:
    """Returns x [..., h, s, d] as [b, h, s, d]."""
    return x if x.dim() == 4 else x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


def seen_by_both(mask_mod: Any, visible: Mod) -> Mod:
    """Returns a mask_mod for keys that both functions show. If mask_mod is not a function, it is returned for later checks."""
    if not callable(mask_mod):
        return mask_mod  # type: ignore[no-any-return]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(b, h, i, j) & visible(b, h, i, j)  # type: ignore[no-any-return]

    if not torch.compiler.is_compiling():  # a compiled call skips these checks
        from flexattn.mods.trace import refuse_misplaced

        refuse_misplaced("mask_mod", "mask_mod", mask_mod)
        check_sizes = getattr(mask_mod, "_flexattn_check_sizes", None)
        if check_sizes is not None:
            setattr(seen, "_flexattn_check_sizes", check_sizes)  # noqa: B010
    return seen


def reading(mask: Tensor, *, hides: bool = False) -> Mod:
    """Returns a mask_mod that reads a 4-d bool mask; dims of size 1 broadcast. hides: whether True is for a hidden key."""
    one_b, one_h, one_i, one_j = (n == 1 for n in sizes_of(mask))

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        read = mask[0 if one_b else b, 0 if one_h else h, 0 if one_i else i, 0 if one_j else j]
        return ~read if hides else read

    return visible
