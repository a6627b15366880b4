"""Finds masks and bands in a mod's graph: scores of -inf become a mask, and a mask on kv_idx - q_idx becomes a band.

A causal or window mask that is written as a mod is therefore as fast as attn_mask_type and window_size: kernels skip all blocks
outside the band.

A finite masking score, such as -1e9, hides a key exactly if every query sees another key whose score is greater by at least 104:
exp of the difference is then 0 in float32. `flexattn.validation.check_floor` checks that condition.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import ARGUMENTS, GRADIENT, call
from flexattn.mod_values import op_name
from flexattn.validation import MASKING


class Fill(enum.IntEnum):
    """Effect of a number that replaces a score. If ZERO replaces a gradient, it passes none on."""

    NONE = 0
    ZERO = 1
    MASKING = 2  # finite, at most `MASKING`
    HIDING = 3  # -inf


class Masks(enum.IntEnum):
    """The hidden scores that may become a band and leave the program."""

    NONE = 0
    EXACT = 1  # -inf
    OPEN_LEFT = 2  # also a finite score if the band is open to the left, because every query then sees key 0
    ALL = 3  # also a finite score under any band, and under any mask that shows each query the key at its own position


class Fact(NamedTuple):
    """Effect of a captured value as a fill in this call, and the position of the same value in score_mod's captures (-1: none)."""

    fill: Fill
    same_as: int = -1


class Implied(NamedTuple):
    """Band and remaining mask: query i sees the keys from i - left to i + right (None: open) that `rest` shows (None: all)."""

    left: int | None
    right: int | None
    rest: Graph | None


class Split(NamedTuple):
    """A graph without its outermost selects: a fill replaces `graph` if `visible` is false (None: never)."""

    graph: Graph
    visible: Graph | None
    is_finite: bool  # at least one fill is MASKING


class _Range(NamedTuple):
    """The distances kv_idx - q_idx from low to high; None: open."""

    low: int | None
    high: int | None


_LARGEST = 2**29  # largest factor or constant: no result overflows int64, and no window exceeds LARGEST_WINDOW
_NOT = ("logical_not", "bitwise_not")
_AND = ("bitwise_and", "logical_and")
_OR = ("bitwise_or", "logical_or")


class _Affine(NamedTuple):
    """The expression q_factor * q_idx + kv_factor * kv_idx + constant."""

    q_factor: int
    kv_factor: int
    constant: int


def fill_of(value: float) -> Fill:
    if value == 0:
        return Fill.ZERO
    if value == -math.inf:
        return Fill.HIDING
    return Fill.MASKING if value <= MASKING else Fill.NONE


def split(graph: Graph, fills: Mapping[str, Fill], *wanted: Fill) -> Split:
    """Splits torch.where(visible, x, fill) into x and visible: a score_mod, or with Fill.ZERO the gradient of a score.

    fills: the effects of the captured numbers, by name. wanted: the effects of a fill.
    """
    result, terms, kinds = output_of(graph), [], set()
    while result.op == "call_function" and op_name(result) == "where":
        condition, x, y = cast("tuple[Node, Node, Node]", result.args)
        if condition.meta["dtype"] is not torch.bool:
            break
        if _fill(y, fills) in wanted:
            kinds.add(_fill(y, fills))
            terms.append((condition, False))
            result = x
        elif _fill(x, fills) in wanted:
            kinds.add(_fill(x, fills))
            terms.append((condition, True))
            result = y
        else:
            break
    if not terms or _fill(result, fills) in wanted:
        return Split(graph, None, False)
    return Split(with_output(graph, result), _all_of(graph, terms), Fill.MASKING in kinds)


def _fill(x: object, fills: Mapping[str, Fill]) -> Fill:
    if isinstance(x, Node) and x.op == "call_function" and op_name(x) == "full":
        return fill_of(float(cast(float, x.args[1])))
    if isinstance(x, Node) and x.op == "placeholder":
        return fills.get(str(x.target), Fill.NONE)
    return Fill.NONE


