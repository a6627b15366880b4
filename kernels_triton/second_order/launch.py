"""Launchers of the kernels for forward-mode and second derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_triton.common.capture_sums import sum_addends
from flexattn.kernels_triton.common.problem import Along, Meta, Problem, bias_rows, rows
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import Tile, capability_of, num_processors
from flexattn.kernels_triton.runtime.launch import launch
from flexattn.kernels_triton.second_order import double_backward, score_gradients
from flexattn.kernels_triton.second_order.tangent import TangentArguments, _attn_tangent_kernel
from flexattn.kernels_triton.second_order.tiles import Bends, RowSums, Tangents, Tiles, tiles_for


class Incoming(NamedTuple):
    """The forward's lse, and for a double backward the gradients of out and lse."""

    lse: Tensor
    dout: Tensor | None = None
    dlse: Tensor | None = None


class Repeated(NamedTuple):
    """A forward that was computed again, in 16 bits, with the tangents of its results. They are in one layout."""

    out: Tensor
    tout: Tensor
    tlse: Tensor


class Wanted(NamedTuple):
    """The gradients besides those of q, k, v and softmax_offset, which each call gets.

    captures: for each captured tensor with a gradient, zeros in its shape, contiguous. reached, bent: the captures to which
    `Mods.accumulate` and `Bends.accumulate` add, by their index in `captures`.
    """

    bias: bool = False
    captures: Sequence[Tensor] = ()
    reached: tuple[int, ...] = ()
    bent: tuple[int, ...] = ()
    deterministic: bool = False


class SecondGradients(NamedTuple):
    """The derivatives of <along, gradients>; softmax_offset's and bias's are fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_offset: Tensor | None
    bias: Tensor | None


class Modified(NamedTuple):
    """A problem, and the derivatives of its score_mod along tangents, if it has one."""

    problem: Problem
    bends: Bends | None = None


def tiles_of(problem: Problem) -> Tiles:
    """Returns the kernels' tiles for a problem."""
    x = problem
    is_plain = not (x.is_loaded or x.is_modified)
    tiles = tiles_for(capability_of(x.device), max(x.q.shape[-1], x.v.shape[-1]), x.q.element_size(), is_plain)
    return Tiles(*map(x.cut, tiles))


def attention_tangent(call: Modified, along: Along, incoming: Incoming, tout: Tensor, tile: Tile | None = None) -> RowSums:
    """Writes the tangent of out into `tout`, in out's layout. Returns numbers of each query: `mu_ptr` is the tangent of lse."""
    x = call.problem
    tile = tile or tiles_of(x).tangent
    lse, dout, dlse = incoming
    if x.has_lengths:
        tout.zero_()
    mu, scale = _blank(x, lse), _blank(x, lse)
    delta, tangent_delta = (None, None) if dout is None else (_blank(x, lse), _blank(x, lse))
    sums = RowSums(mu_ptr=mu, scale_ptr=scale, delta_ptr=delta, tangent_delta_ptr=tangent_delta)
    meta = x.meta(tile, (*along[:3], tout, *(() if dout is None else (dout,))))
    args = TangentArguments(
        inputs=x.inputs(meta),
        tangents=_tangents(along, x.batch, meta),
        lse_ptr=lse,
        dout=None if dout is None else rows(dout, meta),
        dlse_ptr=dlse,
        tout=rows(tout, meta),
        lists=x.lists("kv"),
        sums=sums,
    )
    programs = cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
    launch(_attn_tangent_kernel, programs, x.device, tile, (args, call.bends, x.mods, meta))
    return sums


