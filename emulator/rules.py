"""Rules of Gluon, Triton's lowering, sm_90 and sm_100 that hold in every schedule: layouts, products, registers, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon.language import _layouts as layouts

from flexattn.emulator.dtypes import Layout
from flexattn.emulator.memory import Descriptor
from flexattn.emulator.report import GluonError
from flexattn.emulator.shared import SharedView
from flexattn.emulator.tensor import TensorView, rows_of_threads
from flexattn.emulator.values import Scalar, Tensor

SHARED_MEMORY_BYTES = 232448
"""The limit of one block of sm_90 and of sm_100 (CUDA C++ Programming Guide, "Compute Capabilities", shared memory of a block)."""

TENSOR_MEMORY_COLUMNS = 512  # each column has 128 lanes of 32 bits (PTX ISA, "Tensor Memory Addressing").
NAMED_BARRIERS = 16  # per block (PTX ISA, "barrier").
# Barrier 0 is for the default partition, and 1 for all warps, at both ends of warp specialisation. Each worker has one after these.
RESERVED_BARRIERS = 2
_REGISTERS = 65536  # 32-bit registers of a block.
_MOST_REGISTERS, _LEAST_REGISTERS, _REGISTER_UNIT = 256, 24, 8  # PTX ISA, "setmaxnreg".
_MOST_THREADS = 1024
_FP8 = {"fp8e4nv", "fp8e5"}
_WARPGROUP = 4  # warps. Workers are padded to complete warpgroups, because setmaxnreg acts on a warpgroup.
_WARP = 32
_ALLOCATION_BYTES, _BARRIER_BYTES = 128, 8  # Triton aligns the destinations of TMA to 128 bytes.


def static(value: Any, what: str) -> Any:
    """Returns `value`. Raises GluonError if it is known only at run time."""
    if isinstance(value, Scalar | Tensor):
        raise GluonError(f"{what} is {value!r}, known only at run time; accepted: a constexpr")
    return value


def static_shape(shape: Sequence[object], what: str) -> list[int]:
    """Returns the sizes of `shape`. Raises GluonError unless all are constant powers of two."""
    sizes = [int(static(n, f"the shape of {what}")) for n in shape]
    if any(n < 1 or n & (n - 1) for n in sizes):
        raise GluonError(f"{what} of shape {sizes}; accepted: powers of two")
    return sizes


def check_warps(layout: Layout, warps: int, partition: str) -> None:
    """Raises GluonError if a layout's number of warps differs from that of its partition."""
    layout_warps = getattr(layout, "warps_per_cta", None)
    while layout_warps is None and hasattr(layout, "parent"):
        layout = layout.parent
        layout_warps = getattr(layout, "warps_per_cta", None)
    if layout_warps is not None and math.prod(layout_warps) != warps:
        raise GluonError(f"layout {layout} is for {math.prod(layout_warps)} warps, and {partition} has {warps}")


