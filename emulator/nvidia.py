"""Emulation of gl.nvidia: TMA, mbarriers, wgmma, cp.async, mma.sync, tensor memory and tcgen05, by module and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flexattn.emulator.context import program
from flexattn.emulator.dtypes import Layout
from flexattn.emulator.language import addresses
from flexattn.emulator.memory import Descriptor
from flexattn.emulator.report import GluonError
from flexattn.emulator.rules import check_mma_sync, static, static_shape
from flexattn.emulator.shared import SharedView
from flexattn.emulator.tensor import TensorView
from flexattn.emulator.values import Operand, Pointer, Tensor, scalar


def _constant(value: object, what: str) -> int:
    return int(static(value, what))


def _expect(mbarrier: SharedView, bytes_per_cta: Operand = None, pred: Operand = True, **by_name: object) -> None:
    nbytes = by_name["bytes"] if bytes_per_cta is None else bytes_per_cta  # its name is bytes in Triton up to 3.6.
    program().expect(mbarrier, _constant(nbytes, "the bytes to expect"), pred)


def _make_descriptor(
    base: Pointer,
    shape: Sequence[Operand],
    strides: Sequence[Operand],
    block_shape: Sequence[Operand],
    layout: Layout,
    padding_option: str = "zero",
) -> Descriptor:
    block = static_shape(block_shape, "a descriptor's block")
    return Descriptor(base.buffer, int(base.offset), shape, strides, block, layout, padding_option)


def _load(
    tensor_desc: Descriptor,
    coord: Sequence[Operand],
    barrier: SharedView,
    result: SharedView,
    pred: Operand = True,
    multicast: bool = False,
) -> None:
    if multicast:
        raise NotImplementedError("multicast of a TMA load")
    program().tma_load(tensor_desc, coord, barrier, result, pred)


def _store(reduction: str | None) -> Callable[[Descriptor, Sequence[object], SharedView], None]:
    return lambda tensor_desc, coord, src: program().tma_store(tensor_desc, coord, src, reduction)


def _wgmma(
    a: Operand,
    b: Operand,
    acc: Operand,
    *,
    use_acc: Operand = True,
    precision: Operand = None,
    max_num_imprecise_acc: Operand = None,
    is_async: Operand = False,
) -> Operand:
    return program().wgmma(a, b, acc, use_acc, bool(static(is_async, "is_async")))


def _wgmma_wait(num_outstanding: Operand = 0, deps: Sequence[Operand] | None = None) -> Operand:
    if deps is None:
        raise GluonError("warpgroup_mma_wait without deps")
    results = program().wgmma_wait(_constant(num_outstanding, "num_outstanding"), list(deps))
    return results[0] if len(results) == 1 else tuple(results)


def _mma_sync(a: Tensor, b: Tensor, acc: Tensor, input_precision: object = None) -> Tensor:
    check_mma_sync(a, b, acc)
    program().step()
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + acc.data
    return Tensor(product.astype(np.float32), acc.dtype, acc.layout)


def _copy_async(smem: SharedView, pointer: Pointer, mask: Operand = None, **_: object) -> None:
    offset, active = addresses(pointer, mask, "async_copy_global_to_shared")
    program().async_copy(smem, pointer.buffer, offset, active)


def _tcgen05_mma(
    a: SharedView | TensorView,
    b: SharedView,
    acc: TensorView,
    *,
    use_acc: Operand = True,
    pred: Operand = True,
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


def _commit(barrier: SharedView, pred: Operand = True, descs: Sequence[object] = ()) -> None:
    if descs:
        raise NotImplementedError("a tcgen05_commit to other blocks of a cluster")
    if pred:
        program().tcgen05_commit(barrier)


MODULES: dict[str, dict[str, Callable[..., object]]] = {
    "mbarrier": {
        "init": lambda mbarrier, count: program().init_barrier(mbarrier, _constant(count, "the count of an mbarrier")),
        "invalidate": lambda mbarrier: program().invalidate_barrier(mbarrier),
        "expect": _expect,
        "arrive": lambda mbarrier, *, count=1, pred=True: program().arrive(
            mbarrier, _constant(count, "the count of an arrive"), pred
        ),
        "wait": lambda mbarrier, phase, pred=True, deps=(): program().wait(mbarrier, phase, pred),
    },
    "tma": {
        "make_tensor_descriptor": _make_descriptor,
        "async_copy_global_to_shared": _load,
        "async_load": _load,  # its name in Triton from 3.8 on.
        "async_copy_shared_to_global": _store(None),
        "async_store": _store(None),
        "async_atomic_add": _store("add"),
        "async_atomic_min": _store("min"),
        "async_atomic_max": _store("max"),
        "store_wait": lambda pendings, **_: program().store_wait(_constant(pendings, "pendings")),
    },
    "hopper": {
        "warpgroup_mma": _wgmma,
        "warpgroup_mma_wait": _wgmma_wait,
        "warpgroup_mma_init": lambda value: value,
        "fence_async_shared": lambda cluster=False: program().fence(),
    },
    "ampere": {"mma_v2": _mma_sync},
    "async_copy": {
        "async_copy_global_to_shared": _copy_async,
        "async_load": _copy_async,  # its name in Triton from 3.8 on
        "commit_group": lambda: program().commit_copies(),
        "wait_group": lambda num_outstanding=0: program().wait_for_copies(_constant(num_outstanding, "num_outstanding")),
    },
    "blackwell": {
        "allocate_tensor_memory": lambda element_ty, shape, layout, value=None: program().allocate_tensor(
            element_ty, static_shape(shape, "tensor memory"), layout, value
        ),
        "tcgen05_mma": _tcgen05_mma,
        "tcgen05_commit": _commit,
    },
}
"""The emulation of each function, by the last part of its module's name and its own."""


class _Builder:
    """The part of the IR builder that a user's @builtin needs for TMA reductions. Triton 3.6 and 3.7 have no function for them."""

    def create_async_tma_reduce(self, kind: object, descriptor: Descriptor, coord: Sequence[Operand], source: SharedView) -> None:
        program().tma_store(descriptor, coord, source, str(kind).rsplit(".", 1)[-1].lower())


class Semantic:
    """Stand-in for `_semantic`, which a user's own @builtin gets as an argument."""

    builder = _Builder()
    to_tensor = staticmethod(scalar)

    @staticmethod
    def _convert_to_ir_values(coord: Sequence[Operand], require_i64: bool = False) -> Sequence[object]:
        return coord
