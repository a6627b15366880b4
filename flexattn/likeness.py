"""Comparison of a call's tensors with those of an earlier call, all at once: torch.compile's guards do it in C++.

A key of these tensors (`flexattn.call_cache`) takes a Python object for each shape, stride, dtype and device, and then the hash of
them all. The comparison takes none. It is as strict as the key: it is true only if all parts of the key for tensors are equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.compat import TensorGuards

PLAIN = frozenset((Tensor, torch.nn.Parameter))
Addresses = Callable[[Sequence[Tensor | None]], Sequence[int] | None]


class Likeness:
    """Compares tensors with those of a call; made by `likeness_of`. It keeps none of them alive.

    addresses: a function from tensors, as many as the call's, to their addresses, 0 for None. It returns None if the tensors are
    not like the call's.
    """

    __slots__ = ("addresses",)
    addresses: Addresses

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        first: dict[int, int] = {}  # position by tensor
        sources = tuple(None if t is None else first.setdefault(id(t), i) for i, t in enumerate(tensors))
        given = [tensors[i] for i in first.values()]
        check = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.addresses = _comparison(sources, tensors[1].data_ptr() == tensors[2].data_ptr())(check)  # type: ignore[union-attr]


@functools.lru_cache(maxsize=1024)
def _comparison(sources: tuple[int | None, ...], is_v_in_k: bool) -> Callable[[Callable[..., bool]], Addresses]:
    """Returns a function from the check of the distinct tensors to `Likeness.addresses`.

    sources: for each tensor the position of its first occurrence, or None for None. q, k and v come first. is_v_in_k: k and v begin
    at one address. The function is generated, because every call runs it, and a loop over the tensors takes twice the time.
    """
    distinct = sorted({i for i in sources if i is not None})
    others = [f"t{i} is not {'None' if first is None else f't{first}'}" for i, first in enumerate(sources) if first != i]
    addresses = [f"a{i}" for i in distinct]
    conditions = [
        f"({' | '.join(addresses)}) & 15",
        f"not ({' and '.join(addresses)})",
        f"a{sources[1]} {'!=' if is_v_in_k else '=='} a{sources[2]}",
    ]
    lines = [
        f"{', '.join(f't{i}' for i in range(len(sources)))}, = tensors",
        f"if {' or '.join([*others, ''])}not check({', '.join(f't{i}' for i in distinct)}):",
        "    return None",
        *(f"a{i} = t{i}.data_ptr()" for i in distinct),
        f"if {' or '.join(conditions)}:",
        "    return None",
        f"return ({', '.join('0' if first is None else f'a{first}' for first in sources)},)",
    ]
    source = "\n        ".join(["def comparison(check):\n    def compare(tensors):", *lines]) + "\n    return compare\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<flexattn likeness>", "exec"), namespace)
    return namespace["comparison"]  # type: ignore[no-any-return]


def low_bits(addresses: Sequence[int]) -> bytes:
    """Distance of each address from the multiple of 16 bytes below it."""
    return bytes([address & 15 for address in addresses])


def same_tensors(ids: Sequence[int]) -> tuple[int, ...]:
    """Returns for each tensor the position of its first occurrence: a tensor given twice is copied or checked once."""
    return tuple([ids.index(i) for i in ids])


def likeness_of(tensors: Sequence[Tensor | None]) -> Likeness | None:
    """Returns a comparison with the tensors of a call; q, k and v come first.

    None if a tensor is empty or off a multiple of 16 bytes, and if torch has no guards.
    """
    if TensorGuards is None:
        return None
    made = Likeness(tensors)
    return made if made.addresses(tensors) is not None else None
