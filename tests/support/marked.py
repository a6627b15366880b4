"""A tensor class that a door does not know."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Marked(Tensor):
    """Overrides torch's functions but not its operators, like classes whose elements are not their value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


def marked(x: Tensor) -> Tensor:
    """Returns x as a tensor of that class."""
    return x.as_subclass(Marked)
