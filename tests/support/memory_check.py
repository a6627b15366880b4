"""Triton's interpreter with a check of each access, which must lie in a tensor of the launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._pytree import tree_leaves


class OutOfBounds(AssertionError):
    """A kernel read or wrote past its tensors."""


class _Memory:
    """The memory of one launch's tensors: [begin, end) of each, ascending."""

    def __init__(self) -> None:
        self.begins = self.ends = np.empty(0, dtype=np.uint64)

    def set_to(self, arguments: Any) -> None:
        storages = [t.untyped_storage() for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.numel()]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        self.begins, self.ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data != 0]
        at = np.searchsorted(self.begins, addresses, side="right") - 1
        is_inside = (at >= 0) & (addresses + np.uint64(size) <= self.ends[np.maximum(at, 0)]) if len(self.ends) else at >= 0
        if not is_inside.all():
            outside = np.count_nonzero(~is_inside)
            raise OutOfBounds(f"{what} {outside} of {is_inside.size} elements outside of the tensors of the launch")


@contextlib.contextmanager
def checked_memory() -> Iterator[None]:
    """Within this context, an interpreted kernel raises triton's InterpreterError if it reads or writes past its tensors."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    memory = _Memory()
    launch = GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **named: Any) -> Any:
        memory.set_to((arguments, named))
        return launch(self, *arguments, **named)

    def looked_at(name: str, what: str, pointers_at: int, mask_at: int) -> Any:
        method: Callable[..., Any] = getattr(InterpreterBuilder, name)

        def access(self: Any, *arguments: Any) -> Any:
            memory.check(what, arguments[pointers_at], arguments[mask_at])
            return method(self, *arguments)

        return mock.patch.object(InterpreterBuilder, name, access)

    with (
        mock.patch.object(GridExecutor, "__call__", launched),
        looked_at("create_masked_load", "reads", 0, 1),
        looked_at("create_masked_store", "writes", 0, 2),
        looked_at("create_atomic_rmw", "adds to", 1, 3),
    ):
        yield