def allocated_bytes(nbytes: int, is_barrier: bool) -> int:
    unit = _BARRIER_BYTES if is_barrier else _ALLOCATION_BYTES
    return -(-nbytes // unit) * unit


def check_wgmma(a: Tensor | SharedView, b: Any, accumulator: Any, warps: int) -> None:
    """Raises GluonError unless PTX has this wgmma (PTX ISA, "wgmma.mma_async") and Gluon supports its layouts."""
    layout = accumulator.layout
    if not isinstance(layout, layouts.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        raise GluonError(f"the accumulator of wgmma has layout {layout}; accepted: NVMMADistributedLayout of version [3, 0]")
    if warps % _WARPGROUP:
        raise GluonError(f"wgmma in a partition of {warps} warps; accepted: multiples of {_WARPGROUP}")
    if not isinstance(b, SharedView):
        raise GluonError(f"operand b of wgmma is {b!r}; accepted: shared memory")
    if a.dtype.name != b.dtype.name and not {a.dtype.name, b.dtype.name} <= _FP8:
        raise GluonError(f"operands of wgmma of {a.dtype.name} and {b.dtype.name}; accepted: one dtype, or two of FP8")
    (m, k), (b_k, n), bits = a.shape, b.shape, int(b.dtype.primitive_bitwidth)
    if b_k != k or list(accumulator.shape) != [m, n]:
        raise GluonError(f"wgmma of {[m, k]} and {[b_k, n]} into {list(accumulator.shape)}")
    step = 256 // bits  # columns of k in one instruction.
    if layout.instr_shape[2] != step:
        raise GluonError(f"instr_shape {list(layout.instr_shape)} for {a.dtype.name}; its last number must be {step}")
    if k % step or m % (16 * layout.warps_per_cta[0]) or n % layout.instr_shape[1]:
        raise GluonError(
            f"wgmma of {m} x {n} x {k} is not made of instructions {list(layout.instr_shape)} on {list(layout.warps_per_cta)} warps"
        )
    for operand, name in ((a, "a"), (b, "b")):
        if not isinstance(operand, SharedView):
            continue
        if not isinstance(operand.layout, layouts.NVMMASharedLayout):
            raise GluonError(f"operand {name} of wgmma has layout {operand.layout}; accepted: NVMMASharedLayout")
        if bits != 16 and operand.layout.transposed == (name == "a"):
            raise GluonError(f"operand {name} of wgmma is {a.dtype.name} and not K-major, which only 16-bit types may be")
    if isinstance(a, Tensor):
        _check_register_operand(a.layout, layout, 32 // bits)


def _check_register_operand(operand: Layout, accumulator: object, k_width: int) -> None:
    def compared(layout: Any) -> tuple[Any, ...]:  # n may differ.
        return list(layout.version), list(layout.warps_per_cta), layout.instr_shape[0], layout.instr_shape[2]

    is_operand = isinstance(operand, layouts.DotOperandLayout) and (operand.operand_index, operand.k_width) == (0, k_width)
    if not is_operand or compared(operand.parent) != compared(accumulator):
        raise GluonError(f"operand a of wgmma has layout {operand}; accepted: DotOperandLayout(0, {accumulator}, {k_width})")


def check_mma_sync(a: Tensor, b: Tensor, accumulator: Tensor) -> None:
    """Raises GluonError unless the operands of mma.sync have one dtype, the right layouts, and matching shapes."""
    layout = accumulator.layout
    if not isinstance(layout, layouts.NVMMADistributedLayout) or list(layout.version) != [2, 0]:
        raise GluonError(f"the accumulator of mma.sync has layout {layout}; accepted: NVMMADistributedLayout of version [2, 0]")
    for operand, name, index in ((a, "a", 0), (b, "b", 1)):
        found = operand.layout
        if not isinstance(found, layouts.DotOperandLayout) or (found.operand_index, found.parent) != (index, layout):
            raise GluonError(
                f"operand {name} of mma.sync has layout {found}; accepted: DotOperandLayout({index}, {layout}, k_width)"
            )
    if (a.dtype.name != b.dtype.name and not {a.dtype.name, b.dtype.name} <= _FP8) or a.layout.k_width != b.layout.k_width:
        raise GluonError(f"operands of mma.sync are {a!r} and {b!r}, k_width {a.layout.k_width} and {b.layout.k_width}")
    (*batch, m, k), (*other, b_k, n) = a.shape, b.shape
    if batch != other or b_k != k or accumulator.shape != [*batch, m, n]:
        raise GluonError(f"mma.sync of {a.shape} and {b.shape} into {accumulator.shape}")


def check_product(a: object, b: object, accumulator: object) -> None:
    """Raises GluonError unless PTX has this tcgen05.mma of one block (PTX ISA, "tcgen05.mma") and Gluon supports its layouts."""
    if not isinstance(accumulator, TensorView) or accumulator.rank != 2 or accumulator.dtype.name != "fp32":
        raise GluonError(f"the accumulator of tcgen05_mma is {accumulator!r}; accepted: fp32 of rank 2 in tensor memory")
    if not isinstance(b, SharedView) or not isinstance(a, SharedView | TensorView):
        raise GluonError(f"operands of tcgen05_mma are {a!r} and {b!r}; accepted: shared memory, and for a tensor memory too")
    for operand, name in ((a, "a"), (b, "b")):
        if isinstance(operand, SharedView) and not isinstance(operand.layout, layouts.NVMMASharedLayout):
            raise GluonError(f"operand {name} of tcgen05_mma has layout {operand.layout}; accepted: NVMMASharedLayout")
    if a.dtype.name != b.dtype.name and not {a.dtype.name, b.dtype.name} <= _FP8:
        raise GluonError(f"operands of tcgen05_mma of {a.dtype.name} and {b.dtype.name}; accepted: one dtype, or two of FP8")
    (m, k), (b_k, n), step = a.shape, b.shape, 256 // int(b.dtype.primitive_bitwidth)
    if b_k != k or list(accumulator.shape) != [m, n]:
        raise GluonError(f"tcgen05_mma of {[m, k]} and {[b_k, n]} into {list(accumulator.shape)}")
    rows, columns = accumulator.layout.block
    if rows not in (64, 128) or m % rows or columns > 256 or columns % 16 or n % columns or k % step:
        raise GluonError(f"tcgen05_mma of {m} x {n} x {k} is not made of instructions {rows} x {columns} x {step}")


def check_tensor_access(view: TensorView, layout: Layout, warps: int, what: str) -> None:
    """Raises GluonError unless each thread of a warpgroup accesses its own lane of tensor memory."""
    if warps % _WARPGROUP:
        raise GluonError(f"{what} of tensor memory in a partition of {warps} warps; accepted: multiples of {_WARPGROUP}")
    accepted = rows_of_threads(view.dtype, tuple(view.shape), view.layout, warps)
    if layout != accepted:
        raise GluonError(f"{what} of {view!r} with the layout {layout}; accepted: a row for each thread, {accepted}")


def check_tma(descriptor: Descriptor, coord: Sequence[int], view: SharedView, what: str) -> None:
    """Raises GluonError if a shared view does not match a descriptor."""
    if list(view.shape) != list(descriptor.block_shape) or view.dtype.name != descriptor.dtype.name:
        raise GluonError(
            f"{what} between {view!r}, {view.dtype.name}{view.shape}, and a descriptor of "
            f"{descriptor.dtype.name}{list(descriptor.block_shape)}"
        )
    if view.layout != descriptor.layout:
        raise GluonError(f"{what}: {view!r} has layout {view.layout}, and the descriptor {descriptor.layout}")
    if len(coord) != len(descriptor.shape):
        raise GluonError(f"{what}: {len(coord)} coordinates for a descriptor of rank {len(descriptor.shape)}")


def split_registers(
    default_warps: int, workers: Sequence[int], requested: Sequence[int] | None
) -> tuple[tuple[int, ...], str | None]:
    """Returns the registers per thread of the default partition and the workers, and an error text or None.

    It computes them as Triton's AllocateWarpGroups does. The block starts with the same number for every thread. Workers get their
    requests, and the default partition gets the rest. Workers are in order of their number of warps, largest first. All of them
    together are padded to complete warpgroups. A warpgroup gets the largest request of its workers.
    """
    padded = -(-sum(workers) // _WARPGROUP) * _WARPGROUP
    warps = default_warps + padded
    if warps * _WARP > _MOST_THREADS:
        return (), f"{warps} warps, with workers padded to warpgroups, are more than {_MOST_THREADS} threads"
    if requested is None:
        return (), None
    for registers in requested:
        if not _LEAST_REGISTERS <= registers <= _MOST_REGISTERS:
            return (), f"a worker requests {registers} registers; accepted: {_LEAST_REGISTERS} to {_MOST_REGISTERS}"
    each = min(_REGISTERS // (warps * _WARP) // _REGISTER_UNIT * _REGISTER_UNIT, 255)
    pairs = sorted(zip(workers, requested, strict=True), reverse=True)
    by_warp = [n for worker_warps, n in pairs for _ in range(worker_warps)]
    groups = [max(by_warp[i : i + _WARPGROUP]) for i in range(0, len(by_warp), _WARPGROUP)]
    taken = sum(-(-n // _REGISTER_UNIT) * _REGISTER_UNIT * _WARPGROUP for n in groups)
    left = (each * warps - taken) // default_warps // _REGISTER_UNIT * _REGISTER_UNIT
    if left < _LEAST_REGISTERS:
        return (), (
            f"workers request {list(requested)} registers on {list(workers)} warps, of {each} a thread on {warps} warps: that "
            f"leaves {left} for the default partition, which needs at least {_LEAST_REGISTERS}"
        )
    return (min(left, _MOST_REGISTERS), *requested), None
