"""The indexer of sparse attention: the best keys of each query by cheap scores, and the loss that trains these scores.

The scores are those of DeepSeek-V3.2's lightning indexer (DeepSeek-AI, 2025, https://arxiv.org/abs/2512.02556). Each function
computes a chunk of queries at a time, so that no tensor has the size queries times keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn import ops, validation
from flexattn.call_options import DEFAULTS, FormatOptions, LengthOptions, MaskOptions, ShortOptions
from flexattn.dispatch import eager_backend, key_lists, reference
from flexattn.dispatch.mod_program import looks_at
from flexattn.dispatch.neutral import is_traced
from flexattn.dispatch.pages import with_cu_seqlens
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.function_context import FunctionContext
from flexattn.prepare import prepare
from flexattn.shorthands import in_full

# Arguments of `attention` that both functions take.
_ACCEPTED = {
    *(*FormatOptions.__annotations__, *ShortOptions.__annotations__, *MaskOptions.__annotations__, *LengthOptions.__annotations__),
    *("mask", "mask_mod", "seqused_q", "seqused_kv", "softmax_scale"),
}
_ABSENT = DEFAULTS | {"bias_type": "no_bias", "softmax_type": "vanilla"}  # the values of absent arguments


class SelectedKeys(NamedTuple):
    """Result of `select_keys`."""

    kv_indices: Tensor
    scores: Tensor


def select_keys(q: Tensor, k: Tensor, weights: Tensor, n: int, **options: object) -> SelectedKeys:
    """Returns the n keys with the largest scores for each query, as `kv_indices` of `attention`, and their scores.

    The score of query i and key j is sum_h weights[i, h] * relu(softmax_scale * q[i, h] k[j]), in float32. Keys that masks, windows
    or lengths hide are not selected. The selection has no derivative. The scores have: they are computed again for the selected
    keys in the backward. Lengths are read on the host.

    Args:
        q: queries of the indexer, in the layout of `attention`, with heads of their own: [b, sq, h, d] or [t_q, h, d].
        k: keys of the indexer with one head, [b, skv, 1, d] or [t_kv, 1, d].
        weights: float, [b, sq, h] or [t_q, h] for every format of q: the weight of each head.
        n: number of keys.
        options: arguments of `attention` for the format, masks, lengths and softmax_scale.

    Returns:
        SelectedKeys: kv_indices, int32 [b, sq, n] or [t_q, n], -1 if a query sees fewer keys. scores, float32 (float64 for float64)
        of the same shape, 0 for empty entries.

    Raises:
        ValueError, TypeError: errors of `attention`; several key heads; weights of another shape; n below 1; a bias, a score_mod or
            another argument that the scores do not have.
    """
    validation.check_count("n", n, 1, "an int of at least 1, the number of keys of each query")
    x, spec = _prepared("select_keys", q, k, options, ())
    tokens = (x.q.shape[0],) if spec.q_format == "thd" else (x.q.shape[spec.q_format.index("b")], x.max_seqlen_q)
    if spec.num_heads_kv != 1:
        raise ValueError(f"k has {spec.num_heads_kv} heads; accepted: 1, which all heads of q share")
    if spec.mods is not None and looks_at(spec.mods, "h"):
        raise ValueError("the mask depends on the head, and all heads of q share a list; accepted: one mask for all heads")
    if tuple(weights.shape) != (*tokens, spec.num_heads):
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}; accepted: {[*tokens, spec.num_heads]}, one for each query and head"
        )
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    kv_indices = torch.full((*tokens, n), -1, dtype=torch.int32, device=x.q.device)
    with torch.no_grad():
        whole = reference.Differentiable.of(x)
        for sequences, rows, cols in eager_backend.blocks(spec, x, dtype.itemsize):
            block = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: t.to(dtype))
            products = reference.masked_logits(spec, x, sequences, rows, cols, block)
            own = _rows(spec, weights, sequences, rows).to(dtype)  # [b, r, h]
            scores = torch.einsum("bhrc,brh->brc", products.relu(), own).masked_fill(products[:, 0].isneginf(), -torch.inf)
            best = scores.topk(min(n, len(cols)), dim=-1)
            chosen = torch.where(best.values.isneginf(), -1, best.indices + cols.start)
            _rows(spec, kv_indices, sequences, rows)[..., : chosen.shape[-1]] = chosen.to(torch.int32)
    return SelectedKeys(kv_indices, _Scores.apply(x.q, x.k, weights, kv_indices, x, spec))  # type: ignore[no-untyped-call]


def key_weights(q: Tensor, k: Tensor, lse: Tensor, kv_indices: Tensor, **options: object) -> Tensor:
    """Returns the softmax weights of the keys in lists, summed over the heads that share a list, without a gradient.

    It is the target of `selection_loss`: `attention(..., return_lse=True)` gives lse for the same arguments.

    Args:
        q, k: as `attention` takes them.
        lse: the lse of `attention`.
        kv_indices: as `attention` takes it.
        options: arguments of `attention` for the format, masks, lengths, softcap and softmax_scale; kv_index_counts.

    Returns:
        float32 (float64 for float64), the shape of kv_indices; 0 for empty entries.

    Raises:
        ValueError, TypeError: errors of `attention`; an argument that it does not take here, such as a bias or a kv_block_size.
    """
    if options.get("kv_block_size") is not None:
        raise ValueError("kv_block_size is given to key_weights(); accepted: None, and lists of keys")
    named = {**options, "kv_indices": kv_indices}
    x, spec = _prepared("key_weights", q, k, named, ("softcap", "kv_indices", "kv_index_counts"))
    validation.check_lse("lse", lse, q, spec.q_format)
    lse = lse.detach()
    result = torch.zeros(kv_indices.shape, dtype=lse.dtype, device=x.q.device)
    with torch.no_grad():
        whole = reference.Differentiable.of(x)
        for sequences, rows, cols in eager_backend.blocks(spec, x, lse.element_size()):
            lists = key_lists.listed(x, sequences, rows, 1)
            block = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: t.to(lse.dtype))
            block = block._replace(k=key_lists.gathered(block.k, lists))
            logits = reference.masked_logits(spec, x, sequences, rows, cols, block, lists=lists)
            own = sequences.q[rows.start : rows.stop]
            row_lse = reference.lse_view(lse, spec.q_format, sequences.batch, own)[..., None]
            weights = torch.exp(logits - row_lse.masked_fill(row_lse.isneginf(), torch.inf))
            summed = weights.view(len(weights), lists.shape[1], spec.num_heads // lists.shape[1], *weights.shape[2:]).sum(2)
            target = _rows(spec, result, sequences, rows)
            target[..., : summed.shape[-1]] = summed[:, 0] if target.dim() == 3 else summed.transpose(1, 2)
    return result


def selection_loss(scores: Tensor, weights: Tensor, kv_indices: Tensor) -> Tensor:
    """Returns the mean KL divergence of softmax(scores) from the attention weights of the same keys, as DeepSeek-V3.2 trains it.

    Args:
        scores, kv_indices: results of `select_keys`.
        weights: result of `key_weights`, of the same shape. Each row is divided by its sum.

    Queries without a key or a weight do not count. Differentiable in scores.
    """
    is_key = kv_indices >= 0
    total = weights.sum(-1, keepdim=True)
    is_row = (total > 0) & is_key.any(-1, keepdim=True)
    target = weights / total.masked_fill(~is_row, 1.0)
    logits = scores.masked_fill(~is_key, torch.finfo(scores.dtype).min)
    divergence = torch.xlogy(target, target) - target * logits.log_softmax(-1)
    rows = divergence.masked_fill(~(is_key & is_row), 0.0).sum(-1)
    return rows.sum() / is_row.sum().clamp(min=1)


def _prepared(
    function: str, q: Tensor, k: Tensor, options: dict[str, object], more: tuple[str, ...]
) -> tuple[Operands, AttentionSpec]:
    """Returns a checked call without values, which are k, and its spec. more: options that only this function takes."""
    if is_traced():
        raise RuntimeError(f"{function}() cannot be traced or compiled; call it outside of the compiled region")
    validation.check_tensor("q", q, validation.DTYPES, None)
    arguments = in_full(q, k, options)
    refused = [
        name
        for name, value in options.items()
        if name not in _ACCEPTED and name not in more
        if value is not None and (isinstance(value, Tensor) or value != _ABSENT.get(name))
    ]
    if arguments["bias"] is not None:
        refused.append("mask in floating point")
    if refused:
        accepted = ", ".join(("the format, masks, lengths", *more))
        raise ValueError(f"{refused[0]} is given to {function}(); accepted: arguments for {accepted} and softmax_scale")
    with torch.no_grad():
        x, settings, _ = prepare(q, k, k, arguments)
    spec = ops.make_spec(x, settings, None)
    return with_cu_seqlens(x, (spec.q_format, spec.kv_format)), spec


def _rows(spec: AttentionSpec, t: Tensor, sequences: reference.Sequences, rows: range) -> Tensor:
    """Returns the rows of a tensor [b, sq, ...] or [t_q, ...] as a view [b, r, ...]."""
    tokens = slice(sequences.q.start + rows.start, sequences.q.start + rows.stop)
    return t[tokens][None] if spec.q_format == "thd" else t[sequences.batch.start : sequences.batch.stop, tokens]


class _Scores(torch.autograd.Function):
    """Scores of selected keys, which a backward computes again."""

    @staticmethod
    def forward(
        ctx: FunctionContext, q: Tensor, k: Tensor, weights: Tensor, kv_indices: Tensor, x: Operands, spec: AttentionSpec
    ) -> Tensor:
        ctx.save_for_backward(q, k, weights, kv_indices)
        ctx.call = x._replace(q=None, k=None, v=None), spec  # type: ignore[arg-type]
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.new_zeros(kv_indices.shape, dtype=dtype)
        for chunk in _chunks(q, k, weights, kv_indices, x, spec):
            part = chunk.scores(*(t.to(dtype) for t in chunk.tensors))
            chunk.rows(scores)[..., : part.shape[-1]] = part
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionContext, dscores: Tensor) -> tuple[Tensor | None, ...]:
        q, k, weights, kv_indices = ctx.saved_tensors
        x, spec = ctx.call
        x = x._replace(q=q, k=k, v=k)
        sums = [torch.zeros_like(t, dtype=dscores.dtype) for t in (q, k, weights)]
        targets = _chunks(sums[0], sums[1], sums[2], kv_indices, x, spec)
        for chunk, target in zip(_chunks(q, k, weights, kv_indices, x, spec), targets, strict=True):
            leaves = [t.detach().to(dscores.dtype).requires_grad_() for t in chunk.tensors]
            with torch.enable_grad():
                part = chunk.scores(*leaves)
            for total, gradient in zip(
                target.tensors, torch.autograd.grad(part, leaves, chunk.rows(dscores)[..., : part.shape[-1]]), strict=True
            ):
                total += gradient
        return (*(total.to(t.dtype) for total, t in zip(sums, (q, k, weights), strict=True)), None, None, None)


class _Chunk(NamedTuple):
    """A chunk of queries, and the views of the tensors that they need: q [b, h, r, d], k [b, 1, c, d] and weights [b, r, h]."""

    spec: AttentionSpec
    scale: float
    sequences: reference.Sequences
    queries: range
    lists: Tensor  # [b, 1, r, n]
    tensors: tuple[Tensor, Tensor, Tensor]

    def rows(self, t: Tensor) -> Tensor:
        return _rows(self.spec, t, self.sequences, self.queries)

    def scores(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Returns the scores of the listed keys, [b, r, n]."""
        keys = key_lists.gathered(k, self.lists)[:, 0]
        return torch.einsum("bhrn,brh->brn", torch.einsum("bhrd,brnd->bhrn", q * self.scale, keys).relu(), weights)


def _chunks(q: Tensor, k: Tensor, weights: Tensor, kv_indices: Tensor, x: Operands, spec: AttentionSpec) -> Iterator[_Chunk]:
    x = x._replace(kv_indices=kv_indices, kv_index_counts=None)
    spec = spec._replace(kv_lists=1)
    whole = reference.Differentiable(q, k, k, None, None, ())
    for sequences, rows, cols in eager_backend.blocks(spec, x, 4):
        block = reference.slice_block(spec, whole, sequences, rows, cols)
        own = _rows(spec, weights, sequences, rows)
        yield _Chunk(spec, x.softmax_scale, sequences, rows, key_lists.listed(x, sequences, rows, 1), (block.q, block.k, own))
