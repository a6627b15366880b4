"""Derivatives of attention along a direction, and of its gradients: plain torch in blocks of query rows, in linear memory.

Let s be the scores, p = exp(s - lse), o = p v, do and dlse the gradients of o and lse, and t_x the tangent of an input x. Then

    t_s = c (t_q k^T + q t_k^T) + t_bias        mu = rowsum(p t_s) = t_lse
    t_o = (p (t_s - mu)) v + p t_v

The backward returns g = J^T (do, dlse), the gradient of L = <do, o> + <dlse, lse>. Let t be the gradients of dq, dk and dv. Then
<t, g> is the derivative of L along t. So its gradient to do and dlse is (t_o, t_lse), and its gradient to the inputs is H t, with
the Hessian H of L. As H is symmetric, H t is the derivative of the backward along t:

    t_p = p (t_s - mu)                          delta = rowsum(do o) - dlse
    t_ds = t_p (do v^T - delta) + p (do t_v^T - t_delta)
    t_dq = c (t_ds k + ds t_k)                  t_dk = c (t_ds^T q + ds^T t_q)                 t_dv = t_p^T do

This module lets autograd derive these formulas from `reference.attend`, block by block: so they hold for each mask, bias, sink and
score_mod. The kernels compute them as they are written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph

from flexattn.dispatch import eager_backend, reference
from flexattn.dispatch.mod_program import Capture
from flexattn.dispatch.pages import without_pages
from flexattn.dispatch.spec import AttentionSpec, Operands, empty_outputs

T = TypeVar("T")

GRAPHS = 4  # a block's graph of second order takes this many times the memory of the graph of a backward

Along = Sequence[Tensor | None]  # one for each tensor of `inputs`: a tangent, or None for zero


def _as_written(function: Callable[..., T]) -> Callable[..., T]:
    """Runs a function of a spec and operands with autograd, outside of autocast and inference mode."""

    @functools.wraps(function)
    def wrapper(spec: AttentionSpec, x: Operands, *rest: Any) -> T:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.q.device.type, enabled=False):
            return function(*without_pages(spec, x), *rest)

    return wrapper


class SecondMod(NamedTuple):
    """The graphs of a score_mod's second derivatives, of the program's captures and then of the captures' tangents."""

    captures: tuple[Capture, ...]
    derivative: Graph  # `Program.derivative` for the captures that need a gradient here
    tangent: Graph  # the tangent of the modified score, with the further argument TANGENT
    bend: Graph | None  # the derivative of `tangent`; None: 0


class Second(NamedTuple):
    """The derivatives of <along, gradients>: with respect to dout and dlse, and to each of `inputs` (None if it is not wanted)."""

    ddout: Tensor
    ddlse: Tensor
    inputs: tuple[Tensor | None, ...]


def inputs(x: Operands) -> tuple[Tensor | None, ...]:
    """Returns the tensors that may have a tangent and a gradient: q, k, v, bias, softmax_offset and the captures of mods."""
    return (x.q, x.k, x.v, x.bias, x.softmax_offset, *x.mod_tensors)


@_as_written
def tangent(spec: AttentionSpec, x: Operands, along: Along) -> tuple[Tensor, Tensor]:
    """Returns the derivatives of out and lse along the tangents of the inputs."""
    out, lse, _ = empty_outputs(spec, x._replace(out=None))
    out, lse = out.zero_(), lse.zero_()
    for block in _blocks(spec, x, along, lse.dtype):
        leaves, tangents = block.moving()
        with torch.enable_grad():
            block_out, block_lse = block.attend(spec, x)
            seeds = torch.zeros_like(block_out, requires_grad=True), torch.zeros_like(block_lse, requires_grad=True)
            grads = _grads((block_out, block_lse), leaves, seeds)
        found = _derivatives(grads, tangents, seeds)
        block.rows_of(spec, out).copy_(found[0])
        block.lse_of(spec, lse).copy_(found[1])
    return out, lse


