"""The launch of the kernels for lists of keys on sm_90."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import launch
from flexattn.kernels_triton.sparse.conditions import widths
from flexattn.kernels_triton.sparse.gathering import Arguments, SparseMeta
from flexattn.kernels_triton.sparse.lists import has_no_queries, key_lists, programs_of

_REGISTERS = 216  # registers of a consumer's thread


def sparse_meta(problem: Problem, tile: Tile, out: Tensor) -> Any:
    """Returns the `SparseMeta` of a launch."""
    x = problem
    qk0, qk1, v0 = widths(x)
    return SparseMeta(
        **x.features._asdict(),
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HEAD_DIM_QK=x.q.shape[-1],
        HEAD_DIM_V=x.v.shape[-1],
        QK0=qk0,
        QK1=qk1,
        V0=v0,
        ALIGN=x.meta(tile, (out,)).ALIGN,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.num_stages,
        REGISTERS=_REGISTERS,
        LAZY=True,
        IS_FP8=False,
    )


def launch_items(kernel: Any, problem: Problem, outputs: tuple[Tensor, Tensor], tile: Tile, items_of_program: int) -> None:
    """Launches a forward whose programs have `items_of_program` items each. outputs: out and lse"""
    x = problem
    out, lse = outputs
    if has_no_queries(x):  # no program writes
        out.zero_()
        lse.fill_(float("-inf"))
        return
    meta = sparse_meta(x, tile, out)
    items = programs_of(x, tile.block_m)
    args = Arguments(inputs=x.inputs(meta), lists=key_lists(x), out=rows(out, meta), lse_ptr=lse, items=items)
    launch(kernel, cdiv(items, items_of_program), x.device, tile, (args, x.kv_block, meta))
    if x.has_padding_q:
        zero_padding(x, out, "q", lse)
