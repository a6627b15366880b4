"""Masks and bands hidden in a mod's graph: scores that are -inf become a mask, and a mask on kv_idx - q_idx becomes a band.

So a causal or window mask costs what attn_mask_type and window_size cost, however it is written: blocks outside are never visited.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import call, op_name


class Implied(NamedTuple):
    """Band and remaining mask: query i sees the keys i - left to i + right (None: open) that `rest` lets through (None: all)."""

    left: int | None
    right: int | None
    rest: Graph | None


_LARGEST = 2**29  # of a factor or a constant: nothing made of such leaves int64 and wraps, and no window is over LARGEST_WINDOW


class _Affine(NamedTuple):
    """The expression of_q * q_idx + of_kv * kv_idx + constant."""

    of_q: int
    of_kv: int
    constant: int


def split_hidden(score: Graph) -> tuple[Graph, Graph | None]:
    """Splits a score_mod into a score_mod and the mask_mod that it holds: torch.where(visible, x, -inf) into x and visible."""
    result = _output(score)
    if result.op != "call_function" or op_name(result) != "where":
        return score, None
    condition, x, y = cast("tuple[Any, Any, Any]", result.args)
    if _is_minus_inf(y):
        return _with_output(score, x), _with_output(score, condition)
    if _is_minus_inf(x):
        if condition.op == "call_function" and op_name(condition) in ("logical_not", "bitwise_not"):
            return _with_output(score, y), _with_output(score, condition.args[0])
        hidden = _with_output(score, condition)
        old = _output(hidden)
        hidden.erase_node(next(node for node in hidden.nodes if node.op == "output"))
        hidden.output(call(hidden, "logical_not", (old,), torch.bool))
        return _with_output(score, y), hidden
    return score, None


def conjunction(a: Graph, b: Graph) -> Graph:
    """Returns the mask that lets through what both do; their captures keep their names."""
    graph = Graph()
    inputs: dict[str, Node] = {}
    results = []
    for part in (a, b):
        copies: dict[Node, Node] = {}
        for node in part.nodes:
            if node.op == "placeholder":
                if node.target not in inputs:
                    inputs[node.target] = graph.placeholder(node.target)
                    inputs[node.target].meta["dtype"] = node.meta["dtype"]
                copies[node] = inputs[node.target]
            elif node.op == "call_function":
                copies[node] = graph.node_copy(node, lambda n, copies=copies: copies[n])  # type: ignore[misc]
                copies[node].meta["dtype"] = node.meta["dtype"]
            else:
                results.append(copies[node.args[0]])
    graph.output(call(graph, "bitwise_and", tuple(results), torch.bool))
    return _placeholders_first(graph)


def is_identity(score: Graph) -> bool:
    result = _output(score)
    return result.op == "placeholder" and result.target == "score"


def implied_band(mask: Graph) -> Implied:
    """Returns the band that a mask_mod's top-level conjunction implies, and the mask that is left of it."""
    left: int | None = None
    right: int | None = None
    others: list[Node] = []
    todo = [_output(mask)]
    while todo:
        term = todo.pop()
        if _is_conjunction(term):
            todo += cast("tuple[Node, ...]", term.args[::-1])
            continue
        bounds = _bounds(term)
        if not bounds or any(bound < 0 for _, bound in bounds):  # a band's sides begin at the diagonal
            others.append(term)
        for side, bound in bounds:
            if bound >= 0 and side == "left":
                left = bound if left is None else min(left, bound)
            elif bound >= 0:
                right = bound if right is None else min(right, bound)
    return Implied(left, right, _all_of(mask, others))


def _all_of(mask: Graph, terms: Sequence[Node]) -> Graph | None:
    """Returns the mask that lets through what all terms do; None without terms."""
    parts = [_with_output(mask, term) for term in terms]
    return functools.reduce(conjunction, parts) if parts else None


def _is_conjunction(term: Node) -> bool:
    if term.op != "call_function" or op_name(term) not in ("bitwise_and", "logical_and"):
        return False
    return all(isinstance(x, Node) and x.meta["dtype"] is torch.bool for x in term.args)


def _bounds(term: Node) -> list[tuple[str, int]]:
    """Yields the bounds of a comparison: ("left", n) for q_idx - kv_idx <= n, ("right", n) for kv_idx - q_idx <= n."""
    if term.op != "call_function" or op_name(term) not in ("ge", "gt", "le", "lt"):
        return []
    op = op_name(term)
    larger, smaller = term.args if op in ("ge", "gt") else term.args[::-1]
    strict = int(op in ("gt", "lt"))
    inside = smaller.args[0] if isinstance(smaller, Node) and smaller.op == "call_function" and op_name(smaller) == "abs" else None
    pairs = [(larger, smaller, 1)] if inside is None else [(larger, inside, 1), (larger, inside, -1)]
    bounds = []
    for a, b, sign in pairs:
        x, y = _affine(a), _affine(b)
        if x is None or y is None:
            return []
        q, kv, constant = x.of_q - sign * y.of_q, x.of_kv - sign * y.of_kv, x.constant - sign * y.constant - strict
        if (q, kv) not in ((1, -1), (-1, 1)):
            return []
        bounds.append(("right" if q == 1 else "left", constant))
    return bounds


def _affine(x: Any) -> _Affine | None:
    if isinstance(x, int) and not isinstance(x, bool):
        return _Affine(0, 0, x) if abs(x) <= _LARGEST else None
    if not isinstance(x, Node):
        return None
    if x.op == "placeholder":
        return {"q_idx": _Affine(1, 0, 0), "kv_idx": _Affine(0, 1, 0)}.get(str(x.target))
    if x.op != "call_function" or x.meta["dtype"] is not torch.int64:
        return None
    op = op_name(x)
    if op == "full":
        return _affine(x.args[1])
    parts = [_affine(arg) for arg in x.args]
    if op not in ("add", "sub", "neg") or any(part is None for part in parts):
        return None
    known = [part for part in parts if part is not None]
    if op == "neg":
        return _Affine(*(-a for a in known[0]))
    sign = 1 if op == "add" else -1
    total = _Affine(*(a + sign * b for a, b in zip(*known, strict=True)))
    return total if max(map(abs, total)) <= _LARGEST else None


def _output(graph: Graph) -> Node:
    result = next(node.args[0] for node in graph.nodes if node.op == "output")
    assert isinstance(result, Node)
    return result


def _is_minus_inf(x: Any) -> bool:
    return isinstance(x, Node) and x.op == "call_function" and op_name(x) == "full" and bool(x.args[1] == -math.inf)


def _with_output(graph: Graph, result: Any) -> Graph:
    """Returns a copy that returns another of its nodes, without nodes that this does not need."""
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            new.output(copies[result])
            continue
        copies[node] = new.node_copy(node, lambda n: copies[n])
        copies[node].meta["dtype"] = node.meta["dtype"]
    new.eliminate_dead_code()
    return new


def _placeholders_first(graph: Graph) -> Graph:
    new = Graph()
    copies: dict[Node, Node] = {}
    for node in sorted(graph.nodes, key=lambda n: n.op != "placeholder"):
        if node.op == "output":
            new.output(copies[node.args[0]])
            continue
        copies[node] = new.node_copy(node, lambda n: copies[n])
        copies[node].meta["dtype"] = node.meta["dtype"]
    return new
