"""Emulation of the functions of gl.nvidia.blackwell: tensor memory and tcgen05, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexattn.emulator.context import program
from flexattn.emulator.dtypes import DType, Layout
from flexattn.emulator.rules import static_shape
from flexattn.emulator.shared import SharedView
from flexattn.emulator.tensor import TensorView
from flexattn.emulator.values import Tensor


def _allocate(element_ty: DType, shape: Sequence[object], layout: Layout, value: Tensor | None = None) -> TensorView:
    return program().allocate_tensor(element_ty, static_shape(shape, "tensor memory"), layout, value)


def _mma(
    a: SharedView | TensorView,
    b: SharedView,
    acc: TensorView,
    *,
    use_acc: object = True,
    pred: object = True,
    multicast: bool = False,
    mbarriers: Sequence[SharedView] | None = None,
    mbarrier_preds: Sequence[object] | None = None,
) -> None:
    if multicast:
        raise NotImplementedError("multicast of the commit of a tcgen05_mma")
    if pred:
        program().tcgen05_mma(a, b, acc, use_acc)
    barriers = mbarriers or ()
    for barrier, is_arrived_at in zip(barriers, mbarrier_preds or [True] * len(barriers), strict=True):
        if pred and is_arrived_at:
            program().tcgen05_commit(barrier)


def _commit(barrier: SharedView, pred: object = True, descs: Sequence[object] = ()) -> None:
    if descs:
        raise NotImplementedError("a tcgen05_commit to other blocks of a cluster")
    if pred:
        program().tcgen05_commit(barrier)


FUNCTIONS: dict[str, Callable[..., object]] = {
    "allocate_tensor_memory": _allocate,
    "tcgen05_mma": _mma,
    "tcgen05_commit": _commit,
}
"""The emulation of each function, by its name."""
