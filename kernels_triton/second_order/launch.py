"""Launchers of the kernels for forward-mode and second derivatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem, bias_rows, rows
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile, capability_of
from flexattn.kernels_triton.runtime.launch import launch
from flexattn.kernels_triton.second_order.double_backward import DoubleArguments, _attn_double_backward_kernel
from flexattn.kernels_triton.second_order.tangent import TangentArguments, _attn_tangent_kernel
from flexattn.kernels_triton.second_order.tiles import RowSums, Tangents, tile_for


class Along(NamedTuple):
    """Tangents of the inputs, in their shapes; q's, k's and v's with a contiguous last dim."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    softmax_offset: Tensor | None = None


class Incoming(NamedTuple):
    """The forward's lse, and for a double backward the gradients of out and lse."""

    lse: Tensor
    dout: Tensor | None = None
    dlse: Tensor | None = None


class SecondGradients(NamedTuple):
    """The derivatives of <along, gradients> for q, k, v and softmax_offset, of which the last is fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_offset: Tensor | None


def tile_of(problem: Problem) -> Tile:
    width = max(problem.head_dims - problem.v.shape[-1], problem.v.shape[-1])
    return tile_for(capability_of(problem.device), width * problem.q.element_size())


def attention_tangent(problem: Problem, along: Along, incoming: Incoming, tout: Tensor, tile: Tile | None = None) -> RowSums:
    """Writes the tangent of out, given as zeros in out's layout. Returns numbers of each query: `mu_ptr` is the tangent of lse."""
    x, tile = problem, tile or tile_of(problem)
    lse, dout, dlse = incoming
    mu, scale = torch.zeros_like(lse), torch.zeros_like(lse)
    delta, tangent_delta = (None, None) if dout is None else (torch.zeros_like(lse), torch.zeros_like(lse))
    sums = RowSums(mu_ptr=mu, scale_ptr=scale, delta_ptr=delta, tangent_delta_ptr=tangent_delta)
    meta = x.meta(tile, (*along[:3], tout, *(() if dout is None else (dout,))))
    args = TangentArguments(
        inputs=x.inputs(meta),
        tangents=_tangents(along, x.batch, meta),
        lse_ptr=lse,
        dout=None if dout is None else rows(dout, meta),
        dlse_ptr=dlse,
        tout=rows(tout, meta),
        sums=sums,
    )
    programs = cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    if programs:
        launch(_attn_tangent_kernel, programs, x.device, tile, (args, x.mods, meta))
    return sums


def attention_double_backward(
    problem: Problem, along: Along, incoming: Incoming, tout: Tensor, tile: Tile | None = None
) -> tuple[RowSums, SecondGradients]:
    """Returns the results of `attention_tangent`, whose tout it writes too, and the derivatives for the inputs."""
    x, tile = problem, tile or tile_of(problem)
    assert incoming.dout is not None
    sums = attention_tangent(x, along, incoming, tout, tile)
    hq, hk, hv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v))
    blocks = cdiv(x.longest_q, tile.block_m)
    dsink = None
    if x.softmax_offset is not None:
        dsink = x.softmax_offset.new_zeros((x.num_heads, x.batch * blocks), dtype=torch.float32)
    meta = x.meta(tile, (*along[:3], incoming.dout, hq, hk, hv))
    args = DoubleArguments(
        inputs=x.inputs(meta),
        tangents=_tangents(along, x.batch, meta),
        lse_ptr=incoming.lse,
        dout=rows(incoming.dout, meta),
        sums=sums,
        hq=rows(hq, meta),
        hk=rows(hk, meta),
        hv=rows(hv, meta),
        dsink_ptr=dsink,
        programs_of_queries=blocks * x.num_heads * x.batch,
    )
    programs = args.programs_of_queries + cdiv(x.longest_kv, tile.block_n) * x.num_heads_kv * x.batch
    if programs:
        launch(_attn_double_backward_kernel, programs, x.device, tile, (args, x.mods, meta))
    return sums, SecondGradients(hq, hk, hv, None if dsink is None else dsink.sum(1))


def _tangents(along: Along, batch: int, meta: object) -> Tangents:
    q, k, v = (rows(t, meta) for t in along[:3])  # type: ignore[arg-type]
    return Tangents(q=q, k=k, v=v, bias=bias_rows(along.bias, batch), sink_ptr=along.softmax_offset)
