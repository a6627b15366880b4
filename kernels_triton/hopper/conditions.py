"""The problems that the kernels for sm_90 take, with which tile, and which of them were measured to be faster there.

For q, k and v in 16 bits; the FP8 kernels have conditions of their own.
"""

from __future__ import annotations

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import (
    HOPPER_BYTES,
    HOPPER_DROPOUT_FROM,
    HOPPER_FUSED_192,
    HOPPER_PAGED_BYTES,
    HOPPER_PAGED_WINDOW_FROM,
    HOPPER_SHARED_FROM,
    HOPPER_UNSHARED_BYTES,
    HOPPER_WIDE,
    LEAST_CAUSAL,
    LEAST_CAUSAL_LARGE_L2,
    LEAST_CAUSAL_PACKED,
    NEVER,
    HopperBackwardTile,
    HopperFused192Tile,
    HopperFusedTile,
    HopperTile,
    Kind,
    cdiv,
    select_hopper_backward_tile,
    select_hopper_fused_tile,
    select_hopper_tile,
    slots_of_heads,
)
from flexattn.kernels_triton.hopper.descriptors import DTYPES, descriptor_error
from flexattn.kernels_triton.hopper.operands import ROWS
from flexattn.kernels_triton.hopper.pages import unsupported_pages
from flexattn.kernels_triton.runtime.launch import capability_of, has_large_l2, num_processors

QUERIES = 128  # queries of a program of dq: two warpgroups'
KEYS = 128  # keys of a program of the fused backward: two warpgroups'
# Windows that were measured, of both fused backwards: what the sums of dq cost goes with the tokens, however few keys these see.
_NARROWEST, _NARROWEST_192 = 256, 1024
_WIDE_FROM, _NARROW_UP_TO = 320, 4096  # head dim, tokens: 8192 tokens took the wide forward 1.14 of the portable one's time
_LITTLE_WORK = "there is too little work for its large tiles"
_TOO_WIDE = "its accumulators hold head dims up to 128"


def mask_class(problem: Problem) -> tuple[Kind, float]:
    """Returns the mask class, by which a row's shortest length is chosen, and the share of all (query, key) pairs that is seen."""
    x = problem
    if x.bias is not None or x.block_mask is not None:
        return "loaded", 1.0
    if x.is_modified:
        return "modified", 1.0 if x.window_right is None else 0.5
    if x.window_left is not None and x.window_left >= 0:
        return "windowed", min(1.0, (x.window_left + 1) / x.longest_kv)
    is_open = x.window_left is None and x.window_right is None
    return ("open", 1.0) if is_open else ("causal", 0.5)  # so is a window that begins behind the diagonal


def _shares(problem: Problem) -> list[int]:
    """Returns how many query heads of one key head may share a warpgroup's rows: a power of two that divides them, or all."""
    size = problem.group_size
    power = min(size & -size, ROWS.value)
    return [power, size] if slots_of_heads(size) <= ROWS.value else [power]


