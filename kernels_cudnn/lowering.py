"""Lowering of a mod's FX graphs to steps, which are cuDNN's pointwise nodes, and to the inputs of these steps.

cuDNN's graphs have no gather, and compute integers in 32 bits. So a value is an input if it does not depend on the score, nor on
both query and key. Such an input is a number, or a tensor with a value for each batch entry, head, query or key. The caller
computes it before the kernel runs, including reads at computed indices. If a tensor has a value for each query and key, it is
read directly.

    mods, recipes = lower(score, mask, gradient, captures)   # FX graphs of aten ops on scalars.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph, Node

from flexattn.kernels_cudnn.lowering_ops import CHEAP, DIVISIONS, OPS, RISKY
from flexattn.mod_values import INT32, INT64, Interval, ancestors, bounds_of, bounds_of_dtype, fits, kind_of, op_name

LONGEST = 2**26  # the largest number of queries or keys. With this bound, few expressions of positions can exceed 32 bits.
POSITION = (0, LONGEST)
ROWS = 2  # tensors with a value for each query that a backward supports. With a third one, cuDNN 9.19 and 9.24 have no plan.
_POSITIONS = ("b", "h", "q_idx", "kv_idx")
_SCORES = ("score", "dscore")


class NotExpressible(Exception):
    """A mod that no cuDNN graph can express. The text names the part that it cannot express."""


class Step(NamedTuple):
    """One value. `op` is "score", "dscore", "q_idx", "kv_idx", "input" (with the input's number in args), or a node of the graph.

    The arguments of a node are the numbers of earlier steps. Truth values have kind "bool"; the graph computes them as 32-bit
    integers.
    """

    op: str
    kind: str  # "float", "int" or "bool".
    args: tuple[int, ...] = ()


class Mods(NamedTuple):
    """The mods of a call as steps, without the values of their inputs. If mods and their inputs' layouts are equal, so is the plan.

    score, mask and gradient are positions in `steps`. If mask is None, nothing is hidden. If gradient is None, it is zero.
    is_guarded: whether the gradient may be infinite for a hidden score.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]  # the kind of each input.
    score: int
    mask: int | None
    gradient: int | None
    is_guarded: bool


Spans = tuple[bool, bool, bool, bool]  # whether a value depends on b, h, q_idx and kv_idx.


class Recipe(NamedTuple):
    """The rule to make an input. It is broadcast over the indices that are not in `spans`."""

    kind: str
    spans: Spans
    is_host: bool  # whether it is a number that is known without reading a tensor.
    constant: float | int | None = None
    graph: Graph | None = None  # a graph of positions and captures, with the value as its only output.
    read: str | None = None  # the name of a capture that is read directly.
    indices: tuple[str | int, ...] = ()  # for each dim of `read` the name of a position, or a number.


class Expression(NamedTuple):
    op: str
    args: tuple[Any, ...]  # numbers of expressions. A placeholder has its name, and a constant its value.
    kind: str
    depends: frozenset[str]  # names of the placeholders that it depends on.
    bounds: tuple[int, int]  # least and greatest value of an integer.
    node: Node | None
    is_cheap: bool  # whether it uses only positions and integers, exact in 32 bits. If so, no tensor is made for it.


def lower(
    score: Graph | None, mask: Graph | None, gradient: Graph | None, captures: Sequence[tuple[str, torch.dtype, int]]
) -> tuple[Mods, tuple[Recipe, ...]]:
    """Returns the mods as steps, and the recipes of their inputs.

    captures: (name, dtype, ndim) of each capture, with ndim -1 for a number.
    gradient: a graph that also has dscore as an argument and returns a list, with the gradient of the score first. Pass None if
    there is no backward, or if the score is not modified.

    Raises NotExpressible.
    """
    lowering = Lowering(captures)
    results: dict[str, int | None] = {}
    for name, graph in (("score_mod", score), ("mask_mod", mask), ("the derivative of score_mod", gradient)):
        results[name] = None
        if graph is None:
            continue
        output: Any = next(node.args[0] for node in graph.nodes if node.op == "output")
        first = output[0] if isinstance(output, (list, tuple)) else output
        if first is not None:
            results[name] = lowering.lower(name, graph, first)
    new_score = results["score_mod"]
    score_step = lowering.step("score", "float") if new_score is None else new_score
    gradient_step = results["the derivative of score_mod"] if gradient is not None else lowering.step("dscore", "float")
    kinds = tuple(recipe.kind for recipe in lowering.recipes)
    mods = Mods(tuple(lowering.steps), kinds, score_step, results["mask_mod"], gradient_step, lowering.is_guarded)
    rows = sum(recipe.spans[2] and not recipe.spans[3] for recipe in lowering.recipes)
    if gradient is not None and rows > ROWS:
        raise NotExpressible(f"the mods read {rows} different values for each query, and cuDNN's backward supports {ROWS}")
    return mods, tuple(lowering.recipes)


