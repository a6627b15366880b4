"""Pointwise nodes of cuDNN frontend's graphs, versions 1.28 to 1.32: their operands, parameters and formulas.

Names and orders are those of `cudnn.pygraph`. A `_backward` node's operands are the gradient of a result (`loss`) and the input of
the forward node. Formulas of nodes with parameters are those of cuDNN frontend's own code generator
(`cudnn/gemm/frost/epilogue_codegen.py`). `relu` with a `lower_clip` other than 0 is not compared with cuDNN on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.mods.tracer import MisusedType

ON_EVERY_NODE = ("name", "compute_data_type")  # accepted and ignored: the kernel chooses the arithmetic


class Node(NamedTuple):
    """A pointwise node: compute(*operands, *parameters) in torch. Parameters are numbers, or None if they are left out."""

    compute: Callable[..., Tensor]
    operands: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()  # parameters without a default

    @property
    def accepted(self) -> tuple[str, ...]:
        return (*self.operands, *self.parameters, *ON_EVERY_NODE)


def bind(name: str, positional: Sequence[object], named: Mapping[str, object]) -> tuple[list[object], list[object]]:
    """Returns the operands and the parameters of a call of node `name`.

    Raises:
        TypeError: if an argument is unknown, comes twice, or is missing.
    """
    node = NODES[name]
    by_position = node.accepted if node.parameters else node.operands  # as in cuDNN frontend's own signatures
    if len(positional) > len(by_position):
        raise MisusedType(
            f"{name} got {len(positional)} positional arguments; accepted: {_join(by_position)}, and by name also "
            f"{_join(ON_EVERY_NODE)}"
        )
    bound = dict(zip(by_position, positional, strict=False))
    for keyword, value in named.items():
        if keyword not in node.accepted:
            raise MisusedType(f"{name} got an unknown argument {keyword}={value!r}; accepted: {_join(node.accepted)}")
        if keyword in bound:
            raise MisusedType(f"{name} got {keyword} twice, by position and by name; accepted: one of the two")
        bound[keyword] = value
    for required in (*node.operands, *node.required):
        if bound.get(required) is None:
            raise MisusedType(f"{name} got no {required}; accepted: {_join(node.accepted)}")
    parameters = [bound.get(parameter) for parameter in node.parameters]
    for parameter, value in zip(node.parameters, parameters, strict=True):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (value is None or is_number or (isinstance(value, Tensor) and value.dim() == 0)):  # a number of a closure is traced
            raise MisusedType(f"{parameter} of {name} is {value!r}; accepted: a number")
    return [bound[operand] for operand in node.operands], parameters


def _join(names: Sequence[str]) -> str:
    return ", ".join(names)


def _relu(x: Tensor, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Tensor:
    """Returns max(x, lower_clip or 0), or with a slope max(max(x, 0) + slope * min(x, 0), lower_clip), clipped to upper_clip."""
    if negative_slope is None and lower_clip is None:
        result = torch.relu(x)
    elif negative_slope is None:
        result = torch.clamp(x, min=lower_clip)
    else:
        result = torch.clamp(x, min=0) + negative_slope * torch.clamp(x, max=0)
        result = result if lower_clip is None else torch.clamp(result, min=lower_clip)
    return result if upper_clip is None else torch.clamp(result, max=upper_clip)


def _relu_backward(g: Tensor, x: Tensor, negative_slope: Any, lower_clip: Any, upper_clip: Any) -> Tensor:
    """Returns g if lower_clip (0) < x < upper_clip, else g * negative_slope (0)."""
    inside = x > (0 if lower_clip is None else lower_clip)
    inside = inside if upper_clip is None else torch.logical_and(inside, x < upper_clip)
    return torch.where(inside, g, torch.zeros_like(g) if negative_slope is None else g * negative_slope)


def _swish_backward(g: Tensor, x: Tensor, swish_beta: Any) -> Tensor:
    scaled = x if swish_beta is None else swish_beta * x
    s = torch.sigmoid(scaled)
    return g * (s + scaled * s * (1 - s))


def _tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    return g * (1 - y * y)


def _sigmoid_backward(g: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return g * (s * (1 - s))


def _gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    below = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return g * (below + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))


def _gelu_approx_tanh_backward(g: Tensor, x: Tensor) -> Tensor:
    """Returns g times the derivative of 0.5 x (1 + tanh(k (x + 0.044715 x^3))) with k = sqrt(2 / pi)."""
    k, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(k * (x + cubic * x * x * x))
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (k * (1 + 3 * cubic * x * x)))


def _as_mask(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else x != 0


_UNARY: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in ("exp", "log", "abs", "neg", "sqrt", "rsqrt", "sin", "cos", "tan", "erf", "floor", "ceil")
    },
    **{name: getattr(torch, name) for name in ("reciprocal", "sigmoid", "tanh")},
    "identity": lambda x: x,
    "elu": lambda x: torch.nn.functional.elu(x),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_approx_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: torch.nn.functional.softplus(x),
    "logical_not": lambda x: torch.logical_not(_as_mask(x)),
}
_BINARY_A_B: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div")},
    "add_square": lambda a, b: a + b * b,
    "logical_and": lambda a, b: torch.logical_and(_as_mask(a), _as_mask(b)),
    "logical_or": lambda a, b: torch.logical_or(_as_mask(a), _as_mask(b)),
}
_BINARY_INPUTS: dict[str, Callable[..., Tensor]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": torch.fmod,  # has the sign of the first operand
    "pow": torch.pow,
}
_COMPARISONS = {f"cmp_{name}": getattr(torch, name if name != "neq" else "ne") for name in ("eq", "neq", "gt", "ge", "lt", "le")}
_BACKWARDS: dict[str, Callable[..., Tensor]] = {
    "tanh_backward": _tanh_backward,
    "sigmoid_backward": _sigmoid_backward,
    "elu_backward": lambda g, x: torch.where(x > 0, g, g * torch.exp(torch.clamp(x, max=0))),
    "softplus_backward": lambda g, x: g * torch.sigmoid(x),
    "gelu_backward": _gelu_backward,
    "gelu_approx_tanh_backward": _gelu_approx_tanh_backward,
}
_CLIPS = ("negative_slope", "lower_clip", "upper_clip")

NODES: dict[str, Node] = {
    **{name: Node(compute, ("input",)) for name, compute in _UNARY.items()},
    **{name: Node(compute, ("a", "b")) for name, compute in _BINARY_A_B.items()},
    **{name: Node(compute, ("input0", "input1")) for name, compute in _BINARY_INPUTS.items()},
    **{name: Node(compute, ("input", "comparison")) for name, compute in _COMPARISONS.items()},
    **{name: Node(compute, ("loss", "input")) for name, compute in _BACKWARDS.items()},
    "bias": Node(torch.add, ("input", "bias")),
    "scale": Node(torch.mul, ("input", "scale")),
    "binary_select": Node(lambda x, y, mask: torch.where(_as_mask(mask), x, y), ("input0", "input1", "mask")),
    "relu": Node(_relu, ("input",), _CLIPS),
    "relu_backward": Node(_relu_backward, ("loss", "input"), _CLIPS),
    "leaky_relu": Node(lambda x, slope: torch.where(x > 0, x, x * slope), ("input",), ("negative_slope",), ("negative_slope",)),
    "leaky_relu_backward": Node(
        lambda g, x, slope: torch.where(x > 0, g, g * slope), ("loss", "input"), ("negative_slope",), ("negative_slope",)
    ),
    "swish": Node(
        lambda x, beta: torch.nn.functional.silu(x) if beta is None else x * torch.sigmoid(beta * x), ("input",), ("swish_beta",)
    ),
    "swish_backward": Node(_swish_backward, ("loss", "input"), ("swish_beta",)),
}
