"""A plan's mods, band and lengths as pointwise nodes of its graph. cuDNN accepts no mask of its own together with a score_mod.

A hidden score is set to HIDDEN instead of -inf: if a whole tile of keys is hidden, exp(-inf - -inf) is NaN. If a query sees no key,
its lse is near HIDDEN, and the launchers replace its results.
"""

from __future__ import annotations

from collections.abc import Callable

import cudnn

from flexattn.kernels_cudnn.frontend import Graph, GraphTensor
from flexattn.kernels_cudnn.lowering import Mods, Step

HIDDEN = -1e30  # the value of a hidden score. Smaller scores, -inf included, are raised to it.
BLIND = -1e29  # if an lse is below this, its query sees no key.

_FLOAT, _INT = cudnn.data_type.FLOAT, cudnn.data_type.INT32
_TYPES = {"float": _FLOAT, "int": _INT, "bool": _INT}
# Nodes whose operands can be swapped, and the node to use after the swap.
_SWAPPED = {name: name for name in ("add", "mul", "max", "min", "logical_and", "logical_or", "cmp_eq", "cmp_neq")}
_SWAPPED |= {"cmp_lt": "cmp_gt", "cmp_le": "cmp_ge", "cmp_gt": "cmp_lt", "cmp_ge": "cmp_le"}


class Callbacks:
    """`score_mod` and `score_mod_bprop` of cuDNN's graph, for one build. The second one uses values that the first one computed.

    frame: tensors by name: "hidden", "zero", "queries" and "keys" (the lengths). If the band has a left or a right side, "left" or
    "right" is the least or the greatest kv_idx - q_idx that is visible.
    """

    def __init__(self, mods: Mods, inputs: list[GraphTensor], frame: dict[str, GraphTensor]) -> None:
        self._mods = mods
        self._inputs = inputs
        self._frame = frame
        self._values: dict[tuple[object, ...], GraphTensor] = {}
        self._input_ids = {id(tensor) for tensor in inputs}
        self._anchor: GraphTensor | None = None  # a tensor of the shape of the scores
        self._hidden_mask: GraphTensor | None = None

    def score_mod(self, graph: Graph, score: GraphTensor) -> GraphTensor:
        self._anchor = score
        self._values["score",] = score
        result = self._virtual(graph, self._value(graph, self._mods.score), "float")
        self._hidden_mask = self._mask(graph)
        result = self._node(graph, "binary_select", "float", result, self._frame["hidden"], self._hidden_mask)
        return self._node(graph, "max", "float", result, self._frame["hidden"])

    def score_mod_bprop(self, graph: Graph, dscore: GraphTensor) -> GraphTensor:
        self._values["dscore",] = dscore
        zero = self._frame["zero"]
        if self._mods.gradient is None:
            return self._node(graph, "mul", "float", dscore, zero)
        result = self._virtual(graph, self._value(graph, self._mods.gradient), "float")
        if self._mods.is_guarded:
            assert self._hidden_mask is not None
            result = self._node(graph, "binary_select", "float", result, zero, self._hidden_mask)
        return result

    def release(self) -> None:
        """Drops the graph's tensors. They would keep the graph alive in a reference cycle that is never collected."""
        self._values.clear()
        self._inputs.clear()
        self._frame.clear()
        self._anchor = self._hidden_mask = None

    def _value(self, graph: Graph, position: int) -> GraphTensor:
        step = self._mods.steps[position]
        if step.op in ("score", "dscore"):
            return self._values[step.op,]
        if step.op in ("q_idx", "kv_idx"):
            return self._position(graph, step.op)
        if step.op == "input":
            return self._inputs[step.args[0]]
        return self._once(("step", position), lambda: self._step(graph, step))

    def _step(self, graph: Graph, step: Step) -> GraphTensor:
        operands = [(self._value(graph, n), self._mods.steps[n].kind) for n in step.args]
        op = step.op
        if op in _SWAPPED and self._is_input(operands[0][0]) and not self._is_input(operands[1][0]):
            op, operands = _SWAPPED[op], operands[::-1]
        # cuDNN requires that the graph computes the first operand of a node.
        operands[0] = (self._virtual(graph, *operands[0]), operands[0][1])
        kind = operands[0][1] if op.startswith("cmp_") else step.kind
        tensor: GraphTensor = getattr(graph, op)(*(t for t, _ in operands), compute_data_type=_TYPES[kind])
        tensor.set_data_type(_TYPES[step.kind])
        return tensor

    def _node(self, graph: Graph, op: str, kind: str, *operands: GraphTensor) -> GraphTensor:
        tensor: GraphTensor = getattr(graph, op)(*operands, compute_data_type=_TYPES[kind])
        tensor.set_data_type(_TYPES[kind])
        return tensor

    def _is_input(self, tensor: GraphTensor) -> bool:
        return id(tensor) in self._input_ids

    def _once(self, key: tuple[object, ...], make: Callable[[], GraphTensor]) -> GraphTensor:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def _position(self, graph: Graph, name: str) -> GraphTensor:
        def make() -> GraphTensor:
            assert self._anchor is not None
            tensor = graph.gen_index(self._anchor, axis=2 if name == "q_idx" else 3, compute_data_type=_INT)
            tensor.set_data_type(_INT)
            return tensor

        return self._once((name,), make)

    def _virtual(self, graph: Graph, tensor: GraphTensor, kind: str) -> GraphTensor:
        """Returns the tensor, or an equal one that the graph computes if the tensor is an input."""
        if not self._is_input(tensor):
            return tensor
        column = self._position(graph, "kv_idx")
        zero = self._once(("zero", "int"), lambda: self._node(graph, "sub", "int", column, column))
        if kind == "float":
            zero = self._once(("zero", "float"), lambda: self._node(graph, "identity", "float", zero))
        return self._once(("virtual", id(tensor)), lambda: self._node(graph, "add", kind, zero, tensor))

    def _mask(self, graph: Graph) -> GraphTensor:
        """Returns the mask of the visible scores: within the lengths, in the band, and allowed by the mask_mod."""
        frame = self._frame
        row, column = self._position(graph, "q_idx"), self._position(graph, "kv_idx")
        terms = [
            self._node(graph, "cmp_lt", "int", row, frame["queries"]),
            self._node(graph, "cmp_lt", "int", column, frame["keys"]),
        ]
        if "left" in frame or "right" in frame:
            distance = self._once(("distance",), lambda: self._node(graph, "sub", "int", column, row))
            for side, op in (("left", "cmp_ge"), ("right", "cmp_le")):
                if side in frame:
                    terms.append(self._node(graph, op, "int", distance, frame[side]))
        if self._mods.mask is not None:
            terms.append(self._virtual(graph, self._value(graph, self._mods.mask), "bool"))
        result = terms[0]
        for term in terms[1:]:
            result = self._node(graph, "logical_and", "int", result, term)
        return result
