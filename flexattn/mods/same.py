"""Graphs of mods compared by what they compute, and softcap in the form of `flexattn.mods.softcap`, whoever wrote it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import ARGUMENTS, Capture, call, new_graph, op_name
from flexattn.mods.bands import output_of, with_output
from flexattn.mods.graph import cancel_factors

_COMMUTATIVE = ("add", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "eq", "ne")


def is_same(a: Graph, b: Graph, names: Mapping[str, str]) -> bool:
    """Returns whether two graphs compute the same by the same ops, but for the order of commutative ones' operands.

    names: what captures of b are called in a.
    """
    known: dict[Hashable, int] = {}
    return _number(a, {}, known) == _number(b, names, known)


def is_same_gradient(given: Graph, derived: Graph, names: Mapping[str, str]) -> bool:
    """Returns whether a given gradient is the derived one, but for factors x * c / c; names: what its captures are called there."""
    result: Any = next(node.args[0] for node in derived.nodes if node.op == "output")[0]
    if result is None:
        return False
    plain = with_output(given, output_of(given))
    cancel_factors(plain)
    return is_same(with_output(derived, result), plain, names)


def _number(graph: Graph, names: Mapping[str, str], known: dict[Hashable, int]) -> int:
    """Returns a number for what the graph returns, the same for what computes the same."""
    numbers: dict[Node, int] = {}

    def written(x: Any) -> Hashable:
        if isinstance(x, Node):
            return ("node", numbers[x])
        if isinstance(x, (list, tuple)):
            return tuple(written(item) for item in x)
        return (type(x), x)

    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            key: Hashable = ("input", names.get(node.target, node.target))
        else:
            args = tuple(written(x) for x in node.args)
            if op_name(node) in _COMMUTATIVE:
                args = tuple(sorted(args, key=repr))
            kwargs = tuple((name, written(x)) for name, x in node.kwargs.items())
            key = (op_name(node), args, kwargs, node.meta["dtype"])
        numbers[node] = known.setdefault(key, len(known))
    return numbers[output_of(graph)]


def softcap_of(score: Graph, captures: Sequence[Capture]) -> tuple[Graph, int, str]:
    """Returns c * tanh(score / c), with c a captured number, as `flexattn.mods.softcap(c)` is traced.

    With it the position of c among the captures, and its name in the graph: "" for any other score, which is returned as it is.
    """
    result = output_of(score)
    if not _is_call(result, "mul"):
        return score, -1, ""
    for cap, bounded in (result.args, result.args[::-1]):
        if not (isinstance(bounded, Node) and _is_call(bounded, "tanh") and isinstance(bounded.args[0], Node)):
            continue
        share = bounded.args[0]
        if not (_is_call(share, "div") and share.args[1] is cap and isinstance(cap, Node) and cap.op == "placeholder"):
            continue
        position = next((i for i, capture in enumerate(captures) if capture.name == cap.target and capture.is_number), -1)
        if position < 0 or not (isinstance(share.args[0], Node) and share.args[0].target == "score"):
            continue
        others = {capture.name for i, capture in enumerate(captures) if i != position}
        name = captures[position].name if "cap" in others else "cap"
        graph, inputs = new_graph(ARGUMENTS, (captures[position]._replace(name=name),))
        quotient = call(graph, "div", (inputs["score"], inputs[name]), torch.float32)
        graph.output(call(graph, "mul", (inputs[name], call(graph, "tanh", (quotient,), torch.float32)), torch.float32))
        return graph, position, name
    return score, -1, ""


def _is_call(x: Any, op: str) -> bool:
    return isinstance(x, Node) and x.op == "call_function" and op_name(x) == op and not x.kwargs
