"""The public functions: attention, the merge of two of its results, and the explanation of a choice."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from flexattn import call_cache, ops, validation
from flexattn.cached_call import NUM_TENSORS
from flexattn.call_key import CallKey
from flexattn.dispatch import triton_backend
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.spec import (
    OPEN_WINDOW,
    AttentionSpec,
    BackendName,
    BiasType,
    MaskType,
    Operands,
    QkvFormat,
    SoftmaxType,
    Window,
    from_bshd,
)
from flexattn.nested import attend_nested, is_jagged, packed_call
from flexattn.outputs import OutLse, OutLseMaxLogit, OutMaxLogit, chosen
from flexattn.prepare import default_alibi_slopes, prepare
from flexattn.shorthands import both_sides, in_full, masked, score_sizes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack

    from flexattn import fp8, fp8_ops
    from flexattn.call_options import Options
    from flexattn.dispatch.explain import Explanation
    from flexattn.mods.trace import Mod


NO_TENSORS: tuple[Tensor, ...] = ()  # the default of score_mod_tensors, known by identity


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> OutLse: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> OutMaxLogit: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_max_logit: Literal[True], **options: Unpack[Options]
) -> OutLseMaxLogit: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_logit: bool = False, **options: Unpack[Options]
) -> Any: ...


def attention(
    q: Tensor = None,  # type: ignore[assignment]  # so that a call of query=, key= and value= comes to the hints
    k: Tensor = None,  # type: ignore[assignment]
    v: Tensor = None,  # type: ignore[assignment]
    *positional: Any,
    qkv_format: QkvFormat = "bshd",
    causal: bool = False,
    attn_mask_type: MaskType = "no_mask",
    window_size: int | tuple[int, int] | Window = OPEN_WINDOW,
    mask: Tensor | None = None,
    bottom_right_diagonal: bool | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bias_type: BiasType | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_type: SoftmaxType | None = None,
    softmax_offset: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor] = NO_TENSORS,
    block_mask: BlockMask | None = None,
    fp8_recipe: fp8.Recipe | None = None,
    fp8_state: fp8.DelayedScaling | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    out: Tensor | None = None,
    backend: BackendName | None = None,
    **foreign: Any,
) -> Any:
    """softmax(q k^T * softmax_scale) v, fused, for every format, mask and kind of score below, alone or combined.

    b is the batch, h the query heads, h_kv the heads of k and v (h is a multiple of it: query head i reads head i // (h // h_kv)),
    s a sequence length, t the tokens of all sequences together. Any strides are taken as they are where the last dim is contiguous;
    on a GPU the Triton backend copies a tensor whose rows do not begin at multiples of 8 elements and 16 bytes.

    Args:
        q: [b, sq, h, d], [sq, b, h, d], [b, h, sq, d] or [t_q, h, d], as `qkv_format` says. float16, bfloat16 or float32
            (float64 on the eager backend), on a CPU or CUDA device; k and v are like it in both. Or, for inference, float8_e4m3fn
            or float8_e5m2, with descales. q, k and v may be jagged nested tensors, [b, jagged, h, d], or [b, h, jagged, d] with
            "bhsd".
        k: as q, or with v in float8_e4m3fn or float8_e5m2 beside q in 16 or 32 bits (forward only); with h_kv heads, skv tokens
            and q's head dim.
        v: as k, with a head dim d_v of its own.
        qkv_format: "bshd", "sbhd", "bhsd" or "thd" (sequences packed one after another, without padding), or two of them, q's and
            then k's and v's, as "thd_2bshd".
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right" or
            "padding_causal_bottom_right". causal lets query i see keys j <= i, causal_bottom_right keys j <= i + skv - sq. With
            padding in its name each sequence has the length that cu_seqlens_q and cu_seqlens_kv give, and the diagonal follows
            those lengths. thd needs such a type.
        window_size: (left, right), in tokens, inclusive, -1 for open: query i sees keys i - left to i + right, both counted from
            the diagonal, and of any size. right must be 0 or -1 with a causal type. A `flexattn.Window` may have negative
            sides, which end it before the diagonal or begin it behind: Window(None, -1) hides a query's own key.
        bottom_right_diagonal: for no_mask and padding, whether the diagonal of the window and of ALiBi is the bottom-right (None
            and True) or the top-left one. Other types say it in their name.
        cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], contiguous, on q's device: 0 and then the running sum of the sequences' real
            tokens. Sequence i of a dense format is the first cu_seqlens[i + 1] - cu_seqlens[i] tokens of row i.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [b + 1], thd only: where each sequence starts, if there are gaps: from any
            token on and in any order, without overlap. The last entry is not read. None: where cu_seqlens says.
        seqused_q, seqused_kv: int32 [b], contiguous, on q's device, with a padding type: how many tokens each sequence really has,
            for caches whose lengths change where the tensors stay. For thd beside cu_seqlens, which then say where the slots
            begin and end; for a dense format in the place of cu_seqlens, and with one of them the other side may have no lengths:
            its sequences are then as long as its dim.
        page_table: int32 [b, columns] on q's device: k and v are pools of pages, [pages, page_size, h_kv, d] (bshd) or [pages,
            h_kv, page_size, d] (bhsd), and keys n * page_size and on of sequence i lie in page page_table[i, n]. Entries beyond a
            sequence's length are not read. Forward only; with seqused_kv or cu_seqlens_kv, in 16 or 32 bits (docs/inference.md).
        max_seqlen_q, max_seqlen_kv: int, for thd and pages: at least the longest sequence; a longer one raises on a CPU and is cut
            off on a GPU. Without it the total number of tokens, or columns * page_size, stands in, which costs empty programs but
            no synchronisation; a bias over thd needs it. Like the other numbers here it may be of numpy, or a 0-d tensor on a CPU,
            but not one on another device.
        bias_type: "no_bias", "pre_scale_bias" ((q k^T + bias) * softmax_scale), "post_scale_bias" (added after softmax_scale and
            softcap) or "alibi" (-slope * |distance from the diagonal|, at the same place).
        bias: q's dtype or float32, [b, h, sq, skv], where any dim may be 1 instead; for thd sq and skv are max_seqlen_q and
            max_seqlen_kv, and entries are indexed within each sequence. Differentiable.
        alibi_slopes: float32 [h] or [b, h], not differentiable. None takes the slopes of Press et al., "Train Short, Test Long"
            (2022).
        softmax_type: "vanilla"; "off-by-one" (1 is added to the denominator); "learnable" (exp(softmax_offset) is added to it).
        softmax_offset: q's dtype, float16, bfloat16 or float32, [h], for softmax_type "learnable". Differentiable.
        softmax_scale: at least 0; None is 1/sqrt(d).
        softcap: c > 0 turns each scaled score s into c * tanh(s / c); 0 leaves it.
        dropout_p: the probability, in [0, 1) and rounded to a multiple of 2**-16, that a softmax weight is dropped; the others are
            divided by 1 - dropout_p.
        rng_state: int64 [2] on q's device, the seed and offset of the Philox generator. The same ones drop the same weights,
            whatever the format (the cuDNN backend has its own stream). None draws them from torch's generator of that device, so
            torch.manual_seed, checkpointing and CUDA graphs apply. Or int64 [b, 5] for a call that is a part of a whole: for each
            sequence seed, offset, the positions of its first query and its first key in the whole, and there the index of its
            first head, batch index * heads + head. Parts then drop what the whole does, on the eager backend and the portable
            Triton kernels. The first key's is a multiple of 8; in [b, 6] the last column has what it is more, which takes longer.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> the modified score, of one query and key, in torch ops on 0-d tensors:
            float32 for the scaled, capped score, int64 for the batch, the query head and the positions within the sequence. It is
            traced once and runs inside the kernel; the backward is derived. Tensors that it captures, or that come in
            `score_mod_tensors`, are read at computed indices (`slopes[h]`, `table[h, q_idx - kv_idx]`), get gradients where they
            require them, and may change from call to call, as may floats, without a new trace. A bias, ALiBi and the mask come
            after it.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the query sees the key, on top of attn_mask_type and window_size.
        score_mod_tensors: tensors that score_mod takes after its five arguments, or by name where this is a mapping.
        block_mask: torch's BlockMask, of torch's create_block_mask or flexattn's, with its own mask_mod: blocks that nobody sees
            are skipped, and those that are seen whole are not masked. It may be for more queries and keys than there are.
        fp8_recipe: a `flexattn.fp8.Recipe`: q, k and v, in float16 or bfloat16, are quantised and multiplied in FP8, and so, unless
            it has bf16_backward, are dout and what else the backward multiplies; gradients are in q's dtype. With q, k and v in FP8
            it says out's dtype, and the block_rows of descales by block.
        fp8_state: the `flexattn.fp8.DelayedScaling` of a recipe with scaling "delayed".
        descale_q, descale_k, descale_v: float32 [], [h], [b, h] or [b, h, blocks], where any dim may be 1 instead; h is h_kv for k
            and v. What q, k and v in FP8 are to be multiplied with, positive and finite; None is 1. `flexattn.fp8.quantize` gives
            them. Of keys and values in FP8 beside other queries they may have the dims of k without the last, as [pages, page_size,
            h_kv], one for each token and head, as `append_kv` writes them, but not in thd. Not differentiable.
        deterministic: True makes repeated runs equal to the bit, or raises; with False gradients may round differently from run to
            run where that is faster. None does as torch.are_deterministic_algorithms_enabled() says.
        batch_invariant: True gives a sequence the same bits of out and lse whatever else is in the batch, wherever its keys lie and
            however its queries are divided into calls, or raises (docs/inference.md says what is promised and what it costs). So
            does FLEXATTN_BATCH_INVARIANT=1 for every call.
        return_lse: whether to return lse as well.
        return_max_logit: whether to return max_logit as well.
        backend: "auto", "triton", "cudnn" or "eager". A name never falls back. None takes the one of `attention_backend()`, else
            that of FLEXATTN_BACKEND, else "auto"; `explain` says what "auto" chooses and why.

    Returns:
        out, or (out, lse), (out, max_logit) or (out, lse, max_logit) as asked for.

        - out: q's format and dtype (bfloat16 for q in FP8, or what fp8_recipe says), contiguous, with d_v last; a
          `flexattn.fp8.QuantizedTensor` where fp8_recipe asks for FP8.
        - lse: float32 [b, h, sq], or [h, t_q] for thd: the natural logarithm of each softmax denominator, sink included.
          In FP8 on compute capability 9.0 the denominator is a sum of E4M3 weights (docs/fp8.md, What is rounded, and how).
          Differentiable.
        - max_logit: float32 [h], the largest visible score of each head, -inf where none is visible. Not differentiable.

        A query that sees no key gets out = 0, lse = -inf (with a sink: its offset) and no gradient. Tokens beyond their
        sequence's length are never read, and are 0 in out and in the gradients.

    Raises:
        ValueError, TypeError: an argument that has no meaning, before anything is launched; the text names it, what came and what
            is accepted. Lengths that do not fit the tensors or max_seqlen raise on a CPU. All other values in cu_seqlens, seqused,
            page_table and descales, and all on a GPU, are checked only under FLEXATTN_CHECK=1, as reading them waits for the
            device; wrong ones give wrong results, but nothing outside the tensors is touched.
        BackendError: no backend can run the call, or the one that was named cannot; the text gives each one's reason.

    Examples:
        >>> import torch
        >>> from flexattn import attention
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 128, 2, 64)
        >>> out, lse = attention(q, k, v, attn_mask_type="causal", return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))

        Two sequences of 3 and 5 tokens, packed, with a score that falls by the distance:

        >>> slopes = torch.tensor([0.5, 0.25])
        >>> x = torch.randn(8, 2, 64)
        >>> cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> attention(
        ...     x,
        ...     x,
        ...     x,
        ...     qkv_format="thd",
        ...     attn_mask_type="padding_causal",
        ...     cu_seqlens_q=cu_seqlens,
        ...     cu_seqlens_kv=cu_seqlens,
        ...     max_seqlen_q=5,
        ...     max_seqlen_kv=5,
        ...     score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx),
        ... ).shape
        torch.Size([8, 2, 64])
    """
    if positional or foreign:
        _refuse_foreign(positional, foreign)
    if cu_seqlens is not None:
        cu_seqlens_q, cu_seqlens_kv = both_sides("cu_seqlens", cu_seqlens, cu_seqlens_q, cu_seqlens_kv)
    if max_seqlen is not None:
        max_seqlen_q, max_seqlen_kv = both_sides("max_seqlen", max_seqlen, max_seqlen_q, max_seqlen_kv)
    if mask is not None:
        lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv, "cu_seqlens_q": cu_seqlens_q}
        sizes = score_sizes(q, k, {"qkv_format": qkv_format, "page_table": page_table, **lengths})
        bias_type, bias, mask_mod = masked(mask, q, sizes, (bias_type, bias, alibi_slopes), (mask_mod, block_mask))
    key, call = None, None
    is_fp8 = not (fp8_recipe is None and fp8_state is None and descale_q is descale_k is descale_v is None)
    if not torch.compiler.is_compiling():
        tensors: tuple[Tensor | None, ...] = (q, k, v)
        if is_fp8 or not (
            (bias is alibi_slopes is softmax_offset is rng_state is None)
            and (cu_seqlens_q is cu_seqlens_kv is cu_seqlens_q_padded is cu_seqlens_kv_padded is None)
            and (seqused_q is seqused_kv is page_table is out is None)
        ):
            tensors += (bias, alibi_slopes, softmax_offset, cu_seqlens_q, cu_seqlens_kv)
            tensors += (cu_seqlens_q_padded, cu_seqlens_kv_padded, rng_state, seqused_q, seqused_kv, page_table, out)
        # In parts, as each object costs time: what is None or False in most calls stays out where it is so in all of it.
        others: tuple[Any, ...] = (softmax_scale, softcap, dropout_p, qkv_format, attn_mask_type, bias_type, softmax_type, backend)
        is_usual = bottom_right_diagonal is None and deterministic is None and max_seqlen_q is None and max_seqlen_kv is None
        if not is_usual or batch_invariant is not False or return_lse is not False or return_max_logit is not False:
            others += (bottom_right_diagonal, deterministic, max_seqlen_q, max_seqlen_kv)
            others += (batch_invariant, return_lse, return_max_logit)
        if causal is not False:
            others += (causal,)
        mods = None
        if score_mod is not None or mask_mod is not None or block_mask is not None or score_mod_tensors is not NO_TENSORS:
            mods = (score_mod, mask_mod, score_mod_tensors, block_mask)
        of_state: tuple[Tensor, ...] | None = ()
        if fp8_state is not None:
            from flexattn.fp8 import state_tensors  # here, as calls without FP8 should not wait for its import

            of_state = state_tensors(fp8_state)
        if is_fp8 and of_state is not None:
            tensors += (descale_q, descale_k, descale_v, *of_state)
            others += (fp8_recipe, fp8_state is None or fp8_state.recipe is fp8_recipe or fp8_state.recipe)
        if of_state is not None:
            key, call = call_cache.look_up(tensors, others, window_size, mods)
        if key is not None and call is not None:
            out, lse, max_logit = call.run(key, return_lse)
            if return_lse or return_max_logit:
                return chosen(out, lse, max_logit, return_lse, return_max_logit)
            return out
    arguments: dict[str, Any] = {
        "qkv_format": qkv_format,
        "causal": causal,
        "attn_mask_type": attn_mask_type,
        "window_size": window_size,
        "bottom_right_diagonal": bottom_right_diagonal,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "seqused_q": seqused_q,
        "seqused_kv": seqused_kv,
        "page_table": page_table,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "bias_type": bias_type,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "softmax_type": softmax_type,
        "softmax_offset": softmax_offset,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "rng_state": rng_state,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
        "score_mod_tensors": score_mod_tensors,
        "block_mask": block_mask,
        "fp8_recipe": fp8_recipe,
        "fp8_state": fp8_state,
        "descale_q": descale_q,
        "descale_k": descale_k,
        "descale_v": descale_v,
        "deterministic": deterministic,
        "batch_invariant": batch_invariant,
        "return_lse": return_lse,
        "return_max_logit": return_max_logit,
        "out": out,
        "backend": backend,
    }
    arguments = in_full(q, k, arguments)
    if is_jagged(q) and is_jagged(k) and is_jagged(v):
        return attend_nested(attention, q, k, v, arguments)
    if _is_dtensor(q) or _is_dtensor(k) or _is_dtensor(v):
        if is_fp8:
            raise ValueError("q, k or v is a DTensor and the call is in FP8; accepted: local tensors, whose amax is their own")
        from flexattn.sharded import attend_sharded  # here, as importing torch.distributed.tensor takes long

        return attend_sharded(attention, q, k, v, arguments, default_alibi_slopes)
    prepared = prepare(q, k, v, **arguments)
    found = run_first(key, prepared, alibi_slopes, fp8_recipe, fp8_state, return_lse)
    return chosen(*found, return_lse, return_max_logit)


def _own_signature() -> inspect.Signature:
    """Returns `attention`'s signature as callers are to see it: q, k and v are needed, and what only becomes a hint is left out."""
    signature = inspect.signature(attention)
    catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p for p in signature.parameters.values() if p.kind not in catch_all]
    return signature.replace(parameters=[p.replace(default=p.empty) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in own])


