"""Forward-mode and second derivatives by Triton kernels: the calls that they support, and the step to their launchers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph

from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.mod_program import ARGUMENTS, GRADIENT, TANGENT, Program
from flexattn.dispatch.second_order import Along, Second, SecondMod
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs

if TYPE_CHECKING:
    from flexattn.kernels_triton.common import problem
    from flexattn.kernels_triton.second_order import launch

WIDEST = 256
SMALL_ROWS = 512  # bytes of a row for which 99 KiB of shared memory hold a tile


def unsupported(spec: AttentionSpec, x: Operands, is_bias_wanted: bool) -> str | None:
    """Returns why the kernels cannot run a call, or None if they can. is_bias_wanted: whether the bias gets a second derivative."""
    from flexattn.kernels_triton.common.tiles import SMALL_MEMORY
    from flexattn.kernels_triton.runtime.device import capability_of

    if reason := triton_backend.unsupported(spec, "backward"):
        return reason
    if spec.kv_lists:
        return "the kernels have no kv_indices"
    if spec.mods is not None and spec.mods.score is not None and spec.mods.is_given:
        return "the kernels derive a score_mod themselves, and this one has a derivative of its own"
    if max(spec.head_dim_qk, spec.head_dim_v) > WIDEST:
        return f"the kernels support head dims up to {WIDEST}"
    if max(spec.head_dim_qk, spec.head_dim_v) * x.q.element_size() > SMALL_ROWS and capability_of(x.q.device) in SMALL_MEMORY:
        return f"the kernels need more shared memory than this GPU has for rows of more than {SMALL_ROWS} bytes"
    if is_bias_wanted and x.bias is not None and x.bias.shape[-1] == 1:
        return "the kernels compute no derivative for a bias that all keys share"
    return None


def tangent(spec: AttentionSpec, x: Operands, lse: Tensor, along: Along, mod: SecondMod | None) -> tuple[Tensor, Tensor]:
    """Returns the results of `second_order.tangent`. mod: of the score_mod, if there is one."""
    from flexattn.kernels_triton.second_order.launch import Incoming, attention_tangent

    tout = empty_outputs(spec, x._replace(out=None))[0]
    call, incoming = _modified(spec, x, along, mod), Incoming(lse.contiguous())
    sums = attention_tangent(call, _along(spec, x, along), incoming, _rows(tout, spec.q_format))
    return tout, sums.mu_ptr


def joint_unsupported(spec: AttentionSpec, x: Operands) -> str | None:
    """Returns why no kernel computes a call's forward and tangent together, or None if one does. The call is not `unsupported`."""
    if reason := triton_backend.policy_of(spec).portable_only:
        return reason
    from flexattn.kernels_triton.hopper.conditions import tangent_unsupported  # here, because its import takes time

    if spec.return_max_logit or spec.results.fp32_out or options.check_values():
        return "it returns neither max_logit nor out in fp32, and FLEXATTN_CHECK=1 does not check it"
    return tangent_unsupported(triton_backend.to_problem(spec, x))


def joint_unsupported_on_device(spec: AttentionSpec, x: Operands) -> str | None:
    """Returns `joint_unsupported` for operands on the spec's device, which may be absent."""
    with torch.no_grad(), triton_backend.recorded_on(spec):
        return joint_unsupported(spec, triton_backend.on_meta(x))


def joint(spec: AttentionSpec, x: Operands, along: Along) -> tuple[Tensor, ...]:
    """Returns out, lse, max_logit, which is empty, and the tangents of out and lse. out and its tangent are contiguous."""
    from flexattn.kernels_triton.hopper.tangent import TangentResults, forward_with_tangent

    x = x._replace(out=None)
    (out, lse, max_logit), tout = empty_outputs(spec, x), empty_outputs(spec, x)[0]
    results = TangentResults(as_bshd(out, spec.q_format), as_bshd(tout, spec.q_format), lse)
    tlse = forward_with_tangent(triton_backend.to_problem(spec, x), _along(spec, x, along), results)
    return out, lse, max_logit, tout, tlse


class Given(NamedTuple):
    """lse, and the gradients of out and lse."""

    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def double_backward(
    spec: AttentionSpec, x: Operands, given: Given, along: Along, wanted: Sequence[bool], mod: SecondMod | None
) -> Second:
    """Returns the results of `second_order.double_backward`. mod: of the score_mod, if there is one."""
    from flexattn.kernels_triton.second_order.launch import Incoming, Repeated, Wanted, attention_double_backward

    memory: Tensor | Repeated
    if joint_unsupported(spec, x) is None:
        out, _, _, tout, tlse = joint(spec, x, along)
        memory = Repeated(as_bshd(out, spec.q_format), as_bshd(tout, spec.q_format), tlse)
    else:
        tout = empty_outputs(spec, x._replace(out=None))[0]
        memory = _rows(tout, spec.q_format)
    dout, dlse = _rows(given.dout, spec.q_format), None if given.dlse is None else given.dlse.contiguous()
    incoming = Incoming(given.lse.contiguous(), dout, dlse)
    captures = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in _chosen(x.mod_tensors, wanted[5:])]
    reached, bent = ((), ()) if mod is None else (_added_to(mod, mod.derivative), _added_to(mod, mod.bend))
    more = Wanted(wanted[3], captures, reached, bent, spec.deterministic)
    call = _modified(spec, x, along, mod)
    sums, found = attention_double_backward(call, _along(spec, x, along), incoming, memory, more)
    hq = as_bshd(found.q, spec.q_format)
    hk, hv = (as_bshd(t, spec.kv_format) for t in (found.k, found.v))
    bias, offset = (
        None if t is None or like is None else t.to(like.dtype)
        for t, like in ((found.bias, x.bias), (found.softmax_offset, x.softmax_offset))
    )
    left = iter(captures)
    return Second(tout, sums.mu_ptr, (hq, hk, hv, bias, offset, *(next(left) if flag else None for flag in wanted[5:])))


