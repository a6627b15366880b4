"""Turns a program back into mods: Python functions whose source calls the torch functions of the program's graph.

If two programs are equal, their functions have the same source, and `trace_mods` caches one trace for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from flexattn.dispatch.mod_program import ARGUMENTS, Program
from flexattn.mod_values import op_name
from flexattn.mods.trace import Mod


def mods_of(program: Program, tensors: Sequence[Tensor]) -> tuple[Mod | None, Mod | None]:
    """Returns (score_mod, mask_mod) of a program whose captures are these tensors.

    score_mod takes all tensors after its five arguments, as score_mod_tensors; mask_mod holds them.
    """
    score, mask = _functions(program)
    if mask is None:
        return score, None
    named = {capture.name: t.detach() for capture, t in zip(program.captures, tensors, strict=True)}
    return score, functools.partial(mask, **named) if named else mask


@functools.lru_cache(maxsize=256)
def _functions(program: Program) -> tuple[Mod | None, Mod | None]:
    captures = tuple(capture.name for capture in program.captures)
    score = None if program.differentiable is None else _function("score_mod", program.differentiable, (*ARGUMENTS, *captures))
    mask = None if program.mask is None else _function("mask_mod", program.mask, (*ARGUMENTS[1:], *captures))
    return score, mask


def _function(name: str, graph: Graph, arguments: Sequence[str]) -> Mod:
    lines, result = [f"def {name}({', '.join(arguments)}):"], ""
    names: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "output":
            result = _written(node.args[0], names)
        else:
            names[node] = f"x{len(names)}"
            lines.append(f"    {names[node]} = {_called(node, names)}")
    space: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    exec("\n".join([*lines, f"    return {result}"]), space)  # its ops are all among OPS
    mod: Mod = space[name]
    return mod


def _called(node: Node, names: dict[Node, str]) -> str:
    op, args = op_name(node), [_written(x, names) for x in node.args]
    if op == "index":
        indices = node.args[1]
        assert isinstance(indices, (list, tuple))
        return f"{args[0]}[{', '.join(_written(i, names) for i in indices)}]" if indices else args[0]
    if op == "_to_copy":
        return f"{args[0]}.to({_written(node.kwargs['dtype'], names)})"
    kept = ("dtype", "rounding_mode", "min", "max")
    named = [f"{key}={_written(value, names)}" for key, value in node.kwargs.items() if key in kept]
    return f"torch.{op}({', '.join([*args, *named])})"


def _written(x: object, names: dict[Node, str]) -> str:
    if isinstance(x, Node):
        return names[x]
    if isinstance(x, (list, tuple)):
        return f"({''.join(f'{_written(item, names)}, ' for item in x)})"
    return repr(x)
