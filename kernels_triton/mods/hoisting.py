"""Extraction of values from a mod's graphs that need not be computed for each score.

A value that depends only on b, h and captures becomes a value of a head, which the kernels read before their loops. An expensive
value, or one that reads a capture, may depend on the two positions only by their distance q_idx - kv_idx. It can become a table
over all distances (`diagonals`). A score then reads one of consecutive words.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from flexattn.mod_values import ancestors, op_name

# Prefixes of inputs that stand for a value of a head, or for an entry of a table; a number follows. No capture has such a name
HEAD, DIAGONAL = "head:", "diagonal:"
DISTANCE = "distance:"  # q_idx - kv_idx, as the input of a tabulated value
VARYING = {"score", "dscore", "tscore", "q_idx", "kv_idx"}  # the inputs that differ within a tile
_POSITIONS = {"q_idx", "kv_idx"}
# A table entry costs a score one load; these operations cost as much or more.
_EXPENSIVE = frozenset(
    (
        *("index", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "pow", "sin", "cos", "tan", "sinh"),
        *("cosh", "tanh", "erf", "erfc", "sigmoid"),
    )
)


class Hoisted(NamedTuple):
    """The graphs with inputs HEAD and DIAGONAL for the extracted values, and graphs of these values, whose outputs are lists."""

    graphs: tuple[Graph | None, ...]
    per_head: Graph | None  # takes b, h and captures
    per_distance: Graph | None  # takes b, h, DISTANCE and captures


def hoist(graphs: Sequence[Graph | None], tabulates: bool) -> Hoisted:
    """Extracts values from the graphs; shared values are extracted once. tabulates: whether functions of the distance are
    extracted too.
    """
    per_distance = None
    graphs = [None if graph is None else _subtracting(graph) for graph in graphs]
    if tabulates:
        graphs, per_distance = _extracted(graphs, DIAGONAL, _tabulated)
    graphs, per_head = _extracted(graphs, HEAD, _same_for_a_head)
    return Hoisted(tuple(graphs), per_head, per_distance)


def inputs_of(node: Node) -> set[str]:
    """Returns the names of the inputs that a node's value depends on; an entry of a table also depends on the positions."""
    names = {str(x.target) for x in ancestors([node]) if x.op == "placeholder"}
    return names | _POSITIONS if any(name.startswith(DIAGONAL) for name in names) else names


def _same_for_a_head(graph: Graph) -> set[Node]:
    """Returns the nodes with one value for a head, except for integers without a read, which cost almost nothing to compute."""
    same = set()
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) != "full" and not inputs_of(node) & VARYING:
            reads = any(x.op == "call_function" and op_name(x) == "index" for x in ancestors([node]))
            if reads or node.meta["dtype"].is_floating_point:
                same.add(node)
    return same


def _tabulated(graph: Graph) -> set[Node]:
    """Returns the expensive floats and bools that depend on the positions only by q_idx - kv_idx."""
    along = _along_diagonals(graph)
    tabulated = set()
    for node in graph.nodes:
        dtype = node.meta.get("dtype")
        if node.op != "call_function" or along[node] != 0 or not (dtype is torch.bool or dtype.is_floating_point):
            continue
        parts = (x for x in ancestors([node]) if x.op == "call_function" and inputs_of(x) & _POSITIONS)
        if any(op_name(x) in _EXPENSIVE for x in parts):
            tabulated.add(node)
    return tabulated


