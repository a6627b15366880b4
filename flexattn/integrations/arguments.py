"""Checks and conversions of arguments that several libraries have under one name."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.spec import as_index, is_host_number
from flexattn.validation import describe, is_one_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def int_of(name: str, value: object) -> int:
    """Returns an int, also of a 0-d tensor on any device. Raises TypeError for other values, such as floats."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _INTEGERS:
        return int(value)
    index = as_index(value)
    if index is None:
        raise TypeError(f"{name} is {describe(value)}; accepted: an int")
    return index


def window_sides(window_size: object, open_side: str = "a side below 0") -> tuple[int | None, int | None]:
    """Returns both sides of a window as ints, or None. Raises TypeError unless they are a pair of ints, or None where that is open.

    open_side: the words for an open side in the error. With "None", None is accepted.
    """
    is_pair = isinstance(window_size, (tuple, list)) or (isinstance(window_size, Tensor) and window_size.dim() == 1)
    sides: tuple[object, ...] = tuple(window_size) if is_pair else ()  # type: ignore[arg-type]
    checked = tuple(as_index(side) for side in sides)
    is_open = tuple(side is None and open_side == "None" for side in sides)
    if len(sides) != 2 or any(side is None and not is_none for side, is_none in zip(checked, is_open, strict=True)):
        raise TypeError(f"window_size is {describe(window_size)}; accepted: a pair of ints (left, right); {open_side} is open")
    return checked[0], checked[1]


def check_index_tensor(name: str, t: object, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raises unless t is a tensor of integers of one of the shapes."""
    if not isinstance(t, Tensor) or t.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {describe(t)}; accepted: a tensor of integers")
    if not is_one_of(t.shape, shapes):
        raise ValueError(f"{name} is {describe(t)}; accepted: shape {' or '.join(str(shape) for shape in shapes)}")


def check_fit(**tensors: tuple[object, str]) -> None:
    """Raises unless all are tensors on one device, whose dims fit each other. A tensor is given with the names of its dims.

    Dims of one name have one size, and a number is the size itself.
    """
    sizes: dict[str, int] = {}
    device = None
    for name, (t, dims) in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} is {describe(t)}; accepted: a tensor [{', '.join(dims.split())}]")
        names = dims.split()
        device = t.device if device is None else device
        wanted = [int(dim) if dim.isdigit() else sizes.get(dim) for dim in names]
        does_fit = t.dim() == len(names) and all(size is None or size == own for size, own in zip(wanted, t.shape, strict=True))
        if not does_fit or t.device != device:
            known = ", ".join(dim if size is None else str(size) for dim, size in zip(names, wanted, strict=True))
            raise ValueError(f"{name} is {describe(t)}; accepted: [{', '.join(names)}] = [{known}], on {device}")
        sizes.update(zip(names, t.shape, strict=True))


def check_offsets(**tensors: object) -> None:
    """Raises unless each is None or int32 [b + 1]."""
    for name, t in tensors.items():
        if t is not None and not (isinstance(t, Tensor) and t.dim() == 1 and t.dtype is torch.int32 and t.shape[0] > 0):
            raise TypeError(f"{name} is {describe(t)}; accepted: an int32 tensor [b + 1], the offsets of sequences")


def without_sign(query: Tensor, scale: Any) -> tuple[Tensor, Any]:
    """Returns query and a scale of the scores with the same product and a scale of at least 0. `attention` checks other values."""
    is_number = isinstance(scale, (numbers.Real, torch.SymInt, torch.SymFloat)) or (
        isinstance(scale, Tensor) and not torch.compiler.is_compiling() and is_host_number(scale)
    )
    return (-query, -scale) if is_number and scale < 0 else (query, scale)
