"""Tensors between guard bytes: the tensors of a call, and the results of `torch.empty` and similar functions.

The guards of floats are NaN and the guards of integers are large, so a read out of bounds spoils the result. A write out of bounds
changes the guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

GUARD = 4096  # bytes on each side; a multiple of every alignment that a kernel may ask for
FLOAT_BYTE, INT_BYTE = 0xFF, 0x7B

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


class Layout(NamedTuple):
    """Layout of a tensor in memory: each dim's stride in elements, and how many elements past an aligned address it begins."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Returns the bytes from the first element to the end of the last."""
        if 0 in self.sizes:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return (1 + last) * self.dtype.itemsize


class Block:
    """Tensors by name, each between guards; all are compared with a copy at once.

    together: names of tensors of one dtype that lie in one memory, at their offsets. as_views: these are views of one tensor, which
    requires a gradient if one of `wanted` does; all other wanted tensors are leaves.
    """

    def __init__(
        self,
        layouts: dict[str, Layout],
        device: str,
        together: Sequence[Sequence[str]] = (),
        as_views: bool = False,
        wanted: Sequence[str] = (),
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: list[Tensor] = []
        shared = {name for names in together for name in names}
        for names in (*together, *([name] for name in layouts if name not in shared)):
            dtype = layouts[names[0]].dtype
            behind = max(layouts[name].offset * dtype.itemsize + layouts[name].nbytes for name in names)
            byte = FLOAT_BYTE if dtype.is_floating_point else INT_BYTE
            memory = torch.full((2 * GUARD + behind,), byte, dtype=torch.uint8, device=device)
            self._memory.append(memory)
            if as_views and len(names) > 1:
                base = _lay(memory, GUARD, Layout((behind // dtype.itemsize,), (1,), dtype))
                base.requires_grad_(any(name in wanted for name in names))
                for name in names:
                    self.tensors[name] = base.as_strided(layouts[name].sizes, layouts[name].strides, layouts[name].offset)
                continue
            for name in names:
                start = GUARD + layouts[name].offset * dtype.itemsize
                self.tensors[name] = _lay(memory, start, layouts[name]).requires_grad_(name in wanted)
        self.tensors = {name: self.tensors[name] for name in layouts}
        self.remember()

    def remember(self) -> None:
        """Records the tensors' current content, with which `is_changed` compares."""
        self._copy = torch.cat(self._memory)

    def is_changed(self) -> Tensor:
        """Returns bool []: whether a byte of a tensor or of its guards has changed since `remember`."""
        return (torch.cat(self._memory) != self._copy).any()


def write(t: Tensor, values: Tensor) -> None:
    """Values into a tensor of a `Block`, in place; of a dim that is expanded the first ones count."""
    with torch.no_grad():
        for dim, stride in enumerate(t.stride()):
            if stride == 0 and t.shape[dim] > 1:
                t, values = t.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        t.copy_(values, non_blocking=True)  # from a CPU as well: memory that is not pinned is read before this returns


class Allocations:
    """Memory that `torch.empty` and its kin gave out since the last question, between guards and filled with NaN."""

    def __init__(self) -> None:
        self._guards: list[Tensor] = []

    def are_damaged(self) -> Tensor:
        """bool []: whether a guard byte was written."""
        guards, self._guards = self._guards, []
        by_device: dict[torch.device, list[Tensor]] = {}
        for guard in guards:
            by_device.setdefault(guard.device, []).append(guard)
        found = [(torch.cat(guards) != FLOAT_BYTE).any() for guards in by_device.values()]
        on_one = [is_damaged.to(found[0].device) for is_damaged in found]
        return torch.stack(on_one).any() if found else torch.zeros((), dtype=torch.bool)

    def _guarded(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            wanted = make(*args, **kwargs)
            is_plain = type(wanted) is Tensor and wanted.device.type in ("cpu", "cuda") and wanted.dtype is not torch.bool
            if not is_plain or kwargs.get("pin_memory") or _get_current_dispatch_mode() is not None:
                return wanted
            layout = Layout(tuple(wanted.shape), wanted.stride(), wanted.dtype)
            memory = torch.full((layout.nbytes + 2 * GUARD,), FLOAT_BYTE, dtype=torch.uint8, device=wanted.device)
            self._guards += [memory[:GUARD], memory[GUARD + layout.nbytes :]]
            return _lay(memory, GUARD, layout).requires_grad_(wanted.requires_grad)

        return allocate


@contextmanager
def guarded_allocations() -> Iterator[Allocations]:
    allocations = Allocations()
    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            stack.enter_context(mock.patch.object(owner, name, allocations._guarded(getattr(owner, name))))
        yield allocations


def _lay(memory: Tensor, start: int, layout: Layout) -> Tensor:
    """Set and not viewed, so that it is a tensor of its own to autograd."""
    t = torch.zeros(0, dtype=layout.dtype, device=memory.device)
    with torch.no_grad():
        return t.set_(memory.untyped_storage(), start // layout.dtype.itemsize, layout.sizes, layout.strides)
