"""Attention in plain torch: the oracle of all tests, and the arithmetic of the eager backend.

`attend` computes one block of query rows against one range of keys. The oracle calls it with all rows and all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import key_lists
from flexattn.dispatch.mod_program import Program, evaluate
from flexattn.dispatch.pages import without_pages
from flexattn.dispatch.philox import dropout_keep, rounded_dropout
from flexattn.dispatch.quantization import dequantize, round_gradient, round_weights
from flexattn.dispatch.spec import AttentionSpec, Band, Gradients, Operands, as_bshd, batch_size, empty_outputs

NEG_INF = float("-inf")
_KEYS = "bnjd", "bnijd"  # the dims of a block's keys; gathered by lists, each query has keys of its own.


class Differentiable(NamedTuple):
    """Tensors that may get a gradient: complete tensors in their formats, or a block of each, as cut by `slice_block`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    softmax_offset: Tensor | None
    mod_tensors: tuple[Tensor, ...]  # all captured tensors. Only floating-point ones may get a gradient.

    @classmethod
    def of(cls, x: Operands) -> Differentiable:
        return cls(x.q, x.k, x.v, x.bias, x.softmax_offset, tuple(x.mod_tensors))

    def map(self, function: Callable[[Tensor], Tensor]) -> Differentiable:
        bias = None if self.bias is None else function(self.bias)
        softmax_offset = None if self.softmax_offset is None else function(self.softmax_offset)
        mod_tensors = tuple(function(t) if t.is_floating_point() else t for t in self.mod_tensors)
        return Differentiable(function(self.q), function(self.k), function(self.v), bias, softmax_offset, mod_tensors)


class Sequences(NamedTuple):
    """Sequences of equal lengths, computed as one batch. `q` and `kv` are the ranges of their tokens in the token dims."""

    batch: range
    q: range
    kv: range
    bias_entry: int | None = None  # the entry of a bias that groups of batch entries share; None: each has its own, or all have one

    def shift(self, band: Band) -> int:
        """Returns the number of the key at which the diagonal meets query 0."""
        return len(self.kv) - len(self.q) if band.bottom_right else 0