def attention_double_backward(
    call: Modified, along: Along, incoming: Incoming, tout: Tensor | Repeated, wanted: Wanted, tiles: Tiles | None = None
) -> tuple[RowSums, SecondGradients]:
    """Returns the results of `attention_tangent`, whose tout it writes too, and the derivatives for the inputs.

    tout: memory for `attention_tangent`, or the results of the forward that was computed again in its place.
    """
    x = call.problem
    tiles = tiles or tiles_of(x)
    dout = incoming.dout
    assert dout is not None
    repeated = None
    if isinstance(tout, Tensor):
        sums = attention_tangent(call, along, incoming, tout, tiles.tangent)
    else:
        repeated = tout
        sums = RowSums(repeated.tlse, None, _blank(x, incoming.lse), _blank(x, incoming.lse))
    hq, hk, hv = (_blank(x, t) for t in (x.q, x.k, x.v))
    blocks = cdiv(x.longest_q, tiles.queries.block_m)
    dsink = None
    if x.softmax_offset is not None:
        dsink = x.softmax_offset.new_zeros((x.num_heads, x.batch * blocks), dtype=torch.float32)

    def known_of(tile: Tile) -> tuple[double_backward.Known, Meta]:
        meta = x.meta(tile, (*along[:3], dout, hq, hk, hv, *(repeated or ())[:2]))
        tangents = _tangents(along, x.batch, meta)
        return double_backward.Known(
            inputs=x.inputs(meta), tangents=tangents, lse_ptr=incoming.lse, dout=rows(dout, meta), sums=sums
        ), meta

    known, meta = known_of(tiles.queries)
    written = repeated and double_backward.Written(rows(repeated.out, meta), rows(repeated.tout, meta), incoming.dlse)
    by_queries = double_backward.QueriesArguments(known, x.lists("kv"), written, rows(hq, meta), dsink)
    programs = blocks * x.num_heads * x.batch
    launch(double_backward._attn_double_queries_kernel, programs, x.device, tiles.queries, (by_queries, call.bends, x.mods, meta))
    has_captures = bool(programs and (wanted.reached or wanted.bent))
    known, meta = known_of(tiles.keys)
    by_keys = double_backward.KeysArguments(known, x.lists("q"), rows(hk, meta), rows(hv, meta))
    programs = cdiv(x.longest_kv, tiles.keys.block_n) * x.num_heads_kv * x.batch
    launch(double_backward._attn_double_keys_kernel, programs, x.device, tiles.keys, (by_keys, call.bends, x.mods, meta))
    if wanted.bias or has_captures:
        known, meta = known_of(tiles.scores)
    bias = _bias_gradient(call, known, meta, tiles.scores) if wanted.bias else None
    if has_captures:
        _capture_gradients(call, known, wanted, meta, tiles.scores)
    return sums, SecondGradients(hq, hk, hv, None if dsink is None else dsink.sum(1), bias)


def _bias_gradient(call: Modified, known: double_backward.Known, meta: Meta, tile: Tile) -> Tensor:
    """Returns the derivative for the bias, fp32 in its shape. Its last dim spans the keys."""
    x = call.problem
    assert x.bias is not None
    bias_b, bias_h, bias_q, bias_kv = x.bias.shape
    tiles = bias_b * bias_h * cdiv(bias_q, tile.block_m) * cdiv(bias_kv, tile.block_n)
    over = (x.batch // max(1, bias_b)) * (x.num_heads // bias_h) * (1 if bias_q > 1 else cdiv(x.longest_q, tile.block_m))
    num_splits = max(1, min(over, 2 * num_processors(x.device) // max(1, tiles)))
    parts = torch.zeros((num_splits, *x.bias.shape), dtype=torch.float32, device=x.device)
    args = score_gradients.BiasArguments(
        known=known, kinds=x.kinds(), parts_ptr=parts, b=bias_b, h=bias_h, q=bias_q, kv=bias_kv, num_splits=num_splits
    )
    if tiles:
        launch(
            score_gradients._attn_double_bias_kernel,
            tiles * num_splits,
            x.device,
            tile,
            (args, bias_q > 1, call.bends, x.mods, meta),
        )
    return parts.sum(0) if num_splits > 1 else parts[0]


def _capture_gradients(call: Modified, known: double_backward.Known, wanted: Wanted, meta: Meta, tile: Tile) -> None:
    """Writes the derivatives for the captured tensors that a kernel adds to."""
    x = call.problem
    both = sorted({*wanted.reached, *wanted.bent})

    def run(mode: str, sums: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        def of(tensors: Sequence[Tensor], captures: tuple[int, ...]) -> tuple[Tensor, ...]:
            return tuple(tensors[both.index(i)] for i in captures) if tensors else ()

        args = score_gradients.CaptureArguments(
            known=known,
            lists=x.lists("kv"),
            sums=of(sums, wanted.reached),
            scales=of(scales, wanted.reached),
            bent_sums=of(sums, wanted.bent),
            bent_scales=of(scales, wanted.bent),
        )
        programs = cdiv(x.longest_q, tile.block_m) * x.num_heads * x.batch
        launch(score_gradients._attn_double_captures_kernel, programs, x.device, tile, (args, mode, call.bends, x.mods, meta))

    addends = 2 * x.batch * x.num_heads * x.longest_q * x.longest_kv
    sum_addends(run, [wanted.captures[i] for i in both], wanted.deterministic, addends)


def _blank(x: Problem, like: Tensor) -> Tensor:
    """Returns contiguous memory for a result: zeros if there may be rows without a token, which no kernel writes."""
    if x.has_lengths:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _tangents(along: Along, batch: int, meta: Meta) -> Tangents:
    q, k, v = (rows(t, meta) for t in along[:3])
    return Tangents(q=q, k=k, v=v, bias=bias_rows(along.bias, batch), sink_ptr=along.softmax_offset)
