"""Emulation of gl.nvidia.hopper (TMA, mbarriers, wgmma) and gl.nvidia.ampere (cp.async, mma.sync), by module and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flexattn.emulator.context import program
from flexattn.emulator.dtypes import Layout
from flexattn.emulator.language import addresses
from flexattn.emulator.memory import Descriptor
from flexattn.emulator.report import GluonError
from flexattn.emulator.rules import check_mma_sync, static, static_shape
from flexattn.emulator.shared import SharedView
from flexattn.emulator.values import Pointer, Tensor, scalar


def _init(mbarrier: SharedView, count: Any) -> None:
    program().init_barrier(mbarrier, int(static(count, "the count of an mbarrier")))


def _invalidate(mbarrier: SharedView) -> None:
    program().invalidate_barrier(mbarrier)


def _expect(mbarrier: SharedView, bytes_per_cta: Any = None, pred: Any = True, **by_name: Any) -> None:
    nbytes = by_name["bytes"] if bytes_per_cta is None else bytes_per_cta  # its name is bytes in Triton up to 3.6.
    program().expect(mbarrier, int(static(nbytes, "the bytes to expect")), pred)


def _arrive(mbarrier: SharedView, *, count: Any = 1, pred: Any = True) -> None:
    program().arrive(mbarrier, int(static(count, "the count of an arrive")), pred)


def _wait(mbarrier: SharedView, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    program().wait(mbarrier, phase, pred)


def _make_descriptor(
    base: Pointer,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    layout: Layout,
    padding_option: str = "zero",
) -> Descriptor:
    block = static_shape(block_shape, "a descriptor's block")
    return Descriptor(base.buffer, int(base.offset), shape, strides, block, layout, padding_option)


def _load(
    tensor_desc: Descriptor,
    coord: Sequence[Any],
    barrier: SharedView,
    result: SharedView,
    pred: Any = True,
    multicast: bool = False,
) -> None:
    if multicast:
        raise NotImplementedError("multicast of a TMA load")
    program().tma_load(tensor_desc, coord, barrier, result, pred)


def _store(reduction: str | None) -> Callable[[Descriptor, Sequence[Any], SharedView], None]:
    return lambda tensor_desc, coord, src: program().tma_store(tensor_desc, coord, src, reduction)


def _store_wait(pendings: Any, **_: Any) -> None:
    program().store_wait(int(static(pendings, "pendings")))


def _mma(
    a: Any,
    b: Any,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    return program().wgmma(a, b, acc, use_acc, bool(static(is_async, "is_async")))


def _mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] | None = None) -> Any:
    if deps is None:
        raise GluonError("warpgroup_mma_wait without deps")
    results = program().wgmma_wait(int(static(num_outstanding, "num_outstanding")), list(deps))
    return results[0] if len(results) == 1 else tuple(results)


def _mma_sync(a: Tensor, b: Tensor, acc: Tensor, input_precision: Any = None) -> Tensor:
    check_mma_sync(a, b, acc)
    program().step()
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + acc.data
    return Tensor(product.astype(np.float32), acc.dtype, acc.layout)


def _copy_async(smem: SharedView, pointer: Pointer, mask: Any = None, **_: Any) -> None:
    offset, active = addresses(pointer, mask, "async_copy_global_to_shared")
    program().async_copy(smem, pointer.buffer, offset, active)


def _commit_copies() -> None:
    program().commit_copies()


def _wait_for_copies(num_outstanding: Any = 0) -> None:
    program().wait_for_copies(int(static(num_outstanding, "num_outstanding")))


def _mma_init(value: Tensor) -> Tensor:
    return value


def _fence(cluster: bool = False) -> None:
    program().fence()


MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "mbarrier": {"init": _init, "invalidate": _invalidate, "expect": _expect, "arrive": _arrive, "wait": _wait},
    "tma": {
        "make_tensor_descriptor": _make_descriptor,
        "async_copy_global_to_shared": _load,
        "async_load": _load,  # its name in Triton from 3.8 on.
        "async_copy_shared_to_global": _store(None),
        "async_store": _store(None),
        "async_atomic_add": _store("add"),
        "async_atomic_min": _store("min"),
        "async_atomic_max": _store("max"),
        "store_wait": _store_wait,
    },
    "hopper": {
        "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait,
        "warpgroup_mma_init": _mma_init,
        "fence_async_shared": _fence,
    },
    "ampere": {"mma_v2": _mma_sync},
    "async_copy": {
        "async_copy_global_to_shared": _copy_async,
        "async_load": _copy_async,  # its name in Triton from 3.8 on
        "commit_group": _commit_copies,
        "wait_group": _wait_for_copies,
    },
}
"""The emulation of each function, by the last part of its module's name and its own."""


class _Builder:
    """The part of the IR builder that a user's @builtin needs for TMA reductions. Triton 3.6 and 3.7 have no function for them."""

    def create_async_tma_reduce(self, kind: Any, descriptor: Descriptor, coord: Sequence[Any], source: SharedView) -> None:
        program().tma_store(descriptor, coord, source, str(kind).rsplit(".", 1)[-1].lower())


class Semantic:
    """Stand-in for `_semantic`, which a user's own @builtin gets as an argument."""

    builder = _Builder()
    to_tensor = staticmethod(scalar)

    @staticmethod
    def _convert_to_ir_values(coord: Sequence[Any], require_i64: bool = False) -> Sequence[Any]:
        return coord
