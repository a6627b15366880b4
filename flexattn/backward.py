"""The backward of attention as a function, for callers that keep the forward's results: rings and other sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import call_cache, fp8, ops, validation
from flexattn.cached_call import CachedCall
from flexattn.call_cache import CONSTANTS, CallKey, split_of
from flexattn.call_options import BackwardOptions, taking
from flexattn.dispatch.spec import FP32_GRADIENTS, Fp32Gradients, Operands, Results, dense_in, parse_format
from flexattn.first_order import PART, guarded, refuse_batched
from flexattn.fp8_steps import BackwardSteps
from flexattn.prepare import prepare
from flexattn.shorthands import in_full

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import Unpack


class Gradients(NamedTuple):
    """Results of `attention_backward`: each is contiguous, and has the shape and dtype of its tensor.

    The gradients that `fp32_gradients` names are in float32.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None  # None: there is no bias, or it does not require a gradient
    dsoftmax_offset: Tensor | None  # None: there is none
    dcaptures: tuple[tuple[Tensor, Tensor], ...]  # (tensor, its gradient) for each captured tensor that requires one


@taking(BackwardOptions)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    fp32_gradients: Fp32Gradients = "none",
    **options: Unpack[BackwardOptions[Tensor, BlockMask]],
) -> Gradients:
    """Returns the gradients of `attention` from its forward's results. k and v may be a part of the keys and values of out and lse.

    Let s be the scores of these keys, p = exp(s - lse), with lse as given, delta = sum(out * dout) - dlse and dp = dout v^T.
    Then dv = p^T dout, ds = p (dp - delta), dq = ds k * softmax_scale and dk = ds^T q * softmax_scale, as in FlashAttention
    (Dao et al., 2022, algorithm 4) and ring attention (Liu et al., 2023). If several parts of the keys share out, lse, dout and
    dlse, their gradients add up: each part has dk and dv of its own keys, and dq is the sum over the parts.

    Args:
        dout: the gradient of out, of out's shape and dtype, in any strides.
        q, k, v: as `attention` takes them, in float16, bfloat16 or float32 (float64 on the eager backend).
        out: the result of `attention`, or of `merge_attention` over all parts: q's shape with v's head dim last, in q's dtype.
        lse: returned with out: float32 (float64 for float64), [b, h, sq], or [h, t_q] for thd, and -inf if a query sees no key. A
            probability is as exact as exp(-lse). Half a unit in the last place of an lse of 200 is a relative error of 8e-6; for
            an lse of -1e4, such as that of a row that a bias hides completely, it is 5e-4. (The backward of `attention` avoids
            that error, because it has complete rows.)
        dlse: the gradient of lse, of its shape and dtype, or None for 0.
        rng_state: needed if dropout_p > 0: the value that the forward over these keys got.
        fp32_gradients: "dq", "dkv" (dk and dv) or "dqkv": if q, k and v have 16 bits, these gradients are in float32, as the
            kernels sum them, and are not rounded. Use it for gradients that are sums over parts. "none": all are in q's dtype.
            In float32 and float64 nothing changes. cuDNN does not run such a call, because its gradients have 16 bits.
        backend: as `attention` takes it. If dropout_p > 0 and rng_state is [2], pass the name of the forward's backend, because
            cuDNN drops other weights than the other backends.

        All others: as the forward over these keys got them. A sink belongs to one part alone, and so does its gradient. Queries
            and keys count from the beginning of the given tensors. For a causal mask over keys from position n on, give the
            queries from n on, with their out, lse, dout and dlse; or pass a mask_mod that knows n.

    Returns:
        Gradients: (dq, dk, dv, dbias, dsoftmax_offset, dcaptures). They have no derivatives: differentiating them raises.

    Raises:
        ValueError, TypeError: an argument is invalid. The text names it, its value and the accepted values. Nothing has been
            launched. FP8 and DTensors are refused.
        BackendError: no backend can run the call, or the named one cannot; the text gives each backend's reason.
    """
    for name in options:
        if name not in BackwardOptions.__annotations__:
            raise TypeError(f"attention_backward() got an unexpected keyword argument {name!r}")
    validation.check_name("fp32_gradients", fp32_gradients, FP32_GRADIENTS)
    return differentiate(Results(fp32=fp32_gradients), Given(dout, q, k, v, out, lse, dlse), options)


