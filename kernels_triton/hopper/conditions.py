"""Conditions of the kernels for sm_90: the problems that they support, their tiles, and the problems for which they are faster.

For q, k and v in 16 bits; the FP8 kernels have their own conditions.
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
    select_hopper_backward_tile,
    select_hopper_fused_tile,
    select_hopper_tile,
)
from flexattn.kernels_triton.gluon.conditions import (
    KEYS,
    backward_unsupported_block_mask,
    heads_of_a_tile,
    rows_of_a_tile,
    unsupported_block_mask,
    unsupported_operands,
    unsupported_statistics,
)
from flexattn.kernels_triton.gluon.descriptors import descriptor_error
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pages import unsupported_pages
from flexattn.kernels_triton.runtime.launch import capability_of, has_large_l2, num_processors

# Narrowest measured windows of both fused backwards: the sums of dq cost time for each token, however few keys it sees.
_NARROWEST, _NARROWEST_192 = 256, 1024
_WIDE_FROM, _NARROW_UP_TO = 320, 4096  # head dim, tokens: with 8192 tokens the wide forward took 1.14 of the portable one's time
_LITTLE_WORK = "there is too little work for its large tiles"
_TOO_WIDE = "its accumulators hold head dims up to 128"


def mask_class(problem: Problem) -> tuple[Kind, float]:
    """Returns the mask class, which selects a row's minimum length, and the visible share of all (query, key) pairs."""
    x = problem
    if x.bias is not None or x.block_mask is not None:
        return "loaded", 1.0
    if x.is_modified:
        return "modified", 1.0 if x.window_right is None else 0.5
    if x.window_left is not None and x.window_left >= 0:
        return "windowed", min(1.0, (x.window_left + 1) / x.longest_kv)
    is_open = x.window_left is None and x.window_right is None
    return ("open", 1.0) if is_open else ("causal", 0.5)  # also for a window that begins after the diagonal


def forward_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile; random numbers for dropout need registers, like modified scores."""
    x = problem
    if x.is_batch_invariant:
        return select_hopper_tile(x.q.shape[-1], x.v.shape[-1], is_modified=True)
    is_paged = x.page_table is not None
    # The mean for a packed batch; but over pages the maximum, because long sequences dominate beside many sequences of one query.
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


def _flops(problem: Problem) -> float:
    """Returns the approximate number of operations of a forward."""
    x = problem
    tokens = x.q.numel() // x.q.shape[-1]  # tokens of all heads
    return 2 * tokens * x.longest_kv * (x.q.shape[-1] + x.v.shape[-1]) * mask_class(x)[1]


def slower_by_row(problem: Problem, tile: HopperTile | HopperBackwardTile | HopperFusedTile | HopperFused192Tile) -> str | None:
    """Returns the length or work that the problem lacks to be faster with its row; None: nothing."""
    x = problem
    kind = mask_class(x)[0]
    longest = max(x.longest_q, x.longest_kv)
    needed = {f"{kind}_from": getattr(tile, f"{kind}_from")}
    if x.dropout_p > 0:
        head_dim = tile.head_dim if isinstance(tile, HopperFusedTile) else tile.head_dim_qk
        window_need = needed if kind not in ("open", "causal") else {}
        needed = window_need | {"HOPPER_DROPOUT_FROM": HOPPER_DROPOUT_FROM[head_dim]}
    for name, shortest in needed.items():
        if longest < shortest:
            if shortest == NEVER:
                return f"no benchmark shows it to be faster for such a call ({name} of its tile)"
            return f"it is faster from {shortest} tokens on ({name} of its tile), and the longest sequence has {longest}"
    return None if _flops(x) >= tile.flops_from else _LITTLE_WORK


def slower_for_few_keys(problem: Problem, keys: int) -> str | None:
    """Returns the reason if programs of `keys` keys each are fewer than the device's multiprocessors; None: they are not."""
    x = problem
    programs = x.k.numel() // x.k.shape[-1] // keys
    if programs >= num_processors(x.device):
        return None
    return f"it has a program for each {keys} keys, and {programs} are too few for this device"


def _is_wide(problem: Problem) -> bool:
    return max(problem.q.shape[-1], problem.v.shape[-1]) > 256


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and _is_wide(problem):
        return "it takes head dims up to 256"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, forward_tile(problem))