# Ops that do not turn a usual score into a masking one: their results grow no faster than their operands.
_STEADY = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "abs", "clamp", "maximum", "minimum", "relu", "floor", "ceil", "round"),
        *("trunc", "tanh", "sigmoid", "erf", "sin", "cos", "_to_copy", "full", "detach"),
    )
)


def is_near_its_score(score: Graph, fills: Mapping[str, Fill], tensors: frozenset[str]) -> bool:
    """Returns whether a modified score is about as large as its score: a usual score then stays above every masking value.

    The answer is False if the graph selects between scores or reads one of the captured `tensors`, because either may mask.
    """
    scores: set[Node] = set()
    for node in score.nodes:
        if node.op == "placeholder":
            if node.users and (node.target in tensors or fills.get(str(node.target)) in (Fill.MASKING, Fill.HIDING)):
                return False
            if node.target == "score":
                scores.add(node)
        elif node.op == "call_function":
            op = op_name(node)
            num_scores = sum(x in scores for x in node.args if isinstance(x, Node))
            if op not in _STEADY or (op in ("mul", "div") and num_scores > 1) or (op == "div" and node.args[1] in scores):
                return False
            if op == "full" and not abs(float(cast(float, node.args[1]))) < -MASKING:
                return False
            if num_scores:
                scores.add(node)
    return True


def is_linear(gradient: Graph) -> bool:
    """Returns whether a gradient is linear in the gradient of the modified score, and so is 0 when that is 0."""
    depends: set[Node] = set()
    linear: set[Node] = set()
    for node in gradient.nodes:
        if node.op == "placeholder":
            if node.target == GRADIENT:
                depends.add(node)
                linear.add(node)
            continue
        if node.op != "call_function" or not any(x in depends for x in node.all_input_nodes):
            continue
        depends.add(node)
        op, args = op_name(node), node.args
        operands = [x for x in args if isinstance(x, Node) and x in depends]
        fits = all(x in linear for x in operands)
        if op == "mul":
            fits = fits and len(operands) == 1
        elif op == "div":
            fits = fits and operands == [args[0]] and not node.kwargs
        elif op in ("add", "sub"):
            fits = fits and all(x in linear or _is_zero(x) for x in args)
        elif op == "where":
            fits = fits and args[0] not in depends and all(x in linear or _is_zero(x) for x in args[1:])
        elif op not in ("neg", "_to_copy"):
            fits = False
        if fits:
            linear.add(node)
    return output_of(gradient) in linear or _is_zero(output_of(gradient))


def _is_zero(x: object) -> bool:
    return _fill(x, {}) is Fill.ZERO or (isinstance(x, (int, float)) and x == 0)


def conjunction(a: Graph, b: Graph) -> Graph:
    """Returns the mask that shows the keys that both masks show; captures keep their names."""
    graph = Graph()
    inputs: dict[object, Node] = {}
    copies: dict[Node, Node] = {}
    for node in (*a.find_nodes(op="placeholder"), *b.find_nodes(op="placeholder")):
        if node.target not in inputs:
            inputs[node.target] = graph.node_copy(node)
        copies[node] = inputs[node.target]
    graph.output(call(graph, "bitwise_and", (graph.graph_copy(a, copies), graph.graph_copy(b, copies)), torch.bool))
    return graph


def is_identity(graph: Graph, argument: str = "score") -> bool:
    result = output_of(graph)
    return result.op == "placeholder" and result.target == argument


def implied_band(mask: Graph) -> Implied:
    """Returns the band that a mask_mod's top-level conjunction implies, and the remaining mask."""
    left: int | None = None
    right: int | None = None
    others: list[tuple[Node, bool]] = []
    todo = [(output_of(mask), False)]
    while todo:
        term, is_negated = todo.pop()
        inside = _parts(term, _NOT)
        if inside:
            todo.append((inside[0], not is_negated))
            continue
        parts = _parts(term, _OR if is_negated else _AND)
        if parts:
            todo += [(part, is_negated) for part in parts[::-1]]
            continue
        distances = _distances(term)
        if is_negated and distances is not None:
            distances = _complement(distances)
        if distances is None:
            others.append((term, is_negated))
            continue
        low, high = distances
        if (low is not None and low > 0) or (high is not None and high < 0):  # a band's sides begin at the diagonal
            others.append((term, is_negated))
        if low is not None and low <= 0:
            left = -low if left is None else min(left, -low)
        if high is not None and high >= 0:
            right = high if right is None else min(right, high)
    return Implied(left, right, _all_of(mask, others) if others else None)


