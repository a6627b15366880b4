"""Graph and tensors that TransformerEngine's callbacks receive: their calls are computed in torch, and so traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.integrations.te.graph_nodes import NODES, bind
from flexattn.mods.tracer import MisusedName, MisusedNode, MisusedType

AXES = ("b", "h", "q_idx", "kv_idx")
_ATTRIBUTES = (
    *("uid", "name", "dim", "stride", "data_type", "is_virtual", "output", "is_pass_by_value"),
    *("ragged_offset", "ragged_offset_multiplier", "reordering_type"),
)
_DEFAULTS: dict[str, object] = {"name": "", "uid": 0, "dim": [], "stride": [], "is_virtual": True, "is_pass_by_value": False}


class GraphTensor:
    """A tensor of the graph: a node's result, the score, an index, or one of the tensors passed with the callbacks.

    It has the `set_` and `get_` methods of cuDNN frontend's tensors. A value that is set is returned by the `get_` of that name,
    and has no other effect: the kernel determines layouts and types. If nothing is set, `get_dim` of a computed tensor is [] and
    `get_data_type` None, as in a graph that is not built yet.
    """

    is_trace_state = True  # not a capture, although it is kept on a user's object between the callbacks

    def __init__(self, value: object, dim: Sequence[int] | None = None) -> None:
        self.value = value
        self.attributes: dict[str, object] = {} if dim is None else {"dim": list(dim), "is_virtual": False}

    def __getattr__(self, name: str) -> Callable[..., object]:
        verb, _, attribute = name.partition("_")
        if verb not in ("set", "get") or attribute not in _ATTRIBUTES:
            accepted = ", ".join(_ATTRIBUTES)
            raise AttributeError(f"a tensor of a score_mod's graph has no {name!r}; it has set_ and get_ of: {accepted}")

        def keep(value: object) -> GraphTensor:
            self.attributes[attribute] = value
            return self

        return keep if verb == "set" else lambda: self.attributes.get(attribute, _DEFAULTS.get(attribute))


class ScoreGraph:
    """The graph that a callback receives: a method for each pointwise node of cuDNN frontend, `gen_index` and `tensor_scalar`.

    like: a 0-d tensor of the trace, used to convert numbers to tensors.
    """

    def __init__(self, indices: tuple[Tensor, ...], like: object = None) -> None:
        self._indices = indices
        self._like = like

    def gen_index(self, input: GraphTensor, axis: int, name: str = "", compute_data_type: object = None) -> GraphTensor:
        """Returns the position in the batch (axis 0), or among the heads (1), queries (2) or keys (3), as an integer."""
        if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < len(self._indices):
            raise MisusedType(f"axis of gen_index is {axis!r}; accepted: 0 (batch), 1 (heads), 2 (queries) or 3 (keys)")
        return GraphTensor(self._indices[axis])

    def tensor_scalar(self, value: float | int, scalar_type: object = None, name: str = "") -> GraphTensor:
        """Returns a number as a tensor. scalar_type is ignored; in cuDNN it tells when the number is known."""
        return GraphTensor(self._operand("tensor_scalar", "value", value))

    def __getattr__(self, name: str) -> Callable[..., GraphTensor]:
        if name not in NODES:
            raise MisusedNode(
                f"a score_mod's graph has no node {name!r}; it has: {', '.join(sorted(NODES))}, gen_index, tensor_scalar; for "
                "other operations, write the score_mod in torch, which reads tensors at any computed index"
            )

        def node(*positional: object, **named: object) -> GraphTensor:
            operands, parameters = bind(name, positional, named)
            values = [self._operand(name, operand, x) for operand, x in zip(NODES[name].operands, operands, strict=True)]
            return GraphTensor(NODES[name].compute(*values, *parameters))

        return node

    def _operand(self, node: str, operand: str, x: object) -> object:
        if isinstance(x, GraphTensor):
            return x.value
        if isinstance(x, Tensor) and x.dim() == 0:  # a number of a closure, in a trace
            return x
        if isinstance(x, (bool, int, float)):
            return as_tensor(x, self._like)
        raise MisusedType(
            f"{operand} of {node} is {type(x).__name__}; accepted: a tensor of the graph, one of `tensors`, or a number"
        )


class Tensors(dict[str, GraphTensor]):
    """The tensors that a callback receives, by name."""

    def __missing__(self, name: str) -> GraphTensor:
        names = ", ".join(map(repr, self)) or "none"
        raise MisusedName(f"the callback reads tensors[{name!r}], which was not passed; accepted: {names}")


def read_tensors(tensors: Mapping[str, object], indices: tuple[Any, ...], like: object) -> dict[str, GraphTensor]:
    """Returns the tensors at one score's position: [b, h, sq, skv], or the last of these dims; a dim of 1 is broadcast."""
    read: dict[str, GraphTensor] = {}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            read[name] = GraphTensor(as_tensor(t, like), (1, 1, 1, 1))
        elif t.dim() == 0:
            read[name] = GraphTensor(t, (1, 1, 1, 1))
        else:
            position = tuple(index if size > 1 else 0 for index, size in zip(indices[-t.dim() :], t.shape, strict=True))
            read[name] = GraphTensor(t[position], (*(1 for _ in range(4 - t.dim())), *t.shape))
    return read if torch.compiler.is_dynamo_compiling() else Tensors(read)


def as_tensor(number: Any, like: Any) -> Tensor:
    """Returns a number as a 0-d tensor of the trace of `like`."""
    if isinstance(number, Tensor):
        return number
    dtype = torch.float32 if isinstance(number, float) else torch.bool if isinstance(number, bool) else torch.int64
    return torch.full_like(like, number, dtype=dtype)
