"""Small Gluon kernels, each for one rule of the language or one finding of the emulator, with the mistake as a constexpr."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.runtime.gluon_names import load_elements, load_tile, store_tile

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def round_trip(x_ptr, y_ptr, DTYPE: gl.constexpr):
    """fp32 -> DTYPE -> fp32, through shared memory."""
    offsets = gl.arange(0, 1024, layout=LINE)
    smem = gl.allocate_shared_memory(DTYPE, [1024], FLAT)
    smem.store(gl.load(x_ptr + offsets).to(DTYPE))
    gl.store(y_ptr + offsets, smem.load(LINE).to(gl.float32))


@gluon.jit
def integers(out_ptr, a, b):
    gl.store(out_ptr + 0, a // b)
    gl.store(out_ptr + 1, a % b)
    gl.store(out_ptr + 2, gl.cdiv(a, b))
    gl.store(out_ptr + 3, gl.minimum(a, b))
    gl.store(out_ptr + 4, a >> 1)
    offsets = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + 5 + offsets, (offsets + a) // b, mask=offsets < 1)


@gluon.jit
def product(out_ptr, a, b):
    gl.store(out_ptr, a * b)


@gluon.jit
def softmax(x_ptr, y_ptr, N: gl.constexpr):
    offsets = gl.arange(0, N, layout=LINE)
    x = gl.load(x_ptr + offsets)
    p = gl.exp2(x - gl.max(x, 0))
    gl.store(y_ptr + offsets, p / gl.sum(p, 0))


@gluon.jit
def multiply_add(a, b):
    return a + 2 * b


class Meta(NamedTuple):
    FUNCTION: Any
    LIMIT: int


@triton.jit
def clamped(x, limit):
    return tl.minimum(tl.maximum(x, 0), limit)


@gluon.jit
def configured(out_ptr, x, META: gl.constexpr):
    gl.store(out_ptr, META.FUNCTION(clamped(x, META.LIMIT), 1))


@triton.jit
def sum_below(end):
    total = 0
    for i in tl.range(0, end):
        total += i
    return total


@gluon.jit
def loops(out_ptr, end, TIMES: gl.constexpr):
    count = 0
    for _ in gl.static_range(TIMES):
        count += 1
    gl.store(out_ptr, count + sum_below(end))


@gluon.jit
def applied(out_ptr, FUNCTION: gl.constexpr):
    gl.store(out_ptr, FUNCTION(3, 4))


@gluon.jit
def packed(x_ptr, y_ptr):
    """Pairs of fp32 as bf16 in one int32, and back."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 2, layout=gl.SliceLayout(0, layout))
    low, high = gl.split(gl.load(x_ptr + rows[:, None] * 2 + columns[None, :]))
    both = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    halves = gl.join(both.to(gl.int16), (both >> 16).to(gl.int16))
    values = gl.convert_layout(halves.to(gl.bfloat16, bitcast=True), layout)
    gl.store(y_ptr + rows[:, None] * 2 + columns[None, :], values.to(gl.float32))


@gluon.jit
def bits_of_a_number(x_ptr, bits_ptr, y_ptr):
    bits = gl.load(x_ptr).to(gl.int32, bitcast=True)
    gl.store(bits_ptr, bits)
    gl.store(y_ptr, bits.to(gl.float32, bitcast=True))


@gluon.jit
def doubled(x_ptr, y_ptr):
    offsets = gl.arange(0, 128, layout=LINE)
    x = gl.load(x_ptr + offsets)
    y = gl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    gl.store(y_ptr + offsets, y)


