"""A score_mod and a mask_mod as every backend gets them: small graphs of aten ops on scalars, and the tensors that they read.

flexattn.mods.trace traces a user's callables into a `Program`. Its text says all of it, so the operators carry it as a string:
equal text is an equal program, in this process or another, and nothing can be stale or evicted while it is needed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")
GRADIENT = "dscore"  # the derivative's further argument: the gradient of what score_mod returned

# What a graph may hold, besides reads (`index` of a captured tensor by one scalar per dim): pointwise, and known to every backend.
# fmt: off
OPS = frozenset((
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "cos", "cosh", "div", "eq",
    "erf", "erfc", "exp", "exp2", "expm1", "floor", "fmod", "full", "ge", "gt", "index", "isinf", "isnan", "le", "log",
    "log10", "log1p", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul",
    "ne", "neg", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "sub",
    "tan", "tanh", "_to_copy", "trunc", "where",
))
# fmt: on


_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)


class Capture(NamedTuple):
    """A tensor that a program reads, or, with ndim -1, a Python float: an input of each call, and its value part of no key."""

    name: str
    dtype: torch.dtype
    ndim: int
    needs_grad: bool

    @property
    def is_number(self) -> bool:
        return self.ndim < 0


class Program:
    """The program of a call's mods; hashable, equal iff the text is.

    score: returns the modified score. mask: returns whether the query sees the key. derivative: takes `dscore` too, and returns
    the gradient of the score (None: zero), and then for each read of a capture that needs a gradient (its position among
    `captures`, the indices, the gradient of what was read). All take ARGUMENTS and the captures, by name. is_given: the
    derivative is the user's, and need not be that of score.

    Floating point in a graph is called float32, whatever arithmetic a backend uses and the captures are of; integers are int64,
    and wrap as that does, but where a mod converts them to less.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._hash = hash(text)
        parts = json.loads(text)
        self.captures = tuple(Capture(name, getattr(torch, dtype), ndim, grad) for name, dtype, ndim, grad in parts["captures"])
        self.is_given = parts["is_given"]
        self.score, self.mask, self.derivative = (decode_graph(parts[name]) for name in ("score", "mask", "derivative"))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.text == other.text)

    def __repr__(self) -> str:
        parts = [name for name in ("score", "mask") if getattr(self, name) is not None]
        return f"<Program: {' and '.join(parts)}, {len(self.captures)} captures>"

    @property
    def tensor_needs_grad(self) -> tuple[bool, ...]:
        """Returns for each captured tensor whether its gradient is asked for."""
        return tuple(capture.needs_grad for capture in self.captures if not capture.is_number)

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing is left to compute, nor to give a gradient to."""
        return self.score is None and self.mask is None and not any(self.tensor_needs_grad)

    @functools.cached_property
    def added_to(self) -> tuple[int, ...]:
        """The captures, as positions among all, to whose gradients the derivative adds."""
        if self.derivative is None:
            return ()
        outputs: Any = next(node.args[0] for node in self.derivative.nodes if node.op == "output")
        return tuple(sorted({position for position, _, _ in outputs[1:]}))

    @functools.cached_property
    def is_reached(self) -> tuple[bool, ...]:
        """Returns for each capture that needs a gradient whether the derivative adds to it."""
        return tuple(i in self.added_to for i, capture in enumerate(self.captures) if capture.needs_grad)

    def wanted(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the captured tensors whose gradient is asked for."""
        return tuple(t for t, needs_grad in zip(tensors, self.tensor_needs_grad, strict=True) if needs_grad)

    def inputs(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> dict[str, Tensor | float]:
        """The captures' values by name: in their order, but tensors and numbers apart, as the operators take them."""
        left, right = iter(tensors), iter(numbers)
        return {capture.name: next(right) if capture.is_number else next(left) for capture in self.captures}


@functools.lru_cache(maxsize=1024)
def parse_program(text: str) -> Program | None:
    """The program with this text; None for ""."""
    return Program(text) if text else None


def looks_at(program: Program, index: str) -> bool:
    """Returns whether a program's score, mask or derivative depends on an index: "b", "h", "q_idx" or "kv_idx"."""
    graphs = (graph for graph in (program.score, program.mask, program.derivative) if graph is not None)
    return any(node.op == "placeholder" and node.target == index and node.users for graph in graphs for node in graph.nodes)


def make_program(
    captures: Sequence[Capture],
    score: Graph | None = None,
    mask: Graph | None = None,
    derivative: Graph | None = None,
    is_given: bool = False,
) -> Program:
    parts = {
        "captures": [[c.name, _name(c.dtype), c.ndim, c.needs_grad] for c in captures],
        "score": encode_graph(score),
        "mask": encode_graph(mask),
        "derivative": encode_graph(derivative),
        "is_given": is_given,
    }
    program = parse_program(json.dumps(parts, separators=(",", ":")))
    assert program is not None
    return program


def new_graph(arguments: Sequence[str], captures: Sequence[Capture]) -> tuple[Graph, dict[str, Node]]:
    """A graph with nothing but its inputs, and those by name."""
    graph = Graph()
    nodes = {}
    for name in arguments:
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["dtype"] = torch.float32 if name in ("score", GRADIENT) else torch.int64
    for capture in captures:
        nodes[capture.name] = graph.placeholder(capture.name)
        nodes[capture.name].meta["dtype"] = read_dtype(capture.dtype)
    return graph, nodes


def call(graph: Graph, op: str, args: tuple[Any, ...], dtype: torch.dtype, **kwargs: Any) -> Node:
    """Append an op of OPS."""
    node = graph.call_function(getattr(torch.ops.aten, op), args, kwargs)
    node.meta["dtype"] = dtype
    return node


def op_name(node: Node) -> str:
    return node.target._qualified_op_name.removeprefix("aten::")  # type: ignore[union-attr, no-any-return]


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that a read gives: float32 for floats, int64 for integers."""
    if dtype.is_floating_point:
        return torch.float32
    return dtype if dtype is torch.bool else torch.int64


def encode_graph(graph: Graph | None) -> Any:
    if graph is None:
        return None
    inputs, nodes, outputs = [], [], None
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append([node.target, node.name, _name(node.meta["dtype"])])
        elif node.op == "call_function":
            kwargs = {name: _encode(value) for name, value in node.kwargs.items()}
            nodes.append([node.name, op_name(node), _encode(node.args), kwargs, _name(node.meta["dtype"])])
        else:
            outputs = _encode(node.args[0])
    return [inputs, nodes, outputs]


def decode_graph(parts: Any) -> Graph | None:
    if parts is None:
        return None
    graph, named = Graph(), {}
    inputs, nodes, outputs = parts
    for target, name, dtype in inputs:
        named[name] = graph.placeholder(target)
        named[name].meta["dtype"] = getattr(torch, dtype)
    for name, op, args, kwargs, dtype in nodes:
        if op not in OPS:
            raise ValueError(f"a program has the op {op!r}; accepted: {', '.join(sorted(OPS))}")
        decoded = {key: _decode(value, named) for key, value in kwargs.items()}
        node = graph.create_node("call_function", getattr(torch.ops.aten, op), tuple(_decode(args, named)), decoded, name)
        node.meta["dtype"] = getattr(torch, dtype)
        named[name] = node
    graph.output(_decode(outputs, named))
    return graph


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    read: Callable[..., Tensor] | None = None,
    guard: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """A graph's outputs on tensors that broadcast against one another, in plain torch; `dtype` is what it calls float32.

    `read(tensor, indices)` replaces how captures are read, by default as `read_capture`; `guard` is applied to every float.
    """
    values: dict[Node, Any] = {}

    def value(x: Any) -> Any:
        return values[x] if isinstance(x, Node) else x

    for node in graph.nodes:
        if node.op == "placeholder":
            x = inputs.get(node.target)
            values[node] = torch.tensor(x, dtype=dtype, device="cpu") if isinstance(x, float) else x
            continue
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: values[n])
        op, result = op_name(node), node.meta["dtype"]
        if op == "index":
            tensor, indices = node.args
            values[node] = (read or read_capture)(values[tensor], [value(i) for i in indices])
            values[node] = values[node].to(dtype if result is torch.float32 else result)
            if guard is not None and result is torch.float32:
                values[node] = guard(values[node])
            continue
        args = [value(x) for x in node.args]
        kwargs = dict(node.kwargs)
        if result is torch.float32:
            # An op of integers that gives floats would give torch's default float, whatever the arithmetic is.
            args = [
                x.to(dtype) if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool else x
                for x in args
            ]
        if op in ("full", "_to_copy"):
            kwargs["dtype"] = {torch.float32: dtype, **dict.fromkeys(_NARROW, torch.int64)}.get(result, result)
        out = node.target([] if op == "full" else args[0], *args[1:], **kwargs)
        if result in _NARROW:
            out = out.to(result).to(torch.int64)  # what wraps, wraps here: torch's own promotion looks at dims, which a mod has not
        values[node] = out.to(dtype) if result is torch.float32 else out
        if guard is not None and result is torch.float32:
            values[node] = guard(values[node])
    raise AssertionError("a graph without an output")


def read_capture(tensor: Tensor, indices: Sequence[Tensor | int]) -> Tensor:
    """tensor[indices], elementwise; a negative index counts from the end, and outside of the tensor there is 0."""
    if not indices:
        return tensor
    inside, wrapped = torch.ones((), dtype=torch.bool, device=tensor.device), []
    for index, size in zip(indices, tensor.shape, strict=True):
        i = torch.as_tensor(index, device=tensor.device).to(torch.int64)
        i = torch.where(i < 0, i + size, i)
        inside = inside & (i >= 0) & (i < size)
        wrapped.append(i)
    if 0 in tensor.shape:
        return torch.zeros_like(inside, dtype=tensor.dtype)
    values = tensor[tuple(torch.where(inside, i, 0) for i in wrapped)]
    return torch.where(inside, values, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode(x: Any) -> Any:
    if isinstance(x, Node):
        return {"node": x.name}
    if isinstance(x, torch.dtype):
        return {"dtype": _name(x)}
    if isinstance(x, (list, tuple)):
        return [_encode(item) for item in x]
    return x


def _decode(x: Any, named: Mapping[str, Node]) -> Any:
    if isinstance(x, dict):
        return named[x["node"]] if "node" in x else getattr(torch, x["dtype"])
    if isinstance(x, list):
        return [_decode(item, named) for item in x]
    return x
