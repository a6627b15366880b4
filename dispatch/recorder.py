"""The recorder of a call: torch's operators, launches and runs of cuDNN's plans, in order.

`replay` records a call on tensors with memory, and repeats it on other tensors. `plan` records a call on meta tensors for a target
GPU, so that another framework can own the memory and launch the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.compat import TorchDispatchMode, storage_of, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.plans import Plan as CudnnPlan
    from flexattn.kernels_triton.runtime.launch import Launch

_aten = torch.ops.aten
_EMPTY = _aten.empty.memory_format
_ALLOCATIONS = frozenset(
    (_EMPTY, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default)
)
_ZEROS = frozenset((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default))


class Slot(int):
    """A tensor's number in a recorded operator's arguments. Its type distinguishes it from integer arguments."""


class Op(NamedTuple):
    """A recorded operator of torch."""

    func: Any
    leaves: list[object]  # the operator's arguments, with slots in place of tensors.
    tree: Any
    outs: tuple[int | None, ...]
    writes: bool

    @property
    def allocates(self) -> bool:
        """True if the operator returns new memory without values."""
        return self.func in _ALLOCATIONS

    @property
    def sets_to_zero(self) -> bool:
        """True if the operator sets all elements of its result to 0, in new memory or in place."""
        return self.func in _ZEROS or self.func is _aten.zero_.default

    @property
    def slots(self) -> list[int]:
        """The slots of the tensors among the arguments, each once."""
        return sorted({int(x) for x in self.leaves if type(x) is Slot})

    def as_allocation(self) -> Op | None:
        """Returns the operator that only allocates the result, or None if the result is not new memory."""
        return None if self.func is _aten.zero_.default else self._replace(func=_EMPTY)

    def arguments(self, values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the operator's arguments by position and by name. values: a value for each slot, to stand for the tensor."""
        leaves = [values[int(x)] if type(x) is Slot else x for x in self.leaves]
        return tree_unflatten(leaves, self.tree)  # type: ignore[no-any-return]


class Launched(NamedTuple):
    """A recorded launch."""

    target: Any  # `direct.Prepared`, or on meta tensors `launch.Launch`.
    tensors: list[int]


class Executed(NamedTuple):
    """A recorded run of a cuDNN plan."""

    plan: CudnnPlan
    buffers: dict[int, int]


Step = Op | Launched | Executed


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for which torch does not import Dynamo. The import would take at least half a second of the second call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, so that operators are not wrapped to exclude Dynamo. Dynamo compiles no frame inside a mode anyway."""
        return False


class Recorder(Watch):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operators in `steps`. Launches and runs of plans are reported to it.

    Each tensor has a slot: its number in `tensors`. Views have slots of their own.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []  # all tensors are kept, so that no id and no memory is reused.
        self.aliases: list[Tensor] = []  # tensors that share the slot of another one.
        self.slot_of: dict[int, int] = {}
        self.made: set[int] = set()  # tensors that an operator made. All others are inputs and constants.
        self.roots: dict[int, tuple[int, int]] = {}  # for each view its base tensor, and its offset there in bytes.
        self.steps: list[Step] = []
        self.trouble = ""
        self.inputs = [None if t is None else self.slot(t) for t in inputs]

    def slot(self, tensor: Tensor) -> int:
        """Returns the slot of a tensor, a new one for a new tensor."""
        slot = self.slot_of.get(id(tensor))
        if slot is None:
            slot = self.slot_of[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        leaves, tree = tree_flatten((args, kwargs or {}))
        if func is _aten.detach.default and self.slot(args[0]) in self.made:  # there are no graphs here, so it is the same tensor.
            self.slot_of[id(out)] = self.slot(args[0])
            self.aliases.append(out)
            return out
        leaves = [Slot(self.slot(x)) if isinstance(x, Tensor) else x for x in leaves]
        outs: list[int | None] = []
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                is_new = id(x) not in self.slot_of
                outs.append(self.slot(x))
                if is_new:
                    self.made.add(self.slot(x))
                    self._find_root(x, leaves)
            else:
                outs.append(None)
                if x is not None:
                    self.trouble = f"{func} returns a {type(x).__name__}"
        self.steps.append(Op(func, leaves, tree, tuple(outs), func._schema.is_mutable))
        return out

    def root(self, slot: int) -> tuple[int, int]:
        """Returns the base tensor of a view, and the view's offset in bytes. Other tensors are their own base, with offset 0."""
        return self.roots.get(slot, (slot, 0))

    def is_view(self, op: Op) -> bool:
        """Returns whether an operator only made views of its arguments."""
        return not op.writes and bool(op.outs) and all(i in self.roots for i in op.outs)

    def _find_root(self, out: Tensor, leaves: Sequence[object]) -> None:
        """Records the argument of an operator that the result is a view of. In a replay, other tensors of its storage may move."""
        for x in leaves:
            if type(x) is Slot and storage_of(self.tensors[x]) == storage_of(out):
                root, offset = self.root(int(x))
                self.roots[self.slot(out)] = root, offset + first_byte(out) - first_byte(self.tensors[x])
                return

    def on_launch(self, *event: Any) -> None:
        """Records a launch (kernel, programs, arguments) or the execution of a plan (plan, buffers)."""
        if len(event) == 2:
            plan, buffers = event
            self.steps.append(Executed(plan, {uid: self.slot(t) for uid, t in buffers.items()}))
            return
        direct, programs, arguments = event
        if direct is None:
            self.trouble = "only Triton can launch a kernel of the call"
            return
        self.steps.append(Launched(direct.prepare(programs, arguments), [self.slot(t) for t in direct.tensors_of(arguments)]))

    def on_planned_launch(self, launch: Launch) -> None:
        """Records a `launch.Launch` that does not run, because its tensors are meta tensors."""
        self.steps.append(Launched(launch, [self.slot(t) for t in tensors_of(launch.arguments)]))


def first_byte(t: Tensor) -> int:
    """Returns the offset of a tensor's first byte in its storage."""
    return int(t.storage_offset()) * t.element_size()


def tensors_of(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """Yields the tensors in a launch's flat arguments in order, including those in descriptors and tuples."""
    for x in arguments:
        if isinstance(x, Tensor):
            yield x
        elif hasattr(x, "block_shape"):  # a descriptor.
            yield x.base
        elif isinstance(x, tuple):
            yield from tensors_of(x)
