"""The numbers of a call among the arguments of its launches, found by the names of the arguments.

The numbers are softmax_scale, softcap and the floats that mods capture, in this order. Launchers pass them to kernels unchanged.
So if two calls differ only in their numbers and agree in `choices`, their launches differ only in these arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Path = tuple[int, ...]  # index of an argument, then indices inside of it

LARGE_SOFTCAP = 256.0  # above it, the error of `tanh_in_half` (5e-7) times the softcap exceeds a rounding of fp16


def choices(numbers: Sequence[float]) -> tuple[bool, ...]:
    """Returns all that launchers ask about a call's numbers."""
    scale, softcap, *_ = numbers
    return scale == 0.0, softcap > 0.0, softcap > LARGE_SOFTCAP


def places(names: Sequence[str], floats: Iterable[Path]) -> list[tuple[int, Path]]:
    """Returns (index of the number, path of the argument) for each argument that is a number of the call.

    names: the names of a kernel's flat arguments. floats: the paths of all arguments that are floats, in order.
    """
    found: list[tuple[int, Path]] = []
    captured: dict[int, int] = {}  # floats so far in each tuple of captures
    for path in floats:
        name = names[path[0]]
        if name == "scale" or name.endswith("scores_scale"):
            found.append((0, path))
        elif name.endswith("scores_softcap"):
            found.append((1, path))
        elif name.endswith("captures"):
            captured[path[0]] = captured.get(path[0], 0) + 1
            found.append((1 + captured[path[0]], path))
    return found
