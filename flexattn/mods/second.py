"""Second derivatives of a score_mod: its tangent along tangents of the score and of captures, and the gradient of that tangent.

The derivative d(dscore) of a score_mod f is linear in dscore. So the tangent of f is t = d(t_score) for the score, plus the same
for each read of a capture with the value of the capture's tangent. t is a score_mod again, whose derivative is the second one of f.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import (
    ARGUMENTS,
    GRADIENT,
    TANGENT,
    Capture,
    Program,
    call,
    new_graph,
    parse_program,
    read_dtype,
    without_detach,
)
from flexattn.dispatch.second_order import SecondMod
from flexattn.mods.derivative import derive


@functools.lru_cache(maxsize=256)
def second(text: str, moving: tuple[bool, ...], wanted: tuple[bool, ...]) -> SecondMod:
    """Returns a score_mod's second derivatives. moving, wanted: whether each captured tensor has a tangent, and a gradient."""
    program = parse_program(text)
    assert program is not None
    assert program.differentiable is not None
    captures = _with(program, wanted)
    own = _with(program, moving)
    tangents = [Capture(f"tangent_of_{c.name}", c.dtype, c.ndim, False) for c in own if c.needs_grad]
    every = (*captures, *tangents)
    derivative = derive(program.differentiable, captures)
    tangent = _tangent(derive(program.differentiable, own), own, every)
    bend = _bend(tangent, every)
    for graph in (derivative, tangent, bend):
        without_detach(graph)
    return SecondMod(every, derivative, tangent, bend)


def _with(program: Program, flags: Sequence[bool]) -> tuple[Capture, ...]:
    """Returns the program's captures, of which each tensor needs a gradient if its flag is set."""
    left = iter(flags)
    return tuple(c if c.is_number else c._replace(needs_grad=next(left) and c.dtype.is_floating_point) for c in program.captures)


def _tangent(derivative: Graph, own: Sequence[Capture], every: Sequence[Capture]) -> Graph:
    graph, inputs = new_graph((TANGENT, *ARGUMENTS), every)
    common = {node: inputs[node.target] for node in derivative.find_nodes(op="placeholder") if node.target != GRADIENT}

    def along(value: Node, tangent: Node) -> Node:
        """Returns a value of the derivative, of which `tangent` takes the place of the incoming gradient."""
        copies = {node: tangent for node in derivative.nodes if node.target == GRADIENT} | common
        for node in derivative.nodes:
            if node.op == "call_function" and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if all(x in common for x in node.all_input_nodes):
                    common[node] = copies[node]
        return copies[value]

    outputs: Any = derivative.output_node().args[0]
    first, *reads = outputs
    terms = [] if first is None else [along(first, inputs[TANGENT])]
    for position, indices, value in reads:
        tensor = inputs[f"tangent_of_{own[position].name}"]
        copied = [along(i, inputs[TANGENT]) if isinstance(i, Node) else i for i in indices]
        terms.append(along(value, call(graph, "index", (tensor, copied), read_dtype(own[position].dtype))))
    total = terms[0] if terms else call(graph, "full", ([], 0.0), torch.float32)
    for term in terms[1:]:
        total = call(graph, "add", (total, term), torch.float32)
    graph.output(total)
    graph.eliminate_dead_code()
    return graph


def _bend(tangent: Graph, captures: Sequence[Capture]) -> Graph | None:
    graph = derive(tangent, captures, (TANGENT, *ARGUMENTS))
    return None if graph.output_node().args[0] == [None] else graph