def shows_itself(mask: Graph) -> bool:
    """Returns whether a mask_mod provably lets every query see the key at its own position."""
    return _on_the_diagonal(output_of(mask)) is True


def _on_the_diagonal(term: object) -> bool | None:
    """Returns whether a term holds when kv_idx equals q_idx; None if that is unknown."""
    if not isinstance(term, Node) or term.op != "call_function":
        return None
    op = op_name(term)
    if op == "full":
        return bool(term.args[1])
    inside = _parts(term, _NOT)
    if inside:
        answer = _on_the_diagonal(inside[0])
        return None if answer is None else not answer
    for ops, decides in ((_AND, False), (_OR, True)):
        parts = _parts(term, ops)
        if parts:
            answers = [_on_the_diagonal(part) for part in parts]
            return decides if decides in answers else None if None in answers else not decides
    if op not in _COMPARED:
        return None
    x, y = term.args
    if any(isinstance(arg, Node) and arg.meta["dtype"].is_floating_point for arg in (x, y)):
        return None  # NaN is not equal to itself
    x_terms, y_terms = _affine(x), _affine(y)
    if x_terms is not None and y_terms is not None and x_terms.q_factor + x_terms.kv_factor == y_terms.q_factor + y_terms.kv_factor:
        return _COMPARED[op](x_terms.constant, y_terms.constant)
    return _COMPARED[op](0, 0) if _same_on_the_diagonal(x, y) else None


_COMPARED: dict[str, Callable[[int, int], bool]] = {name: getattr(operator, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")}


def _same_on_the_diagonal(x: object, y: object) -> bool:
    """Returns whether two values are equal when kv_idx equals q_idx, because the same ops compute both."""
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_same_on_the_diagonal, x, y))
    if not (isinstance(x, Node) and isinstance(y, Node)):
        return type(x) is type(y) and not isinstance(x, Node) and bool(x == y)
    if x.op != y.op or x.meta["dtype"] is not y.meta["dtype"]:
        return False
    if x.op == "placeholder":
        names = {str(node.target) for node in (x, y)}
        return len(names) == 1 or names == {"q_idx", "kv_idx"}
    return (
        x.op == "call_function"
        and x.target == y.target
        and x.kwargs.keys() == y.kwargs.keys()
        and _same_on_the_diagonal(x.args, y.args)
        and all(_same_on_the_diagonal(value, y.kwargs[name]) for name, value in x.kwargs.items())
    )


def _all_of(mask: Graph, terms: Sequence[tuple[Node, bool]]) -> Graph:
    """Returns the mask that shows a key if all terms do. terms: (node, whether it is negated)."""
    parts = [_negated(with_output(mask, term)) if is_negated else with_output(mask, term) for term, is_negated in terms]
    return functools.reduce(conjunction, parts)


def _negated(mask: Graph) -> Graph:
    result = output_of(mask)
    inside = _parts(result, _NOT)
    if inside:
        return with_output(mask, inside[0])
    mask.erase_node(mask.output_node())
    mask.output(call(mask, "logical_not", (result,), torch.bool))
    return mask


def _parts(term: Node, ops: tuple[str, ...]) -> tuple[Node, ...]:
    """Returns the operands of a term if it is one of these ops on truth values, else ()."""
    if term.op != "call_function" or op_name(term) not in ops:
        return ()
    is_logical = all(isinstance(x, Node) and x.meta["dtype"] is torch.bool for x in term.args)
    return cast("tuple[Node, ...]", term.args) if is_logical else ()


