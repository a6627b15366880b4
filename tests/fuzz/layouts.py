"""Layouts of the tensors of a random call."""

from __future__ import annotations

from random import Random

import torch

from tests.support.guarded_memory import Layout


def draw_layout(rng: Random, sizes: tuple[int, ...], dtype: torch.dtype, kind: str, expandable: int | None) -> Layout:
    """Draws strides, starting with the innermost dim. A margin adds room after a dim, a step after each of its elements."""
    order, steps, margins = list(range(len(sizes))), [1] * len(sizes), [0] * len(sizes)
    offset = rng.randint(1, 7) if kind == "offset" else 0
    if kind == "permuted" and len(sizes) > 1:
        order[:-1] = rng.sample(order[:-1], len(order) - 1)
    if kind == "last dim strided":
        rng.shuffle(order)
    if kind == "sliced":
        margins = [rng.choice([0, 1, 8]) for _ in sizes]
        offset = rng.choice([0, 8])
    if kind == "stepped" and len(sizes) > 1:
        steps[rng.randrange(len(sizes) - 1)] = 2
    strides, stride = [0] * len(sizes), 1
    for dim in reversed(order):
        if kind == "expanded" and dim == expandable:
            continue
        strides[dim] = stride * steps[dim]
        stride = strides[dim] * max(1, sizes[dim] + margins[dim])
    return Layout(sizes, tuple(strides), dtype, offset)