@gluon.jit
def matmul(a_desc, b_desc, out_ptr, K_MAJOR: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """out[M, N] = a @ b of one tile; b is stored [N, K] if K_MAJOR, else [K, N]."""
    k_step: gl.constexpr = 256 // a_desc.dtype.primitive_bitwidth
    M: gl.constexpr = a_desc.block_type.shape[0]
    N: gl.constexpr = b_desc.block_type.shape[0] if K_MAJOR else b_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, k_step])
    a = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, b_desc.block_type.shape, b_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    load_tile(a_desc, [0, 0], bar, a)
    load_tile(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    acc = gl.zeros([M, N], gl.float32, layout=layout)
    right = b.permute([1, 0]) if K_MAJOR else b
    if IN_REGISTERS:
        acc = warpgroup_mma(a.load(gl.DotOperandLayout(0, layout, k_step // 8)), right, acc)
    else:
        acc = warpgroup_mma(a, right, acc)
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    gl.store(out_ptr + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def copy_rows(x_ptr, y_ptr, n, COLUMNS: gl.constexpr, NAN: gl.constexpr):
    """Copies 8 rows per program, the first n columns of each, through descriptors created in the kernel."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, COLUMNS], gl.float32)
    start = gl.program_id(0) * 8 * COLUMNS
    x_desc = tma.make_tensor_descriptor(x_ptr + start, [8, n], [COLUMNS, 1], [8, COLUMNS], layout, "nan" if NAN else "zero")
    y_desc = tma.make_tensor_descriptor(y_ptr + start, [8, COLUMNS], [COLUMNS, 1], [8, COLUMNS], layout)
    smem = gl.allocate_shared_memory(gl.float32, [8, COLUMNS], layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    load_tile(x_desc, [0, 0], bar, smem)
    mbarrier.wait(bar, 0)
    store_tile(y_desc, [0, 0], smem)
    tma.store_wait(0)


@gluon.jit
def counted(out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 32, layout=layout)
    gl.atomic_add(out_ptr + offsets // 4, offsets * 0 + 1)


@gluon.jit
def counted_beside(out_ptr, counter_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offsets = gl.arange(0, 32, layout=layout)
    gl.store(out_ptr + 32 + offsets, offsets.to(gl.float32))
    gl.atomic_add(counter_ptr, 3)


@gluon.jit
def _write(smem, bar, x_ptr, SYNC: gl.constexpr):
    smem.store(gl.load(x_ptr + gl.arange(0, 128, layout=LINE)))
    if SYNC:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _read(smem, bar, y_ptr, SYNC: gl.constexpr):
    if SYNC:
        mbarrier.wait(bar, 0)
    gl.store(y_ptr + gl.arange(0, 128, layout=LINE), smem.load(LINE))


@gluon.jit
def hand_over(x_ptr, y_ptr, SYNC: gl.constexpr, INIT: gl.constexpr, REGISTERS: gl.constexpr):
    """One partition stores to shared memory, another loads; INIT: how often the mbarrier between them is initialised."""
    smem = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for _ in gl.static_range(INIT):
        mbarrier.init(bar, count=1)
    gl.warp_specialize([(_write, (smem, bar, x_ptr, SYNC)), (_read, (smem, bar, y_ptr, SYNC))], [4], [REGISTERS])


@gluon.jit
def _count(counter_ptr, x_ptr, TIMES: gl.constexpr):
    gl.store(x_ptr, 7)
    for _ in range(TIMES):
        gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def _wait_for_count(counter_ptr, x_ptr, y_ptr):
    found = gl.atomic_add(counter_ptr, 0, sem="acquire")
    while found < 3:
        found = gl.atomic_add(counter_ptr, 0, sem="acquire")
    gl.store(y_ptr, gl.load(x_ptr))


@gluon.jit
def counted_by_another(counter_ptr, x_ptr, y_ptr, TIMES: gl.constexpr):
    """One partition counts in global memory, another waits until it has counted to 3."""
    gl.warp_specialize([(_wait_for_count, (counter_ptr, x_ptr, y_ptr)), (_count, (counter_ptr, x_ptr, TIMES))], [4], [64])


@gluon.jit
def mbarrier_misuse(out_ptr, WHAT: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=2)
    if WHAT == "arrive-overflow":
        mbarrier.arrive(bar, count=3)
    elif WHAT == "phase":
        mbarrier.wait(bar, 3)
    elif WHAT == "deadlock":
        mbarrier.arrive(bar, count=1)
        mbarrier.wait(bar, 0)
    elif WHAT == "phase-alias":
        for _ in range(3):
            mbarrier.arrive(bar, count=2)
        mbarrier.wait(bar, 0)
        mbarrier.wait(bar, 1)
    elif WHAT == "phase-repeat":
        mbarrier.arrive(bar, count=2)
        mbarrier.wait(bar, 0)
        mbarrier.wait(bar, 0)


@gluon.jit
def tma_misuse(x_desc, y_desc, WHAT: gl.constexpr):
    """Load, add one, store, with one thing wrong."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    nbytes: gl.constexpr = x_desc.block_type.nbytes
    mbarrier.expect(bar, nbytes // 2 if WHAT == "expect-bytes" else nbytes)
    load_tile(x_desc, [1000 if WHAT == "tma-out-of-bounds" else 0, 0], bar, smem)
    if WHAT != "load not waited for":
        mbarrier.wait(bar, 0)
    smem.store(smem.load(layout) + 1.0)
    if WHAT != "missing-fence":
        fence_async_shared()
    store_tile(y_desc, [0, 0], smem)
    if WHAT == "source overwritten":
        smem.store(smem.load(layout))
    if WHAT != "store-not-waited":
        tma.store_wait(0)


@gluon.jit
def wgmma_misuse(x_ptr, out_ptr, WHAT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    x = gl.load(x_ptr + rows[:, None] * 64 + columns[None, :])
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    a.store(x)
    fence_async_shared()
    zero = gl.zeros([64, 64], gl.float32, layout=layout)
    if WHAT == "slice-in-swizzle":
        half = a.slice(0, 32, 1)
        half.store(half.load(layout))
        fence_async_shared()
    if WHAT == "wgmma-register-operand":
        operand = gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2))
        first = warpgroup_mma(operand, a, zero, is_async=True)
    else:
        first = warpgroup_mma(a, a, zero, is_async=True)
    if WHAT == "illegal-program":
        result = first * 2.0
    elif WHAT == "wgmma-wait":
        result = warpgroup_mma_wait(1, deps=[first])
    else:
        result = warpgroup_mma_wait(0, deps=[first])
    if WHAT == "wgmma-not-waited":
        warpgroup_mma(a, a, zero, is_async=True)
    gl.store(out_ptr + rows[:, None] * 64 + columns[None, :], result)


@gluon.jit
def named_barrier(out_ptr, ASM: gl.constexpr, PURE: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r,r", [0], dtype=gl.int32, is_pure=PURE, pack=1)


@gluon.jit
def language_misuse(out_ptr, WHAT: gl.constexpr):
    offsets = gl.arange(0, 128, layout=LINE)
    if WHAT == "layouts":
        gl.store(out_ptr + offsets, offsets + gl.arange(0, 128, layout=gl.BlockedLayout([2], [32], [4], [0])))
    elif WHAT == "warps":
        gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [8], [0]))
    elif WHAT == "power of two":
        gl.arange(0, 96, layout=LINE)
    elif WHAT == "slice":
        parent: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        gl.arange(0, 128, layout=gl.SliceLayout(0, parent))[:, None]
    elif WHAT == "condition":
        if offsets > 3:
            gl.store(out_ptr, 1)
    elif WHAT == "constexpr":
        gl.full([gl.program_id(0) + 1], 0.0, gl.float32, layout=LINE)
    elif WHAT == "Python":
        gl.store(out_ptr + offsets, offsets + undefined)  # noqa: F821


@gluon.jit
def memory_misuse(out_ptr, WHAT: gl.constexpr):
    offsets = gl.arange(0, 128, layout=LINE)
    if WHAT == "out-of-bounds":
        gl.store(out_ptr + offsets + 1, offsets)
    elif WHAT == "global-write-race":
        gl.store(out_ptr + offsets, offsets)
    elif WHAT == "uninitialised-read":
        smem = gl.allocate_shared_memory(gl.int32, [2, 128], FLAT)
        smem.index(0).store(offsets)
        gl.store(out_ptr + offsets, smem.index(1).load(LINE))
    elif WHAT == "shared-index":
        smem = gl.allocate_shared_memory(gl.int32, [2, 128], FLAT)
        smem.index(2).store(offsets)
    elif WHAT == "smem-limit":
        gl.allocate_shared_memory(gl.int32, [64, 1024], FLAT)
    elif WHAT == "assertion":
        gl.static_assert(gl.num_warps() == 8, "eight warps")
    elif WHAT == "not-modelled":
        gl.histogram(offsets, 16)
    elif WHAT == "barrier-uninitialised":
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.arrive(bar, count=1)


@gluon.jit
def endless(out_ptr, STEPS: gl.constexpr):
    while gl.load(out_ptr) == 0:
        if STEPS:
            fence_async_shared()


@gluon.jit
def unpacks(out_ptr):
    sizes = (1, 2)
    gl.store(out_ptr, (*sizes, 3)[2])


@gluon.jit
def breaks(out_ptr):
    while True:
        break


@gluon.jit
def scaled_sums(x_ptr, factors_ptr, y_ptr):
    # [64, 4] of [64, 16]: sums over what a reshape made dimensions of, times a factor of the row, whose layout is a slice of theirs
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(x_ptr + rows[:, None] * 16 + columns[None, :])
    sums = gl.sum(gl.sum(gl.reshape(x, [64, 2, 4, 2]), 3), 1)
    factors = gl.convert_layout(gl.load(factors_ptr + rows), gl.SliceLayout(1, sums.type.layout))
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    groups = gl.arange(0, 4, layout=gl.SliceLayout(0, OUT))
    gl.store(y_ptr + rows[:, None] * 4 + groups[None, :], gl.convert_layout(sums * factors[:, None], OUT))


@gluon.jit
def mma_sync(a_ptr, b_ptr, out_ptr, WHAT: gl.constexpr):
    # Products of a batch of [16, 32] and [32, 8], one for each warp
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 4, 8], [4, 1, 1], [2, 1, 0])
    IN_ROW: gl.constexpr = gl.SliceLayout(2, LOADED)
    warp = gl.arange(0, 4, layout=gl.SliceLayout(1, IN_ROW))[:, None, None]
    long = gl.arange(0, 32, layout=gl.SliceLayout(0, IN_ROW))[None, :, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, IN_ROW))[None, :, None]
    inner = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, None, :]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, None, :]
    a = gl.load(a_ptr + (warp * 16 + row) * 32 + inner)
    b = gl.load(b_ptr + (warp * 32 + long) * 8 + column)
    if WHAT == "dtypes":
        b = b.to(gl.bfloat16)
    a = gl.convert_layout(a, gl.DotOperandLayout(1 if WHAT == "operand" else 0, LAYOUT, 4 if WHAT == "width" else 2))
    b = gl.convert_layout(b, gl.DotOperandLayout(1, LAYOUT, 2))
    OTHER: gl.constexpr = LOADED if WHAT == "accumulator" else LAYOUT
    out = mma_v2(a, b, gl.full([4, 8 if WHAT == "shape" else 16, 8], 1.0, gl.float32, layout=OTHER))
    gl.store(out_ptr + (warp * 16 + row) * 8 + column, gl.convert_layout(out, LOADED))


