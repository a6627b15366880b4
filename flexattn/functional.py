"""The public functions: attention, the merge of two of its results, and the explanation of a choice."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from flexattn import call_cache, compat, ops, validation
from flexattn.call_cache import CONSTANTS, CallKey, split_of
from flexattn.call_options import DEFAULTS, Arguments, taking
from flexattn.dispatch import triton_backend
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.spec import NUM_TENSORS, AttentionSpec, Operands, from_bshd
from flexattn.prepare import Prepared, prepare
from flexattn.shorthands import in_full, is_jagged, without_aliases

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from flexattn.call_options import Options
    from flexattn.dispatch.explain import Explanation
    from flexattn.statistics import AuxRequest, OutAux


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


def chosen(out: object, lse: object, max_logit: object, return_lse: bool, return_max_logit: bool) -> Any:
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
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: AuxRequest, **options: Unpack[Options]) -> OutAux: ...


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
        options: the arguments in `flexattn.call_options`, by subject. `help(flexattn.attention)` describes each.

    Returns:
        out, or a named tuple of out, lse and max_logit, as far as they are asked for: `OutLse`, `OutMaxLogit`, `OutLseMaxLogit`.
        With return_aux `OutAux`, (out, aux), where aux is an `AuxOutput`.

        - out: q's format and dtype, contiguous, with d_v last. For q in FP8 it is bfloat16, or the dtype of fp8_recipe; a
          `flexattn.fp8.QuantizedTensor` if fp8_recipe asks for FP8.
        - lse: float32 [b, h, sq], or [h, t_q] for "thd": the natural logarithm of each softmax denominator, sink included. In FP8
          on compute capability 9.0 the denominator is a sum of E4M3 weights (docs/accuracy.md). Differentiable.
        - max_logit: float32 [h], the largest visible score of each head, -inf if none is visible. Not differentiable.
        - aux: lse and max_logit as above, and statistics of the weights that raise if a gradient of them is asked for.

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
    if torch.compiler.is_compiling():
        if positional or any(name not in DEFAULTS for name in options):
            _refuse_foreign(positional, options)
        return _first_call(None, q, k, v, options)
    split = split_of(tuple(options))
    if positional or split.is_odd:
        if positional or not split.is_known:
            _refuse_foreign(positional, options)
        if options.get("return_aux") is not None:
            return _first_call(None, q, k, v, options)
        options = without_aliases(q, k, options)
        split = split_of(tuple(options))
    values = [*CONSTANTS, split, q, k, v, *options.values()]
    if split.fp8 is None:  # as `split.parts` does, which would cost each call more time
        mods = None if split.mods is None else split.mods_of(values)
        key, call = call_cache.look_up(split.tensors(values), split.others(values), split.window(values), mods)
    else:
        parts = split.parts(values)
        key, call = (None, None) if parts is None else call_cache.look_up(*parts)
    if key is None or call is None:
        return _first_call(key, q, k, v, options)
    if not split.returns_more:
        return call.run(key, False)[0]
    return_lse, return_max_logit = options.get("return_lse", False), options.get("return_max_logit", False)
    out, lse, max_logit = call.run(key, return_lse)
    return chosen(out, lse, max_logit, return_lse, return_max_logit)


def _first_call(key: CallKey | None, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
    """Returns the result of `attention` for a call that is not kept, of tensors of any class. key: the call's, if it has one."""
    arguments: Arguments = in_full(q, k, options)
    if not type(q) is type(k) is type(v) is Tensor:
        if is_jagged(q) and is_jagged(k) and is_jagged(v):
            from flexattn.nested import attend_nested  # here, as few calls have nested tensors

            return attend_nested(attention, q, k, v, arguments)
        if "DTensor" in (type(q).__name__, type(k).__name__, type(v).__name__):  # by name: its import takes long
            from flexattn.sharded import attend_sharded

            return attend_sharded(attention, q, k, v, arguments)
    prepared, request = prepare(q, k, v, arguments), arguments["return_aux"]
    out, lse, max_logit = run_first(key, prepared, arguments)
    if request is not None:
        from flexattn.statistics import out_and_aux  # here, because few calls ask for it

        return out_and_aux(request, prepared.x, prepared.settings, (out, lse, max_logit))
    return chosen(out, lse, max_logit, arguments["return_lse"], arguments["return_max_logit"])


SIGNATURE = inspect.signature(attention)


def _refuse_foreign(positional: tuple[object, ...], named: dict[str, object]) -> None:
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
    spec, request = ops.spec_to_run(x, settings), arguments.get("return_aux")
    if not build:
        answer = explanations.explain(spec, settings.backend, x)
    else:
        from flexattn.build_ahead import explain_built

        answer = explain_built(spec, settings.backend, x)
    if request is None:
        return answer
    from flexattn.statistics import runs_on  # here, because few calls ask for it

    return answer._replace(statistics=runs_on(x, settings, request))


def bind_call(*arguments: object, **named: object) -> tuple[Operands, ops.Settings]:
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
