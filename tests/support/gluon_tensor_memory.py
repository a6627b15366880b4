"""Small Gluon kernels with tensor memory and tcgen05, with the mistake as a constexpr."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from flexattn.kernels_triton.runtime.gluon_names import reinterpreted, tensor_rows

TILE = gl.constexpr(TensorMemoryLayout((128, 64), col_stride=1))


@gluon.constexpr_function
def rows_of_threads(columns=64):
    return tensor_rows(gl.float32, (128, columns), TensorMemoryLayout((128, columns), col_stride=1), 4)


@gluon.jit
def fence(SIDE: gl.constexpr):
    if SIDE == "before":
        gl.inline_asm_elementwise(
            "tcgen05.fence::before_thread_sync; mov.b32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "tcgen05.fence::after_thread_sync; mov.b32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _shared(ptr, ROWS: gl.constexpr):
    # [ROWS, 64] of 16 bits in shared memory
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(ptr + rows[:, None] * 64 + columns[None, :])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], ptr.dtype.element_ty)
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [ROWS, 64], SHARED, x)


@gluon.jit
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _store(ptr, x):
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(ptr + rows[:, None] * 64 + columns[None, :], x)


@gluon.jit
def products(a_ptr, b_ptr, out_ptr, IN_TENSOR_MEMORY: gl.constexpr, BY_ARGUMENT: gl.constexpr):
    """Computes a @ b^T + a @ b in 16 bits. The first product starts the sum; a is in shared or tensor memory."""
    ROWS: gl.constexpr = rows_of_threads()
    a, b = _shared(a_ptr, 128), _shared(b_ptr, 64)
    fence_async_shared()
    barrier = _barrier()
    both = allocate_tensor_memory(gl.float32, [2, 128, 64], TILE)
    out = both.index(1)
    if IN_TENSOR_MEMORY:  # in the second half of a tile
        wide = reinterpreted(both, a_ptr.dtype.element_ty, [2, 128, 128], TensorMemoryLayout((128, 128), col_stride=1))
        operand = wide.index(0).slice(64, 64)
        operand.store(a.load(ROWS))
    else:
        operand = a
    tcgen05_mma(operand, b.permute([1, 0]), out, use_acc=False)
    if BY_ARGUMENT:
        tcgen05_mma(operand, b, out, mbarriers=[barrier])
    else:
        tcgen05_mma(operand, b, out)
        tcgen05_commit(barrier)
    mbarrier.wait(barrier, 0)
    fence("after")
    _store(out_ptr, out.load(ROWS))


@gluon.jit
def misuse(x_ptr, out_ptr, WHAT: gl.constexpr):
    """x @ x^T of 64 rows of x, with a mistake."""
    ROWS: gl.constexpr = rows_of_threads()
    x, b = _shared(x_ptr, 128), _shared(x_ptr, 64)
    if WHAT != "missing-fence":
        fence_async_shared()
    barrier = _barrier()
    if WHAT == "tmem-limit":
        allocate_tensor_memory(gl.float32, [8, 128, 64], TILE)
    out = allocate_tensor_memory(gl.float32, [128, 64], TILE)
    if WHAT == "uninitialised-read":
        out.load(ROWS)
    elif WHAT == "unwritten sum":
        tcgen05_mma(x, b.permute([1, 0]), out)
    elif WHAT == "layout":
        out.load(gl.BlockedLayout([1, 64], [32, 1], [4, 1], [1, 0]))
    elif WHAT == "operand":
        tcgen05_mma(out, out, out, use_acc=False)
    elif WHAT == "dtype":
        out.store(gl.zeros([128, 64], gl.bfloat16, layout=ROWS))
    elif WHAT == "shape":
        tcgen05_mma(x, b, out.slice(0, 32), use_acc=False)
    elif WHAT == "reinterpretation":
        reinterpreted(out, gl.bfloat16, [128, 64], TILE)
    elif WHAT == "index":
        out.index(0)
    elif WHAT == "slice":
        out.slice(32, 64)
    tcgen05_mma(x, b.permute([1, 0]), out, use_acc=False)
    if WHAT != "product-not-waited":
        tcgen05_commit(barrier)
        if WHAT != "race":
            mbarrier.wait(barrier, 0)
        if WHAT != "tensor-fence":
            fence("after")
        if WHAT == "overwritten operand":
            tcgen05_mma(x, b.permute([1, 0]), out, use_acc=False)
            x.store(gl.zeros([128, 64], x_ptr.dtype.element_ty, layout=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        _store(out_ptr, out.load(ROWS))


@gluon.jit
def _write(x_ptr, tile, ready, FENCED: gl.constexpr):
    LAYOUT: gl.constexpr = rows_of_threads()
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    tile.store(gl.load(x_ptr + rows[:, None] * 64 + columns[None, :]))
    if FENCED:
        fence("before")
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _read(y_ptr, tile, ready, SYNC: gl.constexpr, FENCED: gl.constexpr):
    if SYNC:
        mbarrier.wait(ready, 0)
    if FENCED:
        fence("after")
    _store(y_ptr, tile.load(rows_of_threads()))


@gluon.jit
def hand_over(x_ptr, y_ptr, SYNC: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """fp32 through tensor memory, from one partition to another."""
    tile = allocate_tensor_memory(gl.float32, [128, 64], TILE)
    ready = _barrier()
    gl.warp_specialize([(_read, (y_ptr, tile, ready, SYNC, AFTER)), (_write, (x_ptr, tile, ready, BEFORE))], [4], [64])