@gluon.jit
def fp8_products(a_ptr, b_ptr, rows_out_ptr, columns_out_ptr):
    # For a in E4M3 [64, 64], and b in E5M2 [32, 64] that lies in shared memory as words of two numbers: a times the transpose of b,
    # column by column of each half, and the first half of a's columns times b, whose even columns come first
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LOADED))[:, None]
    keys = gl.arange(0, 32, layout=gl.SliceLayout(1, LOADED))[:, None]
    columns = gl.arange(0, 32, layout=gl.SliceLayout(0, LOADED))[None, :]
    words = gl.allocate_shared_memory(gl.int16, [32, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    words.store(gl.load(b_ptr + keys * 32 + columns))
    b = words._reinterpret(gl.float8e5, [32, 64], gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
    out = gl.zeros([64, 32], gl.float32, layout=LAYOUT)
    for half in gl.static_range(2):
        a = gl.convert_layout(gl.load(a_ptr + rows * 64 + half * 32 + columns), gl.DotOperandLayout(0, LAYOUT, 4))
        out = mma_v2(a, b.slice(half * 32, 32, 1).permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 4)), out)
    gl.store(rows_out_ptr + rows * 32 + columns, gl.convert_layout(out, LOADED))
    bytes_of_words: gl.constexpr = "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;"
    pairs = words.load(gl.DotOperandLayout(1, LAYOUT, 2))
    even, odd = gl.inline_asm_elementwise(bytes_of_words, "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    both = gl.reshape(gl.permute(gl.join(even, odd), [0, 2, 1]), [32, 64])
    both = gl.convert_layout(both, gl.DotOperandLayout(1, LAYOUT, 4)).to(gl.float8e5, bitcast=True)
    a = gl.convert_layout(gl.load(a_ptr + rows * 64 + columns), gl.DotOperandLayout(0, LAYOUT, 4))
    out = mma_v2(a, both, gl.zeros([64, 64], gl.float32, layout=LAYOUT))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))[:, None]
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE))[None, :]
    gl.store(columns_out_ptr + rows * 64 + columns, gl.convert_layout(out, WIDE))


