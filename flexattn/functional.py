"""The public functions: attention, the merge of two of its results, and the explanation of a choice."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from flexattn import call_cache, compat, ops, validation
from flexattn.cached_call import NUM_TENSORS
from flexattn.call_cache import CONSTANTS, CallKey, split_of
from flexattn.call_options import DEFAULTS, NO_TENSORS, Arguments, taking
from flexattn.dispatch import triton_backend
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, from_bshd
from flexattn.prepare import Prepared, default_alibi_slopes, prepare
from flexattn.shorthands import in_full, is_jagged, without_aliases

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flexattn.call_options import Options
    from flexattn.dispatch.explain import Explanation


class OutLse(NamedTuple):
    """Result of `attention` with return_lse=True."""

    out: Tensor
    lse: Tensor


class OutMaxLogit(NamedTuple):
    """Result of `attention` with return_max_logit=True."""

    out: Tensor
    max_logit: Tensor


class OutLseMaxLogit(NamedTuple):
    """Result of `attention` with return_lse=True and return_max_logit=True."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor


for _kind in (OutLse, OutMaxLogit, OutLseMaxLogit):
    compat.register_namedtuple(_kind, f"flexattn.{_kind.__name__}")


def chosen(out: Any, lse: Any, max_logit: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """Returns the results that the caller asked for; max_logit is None only where it was not."""
    if return_max_logit:
        return _new(OutLseMaxLogit, (out, lse, max_logit)) if return_lse else _new(OutMaxLogit, (out, max_logit))
    return _new(OutLse, (out, lse)) if return_lse else out


_new: Any = tuple.__new__  # a NamedTuple's own constructor takes twice the time


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


@taking(Arguments)
def attention(
    q: Tensor = None,  # type: ignore[assignment]  # so that a call of query=, key= and value= comes to the hints
    k: Tensor = None,  # type: ignore[assignment]
    v: Tensor = None,  # type: ignore[assignment]
    *positional: Any,
    **options: Any,
) -> Any:
    """Returns softmax(q k^T * softmax_scale) v, fused, with any combination of the options below.

    Names: b is the batch, h the query heads, h_kv the heads of k and v, s a sequence length, t the tokens of all sequences
    together, d the head dim. h is a multiple of h_kv, and query head i reads head i // (h // h_kv). Tensors may have any strides
    with a contiguous last dim. The Triton backend copies a tensor whose rows do not begin at multiples of 8 elements and 16 bytes.

    Args: Inputs
        q (Tensor): [b, sq, h, d] for "bshd", [sq, b, h, d] for "sbhd", [b, h, sq, d] for "bhsd", [t_q, h, d] for "thd". float16,
            bfloat16 or float32 on a CPU or CUDA device; float64 on the eager backend; float8_e4m3fn or float8_e5m2, with descales,
            for inference. q, k and v may be jagged nested tensors, [b, jagged, h, d], or [b, h, jagged, d] for "bhsd".
        k (Tensor): like q, with h_kv heads, skv tokens and q's head dim. k and v may be in FP8 beside q in 16 or 32 bits, forward
            only.
        v (Tensor): like k, with a head dim d_v of its own.
        qkv_format (str, default "bshd"): "bshd", "sbhd", "bhsd", or "thd" for sequences packed one after another. Two of them name
            q's format, then that of k and v: "thd_2bshd".

    Args: Masking
        causal (bool, default False): True lets query i see keys j <= i. It needs as many queries as keys, or for packed sequences
            the same cu_seqlens for both. Otherwise pass the attn_mask_type that names the diagonal.
        attn_mask_type (str, default "no_mask"): "no_mask", "causal" (query i sees keys j <= i), "causal_bottom_right" (keys j <= i
            + skv - sq), or these with lengths for each sequence: "padding", "padding_causal", "padding_causal_bottom_right". With
            padding in its name the lengths below apply, and the diagonal follows them. "thd" always has lengths, and takes the
            first three names for the last three.
        window_size (int or (int, int) or Window, default (-1, -1)): with a causal mask an int n shows the last n keys. A pair
            (left, right) shows keys i - left to i + right, counted from the diagonal, -1 for open; right is 0 or -1 with a causal
            mask. A `flexattn.Window` may have negative sides: Window(None, -1) hides a query's own key.
        mask (Tensor, optional): broadcastable to [b, h, sq, skv], on q's device. bool: True where a query sees a key, as in SDPA.
            float32 or q's dtype: added to the scores, as a post_scale_bias, differentiable. For packed sequences sq and skv are
            max_seqlen_q and max_seqlen_kv, and entries are indexed within each sequence. A bool mask joins mask_mod.
        bottom_right_diagonal (bool, optional): for "no_mask" and "padding", whether the diagonal of the window and of ALiBi is the
            bottom-right one. Default: True. Other mask types say it in their name.
        mask_mod (callable, optional): mask_mod(b, h, q_idx, kv_idx) returns whether the query sees the key, on top of all other
            masks. It is traced like score_mod.
        block_mask (BlockMask, optional): of `create_block_mask`, torch's or flexattn's, with its own mask_mod. Kernels skip blocks
            without a visible key, and mask no block that is fully visible. It may be for more queries and keys than there are.

    Args: Packed and padded sequences
        cu_seqlens (Tensor, optional): cu_seqlens_q and cu_seqlens_kv in one. `flexattn.packed` makes a packed call's arguments.
        max_seqlen (int, optional): max_seqlen_q and max_seqlen_kv in one.
        cu_seqlens_q, cu_seqlens_kv (Tensor, optional): int32 [b + 1], contiguous, on q's device: 0, then the running sum of the
            sequences' lengths. In a dense format sequence i is the first cu_seqlens[i + 1] - cu_seqlens[i] tokens of row i.
        max_seqlen_q, max_seqlen_kv (int, optional): longest sequence of a packed call, or of pages. A longer sequence raises on a
            CPU, and is truncated on a GPU. Default: the total number of tokens, or columns * page_size, which launches programs
            that do nothing. A bias needs them. A number of numpy and a 0-d tensor on a CPU are accepted too.
        cu_seqlens_q_padded, cu_seqlens_kv_padded (Tensor, optional): int32 [b + 1], for "thd" with gaps: the first token of each
            sequence, in any order and without overlap. The last entry is not read. Default: cu_seqlens.

    Args: KV cache
        seqused_q, seqused_kv (Tensor, optional): int32 [b], contiguous, on q's device, with a padding mask type: the tokens that
            each sequence uses, for caches whose lengths change in place. For "thd" cu_seqlens then gives the slots. In a dense
            format they replace cu_seqlens, and a side without lengths uses all of its tokens.
        page_table (Tensor, optional): int32 [b, columns] on q's device. k and v are pools of pages, [pages, page_size, h_kv, d] or
            [pages, h_kv, page_size, d] ("bhsd"), and page_table[i, n] is the page of keys n * page_size and on of sequence i.
            Entries beyond a sequence's length are not read. Forward only, in 16 or 32 bits, with seqused_kv or cu_seqlens_kv
            (docs/paged.md).

    Args: Bias and scores
        bias (Tensor, optional): q's dtype or float32, [b, h, sq, skv], where any dim may be 1. For packed sequences sq and skv are
            max_seqlen_q and max_seqlen_kv, and entries are indexed within each sequence. Differentiable.
        bias_type (str, optional): "no_bias", "pre_scale_bias" ((q k^T + bias) * softmax_scale), "post_scale_bias" (added after
            softmax_scale and softcap) or "alibi" (-slope * |distance from the diagonal|, added at the same place). Default:
            "post_scale_bias" with a bias, "alibi" with alibi_slopes, else "no_bias".
        alibi_slopes (Tensor, optional): float32 [h] or [b, h], not differentiable. Default for "alibi": the slopes of Press et al.,
            "Train Short, Test Long" (2022).
        score_mod (callable, optional): score_mod(score, b, h, q_idx, kv_idx) returns the modified score of one query and key, in
            torch ops on 0-d tensors: float32 for the scaled, capped score, int64 for the indices, which count within a sequence. It
            is traced once and runs inside the kernel; its backward is derived. Tensors that it captures are read at computed
            indices (`slopes[h]`, `table[h, q_idx - kv_idx]`) and get gradients. Bias, ALiBi and masks apply after it.
        score_mod_tensors (sequence or mapping of Tensor, default ()): tensors that score_mod takes after its five arguments, in
            order or by name.

    Args: Softmax
        softmax_scale (float, optional): at least 0. Default: 1/sqrt(d).
        softcap (float, default 0.0): c > 0 turns each scaled score s into c * tanh(s / c).
        softmax_type (str, optional): "vanilla"; "off-by-one" adds 1 to the denominator; "learnable" adds exp(softmax_offset).
            Default: "learnable" with a softmax_offset, else "vanilla".
        softmax_offset (Tensor, optional): [h], in q's dtype, float16, bfloat16 or float32. Differentiable.

    Args: Dropout
        dropout_p (float, default 0.0): probability in [0, 1), rounded to a multiple of 2**-16, that a softmax weight is dropped.
            The others are divided by 1 - dropout_p. It applies in evaluation too: pass 0.0 there.
        rng_state (Tensor, optional): int64 [2] on q's device, a seed and an offset of the Philox generator. Equal states drop equal
            weights in every format; the cuDNN backend has a stream of its own. Default: drawn from torch's generator of the device,
            so that torch.manual_seed, checkpointing and CUDA graphs apply. For a part of a larger call pass int64 [b, 5]: seed,
            offset, the part's first query, its first key (a multiple of 8) and batch index * heads + its first head. [b, 6] adds a
            column for the remainder of the first key (slower). Parts run on the eager backend and the portable Triton kernels.

    Args: FP8
        fp8_recipe (fp8.Recipe, optional): quantises q, k and v, in float16 or bfloat16, and multiplies in FP8. The backward runs in
            FP8 too, unless the recipe has bf16_backward. Gradients are in q's dtype. For q, k and v in FP8 it gives out's dtype.
        fp8_state (fp8.DelayedScaling, optional): the state of a recipe with scaling "delayed".
        descale_q, descale_k, descale_v (Tensor, optional): float32 [], [h], [b, h] or [b, h, blocks], where any dim may be 1, with
            h_kv for k and v: factors of q, k and v in FP8, positive and finite, as `flexattn.fp8.quantize` returns them. Keys and
            values in FP8 beside other queries may have one for each token and head, in the dims of k without the last, but not in
            "thd". Default: 1. Not differentiable.

    Args: Outputs
        return_lse (bool, default False): whether to return lse too.
        return_max_logit (bool, default False): whether to return max_logit too.
        out (Tensor, optional): contiguous memory for out, of its shape and dtype, that begins at a multiple of 16 bytes and
            overlaps no input. The kernels write into it and it is returned. Forward only: it raises where a gradient is needed.

    Args: Execution
        deterministic (bool, optional): True makes repeated runs bitwise identical, or raises. False may use faster gradients that
            vary from run to run. Default: torch.are_deterministic_algorithms_enabled().
        batch_invariant (bool, default False): True makes out and lse of a sequence bitwise independent of the rest of the batch, of
            the place of its keys, and of the division of its queries into calls, or raises (docs/reproducible.md). So does
            FLEXATTN_BATCH_INVARIANT=1 for every call.
        backend (str, optional): "auto", "triton", "cudnn" or "eager". A name never falls back. Default: that of
            `attention_backend()`, else FLEXATTN_BACKEND, else "auto". `explain` shows the choice and its reasons.

    Returns:
        out, or a named tuple of out, lse and max_logit, as far as they are asked for: `OutLse`, `OutMaxLogit`, `OutLseMaxLogit`.

        - out: q's format and dtype, contiguous, with d_v last. For q in FP8 it is bfloat16, or the dtype of fp8_recipe; a
          `flexattn.fp8.QuantizedTensor` if fp8_recipe asks for FP8.
        - lse: float32 [b, h, sq], or [h, t_q] for "thd": the natural logarithm of each softmax denominator, sink included. In FP8
          on compute capability 9.0 the denominator is a sum of E4M3 weights (docs/accuracy.md). Differentiable.
        - max_logit: float32 [h], the largest visible score of each head, -inf if none is visible. Not differentiable.

        A query that sees no key gets out = 0, lse = -inf (with a sink: its offset) and no gradient. Tokens beyond their
        sequence's length are never read, and are 0 in out and in the gradients.

    Raises:
        ValueError, TypeError: an argument that has no meaning, before anything is launched; the text names it, its value, and the
            way out (docs/errors.md). Lengths that do not fit the tensors or max_seqlen raise on a CPU. All other values in
            cu_seqlens, seqused, page_table and descales, and all values on a GPU, are checked only under FLEXATTN_CHECK=1, because
            reading them waits for the device. Wrong ones give wrong results, but nothing outside the tensors is touched.
        BackendError: no backend can run the call, or the one that was named cannot; the text gives each one's reason.

    Warns:
        RuntimeWarning: once, for "bshd" tensors that look like [b, h, s, d]: as many heads in k as in q, more than 128, and fewer
            tokens than heads; for one causal query with several keys; for a packed call without max_seqlen.

    Examples:
        >>> import torch
        >>> import flexattn
        >>> from flexattn import attention
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)
        >>> k, v = (torch.randn(2, 128, 2, 64, requires_grad=True) for _ in range(2))
        >>> result = attention(q, k, v, causal=True, return_lse=True)
        >>> result.out.shape, result.lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
        >>> result.out.sum().backward()
        >>> q.grad.shape, k.grad.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 128, 2, 64]))

        Two sequences of 3 and 5 tokens, packed, with a score that falls with the distance:

        >>> slopes = torch.tensor([0.5, 0.25])
        >>> x = torch.randn(8, 2, 64)
        >>> attention(
        ...     x,
        ...     x,
        ...     x,
        ...     causal=True,
        ...     score_mod=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx),
        ...     **flexattn.packed([3, 5]),
        ... ).shape
        torch.Size([8, 2, 64])

        A mask as a tensor:

        >>> seen = torch.ones(128, 128, dtype=torch.bool).tril()
        >>> attention(q, k, v, mask=seen).shape
        torch.Size([2, 128, 8, 64])
    """
    key = None
    if torch.compiler.is_compiling():
        if positional or any(name not in DEFAULTS for name in options):
            _refuse_foreign(positional, options)
    else:
        split = split_of(tuple(options))
        if positional or split.is_odd:
            if positional or not split.is_known:
                _refuse_foreign(positional, options)
            options = without_aliases(q, k, options)
            split = split_of(tuple(options))
        values = [*CONSTANTS, split, q, k, v, *options.values()]
        if split.fp8 is None:  # as `split.parts` does, which would cost each call more time
            mods = None
            if split.mods is not None:
                mods = split.mods(values)
                if mods[0] is mods[1] is mods[3] is None and mods[2] is NO_TENSORS:
                    mods = None
            key, call = call_cache.look_up(split.tensors(values), split.others(values), split.window(values), mods)
        else:
            parts = split.parts(values)
            key, call = (None, None) if parts is None else call_cache.look_up(*parts)
        if key is not None and call is not None:
            if not split.returns_more:
                return call.run(key, False)[0]
            return_lse, return_max_logit = options.get("return_lse", False), options.get("return_max_logit", False)
            out, lse, max_logit = call.run(key, return_lse)
            return chosen(out, lse, max_logit, return_lse, return_max_logit)
    arguments: Arguments = in_full(q, k, options)
    if is_jagged(q) and is_jagged(k) and is_jagged(v):
        from flexattn.nested import attend_nested  # here, as few calls have nested tensors

        return attend_nested(attention, q, k, v, arguments)
    if _is_dtensor(q) or _is_dtensor(k) or _is_dtensor(v):
        from flexattn.sharded import attend_sharded  # here, as importing torch.distributed.tensor takes long

        return attend_sharded(attention, q, k, v, arguments, default_alibi_slopes)
    out, lse, max_logit = run_first(key, prepare(q, k, v, arguments), arguments)
    return chosen(out, lse, max_logit, arguments["return_lse"], arguments["return_max_logit"])


SIGNATURE = inspect.signature(attention)


def _refuse_foreign(positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    from flexattn.hints import refuse_foreign  # here, as right calls never need it

    refuse_foreign(SIGNATURE, positional, named)


def run_first(key: CallKey | None, prepared: Prepared, arguments: Arguments) -> tuple[Any, Tensor, Tensor | None]:
    """Returns out, lse and max_logit of a call that is not kept yet. max_logit is None if the call does not ask for it.

    key: the call's key, if it has one. arguments: the arguments that were prepared.
    """
    x, settings, config = prepared
    recipe, return_lse = arguments["fp8_recipe"], arguments["return_lse"]
    to_fp8 = recipe is not None and recipe.out_dtype in validation.FP8_DTYPES
    if key is not None and not (to_fp8 and settings.needs_grad):
        steps = None
        has_fp8_keys = x.k.dtype in validation.FP8_DTYPES and x.q.dtype not in validation.FP8_DTYPES and recipe is None
        if has_fp8_keys or (settings.fp8_out and key.num_arguments > NUM_TENSORS):  # with descales among them
            from flexattn.fp8_steps import Fp8Steps  # here, as calls without FP8 should not wait for its import

            steps = Fp8Steps(config, recipe, settings, x.q.device)
        call = call_cache.new_call(key, x, settings, arguments["alibi_slopes"], steps)
        if call is not None:
            results = call.run(key, return_lse)
            call_cache.remember(key, call)
            return results  # type: ignore[no-any-return]
    if x.dropout_p > 0.0 and x.rng_state is None:
        x = x._replace(rng_state=ops.new_rng_state(x.q.device))
    from flexattn import autograd, fp8_ops  # here, as cached calls should not wait for their import

    delayed = fp8_ops.delayed_of(arguments["fp8_state"])
    out, lse, max_logit = autograd.attention(x, settings, config, delayed)
    if recipe is not None and to_fp8:
        from flexattn.fp8 import quantize_out

        return quantize_out(out, x, settings, recipe, delayed, fp8_ops.OPERATORS), lse, max_logit
    return out, lse, max_logit


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, qkv_format: str = "bshd") -> OutLse:
    """Returns attention over two disjoint sets of keys from the results of the same queries over each set.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), as in FlashAttention (Dao et al., 2022) and ring
    attention (Liu et al., 2023), computed in float32. On a GPU one kernel computes it, unless the call is differentiated or
    compiled; otherwise torch ops do. Differentiable in all four arguments. A side that sees no key has lse = -inf and weight 0. If
    neither side sees a key, out is 0 and lse is -inf. Give a sink (softmax_type other than "vanilla") to one side only, or it is
    counted twice. The max_logit of both together is the larger of the two.

    Args:
        out_a, out_b (Tensor): outputs of `attention`, of the same format, shape and dtype.
        lse_a, lse_b (Tensor): their lse, float32 [b, h, sq], or [h, t_q] for "thd".
        qkv_format (str, default "bshd"): their format, as given to `attention`.

    Returns:
        (out, lse) as a named tuple, in the dtypes of out_a and lse_a.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit together.

    Examples:
        >>> import torch
        >>> from flexattn import attention, merge_attention
        >>> q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
        >>> first, second = (attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 5), slice(5, 8)))
        >>> torch.testing.assert_close(merge_attention(*first, *second).out, attention(q, k, v))
    """
    fmt = validation.check_merge(out_a, lse_a, out_b, lse_b, qkv_format)
    tensors = (out_a, lse_a, out_b, lse_b)
    is_differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if out_a.is_cuda and not (torch.compiler.is_compiling() or is_differentiated) and triton_backend.can_merge(*tensors):
        return OutLse(*triton_backend.merge(fmt, *tensors))
    m = torch.maximum(lse_a, lse_b).detach()
    m = torch.where(m == -math.inf, 0.0, m)  # no weight is exp(-inf - -inf)
    weight_a, weight_b = torch.exp(lse_a - m), torch.exp(lse_b - m)
    empty = (weight_a + weight_b) == 0.0
    total = torch.where(empty, 1.0, weight_a + weight_b)
    lse = torch.where(empty, -math.inf, m + torch.log(total))
    share_a, share_b = (from_bshd((w / total).transpose(-1, -2).unsqueeze(-1), fmt) for w in (weight_a, weight_b))
    out = share_a * out_a.to(lse.dtype) + share_b * out_b.to(lse.dtype)
    return OutLse(out.to(out_a.dtype), lse)


def explain(
    q: Tensor | AttentionSpec, k: Tensor | None = None, v: Tensor | None = None, *, build: bool = False, **arguments: Any
) -> Explanation:
    """Returns the backend and kernels that run a call in each direction, and why.

    Nothing runs. Print the result, whose first line names the kernels (`runs_on`), or its `details`, with the reason against
    each other backend and kernel. Or read its `forward` and `backward` decisions and `is_final`. `backward` is None if no gradient
    is needed. The answer is provisional if cuDNN would run the call and has not built its plan yet: cuDNN may still refuse. Then
    the next backend runs the call, or the call raises if it names cuDNN. `flexattn.explaining` lists the calls of a model.

    Args:
        q, k, v (Tensor): as for `attention`. q may be an AttentionSpec instead, alone or with `backend`.
        build (bool, default False): whether to compile the Triton kernels (into FLEXATTN_KERNELS) and build the cuDNN plans of the
            call first, without a launch. The answer is then final and the first call starts fast. cuDNN answers only for a GPU of
            this machine. A backward in 16 bits of an FP8 call is built when it runs.
        arguments: the other arguments of `attention`.

    Returns:
        Explanation: its text is the printed answer.

    Raises:
        ValueError, TypeError: what `attention` raises for the same arguments; ValueError for `build` with an AttentionSpec, which
            has no shapes.
        BackendError: what `attention` raises, with the same explanation as its text. With `build` also errors of the build itself,
            such as torch.OutOfMemoryError.

    Examples:
        >>> import torch
        >>> import flexattn
        >>> q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
        >>> flexattn.explain(q, k, v, causal=True, backend="eager").forward.backend
        'eager'
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
    qkv = given.pop("q"), given.pop("k"), given.pop("v")
    options: Arguments = in_full(*qkv[:2], given)
    if all(map(is_jagged, qkv)):
        from flexattn.nested import packed_call

        qkv, options = packed_call(qkv, options)
    x, settings, config = prepare(*qkv, options)
    if config is None:
        return x, settings
    from flexattn.fp8_ops import planned

    return planned(x, settings, config), settings


def _is_dtensor(x: Any) -> bool:
    """Returns whether x is a DTensor, by its class's name: importing torch.distributed.tensor takes long."""
    return type(x) is not Tensor and type(x).__name__ == "DTensor"
