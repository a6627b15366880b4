"""Values of a mod's FX graph, as each lowering reads them: their ops and kinds, and bounds of their integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

Interval = tuple[int, int]  # least and greatest value of an integer
INT32: Interval = (-(2**31), 2**31 - 1)
INT64: Interval = (-(2**63), 2**63 - 1)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)
_BOUNDS = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in _INTEGERS} | {torch.bool: (0, 1)}


def op_name(node: Node) -> str:
    """Returns the name of a node's op, without its overload."""
    return node.target._qualified_op_name.removeprefix("aten::")  # type: ignore[union-attr, no-any-return]


def kind_of(dtype: torch.dtype) -> str:
    """Returns "float", "int" or "bool"."""
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Returns the nodes, and all nodes that they are computed from."""
    todo = list(nodes)
    seen = set(todo)
    while todo:
        for x in todo.pop().all_input_nodes:
            if x not in seen:
                seen.add(x)
                todo.append(x)
    return seen


def bounds_of_dtype(dtype: torch.dtype) -> Interval:
    return _BOUNDS.get(dtype, INT64)


def fits(bounds: Interval, dtype_bounds: Interval = INT32) -> bool:
    """Returns whether an integer with these bounds needs no more bits than the dtype has."""
    return dtype_bounds[0] <= bounds[0] and bounds[1] <= dtype_bounds[1]


def bounds_of(op: str, operands: Sequence[Interval]) -> Interval:
    """Returns bounds of an integer op's result from bounds of its operands: all of int64 if the result may exceed that and wrap."""
    corners: list[int]
    if op == "where":
        corners = [*operands[1], *operands[2]]
    elif len(operands) == 1:
        low, high = operands[0]
        corners = {
            "neg": [-high, -low],
            "abs": [0 if low <= 0 <= high else min(abs(low), abs(high)), max(abs(low), abs(high))],
        }.get(op, [*INT64])
        corners = [-1, 1] if op == "sign" else corners
        corners = [max(0, low), max(0, high)] if op == "relu" else corners
        corners = [-high - 1, -low - 1] if op == "bitwise_not" else corners
        corners = [low, high] if op in ("floor", "ceil", "round", "trunc", "_to_copy") else corners
    else:
        (a, b), (c, d) = operands
        if op == "add":
            corners = [a + c, b + d]
        elif op == "sub":
            corners = [a - d, b - c]
        elif op == "mul":
            corners = [a * c, a * d, b * c, b * d]
        elif op == "maximum":
            corners = [max(a, c), max(b, d)]
        elif op == "minimum":
            corners = [min(a, c), min(b, d)]
        elif op in ("floor_divide", "trunc_divide"):
            corners = [min(a, -b, 0), max(b, -a, 0)] if a < 0 or c < 0 else [0, b]
        elif op == "remainder":
            corners = [0, d] if c >= 0 else [min(c, 0), max(d, 0)]
        elif op == "fmod":
            corners = [0 if a >= 0 else -max(abs(c), abs(d)), max(abs(c), abs(d)) if b > 0 else 0]
        elif op == "bitwise_and" and (a >= 0 or c >= 0):
            corners = [0, min(x for x, low in ((b, a), (d, c)) if low >= 0)]
        elif op in ("bitwise_or", "bitwise_xor") and a >= 0 and c >= 0:
            corners = [0, 2 ** max(b, d).bit_length() - 1]
        else:
            corners = [*INT64]
    bounds = min(corners), max(corners)
    return bounds if fits(bounds, INT64) else INT64  # a result past int64 wraps to its other end