def heads_of_a_tile(problem: Problem, tile: HopperTile) -> int:
    """Returns how many query heads of one key head share a tile: above 1 where queries leave half of it empty.

    Of a packed batch the mean counts: a few long sequences among many short ones lose nothing by it.
    """
    x = problem
    queries = x.longest_q if x.q.dim() == 4 else min(x.longest_q, cdiv(x.q.shape[0], max(1, x.batch)))
    if 2 * queries > tile.block_m or x.block_mask is not None:
        return 1
    # The fewest tiles, and of as many those whose keys are loaded for more heads.
    return min(_shares(x), key=lambda heads: (cdiv(queries * slots_of_heads(heads), tile.block_m) * x.group_size // heads, -heads))


def rows_of_a_tile(problem: Problem) -> int:
    """Returns how many rows, at most, hold all queries of the heads of a tile."""
    x = problem
    return x.longest_q if x.block_mask is not None else x.longest_q * slots_of_heads(_shares(x)[-1])


def forward_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile; numbers drawn for dropout need registers as modified scores do."""
    x = problem
    if x.is_batch_invariant:
        return select_hopper_tile(x.q.shape[-1], x.v.shape[-1], is_modified=True)
    is_paged = x.page_table is not None
    # Of a packed batch the mean, but over pages, where long sequences take the time beside many that have one query.
    is_mixed = is_paged and x.longest_q > ROWS.value
    length = x.q.shape[0] // max(1, x.batch) if x.q.dim() == 3 and not is_mixed else max(x.longest_q, x.longest_kv)
    window = NEVER if x.window_left is None or x.window_right is None else x.window_left + 1 + x.window_right
    return select_hopper_tile(
        x.q.shape[-1],
        x.v.shape[-1],
        is_modified=x.is_modified or x.dropout_p > 0,
        kind=mask_class(x)[0],
        length=length,
        rows=rows_of_a_tile(x),
        window=window,
        is_paged=is_paged,
    )


def unsupported_block_mask(problem: Problem, tile: tuple[int, int]) -> str | None:
    """Returns that the blocks of the problem's block mask are no multiples of a tile (queries, keys); None: they are."""
    if problem.block_mask is None:
        return None
    sizes = (problem.block_mask.block_size_q, problem.block_mask.block_size_kv)
    if all(size % block == 0 for size, block in zip(sizes, tile, strict=True)):
        return None
    return f"its tiles are {tile[0]} x {tile[1]}, and the block mask's blocks {sizes[0]} x {sizes[1]}: no multiples"


def _flops(problem: Problem) -> float:
    """Returns about as many operations as a forward has."""
    x = problem
    tokens = x.q.numel() // x.q.shape[-1]  # tokens of all heads
    return 2 * tokens * x.longest_kv * (x.q.shape[-1] + x.v.shape[-1]) * mask_class(x)[1]


def slower_by_row(problem: Problem, tile: HopperTile | HopperBackwardTile | HopperFusedTile | HopperFused192Tile) -> str | None:
    """Returns what the problem lacks, in length or work, to be faster with its row; None: nothing."""
    x = problem
    kind = mask_class(x)[0]
    longest = max(x.longest_q, x.longest_kv)
    needed = {f"{kind}_from": getattr(tile, f"{kind}_from")}
    if x.dropout_p > 0:
        head_dim = tile.head_dim if isinstance(tile, HopperFusedTile) else tile.head_dim_qk
        own = needed if kind not in ("open", "causal") else {}
        needed = own | {"HOPPER_DROPOUT_FROM": HOPPER_DROPOUT_FROM[head_dim]}
    for name, shortest in needed.items():
        if longest < shortest:
            if shortest == NEVER:
                return f"no benchmark shows it to be faster for such a call ({name} of its tile)"
            return f"it is faster from {shortest} tokens on ({name} of its tile), and the longest sequence has {longest}"
    return None if _flops(x) >= tile.flops_from else _LITTLE_WORK


def slower_for_few_keys(problem: Problem, keys: int) -> str | None:
    """Returns that programs of so many keys each are fewer than the device's multiprocessors; None: they are not."""
    x = problem
    programs = x.k.numel() // x.k.shape[-1] // keys
    if programs >= num_processors(x.device):
        return None
    return f"it has a program for each {keys} keys, and {programs} are too few for this device"


def _is_wide(problem: Problem) -> bool:
    return max(problem.q.shape[-1], problem.v.shape[-1]) > 256


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns why the forward cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and _is_wide(problem):
        return "it takes head dims up to 256"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, forward_tile(problem))


def wide_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile for head dims above 256; where v is columns of k there is room for two stages."""
    x = problem
    tile = next(tile for tile in HOPPER_WIDE if x.q.shape[-1] <= tile.head_dim_qk)
    return tile._replace(num_stages=2) if x.is_latent else tile


def wide_unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns why the forward for head dims above 256 cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and not _is_wide(problem):
        return "it takes head dims above 256"
    if has_max_logit:
        return "it does not return max_logit"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, wide_tile(problem))


def wide_slower(problem: Problem) -> str | None:
    """Returns why the forward for head dims above 256 was not measured to be faster than the portable one; None: it was."""
    x = problem
    is_narrow = max(x.q.shape[-1], x.v.shape[-1]) <= _WIDE_FROM
    if is_narrow and 2 * x.longest_q > ROWS.value and max(x.longest_q, x.longest_kv) > _NARROW_UP_TO:
        return f"its tiles have 512 columns, and up to {_WIDE_FROM} it was faster with up to {_NARROW_UP_TO} tokens"
    return None


def _unsupported_device(problem: Problem) -> str | None:
    return None if capability_of(problem.device) == 90 else "it is written for Hopper, sm_90"


def unsupported_operands(problem: Problem, out: Tensor) -> str | None:
    """Returns why the copy engine or the forwards cannot take this problem's operands, whatever the head dims; None: they can."""
    x = problem
    if x.q.dtype not in DTYPES:
        return f"it takes bf16 and fp16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.descales_kv:
        return "it takes k and v in q's dtype, and they are in FP8"
    if x.softmax_scale == 0:
        return "it does not do a softmax_scale of 0"
    if x.origin:
        return "it draws dropout at the call's own positions, and rng_state has those of a whole"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    errors = (descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("out", out)))
    return next((error for error in errors if error), None)


