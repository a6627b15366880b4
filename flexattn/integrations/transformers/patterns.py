"""Recognised mask functions of transformers: the few patterns that `attention` supports without a mask function.

Any other mask function runs unchanged, so a pattern that is not recognised costs time but never changes a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """Returns the pattern of a mask function composed by transformers.masking_utils, or None for any other function."""
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
