"""What the Gluon kernels for Hopper (sm_90) share: ragged tensor descriptors, barriers, named barriers, packed 16-bit tiles."""

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.block_lists import list_from, listed_tile, load_block_list
from flexattn.kernels_triton.common.primitives import behind, load_head, load_sequence, logits
from flexattn.kernels_triton.common.split_kv import share_of_split

# A row of one sequence by TMA, clipped at the sequence's end in hardware: the copy engine compares each coordinate with its extent
# and adds coordinate times stride modulo 2**64. In the three outer dims the strides cancel but for `start + row`, and the third
# coordinate reaches its extent just where the row reaches the length. (The idea is that of triton.tools.ragged_tma.)
_FAR = 0x7FFF0000
_RAGGED = gl.constexpr(2**30)
_WRAP = 2**34  # elements: 2**30 times this, times 1 or 2 bytes, is 0 modulo 2**64

_L2_BYTES = 32 * 2**20  # of what is read, or added to, again and again while it is in L2

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
FP8_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


def heads_per_section(heads: int, bytes_per_head: int) -> int:
    """How many of `heads` heads share L2, at least one: see `in_sections`."""
    return min(heads, max(1, _L2_BYTES // bytes_per_head))


def ragged_descriptor(x: Tensor, rows: int, width: int, heads: int = 1) -> TensorDescriptor:
    """Tiles of `rows` tokens and `width` columns of one head, or `heads` neighbouring ones, of x, in a half type or FP8.

    x: [b, s, h, d] or [total, h, d].
    The coordinates are those of `load_rows` and `store_rows`, which take the batch as an offset in tokens or heads (`batch_steps`).
    """
    stride_s = x.stride(-3) if x.shape[-3] > 1 else 16
    stride_h = x.stride(-2) if x.shape[-2] > 1 else 16
    if x.dim() == 4 and batch_steps(x) == (0, 1):
        stride_h = x.stride(0)
    block = [1, 1, rows, heads, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, (DTYPES | FP8_DTYPES)[x.dtype])
    shape = [_FAR, _FAR, _RAGGED.value, _FAR, x.shape[-1]]
    return TensorDescriptor(x, shape, [_WRAP - stride_s, stride_s, stride_s, stride_h, 1], block, layout)


def batch_steps(x: Tensor) -> tuple[int, int] | None:
    """How far apart batch elements are, in (tokens, heads), one of them 0; None where that is a multiple of neither's stride.

    Where there is one head, the batch elements are the descriptor's heads.
    """
    if x.dim() == 3 or x.shape[0] == 1:
        return 0, 0
    stride_b, stride_s, stride_h, _ = x.stride()
    if x.shape[1] > 1 and stride_s > 0 and stride_b % stride_s == 0:
        return stride_b // stride_s, 0
    if x.shape[2] == 1:
        return 0, 1
    return (0, stride_b // stride_h) if stride_h > 0 and stride_b % stride_h == 0 else None


def batch_steps_of(*tensors: Tensor) -> list[int]:
    """`batch_steps` of each, one after the other, as the kernels take them. Raises ValueError for a tensor that has none."""
    steps: list[int] = []
    for x in tensors:
        found = batch_steps(x)
        if found is None:
            raise ValueError(
                f"a tensor has strides {x.stride()}; the batch stride must be a multiple of the token or the head stride"
            )
        steps += found
    return steps


def descriptor_error(name: str, x: Tensor) -> str | None:
    """None if TMA can read and write x tile by tile, else why not."""
    if x.data_ptr() % 16:
        return f"{name} begins at an address that is no multiple of 16 bytes"
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % unit):
            return f"{name} has a stride of {stride} elements; the copy engine takes positive multiples of {unit}"
    if batch_steps(x) is None:
        return f"the batch stride of {name} is a multiple of neither its token nor its head stride"
    return None


@gluon.jit
def load_rows(descriptor, start, length, row, head, COLUMN: gl.constexpr, barrier, tile):
    # Rows row .. of the sequence that begins at token `start`; zeros from row `length` on.
    tma.async_copy_global_to_shared(descriptor, [_RAGGED, start + length, _RAGGED - length + row, head, COLUMN], barrier, tile)


@gluon.jit
def store_rows(descriptor, start, length, row, head, COLUMN: gl.constexpr, tile):
    # The same rows; what is past row `length` is not written.
    tma.async_copy_shared_to_global(descriptor, [_RAGGED, start + length, _RAGGED - length + row, head, COLUMN], tile)


@builtin
def reduce_add(descriptor, coordinates, tile, _semantic=None):
    # Adds a tile to global memory. Triton has a function for it only from 3.8 on (tma.async_atomic_add), the builder has it in all.
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle)


@gluon.jit
def allocate_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.constexpr_function
def _barrier_assembly(operation, barrier, threads):
    return f"bar.{operation} {barrier}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly("sync", BARRIER, THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(BARRIER: gl.constexpr, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly("arrive", BARRIER, THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_assembly_at(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.b32 $0, 0;"


# The same, with a barrier that is known only when it runs.
@gluon.jit
def named_barrier_sync_at(barrier, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly_at("sync", THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive_at(barrier, THREADS: gl.constexpr):
    assembly: gl.constexpr = _barrier_assembly_at("arrive", THREADS)
    gl.inline_asm_elementwise(assembly, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_zero(x):
    # 0 that LLVM cannot see through: an index with it keeps the descriptors of shared memory from being hoisted into registers.
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


# A 16-bit tile that a loop carries is kept as pairs in 32-bit registers: as single elements ptxas splits and merges them each turn.
@gluon.jit
def pack_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    low, high = gl.split(gl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    assembly: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(assembly, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    pairs = gl.join(x.to(gl.int16), (x >> 16).to(gl.int16))
    return gl.convert_layout(gl.reshape(pairs, [ROWS, COLUMNS]).to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def keep_pairs(x):
    # A use after the wait for the product that reads x, so that its registers are not taken for something else before.
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sequences(b, cu_seqlens, batch, num_tokens_q, num_tokens_kv, max_seqlen_q, max_seqlen_kv, META: gl.constexpr):
    cu_seqlens_q_ptr, cu_seqlens_kv_ptr, cu_seqlens_q_padded_ptr, cu_seqlens_kv_padded_ptr = cu_seqlens
    start_q, len_q = load_sequence(
        cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, b, batch, num_tokens_q, max_seqlen_q, META.IS_RAGGED_Q, META.HAS_GAPS_Q, META
    )
    start_kv, len_kv = load_sequence(
        cu_seqlens_kv_ptr,
        cu_seqlens_kv_padded_ptr,
        b,
        batch,
        num_tokens_kv,
        max_seqlen_kv,
        META.IS_RAGGED_KV,
        META.HAS_GAPS_KV,
        META,
    )
    return start_q, len_q, start_kv, len_kv


@gluon.jit
def in_sections(t, length, heads, heads_per_section):
    # Of `heads` lists of `length` pieces each, piece t: (place in its list, head). Within a section, as many heads as L2 has room
    # for, the first pieces of all heads come first: they are the longest, and what is short fills up the end.
    section = t // (heads_per_section * length)
    rest = t - section * heads_per_section * length
    heads_here = gl.minimum(heads_per_section, heads - section * heads_per_section)
    return rest // heads_here, section * heads_per_section + rest % heads_here


@gluon.jit
def amount_of_work(table_ptr, batch, num_heads, blocks, META: gl.constexpr):
    if META.HAS_LENGTHS:
        return gl.load(table_ptr + 1) * num_heads
    else:
        return batch * num_heads * blocks


@gluon.jit
def piece_of_work(t, amount, table_ptr, batch, num_heads, blocks, heads_per_section, META: gl.constexpr):
    # (first query, head, batch) of piece t. The longest come first; heads of one section, whose keys and values fit L2, together.
    if META.HAS_LENGTHS:
        place, head = in_sections(t, amount // num_heads, num_heads, heads_per_section)
        entry = gl.load(table_ptr + 2 + place)
        return entry % blocks * META.BLOCK_M, head, entry // blocks
    else:
        block, b_h = in_sections(t, blocks, batch * num_heads, heads_per_section)
        if META.HAS_RIGHT:
            block = blocks - 1 - block
        return block * META.BLOCK_M, b_h % num_heads, b_h // num_heads


@gluon.jit
def key_blocks(first_row, len_kv, shift, window_left, window_right, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # Blocks of keys that some of BLOCK_M (or QUERIES) queries from first_row on may see: begin <= end.
    NUM_QUERIES: gl.constexpr = META.BLOCK_M if QUERIES == 0 else QUERIES
    begin = 0
    end = gl.cdiv(len_kv, META.BLOCK_N)
    if META.HAS_RIGHT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + NUM_QUERIES + shift + window_right, 0), META.BLOCK_N))
    if META.HAS_LEFT:
        begin = gl.minimum(gl.maximum(first_row + shift - window_left, 0) // META.BLOCK_N, end)
    return begin, end


@gluon.jit
def query_blocks(first_row, ROWS: gl.constexpr, len_q, shift, window_left, window_right, META: gl.constexpr):
    # Blocks of queries that see some of ROWS keys from first_row on: begin <= end.
    begin = 0
    end = gl.cdiv(len_q, META.BLOCK_M)
    if META.HAS_RIGHT:
        begin = gl.minimum(gl.maximum(first_row - shift - window_right, 0) // META.BLOCK_M, end)
    if META.HAS_LEFT:
        end = gl.minimum(end, gl.cdiv(gl.maximum(first_row + ROWS - shift + window_left, 0), META.BLOCK_M))
    return begin, gl.maximum(begin, end)


@gluon.jit
def mask_keys(qk, rows, columns, len_kv, shift, window_left, window_right, META: gl.constexpr):
    last = gl.zeros_like(rows) + (len_kv - 1)
    if META.HAS_RIGHT:
        last = gl.minimum(last, rows + shift + window_right)
    visible = columns[None, :] <= last[:, None]
    if META.HAS_LEFT:
        visible = visible & (columns[None, :] >= (rows + shift - window_left)[:, None])
    return gl.where(visible, qk, float("-inf"))


@gluon.jit
def _row_of_lists(lists, b, h, first, SIZE: gl.constexpr):
    # Of the block of SIZE tokens that begins at or before `first`
    _, _, _, _, stride_b, stride_h, _ = lists
    return b * stride_b + h * stride_h + first // SIZE


@gluon.jit
def _listed(
    lists,
    b,
    h,
    first,
    begin,
    end,
    HAS_BEFORE: gl.constexpr,
    SIZE: gl.constexpr,
    OTHER: gl.constexpr,
    META: gl.constexpr,
):
    # What of a block mask's lists, whose blocks have SIZE tokens and OTHER of the other side, is in the band from begin to end:
    # (masked blocks, full ones, masked ones before these, full ones before these).
    counts_ptr, indices_ptr, full_counts_ptr, full_indices_ptr, _, _, list_length = lists
    row = _row_of_lists(lists, b, h, first, SIZE)
    before, num_masked = load_block_list(counts_ptr, indices_ptr, row, list_length, begin, end, OTHER, HAS_BEFORE, META)
    full_before, num_full = load_block_list(
        full_counts_ptr, full_indices_ptr, row, list_length, begin, end, OTHER, HAS_BEFORE, META
    )
    return num_masked, num_full, before, full_before


@gluon.jit
def _listed_blocks(listed, lists, b, h, first, SIZE: gl.constexpr, OTHER: gl.constexpr, BLOCK: gl.constexpr):
    # By what `_listed` returned: (how many tiles of BLOCK tokens of the other side are seen, what `_listed_block` finds them by).
    num_masked, num_full, before, full_before = listed
    _, indices_ptr, _, full_indices_ptr, _, _, list_length = lists
    row = _row_of_lists(lists, b, h, first, SIZE)
    masked_ptr = list_from(indices_ptr, row, list_length, before)
    full_ptr = list_from(full_indices_ptr, row, list_length, full_before)
    return (num_masked + num_full) * (OTHER // BLOCK), (masked_ptr, num_masked, full_ptr)


@gluon.jit
def _listed_block(t, found, OTHER: gl.constexpr, BLOCK: gl.constexpr):
    # (the first token of tile t, whether the mask_mod need not be asked)
    masked_ptr, num_masked, full_ptr = found
    return listed_tile(t, masked_ptr, num_masked, full_ptr, 0, 0, OTHER, BLOCK)


@gluon.jit
def listed_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # Of a block mask, what `blocks_by_lists` needs besides: it takes reads that wait for each other
    begin, end = key_blocks(first_row, len_kv, shift, window_left, window_right, META, QUERIES)
    band = (begin * META.BLOCK_N, gl.minimum(end * META.BLOCK_N, len_kv), META.HAS_LEFT)
    return _listed(lists, b, h, first_row, *band, META.BLOCK_SIZE_Q, META.BLOCK_SIZE_KV, META)


@gluon.jit
def blocks_by_lists(listed, first_row, b, h, lists, META: gl.constexpr):
    # `blocks_of_keys` of a block mask
    return _listed_blocks(listed, lists, b, h, first_row, META.BLOCK_SIZE_Q, META.BLOCK_SIZE_KV, META.BLOCK_N)


@gluon.jit
def blocks_of_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META: gl.constexpr, QUERIES: gl.constexpr = 0):
    # (how many blocks of keys some of BLOCK_M queries from first_row on see, what `key_block` finds them by)
    if META.BLOCK_SIZE_Q > 0:
        listed = listed_keys(first_row, b, h, len_kv, shift, window_left, window_right, lists, META, QUERIES)
        return blocks_by_lists(listed, first_row, b, h, lists, META)
    else:
        begin, end = key_blocks(first_row, len_kv, shift, window_left, window_right, META, QUERIES)
        return end - begin, begin


@gluon.jit
def key_block(t, found, META: gl.constexpr):
    # (the first key of block t, whether it is full to a block mask)
    if META.BLOCK_SIZE_Q > 0:
        return _listed_block(t, found, META.BLOCK_SIZE_KV, META.BLOCK_N)
    else:
        return (found + t) * META.BLOCK_N, False


@gluon.jit
def blocks_of_split(split, num_splits, num_blocks, found, META: gl.constexpr):
    # Of what `blocks_of_keys` says a split's share, of a block mask in whole blocks of it
    if META.BLOCK_SIZE_Q > 0:
        TILES: gl.constexpr = META.BLOCK_SIZE_KV // META.BLOCK_N
        masked_ptr, num_masked, full_ptr = found
        first, last = share_of_split(num_blocks // TILES, split, num_splits)
        return (last - first) * TILES, (masked_ptr + first, num_masked - first, full_ptr)
    else:
        first, last = share_of_split(num_blocks, split, num_splits)
        return last - first, found + first


@gluon.jit
def blocks_of_queries(first_row, b, h, len_q, shift, window_left, window_right, lists, META: gl.constexpr):
    # (how many blocks of queries see some of BLOCK_N keys from first_row on, what `query_block` finds them by)
    begin, end = query_blocks(first_row, META.BLOCK_N, len_q, shift, window_left, window_right, META)
    if META.BLOCK_SIZE_Q > 0:
        band = (begin * META.BLOCK_M, gl.minimum(end * META.BLOCK_M, len_q), META.HAS_RIGHT)
        listed = _listed(lists, b, h, first_row, *band, META.BLOCK_SIZE_KV, META.BLOCK_SIZE_Q, META)
        return _listed_blocks(listed, lists, b, h, first_row, META.BLOCK_SIZE_KV, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return end - begin, begin


@gluon.jit
def query_block(t, found, META: gl.constexpr):
    # (the first query of block t, whether it is full to a block mask)
    if META.BLOCK_SIZE_Q > 0:
        return _listed_block(t, found, META.BLOCK_SIZE_Q, META.BLOCK_M)
    else:
        return (found + t) * META.BLOCK_M, False


@gluon.jit
def load_statistics(descriptor, first_tile, row, len_q, barrier, destination, META: gl.constexpr):
    # Those of the BLOCK_M queries from `row` on, of the head whose tiles begin at first_tile. A listed block may lie past the end,
    # where the next head's would be: those of no query instead, whose p is 0 whatever a mod makes of the scores.
    at = (first_tile + row // META.BLOCK_M) * (2 * META.BLOCK_M)
    if META.BLOCK_SIZE_Q > 0:
        at = gl.where(row < len_q, at, 0)
    tma.async_copy_global_to_shared(descriptor, [at], barrier, destination)


@gluon.jit
def modified(qk, i, j, place, scores, head, MODS: gl.constexpr, META: gl.constexpr):
    # `primitives.logits` of one head's tile, in either order
    len_q, len_kv, shift, b, h = place
    softmax_scale, softcap, stride_bias_m, stride_bias_n, captures = scores
    bias_base, alibi_slope = head
    return logits(
        qk,
        i,
        j,
        len_q,
        len_kv,
        shift,
        softmax_scale,
        softcap,
        bias_base,
        stride_bias_m,
        stride_bias_n,
        alibi_slope,
        b,
        h,
        captures,
        MODS,
        META,
    )


@gluon.jit
def scores_of_head(scores, values, META: gl.constexpr):
    # `scores` with what the mods read of a head, `head_values`
    softmax_scale, softcap, stride_bias_m, stride_bias_n, captures = scores
    return softmax_scale, softcap, stride_bias_m, stride_bias_n, behind(captures, values, META)


@gluon.jit
def head_of(bias, b, h, META: gl.constexpr):
    # What `modified` reads of a head
    bias_ptr, stride_bias_b, stride_bias_h, alibi_slopes_ptr, stride_alibi_b = bias
    return load_head(bias_ptr, alibi_slopes_ptr, b, h, stride_bias_b, stride_bias_h, stride_alibi_b, META)


@gluon.jit
def mask_by_mod(s, i, j, is_full, place, captures, MODS: gl.constexpr, META: gl.constexpr):
    # -inf where the mask_mod hides, which blocks that a block mask calls full do not ask
    _, _, _, b, h = place
    if META.HAS_MASK_MOD:
        if META.BLOCK_SIZE_Q > 0:
            if not is_full:
                s = gl.where(MODS.mask(b, h, i, j, captures), s, float("-inf"))
        else:
            s = gl.where(MODS.mask(b, h, i, j, captures), s, float("-inf"))
    return s


@gluon.jit
def mask_queries(s, rows, columns, shift, window_left, window_right, META: gl.constexpr):
    # s is transposed: rows are keys, columns queries.
    if META.HAS_RIGHT:
        s = gl.where(columns[None, :] >= (rows - shift - window_right)[:, None], s, float("-inf"))
    if META.HAS_LEFT:
        s = gl.where(columns[None, :] <= (rows - shift + window_left)[:, None], s, float("-inf"))
    return s


@gluon.jit
def hide_queries_past_the_end(s, row, columns, len_q, MODS: gl.constexpr, META: gl.constexpr):
    # A score_mod may make the scores of a query past the end infinite.
    if META.HAS_SCORE_MOD and not MODS.score_is_finite:  # noqa: SIM102  # this is known when it is compiled, that at run time
        if row + META.BLOCK_M > len_q:
            s = gl.where((columns < len_q)[None, :], s, float("-inf"))
    return s
