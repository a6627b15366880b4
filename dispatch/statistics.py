"""Statistics of the softmax weights of a call, by Triton kernels or in plain torch, in linear memory.

With p the weights before dropout, and i a query and j a key of a head: max_scores is the largest logit of i, entropy is
-sum_j p_ij log(p_ij), column_sums is sum_i p_ij, and row_weights has p_ij for chosen i. A sink takes a share of each row's weight,
and is no term of any sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import eager_backend, triton_backend
from flexattn.dispatch.pages import with_cu_seqlens, without_pages
from flexattn.dispatch.spec import AttentionSpec, Operands, batch_size


class Statistics(NamedTuple):
    """The statistics in lse's dtype, empty if they are not wanted."""

    max_scores: Tensor  # lse's shape
    entropy: Tensor  # lse's shape
    column_sums: Tensor  # [b, h, skv]; [h, total_kv] for keys in thd
    row_weights: Tensor  # [b, h, n, longest_kv]


class Wanted(NamedTuple):
    rows: Tensor | None  # int32 [b, n] or [n], the queries whose weights are wanted
    max_scores: bool
    entropy: bool
    column_sums: bool


def empty_statistics(spec: AttentionSpec, x: Operands, lse: Tensor, wanted: Wanted) -> Statistics:
    """Returns memory for the statistics, filled with the values of queries and keys that take no part."""
    none = (0,)
    batch = batch_size(spec, x)
    if x.page_table is not None:
        columns: tuple[int, ...] = (batch, spec.num_heads, x.max_seqlen_kv)
    elif spec.kv_format == "thd":
        columns = (spec.num_heads, x.k.shape[0])
    else:
        columns = (batch, spec.num_heads, x.k.shape[spec.kv_format.index("s")])
    rows = none if wanted.rows is None else (batch, spec.num_heads, wanted.rows.shape[-1], x.max_seqlen_kv)
    return Statistics(
        max_scores=lse.new_full(lse.shape if wanted.max_scores else none, float("-inf")),
        entropy=lse.new_zeros(lse.shape if wanted.entropy else none),
        column_sums=lse.new_zeros(columns if wanted.column_sums else none),
        row_weights=lse.new_zeros(rows),
    )


def triton_unsupported(spec: AttentionSpec, request: str) -> str | None:
    """Returns why Triton kernels do not compute the statistics of a call, or None if they do."""
    if request == "eager":
        return "backend='eager' is asked for"
    return triton_backend.unsupported(spec._replace(page_size=0), "forward")


def statistics(spec: AttentionSpec, request: str, x: Operands, lse: Tensor, wanted: Wanted) -> Statistics:
    """Returns the statistics of a call without dropout. lse: the forward's. request: the call's backend."""
    found = empty_statistics(spec, x, lse, wanted)
    if spec.page_size:  # no kernel of statistics reads pages. The copy is made on the device, so a CUDA graph can capture it
        spec, x = without_pages(spec, x)
    if triton_unsupported(spec, request) is not None:
        _in_torch(spec, with_cu_seqlens(x, (spec.q_format, spec.kv_format)), wanted, found)
        return found
    from flexattn.kernels_triton.portable.weight_statistics import Outputs, weight_statistics

    flags = (wanted.max_scores, wanted.entropy, wanted.column_sums, wanted.rows is not None)
    outputs = Outputs(*(t if flag else None for t, flag in zip(found, flags, strict=True)))
    rows = wanted.rows
    # an index beyond 31 bits is in no sequence, and -1 is not either
    chosen = None if rows is None else rows.clamp(-1, 2**31 - 1).int().expand(batch_size(spec, x), -1).contiguous()
    weight_statistics(triton_backend.to_problem(spec, x), lse.contiguous(), outputs, chosen)
    return found


def _in_torch(spec: AttentionSpec, x: Operands, wanted: Wanted, found: Statistics) -> None:
    """Fills the statistics, in blocks of queries."""
    from flexattn.dispatch import reference  # here, as in the eager backend

    dtype = found.max_scores.dtype
    whole = reference.Differentiable.of(x)
    with torch.no_grad(), torch.autocast(x.q.device.type, enabled=False):
        for sequences, rows, cols in eager_backend.blocks(spec, x, dtype.itemsize):
            block = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: t.to(dtype))
            scores = reference.masked_logits(spec, x, sequences, rows, cols, block)
            weights, largest = _softmax(scores, reference.sink_of(spec, block))
            queries, keys = sequences.q[rows.start : rows.stop], sequences.kv[cols.start : cols.stop]
            if wanted.max_scores:
                reference.lse_view(found.max_scores, spec.q_format, sequences.batch, queries).copy_(largest)
            if wanted.entropy:
                entropy = -torch.xlogy(weights, weights).sum(-1)
                reference.lse_view(found.entropy, spec.q_format, sequences.batch, queries).copy_(entropy)
            if wanted.column_sums:
                columns = reference.lse_view(found.column_sums, spec.kv_format, sequences.batch, keys)
                columns += weights.sum(2)
            if wanted.rows is not None:
                batch = slice(sequences.batch.start, sequences.batch.stop)
                chosen = wanted.rows.long().expand(found.row_weights.shape[0], -1)[batch] - rows.start
                is_here = (chosen >= 0) & (chosen < len(rows))
                place = chosen.where(is_here, 0)[:, None, :, None].expand(-1, spec.num_heads, -1, len(cols))
                own = weights.gather(2, place).masked_fill(~is_here[:, None, :, None], 0.0)
                found.row_weights[batch, ..., cols.start : cols.stop] += own


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the weights of the keys, 0 in a row that sees none, and each row's largest score. sink: [h, 1]."""
    largest = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], float("-inf"))
    if sink is not None:
        whole = torch.cat((scores, sink[..., None].expand(*scores.shape[:-1], 1)), -1)
        return whole.softmax(-1)[..., :-1], largest
    return scores.softmax(-1).masked_fill((largest == float("-inf"))[..., None], 0.0), largest
