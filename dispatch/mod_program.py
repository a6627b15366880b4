"""A score_mod and a mask_mod for the backends: small graphs of aten ops on scalars, and the tensors that they read.

flexattn.mods.trace traces a user's callables into a `Program`. Operators pass a program as its text. Equal texts are equal
programs, in any process, and no cache can evict or outdate a text that is in use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flexattn.mod_values import op_name

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")
GRADIENT = "dscore"  # an additional argument of the derivative: the gradient of score_mod's result.
TANGENT = "tscore"  # an additional argument of second derivatives: the tangent of the score.

# The ops of a graph. All are pointwise and known to every backend, except for `index`, which reads a captured tensor with one
# scalar per dim. A graph for autograd also has `detach`.
OPS = frozenset(
    (
        "abs",
        "add",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "bitwise_xor",
        "ceil",
        "clamp",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "fmod",
        "full",
        "ge",
        "gt",
        "index",
        "isinf",
        "isnan",
        "le",
        "log",
        "log10",
        "log1p",
        "log2",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "remainder",
        "round",
        "rsqrt",
        "sigmoid",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "sub",
        "tan",
        "tanh",
        "_to_copy",
        "trunc",
        "where",
    )
)


_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)


class Capture(NamedTuple):
    """A tensor that a program reads, or a Python float if ndim is -1. It is an input of each call, and its value is in no key."""

    name: str
    dtype: torch.dtype
    ndim: int
    needs_grad: bool

    @property
    def is_number(self) -> bool:
        return self.ndim < 0


class Program:
    """The program of a call's mods. It is hashable, and equal to another if and only if their texts are.

    The inputs of all graphs are ARGUMENTS and the captures, by name.

    score: returns the modified score.
    differentiable: same as score, with the op `detach` on values that no gradient passes.
    mask: returns whether the query sees the key.
    derivative: also has `dscore` as an input. It returns the gradient of the score, or None if that is zero. Then, for each read
        of a capture that needs a gradient, it returns (position in `captures`, indices, gradient of the value).
    is_given: whether the derivative comes from the user. If so, it may differ from that of score.

    Floating-point values in a graph are called float32, in any arithmetic of the backend and any dtype of the captures. Integers
    are int64 and wrap accordingly, unless a mod converts them to a narrower dtype.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._hash = hash(text)
        parts = json.loads(text)
        self.captures = tuple(Capture(name, getattr(torch, dtype), ndim, grad) for name, dtype, ndim, grad in parts["captures"])
        self.is_given = parts["is_given"]
        self.differentiable = decode_graph(parts["score"])
        self.score, self.mask, self.derivative = (
            without_detach(decode_graph(parts[name])) for name in ("score", "mask", "derivative")
        )

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Program) and self.text == other.text)

    def __repr__(self) -> str:
        parts = [name for name in ("score", "mask") if getattr(self, name) is not None]
        return f"<Program: {' and '.join(parts)}, {len(self.captures)} captures>"

    @property
    def tensor_needs_grad(self) -> tuple[bool, ...]:
        """Returns for each captured tensor whether it needs a gradient."""
        return tuple(capture.needs_grad for capture in self.captures if not capture.is_number)

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to compute, and no capture that needs a gradient."""
        return self.score is None and self.mask is None and not any(self.tensor_needs_grad)

    @functools.cached_property
    def added_to(self) -> tuple[int, ...]:
        """Returns the positions of the captures to whose gradients the derivative adds."""
        if self.derivative is None:
            return ()
        outputs: Any = next(node.args[0] for node in self.derivative.nodes if node.op == "output")
        return tuple(sorted({position for position, _, _ in outputs[1:]}))

    @functools.cached_property
    def is_reached(self) -> tuple[bool, ...]:
        """Returns, for each capture that needs a gradient, whether the derivative adds to it."""
        return tuple(i in self.added_to for i, capture in enumerate(self.captures) if capture.needs_grad)

    def wanted(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the captured tensors that need a gradient."""
        return tuple(t for t, needs_grad in zip(tensors, self.tensor_needs_grad, strict=True) if needs_grad)

    def inputs(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> dict[str, Tensor | float]:
        """Returns the captures' values by name, from the operators' separate lists of tensors and numbers."""
        left, right = iter(tensors), iter(numbers)
        return {capture.name: next(right) if capture.is_number else next(left) for capture in self.captures}


@functools.lru_cache(maxsize=1024)
def parse_program(text: str) -> Program | None:
    """Returns the program with this text, or None if the text is ""."""
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
    """Returns a graph that has only inputs, and the inputs by name."""
    graph = Graph()
    nodes = {}
    for name in arguments:
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["dtype"] = torch.float32 if name in ("score", GRADIENT, TANGENT) else torch.int64
    for capture in captures:
        nodes[capture.name] = graph.placeholder(capture.name)
        nodes[capture.name].meta["dtype"] = read_dtype(capture.dtype)
    return graph, nodes


def call(graph: Graph, op: str, args: tuple[Any, ...], dtype: torch.dtype, **kwargs: Any) -> Node:
    """Appends an op of OPS."""
    node = graph.call_function(getattr(torch.ops.aten, op), args, kwargs)
    node.meta["dtype"] = dtype
    return node


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of a read: float32 for floats, int64 for integers."""
    if dtype.is_floating_point:
        return torch.float32
    return dtype if dtype is torch.bool else torch.int64


def encode_graph(graph: Graph | None) -> object:
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
        if op not in OPS and op != "detach":
            raise ValueError(f"a program has the op {op!r}; accepted: {', '.join(sorted(OPS))}")
        decoded = {key: _decode(value, named) for key, value in kwargs.items()}
        node = graph.create_node("call_function", getattr(torch.ops.aten, op), tuple(_decode(args, named)), decoded, name)
        node.meta["dtype"] = getattr(torch, dtype)
        named[name] = node
    graph.output(_decode(outputs, named))
    return graph


def without_detach(graph: Graph | None) -> Graph | None:
    """Removes the op `detach` from a graph for a backend, and returns the graph."""
    for node in [] if graph is None else graph.find_nodes(op="call_function", target=torch.ops.aten.detach):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)  # type: ignore[union-attr]
    return graph


def evaluate(
    graph: Graph,
    inputs: Mapping[str, object],
    dtype: torch.dtype,
    known: Mapping[Node, Tensor] | None = None,
    guard: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """Returns a graph's outputs for tensors that broadcast, computed in plain torch.

    dtype: the dtype that replaces float32.
    known: values of nodes that are not computed.
    guard: a function that is applied to every float.
    """
    values: dict[Node, Any] = dict(known or {})

    def value(x: object) -> Any:
        return values[x] if isinstance(x, Node) else x

    for node in graph.nodes:
        if node in values:
            continue
        if node.op == "placeholder":
            x = inputs.get(node.target)
            values[node] = torch.tensor(x, dtype=dtype, device="cpu") if isinstance(x, float) else x
            continue
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: values[n])
        op, result = op_name(node), node.meta["dtype"]
        if op == "index":
            tensor, indices = node.args
            values[node] = read_capture(values[tensor], [value(i) for i in indices])
            values[node] = values[node].to(dtype if result is torch.float32 else result)
            if guard is not None and result is torch.float32:
                values[node] = guard(values[node])
            continue
        args = [value(x) for x in node.args]
        kwargs = dict(node.kwargs)
        if result is torch.float32:
            # If an op turns integers into floats, its result would be in torch's default dtype instead of `dtype`.
            args = [
                x.to(dtype) if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool else x
                for x in args
            ]
        if op in ("full", "_to_copy"):
            kwargs["dtype"] = {torch.float32: dtype, **dict.fromkeys(_NARROW, torch.int64)}.get(result, result)
        out = node.target([] if op == "full" else args[0], *args[1:], **kwargs)
        if result in _NARROW:
            # The narrow dtype wraps here. Torch's promotion depends on dims, and a mod's scalars have none.
            out = out.to(result).to(torch.int64)
        values[node] = out.to(dtype) if result is torch.float32 else out
        if guard is not None and result is torch.float32:
            values[node] = guard(values[node])
    raise AssertionError("a graph without an output")


def read_capture(tensor: Tensor, indices: Sequence[Tensor | int]) -> Tensor:
    """Returns tensor[indices], elementwise. Negative indices count from the end. A read outside of the tensor gives 0."""
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


def _encode(x: object) -> object:
    if isinstance(x, Node):
        return {"node": x.name}
    if isinstance(x, torch.dtype):
        return {"dtype": _name(x)}
    if isinstance(x, (list, tuple)):
        return [_encode(item) for item in x]
    return x


def _decode(x: object, named: Mapping[str, Node]) -> Any:
    if isinstance(x, dict):
        return named[x["node"]] if "node" in x else getattr(torch, x["dtype"])
    if isinstance(x, list):
        return [_decode(item, named) for item in x]
    return x