# Python has no other way without a wrapper, which would cost each call more than two empty collections do.
SIGNATURE = _own_signature()
attention.__signature__ = SIGNATURE  # type: ignore[attr-defined]


def _refuse_foreign(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    from flexattn.hints import refuse_foreign  # here, as right calls never need it

    refuse_foreign(SIGNATURE, positional, named)


def run_first(
    key: CallKey | None,
    prepared: tuple[Operands, ops.Settings, fp8_ops.QuantizeConfig | None],
    alibi_slopes: Tensor | None,
    fp8_recipe: fp8.Recipe | None,
    fp8_state: fp8.DelayedScaling | None,
    return_lse: bool,
) -> tuple[Any, Tensor, Tensor | None]:
    """Returns out, lse and max_logit of a call that `prepare` gave; max_logit is None only where it was not asked for.

    key: the call's, or None. alibi_slopes, fp8_recipe, fp8_state, return_lse: the arguments.
    """
    x, settings, config = prepared
    to_fp8 = fp8_recipe is not None and fp8_recipe.out_dtype in validation.FP8_DTYPES
    if key is not None and not (to_fp8 and settings.needs_grad):
        of_fp8 = None
        has_fp8_keys = x.k.dtype in validation.FP8_DTYPES and x.q.dtype not in validation.FP8_DTYPES and fp8_recipe is None
        if has_fp8_keys or (settings.fp8_out and key.num_arguments > NUM_TENSORS):  # with descales among them
            from flexattn.fp8_steps import Fp8Steps  # here, as calls without FP8 should not wait for its import

            of_fp8 = Fp8Steps(config, fp8_recipe, settings, x.q.device)
        call = call_cache.new_call(key, x, settings, alibi_slopes, of_fp8)
        if call is not None:
            results = call.run(key, return_lse)
            call_cache.remember(key, call)
            return results  # type: ignore[no-any-return]
    if x.dropout_p > 0.0 and x.rng_state is None:
        x = x._replace(rng_state=ops.new_rng_state(x.q.device))
    from flexattn import autograd, fp8_ops  # here, as cached calls should not wait for their import

    delayed = fp8_ops.delayed_of(fp8_state)
    out, lse, max_logit = autograd.attention(x, settings, config, delayed)
    if fp8_recipe is not None and to_fp8:
        from flexattn.fp8 import quantize_out

        return quantize_out(out, x, settings, fp8_recipe, delayed, fp8_ops.OPERATORS), lse, max_logit
    return out, lse, max_logit


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, qkv_format: str = "bshd"
) -> tuple[Tensor, Tensor]:
    """Returns attention over two disjoint sets of keys from the attention of the same queries over each, as rings need it.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), as in FlashAttention (Dao et al., 2022) and ring
    attention (Liu et al., 2023), computed in float32: by one kernel on a GPU where nothing is differentiated or compiled, else by
    torch ops. Differentiable in all four. A side that saw no key has lse = -inf and
    counts for nothing; where neither saw one, out is 0 and lse -inf. A sink (softmax_type other than "vanilla") belongs to one side
    only, or it is counted twice. The whole's max_logit is the larger of the two.

    Args:
        out_a, out_b: two outputs of `attention`, of the same format, shape and dtype.
        lse_a, lse_b: their lse, [b, h, sq], or [h, t_q] for thd.
        qkv_format: their format, as given to `attention`.

    Returns:
        (out, lse), in the dtypes of out_a and lse_a.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit together.
    """
    fmt = validation.check_merge(out_a, lse_a, out_b, lse_b, qkv_format)
    tensors = (out_a, lse_a, out_b, lse_b)
    is_differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if out_a.is_cuda and not (torch.compiler.is_compiling() or is_differentiated) and triton_backend.can_merge(*tensors):
        return triton_backend.merge(fmt, *tensors)
    m = torch.maximum(lse_a, lse_b).detach()
    m = torch.where(m == -math.inf, 0.0, m)  # no weight is exp(-inf - -inf)
    weight_a, weight_b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    empty = (weight_a + weight_b) == 0.0
    total = torch.where(empty, 1.0, weight_a + weight_b)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    share_a, share_b = (from_bshd((w / total).transpose(-1, -2).unsqueeze(-1), fmt) for w in (weight_a, weight_b))
    out = share_a * out_a.to(lse.dtype) + share_b * out_b.to(lse.dtype)
    return out.to(out_a.dtype), lse