def reference_attention(spec: AttentionSpec, x: Operands, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Returns attention computed in `dtype`: (out in q's format, lse [b, h, sq] or [h, total_q], max_logit [h]).

    All operands and all results are in `dtype`. Complete score matrices are computed, so memory is quadratic. out and lse are
    differentiable with respect to q, k, v, bias, softmax_offset and the mods' captures. Padding is never read. Its out is 0 and its
    lse is -inf.

    A `dtype` of 16 bits rounds after every step, as a low-precision eager implementation does. That result is an error budget for
    fused kernels, not an oracle.
    """
    spec, x = without_pages(spec, x)
    whole = Differentiable.of(dequantize(spec, x, dtype)).map(lambda t: t.to(dtype))
    out, lse, _ = empty_outputs(spec, x)
    out, lse = torch.zeros_like(out, dtype=dtype), torch.full_like(lse, NEG_INF, dtype=dtype)
    max_logit = whole.q.new_full((spec.num_heads,), NEG_INF)
    for sequences in split_sequences(spec, x):
        rows, cols = range(len(sequences.q)), range(len(sequences.kv))
        if not sequences.batch or not rows:
            continue
        block = slice_block(spec, whole, sequences, rows, cols)
        block_out, block_lse, row_max = attend(spec, x, sequences, rows, cols, block)
        token_view(out, spec.q_format, sequences.batch, sequences.q).copy_(block_out)
        lse_view(lse, spec.q_format, sequences.batch, sequences.q).copy_(block_lse)
        max_logit = torch.maximum(max_logit, row_max.amax((0, 2)))
    return out, lse, max_logit


def reference_gradients(
    spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Gradients:
    """Returns the gradients of `reference_attention` in `dtype`, from autograd. dout has out's layout, and dlse has lse's."""
    leaves = Differentiable.of(dequantize(spec, x, dtype)).map(lambda t: t.detach().to(dtype, copy=True).requires_grad_())
    with torch.enable_grad():
        out, lse, _ = reference_attention(spec._replace(fp8=None), x._replace(**leaves._asdict()), dtype)
    outputs, seeds = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    outputs = [t.requires_grad_() for t in outputs]  # if there is no query, they have no graph, and the gradients are zeros.
    inputs = {name: leaf for name, leaf in zip(leaves._fields[:-1], leaves[:-1], strict=True) if leaf is not None}
    captured = spec.mods.wanted(leaves.mod_tensors) if spec.mods else ()
    seeds = [t.to(dtype) for t in seeds]
    grads = torch.autograd.grad(outputs, [*inputs.values(), *captured], seeds, allow_unused=True, materialize_grads=True)
    named = dict(zip(inputs, grads, strict=False))
    dmod_tensors = grads[len(inputs) :] or None
    return Gradients(named["q"], named["k"], named["v"], named.get("bias"), named.get("softmax_offset"), dmod_tensors)


def attend(
    spec: AttentionSpec,
    x: Operands,
    sequences: Sequences,
    rows: range,
    cols: range,
    block: Differentiable,
    rounds: bool = False,
    given_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns one block: (out [b, h, r, d_v], lse [b, h, r], row_max [b, h, r]) in the block's dtype. row_max has no gradient.

    rows, cols: the block's query and key positions in its sequences. Every key outside of `cols` must be hidden from every row.
    block: q [b, h, r, d_qk], k [b, h_kv, c, d_qk], v [b, h_kv, c, d_v], bias broadcastable to [b, h, r, c], softmax_offset [h].
    rounds: whether an FP8 spec rounds the operands of inner products to FP8, as its kernels do.
    given_lse: [b, h, r], a constant lse of more keys than these. A weight is then exp(logit - given_lse), and out is the part that
        these keys add to the result. In place of lse, the sum of these weights is returned, with the sink's.
    """
    lists = None
    if x.kv_indices is not None:
        lists = key_lists.listed(x, sequences, rows, spec.kv_block)
        block = block._replace(k=key_lists.gathered(block.k, lists), v=key_lists.gathered(block.v, lists))
    logits = masked_logits(spec, x, sequences, rows, cols, block, rounds, lists)
    row_max = logits.detach().amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], NEG_INF)
    sink = sink_of(spec, block)
    if given_lse is None:
        peak = row_max if sink is None else torch.maximum(row_max, sink.detach())
        peak = peak.masked_fill(peak == NEG_INF, 0.0)
    else:
        peak = given_lse.masked_fill(given_lse == NEG_INF, torch.inf)  # such a row sees no key at all.
    weights = torch.exp(logits - peak[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    # If a row sees nothing, 0 / 1 and an lse set to -inf give an out of 0 and zero gradients. 0 / 0 and log(0) would give NaN.
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    lse = (peak + divisor.log()).masked_fill(empty, NEG_INF)

    if rounds and spec.fp8 is not None and given_lse is None:
        weights = round_weights(weights)
    elif rounds and spec.fp8 is not None:  # rounding is relative to the largest weight of these keys.
        highest = row_max.masked_fill(row_max == NEG_INF, 0.0)
        weights = round_weights(torch.exp(logits - highest[..., None])) * torch.exp(highest - peak)[..., None]
    if spec.dropout:
        assert x.rng_state is not None
        b = torch.arange(sequences.batch.start, sequences.batch.stop, device=block.q.device)
        h = torch.arange(spec.num_heads, device=block.q.device)
        if spec.has_origin:
            batch = slice(sequences.batch.start, sequences.batch.stop)
            keep = dropout_keep(x.rng_state[batch], x.dropout_p, h.expand(len(b), -1), rows, cols)
        else:
            keep = dropout_keep(x.rng_state, x.dropout_p, b[:, None] * spec.num_heads + h, rows, cols)
        weights = weights.masked_fill(~keep, 0.0) / (1 - rounded_dropout(x.dropout_p))
    out = torch.einsum(f"bngij,{_KEYS[lists is not None]}->bngid", _grouped(spec, weights), block.v).flatten(1, 2)
    return (out / divisor[..., None], lse, row_max) if given_lse is None else (out, total, row_max)


def masked_logits(
    spec: AttentionSpec,
    x: Operands,
    sequences: Sequences,
    rows: range,
    cols: range,
    block: Differentiable,
    rounds: bool = False,
    lists: Tensor | None = None,
) -> Tensor:
    """Returns one block's scores for the softmax, [b, h, r, c], with -inf for hidden keys. Its arguments are those of `attend`.

    lists: the result of `key_lists.listed`, if the block's keys and values are gathered by it. Then c counts the entries of a list.
    """
    i = torch.arange(rows.start, rows.stop, device=block.q.device)[:, None]
    j = torch.arange(cols.start, cols.stop, device=block.q.device)
    if lists is not None:
        j = lists.clamp(min=0)
        if j.shape[1] > 1:  # a list for each key head
            j = j.repeat_interleave(spec.group_size, 1)
        if block.bias is not None:
            shape = (*block.bias.shape[:-1], len(cols))
            bias = block.bias.expand(shape).expand(len(sequences.batch), spec.num_heads, len(rows), len(cols))
            block = block._replace(bias=bias.gather(-1, j.expand(-1, spec.num_heads, -1, -1)))
    diagonal = i + sequences.shift(spec.band)

    logits = torch.einsum(f"bngid,{_KEYS[lists is not None]}->bngij", _grouped(spec, block.q * x.softmax_scale), block.k).flatten(
        1, 2
    )
    if rounds and spec.fp8 is not None:
        logits = round_gradient(logits, spec.fp8.grad_dtype)
    if spec.bias_type == "pre_scale_bias":
        assert block.bias is not None
        logits = logits + block.bias * x.softmax_scale
    if spec.softcap:
        logits = x.softcap * torch.tanh(logits / x.softcap)
    b = torch.arange(sequences.batch.start, sequences.batch.stop, device=i.device)
    h = torch.arange(spec.num_heads, device=i.device)
    indices = {"b": b[:, None, None, None], "h": h[:, None, None], "q_idx": i, "kv_idx": j}
    hidden = _hidden(spec, x, sequences, block, indices)
    if lists is not None:
        is_empty = (lists if lists.shape[1] == 1 else lists.repeat_interleave(spec.group_size, 1)) < 0
        hidden = is_empty if hidden is None else hidden | is_empty
    if spec.mods is not None and spec.mods.score is not None:
        inputs = {**indices, **spec.mods.inputs(block.mod_tensors, x.mod_numbers)}
        logits = (_WithGivenDerivative.apply if spec.mods.is_given else _modified)(logits, spec.mods, inputs, hidden)
    if spec.bias_type == "post_scale_bias":
        assert block.bias is not None
        logits = logits + block.bias
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes if x.alibi_slopes.ndim == 1 else x.alibi_slopes[_slice(sequences.batch)]
        logits = logits - slopes.to(logits.dtype)[..., None, None] * (j - diagonal).abs()
    return logits if hidden is None else logits.masked_fill(hidden, NEG_INF)


def _hidden(
    spec: AttentionSpec, x: Operands, sequences: Sequences, block: Differentiable, indices: dict[str, Tensor]
) -> Tensor | None:
    """Returns the keys that are hidden from each query, broadcastable to [b, h, r, c], or None if no key is."""
    i, j = indices["q_idx"], indices["kv_idx"]
    diagonal = i + sequences.shift(spec.band)
    parts = []
    if spec.band.left is not None:
        parts.append(j < diagonal - spec.band.left)
    if spec.band.right is not None:
        parts.append(j > diagonal + spec.band.right)
    masked = None
    if spec.mods is not None and spec.mods.mask is not None:
        captures = spec.mods.inputs(block.mod_tensors, x.mod_numbers)
        masked = ~evaluate(spec.mods.mask, {**indices, **captures}, block.q.dtype)
    if spec.block_size is not None:
        kinds = block_kinds(x.block_mask)
        kinds = kinds if kinds.shape[0] == 1 else kinds[_slice(sequences.batch)]
        kinds = kinds[..., i // spec.block_size[0], j // spec.block_size[1]]
        masked = (kinds == 0) if masked is None else (kinds == 0) | (kinds == 1) & masked
    if masked is not None:
        parts.append(masked)
    return functools.reduce(torch.logical_or, parts) if parts else None


def _modified(logits: Tensor, program: Program, inputs: dict[str, Any], hidden: Tensor | None) -> Tensor:
    """Applies score_mod to every score. A hidden score gets no gradient, even if its derivative is infinite."""
    assert program.differentiable is not None

    def guard(t: Tensor) -> Tensor:
        if hidden is None or not (t.requires_grad and torch.is_grad_enabled()):
            return t
        t = t.expand(logits.shape)  # the hook must see the gradient before it is summed over broadcast dims.
        t.register_hook(lambda gradient: gradient.masked_fill(hidden, 0.0))  # type: ignore[no-untyped-call]
        return t

    scores = {**inputs, "score": guard(logits)}
    out: Tensor = evaluate(program.differentiable, scores, logits.dtype, guard=guard).expand(logits.shape)
    return out


class _WithGivenDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, program: Program, inputs: dict[str, Any], hidden: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.call = program, inputs, hidden
        return _modified(logits, program, inputs, hidden).clone()

    @staticmethod
    def backward(ctx: Any, dscore: Tensor) -> tuple[Tensor, None, None, None]:
        (logits,) = ctx.saved_tensors
        program, inputs, hidden = ctx.call
        out = evaluate(program.derivative, {**inputs, "score": logits, "dscore": dscore}, logits.dtype)[0].expand(logits.shape)
        return (out if hidden is None else out.masked_fill(hidden, 0.0)), None, None, None


def block_kinds(block_mask: Sequence[Tensor]) -> Tensor:
    """Returns the kind of each block, [b | 1, h | 1, rows, columns]: 0 for hidden, 1 for partly visible, 2 for fully visible."""
    counts, indices, full_counts, full_indices = block_mask[:4]
    columns = indices.shape[-1]
    kinds = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int8, device=indices.device)
    place = torch.arange(columns, device=indices.device)
    kinds.scatter_(-1, torch.where(place < counts[..., None], indices.long(), columns), 1)
    kinds.scatter_(-1, torch.where(place < full_counts[..., None], full_indices.long(), columns), 2)
    return kinds[..., :columns]


def split_sequences(spec: AttentionSpec, x: Operands) -> list[Sequences]:
    """Returns the batch as groups of equal lengths and one bias: one group without padding, else one group per sequence.

    All lengths are read in one transfer. If lengths or starts do not fit the tensors, they are clamped. Slots may be in any order.
    """
    q_total, kv_total = x.q.shape[_token_dim(spec.q_format)], x.k.shape[_token_dim(spec.kv_format)]
    batch = batch_size(spec, x)
    group = batch // x.bias.shape[0] if x.bias is not None and x.bias.shape[0] not in (1, batch) else 0
    if not spec.padding and group:
        starts = range(0, batch, group)
        return [Sequences(range(b, b + group), range(q_total), range(kv_total), b // group) for b in starts]
    if not spec.padding:
        return [Sequences(range(batch), range(q_total), range(kv_total))]
    (cu_q, padded_q, _), (cu_kv, padded_kv, _) = x.packing("q"), x.packing("kv")
    assert cu_q is not None
    assert cu_kv is not None
    tables = [cu_q, cu_kv, cu_q if padded_q is None else padded_q, cu_kv if padded_kv is None else padded_kv]
    q_ends, kv_ends, q_starts, kv_starts = torch.stack(tables).tolist()
    return [
        Sequences(
            range(b, b + 1),
            _tokens(spec.q_format, q_total, q_ends[b : b + 2], q_starts[b], x.max_seqlen_q),
            _tokens(spec.kv_format, kv_total, kv_ends[b : b + 2], kv_starts[b], x.max_seqlen_kv),
            b // group if group else None,
        )
        for b in range(batch)
    ]


def slice_block(spec: AttentionSpec, whole: Differentiable, sequences: Sequences, rows: range, cols: range) -> Differentiable:
    """Returns writable views of a block for `attend`. The same views of gradient buffers accumulate the block's gradients."""
    bias = whole.bias
    entry = sequences.bias_entry
    entries = sequences.batch if entry is None else range(entry, entry + 1)
    for dim, part in enumerate((entries, None, rows, cols)):
        if bias is not None and part is not None and bias.shape[dim] != 1:
            bias = bias.narrow(dim, part.start, len(part))
    return Differentiable(
        token_view(whole.q, spec.q_format, sequences.batch, sequences.q[_slice(rows)]),
        token_view(whole.k, spec.kv_format, sequences.batch, sequences.kv[_slice(cols)]),
        token_view(whole.v, spec.kv_format, sequences.batch, sequences.kv[_slice(cols)]),
        bias,
        whole.softmax_offset,
        whole.mod_tensors,
    )


def token_view(t: Tensor, fmt: str, batch: range, tokens: range) -> Tensor:
    """Returns a [b, h, s, d] view of tokens of a tensor in format `fmt`. In thd, `batch` is not used."""
    if fmt == "thd":
        return t[_slice(tokens)].transpose(0, 1)[None]
    return as_bshd(t, fmt)[_slice(batch), _slice(tokens)].transpose(1, 2)


def lse_view(lse: Tensor, q_format: str, batch: range, tokens: range) -> Tensor:
    """Returns a [b, h, s] view of the same tokens of an lse, which is [h, total_q] in thd, else [b, h, sq]."""
    return lse[None, :, _slice(tokens)] if q_format == "thd" else lse[_slice(batch), :, _slice(tokens)]


def _grouped(spec: AttentionSpec, t: Tensor) -> Tensor:
    """Returns [b, h, ...] as [b, h_kv, group, ...]."""
    return t.reshape(t.shape[0], spec.num_heads_kv, spec.group_size, *t.shape[2:])


def sink_of(spec: AttentionSpec, block: Differentiable) -> Tensor | None:
    """Returns the logit [h, 1] of the softmax sink, which takes weight and adds no value."""
    if spec.softmax_type == "learnable":
        assert block.softmax_offset is not None
        return block.softmax_offset[:, None]
    return block.q.new_zeros(spec.num_heads, 1) if spec.softmax_type == "off-by-one" else None


def _tokens(fmt: str, total: int, cu: list[int], slot: int, max_seqlen: int) -> range:
    if fmt != "thd":
        return range(min(max(cu[1] - cu[0], 0), total, max_seqlen))
    start = min(max(slot, 0), total)
    before = min(max(cu[0], 0), total)
    length = min(max(cu[1], before), total) - before
    return range(start, start + min(length, total - start, max_seqlen))


def _token_dim(fmt: str) -> int:
    return fmt.index("t" if fmt == "thd" else "s")


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)