def wide_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile for head dims above 256; if v is columns of k, two stages fit."""
    x = problem
    tile = next(tile for tile in HOPPER_WIDE if x.q.shape[-1] <= tile.head_dim_qk)
    return tile._replace(num_stages=2) if x.is_latent else tile


def wide_unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns the reason if the forward for head dims above 256 cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and not _is_wide(problem):
        return "it takes head dims above 256"
    if has_max_logit:
        return "it does not return max_logit"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, wide_tile(problem))


def wide_slower(problem: Problem) -> str | None:
    """Returns why to skip the forward for head dims above 256 for the portable one, or None to use it."""
    x = problem
    is_narrow = max(x.q.shape[-1], x.v.shape[-1]) <= _WIDE_FROM
    if is_narrow and 2 * x.longest_q > ROWS.value and max(x.longest_q, x.longest_kv) > _NARROW_UP_TO:
        return f"its tiles have 512 columns, and up to {_WIDE_FROM} it was faster with up to {_NARROW_UP_TO} tokens"
    return None


def _unsupported_device(problem: Problem) -> str | None:
    return None if capability_of(problem.device) == 90 else "it is written for Hopper, sm_90"


def _unsupported_tile(problem: Problem, tile: HopperTile) -> str | None:
    return unsupported_block_mask(problem, tile[2:4]) or unsupported_pages(problem, tile.block_n)


def forward_slower(problem: Problem) -> str | None:
    """Returns why to skip the forward for the portable one, or None to use it."""
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


def backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the two-kernel backward cannot run this problem; None: it can."""
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
    """Returns why to skip the two-kernel backward for the portable one, or None to use it."""
    x = problem
    tile = backward_tile(x)
    # A program of dk and dv processes all query heads of its keys, so few key heads mean too few programs.
    return slower_for_few_keys(x, tile.keys) or slower_by_row(x, tile)


def fused_tile(problem: Problem) -> HopperFusedTile:
    """Returns the committed tile; random numbers for dropout need registers, like modified scores."""
    x = problem
    kind = "modified" if x.dropout_p > 0 else mask_class(x)[0]
    length, is_grouped = max(x.longest_q, x.longest_kv), x.group_size > 1
    dims = x.q.shape[-1], x.v.shape[-1]
    return select_hopper_fused_tile(*dims, kind, length, has_lengths=x.has_lengths, is_grouped=is_grouped)


def fused_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward cannot run this problem; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    return backward_unsupported(x, out, dout)


def _slower_by_window(problem: Problem, narrowest: int) -> str | None:
    """Returns the reason if a fused backward was not measured with such a narrow window; None: it was, or there is none."""
    is_narrow = problem.window_left is not None and problem.window_left < narrowest - 1
    return f"windows of fewer than {narrowest} keys were not measured to be faster" if is_narrow else None


def fused_192_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward for head dims above 128 cannot run this problem; None: it can."""
    x, tile = problem, HOPPER_FUSED_192
    if not 128 < x.q.shape[-1] <= tile.head_dim_qk or x.v.shape[-1] > tile.head_dim_v:
        return f"it takes head dims of q and k from 136 to {tile.head_dim_qk}, and of v up to {tile.head_dim_v}"
    if x.is_modified or x.dropout_p > 0:
        return "it supports only scaled scores with an optional band: no bias, mod, softcap, dropout or block mask"
    return backward_unsupported(x, out, dout)


def fused_192_slower(problem: Problem) -> str | None:
    """Returns why to skip the fused backward for head dims above 128 for the two-kernel one, or None to use it."""
    x = problem
    return _slower_by_window(x, _NARROWEST_192) or slower_for_few_keys(x, KEYS) or slower_by_row(x, HOPPER_FUSED_192)


def fused_slower(problem: Problem) -> str | None:
    """Returns why to skip the fused backward, or None to use it."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    if x.bias is not None:
        return "it was not measured with a bias"
    by_window = _slower_by_window(x, _NARROWEST)
    return by_window or slower_for_few_keys(x, KEYS) or slower_by_row(x, fused_tile(x)) or _slower_while_short(x)


def _slower_while_short(problem: Problem) -> str | None:
    """Returns why to skip the fused backward for a short causal call on this device, or None to use it."""
    x = problem
    longest = max(x.longest_q, x.longest_kv)
    if mask_class(x)[0] != "causal" or x.dropout_p > 0 or longest >= 1024:
        return None
    if has_large_l2(x.device):
        least, scope = LEAST_CAUSAL_LARGE_L2, "on this device"
    elif x.has_lengths:
        least, scope = LEAST_CAUSAL_PACKED, "on this device in packed batches"
    else:
        least, scope = LEAST_CAUSAL, "on this device"
    tokens = least.tokens if x.group_size == 1 else least.grouped_tokens
    if longest < tokens:
        return (
            f"{scope} it was measured to be faster for causal calls from {tokens} tokens on, and the longest sequence has {longest}"
        )
    return None if _flops(x) >= least.flops else _LITTLE_WORK