def _chosen(tensors: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor]:
    return [t for t, flag in zip(tensors, flags, strict=True) if flag]


def _added_to(mod: SecondMod, graph: Graph | None) -> tuple[int, ...]:
    """Returns the captures to whose gradients a derivative adds, by their index among the captures that need one."""
    if graph is None:
        return ()
    wanted = [i for i, capture in enumerate(mod.captures) if capture.needs_grad]
    return tuple(sorted({wanted.index(position) for position, _, _ in _outputs(graph)[1:]}))


def _outputs(graph: Graph) -> Any:
    return next(node.args[0] for node in graph.nodes if node.op == "output")


def _modified(spec: AttentionSpec, x: Operands, along: Along, mod: SecondMod | None) -> launch.Modified:
    """Returns the problem with the Triton functions of its mods. They read the captures' tangents behind the captures."""
    from flexattn.kernels_triton.mods.lowering import flatten, layouts
    from flexattn.kernels_triton.second_order.launch import Modified

    problem = triton_backend.to_problem(spec, x)
    if mod is None or spec.mods is None:
        return Modified(problem)
    tensors = (*x.mod_tensors, *(t.contiguous() for t in along[5:] if t is not None))
    places = layouts([(c.name, c.dtype, c.ndim) for c in mod.captures], tensors)
    mods, bends = _lowered(spec.mods, mod, places, spec.dtype is torch.float32)
    captures = flatten(places, tensors, x.mod_numbers)
    return Modified(replace(problem, mods=mods, mods_of_tables=None, captures=captures), bends)


@functools.lru_cache(maxsize=256)
def _lowered(program: Program, mod: SecondMod, places: tuple[Any, ...], is_fp32: bool) -> tuple[Any, Any]:
    """Returns the Triton functions of a program's mods, and of the second derivatives of its score_mod."""
    from flexattn.kernels_triton.common.problem import Mods
    from flexattn.kernels_triton.mods import lowering
    from flexattn.kernels_triton.mods.hoisting import hoist
    from flexattn.kernels_triton.second_order.tiles import Bends

    hoisted = hoist((program.score, mod.derivative, program.mask, mod.tangent, mod.bend), tabulates=False)
    score, derivative, mask, tangent, bend = hoisted.graphs
    assert score is not None
    assert derivative is not None
    assert tangent is not None
    per_head = lowering.lower_per_head(hoisted.per_head, 0, places, is_fp32)
    kind = (places, is_fp32, per_head)
    first, second = (GRADIENT, *ARGUMENTS), (GRADIENT, TANGENT, *ARGUMENTS)
    mods = Mods(
        score=lowering.lower(score, "score_mod", ARGUMENTS, *kind),
        gradient=lowering.lower(derivative, "score_mod_gradient", first, *kind),
        mask=mask and lowering.lower(mask, "mask_mod", ARGUMENTS[1:], *kind),
        per_head=per_head.per_head,
        accumulate=lowering.lower_accumulation(derivative, first, *kind) if _added_to(mod, mod.derivative) else None,
        score_is_finite=lowering.is_finite(program.score),
    )
    return mods, Bends(
        tangent=lowering.lower(tangent, "score_mod_tangent", (TANGENT, *ARGUMENTS), *kind),
        gradient=lowering.lower(bend, "score_mod_bend", second, *kind) if bend and _outputs(bend)[0] is not None else None,
        accumulate=lowering.lower_accumulation(bend, second, *kind) if bend and _added_to(mod, mod.bend) else None,
    )


def _rows(t: Tensor, fmt: str) -> Tensor:
    return as_bshd(t if t.stride(-1) == 1 and t.is_contiguous() else t.contiguous(), fmt)


def _along(spec: AttentionSpec, x: Operands, along: Along) -> problem.Along:
    from flexattn.kernels_triton.common.problem import Along as Tangents

    q, k, v = (
        _rows(torch.zeros_like(given, memory_format=torch.contiguous_format) if t is None else t, fmt)
        for t, given, fmt in zip(along, (x.q, x.k, x.v), (spec.q_format, spec.kv_format, spec.kv_format), strict=False)
    )
    offset = None if along[4] is None else along[4].contiguous()
    return Tangents(q, k, v, along[3], offset)
