"""`flexattn.nn.qk_norm_rope`: RMSNorm of each head of q and k with rotary positions, and its operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn import compat, registered  # noqa: F401 (`registered` registers the operators)
from flexattn.dispatch import norm_rope
from flexattn.dispatch.neutral import fixed_sizes
from flexattn.dispatch.norm_rope import NormRope
from flexattn.dispatch.select import BackendError
from flexattn.function_context import FunctionContext
from flexattn.validation import DTYPES, check_flag, check_number, check_tensor, describe, is_one_of

_NUM_TENSORS = NormRope._fields.index("eps")  # they come first
_operators = torch.ops.flexattn


@fixed_sizes
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns q and k with each head normalised by RMSNorm, then rotated by its token's position.

    RMSNorm divides a head by sqrt(mean of its squares + eps) and multiplies it by the weight (Zhang and Sennrich,
    https://arxiv.org/abs/1910.07467). Rotary positions turn each pair (a, b) of numbers into (a cos - b sin, b cos + a sin) (Su et
    al., "RoFormer", https://arxiv.org/abs/2104.09864). Both are computed in float32 and rounded once. On a GPU one Triton kernel
    computes both for q and k, and one their gradients; a repeated backward has bitwise equal results. In float64 and on other
    devices, torch operations compute the same.

    Args:
        q: [b, s, h, d], or packed [t, h, d]; any strides, so a part of a projection needs no copy.
        k: [b, s, h_kv, d] or [t, h_kv, d], of q's dtype.
        position_embeddings: (cos, sin) of each token, [s, r], [1, s, r] or [b, s, r]; for packed tokens [t, r] or [1, t, r]. The
            first r numbers of a head are rotated. Both numbers of a pair must have the same angle, as in transformers and
            diffusers; this is not checked. None: no rotation.
        q_weight, k_weight: [d], the weights of RMSNorm. None for both: no norm.
        eps: number that is added to the mean of squares.
        interleaved: whether the pairs are neighbours, (0, 1), (2, 3) and so on, as in FLUX and Wan. If False, number i and number
            i + r / 2 form a pair, as in Llama and Qwen.
        zero_centered: whether heads are multiplied by 1 + weight, as in Gemma and Qwen3.5.

    Returns:
        (q, k), contiguous, of the inputs' shapes and dtype. Differentiable in q, k and the weights. Forward-mode and second
        derivatives, and torch.func's transforms, run in torch operations.

    Raises:
        ValueError, TypeError: arguments do not fit together. cos or sin requires a gradient, which the kernels do not compute.
    """
    cos, sin = _check(q, k, position_embeddings, (q_weight, k_weight))
    check_flag("interleaved", interleaved)
    check_flag("zero_centered", zero_centered)
    eps = float(check_number("eps", eps, 1.0, "a number from 0 to 1"))
    is_packed = q.dim() == 3
    if is_packed:
        q, k = q[None], k[None]
    if cos is not None and cos.dim() == 2:
        cos, sin = cos[None], sin[None]  # type: ignore[index]
    results = _run(NormRope(q, k, cos, sin, q_weight, k_weight, eps, interleaved, zero_centered))
    return (results[0][0], results[1][0]) if is_packed else results


def _run(x: NormRope) -> tuple[Tensor, Tensor]:
    is_plain = all(t is None or type(t) in (Tensor, torch.nn.Parameter) for t in x.tensors)
    is_transformed = compat.forward_mode_level() >= 0 or compat.has_transforms()
    if not is_plain or is_transformed or norm_rope.kernel_error(x):
        return norm_rope.reference(x)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x.tensors):
        return _NormRope.apply(*x)  # type: ignore[no-any-return, no-untyped-call]
    return _operators.qk_norm_rope.default(*x)  # type: ignore[no-any-return]


class _NormRope(torch.autograd.Function):
    """The operators as a function with gradients; its arguments are the fields of NormRope."""

    @staticmethod
    def forward(ctx: FunctionContext, *call: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*call[:_NUM_TENSORS])
        ctx.constants = call[_NUM_TENSORS:]
        return _operators.qk_norm_rope.default(*call)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: FunctionContext, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor | None, ...]:
        call: Any = (*ctx.saved_tensors, *ctx.constants)
        x = NormRope(*call)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the gradients are differentiated further
            return _differentiable_gradients(x, (dq_out, dk_out))
        dq, dk, dq_weight, dk_weight = _operators.qk_norm_rope_backward.default(dq_out, dk_out, *x)
        dweights = (None, None) if x.q_weight is None else (dq_weight, dk_weight)
        return dq, dk, None, None, *dweights, None, None, None


