"""Comparison of a call's tensors with those of an earlier call, all at once: torch.compile's guards do it in C++.

A key of these tensors (`flexattn.call_cache`) takes a Python object for each shape, stride, dtype and device, and then the hash of
them all; the comparison takes none. It says no more than the key would: True only where all that the key says is equal.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

# Types, dispatch keys (device, layout, negation, transforms, modes), dtypes, devices, requires_grad, shapes and strides.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


class Likeness:
    """Compares tensors with those of a call; made by `likeness_of`. It keeps none of them alive."""

    __slots__ = ("_check", "_distinct", "_spread", "_twins")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        first: dict[int, int] = {}  # position by tensor
        twins = []
        for i, t in enumerate(tensors):
            if t is not None and first.setdefault(id(t), i) != i:
                twins.append((first[id(t)], i))
        distinct = list(first.values())
        self._twins = tuple(twins)
        self._distinct = self._spread = None
        if len(distinct) < len(tensors):
            self._distinct = itemgetter(*distinct)
            self._spread = itemgetter(*(0 if t is None else 1 + distinct.index(first[id(t)]) for t in tensors))
        given = [tensors[i] for i in distinct]
        self._check = _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def addresses(self, tensors: Sequence[Tensor | None]) -> Sequence[int] | None:
        """Returns the tensors' addresses, 0 for None; None for all where the tensors are not like the call's.

        tensors: of the same number and types as the call's.
        """
        given: Any = tensors if self._distinct is None else self._distinct(tensors)
        if not self._check(*given):
            return None
        for i, j in self._twins:
            if tensors[i] is not tensors[j]:
                return None
        found: Sequence[int] = list(map(_data_ptr, given))
        if functools.reduce(operator.or_, found) & 15 or 0 in found:
            return None
        if self._spread is not None:
            found = self._spread((0, *found))
        return None if found[1] == found[2] else found


_data_ptr = Tensor.data_ptr


def likeness_of(tensors: Sequence[Tensor | None]) -> Likeness | None:
    """Returns a comparison with the tensors of a call; q, k and v come first.

    None for tensors that it has no words for: off a multiple of 16 bytes, empty, v in k's memory; and where torch has no guards.
    """
    if _Guards is None or tensors[1] is tensors[2]:
        return None
    made = Likeness(tensors)
    return made if made.addresses(tensors) is not None else None