def _along_diagonals(graph: Graph) -> dict[Node, int | None]:
    """Returns n for each node that is n * kv_idx + a function of q_idx - kv_idx and the head, and None for other nodes."""
    along: dict[Node, int | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            along[node] = None if node.target in ("score", "dscore", "tscore") else int(node.target in _POSITIONS)
            continue
        inputs = [along[x] for x in node.all_input_nodes]
        along[node] = 0 if all(n == 0 for n in inputs) else None
        if node.op == "call_function" and None not in inputs and along[node] is None and node.meta["dtype"] is torch.int64:
            along[node] = _along_sum(op_name(node), [along[x] if isinstance(x, Node) else 0 for x in node.args], node.args)
    return along


def _along_sum(op: str, along: Sequence[int | None], args: Sequence[Any]) -> int | None:
    x, y = (*along, 0)[:2]
    assert x is not None
    assert y is not None
    if op in ("add", "sub"):
        return x + y if op == "add" else x - y
    if op == "neg":
        return -x
    if op == "mul" and any(isinstance(arg, int) for arg in args):
        return x * args[1] if isinstance(args[1], int) else y * args[0]
    return None


def _subtracting(graph: Graph) -> Graph:
    """Rewrites score + factor * x as score - (-factor) * x, if the factor is a value of the head.

    In a sum of two products the compiler fuses the second product into a multiply-add, in a difference the first product. The first
    product is the scaled score, which is computed last.
    """
    same = _same_for_a_head(graph)
    new, values = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "output":
            new.output(torch.fx.node.map_arg(node.args[0], values.__getitem__))
            continue
        factor, other_factor = _product_added_to_score(node, same)
        if factor is None:
            values[node] = new.node_copy(node, values.__getitem__)
        else:
            score = next(x for x in node.args if "score" in inputs_of(x))
            aten, metadata = torch.ops.aten, {"dtype": node.meta["dtype"]}
            negative = new.create_node("call_function", aten.neg, (values[factor],))
            product = new.create_node("call_function", aten.mul, (negative, values.get(other_factor, other_factor)))
            values[node] = new.create_node("call_function", aten.sub, (values[score], product))
            for new_node in (negative, product):
                new_node.meta |= metadata
        values[node].meta["dtype"] = node.meta["dtype"]
    new.eliminate_dead_code()
    return new


def _product_added_to_score(node: Node, same: set[Node]) -> tuple[Node | None, Any]:
    """Returns (a factor of a product that is added to a value that depends on the score, the other factor), or (None, None)."""
    if node.op != "call_function" or op_name(node) != "add" or not all(isinstance(x, Node) for x in node.args):
        return None, None
    terms = [x for x in node.args if isinstance(x, Node)]
    with_score = ["score" in inputs_of(x) for x in terms]
    product = terms[with_score.index(False)] if any(with_score) and not all(with_score) else None
    if product is None or product.op != "call_function" or op_name(product) != "mul" or product in same:
        return None, None
    factors = [x for x in product.args if isinstance(x, Node) and x in same]
    if not factors or not product.meta["dtype"].is_floating_point:
        return None, None
    return factors[0], next(x for x in product.args if x is not factors[0])


def _extracted(
    graphs: Sequence[Graph | None], prefix: str, choose: Callable[[Graph], set[Node]]
) -> tuple[list[Graph | None], Graph | None]:
    """Returns the graphs with inputs for the chosen nodes that other nodes use, and a graph that computes these; None: there are
    none.
    """
    extracted = Graph()
    known: dict[Hashable, Node] = {}  # by the computation of a node
    outputs: list[Node] = []
    remaining: list[Graph | None] = []
    for graph in graphs:
        chosen = set() if graph is None else choose(graph)
        edge = {node for node in chosen if any(user not in chosen for user in node.users)}
        if graph is None or not edge:
            remaining.append(graph)
            continue
        new, values = Graph(), dict[Node, Node]()
        copy_of = values.__getitem__
        for node in graph.nodes:
            if node.op == "output":
                new.output(torch.fx.node.map_arg(node.args[0], copy_of))
                continue
            if node in edge:
                copy = _copied(node, extracted, known)
                outputs += [] if copy in outputs else [copy]
                name = f"{node.args[0].name}_value" if op_name(node) == "index" else node.name
                values[node] = new.create_node("placeholder", f"{prefix}{outputs.index(copy)}", name=name)
            else:
                values[node] = new.node_copy(node, copy_of)
            values[node].meta["dtype"] = node.meta["dtype"]
        new.eliminate_dead_code()
        remaining.append(new)
    if outputs:
        extracted.output(outputs)
    return remaining, extracted if outputs else None


def _copied(node: Node, graph: Graph, known: dict[Hashable, Node]) -> Node:
    """Returns a copy of a node in another graph, with the distance for q_idx and 0 for kv_idx."""
    if node.op == "placeholder" and node.target == "kv_idx":
        new: tuple[Any, ...] = ("call_function", torch.ops.aten.full, ([], 0), {})
    elif node.op == "placeholder":
        new = ("placeholder", DISTANCE if node.target == "q_idx" else node.target, (), {})
    else:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _copied(n, graph, known))
        new = (node.op, node.target, args, kwargs)
    key = (new[0], new[1], repr(new[2:]), node.meta["dtype"])
    if key not in known:
        known[key] = graph.create_node(*new)
        known[key].meta["dtype"] = node.meta["dtype"]
    return known[key]