def _unsupported_tile(problem: Problem, tile: HopperTile) -> str | None:
    return unsupported_block_mask(problem, tile[2:4]) or unsupported_pages(problem, tile.block_n)


def forward_slower(problem: Problem) -> str | None:
    """Returns why the forward was not measured to be faster than the portable one for this problem; None: it was."""
    x, tile = problem, forward_tile(problem)
    is_paged = x.page_table is not None
    is_few = 2 * x.longest_q <= tile.block_m and x.block_mask is None
    size = x.num_keys * x.num_heads_kv * (x.k.shape[-1] + x.v.shape[-1]) * x.k.element_size()
    is_plain = not x.is_modified and x.dropout_p == 0
    if not is_few or not (is_paged or (is_plain and (heads_of_a_tile(x, tile) > 1 or size >= HOPPER_UNSHARED_BYTES))):
        return slower_by_row(x, tile)
    shortest = HOPPER_SHARED_FROM[tile.head_dim_qk]
    if x.longest_kv < shortest:
        return f"it is faster from {shortest} keys on (HOPPER_SHARED_FROM), and the longest sequence has {x.longest_kv}"
    shortest = HOPPER_PAGED_WINDOW_FROM.get(tile.head_dim_qk, 0) if is_paged else 0
    if x.window_left is not None and x.window_left < shortest:
        return f"it is faster with windows of {shortest} keys or more (HOPPER_PAGED_WINDOW_FROM), and this has {x.window_left}"
    least = HOPPER_PAGED_BYTES if is_paged else HOPPER_BYTES
    return None if size >= least else "there is too little to load for it to be faster"


def backward_unsupported_block_mask(problem: Problem, block_n: int, block_m: int, keys: int) -> str | None:
    """Returns why kernels with such tiles, as `HopperBackwardTile` has them, do not take the block mask; None: they do."""
    x = problem
    if x.block_mask is None:
        return None
    if x.group_size > 1 and x.block_mask.heads > 1:
        return "query heads that share a key head have each a block mask of its own"
    errors = (unsupported_block_mask(x, tile) for tile in ((QUERIES, block_n), (block_m, keys)))
    return next((error for error in errors if error), None)


def unsupported_statistics(problem: Problem) -> str | None:
    """Returns that the copy engine does not reach all statistics of a backward's rows; None: it does."""
    x = problem
    is_reached = x.num_heads * (x.q.shape[-3] + 256) * x.batch < 2**29
    return None if is_reached else "its statistics are more than the copy engine's coordinates reach"


def backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the two kernels of a backward cannot run this problem; None: they can."""
    x = problem
    if error := forward_unsupported(x, out) or descriptor_error("dout", dout) or unsupported_statistics(x):
        return error
    tile = select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=True)
    return backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def backward_tile(problem: Problem) -> HopperBackwardTile:
    """Returns the committed tile."""
    x = problem
    return select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def backward_slower(problem: Problem) -> str | None:
    """Returns why the two kernels of a backward were not measured to be faster than the portable ones; None: they were."""
    x = problem
    tile = backward_tile(x)
    # A program of dk and dv does all query heads of its keys: of few key heads there are too few programs.
    return slower_for_few_keys(x, tile.keys) or slower_by_row(x, tile)


def fused_tile(problem: Problem) -> HopperFusedTile:
    """Returns the committed tile; numbers drawn for dropout need registers as modified scores do."""
    x = problem
    kind = "modified" if x.dropout_p > 0 else mask_class(x)[0]
    length, is_grouped = max(x.longest_q, x.longest_kv), x.group_size > 1
    dims = x.q.shape[-1], x.v.shape[-1]
    return select_hopper_fused_tile(*dims, kind, length, has_lengths=x.has_lengths, is_grouped=is_grouped)


def converts_dq(problem: Problem, dq: Tensor, tile: HopperFusedTile) -> bool:
    """Returns whether the fused backward with this tile converts dq: if it says so, in rows as wide, of sequences of one length."""
    x = problem
    is_wide = x.q.shape[-1] == tile.head_dim and not any(n % tile.head_dim for n in dq.stride()[:-1])
    return tile.converts and is_wide and not x.has_lengths


def fused_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the fused backward cannot run this problem; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    return backward_unsupported(x, out, dout)


def _slower_by_window(problem: Problem, narrowest: int) -> str | None:
    """Returns that a fused backward was not measured with so narrow a window; None: it was, or there is none."""
    is_narrow = problem.window_left is not None and problem.window_left < narrowest - 1
    return f"windows of fewer than {narrowest} keys were not measured to be faster" if is_narrow else None


def fused_192_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns why the fused backward for head dims above 128 cannot run this problem; None: it can."""
    x, tile = problem, HOPPER_FUSED_192
    if not 128 < x.q.shape[-1] <= tile.head_dim_qk or x.v.shape[-1] > tile.head_dim_v:
        return f"it takes head dims of q and k from 136 to {tile.head_dim_qk}, and of v up to {tile.head_dim_v}"
    if x.is_modified or x.dropout_p > 0:
        return "it takes scaled scores alone, with a band or without: no bias, mod, softcap, dropout or block mask"
    return backward_unsupported(x, out, dout)


def fused_192_slower(problem: Problem) -> str | None:
    """Returns why the fused backward for head dims above 128 was not measured to be faster than two kernels; None: it was."""
    x = problem
    return _slower_by_window(x, _NARROWEST_192) or slower_for_few_keys(x, KEYS) or slower_by_row(x, HOPPER_FUSED_192)


def fused_slower(problem: Problem) -> str | None:
    """Returns why the fused backward was not measured to be faster than the others; None: it was."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    if x.bias is not None:
        return "it was not measured with a bias"
    by_window = _slower_by_window(x, _NARROWEST)
    return by_window or slower_for_few_keys(x, KEYS) or slower_by_row(x, fused_tile(x)) or _slower_while_short(x)


def _slower_while_short(problem: Problem) -> str | None:
    """Returns why the fused backward was not measured to be faster for a short causal call on this device; None: it was."""
    x = problem
    longest = max(x.longest_q, x.longest_kv)
    if mask_class(x)[0] != "causal" or x.dropout_p > 0 or longest >= 1024:
        return None
    if has_large_l2(x.device):
        least, where = LEAST_CAUSAL_LARGE_L2, "on this device"
    elif x.has_lengths:
        least, where = LEAST_CAUSAL_PACKED, "on this device in packed batches"
    else:
        least, where = LEAST_CAUSAL, "on this device"
    tokens = least.tokens if x.group_size == 1 else least.grouped_tokens
    if longest < tokens:
        return (
            f"{where} it was measured to be faster for causal calls from {tokens} tokens on, and the longest sequence has {longest}"
        )
    return None if _flops(x) >= least.flops else _LITTLE_WORK