@_as_written
def gradients(
    spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the wanted `inputs`, as a backward does that differentiates each floating-point tensor."""
    sums = _Sums(spec, x, wanted)
    for block in _blocks(spec, x, (None,) * len(wanted), sums.dtype):
        outputs, seeds = block.differentiated(spec, x, dout, dlse)
        targets, leaves = sums.targets(spec, block)
        for target, grad in zip(targets, torch.autograd.grad(outputs, leaves, seeds, allow_unused=True), strict=True):
            if grad is not None:
                target += grad
    return sums.results(spec, x)


@_as_written
def double_backward(
    spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None, along: Along, wanted: Sequence[bool]
) -> Second:
    """Returns the derivatives of the backward. along: the gradients of its results. wanted: of `inputs`, those with a gradient."""
    sums = _Sums(spec, x, wanted)
    ddout = torch.zeros_like(dout, memory_format=torch.contiguous_format)
    _, lse, _ = empty_outputs(spec, x._replace(out=None))
    ddlse = lse.zero_()
    for block in _blocks(spec, x, along, sums.dtype):
        with torch.enable_grad():
            outputs, seeds = block.differentiated(spec, x, dout, dlse)
            seeds = [eager_backend.as_leaf(seed, seed.dtype) for seed in seeds]
            moving, tangents = block.moving()
            grads = _grads(outputs, moving, seeds)
        targets, leaves = sums.targets(spec, block)
        found = _derivatives(grads, tangents, (*seeds, *leaves))
        block.rows_of(spec, ddout).copy_(found[0])
        block.lse_of(spec, ddlse).copy_(found[1])
        for target, grad in zip(targets, found[2:], strict=True):
            target += grad
    return Second(ddout, ddlse, sums.results(spec, x))


def _grads(outputs: Sequence[Tensor], leaves: Sequence[Tensor], seeds: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the leaves, with their graph."""
    return torch.autograd.grad(outputs, leaves, seeds, create_graph=True, allow_unused=True) if leaves else ()


def _derivatives(grads: Sequence[Tensor | None], tangents: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the derivatives of <tangents, grads> with respect to the leaves."""
    pairs = [(grad, t) for grad, t in zip(grads, tangents, strict=True) if grad is not None and grad.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, leaves))
    return torch.autograd.grad(
        [grad for grad, _ in pairs], leaves, [t for _, t in pairs], allow_unused=True, materialize_grads=True
    )


class _Block(NamedTuple):
    """A block of query rows: its leaves for autograd, and their tangents."""

    sequences: reference.Sequences
    rows: range
    cols: range
    leaves: reference.Differentiable
    tangents: tuple[Tensor | None, ...]

    @property
    def tokens(self) -> range:
        return self.sequences.q[self.rows.start : self.rows.stop]

    def attend(self, spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor]:
        return reference.attend(spec, x, self.sequences, self.rows, self.cols, self.leaves)[:2]

    def differentiated(
        self, spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """Returns out and lse with their graph, and copies of their gradients."""
        with torch.enable_grad():
            out, lse = self.attend(spec, x)
        seed_lse = torch.zeros_like(lse, requires_grad=False) if dlse is None else _constant(self.lse_of(spec, dlse), lse.dtype)
        return (out, lse), [_constant(self.rows_of(spec, dout), out.dtype), seed_lse]

    def moving(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the leaves that have a tangent, and the tangents."""
        pairs = [(leaf, t) for leaf, t in zip(_flat(self.leaves), self.tangents, strict=True) if leaf is not None and t is not None]
        return [leaf for leaf, _ in pairs], [t for _, t in pairs]

    def rows_of(self, spec: AttentionSpec, t: Tensor) -> Tensor:
        """Returns the block's view of a tensor in q's format."""
        return reference.token_view(t, spec.q_format, self.sequences.batch, self.tokens)

    def lse_of(self, spec: AttentionSpec, lse: Tensor) -> Tensor:
        return reference.lse_view(lse, spec.q_format, self.sequences.batch, self.tokens)


class _Sums:
    """Sums of gradients over blocks, in the dtype of the arithmetic, for the wanted inputs."""

    def __init__(self, spec: AttentionSpec, x: Operands, wanted: Sequence[bool]) -> None:
        self.dtype = torch.float64 if spec.dtype is torch.float64 else torch.float32
        self.wanted = wanted
        whole = reference.Differentiable.of(x)
        self.whole = whole.map(lambda t: torch.zeros(t.shape, dtype=self.dtype, device=t.device))

    def targets(self, spec: AttentionSpec, block: _Block) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the block's views of the sums, and the leaves that they are the gradients of."""
        views = _flat(reference.slice_block(spec, self.whole, block.sequences, block.rows, block.cols))
        every = zip(views, _flat(block.leaves), self.wanted, strict=True)
        pairs = [(view, leaf) for view, leaf, wanted in every if wanted and view is not None and leaf is not None]
        return [view for view, _ in pairs], [leaf for _, leaf in pairs]

    def results(self, spec: AttentionSpec, x: Operands) -> tuple[Tensor | None, ...]:
        every = zip(_flat(self.whole), inputs(x), self.wanted, strict=True)
        return tuple(total.to(t.dtype) if wanted and total is not None and t is not None else None for total, t, wanted in every)


def _flat(tensors: reference.Differentiable) -> tuple[Tensor | None, ...]:
    return (*tensors[:-1], *tensors.mod_tensors)


def _blocks(spec: AttentionSpec, x: Operands, along: Along, dtype: torch.dtype) -> Iterator[_Block]:
    """Yields the blocks of a call, whose leaves require gradients."""
    whole = reference.Differentiable.of(x)
    # A tangent of zeros has a place that `slice_block` can cut, and no memory.
    zeros = [None if t is None else t.new_zeros(()).expand(t.shape) for t in inputs(x)]
    filled = [zero if t is None else t for t, zero in zip(along, zeros, strict=True)]
    q, k, v, bias, offset, *captures = filled
    directions = reference.Differentiable(q, k, v, bias, offset, tuple(captures))  # type: ignore[arg-type]
    for sequences, rows, cols in eager_backend.blocks(spec, x, GRAPHS * dtype.itemsize):
        leaves = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: eager_backend.as_leaf(t, dtype))
        parts = _flat(reference.slice_block(spec, directions, sequences, rows, cols))
        tangents = (None if t is None or part is None else _constant(part, dtype) for t, part in zip(along, parts, strict=True))
        yield _Block(sequences, rows, cols, leaves, tuple(tangents))


def _constant(t: Tensor, dtype: torch.dtype) -> Tensor:
    return eager_backend.as_leaf(t, dtype).requires_grad_(False)