def explain(
    q: Tensor | AttentionSpec, k: Tensor | None = None, v: Tensor | None = None, *, build: bool = False, **arguments: Any
) -> Explanation:
    """Returns which backend and kernels run a call in each direction, and why.

    `explain(q, k, v, **arguments)` takes what `attention` takes and runs nothing; `explain(spec, backend=...)` takes an
    AttentionSpec. Print the result, whose first line says what runs (`runs_on`), or its `details`, with the reason against each
    other backend and kernel; or read its `forward` and `backward` decisions (`backward` is None if no gradient is needed) and
    `is_final`. The answer is provisional where cuDNN would run the call and has not built its plan yet: it may refuse, and then the
    next backend runs it, or the call raises where cuDNN was asked for by name. `flexattn.explaining` lists the calls of a model.

    Args:
        build: whether to build what would run the call first, with nothing launched: Triton kernels are compiled (into
            FLEXATTN_KERNELS), cuDNN plans built. The answer is then final, and the first call need not build; but for a GPU that
            is not here cuDNN cannot be asked, and a backward whose operands its forward makes (FP8 with a backward in 16 bits) is
            built when it runs.

    Raises:
        ValueError, TypeError: what `attention` raises for the same arguments; ValueError for `build` with an AttentionSpec, which
            has no shapes.
        BackendError: likewise, with the same explanation as its text.
        With `build`: what building raises that is no answer about the call, as torch.OutOfMemoryError.
    """
    from flexattn.dispatch import explain as explanations  # here, as importing flexattn should be quick

    validation.check_flag("build", build)
    if isinstance(q, AttentionSpec):
        extra = [*(name for name, t in (("k", k), ("v", v)) if t is not None), *(name for name in arguments if name != "backend")]
        if extra:
            raise TypeError(f"explain(spec) was given {', '.join(extra)}; accepted beside an AttentionSpec: backend")
        if build:
            raise ValueError("build is True with an AttentionSpec, which has no shapes to build for; accepted: a call's q, k and v")
        return explanations.explain(q, requested_backend(arguments.get("backend")))
    x, settings = bind_call(q, k, v, **arguments)
    spec = ops.spec_to_run(x, settings)
    if not build:
        return explanations.explain(spec, settings.backend, x)
    from flexattn.build_ahead import explain_built

    return explain_built(spec, settings.backend, x)


def bind_call(*arguments: Any, **named: Any) -> tuple[Operands, ops.Settings]:
    """Returns the operands and settings of a call of `attention`, with nothing run; raises what it raises for the arguments."""
    try:
        call = SIGNATURE.bind(*arguments, **named)
    except TypeError:
        _refuse_foreign(arguments[3:], named)
        raise
    call.apply_defaults()
    given = dict(call.arguments)
    qkv = {name: given.pop(name) for name in ("q", "k", "v")}
    given = qkv | in_full(qkv["q"], qkv["k"], given)
    x, settings, config = prepare(**(packed_call(given) if all(map(is_jagged, qkv.values())) else given))
    if config is None:
        return x, settings
    from flexattn.fp8_ops import planned

    return planned(x, settings, config), settings


def _is_dtensor(x: Any) -> bool:
    """Returns whether x is a DTensor, by its class's name: importing torch.distributed.tensor takes long."""
    return type(x) is not Tensor and type(x).__name__ == "DTensor"
