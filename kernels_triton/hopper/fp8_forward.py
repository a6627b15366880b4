"""FP8 forward attention on Hopper (sm_90) in Gluon: `forward` with fp8 operands, and all products by QGMMA.

q, k and v are FP8 with scales per tensor, head, batch or block of rows. v is transposed (`fp8`), and p is converted to fp8 in the
order of v's tokens, so nothing is transposed or shuffled here. The tensor cores accumulate fp8 products in about 14 bits. So the
product of each key block with v has its own accumulator, and the multiply-add that rescales the sums adds it in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.exponents import LOG2E, exponent_factor, positive_factor, scaled_row_max
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import HopperTile, split_head_dim
from flexattn.kernels_triton.gluon import pipeline
from flexattn.kernels_triton.gluon.block_ranges import blocks_of_consumer, key_block
from flexattn.kernels_triton.gluon.conditions import unsupported_block_mask, unsupported_values
from flexattn.kernels_triton.gluon.descales import Descales, Scale, scale_error, scales_of
from flexattn.kernels_triton.gluon.descriptors import FP8_DTYPES, descriptor_error, ragged_descriptor, step_of, store_rows
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Buffers, Cut, Descriptors, Results, Steps, Tiles
from flexattn.kernels_triton.gluon.forward_launch import SplitKeys, forward_arguments, forward_meta
from flexattn.kernels_triton.gluon.forward_loader import load_partition
from flexattn.kernels_triton.gluon.forward_rows import rows_and_heads, sink_of_rows, statistics_row, store_lse
from flexattn.kernels_triton.gluon.forward_work import Span, received_tile, unmasked_blocks
from flexattn.kernels_triton.gluon.fp8_operands import P_SCALE, P_SHIFT, load_descale
from flexattn.kernels_triton.gluon.masking import SequenceBand, apply_mask_mod, mask_keys
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles, keep_pairs
from flexattn.kernels_triton.gluon.pairs import allocate_pair, pair_descriptor
from flexattn.kernels_triton.gluon.pipeline import Stage, allocate_forward_barriers, skip_blocks
from flexattn.kernels_triton.gluon.softmax import exponentials
from flexattn.kernels_triton.gluon.tile_scheduler import is_tile, receive_tile
from flexattn.kernels_triton.gluon.work_order import forward_work
from flexattn.kernels_triton.hopper.fp8 import compute_here, pack_quads, transposed_descriptor, unpack_quads
from flexattn.kernels_triton.hopper.products import score_product
from flexattn.kernels_triton.runtime.compiler import FROM_3_9
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

_COLUMNS = gl.constexpr(8)  # columns of the product that sums p: wgmma's minimum N, all equal
_ONE = gl.constexpr(0x38)  # 1 in E4M3
_COPIES = gl.constexpr(FROM_3_9)  # whether each product gets a copy of its operand in registers (Triton pull request 9514)


@dataclass(frozen=True, kw_only=True)
class Fp8Tile(HopperTile):
    """A tile of the FP8 forward on sm_90."""

    parts: int  # parts in which v is summed, because registers are scarce
    pingpong: bool = False


FP8_FORWARD = (
    Fp8Tile(head_dim_qk=64, head_dim_v=64, block_m=192, block_n=128, num_stages=3, q_stages=2, registers=160, parts=1),
    Fp8Tile(head_dim_qk=128, head_dim_v=128, block_m=192, block_n=128, num_stages=3, q_stages=2, registers=160, parts=1),
    Fp8Tile(head_dim_qk=192, head_dim_v=128, block_m=192, block_n=128, num_stages=2, q_stages=2, registers=160, parts=2),
    Fp8Tile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=128, num_stages=2, q_stages=1, registers=240, parts=2),
)


def select_fp8_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> Fp8Tile:
    """Returns the narrowest row for the head dims, at most 256; modified scores need registers."""
    tile = next(tile for tile in FP8_FORWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return replace(tile, block_m=128, registers=240) if is_modified else tile


class Invariants(NamedTuple):
    """Values that are constant for all key blocks that a consumer's queries see."""

    num_blocks: int | gl.tensor
    block_range: int | gl.tensor  # argument of `key_block`
    rows: gl.tensor
    band: SequenceBand
    head: Head
    scale: gl.tensor
    h_kv: gl.tensor
    descales: Descales
    descale_q: gl.tensor
    descale: gl.tensor  # descale of a score, if k has one scale
    q_slot: int
    zeros: gl.tensor
    no_sum: gl.tensor  # zeros in the layout of a part of out
    no_row_sum: gl.tensor


