"""The block test of a mask_mod: a Triton function, made from its graph, that bounds the mask over a whole block.

It answers two questions: do all queries of a block see all of its keys, and may any query see any key? Integers become intervals,
and conditions become pairs (surely, possibly). So a block that the function hides is hidden, and a block that it calls full is
full. If the graph has an operation that is not supported here, the answer is "perhaps".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from flexattn.kernels_triton.mods.hoisting import inputs_of
from flexattn.kernels_triton.mods.interval_math import LARGEST_FACTOR
from flexattn.kernels_triton.mods.lowering import Layout, compile_named
from flexattn.mod_values import ancestors, op_name

ARGUMENTS = ("b", "h", "q_low", "q_high", "kv_low", "kv_high", "q_ranges", "kv_ranges", "captures")
BLOCK_ARGUMENTS = ("b", "h", "low", "high", "captures", "SPAN: tl.constexpr")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Interval(NamedTuple):
    low: str
    high: str
    is_point: bool  # equal for all queries and keys of a block


class _Condition(NamedTuple):
    surely: str
    possibly: str
    can_hide: bool  # whether it can be proved false, so that the proof can matter
    can_show: bool  # whether it can be proved true


_ANY = _Condition("no", "yes", False, False)


class BlockTest(NamedTuple):
    """Triton functions that bound a mask over whole blocks.

    mask_of_block: ARGUMENTS -> (all are visible, any may be), for tiles that broadcast against each other. The arguments are b, h,
    the first and last positions, and the results of the two other functions.

    ranges_of_q_block, ranges_of_kv_block: BLOCK_ARGUMENTS -> (low, high, low, high, ...) of the values that the mask reads for a
    block of at most SPAN positions; None: it reads none. num_ranges_of_block: the number of these pairs for each.

    can_hide_block, can_show_block: whether a block can be proved hidden, and fully visible.
    """

    mask_of_block: object
    ranges_of_q_block: object
    ranges_of_kv_block: object
    num_ranges_of_block: tuple[int, int]
    can_hide_block: bool
    can_show_block: bool


def lower_intervals(graph: Graph, captures: Sequence[Layout]) -> BlockTest | None:
    """Returns functions that bound a mask_mod over blocks; None if nothing can be proved of any block. All integers are int64."""
    lowering = _Lowering(graph, captures)
    result = lowering.result()
    if not isinstance(result, _Condition) or not (result.can_hide or result.can_show):
        return None
    lines = [*_constants("(q_low + kv_low)"), *lowering.lines]
    lines.append(f"return no | ({result.surely}), no | ({result.possibly})")
    reads = (lowering.reads["q"], lowering.reads["kv"])
    q_ranges, kv_ranges = (
        _compiled("ranges_of_block", BLOCK_ARGUMENTS, _Lowering(graph, captures, side).ranges(nodes)) if nodes else None
        for side, nodes in lowering.reads.items()
    )
    block_test = _compiled("mask_of_block", ARGUMENTS, lines)
    return BlockTest(block_test, q_ranges, kv_ranges, (len(reads[0]), len(reads[1])), result.can_hide, result.can_show)


def _compiled(name: str, arguments: Sequence[str], lines: Sequence[str]) -> Any:
    body = "\n".join(f"    {line}" for line in lines)
    return compile_named(name, f"@triton.jit\ndef {name}({', '.join(arguments)}):\n{body}\n")


def _constants(tile: str) -> list[str]:
    """Returns the lines that define the conditions `no` and `yes`, in the shape of a tile."""
    return [f"no = {tile} != {tile}", f"yes = {tile} == {tile}"]


class _Lowering:
    """side: the side of the block whose ranges are computed, for positions of that side only; None: the whole mask."""

    def __init__(self, graph: Graph, captures: Sequence[Layout], side: str | None = None) -> None:
        self.graph = graph
        self.side = side
        self.reads: dict[str, list[Node]] = {"q": [], "kv": []}  # reads of the whole mask, computed once for each block
        self.captures = {layout.name: layout for layout in captures}
        self.lines: list[str] = []
        self.values: dict[Node, _Interval | _Condition | Layout | None] = {}

    def result(self) -> Any:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(str(node.target))
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            else:
                return self._operand(node.args[0])
        raise AssertionError("a graph without an output")

    def ranges(self, reads: Sequence[Node]) -> list[str]:
        """Returns the lines of a function that returns the ranges of these reads, one after the other."""
        needed = ancestors(reads)
        for node in self.graph.nodes:
            if node in needed:
                self.values[node] = self._input(str(node.target)) if node.op == "placeholder" else self._call(node)
        ends = [end for node in reads for end in self._ends(self.values[node])]
        return [*_constants("low"), *self.lines, f"return ({', '.join(ends)},)"]

    def _ends(self, value: object) -> tuple[str, str]:
        """Returns the ends of an interval, or of a condition as a number."""
        if isinstance(value, _Condition):
            return f"({value.surely}).to(tl.int64)", f"({value.possibly}).to(tl.int64)"
        assert isinstance(value, _Interval)
        return value.low, value.high

    def _input(self, name: str) -> _Interval | Layout | None:
        if name in ("b", "h"):
            return _Interval(name, name, True)
        if name in ("q_idx", "kv_idx"):
            prefix = "" if self.side else f"{name.removesuffix('_idx')}_"
            return _Interval(f"{prefix}low", f"{prefix}high", False)
        return self.captures.get(name)

    def _operand(self, x: object) -> object:
        if isinstance(x, Node):
            return self.values[x]
        if isinstance(x, bool):
            return _Condition("yes" if x else "no", "yes" if x else "no", not x, x)
        number = f"(b * 0 + {x})"  # a tile, because Triton's interpreter does not join a number's comparison with a tile's
        return _Interval(number, number, True) if isinstance(x, int) and abs(x) <= 2**40 else None

    def _integer(self, x: object) -> _Interval | None:
        value = self._operand(x)
        if isinstance(value, _Condition):
            return _Interval(f"({value.surely}).to(tl.int64)", f"({value.possibly}).to(tl.int64)", False)
        return value if isinstance(value, _Interval) else None

    def _condition(self, x: object) -> _Condition:
        value = self._operand(x)
        if isinstance(value, _Interval):  # for example an integer operand of logical_and
            surely, possibly = self._pair("interval_math.equal", value.low, value.high, "0", "0")
            return _Condition(f"({possibly} == 0)", f"({surely} == 0)", True, True)
        return value if isinstance(value, _Condition) else _ANY

    def _pair(self, function: str, *arguments: str) -> tuple[str, str]:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name}_low, {name}_high = {function}({', '.join(arguments)})")
        return f"{name}_low", f"{name}_high"

    def _decided(self, surely: str, possibly: str, can_hide: bool, can_show: bool) -> _Condition:
        name = f"x{len(self.lines)}"
        self.lines += [f"{name}_surely = {surely}", f"{name}_possibly = {possibly}"]
        return _Condition(f"{name}_surely", f"{name}_possibly", can_hide, can_show)

    def _computed(self, function: str, *operands: _Interval) -> _Interval:
        """Returns the result of a function of `interval_math` for some intervals."""
        ends = [end for x in operands for end in (x.low, x.high)]
        return _Interval(*self._pair(f"interval_math.{function}", *ends), all(x.is_point for x in operands))

    def _call(self, node: Node) -> _Interval | _Condition | None:
        op, dtype = op_name(node), node.meta["dtype"]
        if op == "index":
            return self._read(node)
        if dtype is torch.bool:
            return self._logical(op, node)
        return self._arithmetic(op, node) if dtype is torch.int64 else None

    def _logical(self, op: str, node: Node) -> _Condition:
        if op in ("eq", "ne", "lt", "le", "gt", "ge"):
            return self._comparison(op, node)
        if op in ("bitwise_not", "logical_not"):
            x = self._condition(node.args[0])
            return _Condition(f"({x.possibly} == 0)", f"({x.surely} == 0)", x.can_show, x.can_hide)
        if op in ("bitwise_and", "logical_and", "bitwise_or", "logical_or"):
            x, y = (self._condition(arg) for arg in node.args)
            is_and = op.endswith("and")
            symbol = "&" if is_and else "|"
            either, both = (
                (x.can_hide or y.can_hide, x.can_show and y.can_show),
                (x.can_hide and y.can_hide, x.can_show or y.can_show),
            )
            shown = either if is_and else both
            return self._decided(f"{x.surely} {symbol} {y.surely}", f"{x.possibly} {symbol} {y.possibly}", *shown)
        if op == "where":
            c, x, y = (self._condition(arg) for arg in node.args)
            surely = f"({c.surely} & {x.surely}) | (({c.possibly} == 0) & {y.surely}) | ({x.surely} & {y.surely})"
            possibly = f"({c.possibly} & {x.possibly}) | (({c.surely} == 0) & {y.possibly})"
            return self._decided(surely, possibly, x.can_hide or y.can_hide, x.can_show or y.can_show)
        if op == "_to_copy":
            return self._condition(node.args[0])
        if op == "full":
            return self._condition(bool(node.args[1]))
        return _ANY

    def _comparison(self, op: str, node: Node) -> _Condition:
        x, y = (self._integer(arg) for arg in node.args)
        if x is None or y is None:
            return _ANY
        if op in ("eq", "ne"):
            surely, possibly = self._pair("interval_math.equal", x.low, x.high, y.low, y.high)
            equal = (surely, possibly) if op == "eq" else (f"({possibly} == 0)", f"({surely} == 0)")
            return _Condition(*equal, True, True)
        if op in ("gt", "ge"):
            x, y = y, x
        symbol = "<" if op in ("lt", "gt") else "<="
        return _Condition(f"({x.high} {symbol} {y.low})", f"({x.low} {symbol} {y.high})", True, True)

    def _arithmetic(self, op: str, node: Node) -> _Interval | None:
        if op == "clamp":
            return self._clamped(node)
        if op == "where":
            condition = self._condition(node.args[0])
            x, y = (self._integer(arg) for arg in node.args[1:])
            if x is None or y is None:
                return None
            pair = self._pair("interval_math.either", condition.surely, condition.possibly, x.low, x.high, y.low, y.high)
            return _Interval(*pair, False)
        if op == "full":
            return self._integer(node.args[1])
        operands = [self._integer(arg) for arg in node.args[:2]]
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands):
            return None
        x, y = known[0], known[-1]
        if op in ("_to_copy", "floor", "ceil", "round", "trunc"):
            return x
        if op in ("neg", "abs"):
            return self._computed({"neg": "negated", "abs": "absolute"}[op], x)
        if op in ("add", "sub"):
            return self._computed({"add": "added", "sub": "subtracted"}[op], x, y)
        if op in ("minimum", "maximum"):
            return _Interval(f"tl.{op}({x.low}, {y.low})", f"tl.{op}({x.high}, {y.high})", x.is_point and y.is_point)
        return self._by_number(op, node, x)

    def _by_number(self, op: str, node: Node, x: _Interval) -> _Interval | None:
        """Returns products with, and quotients by, a number that is written in the mod."""
        numbers = [arg for arg in node.args if isinstance(arg, int) and abs(arg) <= LARGEST_FACTOR]
        if len(numbers) != 1:
            return None
        number = numbers[0]
        if op == "mul":
            other = self._integer(node.args[1] if node.args[0] is number else node.args[0])
            return other and _Interval(*self._pair("interval_math.scaled", other.low, other.high, str(number)), other.is_point)
        if node.args[1] is not number or number <= 0:
            return None
        function = {"remainder": "remainder", "floor_divide": "floor_divided"}.get(op)
        if op == "div" and node.kwargs.get("rounding_mode") == "floor":
            function = "floor_divided"
        if function is None:
            return None
        return _Interval(*self._pair(f"interval_math.{function}", x.low, x.high, str(number)), x.is_point)

    def _clamped(self, node: Node) -> _Interval | None:
        x, *bounds = (*node.args, None, None)[:3]
        value = self._integer(x)
        for bound, function in zip(bounds, ("maximum", "minimum"), strict=True):
            limit = None if bound is None else self._integer(bound)
            if value is None or (bound is not None and limit is None):
                return None
            if limit is not None:
                low, high = (f"tl.{function}({a}, {b})" for a, b in ((value.low, limit.low), (value.high, limit.high)))
                value = _Interval(low, high, value.is_point and limit.is_point)
        return value

    def _read(self, node: Node) -> _Interval | _Condition | None:
        """Returns the range of a capture; its indices must be equal for a block, except for one that depends on a position."""
        capture, positions = cast("tuple[Node, list[Any]]", node.args)
        layout, indices = self.values[capture], [self._integer(i) for i in positions]
        if not isinstance(layout, Layout) or layout.dtype not in _INTEGERS:
            return None
        moving = [dim for dim, index in enumerate(indices) if index is not None and not index.is_point]
        if len(moving) > 1 or any(index is None for index in indices):
            return None
        if moving and self.side is None:
            return self._read_before(node, positions[moving[0]], layout.dtype is torch.bool)
        pointer, start = f"captures[{layout.start}]", layout.start + 1
        sizes, strides = (
            [f"mod_math.read_size(captures[{start + n * layout.ndim + d}])" for d in range(layout.ndim)] for n in (0, 1)
        )
        offset, inside, known = "b * 0", "(b == b)", "(b == b)"
        for dim, index in enumerate(indices):
            if index is not None and dim not in moving:
                name = f"x{len(self.lines)}_index"
                self.lines.append(f"{name} = tl.where({index.low} < 0, {index.low} + {sizes[dim]}, {index.low})")
                inside = f"{inside} & ({name} >= 0) & ({name} < {sizes[dim]})"
                known = f"{known} & ({index.low} == {index.high})"
                offset = f"{offset} + {name} * {strides[dim]}"
        index = indices[moving[0]] if moving else None
        if index is None:
            low, high = self._pair("interval_math.read_one", pointer, offset, inside, known)
        else:
            range_arguments = (index.low, index.high, sizes[moving[0]], strides[moving[0]])
            low, high = self._pair("interval_math.read_range", f"{pointer} + ({offset})", *range_arguments, inside, known, "SPAN")
        if layout.dtype is torch.bool:  # an open interval begins below 0
            return _Condition(f"({low} > 0)", f"({high} > 0)", True, True)
        return _Interval(low, high, not moving)

    def _read_before(self, node: Node, index: Node, is_condition: bool) -> _Interval | _Condition | None:
        sides = [side for side in self.reads if f"{side}_idx" in inputs_of(index)]
        if len(sides) != 1:
            return None
        n = len(self.reads[sides[0]])
        self.reads[sides[0]].append(node)
        low, high = (f"{sides[0]}_ranges[{2 * n + end}]" for end in (0, 1))
        return _Condition(f"({low} != 0)", f"({high} != 0)", True, True) if is_condition else _Interval(low, high, False)
