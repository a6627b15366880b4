"""Small warp-specialised attention kernels in Gluon, for the tests of the emulator: the library's own share nothing with them but
the names of Gluon (`gluon_names`).

Every format is one ragged descriptor of rank 5, as triton/tools/ragged_tma.py makes them: a box ends where its sequence ends. Every
mask is a band: query i sees key j iff -left <= j - i - shift <= right.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.runtime.gluon_names import load_tile, reduce_add, store_tile

FAR = gl.constexpr(1 << 30)
COLUMNS = gl.constexpr(7)  # columns of the table of sequences


@gluon.constexpr_function
def _barrier_asm(kind, number):
    return f"bar.{kind} {number}, 256; mov.b32 $0, 0;"


@gluon.jit
def bar_sync(NUMBER: gl.constexpr):
    asm: gl.constexpr = _barrier_asm("sync", NUMBER)
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bar_arrive(NUMBER: gl.constexpr):
    asm: gl.constexpr = _barrier_asm("arrive", NUMBER)
    gl.inline_asm_elementwise(asm, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def load_rows(desc, start, length, row, head, bar, smem):
    load_tile(desc, [FAR, start + length, FAR - length + row, head, 0], bar, smem)


@gluon.jit
def sequence(table_ptr, batch):
    entry = table_ptr + batch * COLUMNS
    q_start, q_length, q_head = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    kv_start, kv_length, kv_head = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    return q_start, q_length, q_head, kv_start, kv_length, kv_head, gl.load(entry + 6)


@gluon.jit
def key_blocks(row0, kv_length, shift, left, right, BLOCK_N: gl.constexpr):
    first = gl.maximum(row0 + shift - left, 0) // BLOCK_N
    end = gl.cdiv(gl.maximum(gl.minimum(kv_length, row0 + 128 + shift + right), 0), BLOCK_N)
    return first, gl.maximum(first, end)


@gluon.jit
def fwd_producer(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    table_ptr, heads, group, row_blocks, tiles, left, right, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0 = tile % row_blocks * 128
        head = tile // row_blocks % heads
        q_start, q_length, q_head, kv_start, kv_length, kv_head, shift = sequence(table_ptr, tile // row_blocks // heads)
        if row0 < q_length:
            for wg in gl.static_range(2):
                mbarrier.wait(q_empty.index(wg), (turn & 1) ^ 1)
                mbarrier.expect(q_full.index(wg), q_desc.block_type.nbytes)
                load_rows(q_desc, q_start, q_length, row0 + wg * 64, q_head + head, q_full.index(wg), q_smem.index(wg))
            first, end = key_blocks(row0, kv_length, shift, left, right, BLOCK_N)
            for block in range(first, end):
                slot = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                load_rows(
                    k_desc, kv_start, kv_length, block * BLOCK_N, kv_head + head // group, k_full.index(slot), k_smem.index(slot)
                )
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                load_rows(
                    v_desc, kv_start, kv_length, block * BLOCK_N, kv_head + head // group, v_full.index(slot), v_smem.index(slot)
                )
                count += 1
            turn += 1


@gluon.jit
def fwd_consumer(
    out_desc, q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    lse_ptr, table_ptr, qk_scale, heads, row_blocks, tiles, max_q, left, right,
    WG: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    count = 0
    turn = 0
    if WG == 1:
        bar_arrive(9)  # the first turn is warpgroup 0's
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row0 = tile % row_blocks * 128
        head = tile // row_blocks % heads
        batch = tile // row_blocks // heads
        q_start, q_length, q_head, _kv_start, kv_length, _kv_head, shift = sequence(table_ptr, batch)
        if row0 < q_length:
            first, end = key_blocks(row0, kv_length, shift, left, right, BLOCK_N)
            rows = row0 + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
            l = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, s_layout))  # noqa: E741
            zero = gl.zeros([64, BLOCK_N], gl.float32, layout=s_layout)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, layout=o_layout)
            q = q_smem.index(WG).reshape([64, HEAD_DIM])
            mbarrier.wait(q_full.index(WG), turn & 1)
            for block in range(first, end):
                slot = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_full.index(slot), phase)
                bar_sync(9 + WG)
                k = k_smem.index(slot).reshape([BLOCK_N, HEAD_DIM])
                s_async = warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)
                bar_arrive(10 - WG)
                s = warpgroup_mma_wait(0, deps=[s_async])
                mbarrier.arrive(k_empty.index(slot), count=1)
                columns = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
                last = gl.minimum(rows + shift + right, kv_length - 1)
                seen = (columns[None, :] <= last[:, None]) & (columns[None, :] >= (rows + shift - left)[:, None])
                s = gl.where(seen, s * qk_scale, float("-inf"))
                m_new = gl.maximum(m, gl.max(s, 1))
                m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                p = gl.exp2(s - m_safe[:, None])
                alpha = gl.exp2(m - m_safe)
                l = l * alpha + gl.sum(p, 1)  # noqa: E741
                m = m_new
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
                p_operand = gl.convert_layout(p.to(k_smem.dtype), p_layout)
                mbarrier.wait(v_full.index(slot), phase)
                o_async = warpgroup_mma(p_operand, v_smem.index(slot).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
                acc, p_operand = warpgroup_mma_wait(0, deps=[o_async, p_operand])
                mbarrier.arrive(v_empty.index(slot), count=1)
                count += 1
            mbarrier.arrive(q_empty.index(WG), count=1)
            gl.store(lse_ptr + (batch * heads + head) * max_q + rows, m * 0.6931471805599453 + gl.log(l), mask=rows < q_length)
            scale = gl.where(l == 0.0, 0.0, 1.0 / l)
            acc = acc * gl.convert_layout(scale, gl.SliceLayout(1, o_layout))[:, None]
            tma.store_wait(0)
            out_smem.index(WG).reshape([64, HEAD_DIM]).store(acc.to(k_smem.dtype))
            fence_async_shared()
            store_tile(out_desc, [FAR, q_start + q_length, FAR - q_length + row0 + WG * 64, q_head + head, 0], out_smem.index(WG))
            turn += 1
    tma.store_wait(0)
    if WG == 0:
        bar_sync(9)  # takes up the last arrival


@gluon.jit
def attention_fwd(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, table_ptr, qk_scale, heads, group, row_blocks, tiles, max_q, left, right,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = barriers(2, 1)
    q_empty = barriers(2, 1)
    k_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_full = barriers(STAGES, 1)
    v_empty = barriers(STAGES, 2)
    gl.warp_specialize([
        (fwd_consumer, (
            out_desc, q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            lse_ptr, table_ptr, qk_scale, heads, row_blocks, tiles, max_q, left, right, 0, BLOCK_N, HEAD_DIM, STAGES,
        )),
        (fwd_consumer, (
            out_desc, q_smem, k_smem, v_smem, out_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            lse_ptr, table_ptr, qk_scale, heads, row_blocks, tiles, max_q, left, right, 1, BLOCK_N, HEAD_DIM, STAGES,
        )),
        (fwd_producer, (
            q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            table_ptr, heads, group, row_blocks, tiles, left, right, BLOCK_N, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def bwd_producer(
    q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem, q_full, q_empty, dout_full, dout_empty, kv_full,
    table_ptr, batch, kv_head, heads, group, key0, first, end, STAGES: gl.constexpr,
):  # fmt: skip
    q_start, q_length, q_head, kv_start, kv_length, kv_head0, _shift = sequence(table_ptr, batch)
    mbarrier.expect(kv_full, k_desc.block_type.nbytes * 2 + v_desc.block_type.nbytes * 2)
    for wg in gl.static_range(2):
        load_rows(k_desc, kv_start, kv_length, key0 + wg * 64, kv_head0 + kv_head, kv_full, k_smem.index(wg))
        load_rows(v_desc, kv_start, kv_length, key0 + wg * 64, kv_head0 + kv_head, kv_full, v_smem.index(wg))
    count = 0
    for member in range(group):
        head = q_head + kv_head * group + member
        for block in range(first, end):
            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(q_empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            load_rows(q_desc, q_start, q_length, block * 64, head, q_full.index(slot), q_smem.index(slot))
            mbarrier.wait(dout_empty.index(slot), phase ^ 1)
            mbarrier.expect(dout_full.index(slot), dout_desc.block_type.nbytes)
            load_rows(dout_desc, q_start, q_length, block * 64, head, dout_full.index(slot), dout_smem.index(slot))
            count += 1


@gluon.jit
def bwd_consumer(
    dq_desc, dk_desc, dv_desc, q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem,
    q_full, q_empty, dout_full, dout_empty, kv_full, lse_ptr, delta_ptr, table_ptr, qk_scale, scale,
    batch, kv_head, heads, group, max_q, key0, first, end, left, right,
    WG: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM // 2, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_start, q_length, q_head, kv_start, kv_length, kv_head0, shift = sequence(table_ptr, batch)
    zero = gl.zeros([64, 64], gl.float32, layout=s_layout)
    dq_zero = gl.zeros([64, HEAD_DIM // 2], gl.float32, layout=dq_layout)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, layout=o_layout)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, layout=o_layout)
    keys = key0 + WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    k = k_smem.index(WG).reshape([64, HEAD_DIM])
    v = v_smem.index(WG).reshape([64, HEAD_DIM])
    mbarrier.wait(kv_full, 0)
    count = 0
    for member in range(group):
        head = kv_head * group + member
        for block in range(first, end):
            slot = count % STAGES
            phase = (count // STAGES) & 1
            q = q_smem.index(slot).reshape([64, HEAD_DIM])
            dout = dout_smem.index(slot).reshape([64, HEAD_DIM])
            rows = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
            statistics = (batch * heads + head) * max_q + rows
            mbarrier.wait(q_full.index(slot), phase)
            s_async = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
            lse = gl.load(lse_ptr + statistics, mask=rows < q_length, other=0.0)
            delta = gl.load(delta_ptr + statistics, mask=rows < q_length, other=0.0)
            mbarrier.wait(dout_full.index(slot), phase)
            dp_async = warpgroup_mma(v, dout.permute([1, 0]), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_async])
            last = gl.minimum(rows + shift + right, kv_length - 1)
            seen = (keys[:, None] <= last[None, :]) & (keys[:, None] >= (rows + shift - left)[None, :])
            p = gl.where(seen & (rows < q_length)[None, :], gl.exp2(s * qk_scale - (lse * 1.4426950408889634)[None, :]), 0.0)
            p_operand = gl.convert_layout(p.to(dtype), p_layout)
            dp = warpgroup_mma_wait(0, deps=[dp_async])
            dv_async = warpgroup_mma(p_operand, dout, dv, is_async=True)
            ds = (p * (dp - delta[None, :])).to(dtype)
            ds_smem.index(WG).store(ds)
            fence_async_shared()
            ds_operand = gl.convert_layout(ds, p_layout)
            dv, p_operand = warpgroup_mma_wait(0, deps=[dv_async, p_operand])
            mbarrier.arrive(dout_empty.index(slot), count=1)
            dk_async = warpgroup_mma(ds_operand, q, dk, is_async=True)
            bar_sync(9)  # both halves of dS are there
            half: gl.constexpr = HEAD_DIM // 2
            k_half0 = k_smem.index(0).reshape([64, HEAD_DIM]).slice(WG * half, half, 1)
            k_half1 = k_smem.index(1).reshape([64, HEAD_DIM]).slice(WG * half, half, 1)
            dq_async = warpgroup_mma(ds_smem.index(0).permute([1, 0]), k_half0, dq_zero, use_acc=False, is_async=True)
            dq_async = warpgroup_mma(ds_smem.index(1).permute([1, 0]), k_half1, dq_async, is_async=True)
            dk, ds_operand = warpgroup_mma_wait(2, deps=[dk_async, ds_operand])
            mbarrier.arrive(q_empty.index(slot), count=1)
            dq = warpgroup_mma_wait(0, deps=[dq_async])
            bar_sync(10)  # both have read dS
            tma.store_wait(0)
            dq_smem.index(WG).reshape([64, HEAD_DIM // 2]).store(dq * scale)
            fence_async_shared()
            place = [FAR, q_start + q_length, FAR - q_length + block * 64, q_head + head, WG * half]
            reduce_add(dq_desc, place, dq_smem.index(WG))
            count += 1
    bar_sync(9)  # both have read K
    k.store((dk * scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    place = [FAR, kv_start + kv_length, FAR - kv_length + key0 + WG * 64, kv_head0 + kv_head, 0]
    store_tile(dk_desc, place, k_smem.index(WG))
    store_tile(dv_desc, place, v_smem.index(WG))
    tma.store_wait(0)


@gluon.jit
def attention_bwd(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, table_ptr, qk_scale, scale,
    heads, group, max_q, left, right, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES] + dout_desc.block_type.shape, dout_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [2] + k_desc.block_type.shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2] + v_desc.block_type.shape, v_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    dq_smem = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    q_full = barriers(STAGES, 1)
    q_empty = barriers(STAGES, 2)
    dout_full = barriers(STAGES, 1)
    dout_empty = barriers(STAGES, 2)
    kv_full = barriers(1, 1).index(0)
    key0 = gl.program_id(0) * 128
    kv_head = gl.program_id(1)
    batch = gl.program_id(2)
    _q_start, q_length, _q_head, _kv_start, _kv_length, _kv_head, shift = sequence(table_ptr, batch)
    first = gl.maximum(key0 - shift - right, 0) // 64
    end = gl.maximum(gl.cdiv(gl.maximum(gl.minimum(q_length, key0 + 128 - shift + left), 0), 64), first)
    gl.warp_specialize([
        (bwd_producer, (
            q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem, q_full, q_empty, dout_full, dout_empty, kv_full,
            table_ptr, batch, kv_head, heads, group, key0, first, end, STAGES,
        )),
        (bwd_consumer, (
            dq_desc, dk_desc, dv_desc, q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem,
            q_full, q_empty, dout_full, dout_empty, kv_full, lse_ptr, delta_ptr, table_ptr, qk_scale, scale,
            batch, kv_head, heads, group, max_q, key0, first, end, left, right, 0, HEAD_DIM, STAGES,
        )),
        (bwd_consumer, (
            dq_desc, dk_desc, dv_desc, q_smem, dout_smem, k_smem, v_smem, ds_smem, dq_smem,
            q_full, q_empty, dout_full, dout_empty, kv_full, lse_ptr, delta_ptr, table_ptr, qk_scale, scale,
            batch, kv_head, heads, group, max_q, key0, first, end, left, right, 1, HEAD_DIM, STAGES,
        )),
    ], [4, 4], [240, 240])  # fmt: skip
