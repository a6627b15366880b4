"""The score_mods and mask_mods that the fuzz draws: as attention() takes them, and in a closed form for its oracle.

Most are plain torch, which is its own closed form: called with whole index tensors it gives all scores at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import mods

Make = Callable[[dict[str, Tensor], dict[str, Any]], Callable[..., Any]]  # of captures by name, and of numbers by name

SIZES = (5, 16, 33)  # values of a number in a mask, which is part of a compiled kernel
TABLE, BUCKETS = 8, 16
T5_FARTHEST = 128


class Drawn(NamedTuple):
    """A mod's captures by name, with their dims: "b", "h", "s" (the longest sequence) or a size; and how to make it."""

    captures: dict[str, tuple[str | int, ...]]
    make: Make
    dense: Make | None = None  # the closed form, if it is not `make`


def _distance(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    by_head = t["by_head"]
    return lambda score, b, h, i, j: score + by_head[h] * (i - j).abs()


def _capped(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    cap, by_key = t["cap"], t["by_key"]
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap) + by_key[b, j]


def _checkered(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    by_head, by_key = t["by_head"], t["by_key"]
    return lambda score, b, h, i, j: torch.where((i + j) % 3 == 0, score * by_head[h], score - by_key[b, j])


def _gated(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    by_key = t["by_key"]
    return lambda score, b, h, i, j: score * torch.sigmoid(by_key[b, i])


def _holes(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    return lambda score, b, h, i, j: torch.where(j % 5 != h, score, float("-inf"))


def _affine(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    factor, shift = n["factor"], n["shift"]
    return lambda score, b, h, i, j: score * factor + shift


def _constant(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    by_head = t["by_head"]
    return lambda score, b, h, i, j: by_head[h] * (j % 7)


def _outside(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    """Negative indices count from the end, and outside of the table a read gives 0."""
    table = t["table"]
    return lambda score, b, h, i, j: score + table[j - i + 5]


def _outside_dense(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    table = t["table"]

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        index = j - i + 5
        return score + torch.where((index >= -TABLE) & (index < TABLE), table[index % TABLE], 0.0)

    return mod


def _softcap_dense(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    return lambda score, b, h, i, j: n["cap"] * torch.tanh(score / n["cap"])


def _relative_dense(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    """Returns T5's bucket of each distance, computed like the transformers library."""

    def bucket(distance: int) -> int:
        side_buckets = BUCKETS // 2
        first, far = (side_buckets if distance > 0 else 0), abs(distance)
        single = side_buckets // 2
        if far < single:
            return first + far
        wide = math.log(far / single) / math.log(T5_FARTHEST / single) * (side_buckets - single)
        return first + min(side_buckets - 1, single + int(wide + 1e-9))

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        farthest = max(i.shape[0], j.shape[0])
        buckets = torch.tensor([bucket(d) for d in range(-farthest, farthest + 1)], device=score.device)
        return score + t["buckets"][buckets[j - i + farthest], h]

    return mod


SCORE_MODS = {
    "distance": Drawn({"by_head": ("h",)}, _distance),
    "capped": Drawn({"cap": (), "by_key": ("b", "s")}, _capped),
    "checkered": Drawn({"by_head": ("h",), "by_key": ("b", "s")}, _checkered),
    "gated": Drawn({"by_key": ("b", "s")}, _gated),
    "holes": Drawn({}, _holes),
    "affine": Drawn({}, _affine),
    "constant": Drawn({"by_head": ("h",)}, _constant),
    "outside": Drawn({"table": (TABLE,)}, _outside, _outside_dense),
    "softcap": Drawn({}, lambda t, n: mods.softcap(n["cap"]), _softcap_dense),
    "alibi": Drawn(
        {"by_head": ("h",)},
        lambda t, n: mods.alibi(t["by_head"]),
        lambda t, n: lambda score, b, h, i, j: score - t["by_head"][h] * (i - j).abs(),
    ),
    "relative": Drawn({"buckets": (BUCKETS, "h")}, lambda t, n: mods.relative_bias(t["buckets"]), _relative_dense),
}


# Masks of a large finite number instead of -inf: `hidden` and `cut` are of integers, and leave whole tiles and whole rows.


def _replaced(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    cut, value = t["cut"], n["value"]
    return lambda score, b, h, i, j: torch.where(j >= cut[b], score, value)


def _added(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    hidden, value = t["hidden"], n["value"]
    return lambda score, b, h, i, j: score + torch.where(hidden[b, i] == 0, value, 0.0)


def _windowed(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    size, value = n["size"], n["value"]
    return lambda score, b, h, i, j: torch.where((j <= i) & (i - j < size), score, value)


EXTREME_MODS = {
    "replaced": Drawn({"cut": ("b",)}, _replaced),
    "added": Drawn({"hidden": ("b", "s")}, _added),
    "windowed": Drawn({}, _windowed),
}


def _pattern(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    return lambda b, h, i, j: (i + j + h) % 4 != 0


def _groups(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    size = n["size"]
    return lambda b, h, i, j: (i // size == j // size) | (h == 1)


def _rows(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    hidden = t["hidden"]
    return lambda b, h, i, j: (hidden[b, i] > 0) & (j % 3 != 1)


def _document_dense(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    return lambda b, h, i, j: t["documents"][i] == t["documents"][j]


def _natten_dense(t: dict[str, Tensor], n: dict[str, Any]) -> Callable[..., Any]:
    """Each of 5 x 7 pixels sees the 3 x 3 around it, moved inward at the borders; rows go on below the image."""

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        y, x = (i // 7).clamp(1, 3), (i % 7).clamp(1, 5)
        return ((j // 7 - y).abs() <= 1) & ((j % 7 - x).abs() <= 1)

    return mod


MASK_MODS = {
    "pattern": Drawn({}, _pattern),
    "groups": Drawn({}, _groups),
    "rows": Drawn({"hidden": ("b", "s")}, _rows),
    "document": Drawn({"documents": ("s",)}, lambda t, n: mods.document(t["documents"]), _document_dense),
    "causal documents": Drawn(
        {"documents": ("s",)},
        lambda t, n: mods.both(mods.causal(), mods.document(t["documents"])),
        lambda t, n: lambda b, h, i, j: (j <= i) & (t["documents"][i] == t["documents"][j]),
    ),
    "either": Drawn(
        {},
        lambda t, n: mods.either(mods.causal(), mods.sliding_window(0, n["size"])),
        lambda t, n: lambda b, h, i, j: (j <= i) | ((j >= i) & (j - i <= n["size"])),
    ),
    "dilated": Drawn(
        {},
        lambda t, n: mods.dilated_sliding_window(n["size"], 3),
        lambda t, n: lambda b, h, i, j: ((i - j).abs() <= 3 * n["size"]) & ((i - j).abs() % 3 == 0),
    ),
    "prefix": Drawn(
        {"cut": ("b",)},
        lambda t, n: mods.prefix_lm(t["cut"]),
        lambda t, n: lambda b, h, i, j: (j <= i) | (j < t["cut"][b]),
    ),
    "natten": Drawn({}, lambda t, n: mods.natten_2d(5, 7, 3), _natten_dense),
}

INTEGERS = ("cut", "hidden", "documents")
