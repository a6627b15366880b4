"""The derivative of a score_mod: torch's autograd on the traced graph, traced in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import ARGUMENTS, GRADIENT, Capture, evaluate, new_graph
from flexattn.dispatch.neutral import neutral_state
from flexattn.mod_values import op_name
from flexattn.mods.graph import as_dtype, cancel_factors, converted
from flexattn.mods.tracer import Recorder, fake_mode


def derive(score: Graph, captures: Sequence[Capture], arguments: Sequence[str] = ARGUMENTS) -> Graph:
    """Derives the gradients of the score and of each read of a capture that requires one, from the gradient of score_mod's result.

    torch's autograd runs on the graph and is traced in turn. `Program` describes the outputs. Detached values are numbers to
    autograd, and stay detached in the derivative.
    """
    detached = score.find_nodes(op="call_function", target=torch.ops.aten.detach)
    reads = [node for node in score.nodes if node.op == "call_function" and op_name(node) == "index"]
    wants = {capture.name: capture.needs_grad for capture in captures}
    positions = {capture.name: i for i, capture in enumerate(captures)}
    differentiable = [node for node in reads if wants[node.args[0].target]]
    placeholders = [node for node in score.find_nodes(op="placeholder") if node.target not in positions]
    numbers = [capture.name for capture in captures if capture.is_number]
    assert any(node.target == "score" for node in placeholders)
    with neutral_state(), fake_mode():
        recorder = Recorder()
        gradient = recorder.input(GRADIENT, (), torch.float32)
        inputs: dict[str, Any] = {node.target: None for node in score.nodes if node.op == "placeholder"}
        inputs |= {node.target: recorder.input(node.target, (), node.meta["dtype"]) for node in placeholders}
        inputs |= {name: recorder.input(name, (), torch.float32) for name in numbers}
        leaves = [recorder.input(node.name, (), node.meta["dtype"]) for node in (*reads, *detached)]
        with recorder:
            inputs["score"] = inputs["score"].detach().requires_grad_()
            values_read = [
                leaf.detach().requires_grad_() if node in differentiable else leaf
                for node, leaf in zip(reads, leaves, strict=False)
            ]
            wanted = [inputs["score"], *(x for x, node in zip(values_read, reads, strict=True) if node in differentiable)]
            known = dict(zip((*reads, *detached), (*values_read, *leaves[len(reads) :]), strict=True))
            out = evaluate(score, inputs, torch.float32, known)
            if out.requires_grad:
                gradients = torch.autograd.grad(out, wanted, gradient, allow_unused=True, materialize_grads=True)
            else:
                gradients = tuple(torch.zeros((), dtype=torch.float32, device="cpu") for _ in wanted)
        traced = recorder.finish([*gradients])

    # The forward's graph stays for the indices of the reads; nodes that the derivative does not need are removed below.
    graph, inputs = new_graph((*arguments, GRADIENT), captures)
    copies = {node: inputs[node.target] for node in score.find_nodes(op="placeholder")}
    graph.graph_copy(score, copies)
    stand_for = [inputs[GRADIENT], *(inputs[node.target] for node in placeholders), *(inputs[name] for name in numbers)]
    stand_for += [copies[node] for node in (*reads, *detached)]
    values: dict[Node, object] = dict(zip(traced.find_nodes(op="placeholder"), stand_for, strict=True))
    for node in traced.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "call_function":
            values[node] = converted("the derivative of score_mod", graph, node, values)
        else:
            results = [
                as_dtype(graph, values[x] if isinstance(x, Node) else x, torch.float32) for x in cast(list[Any], node.args[0])
            ]
    outputs: list[Any] = [None if _is_zero(results[0]) else results[0]]
    for node, value in zip(differentiable, results[1:], strict=True):
        if not _is_zero(value):
            indices = [copies[i] if isinstance(i, Node) else i for i in node.args[1]]
            outputs.append([positions[node.args[0].target], indices, value])
    graph.output(outputs)
    graph.eliminate_dead_code()
    cancel_factors(graph)
    return graph


def _is_zero(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) == "full" and bool(node.args[1] == 0)
