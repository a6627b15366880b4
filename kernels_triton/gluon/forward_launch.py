"""Host side that forwards in Gluon share: the arguments of a launch, and for sm_90 and sm_100 the work after it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.kernels_triton.common.plan_pieces import Plan
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.split_kv import PlannedTile, combine_parts, number_of_splits, split_results, tiles_and_room
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import HopperTile, slots_of_heads, split_head_dim
from flexattn.kernels_triton.gluon.conditions import heads_of_a_tile, rows_of_a_copy
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor, step_of
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Cut, Descriptors, ForwardMeta, Results, Steps
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import pair_descriptor
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import forward_work
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import launch


class Outputs(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor | None


def launch_forward(
    kernel: Any,
    problem: Problem,
    outputs: Outputs,
    tile: HopperTile,
    rows: int,
    group: int | None = None,
    splits: int | None = None,
) -> None:
    """Launches a forward, and with a split of keys also the kernels before and after it.

    rows: of a consumer. group: query heads of a tile, a divisor of those of a key head; None: `heads_of_a_tile`. splits: number of
    KV splits, or BY_LENGTHS; None: `number_of_splits`.
    """
    x = problem
    out, lse, max_logit = outputs
    group = heads_of_a_tile(x, tile) if group is None else group
    tiles, processors = tiles_and_room(x, tile, group)
    splits = number_of_splits(x, tiles, processors) if splits is None else splits
    is_wide = tile.head_dim_qk > 256
    slots = slots_of_heads(group)
    queries = tile.block_m // slots
    planned = PlannedTile(heads=group, queries=queries, seen=queries, keys=tile.block_n, writes_whole=True)
    plan, parts = split_results(x, planned, splits, processors, lse, tile.head_dim_v)
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    meta = forward_meta(x, tile, group, Cut(parts is not None, plan is not None), max_logit is not None, rows)
    if is_wide:
        meta = meta._replace(SKIPS=False, UNMASKED_LOOP=False, IS_LATENT=x.is_latent)
    is_fp32 = out.element_size() == 4
    if is_wide or plan is not None or ((group < slots or is_fp32) and parts is None):
        # out is stored from registers
        meta = meta._replace(WIDTH_V=x.v.shape[-1], ALIGN=x.meta(launch_tile, (out,)).ALIGN)
    queries_of_consumer, keys = rows // slots, meta.PAGE_ROWS or tile.block_n
    work = forward_work(x, queries, group, has_table=plan is None and tiles * splits > processors)
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    k, out_columns = pair_descriptor(x.k, keys, (meta.QK0, meta.QK1)), meta.VALUES0 // tile.out_parts
    has_parts = meta.VALUES1 > 0
    arguments = forward_arguments(
        x,
        Descriptors(
            q=pair_descriptor(x.q, queries_of_consumer, (meta.QK0, meta.QK1), slots),
            k=k,
            v=k.first if meta.IS_LATENT else ragged_descriptor(x.v, keys, meta.VALUES0),
            out=None if is_fp32 or is_wide else ragged_descriptor(out, queries_of_consumer, out_columns, slots),
            v1=ragged_descriptor(x.v, keys, meta.VALUES1) if has_parts else None,
            out1=ragged_descriptor(out, queries_of_consumer, meta.VALUES1, slots) if has_parts and not is_fp32 else None,
        ),
        Steps(q=step_of(x.q), k=step_of(x.k), v=step_of(x.v), out=None if is_wide else step_of(out)),
        Results(
            lse_ptr=lse if parts is None else parts.lse,
            max_logit_ptr=max_logit,
            parts_ptr=None if parts is None else parts.out,
            whole_lse_ptr=None if plan is None else lse,
            out=rows_of(out, meta) if meta.WIDTH_V else None,
        ),
        work,
        SplitKeys(splits if splits > 1 else None, plan),
    )
    programs = processors if plan is not None else min(processors, tiles * splits)
    launch(kernel, programs, out.device, launch_tile, (arguments, x.mods, meta))
    if parts is not None:
        combine_parts(x, parts, (out, lse), plan, planned)
    elif x.has_padding_q:
        zero_padding(x, out, "q", lse)


def _whole_blocks_of_window(problem: Problem, tile: HopperTile, queries: int) -> float:
    """Returns the maximum number of key blocks that all queries of a consumer see completely."""
    x = problem
    if x.window_left is None or x.window_right is None:
        return math.inf
    return (x.window_left + x.window_right + 2 - queries) // tile.block_n


def forward_meta(
    problem: Problem, tile: HopperTile, group: int, cut: Cut, has_max_logit: bool = False, rows: int = ROWS.value
) -> Any:
    """Returns the `ForwardMeta` of a kernel whose consumers have `rows` rows each, of `group` heads."""
    x = problem
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    values = split_head_dim(tile.head_dim_v)
    slots = slots_of_heads(group)
    has_lengths = x.has_lengths
    is_banded = x.window_left is not None or x.window_right is not None
    is_narrow = x.block_mask is None and _whole_blocks_of_window(x, tile, rows // slots) < 2
    has_idle = has_lengths or x.longest_q * slots <= tile.block_m - rows
    return ForwardMeta(
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_MAX_LOGIT=has_max_logit,
        **x.features._asdict(),
        HEADS=group,
        GROUP=slots,
        IS_SPLIT=cut.is_split,
        IS_PLANNED=cut.is_planned,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE_ROWS=rows_of_a_copy(x, tile.block_n),
        QK0=qk0,
        QK1=qk1,
        V0=sum(values),
        VALUES0=values[0],
        VALUES1=values[1],
        STAGES=tile.num_stages,
        CONSUMERS=tile.block_m // rows,
        PINGPONG=tile.pingpong,
        LAZY=tile.is_lazy and not has_max_logit and not x.is_batch_invariant,  # one row decides for the others of its warpgroup
        OUT_PARTS=tile.out_parts,
        REGISTERS=tile.registers,
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or is_banded),
        Q_STAGES=tile.q_stages,
        KEYS1=tile.last_keys,
        UNMASKED_LOOP=(is_banded and not is_narrow) or x.block_mask is not None,
        HAS_CUT_LOOP=is_narrow or x.block_mask is not None,
        NUMBERS=4 + 3 * has_lengths + 2 * cut.is_planned + 6 * (x.block_mask is not None),
        SENDS_LISTS=x.block_mask is not None,
        ASKS_OF_BLOCKS=x.asks_of_blocks(group),
        IS_MODIFIED=x.is_modified,
    )


class SplitKeys(NamedTuple):
    """The number of KV splits, or the plan; None: not split that way."""

    parts: int | None
    plan: Plan | None


def forward_arguments(
    problem: Problem, descriptors: Descriptors | None, steps: Steps | None, results: Results, work: Work, split: SplitKeys
) -> Arguments:
    """Returns a kernel's arguments. descriptors, steps: None for mma.sync."""
    x = problem
    return Arguments(
        descriptors=descriptors,
        steps=steps,
        results=results,
        descales=None,
        work=work,
        num_splits=split.parts,
        plan=split.plan,
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        v_blocks=None,
        pages=x.pages,
        band=x.band,
        scores=x.scores,
        softmax_offset_ptr=x.softmax_offset,
        dropout=x.dropout,
        lists=x.lists("kv"),
    )
