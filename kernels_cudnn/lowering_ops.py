"""Lowering of each op of a mod's graph to cuDNN's nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.lowering import Expression, Lowering

# Functions from an expression's op to steps. Their arguments are the lowering, the expression, its operands, and the operands'
# values.

Lowered = Callable[["Lowering", "Expression", "list[Expression]", list[int]], int]

_CHEAP = ("add", "sub", "neg", "abs", "maximum", "minimum", "clamp", "mul")
_LOGICAL = ("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "logical_xor")
_BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")  # cuDNN has no node for the bits of integers
CHEAP = {"int": frozenset(_CHEAP), "bool": frozenset(_CHEAP + _LOGICAL + _BITWISE), "float": frozenset[str]()}  # by kind
# Ops whose result can be infinite in a derivative.
DIVISIONS = frozenset(("div", "floor_divide", "trunc_divide", "remainder", "fmod"))
RISKY = frozenset(
    ("reciprocal", "rsqrt", "sqrt", "log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "pow", "tan", "cosh", "sinh")
)


def _node(op: str) -> Lowered:
    """Returns the lowering to a node that computes in the kind of the result, floats or integers."""

    def lowered(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
        kind = "int" if x.kind == "bool" else x.kind
        return to.step(op, kind, *(to.as_kind(v, kind) for v in values))

    return lowered


def _float_node(op: str) -> Lowered:
    return lambda to, x, operands, values: to.step(op, "float", *(to.as_kind(v, "float") for v in values))


def _comparison(op: str) -> Lowered:
    def lowered(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
        kind = "float" if "float" in {operand.kind for operand in operands} else "int"
        a, b = (to.as_kind(v, kind) for v in values)
        return to.step(f"cmp_{op}", "bool", a, b)

    return lowered


def _logical(op: str) -> Lowered:
    def lowered(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
        if x.kind != "bool":
            to.refuse(x.node, "cuDNN has no node for the bits of integers")
        return to.step(op, "bool", *(to.as_kind(v, "bool") for v in values))

    return lowered


def _sum(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    """Returns a sum. A sum of truth values is true if one of them is, as in torch."""
    return (_logical("logical_or") if x.kind == "bool" else _node("add"))(to, x, operands, values)


def _where(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    kind = "int" if x.kind == "bool" else x.kind
    result = to.step("binary_select", kind, to.as_kind(values[1], kind), to.as_kind(values[2], kind), to.as_kind(values[0], "bool"))
    return to.as_kind(result, x.kind)


def _clamp(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    result, bounds = to.as_kind(values[0], x.kind), iter(values[1:])
    for argument, op in zip(x.args[1:], ("max", "min"), strict=False):
        if argument is not None:
            result = to.step(op, x.kind, result, to.as_kind(next(bounds), x.kind))
    return result


def _remainder(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    a, b = (to.as_kind(v, x.kind) for v in values)
    if x.kind == "float":  # the result has the sign of the divisor.
        quotient = to.step("floor", "float", to.step("div", "float", a, b))
        return to.step("sub", "float", a, to.step("mul", "float", quotient, b))
    if operands[1].bounds[0] <= 0:
        to.refuse(x.node, "cuDNN's remainder is untested for a divisor that may be 0 or negative")
    rest = to.step("mod", "int", a, b)
    if operands[0].bounds[0] < 0:
        rest = to.step("mod", "int", to.step("add", "int", rest, b), b)
    return rest


def _fmod(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    if x.kind == "int" and (operands[0].bounds[0] < 0 or operands[1].bounds[0] <= 0):
        to.refuse(x.node, "cuDNN's remainder is untested for numbers that may be negative")
    return to.step("mod", x.kind, *(to.as_kind(v, x.kind) for v in values))


def _whole_division(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    a, b = (to.as_kind(v, x.kind) for v in values)
    if x.kind == "float":
        if x.op == "trunc_divide":
            return _truncated(to, to.step("div", "float", a, b))
        return to.step("floor", "float", to.step("div", "float", a, b))
    if operands[0].bounds[0] < 0 or operands[1].bounds[0] <= 0:
        to.refuse(x.node, "cuDNN's integer division is untested for numbers that may be negative")
    # The remainder is subtracted first, so that the division is exact and cuDNN's rounding does not matter.
    return to.step("div", "int", to.step("sub", "int", a, to.step("mod", "int", a, b)), b)


def _truncated(to: Lowering, value: int) -> int:
    below = to.step("cmp_lt", "bool", value, to.number(0.0))
    return to.step("binary_select", "float", to.step("ceil", "float", value), to.step("floor", "float", value), below)


def _sign(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    value = to.as_kind(values[0], x.kind)
    zero = to.as_kind(to.number(0), x.kind)
    above, below = (to.as_kind(to.step(op, "bool", value, zero), x.kind) for op in ("cmp_gt", "cmp_lt"))
    return to.step("sub", x.kind, above, below)


def _power(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    exponent = operands[1].args[0] if operands[1].op == "constant" else None
    value = to.as_kind(values[0], x.kind)
    if exponent is not None and exponent == int(exponent) and 0 <= exponent <= 8:
        if exponent == 0:
            return to.as_kind(to.number(1), x.kind)
        result = value
        for _ in range(int(exponent) - 1):
            result = to.step("mul", x.kind, result, value)
        return result
    if x.kind == "float" and exponent in (0.5, -0.5, -1.0, -2.0):
        if exponent in (0.5, -0.5):
            return to.step("sqrt" if exponent == 0.5 else "rsqrt", "float", value)
        return to.step("reciprocal", "float", value if exponent == -1.0 else to.step("mul", "float", value, value))
    return to.refuse(x.node, "cuDNN's graphs support integer powers from 0 to 8, and -2, -1, -0.5 and 0.5")


def _composed(function: Callable[..., int]) -> Lowered:
    """Returns the lowering of an op on floats that is composed of others.

    It calls function(apply, number, value), with apply(op, *values) and number(constant).
    """

    def lowered(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
        def apply(op: str, *args: int) -> int:
            return to.step(op, "float", *args)

        return function(apply, to.number, *(to.as_kind(v, "float") for v in values))

    return lowered


def _rounding(op: str) -> Lowered:
    """Returns the lowering of a rounding. Integers stay unchanged."""

    def lowered(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
        if x.kind == "int":
            return to.as_kind(values[0], "int")
        return _truncated(to, values[0]) if op == "trunc" else to.step(op, "float", values[0])

    return lowered


def _is_nan(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    value = to.as_kind(values[0], "float")
    return to.step("cmp_neq", "bool", value, value)


def _is_inf(to: Lowering, x: Expression, operands: list[Expression], values: list[int]) -> int:
    return to.step("cmp_eq", "bool", to.step("abs", "float", to.as_kind(values[0], "float")), to.number(math.inf))


OPS: dict[str, Lowered] = {
    **{op: _node(op) for op in ("sub", "mul", "neg", "abs")},
    "add": _sum,
    "maximum": _node("max"),
    "minimum": _node("min"),
    "relu": lambda to, x, operands, values: to.step("max", x.kind, to.as_kind(values[0], x.kind), to.as_kind(to.number(0), x.kind)),
    "div": _float_node("div"),
    **{op: _float_node(op) for op in ("exp", "log", "cos", "sin", "tan", "erf", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh")},
    **{op: _comparison(op if op != "ne" else "neq") for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{op: _logical(node) for op, node in (("bitwise_and", "logical_and"), ("bitwise_or", "logical_or"))},
    **{op: _logical(op) for op in ("logical_and", "logical_or", "logical_not")},
    "bitwise_not": _logical("logical_not"),
    "bitwise_xor": _logical("cmp_neq"),
    "logical_xor": _logical("cmp_neq"),
    "where": _where,
    "clamp": _clamp,
    "remainder": _remainder,
    "fmod": _fmod,
    "floor_divide": _whole_division,
    "trunc_divide": _whole_division,
    "sign": _sign,
    "pow": _power,
    **{op: _rounding(op) for op in ("floor", "ceil", "trunc")},
    "isnan": _is_nan,
    "isinf": _is_inf,
    "exp2": _composed(lambda apply, number, x: apply("exp", apply("mul", x, number(math.log(2.0))))),
    "log2": _composed(lambda apply, number, x: apply("mul", apply("log", x), number(1.0 / math.log(2.0)))),
    "log10": _composed(lambda apply, number, x: apply("mul", apply("log", x), number(1.0 / math.log(10.0)))),
    "log1p": _composed(lambda apply, number, x: apply("log", apply("add", x, number(1.0)))),
    "expm1": _composed(lambda apply, number, x: apply("sub", apply("exp", x), number(1.0))),
    "erfc": _composed(lambda apply, number, x: apply("add", apply("neg", apply("erf", x)), number(1.0))),
    "cosh": _composed(
        lambda apply, number, x: apply("mul", apply("add", apply("exp", x), apply("exp", apply("neg", x))), number(0.5))
    ),
    "sinh": _composed(
        lambda apply, number, x: apply("mul", apply("sub", apply("exp", x), apply("exp", apply("neg", x))), number(0.5))
    ),
}