class Given(NamedTuple):
    """Tensors that every backward has; `attention_backward` documents them."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None = None


class GivenInFp8(NamedTuple):
    """FP8 of a backward whose q, k and v are in FP8; out and the gradients are in recipe.out_dtype."""

    recipe: fp8.Recipe  # granularity, block_rows and out_dtype, with which `attention` takes these q, k and v
    grad_dtype: str  # dtype of the scores' gradient, and of dout if it is in FP8
    descales: Sequence[Tensor]  # scales of q, k and v
    descale_dout: Tensor | None  # None: dout is in 16 bits, and rounded in the backward
    dout16: Tensor | None  # dout in 16 bits, if `dout` is in FP8
    is_part: bool  # whether out and lse may cover more keys than k and v have


def differentiate(results: Results, given: Given, options: Mapping[str, Any], in_fp8: GivenInFp8 | None = None) -> Gradients:
    """Returns the results of `attention_backward`, with out and the gradients as `results` says.

    in_fp8: given if q, k and v are in FP8; then only a forward's arguments are checked. options: options of `attention_backward`.
    out and dout have q's dims, in any strides.
    """
    dout, q, k, v, out, lse, dlse = given
    more: tuple[Tensor | None, ...] = ()
    if in_fp8 is None:
        _check_kinds(q, k, v)
    else:
        more = (*in_fp8.descales, in_fp8.descale_dout, in_fp8.dout16)
    key: CallKey | None = None
    call: CachedCall | None = None
    if not torch.compiler.is_compiling():
        split = split_of(tuple(options))
        values = [*CONSTANTS, split, q, k, v, *options.values()]
        kind = None if in_fp8 is None else (in_fp8.recipe, in_fp8.grad_dtype, in_fp8.is_part)
        others = ("backward", results, kind, *split.others(values))
        tensors = (*split.all_tensors(values), *more, out, lse, dout, dlse)
        key, kept = call_cache.look_up(tensors, others, split.window(values), split.mods_of(values))
        call = kept if isinstance(kept, CachedCall) else None
    is_new = call is None
    if call is None:
        fp8_values = () if in_fp8 is None else (in_fp8.recipe, *in_fp8.descales)
        in_forward = dict(zip(("fp8_recipe", "descale_q", "descale_k", "descale_v"), fp8_values, strict=False))
        arguments = in_full(q, k, {**options, **in_forward, "return_lse": True})
        with torch.enable_grad():  # for the mods' captures
            x, settings, _ = prepare(q, k, v, arguments, is_backward=True, results=results)
        steps = None
        if in_fp8 is None:
            _check(x, settings, out, lse, dout, dlse)
        else:
            settings = settings._replace(fp8_grad=in_fp8.grad_dtype, is_part=in_fp8.is_part)
            steps = BackwardSteps(settings, x.q.device)
            x = steps.operands(x, more)
        if key is not None:
            call = call_cache.new_call(key, x._replace(copies16=()), settings, arguments["alibi_slopes"], steps)
    else:
        settings = call.settings
    # The kernels of every other backend have the same names.
    out, lse = dense_in(out, parse_format(settings.qkv_format)[0], settings.out_format), lse.contiguous()
    with torch.no_grad():
        if key is not None and call is not None:
            inputs = call.inputs(key)
            found, x = call.backward((*inputs, *more, out, lse, dout, dlse)), call.operands(inputs)
            if is_new:
                call_cache.remember(key, call)
        else:
            found = ops.gradients(x, settings, ops.Incoming(out, lse, dout, dlse))
    flags = ops.captures_with_gradients(settings.mods)
    captured = [t for t, needs_grad in zip(x.mod_tensors, flags, strict=True) if needs_grad]
    gradients: Sequence[Tensor | None] = found.flat()
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        bias_and_offset = options.get("bias"), options.get("softmax_offset")
        gradients = guarded(gradients, dout, dlse, out, lse, q, k, v, *bias_and_offset, *captured)
    dense, capture_gradients = gradients[: len(found) - 1], gradients[len(found) - 1 :]
    return Gradients(*dense, tuple(zip(captured, capture_gradients, strict=True)))  # type: ignore[call-arg, arg-type]


def _check_kinds(*qkv: object) -> None:
    """Raises TypeError for kinds of tensors that a forward takes and a backward does not."""
    for name, t in zip("qkv", qkv, strict=True):
        if type(t).__name__ == "DTensor":
            raise TypeError(f"{name} is a DTensor; accepted: a local tensor, as that of to_local()")
        if isinstance(t, Tensor) and t.dtype in validation.FP8_DTYPES:
            raise TypeError(
                f"{name} has dtype {t.dtype}; accepted: float16, bfloat16, float32 or float64, as FP8 has no such backward"
            )


def _check(x: Operands, settings: ops.Settings, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
    """Raises ValueError or TypeError for the requirements of a backward beyond a forward's."""
    refuse_batched(dout, dlse, out, lse)
    if ops.is_differentiated((*ops.tensors_of(x), out, lse, dout, dlse)):
        raise RuntimeError(PART)
    validation.check_backward(x, settings.qkv_format, out, lse, dout, dlse)
    if x.dropout_p == 0.0:
        return
    if x.rng_state is None:
        raise ValueError("rng_state is None with dropout_p > 0; accepted: the int64 tensor [2] that the forward was given")
    if settings.backend == "auto" and x.rng_state.dim() == 1:  # all backends that draw by global positions draw alike
        raise ValueError(
            "backend is 'auto' with dropout_p > 0; accepted: the name of the backend that the forward ran on, as not all drop the "
            "same weights (give it to both)"
        )
