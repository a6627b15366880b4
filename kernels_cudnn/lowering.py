"""From a mod's FX graphs to steps that are cuDNN's pointwise nodes, and the inputs that they read.

cuDNN's graphs have no gather, and compute integers in 32 bits. So what does not depend on the score, nor on query and key both, is
no step but an input: a number, or a tensor with a value for each batch entry, head, query or key, which the caller computes before
the kernel, reads at computed indices included. A tensor with a value for each query and key is read as it lies.

    mods, recipes = lower(score, mask, gradient, captures)   # FX graphs of aten ops on scalars; what each captured tensor is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph, Node

from flexattn.kernels_cudnn.lowering_ops import CHEAP, DIVISIONS, INTERVALS, OPS, RISKY

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
LONGEST = 2**26  # queries or keys: with it, few expressions of positions can pass 32 bits
POSITION = (0, LONGEST)
ROWS = 2  # tensors with a value for each query that a backward takes: with a third, cuDNN 9.19 and 9.24 have no plan
_BOUNDS = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.int32: INT32,
    torch.bool: (0, 1),
}
_POSITIONS = ("b", "h", "q_idx", "kv_idx")
_SCORES = ("score", "dscore")


class NotExpressible(Exception):
    """A mod that no cuDNN graph can say; the text says what of it."""


class Step(NamedTuple):
    """One value: op is "score", "dscore", "q_idx", "kv_idx", "input" (args: its number), or a node of the graph on earlier steps.

    Truth values are of kind "bool", and in the graph 32-bit integers, 0 or 1.
    """

    op: str
    kind: str  # "float", "int" or "bool"
    args: tuple[int, ...] = ()


class Mods(NamedTuple):
    """The mods of a call as graphs, whatever the values of their inputs: equal mods of equal inputs are one plan.

    score, mask and gradient are positions among `steps`. mask: None hides nothing. gradient: None is zero. is_guarded: the gradient
    may be infinite where a score is hidden.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]  # the kind of each
    score: int
    mask: int | None
    gradient: int | None
    is_guarded: bool


class Recipe(NamedTuple):
    """Recipe of an input; `spans`: which of (b, h, q_idx, kv_idx) it has values for, broadcast over the others."""

    kind: str
    spans: tuple[bool, bool, bool, bool]
    is_host: bool  # a number that is known without reading a tensor
    constant: float | int | None = None
    graph: Graph | None = None  # a graph of positions and captures, whose one output is the value
    read: str | None = None  # a capture, read at `at`: a name of _POSITIONS or a number for each of its dims
    at: tuple[str | int, ...] = ()


class Expression(NamedTuple):
    op: str
    args: tuple[Any, ...]  # numbers of expressions, or constants as ("const", value)
    kind: str
    depends: frozenset[str]
    bounds: tuple[int, int]  # least and greatest value of an integer
    node: Node | None
    is_cheap: bool  # positions and whole numbers alone, exact in 32 bits: no tensor is made for it