def _distances(term: Node) -> _Range | None:
    """Returns the distances kv_idx - q_idx for which a term holds; None if they are not one range."""
    inside = _parts(term, _NOT)
    if inside:
        inner = _distances(inside[0])
        return None if inner is None else _complement(inner)
    for ops, combined in ((_AND, _intersection), (_OR, _union)):
        parts = _parts(term, ops)
        if parts:
            ranges = [_distances(part) for part in parts]
            return None if ranges[0] is None or ranges[1] is None else combined(ranges[0], ranges[1])
    bounds = _bounds(term)
    if not bounds:
        return None
    ranges = [_Range(-bound, None) if side == "left" else _Range(None, bound) for side, bound in bounds]
    return functools.reduce(_intersection, cast("list[_Range]", ranges))


def _intersection(a: _Range, b: _Range) -> _Range:
    lows, highs = [x.low for x in (a, b) if x.low is not None], [x.high for x in (a, b) if x.high is not None]
    return _Range(max(lows, default=None), min(highs, default=None))


def _union(a: _Range, b: _Range) -> _Range | None:
    """Returns the distances in either range; None if there is a gap between the two."""
    for x, y in ((a, b), (b, a)):
        if x.low is not None and x.high is not None and x.low > x.high:
            return y
        if x.high is not None and y.low is not None and x.high + 1 < y.low:
            return None
    low = None if a.low is None or b.low is None else min(a.low, b.low)
    return _Range(low, None if a.high is None or b.high is None else max(a.high, b.high))


def _complement(x: _Range) -> _Range | None:
    """Returns the distances outside of a range; None if the range is not open on exactly one side."""
    if x.low is None and x.high is not None:
        return _Range(x.high + 1, None)
    if x.high is None and x.low is not None:
        return _Range(None, x.low - 1)
    return None


def _bounds(term: Node) -> list[tuple[str, int]]:
    """Returns the bounds of a comparison: ("left", n) for q_idx - kv_idx <= n, ("right", n) for kv_idx - q_idx <= n."""
    if term.op != "call_function" or op_name(term) not in ("ge", "gt", "le", "lt", "eq"):
        return []
    op = op_name(term)
    larger, smaller = term.args if op in ("ge", "gt") else term.args[::-1]
    if op == "eq":
        return [*_bounds_between(larger, smaller, 0), *_bounds_between(smaller, larger, 0)]
    inside = smaller.args[0] if isinstance(smaller, Node) and smaller.op == "call_function" and op_name(smaller) == "abs" else None
    strict = int(op in ("gt", "lt"))
    if inside is None:
        return _bounds_between(larger, smaller, strict)
    sides = [_bounds_between(larger, inside, strict, sign) for sign in (1, -1)]
    return [*sides[0], *sides[1]] if all(sides) else []


def _bounds_between(larger: object, smaller: object, strict: int, sign: int = 1) -> list[tuple[str, int]]:
    """Returns the bound expressed by larger - sign * smaller >= strict, in a list; [] if it is not a bound."""
    x, y = _affine(larger), _affine(smaller)
    if x is None or y is None:
        return []
    q, kv, constant = x.q_factor - sign * y.q_factor, x.kv_factor - sign * y.kv_factor, x.constant - sign * y.constant - strict
    return [("right" if q == 1 else "left", constant)] if (q, kv) in ((1, -1), (-1, 1)) else []


def _affine(x: object) -> _Affine | None:
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


def output_of(graph: Graph) -> Node:
    result = graph.output_node().args[0]
    assert isinstance(result, Node)
    return result


def with_output(graph: Graph, result: Node) -> Graph:
    """Returns a copy of the graph that returns `result`, without the nodes and captures that `result` does not need."""
    new = Graph()
    copies: dict[Node, Node] = {}
    new.graph_copy(graph, copies)
    new.output(copies[result])
    new.eliminate_dead_code()
    for node in new.find_nodes(op="placeholder"):
        if not node.users and node.target not in (*ARGUMENTS, GRADIENT):
            new.erase_node(node)
    return new