@gluon.jit
def pairs_of_fp8(x_ptr, y_ptr, KIND: gl.constexpr):
    # Four numbers of FP8 in each of 128 words, in fp16
    cvt: gl.constexpr = "cvt.rn.f16x2.e5m2x2" if KIND == "e5m2" else "cvt.rn.f16x2.e4m3x2"
    assembly: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; " + cvt + " $0, a; " + cvt + " $1, b; }"
    offsets = gl.arange(0, 128, layout=LINE)
    words = gl.load(x_ptr + offsets)
    low, high = gl.inline_asm_elementwise(assembly, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    gl.store(y_ptr + offsets * 2, low)
    gl.store(y_ptr + offsets * 2 + 1, high)


@gluon.jit
def doubled_by_copies(x_ptr, y_ptr, blocks, WHAT: gl.constexpr):
    # y = 2 x for blocks of 16 rows of 64, which come through a ring of two stages, with one thing wrong
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    place = rows[:, None] * 64 + columns[None, :]
    ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [2, 16, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    load_elements(ring.index(0), x_ptr + place)
    async_copy.commit_group()
    for n in range(blocks):
        following = n % 2 if WHAT == "overwritten" else 1 - n % 2
        if n + 1 < blocks:
            is_there = place < (512 if WHAT == "masked" else 1024)
            load_elements(ring.index(following), x_ptr + (n + 1) * 1024 + place, mask=is_there)
        if WHAT != "not committed":
            async_copy.commit_group()
        if WHAT == "not waited for":
            async_copy.wait_group(2)
        else:
            async_copy.wait_group(1)
        gl.store(y_ptr + n * 1024 + place, ring.index(n % 2).load(LAYOUT) * 2)
    if WHAT == "copy-not-waited":
        load_elements(ring.index(0), x_ptr + place)
    if WHAT == "copy-not-waited":
        async_copy.commit_group()


@gluon.jit
def facts(out_ptr, first, equal):
    """Tells the compiler that offsets begin at multiples of 8, and that 8 numbers are equal."""
    offsets = tl.multiple_of(first + gl.arange(0, 32, layout=LINE), 8)
    gl.store(out_ptr + offsets, tl.max_constancy(offsets // equal, 8))
