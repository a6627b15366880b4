"""Host side that the 16-bit forwards of sm_90 and sm_100 share: the arguments of one launch, and the work after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.problem import rows as rows_of
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS, Parts, combine_splits
from flexattn.kernels_triton.common.split_plan import PlannedTile, combine_pieces, make_plan
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import BlackwellTile, HopperTile, slots_of_heads
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor, step_of
from flexattn.kernels_triton.gluon.forward_arguments import (
    Cut,
    Descriptors,
    Results,
    SplitKeys,
    Steps,
    forward_arguments,
    forward_meta,
    number_of_tiles,
    with_rows_of,
)
from flexattn.kernels_triton.gluon.pairs import pair_descriptor
from flexattn.kernels_triton.gluon.tile_scheduler import forward_work
from flexattn.kernels_triton.runtime.launch import Tile


class Division(NamedTuple):
    """Numbers that divide a call's work."""

    rows: int  # rows of a consumer
    group: int  # query heads of a tile
    splits: int  # number of KV splits, or BY_LENGTHS
    processors: int


class Outputs(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor | None


class ForwardLaunch(NamedTuple):
    """Arguments of `launch` except the kernel and the device, and a function that launches the work after it."""

    programs: int
    tile: Tile
    arguments: tuple[Any, ...]
    finish: Callable[[], None]


def prepare_forward(problem: Problem, outputs: Outputs, tile: HopperTile | BlackwellTile, division: Division) -> ForwardLaunch:
    """Returns the launch; with a plan, also launches the kernel that makes the plan."""
    x = problem
    out, lse, max_logit = outputs
    rows, group, splits, processors = division
    slots = slots_of_heads(group)
    queries, tiles = tile.block_m // slots, number_of_tiles(x, tile, group)
    planned = PlannedTile(heads=group, queries=queries, seen=queries, keys=tile.block_n, writes_whole=True)
    plan, parts = None, None
    if splits == BY_LENGTHS:
        plan = make_plan(x, planned, processors)
        parts = plan.empty_parts(lse, tile.head_dim_v, x.is_unbounded)
    elif splits > 1:
        parts = Parts.empty(splits, lse, tile.head_dim_v, x.is_unbounded)
    launch_tile = Tile(tile.block_m, tile.block_n, 4, tile.num_stages)
    meta = forward_meta(x, tile, group, Cut(parts is not None, plan is not None), max_logit is not None, rows)
    is_fp32 = out.element_size() == 4
    if plan is not None or ((group < slots or is_fp32) and parts is None):
        meta = with_rows_of(meta, x, launch_tile, out)
    queries_of_consumer, keys = rows // slots, meta.PAGE_ROWS or tile.block_n
    work = forward_work(x, queries, group, has_table=plan is None and tiles * splits > processors)
    if max_logit is not None:
        max_logit.fill_(float("-inf"))
    arguments = forward_arguments(
        x,
        Descriptors(
            q=pair_descriptor(x.q, queries_of_consumer, (meta.QK0, meta.QK1), slots),
            k=pair_descriptor(x.k, keys, (meta.QK0, meta.QK1)),
            v=ragged_descriptor(x.v, keys, tile.head_dim_v),
            out=None if is_fp32 else ragged_descriptor(out, queries_of_consumer, tile.head_dim_v // tile.out_parts, slots),
        ),
        Steps(q=step_of(x.q), k=step_of(x.k), v=step_of(x.v), out=step_of(out)),
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

    def finish() -> None:
        if plan is not None and parts is not None:
            combine_pieces(x, plan, planned, parts, (out, lse))
        elif parts is not None:
            combine_splits(x, parts, out, lse)
        if x.has_padding_q and parts is None:
            zero_padding(x, out, "q", lse)

    programs = processors if plan is not None else min(processors, tiles * splits)
    return ForwardLaunch(programs, launch_tile, (arguments, x.mods, meta), finish)
