"""The ops of a mod's graph as expressions of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flexattn.mod_values import INT64, Interval, fits


class Value(NamedTuple):
    text: str
    kind: str  # "float", "int" or "bool"
    bounds: Interval = INT64  # bounds of an int
    is_literal: bool = False

    @property
    def is_wide(self) -> bool:
        return self.kind == "int" and not fits(self.bounds)


# These ops map finite numbers to finite numbers.
FINITE = frozenset(
    (
        *("abs", "add", "ceil", "clamp", "cos", "erf", "erfc", "floor", "full", "maximum", "minimum", "mul", "neg"),
        *("relu", "round", "sigmoid", "sign", "sin", "sub", "tanh", "_to_copy", "trunc", "where"),
    )
)
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _infix(symbol: str) -> Callable[..., str]:
    return lambda kind, x, y: f"{x.text} {symbol} {y.text}"


def function(name: str) -> Callable[..., str]:
    return lambda kind, *operands: f"{name}({', '.join(x.text for x in operands)})"


def _by_kind(float_function: str, integer_function: str) -> Callable[..., str]:
    return lambda kind, *operands: function(float_function if kind == "float" else integer_function)(kind, *operands)


def _rounded(name: str) -> Callable[..., str]:
    return lambda kind, x: function(name)(kind, x) if kind == "float" else x.text


def _floor_divide(kind: str, x: Value, y: Value) -> str:
    if kind == "float":
        return f"tl.floor({x.text} / {y.text})"
    plain = x.bounds[0] >= 0 and y.bounds[0] >= 0
    return f"{x.text} // {_divisor(y)}" if plain else f"mod_math.floor_divide({x.text}, {_divisor(y)})"


def _trunc_divide(kind: str, x: Value, y: Value) -> str:
    return f"mod_math.trunc({x.text} / {y.text})" if kind == "float" else f"{x.text} // {_divisor(y)}"


def _remainder(kind: str, x: Value, y: Value) -> str:
    if kind == "float":
        return f"mod_math.float_remainder({x.text}, {y.text})"
    plain = x.bounds[0] >= 0 and y.bounds[0] >= 0
    return f"{x.text} % {_divisor(y)}" if plain else f"mod_math.floor_remainder({x.text}, {_divisor(y)})"


def _fmod(kind: str, x: Value, y: Value) -> str:
    return f"mod_math.float_fmod({x.text}, {y.text})" if kind == "float" else f"{x.text} % {_divisor(y)}"


def _divisor(y: Value) -> str:
    """Returns a divisor of integers; 1 for 0, because a quotient by 0 may have any value, which breaks its bounds."""
    if not y.bounds[0] <= 0 <= y.bounds[1]:
        return y.text
    return "1" if y.is_literal else f"tl.where({y.text} == 0, 1, {y.text})"


def _power(kind: str, x: Value, y: Value) -> str:
    """Returns a small integer power as products, which are exact in sign and for integers."""
    exponent = float(y.text) if y.is_literal and "(" not in y.text else None
    if exponent is not None and exponent == int(exponent) and 0 <= exponent <= 8:
        n = int(exponent)
        one = "1.0" if kind == "float" else "1"
        return " * ".join([x.text] * n) if n else f"tl.where({x.text} == {x.text}, {one}, {one})"  # a tile
    if exponent == 0.5:
        return f"tl.sqrt({x.text})"
    if exponent == -0.5:
        return f"1.0 / tl.sqrt({x.text})"
    if kind == "int":
        raise NotImplementedError(
            "Triton has no lowering for an integer to a power other than a number from 0 to 8; convert the integer to float"
        )
    return f"mod_math.power({x.text}, {y.text})"


# From (the result's kind, operands in the type that the op computes in) to an expression.
OPS: dict[str, Callable[..., str]] = {
    **{op: _infix(symbol) for op, symbol in COMPARISONS.items()},
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _infix("/"),
    "bitwise_and": _infix("&"),
    "bitwise_or": _infix("|"),
    "bitwise_xor": _infix("^"),
    "logical_and": _infix("&"),
    "logical_or": _infix("|"),
    "logical_xor": _infix("^"),
    "bitwise_not": lambda kind, x: f"{x.text} == 0" if kind == "bool" else f"-1 - {x.text}",
    "logical_not": lambda kind, x: f"{x.text} == 0",
    "neg": lambda kind, x: f"-{x.text}",
    "reciprocal": lambda kind, x: f"1.0 / {x.text}",
    "rsqrt": lambda kind, x: f"1.0 / tl.sqrt({x.text})",
    "sigmoid": lambda kind, x: f"1.0 / (1.0 + mod_math.exp(-{x.text}))",
    "erfc": lambda kind, x: f"1.0 - tl.erf({x.text})",
    "tan": lambda kind, x: f"tl.sin({x.text}) / tl.cos({x.text})",
    "relu": lambda kind, x: f"tl.where({x.text} < 0, 0, {x.text})" if kind == "int" else f"tl.where({x.text} < 0.0, 0.0, {x.text})",
    "isnan": lambda kind, x: f"{x.text} != {x.text}",
    "isinf": lambda kind, x: f'tl.abs({x.text}) == float("inf")',
    "pow": _power,
    "floor_divide": _floor_divide,
    "trunc_divide": _trunc_divide,
    "remainder": _remainder,
    "fmod": _fmod,
    "maximum": _by_kind("mod_math.maximum", "tl.maximum"),
    "minimum": _by_kind("mod_math.minimum", "tl.minimum"),
    "where": function("tl.where"),
    "abs": function("tl.abs"),
    "sign": function("mod_math.sign"),
    "floor": _rounded("tl.floor"),
    "ceil": _rounded("tl.ceil"),
    "trunc": _rounded("mod_math.trunc"),
    "round": _rounded("mod_math.round_to_even"),
    "tanh": function("mod_math.tanh"),
    **{op: function(f"tl.{op}") for op in ("exp2", "log", "log2", "sqrt", "sin", "cos", "erf")},
    **{op: function(f"mod_math.{op}") for op in ("exp", "expm1", "log1p", "log10", "sinh", "cosh")},
}