def lower(
    score: Graph | None, mask: Graph | None, gradient: Graph | None, captures: Sequence[tuple[str, torch.dtype, int]]
) -> tuple[Mods, tuple[Recipe, ...]]:
    """The mods as steps, and what their inputs are made of; captures: (name, dtype, ndim), ndim -1 for a number.

    `gradient` takes dscore too and returns a list, of which the first is the gradient of the score; None where there is no
    backward, or the score is not modified.

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
    of_score = lowering.step("score", "float") if new_score is None else new_score
    of_gradient = results["the derivative of score_mod"] if gradient is not None else lowering.step("dscore", "float")
    steps = tuple(lowering.steps)
    mods = Mods(
        steps, tuple(recipe.kind for recipe in lowering.recipes), of_score, results["mask_mod"], of_gradient, lowering.is_guarded
    )
    rows = sum(recipe.spans[2] and not recipe.spans[3] for recipe in lowering.recipes)
    if gradient is not None and rows > ROWS:
        raise NotExpressible(f"the mods read {rows} different values for each query, and cuDNN's backward takes {ROWS}")
    return mods, tuple(lowering.recipes)


class Lowering:
    def __init__(self, captures: Sequence[tuple[str, torch.dtype, int]]) -> None:
        self.captures = {name: (dtype, ndim) for name, dtype, ndim in captures}
        self.steps: list[Step] = []
        self.recipes: list[Recipe] = []
        self.is_guarded = False
        self._numbers: dict[Step, int] = {}
        self._inputs: dict[Any, int] = {}
        self._expressions: list[Expression] = []
        self._known: dict[Any, int] = {}
        self._values: dict[int, int] = {}
        self._role = ""

    # Expressions: what the FX graphs say, equal ones once, whichever graph they come from.

    def lower(self, role: str, graph: Graph, output: Node) -> int:
        self._role = role
        numbers: dict[Node, int] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "call_function"):
                numbers[node] = self._expression(node, numbers)
        wanted = numbers[output]
        if role.startswith("the derivative"):
            self.is_guarded = any(self._is_risky(self._expressions[n]) for n in self._ancestors(wanted))
        return self.as_kind(self._value(wanted), "bool" if role == "mask_mod" else "float")

    def _expression(self, node: Node, numbers: Mapping[Node, int]) -> int:
        if node.op == "placeholder":
            name = str(node.target)
            key: Any = ("placeholder", name)
            if key not in self._known:
                dtype, _ = self.captures.get(name, (node.meta["dtype"], -1))
                bounds = POSITION if name in _POSITIONS else _BOUNDS.get(dtype, INT64)
                is_cheap = name in ("q_idx", "kv_idx")
                self._add(key, Expression("placeholder", (name,), _kind(dtype), frozenset((name,)), bounds, node, is_cheap))
            return self._known[key]
        op = _op_name(node)
        dtype = node.meta["dtype"]
        kind = _kind(dtype)
        if op == "full":
            value = node.args[1]
            return self._constant(bool(value) if kind == "bool" else float(value) if kind == "float" else int(value), node)  # type: ignore[arg-type]
        given: tuple[Any, ...] = node.args
        if op == "index":
            given = (node.args[0], *node.args[1])  # type: ignore[misc]
        args = tuple(numbers[x] if isinstance(x, Node) else None if x is None else self._constant(x, node) for x in given)
        rounding = node.kwargs.get("rounding_mode")
        if op == "div" and rounding is not None:
            op = "floor_divide" if rounding == "floor" else "trunc_divide"
        key = (op, args, str(dtype))
        if key not in self._known:
            operands = [self._expressions[n] for n in args if n is not None]
            depends = frozenset().union(*(x.depends for x in operands))
            bounds = self._bounds(op, dtype, args) if kind != "float" else INT64
            is_cheap = op in CHEAP and kind != "float" and _fits(bounds) and all(x.is_cheap for x in operands)
            if dtype in (torch.float16, torch.bfloat16) and not self._is_hoisted(depends):
                self.refuse(node, f"it computes in {str(dtype).removeprefix('torch.')}, and the graphs in float32")
            self._add(key, Expression(op, args, kind, depends, bounds, node, is_cheap))
        return self._known[key]

    def _constant(self, value: Any, node: Node) -> int:
        key = ("constant", type(value).__name__, repr(value))
        if key not in self._known:
            kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
            bounds = (int(value), int(value)) if kind != "float" else INT64
            self._add(key, Expression("constant", (value,), kind, frozenset(), bounds, None, kind != "float" and _fits(bounds)))
        return self._known[key]

    def _add(self, key: Any, expression: Expression) -> None:
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
        if x.op in DIVISIONS:  # by one number for many scores, which is not 0
            return not self._is_hoisted(self._expressions[x.args[1]].depends)
        return x.op in RISKY and not self._is_hoisted(x.depends)

    def _bounds(self, op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[int, int]:
        """Returns bounds of an integer result; those of the dtype for operands that are not integers and for unknown ops."""
        if dtype is torch.bool:
            return (0, 1)
        if op == "index":
            capture = self._expressions[args[0]]
            return _BOUNDS.get(self.captures[capture.args[0]][0], INT64)
        operands = [None if n is None else self._expressions[n] for n in args]
        if any(x is not None and x.kind == "float" for x in operands):
            return _BOUNDS.get(dtype, INT64)
        function = INTERVALS.get(op)
        if function is None:
            return _BOUNDS.get(dtype, INT64)
        low, high = function(*(None if x is None else x.bounds for x in operands))
        limits = _BOUNDS.get(dtype, INT64)
        return (low, high) if limits[0] <= low and high <= limits[1] else limits

    # Values: steps of the graph.

    def step(self, op: str, kind: str, *args: int) -> int:
        step = Step(op, kind, args)
        if step not in self._numbers:
            self._numbers[step] = len(self.steps)
            self.steps.append(step)
        return self._numbers[step]

    def _value(self, number: int) -> int:
        found = self._values.get(number)
        if found is None:
            found = self._values[number] = self._made(number)
        return found

    def _made(self, number: int) -> int:
        x = self._expressions[number]
        if x.op == "placeholder" and x.args[0] in (*_SCORES, "q_idx", "kv_idx"):
            return self.step(x.args[0], x.kind)
        if x.op == "constant":
            return self.number(x.args[0])
        if not x.is_cheap and self._is_hoisted(x.depends):
            return self._hoisted(number)
        if x.op == "index":
            return self._read(number)
        operands = [None if n is None else self._expressions[n] for n in x.args]
        values = [None if n is None else self._value(n) for n in x.args]
        if x.kind == "int" and not _fits(x.bounds):
            self.refuse(x.node, "its whole numbers may need more than the 32 bits that cuDNN computes in; capture int32 tensors")
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
            raise NotExpressible(f"{self._role} has the number {value}, and cuDNN computes whole numbers in 32 bits")
        plain = int(value) if kind == "bool" else value
        return self._input(("constant", kind, repr(plain)), Recipe(kind, (False,) * 4, True, constant=plain))

    def _input(self, key: Any, recipe: Recipe) -> int:
        if key not in self._inputs:
            self._inputs[key] = len(self.recipes)
            self.recipes.append(recipe)
        return self.step("input", recipe.kind, self._inputs[key])

    def _hoisted(self, number: int) -> int:
        x = self._expressions[number]
        if x.kind == "int" and not _fits(x.bounds):
            self.refuse(x.node, "its whole numbers may need more than the 32 bits that cuDNN computes in; capture int32 tensors")
        spans = tuple(name in x.depends for name in _POSITIONS)
        tensors = any(name in self.captures and self.captures[name][1] >= 0 for name in x.depends)
        assert x.node is not None
        recipe = Recipe(x.kind, spans, not tensors and not any(spans), graph=_cut(x.node))  # type: ignore[arg-type]
        return self._input(("hoisted", number), recipe)

    def _read(self, number: int) -> int:
        """A tensor with a value for each query and key, read as it lies."""
        x = self._expressions[number]
        name = self._expressions[x.args[0]].args[0]
        at: list[str | int] = []
        for i in x.args[1:]:
            index = self._expressions[i]
            if index.op == "placeholder" and index.args[0] in _POSITIONS and index.args[0] not in at:
                at.append(index.args[0])
            elif index.op == "constant":
                at.append(int(index.args[0]))
            else:
                self.refuse(x.node, f"cuDNN has no gather, and the index {self._text(i)} is computed for each query and key")
        if x.kind == "int" and not _fits(x.bounds):
            self.refuse(x.node, f"{name} is of 64-bit integers, and cuDNN computes in 32; capture an int32 tensor")
        spans = tuple(position in at for position in _POSITIONS)
        return self._input(("read", name, tuple(at)), Recipe(x.kind, spans, False, read=name, at=tuple(at)))  # type: ignore[arg-type]

    def as_kind(self, value: int, kind: str) -> int:
        """A value in another kind: a truth value is 0 or 1."""
        step = self.steps[value]
        if step.kind == kind:
            return value
        if step.op == "input":
            recipe = self.recipes[step.args[0]]
            if recipe.constant is not None:
                plain = recipe.constant
                return self.number(bool(plain) if kind == "bool" else float(plain) if kind == "float" else int(plain))
        if kind == "bool":
            return self.step("cmp_neq", "bool", value, self.as_kind(self.number(0), step.kind))
        return self.step("identity", kind, value)

    def _converted(self, x: Expression, value: Any) -> int:
        kind = self.steps[value].kind
        if x.kind == "int" and kind == "float":
            self.refuse(x.node, "cuDNN's rounding of a score to a whole number is not known")
        return self.as_kind(value, x.kind)

    def refuse(self, node: Node | None, why: str) -> NoReturn:
        text = "" if node is None else f" `{_shown(node)}`"
        raise NotExpressible(f"{self._role} has{text}: {why}")

    def _text(self, number: int) -> str:
        x = self._expressions[number]
        return f"`{_shown(x.node)}`" if x.node is not None else str(x.args[0])


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _op_name(node: Node) -> str:
    return node.target._qualified_op_name.removeprefix("aten::")  # type: ignore[union-attr, no-any-return]


def _fits(bounds: tuple[int, int]) -> bool:
    return INT32[0] <= bounds[0] and bounds[1] <= INT32[1]


def _cut(node: Node) -> Graph:
    """Returns a graph of all that `node` is computed from, with `node` as the output."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    needed, todo = {node}, [node]
    while todo:
        for x in todo.pop().all_input_nodes:
            if x not in needed:
                needed.add(x)
                todo.append(x)
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


def _shown(node: Node) -> str:
    """A node as an expression, for a user to find it again."""

    def text(x: Any, depth: int) -> str:
        if not isinstance(x, Node):
            return str(x)
        if x.op == "placeholder":
            return str(x.target)
        op = _op_name(x)
        if op == "full":
            return str(x.args[1])
        if depth == 0:
            return "..."
        if op == "index":
            return f"{x.args[0].target}[{', '.join(text(i, depth - 1) for i in x.args[1])}]"  # type: ignore[union-attr]
        parts = [text(a, depth - 1) for a in x.args if a is not None]
        if op in _INFIX and len(parts) == 2 and not x.kwargs:
            return f"({parts[0]} {_INFIX[op]} {parts[1]})"
        return f"{op}({', '.join(parts)})"

    for depth in (4, 3, 2, 1):
        shown = text(node, depth)
        if len(shown) <= _MOST_TEXT:
            break
    return shown.removeprefix("(").removesuffix(")") if shown.startswith("(") else shown
