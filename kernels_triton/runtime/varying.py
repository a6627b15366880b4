"""Floats of a call that may change between replays, found again among the arguments of its launches.

A launcher passes such a number to kernels unchanged, or compares it with another number. `Varying` is a float that records each
comparison and its outcome. So a caller with another value can check whether the launcher would have done the same. Any other use,
such as arithmetic, is recorded too, and then no other value may replace the number. Code that reads a float in C and bypasses its
methods, such as functions of `math` and torch's operators, is not detected. Launchers use none of it on these numbers, and
`tests/runtime/test_varying.py` checks that the launches of two values differ only in these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Note = tuple[str, Any, Any]  # a comparison, its other operand, and its outcome


class Notes:
    """Comparisons of one number; `is_used` if it was used in any other way."""

    def __init__(self) -> None:
        self.compared: list[Note] = []
        self.is_used = False

    def hold(self, value: float) -> bool:
        """Returns whether a launcher does the same with this value."""
        return not self.is_used and all(getattr(value, name)(other) is outcome for name, other, outcome in self.compared)


class Varying(float):
    """A number of a call, with its index among the call's numbers."""

    __slots__ = ("notes", "place")
    place: int
    notes: Notes

    def __new__(cls, value: float, place: int, notes: Notes) -> Varying:
        number = super().__new__(cls, value)
        number.place, number.notes = place, notes
        return number


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
_USES = (
    *(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__", "__round__", "__trunc__", "__floor__", "__ceil__", "__int__", "__float__", "__bool__"),
    *("__hash__", "__format__", "__repr__", "as_integer_ratio", "hex", "is_integer", "conjugate"),
)


def _comparing(name: str) -> Callable[[Varying, Any], Any]:
    compare = getattr(float, name)

    def noting(self: Varying, other: Any) -> Any:
        outcome = compare(self, other)
        self.notes.compared.append((name, other, outcome))
        return outcome

    return noting


def _using(name: str) -> Callable[..., Any]:
    use = getattr(float, name)

    def noting(self: Varying, *others: Any) -> Any:
        self.notes.is_used = True
        return use(self, *others)

    return noting


for _name in _COMPARISONS:
    setattr(Varying, _name, _comparing(_name))
for _name in _USES:
    setattr(Varying, _name, _using(_name))


def as_number(x: float) -> float:
    """Returns a number as a kernel argument: an ordinary float, or a `Varying` unchanged."""
    return x if type(x) is Varying else float(x)


def plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with ordinary floats, in tuples too."""
    return tuple(float.__float__(x) if type(x) is Varying else plain(x) if type(x) is tuple else x for x in arguments)
