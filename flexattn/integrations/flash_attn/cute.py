"""FlashAttention 4's functions (`flash_attn.cute`) under their own names and signatures, run by `flexattn.attention`.

The signatures are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute/interface.py. Mods have
FlashAttention's arguments, and are written in torch operations on 0-d tensors, as for `flexattn.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.arguments import check_offsets, window_sides
from flexattn.integrations.flash_attn import block_sparsity, flash_attn_3, sequences
from flexattn.integrations.flash_attn.forward_only import PAGES, forward_only, needs_gradient
from flexattn.integrations.flash_attn.options import Options, named, refuse, with_qv
from flexattn.integrations.flash_attn.sequences import Lengths
from flexattn.validation import check_flags

__version__ = "4.0.0"

Window = tuple[int | None, int | None]
Mod = Callable[..., Any]


class _Extras(NamedTuple):
    """Arguments that FlashAttention 2 and 3 lack, under their own names, and the window."""

    window_size: Window
    learnable_sink: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | None
    aux_tensors: list[Tensor] | None
    aux_scalars: tuple[object, ...] | None
    block_sparse_tensors: object
    gather_kv_indices: Tensor | None


def _mods(extras: _Extras, q: Lengths, k: Lengths) -> dict[str, Mod | None]:
    """Returns score_mod and mask_mod with the arguments that `attention` passes."""
    if extras.score_mod is None and extras.mask_mod is None:
        return {"score_mod": None, "mask_mod": None}
    offsets_q, offsets_k, lengths_q, lengths_k = q.cu_seqlens, k.cu_seqlens, q.cumulative().diff(), k.cumulative().diff()
    foreign_score, foreign_mask = extras.score_mod, extras.mask_mod
    aux: tuple[object, ...] = (list(extras.aux_tensors or []),)
    if extras.aux_scalars:
        aux = (*aux, tuple(extras.aux_scalars))

    def info(b: Tensor) -> sequences.SequenceInfo:
        first_q, first_k = (0 if offsets is None else offsets[b] for offsets in (offsets_q, offsets_k))
        return sequences.SequenceInfo(first_q, first_k, lengths_q[b], lengths_k[b])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return foreign_score(score, b, h, q_idx, kv_idx, info(b), *aux)  # type: ignore[misc]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return foreign_mask(b, h, q_idx, kv_idx, info(b), *aux)  # type: ignore[misc]

    return {"score_mod": foreign_score and score_mod, "mask_mod": foreign_mask and mask_mod}


def _masks(options: Options, extras: _Extras, q: Lengths, k: Lengths) -> dict[str, Any]:
    """Returns masks, windows and mods under `attention`'s names."""
    check_flags(causal=options.causal)
    left, right = window_sides(extras.window_size, "None")
    right = 0 if options.causal else right
    if left is not None and right is not None and left + right < 0:  # FlashAttention opens both sides
        left, right = None, 0 if options.causal else None
    mods = _mods(extras, q, k)
    if extras.mask_mod is not None and (left, right) != (None, None):
        raise ValueError(
            f"mask_mod comes with causal {options.causal} and window_size {extras.window_size}, which FlashAttention would "
            "ignore; accepted: mask_mod alone; write the causal mask or window into mask_mod"
        )
    is_padded = any(x is not None for side in (q, k) for x in (side.cu_seqlens, side.used, side.table))
    result: dict[str, Any] = {**named(options._replace(causal=False), is_padded), **mods}
    if extras.gather_kv_indices is not None:
        result["kv_indices"] = extras.gather_kv_indices
    if is_padded:
        result |= sequences.named(q, k)
    if (left or 0) < 0 or (right or 0) < 0:
        result["mask_mod"] = sequences.band(left, right, sequences.diagonals(q, k))
    elif right == 0:
        prefix = "padding_" if is_padded else ""
        result |= {"attn_mask_type": prefix + "causal_bottom_right", "window_size": (-1 if left is None else left, 0)}
    else:
        result["window_size"] = (-1 if left is None else left, -1 if right is None else right)
    if extras.block_sparse_tensors is not None:
        lengths = (q.longest, k.longest)
        result["block_mask"] = block_sparsity.to_block_mask(extras.block_sparse_tensors, result.pop("mask_mod"), lengths)
    return result


