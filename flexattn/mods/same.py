"""Compares graphs of mods by their computation, and brings every softcap to the form of `flexattn.mods.softcap`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import ARGUMENTS, Capture, call, new_graph
from flexattn.mod_values import op_name
from flexattn.mods.bands import output_of, with_output
from flexattn.mods.graph import cancel_factors

_COMMUTATIVE = ("add", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "eq", "ne")


def is_same(a: Graph, b: Graph, names: Mapping[str, str]) -> bool:
    """Returns whether two graphs compute the same by the same ops, up to the order of operands if an op is commutative.

    names: the name in `a` for each capture of `b`.
    """
    known: dict[Hashable, int] = {}
    return _number(a, {}, known) == _number(b, names, known)


def is_same_gradient(explicit: Graph, derived: Graph, names: Mapping[str, str]) -> bool:
    """Returns whether an explicit gradient equals the derived one, up to factors x * c / c.

    names: the name in `derived` for each capture of `explicit`.
    """
    [result, *_] = cast("list[object]", derived.output_node().args[0])
    if not isinstance(result, Node):
        return False
    plain = with_output(explicit, output_of(explicit))
    cancel_factors(plain)
    return is_same(with_output(derived, result), plain, names)


def _number(graph: Graph, names: Mapping[str, str], known: dict[Hashable, int]) -> int:
    """Returns a number for the graph's output; two outputs have the same number if they compute the same."""
    numbers: dict[Node, int] = {}

    def written(x: object) -> Hashable:
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
    """Returns the trace of `flexattn.mods.softcap(c)` if `score` is c * tanh(score / c) with a captured number c.

    The position of c among the captures and its name in the graph follow. Any other score is returned unchanged, with -1 and "".
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


def _is_call(x: object, op: str) -> bool:
    return isinstance(x, Node) and x.op == "call_function" and op_name(x) == op and not x.kwargs