class Carry(NamedTuple):
    """Sums that the loop over key blocks carries."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc: gl.tensor
    acc1: gl.tensor
    descale_v: gl.tensor
    n_block: int  # counts the blocks that this consumer has processed


class Logits(NamedTuple):
    s: gl.tensor  # s * factor[:, None] is the logit in units of log2, before the mask
    factor: gl.tensor


@gluon.jit
def _logits(qk, columns, descale, same: Invariants, MODS: gl.constexpr, META: gl.constexpr):
    if META.IS_MODIFIED:
        s, factor, _slope, _score = logits(
            qk * descale[:, None], same.rows[:, None], columns[None, :], same.scale, same.head, MODS, META
        )
        return Logits(s=s, factor=gl.zeros_like(descale) + factor)
    else:
        return Logits(s=qk, factor=positive_factor(descale * (same.scale * LOG2E)))


@gluon.jit
def _once(sums):
    # Returns one column in each thread, of `_COLUMNS` equal ones
    one, _ = gl.split(gl.reshape(sums, [ROWS, _COLUMNS // 2, 2]))
    return one


@gluon.jit
def _multiply_ones(p, tiles: Tiles, same: Invariants):
    # The tensor cores also sum p, by a product with ones, which saves 64 additions a thread. It sums the same rounded p as the
    # product with v.
    p_again = gl.convert_layout(p, gl.DotOperandLayout(0, same.no_row_sum.type.layout, 4))
    return warpgroup_mma(p_again, tiles.ones.permute([1, 0]), same.no_row_sum, use_acc=False, is_async=True)


@gluon.jit
def _attend(
    begin, end, carry: Carry, same: Invariants, buffers: Buffers, IS_CUT: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    # Processes the key blocks from `begin` up to `end`; IS_CUT: an edge or a block mask may hide some of the keys.
    tiles, barriers = buffers.tiles, buffers.barriers
    descale = same.descale
    row_max, row_sum, acc, acc1 = carry.row_max, carry.row_sum, carry.acc, carry.acc1
    descale_v, n_block = carry.descale_v, carry.n_block
    DTYPE: gl.constexpr = gl.float8e4nv  # dtype of p
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    OUT: gl.constexpr = same.no_sum.type.layout
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    # Whether the products with p run one after the other: with all sums of v, there are no registers for two copies of p.
    ONE_BY_ONE: gl.constexpr = _COPIES and META.PARTS == 1 and V0 > 64
    block_columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, same.zeros.type.layout))
    for iteration in range(begin, end):
        stage = Stage(n_block, META.STAGES)
        index = pipeline.index(stage)
        column, is_full = key_block(same.num_blocks - 1 - iteration, same.block_range, META)
        ratio = 1.0
        if META.K_BLOCKWISE:
            descale = same.descale_q * load_descale(same.descales.k, same.head.b, same.h_kv, column, same.band.len_kv)
        if META.V_BLOCKWISE:  # acc is in units of the scale of the block that was added last
            next_descale_v = load_descale(same.descales.v, same.head.b, same.h_kv, column, same.band.len_kv)
            ratio = descale_v / next_descale_v
            descale_v = next_descale_v
        pipeline.wait_full(barriers.k_full, stage)
        s = score_product(tiles.q, same.q_slot, tiles.k, index, same.zeros, BLOCK_N, META)  # S = Q K^T
        s = warpgroup_mma_wait(0, deps=[s])
        pipeline.release(barriers.k_empty, stage)
        columns = column + block_columns
        scored = _logits(s, columns, descale, same, MODS, META)
        s = scored.s
        if IS_CUT:
            s = mask_keys(s, same.rows, columns, same.band, META)
        s = apply_mask_mod(s, same.rows[:, None], columns[None, :], is_full, same.head, MODS, META)
        weights, row_max, correction = exponentials(s, gl.max(s, 1), row_max, scored.factor, META)
        quads = pack_quads(weights, ROWS, BLOCK_N, DTYPE)
        correction_of_sums = gl.convert_layout(correction, gl.SliceLayout(1, row_sum.type.layout))
        correction = gl.convert_layout(correction * ratio, gl.SliceLayout(1, OUT))
        p = unpack_quads(quads, ROWS, BLOCK_N, P, DTYPE)
        pipeline.wait_full(barriers.v_full, stage)
        v = tiles.v.index(index).reshape([META.PARTS * V0, BLOCK_N])
        if ONE_BY_ONE:
            p_sums = warpgroup_mma_wait(0, deps=[_multiply_ones(p, tiles, same)])
        pv = warpgroup_mma(p, v.slice(0, V0, 0).permute([1, 0]), same.no_sum, use_acc=False, is_async=True)  # P V of this block
        if ONE_BY_ONE:
            pv = warpgroup_mma_wait(0, deps=[pv])
        else:
            p_sums = _multiply_ones(p, tiles, same)
            pv, p_sums = warpgroup_mma_wait(0, deps=[pv, p_sums])
        row_sum = row_sum * correction_of_sums[:, None] + _once(p_sums)
        if META.PARTS == 2:
            acc = acc * correction[:, None] + pv
            compute_here(acc)
            # Uses the same registers: with others there are not enough.
            pv = warpgroup_mma(p, v.slice(V0, V0, 0).permute([1, 0]), pv, use_acc=False, is_async=True)  # P V of this block
            pv = warpgroup_mma_wait(0, deps=[pv])
        keep_pairs(quads)
        pipeline.release(barriers.v_empty, stage)
        if META.PARTS == 2:
            acc1 = acc1 * correction[:, None] + pv
            compute_here(acc1)
        else:
            acc = acc * correction[:, None] + pv
            compute_here(acc)
        n_block += 1
    return Carry(row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, descale_v=descale_v, n_block=n_block)


@gluon.jit
def _compute_partition(args: Arguments, buffers: Buffers, CONSUMER: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    tiles, barriers = buffers.tiles, buffers.barriers
    scores = args.scores
    BLOCK_N: gl.constexpr = META.BLOCK_N
    V0: gl.constexpr = META.V0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V0, 32])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    no_sum = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
    no_row_sum = gl.zeros([ROWS, _COLUMNS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 32]))
    n_block = 0
    n_tile = 0
    numbers = receive_tile(n_tile, barriers, META)
    while is_tile(numbers):
        received = received_tile(numbers, args, META)
        tile, band = received.tile, received.band
        h, b = tile.h, tile.b
        len_q = band.len_q
        num_blocks, block_range = received.num_blocks, received.block_range
        h_kv = h // args.work.group_size
        head = head_of(scores, b, h, len_q, band.len_kv, band.shift, MODS, META)
        m_start = tile.first_row + CONSUMER * ROWS
        skipped, num_consumer_blocks, consumer_range = blocks_of_consumer(m_start, num_blocks, block_range, band, META)
        rows, _ = rows_and_heads(m_start, h, len_q, BY_ROW, META)
        # in units of log2, or exact in natural units for unbounded logits
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=BY_ROW)
        row_sum = _once(no_row_sum)
        first_descale_q, first_descale_k, first_descale_v = received.descales
        if META.Q_BLOCKWISE:
            descale_q = load_descale(args.descales.q, b, h, rows, len_q)
        else:
            descale_q = gl.zeros([ROWS], gl.float32, layout=BY_ROW) + first_descale_q.to(gl.float32, bitcast=True)
        descale_v = first_descale_v.to(gl.float32, bitcast=True)
        descale = descale_q * first_descale_k.to(gl.float32, bitcast=True)
        if META.HAS_SINK:
            row_max = gl.maximum(row_max, sink_of_rows(tile, h, args, META))
            sink_weight = gl.where(row_max == float("-inf"), 0.0, P_SCALE)
            if META.IS_UNBOUNDED:
                factor = exponent_factor(row_max)
                sink_weight = gl.exp2(gl.fma(row_max, factor, -scaled_row_max(row_max, factor, P_SHIFT)))
            row_sum = row_sum + gl.convert_layout(sink_weight, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        q_stage = Stage(n_tile, META.Q_STAGES)
        q_slot = CONSUMER + pipeline.index(q_stage) * META.CONSUMERS
        mbarrier.wait(barriers.q_full.index(q_slot), pipeline.phase(q_stage))
        acc = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        acc1 = gl.zeros([ROWS, V0], gl.float32, layout=OUT)
        if META.SKIPS:
            n_block = skip_blocks(skipped, n_block, barriers, CONSUMER, META)
        unmasked = Span(begin=num_consumer_blocks, end=num_consumer_blocks)
        if META.BLOCK_SIZE_Q == 0:  # a list skips blocks
            unmasked = unmasked_blocks(m_start, ROWS, num_consumer_blocks, consumer_range, band, 0, META)
        unmasked_from, unmasked_to = unmasked.begin, unmasked.end
        same = Invariants(
            num_blocks=num_consumer_blocks,
            block_range=consumer_range,
            rows=rows,
            band=band,
            head=head,
            scale=scores.scale,
            h_kv=h_kv,
            descales=args.descales,  # type: ignore[arg-type]
            descale_q=descale_q,
            descale=descale,
            q_slot=q_slot,
            zeros=zeros,
            no_sum=no_sum,
            no_row_sum=no_row_sum,
        )
        carry = Carry(row_max=row_max, row_sum=row_sum, acc=acc, acc1=acc1, descale_v=descale_v, n_block=n_block)
        if META.HAS_LEFT:
            done = 0
            while (
                done < num_consumer_blocks
            ):  # at most twice: blocks after the unmasked ones use the loop of the blocks before them
                carry = _attend(done, unmasked_from, carry, same, buffers, True, MODS, META)
                carry = _attend(unmasked_from, unmasked_to, carry, same, buffers, False, MODS, META)
                done = unmasked_to
                unmasked_from = num_consumer_blocks
                unmasked_to = num_consumer_blocks
        else:
            carry = _attend(0, unmasked_from, carry, same, buffers, True, MODS, META)
            carry = _attend(unmasked_from, num_consumer_blocks, carry, same, buffers, False, MODS, META)
        n_block = carry.n_block
        if META.SKIPS:
            n_block = skip_blocks(num_blocks - skipped - num_consumer_blocks, n_block, barriers, CONSUMER, META)
        mbarrier.arrive(barriers.q_empty.index(q_slot), count=1)
        lse_row = statistics_row(received, CONSUMER, rows, h, args, META)
        row_sum = gl.convert_layout(gl.max(carry.row_sum, 1), BY_ROW)
        row_sum_or_1 = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
        store_lse(carry.row_max, row_sum_or_1, lse_row, rows, received, args, META)
        normaliser = gl.convert_layout(carry.descale_v / row_sum_or_1, gl.SliceLayout(1, OUT))[:, None]
        out_tile = tiles.out.index(CONSUMER)
        tma.store_wait(0)
        DTYPE: gl.constexpr = args.descriptors.out.dtype
        if META.PARTS == 2:
            out_tile.reshape([ROWS, 2 * V0]).slice(0, V0, 1).store((carry.acc * normaliser).to(DTYPE))
            out_tile.reshape([ROWS, 2 * V0]).slice(V0, V0, 1).store((carry.acc1 * normaliser).to(DTYPE))
        else:
            out_tile.reshape([ROWS, V0]).store((carry.acc * normaliser).to(DTYPE))
        fence_async_shared()
        token, out_head = received.start_q + b * args.steps.out.tokens, h + b * args.steps.out.heads
        store_rows(args.descriptors.out, token, len_q, m_start, out_head, 0, out_tile)
        n_tile += 1
        numbers = receive_tile(n_tile, barriers, META)
    tma.store_wait(0)


@hopper_kernel
def _attn_fwd_fp8_hopper_kernel(args: Arguments, MODS: gl.constexpr, META: gl.constexpr):
    CONSUMERS: gl.constexpr = META.CONSUMERS
    REGISTERS: gl.constexpr = META.REGISTERS
    descriptors = args.descriptors
    q_tiles = allocate_pair(CONSUMERS * META.Q_STAGES, descriptors.q, META)
    out_tiles = allocate_tiles(CONSUMERS, descriptors.out)
    k_tiles = allocate_pair(META.STAGES, descriptors.k, META)
    v_tiles = allocate_tiles(META.STAGES, descriptors.v)
    # As bits: if fp32 ones are cast, ptxas (CUDA 12.8) leaves two of four bytes undefined.
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_COLUMNS, META.BLOCK_N], gl.float8e4nv)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    bits = gl.full([_COLUMNS, META.BLOCK_N], _ONE, gl.int8, layout=LINES)
    ones = gl.allocate_shared_memory(gl.float8e4nv, [_COLUMNS, META.BLOCK_N], ONES)
    ones.store(bits.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    barriers = allocate_forward_barriers(CONSUMERS, CONSUMERS, META)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, out=out_tiles, ones=ones)
    buffers = Buffers(tiles=tiles, barriers=barriers)
    if CONSUMERS == 2:  # the first consumer is the default partition: it gets the remaining registers, 240
        gl.warp_specialize(
            [
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (load_partition, (args, buffers, META)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (load_partition, (args, buffers, META)),
                (_compute_partition, (args, buffers, 0, MODS, META)),
                (_compute_partition, (args, buffers, 1, MODS, META)),
                (_compute_partition, (args, buffers, 2, MODS, META)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def unsupported(problem: Problem, out: Tensor, return_max_logit: bool = False) -> str | None:
    """Returns the reason if the kernel cannot run this problem, with q, k and v in FP8; None: it can."""
    x = problem
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.dtype not in FP8_DTYPES:
            return f"it takes float8_e4m3fn and float8_e5m2, and {name} is {str(tensor.dtype).removeprefix('torch.')}"
    for has, feature in ((x.dropout_p > 0, "dropout"), (return_max_logit, "max_logit")):
        if has:
            return f"it does not support {feature}"
    if error := unsupported_values(x):
        return error
    tile = tile_of(x)
    errors: list[str | None] = [descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("out", out))]
    heads = (x.num_heads, x.num_heads_kv, x.num_heads_kv)
    errors += [
        scale_error(name, scale, x, h, 1 if name == "q" else tile.block_n)
        for name, scale, h in zip("qkv", scales_of(x)[:3], heads, strict=True)
    ]
    return next((error for error in errors if error), None) or unsupported_block_mask(x, (tile.block_m, tile.block_n))


def tile_of(problem: Problem) -> Fp8Tile:
    """Returns the committed tile."""
    x = problem
    return select_fp8_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def hopper_fp8_forward(
    problem: Problem,
    v_transposed: Tensor,
    scales: tuple[Scale, Scale, Scale],
    out: Tensor,
    lse: Tensor,
    tile: Fp8Tile | None = None,
) -> None:
    """Launches the FP8 forward of a call that is not `unsupported`.

    problem: q and k in FP8; only the shape of its v is read.
    v_transposed: [h_kv, blocks, d_v, BLOCK], from `fp8_passes.transpose`.
    scales: of q, k and v.
    out: bf16 or fp16, [.., h, d_v], any layout.
    """
    x = problem
    tile = tile or tile_of(x)
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    meta = forward_meta(x, tile, 1, Cut(is_split=False, is_planned=False))._replace(
        IS_FP8=True,
        V0=tile.head_dim_v // tile.parts,
        PARTS=tile.parts,
        Q_BLOCKWISE=scales[0].is_blockwise,
        K_BLOCKWISE=scales[1].is_blockwise,
        V_BLOCKWISE=scales[2].is_blockwise,
        NUMBERS=9 if x.has_lengths else 6,
        SENDS_LISTS=False,
        UNMASKED_LOOP=False,
        HAS_CUT_LOOP=False,
        ASKS_OF_BLOCKS=False,
    )
    descriptors = Descriptors(
        q=pair_descriptor(x.q, ROWS.value, (qk0, qk1)),
        k=pair_descriptor(x.k, tile.block_n, (qk0, qk1)),
        v=transposed_descriptor(v_transposed, tile.head_dim_v, tile.block_n),
        out=ragged_descriptor(out, ROWS.value, tile.head_dim_v),
    )
    work = forward_work(x, tile.block_m)
    if x.has_lengths:
        zero_padding(x, out, "q", lse)
    arguments = forward_arguments(
        x,
        descriptors,
        Steps(q=step_of(x.q), k=step_of(x.k), v=None, out=step_of(out)),
        Results(lse_ptr=lse, max_logit_ptr=None, parts_ptr=None, whole_lse_ptr=None, out=None),
        work,
        SplitKeys(None, None),
    )._replace(
        dropout=None,
        descales=Descales(q=scales[0].argument, k=scales[1].argument, v=scales[2].argument),
        v_blocks=v_transposed.shape[1],
    )
    programs = min(num_processors(out.device), work.blocks * x.batch * x.num_heads)
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    launch(_attn_fwd_fp8_hopper_kernel, programs, out.device, launch_tile, (arguments, x.mods, meta))
