"""Forward-mode and second derivatives by Triton kernels: the calls that they support, and the step to their launchers.

No GPU has run these kernels. So `auto` takes the plain torch operations of `second_order`, unless FLEXATTN_HOPPER=always allows
kernels that never ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.second_order import Along, Second
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs

if TYPE_CHECKING:
    from flexattn.kernels_triton.second_order import launch

HAS_RUN = False  # whether a GPU has run the kernels
WIDEST = 256


def unsupported(spec: AttentionSpec, along: Along, wanted: Sequence[bool]) -> str | None:
    """Returns why the kernels cannot run a call, or None if they can. wanted: see `second_order.double_backward`."""
    if not (HAS_RUN or triton_backend.policy_of(spec).takes_what_never_ran):
        return "no GPU has run these kernels; FLEXATTN_HOPPER=always allows them"
    if reason := triton_backend.unsupported(spec, "backward"):
        return reason
    if spec.kv_lists or spec.block_size is not None or (spec.mods is not None and spec.mods.score is not None):
        return "the kernels have no score_mod, no block_mask and no kv_indices"
    if max(spec.head_dim_qk, spec.head_dim_v) > WIDEST:
        return f"the kernels support head dims up to {WIDEST}"
    _, _, _, bias, _, *captures = wanted
    if bias or any(captures) or any(t is not None for t in along[5:]):
        return "the kernels compute no derivatives for a bias and for captured tensors"
    return None


def tangent(spec: AttentionSpec, x: Operands, lse: Tensor, along: Along) -> tuple[Tensor, Tensor]:
    """Returns the results of `second_order.tangent`."""
    from flexattn.kernels_triton.second_order.launch import Incoming, attention_tangent

    tout = torch.zeros_like(empty_outputs(spec, x._replace(out=None))[0])
    problem, incoming = triton_backend.to_problem(spec, x), Incoming(lse.contiguous())
    sums = attention_tangent(problem, _along(spec, x, along), incoming, _rows(tout, spec.q_format))
    return tout, sums.mu_ptr


def double_backward(
    spec: AttentionSpec, x: Operands, lse: Tensor, gradients: tuple[Tensor, Tensor | None], along: Along
) -> Second:
    """Returns the results of `second_order.double_backward`. gradients: of out and lse."""
    from flexattn.kernels_triton.second_order.launch import Incoming, attention_double_backward

    dout, dlse = gradients
    tout = torch.zeros_like(empty_outputs(spec, x._replace(out=None))[0])
    incoming = Incoming(lse.contiguous(), _rows(dout, spec.q_format), None if dlse is None else dlse.contiguous())
    problem = triton_backend.to_problem(spec, x)
    sums, found = attention_double_backward(problem, _along(spec, x, along), incoming, _rows(tout, spec.q_format))
    hq = as_bshd(found.q, spec.q_format)
    hk, hv = (as_bshd(t, spec.kv_format) for t in (found.k, found.v))
    offset = None if found.softmax_offset is None or x.softmax_offset is None else found.softmax_offset.to(x.softmax_offset.dtype)
    return Second(tout, sums.mu_ptr, (hq, hk, hv, None, offset, *(None for _ in x.mod_tensors)))


def _rows(t: Tensor, fmt: str) -> Tensor:
    return as_bshd(t if t.stride(-1) == 1 and t.is_contiguous() else t.contiguous(), fmt)


def _along(spec: AttentionSpec, x: Operands, along: Along) -> launch.Along:
    from flexattn.kernels_triton.second_order.launch import Along as Tangents

    q, k, v = (
        _rows(torch.zeros_like(given, memory_format=torch.contiguous_format) if t is None else t, fmt)
        for t, given, fmt in zip(along, (x.q, x.k, x.v), (spec.q_format, spec.kv_format, spec.kv_format), strict=False)
    )
    offset = None if along[4] is None else along[4].contiguous()
    return Tangents(q, k, v, along[3], offset)