class Lowering:
    def __init__(self, captures: Sequence[tuple[str, torch.dtype, int]]) -> None:
        self.captures = {name: (dtype, ndim) for name, dtype, ndim in captures}
        self.steps: list[Step] = []
        self.recipes: list[Recipe] = []
        self.is_guarded = False
        self._numbers: dict[Step, int] = {}
        self._inputs: dict[Hashable, int] = {}
        self._expressions: list[Expression] = []
        self._known: dict[Hashable, int] = {}
        self._values: dict[int, int] = {}
        self._role = ""

    # Expressions: the nodes of all FX graphs, with equal ones merged.

    def lower(self, role: str, graph: Graph, output: Node) -> int:
        self._role = role
        numbers: dict[Node, int] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "call_function"):
                numbers[node] = self._expression(node, numbers)
        result = numbers[output]
        if role.startswith("the derivative"):
            self.is_guarded = any(self._is_risky(self._expressions[n]) for n in self._ancestors(result))
        return self.as_kind(self._value(result), "bool" if role == "mask_mod" else "float")

    def _expression(self, node: Node, numbers: Mapping[Node, int]) -> int:
        if node.op == "placeholder":
            name = str(node.target)
            key: tuple[Hashable, ...] = ("placeholder", name)
            if key not in self._known:
                dtype, _ = self.captures.get(name, (node.meta["dtype"], -1))
                bounds = POSITION if name in _POSITIONS else bounds_of_dtype(dtype)
                is_cheap = name in ("q_idx", "kv_idx")
                self._add(key, Expression("placeholder", (name,), kind_of(dtype), frozenset((name,)), bounds, node, is_cheap))
            return self._known[key]
        op = op_name(node)
        dtype = node.meta["dtype"]
        kind = kind_of(dtype)
        node_args: tuple[Any, ...] = node.args
        if op == "full":
            value = node_args[1]
            return self._constant(bool(value) if kind == "bool" else float(value) if kind == "float" else int(value), node)
        if op == "index":
            node_args = (node_args[0], *node_args[1])
        args = tuple(numbers[x] if isinstance(x, Node) else None if x is None else self._constant(x, node) for x in node_args)
        rounding = node.kwargs.get("rounding_mode")
        if op == "div" and rounding is not None:
            op = "floor_divide" if rounding == "floor" else "trunc_divide"
        key = (op, args, str(dtype))
        if key not in self._known:
            operands = [self._expressions[n] for n in args if n is not None]
            depends = frozenset().union(*(x.depends for x in operands))
            bounds = self._bounds(op, dtype, args) if kind != "float" else INT64
            is_cheap = op in CHEAP[kind] and fits(bounds) and all(x.is_cheap for x in operands)
            if dtype in (torch.float16, torch.bfloat16) and not self._is_hoisted(depends):
                self.refuse(node, f"it computes in {str(dtype).removeprefix('torch.')}, and cuDNN's graphs compute in float32")
            self._add(key, Expression(op, args, kind, depends, bounds, node, is_cheap))
        return self._known[key]

    def _constant(self, value: bool | int | float, node: Node) -> int:
        key = ("constant", type(value).__name__, repr(value))
        if key not in self._known:
            kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
            bounds = (int(value), int(value)) if kind != "float" else INT64
            self._add(key, Expression("constant", (value,), kind, frozenset(), bounds, None, kind != "float" and fits(bounds)))
        return self._known[key]

    def _add(self, key: Hashable, expression: Expression) -> None:
        self._known[key] = len(self._expressions)
        self._expressions.append(expression)

    def _ancestors(self, number: int) -> set[int]:
        todo, seen = [number], {number}
        while todo:
            expression = self._expressions[todo.pop()]
            if expression.op in ("placeholder", "constant"):
                continue
            for x in expression.args:
                if x is not None and x not in seen:
                    seen.add(x)
                    todo.append(x)
        return seen

    def _is_risky(self, x: Expression) -> bool:
        if x.op in DIVISIONS:  # a divisor that many scores share is assumed not to be 0.
            return not self._is_hoisted(self._expressions[x.args[1]].depends)
        return x.op in RISKY and not self._is_hoisted(x.depends)

    def _bounds(self, op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> Interval:
        """Returns the bounds of an integer result, or those of its dtype if the op is unknown or an operand is a float."""
        if dtype is torch.bool:
            return (0, 1)
        if op == "index":
            capture = self._expressions[args[0]]
            return bounds_of_dtype(self.captures[capture.args[0]][0])
        limits = bounds_of_dtype(dtype)
        if any(n is not None and self._expressions[n].kind == "float" for n in args):
            return limits
        operands: list[Any] = [None if n is None else self._expressions[n].bounds for n in args]
        if op == "clamp":  # a limit that is absent changes nothing
            x, low, high = (*operands, None, None)[:3]
            x = bounds_of("maximum", [x, low or x])
            found = bounds_of("minimum", [x, high or x])
        else:
            found = bounds_of(op, operands)
        return found if fits(found, limits) else limits

    # Values: the steps that compute an expression.

    def step(self, op: str, kind: str, *args: int) -> int:
        step = Step(op, kind, args)
        if step not in self._numbers:
            self._numbers[step] = len(self.steps)
            self.steps.append(step)
        return self._numbers[step]

    def _value(self, number: int) -> int:
        value = self._values.get(number)
        if value is None:
            value = self._values[number] = self._lowered(number)
        return value

    def _lowered(self, number: int) -> int:
        x = self._expressions[number]
        if x.op == "placeholder" and x.args[0] in (*_SCORES, "q_idx", "kv_idx"):
            return self.step(x.args[0], x.kind)
        if x.op == "constant":
            return self.number(x.args[0])
        if not x.is_cheap and self._is_hoisted(x.depends):
            return self._hoisted(number)
        if x.op == "index":
            return self._read(number)
        operands = [self._expressions[n] for n in x.args if n is not None]
        values = [self._value(n) for n in x.args if n is not None]
        if x.kind == "int" and not fits(x.bounds):
            self.refuse(x.node, _TOO_WIDE)
        if x.op == "_to_copy":
            return self._converted(x, values[0])
        lowered = OPS.get(x.op)
        if lowered is None:
            self.refuse(x.node, f"cuDNN has no node for {x.op}")
        return lowered(self, x, operands, values)

    def _is_hoisted(self, depends: frozenset[str]) -> bool:
        return depends.isdisjoint(_SCORES) and not {"q_idx", "kv_idx"} <= depends

    def number(self, value: float | int | bool) -> int:
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
        if kind == "int" and not INT32[0] <= value <= INT32[1]:
            raise NotExpressible(f"{self._role} has the number {value}, and cuDNN computes integers in 32 bits")
        constant = int(value) if kind == "bool" else value
        return self._input(("constant", kind, repr(constant)), Recipe(kind, (False, False, False, False), True, constant=constant))

    def _input(self, key: Hashable, recipe: Recipe) -> int:
        if key not in self._inputs:
            self._inputs[key] = len(self.recipes)
            self.recipes.append(recipe)
        return self.step("input", recipe.kind, self._inputs[key])

    def _hoisted(self, number: int) -> int:
        x = self._expressions[number]
        if x.kind == "int" and not fits(x.bounds):
            self.refuse(x.node, _TOO_WIDE)
        spans = _spans(x.depends)
        reads_tensors = any(name in self.captures and self.captures[name][1] >= 0 for name in x.depends)
        assert x.node is not None
        recipe = Recipe(x.kind, spans, not reads_tensors and not any(spans), graph=_cut(x.node))
        return self._input(("hoisted", number), recipe)

    def _read(self, number: int) -> int:
        """Returns the input of a tensor with a value for each query and key, which is read directly."""
        x = self._expressions[number]
        name = self._expressions[x.args[0]].args[0]
        indices: list[str | int] = []
        for i in x.args[1:]:
            index = self._expressions[i]
            if index.op == "placeholder" and index.args[0] in _POSITIONS and index.args[0] not in indices:
                indices.append(index.args[0])
            elif index.op == "constant":
                indices.append(int(index.args[0]))
            else:
                self.refuse(x.node, f"cuDNN has no gather, and the index {self._text(i)} is computed for each query and key")
        if x.kind == "int" and not fits(x.bounds):
            self.refuse(x.node, f"{name} has 64-bit integers, and cuDNN computes integers in 32 bits; capture an int32 tensor")
        recipe = Recipe(x.kind, _spans(indices), False, read=name, indices=tuple(indices))
        return self._input(("read", name, tuple(indices)), recipe)

    def as_kind(self, value: int, kind: str) -> int:
        """Returns a value in another kind. A truth value becomes 0 or 1."""
        step = self.steps[value]
        if step.kind == kind:
            return value
        if step.op == "input":
            recipe = self.recipes[step.args[0]]
            if (constant := recipe.constant) is not None:
                return self.number(bool(constant) if kind == "bool" else float(constant) if kind == "float" else int(constant))
        if kind == "bool":
            return self.step("cmp_neq", "bool", value, self.as_kind(self.number(0), step.kind))
        return self.step("identity", kind, value)

    def _converted(self, x: Expression, value: int) -> int:
        kind = self.steps[value].kind
        if x.kind == "int" and kind == "float":
            self.refuse(x.node, "cuDNN's rounding of a score to an integer is untested")
        return self.as_kind(value, x.kind)

    def refuse(self, node: Node | None, reason: str) -> NoReturn:
        text = "" if node is None else f" `{_text_of(node)}`"
        raise NotExpressible(f"{self._role} has{text}: {reason}")

    def _text(self, number: int) -> str:
        x = self._expressions[number]
        return f"`{_text_of(x.node)}`" if x.node is not None else str(x.args[0])


_TOO_WIDE = "its integers may need more than the 32 bits that cuDNN computes in; capture int32 tensors"


def _spans(names: Container[str | int]) -> Spans:
    b, h, q_idx, kv_idx = (name in names for name in _POSITIONS)
    return b, h, q_idx, kv_idx


def _cut(node: Node) -> Graph:
    """Returns a graph of `node` and all nodes that it depends on, with `node` as the output."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    needed = ancestors([node])
    for x in node.graph.nodes:
        if x in needed:
            copies[x] = graph.node_copy(x, lambda n: copies[n])
            copies[x].meta["dtype"] = x.meta["dtype"]
    graph.output(copies[node])
    return graph


_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "remainder": "%",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_MOST_TEXT = 100


def _text_of(node: Node) -> str:
    """Returns a node as an expression, so that a user finds it in a mod."""

    def text(x: object, depth: int) -> str:
        if not isinstance(x, Node):
            return str(x)
        if x.op == "placeholder":
            return str(x.target)
        op = op_name(x)
        args: tuple[Any, ...] = x.args
        if op == "full":
            return str(args[1])
        if depth == 0:
            return "..."
        if op == "index":
            return f"{args[0].target}[{', '.join(text(i, depth - 1) for i in args[1])}]"
        parts = [text(a, depth - 1) for a in args if a is not None]
        if op in _INFIX and len(parts) == 2 and not x.kwargs:
            return f"({parts[0]} {_INFIX[op]} {parts[1]})"
        return f"{op}({', '.join(parts)})"

    for depth in (4, 3, 2, 1):
        result = text(node, depth)
        if len(result) <= _MOST_TEXT:
            break
    return result.removeprefix("(").removesuffix(")") if result.startswith("(") else result
