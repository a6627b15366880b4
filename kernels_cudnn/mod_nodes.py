"""A plan's mods, band and lengths as pointwise nodes of its graph: cuDNN takes no mask of its own beside a score_mod.

What is hidden is set to HIDDEN, not to -inf: of a tile of keys that are all hidden, exp(-inf - -inf) would be NaN. A query that
sees no key then has an lse near HIDDEN, and the launchers write what it is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudnn

from flexattn.kernels_cudnn.lowering import Mods, Step

HIDDEN = -1e30  # a score that is hidden; one that is less, -inf included, is raised to it
BLIND = -1e29  # an lse below this is that of a query that sees no key

_FLOAT, _INT = cudnn.data_type.FLOAT, cudnn.data_type.INT32
_TYPES = {"float": _FLOAT, "int": _INT, "bool": _INT}
# Nodes whose operands may change places, and what stands for them then.
_SWAPPED = {name: name for name in ("add", "mul", "max", "min", "logical_and", "logical_or", "cmp_eq", "cmp_neq")}
_SWAPPED |= {"cmp_lt": "cmp_gt", "cmp_le": "cmp_ge", "cmp_gt": "cmp_lt", "cmp_ge": "cmp_le"}


class Callbacks:
    """`score_mod` and `score_mod_bprop` of cuDNN's graph, for one build; the second uses what the first computed.

    frame: tensors around the mods, by name: "hidden", "zero", "queries" and "keys" (lengths), and of a band "left" and "right" (the
    least and the most of kv_idx - q_idx that is seen), where there is such a side.
    """

    def __init__(self, mods: Mods, inputs: list[Any], frame: dict[str, Any]) -> None:
        self._mods = mods
        self._inputs = inputs
        self._frame = frame
        self._values: dict[Any, Any] = {}
        self._given = {id(tensor) for tensor in inputs}  # not computed in the graph
        self._anchor: Any = None  # a tensor of the shape of the scores
        self._hidden_mask: Any = None

    def score_mod(self, graph: Any, score: Any) -> Any:
        self._anchor = score
        self._values["score",] = score
        result = self._virtual(graph, self._value(graph, self._mods.score), "float")
        self._hidden_mask = self._mask(graph)
        result = self._node(graph, "binary_select", "float", result, self._frame["hidden"], self._hidden_mask)
        return self._node(graph, "max", "float", result, self._frame["hidden"])

    def score_mod_bprop(self, graph: Any, dscore: Any) -> Any:
        self._values["dscore",] = dscore
        zero = self._frame["zero"]
        if self._mods.gradient is None:
            return self._node(graph, "mul", "float", dscore, zero)
        result = self._virtual(graph, self._value(graph, self._mods.gradient), "float")
        if self._mods.is_guarded:
            result = self._node(graph, "binary_select", "float", result, zero, self._hidden_mask)
        return result

    def release(self) -> None:
        """Forget the graph's tensors, which would keep the graph alive in a circle that no one collects."""
        for kept in (self._values, self._inputs, self._frame):
            kept.clear()
        self._anchor = self._hidden_mask = None

    def _value(self, graph: Any, position: int) -> Any:
        step = self._mods.steps[position]
        if step.op in ("score", "dscore"):
            return self._values[step.op,]
        if step.op in ("q_idx", "kv_idx"):
            return self._position(graph, step.op)
        if step.op == "input":
            return self._inputs[step.args[0]]
        return self._kept(("step", position), lambda: self._step(graph, step))

    def _step(self, graph: Any, step: Step) -> Any:
        operands = [(self._value(graph, n), self._mods.steps[n].kind) for n in step.args]
        op = step.op
        if op in _SWAPPED and self._is_given(operands[0][0]) and not self._is_given(operands[1][0]):
            op, operands = _SWAPPED[op], operands[::-1]
        # cuDNN wants the first operand of a node to be computed in the graph.
        operands[0] = (self._virtual(graph, *operands[0]), operands[0][1])
        kind = operands[0][1] if op.startswith("cmp_") else step.kind
        tensor = getattr(graph, op)(*(t for t, _ in operands), compute_data_type=_TYPES[kind])
        tensor.set_data_type(_TYPES[step.kind])
        return tensor

    def _node(self, graph: Any, op: str, kind: str, *operands: Any) -> Any:
        tensor = getattr(graph, op)(*operands, compute_data_type=_TYPES[kind])
        tensor.set_data_type(_TYPES[kind])
        return tensor

    def _is_given(self, tensor: Any) -> bool:
        return id(tensor) in self._given

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]

    def _position(self, graph: Any, name: str) -> Any:
        def make() -> Any:
            tensor = graph.gen_index(self._anchor, axis=2 if name == "q_idx" else 3, compute_data_type=_INT)
            tensor.set_data_type(_INT)
            return tensor

        return self._kept((name,), make)

    def _virtual(self, graph: Any, tensor: Any, kind: str) -> Any:
        """The tensor as one that is computed in the graph."""
        if not self._is_given(tensor):
            return tensor
        column = self._position(graph, "kv_idx")
        zero = self._kept(("nought", "int"), lambda: self._node(graph, "sub", "int", column, column))
        if kind == "float":
            zero = self._kept(("nought", "float"), lambda: self._node(graph, "identity", "float", zero))
        return self._kept(("virtual", id(tensor)), lambda: self._node(graph, "add", kind, zero, tensor))

    def _mask(self, graph: Any) -> Any:
        """Returns the node of the scores that are seen: within the lengths, in the band, by the mask_mod."""
        frame = self._frame
        row, column = self._position(graph, "q_idx"), self._position(graph, "kv_idx")
        terms = [
            self._node(graph, "cmp_lt", "int", row, frame["queries"]),
            self._node(graph, "cmp_lt", "int", column, frame["keys"]),
        ]
        if "left" in frame or "right" in frame:
            distance = self._kept(("distance",), lambda: self._node(graph, "sub", "int", column, row))
            for side, op in (("left", "cmp_ge"), ("right", "cmp_le")):
                if side in frame:
                    terms.append(self._node(graph, op, "int", distance, frame[side]))
        if self._mods.mask is not None:
            terms.append(self._virtual(graph, self._value(graph, self._mods.mask), "bool"))
        result = terms[0]
        for term in terms[1:]:
            result = self._node(graph, "logical_and", "int", result, term)
        return result