def _queries(q: Tensor | None, k: Tensor | None, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns q, k and qv. If only qv is passed, it becomes q, and v becomes k.

    Raises:
        ValueError: if q comes without k or k without q, or if neither q nor qv is passed.
    """
    if q is not None and k is not None:
        return q, k, qv
    if q is k is None and qv is not None:
        return qv, v, None
    presence = ", ".join(f"{name} {'missing' if x is None else 'passed'}" for name, x in (("q", q), ("k", k), ("qv", qv)))
    raise ValueError(f"{presence}; accepted: q and k, with or without qv, or qv alone, for scores of qv and v")


def _attend(
    q: Lengths, k: Lengths, tensors: tuple[Tensor, Tensor | None], options: Options, extras: _Extras
) -> tuple[Tensor, Tensor]:
    v, qv = tensors
    optional = (qv, extras.learnable_sink)
    given = tuple(t for t in optional if t is not None)
    if k.table is not None and needs_gradient(q.x, k.x, v, *given):

        def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
            rest = iter(x[3:])
            own_qv, sink = (None if t is None else next(rest) for t in optional)
            lengths = q._replace(x=x[0]), k._replace(x=x[1])
            return _attend(*lengths, (x[2], own_qv), options, extras._replace(learnable_sink=sink))

        return forward_only(attend, (q.x, k.x, v, *given), PAGES)
    queries, keys = q.x, k.x
    has_shared_kv = keys is v and v.shape[-1] == 512
    if qv is not None:  # q k^T + qv v^T is one product of longer rows
        queries, keys = with_qv(queries, qv, keys, v)
    out, lse = attention(
        queries,
        keys,
        v,
        softmax_type="vanilla" if extras.learnable_sink is None else "learnable",
        softmax_offset=extras.learnable_sink,
        return_lse=True,
        **_masks(options, extras, q, k),
    )
    return out, lse.transpose(-1, -2) if qv is not None or has_shared_kv else lse


def _results(out: Tensor, lse: Tensor, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Returns out and lse. Without return_lse, lse is detached if out has a gradient, and else None, as in FlashAttention."""
    check_flags(return_lse=return_lse)
    return out, lse if return_lse else lse.detach() if out.requires_grad else None


def _refuse(score_mod_bwd: Mod | None) -> None:
    refuse("score_mod_bwd", score_mod_bwd, "leave it out: the gradient is derived from score_mod")


def flash_attn_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[object, ...] | None = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention of a dense batch, and lse or None.

    Args:
        q, k, v: [b, sq, h, d], [b, sk, h_k, d] and [b, sk, h_k, d_v].
        qv: [b, sq, h, d_v]: adds qv v^T to q k^T, as one product of head dim d + d_v. q, qv, k and v are copied for it.
            If q and k are None, the scores are qv v^T.
        softmax_scale, causal, softcap, deterministic: as in FlashAttention.
        window_size: (left, right). None is open, and a negative side ends the window on the other side of the diagonal.
            If the sides' sum is below 0, both are open, as in FlashAttention.
        learnable_sink: float16, bfloat16 or float32 [h]: exp(sink) is added to each softmax denominator. Differentiable.
        score_mod: score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors) in torch operations. If aux_scalars are passed,
            they are one more argument. seqlen_info has offset_q, offset_k, seqlen_q and seqlen_k.
        mask_mod: mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors), with the same rules. Not with causal or window_size.
        aux_tensors, aux_scalars: arguments of the mods. Tensors that require a gradient receive it.
        block_sparse_tensors: a `block_sparsity.BlockSparseTensorsTorch` with block_size.
        num_splits, pack_gqa: ignored; flexattn chooses them.
        block_sparse_tensors_bwd: ignored; the backward derives its lists from block_sparse_tensors.
        gather_kv_indices: int32 [b, sq, n], the keys that each query sees, of any number n; -1 is empty. Also without qv.
        score_mod_bwd: must be None.
        return_lse: if True, returns lse with its gradient: float32 [b, h, sq], or [b, sq, h] with qv; -inf for a query that sees
            no key. If False and out has a gradient, a detached lse is returned.

    Raises:
        NotImplementedError: if an argument that must be None is passed.
        ValueError: if mask_mod comes with causal or a window, if q, k or qv is missing, or if block_sparse_tensors lacks
            block_size.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    _refuse(score_mod_bwd)
    options = Options(0.0, softmax_scale, causal, (-1, -1), softcap, None, deterministic)
    mods = score_mod, mask_mod, aux_tensors, aux_scalars
    extras = _Extras(window_size, learnable_sink, *mods, block_sparse_tensors, gather_kv_indices)
    queries, keys, qv = _queries(q, k, v, qv)
    out, lse = _attend(Lengths(queries, None, None), Lengths(keys, None, None), (v, qv), options, extras)
    return _results(out, lse, return_lse)


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Mod | None = None,
    score_mod_bwd: Mod | None = None,
    mask_mod: Mod | None = None,
    block_sparse_tensors: object = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[object, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: object = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention of sequences with different lengths, packed or in a dense batch, and lse or None.

    Args:
        q: [total_q, h, d] with cu_seqlens_q, else [b, sq, h, d].
        k, v: [total_k, h_k, d] and [total_k, h_k, d_v] with cu_seqlens_k, else [b, sk, h_k, d] and [b, sk, h_k, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], the sequences' offsets, and the total. None: a dense batch.
        max_seqlen_q, max_seqlen_k: the longest lengths, or None.
        seqused_q, seqused_k: int32 [b], number of valid tokens per sequence; out is 0 for the others. None: all are valid.
        qv, softmax_scale, causal, window_size, learnable_sink, softcap, num_splits, pack_gqa, deterministic, score_mod, mask_mod,
            aux_tensors, aux_scalars: as in `flash_attn_func`; mods count positions within their sequence.
        block_sparse_tensors: as in `flash_attn_func`, for a dense batch.
        min_seqlen_k, scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: ignored; flexattn chooses them.
        page_table: int32 [b, columns], the pages of each sequence. k and v are then [pages, page_size, h_k, d] and [pages,
            page_size, h_k, d_v], without cu_seqlens_k, and a backward raises. None: no pages.
        gather_kv_indices: int32 [total_q, n] or [b, sq, n], as in `flash_attn_func`, counted within each sequence.
        score_mod_bwd: must be None.
        return_lse: as in `flash_attn_func`; lse is float32 [h, total_q] or [b, h, sq], with qv [total_q, h] or [b, sq, h].

    Raises:
        NotImplementedError: if an argument that must be None is passed.
        ValueError: if mask_mod comes with causal or a window, if q, k or qv is missing, or if block_sparse_tensors lacks
            block_size or is of packed sequences.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    _refuse(score_mod_bwd)
    options = Options(0.0, softmax_scale, causal, (-1, -1), softcap, None, deterministic)
    mods = score_mod, mask_mod, aux_tensors, aux_scalars
    extras = _Extras(window_size, learnable_sink, *mods, block_sparse_tensors, gather_kv_indices)
    queries, keys, qv = _queries(q, k, v, qv)
    check_offsets(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths_q = Lengths(queries, cu_seqlens_q, seqused_q, max_seqlen_q)
    lengths_k = Lengths(keys, cu_seqlens_k, seqused_k, max_seqlen_k, page_table)
    out, lse = _attend(lengths_q, lengths_k, (v, qv), options, extras)
    return _results(out, lse, return_lse)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns (out, lse) over all keys from results over parts of the keys. Differentiable if out is None.

    Args:
        out_partial: [parts, b, sq, h, d_v] or packed [parts, total_q, h, d_v], the partial results.
        lse_partial: float32 [parts, b, sq, h] or [parts, total_q, h], the logarithms of their softmax denominators.
        out: out_partial's shape without the parts, the result's destination. None: a new tensor.
        out_dtype: out's dtype; None is out_partial's.
        cu_seqlens, seqused, virtual_batch_idx: ignored; every token is combined. FlashAttention leaves the results of tokens after
            seqused undefined.
        return_lse: if False, None takes the place of lse.
    """
    combined, lse = flash_attn_3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return combined, lse if return_lse else None


def get_scheduler_metadata(*_: object, **__: object) -> None:
    """Returns None, which `flash_attn_varlen_func` accepts as scheduler_metadata, because calls need no plan in advance."""