def _differentiable_gradients(x: NormRope, dout: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `_NormRope.backward` with derivatives."""
    leaves = {i: t for i, t in enumerate(x.tensors) if t is not None and t.requires_grad}
    results = [(out, d) for out, d in zip(norm_rope.reference(x), dout, strict=True) if out.requires_grad]
    found = torch.autograd.grad([out for out, _ in results], list(leaves.values()), [d for _, d in results], create_graph=True)
    gradients = dict(zip(leaves, found, strict=True))
    return tuple(gradients.get(i) for i in range(len(x)))


def qk_norm_rope_implementation(*call: Any) -> tuple[Tensor, Tensor]:
    return norm_rope.forward(_with_kernel(NormRope(*call)))


def qk_norm_rope_backward_implementation(dq_out: Tensor, dk_out: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, *dweights = norm_rope.backward(_with_kernel(NormRope(*call)), dq_out, dk_out)
    dq_weight, dk_weight = (dq.new_empty(0) if t is None else t for t in dweights)
    return dq, dk, dq_weight, dk_weight


def _with_kernel(x: NormRope) -> NormRope:
    """Returns the call. Raises BackendError if no kernel runs it, as in a program that was exported for another device."""
    if reason := norm_rope.kernel_error(x):
        raise BackendError(f"qk_norm_rope has no kernel here: {reason}; call flexattn.nn.qk_norm_rope on this device instead")
    return x


def qk_norm_rope_fake(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def qk_norm_rope_backward_fake(_: Tensor, __: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = NormRope(*call)
    q_weight, k_weight = (x.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x.q_weight, x.k_weight))
    return x.q.new_empty(x.q.shape), x.k.new_empty(x.k.shape), q_weight, k_weight


def _check(
    q: Tensor, k: Tensor, position_embeddings: object, weights: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns cos and sin. Raises if the tensors do not fit together."""
    check_tensor("q", q, DTYPES, None)
    check_tensor("k", k, (q.dtype,), q.device)
    if q.dim() not in (3, 4) or 0 in q.shape[-2:]:
        raise ValueError(f"q is {describe(q)}; accepted: [b, s, h, d] or packed [t, h, d]; call q.transpose(1, 2) for [b, h, s, d]")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1] or k.shape[-2] == 0:
        raise ValueError(f"k is {describe(k)} and q {describe(q)}; accepted: the same dims for both, except the heads")
    given = [t is not None for t in weights]
    if any(given) and not all(given):
        missing, other = ("k", "q") if given[0] else ("q", "k")
        raise ValueError(
            f"{missing}_weight is None and {other}_weight is not; accepted: both, or None for both; pass ones for a norm alone"
        )
    for name, weight in zip(("q_weight", "k_weight"), weights, strict=True):
        if weight is not None:
            check_tensor(name, weight, DTYPES, q.device)
            if weight.shape != q.shape[-1:]:
                raise ValueError(f"{name} is {describe(weight)}; accepted: [{q.shape[-1]}], the head dim")
    if position_embeddings is None:
        if not any(given):
            raise ValueError("position_embeddings, q_weight and k_weight are None; accepted: (cos, sin), or both weights, or all")
        return None, None
    if not isinstance(position_embeddings, (tuple, list)) or len(position_embeddings) != 2:
        raise TypeError(f"position_embeddings is {describe(position_embeddings)}; accepted: (cos, sin), or None")
    cos, sin = position_embeddings
    tokens = (1, *q.shape[:1]) if q.dim() == 3 else q.shape[:2]
    for name, table in (("cos", cos), ("sin", sin)):
        name = f"{name} of position_embeddings"
        check_tensor(name, table, DTYPES, q.device)
        leading = tuple(table.shape[:-1])
        if table.dim() not in (2, 3) or not is_one_of(leading, (tokens[1:], (1, *tokens[1:]), tokens)):
            raise ValueError(
                f"{name} is {describe(table)} for q of {tuple(q.shape)}; accepted: [s, r], [1, s, r] or [b, s, r], for packed "
                "tokens [t, r] or [1, t, r]; with position ids, pass table[position_ids]"
            )
        if table.shape[-1] % 2 or not 2 <= table.shape[-1] <= q.shape[-1]:
            raise ValueError(
                f"{name} is {describe(table)}; accepted: an even last dim of at most {q.shape[-1]}, which has each angle twice"
            )
        if torch.is_grad_enabled() and table.requires_grad:
            raise ValueError(f"{name} requires a gradient, which is not computed; accepted: a tensor without, as by detach()")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos of position_embeddings is {describe(cos)} and sin {describe(sin)}; accepted: one shape and one dtype"
        )
    return cos, sin
