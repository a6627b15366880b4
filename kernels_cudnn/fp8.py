"""Launchers of attention in FP8 on cuDNN, with scales per tensor.

On sm_90 cuDNN writes out, dq, dk and dv in FP8 only, so it needs the scale of each before it runs. The scale of out follows from v,
because each element of out is a mean of elements of v. The scales of the gradients come with the call (delayed scaling), or from
the maxima that a first run writes (current scaling). If the call needs fp16, bf16 or fp32, the FP8 result is converted and keeps
its precision.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_cudnn.attention import KEY_TILE, NEG_INF, Call, Written, backward_call, forward_call, write_empty
from flexattn.kernels_cudnn.execute import execute
from flexattn.kernels_cudnn.fp8_rules import Fp8Call, fp8_error
from flexattn.kernels_cudnn.graphs import ALIGNMENT, Uid
from flexattn.kernels_cudnn.lengths import constant
from flexattn.kernels_cudnn.plans import PLANS, PlanNotSupported
from flexattn.kernels_cudnn.problem import FP8_DTYPES, Problem

LARGEST_SCALE = 2.0**120  # with this limit, neither a scale nor its inverse is infinite or denormal.
WEIGHTS_SCALE = 256.0  # weights are at most 1, and e4m3 ends at 448. 256 uses that range and is exact.


class Descales(NamedTuple):
    """Dequantisation factors of q, k and v: one fp32 number each, expanded to any shape."""

    q: Tensor
    k: Tensor
    v: Tensor


class Incoming(NamedTuple):
    """Tensors that the backward reads in addition to q, k and v: the forward's results and the gradient of out."""

    out: Tensor  # FP8 with a descale_out, else fp16 or bf16.
    descale_out: Tensor | None  # fp32 [1].
    lse: Tensor
    dout: Tensor  # FP8.
    descale_dout: Tensor  # fp32 [1].


class GradientScales(NamedTuple):
    """Factors that quantise the gradients of the scores, q, k and v. Each is fp32 [1]."""

    ds: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Quantized(NamedTuple):
    """Descale and amax of a tensor that a launcher wrote. Each is fp32 [1]."""

    descale: Tensor  # the factor of an FP8 result. If the result has another dtype, it is already multiplied by the factor.
    amax: Tensor  # the largest magnitude before quantisation.


class GradientsQuantized(NamedTuple):
    ds: Quantized
    dq: Quantized
    dk: Quantized
    dv: Quantized


def fp8_forward(
    problem: Problem, descales: Descales, out: Tensor, lse: Tensor, scale_out: Tensor | None = None, directory: str | None = None
) -> Quantized:
    """Writes out and lse as `attention_forward` does, from q, k and v in FP8.

    out: a tensor in FP8, or in another dtype, to which the FP8 result is converted.
    scale_out: fp32 [1], the factor of out before it is quantised. If None, it scales the largest magnitude in v to the end of the
        range.

    Raises PlanNotSupported if cuDNN does not support the problem. Nothing is written then.
    """
    _check(problem, "forward", **descales._asdict())
    device = out.device
    if problem.is_empty:
        write_empty(problem, out, lse, None)
        return _unit(device)
    written = out if out.dtype in FP8_DTYPES else torch.empty_like(out, dtype=problem.q.dtype)
    numbers = _numbers_of_weights(problem, descales)
    numbers[Uid.AMAX_OUT] = _empty(device)
    call = forward_call(problem, written, lse, None, numbers)
    if scale_out is None:
        scale_out = _scale_for(_amax(call.buffers[Uid.V], numbers[Uid.DESCALE_V]), written.dtype)
    call.buffers[Uid.SCALE_OUT] = _aligned(scale_out)
    execute(PLANS.get(call.sdpa, device, directory), call.buffers, device)
    call.finish()
    descale_out = scale_out.reciprocal()
    if written is not out:
        _convert(written, descale_out, out)
    return Quantized(descale_out, numbers[Uid.AMAX_OUT])


def fp8_backward(
    problem: Problem,
    descales: Descales,
    incoming: Incoming,
    gradients: Written,
    scales: GradientScales | None = None,
    directory: str | None = None,
) -> GradientsQuantized:
    """Writes dq, dk and dv, from q, k, v and dout in FP8.

    The forward's results may come from any kernel. cuDNN computes the gradients in the dtype of `dout`. They are returned in FP8,
    or converted to the dtype of `gradients`. Without `scales` the plan runs twice, or three times if `dout` is e4m3. Each run
    learns scales from the maxima of the run before.

    Raises as `fp8_forward` does.
    """
    out, descale_out, lse, dout, descale_dout = incoming
    _check(problem, "backward", **descales._asdict(), dout=descale_dout)
    device = out.device
    targets = {Uid.DQ: gradients.dq, Uid.DK: gradients.dk, Uid.DV: gradients.dv}
    if problem.is_empty:
        for target in targets.values():
            target.zero_()
        return GradientsQuantized(*(_unit(device) for _ in _SCALES))
    formats = {uid: target.dtype if target.dtype in FP8_DTYPES else dout.dtype for uid, target in targets.items()}
    problem, out, lse, dout, written = _in_whole_tiles(problem, out, lse, dout, targets, formats)
    numbers = _numbers_of_weights(problem, descales)
    numbers[Uid.DESCALE_OUT] = _number(1.0, device) if descale_out is None else _aligned(_one(descale_out))
    numbers[Uid.DESCALE_DOUT] = _aligned(_one(descale_dout))
    numbers |= {amax: _empty(device) for amax in _AMAX.values()}
    call = backward_call(problem, out, lse, dout, Written(*(written[uid] for uid in targets)), numbers)
    plan = PLANS.get(call.sdpa, device, directory)
    first_scales = scales or GradientScales(_bounding_scale(problem, call.buffers), *(_number(1.0, device) for _ in targets))
    for uid, scale in zip(_SCALES, first_scales, strict=True):
        call.buffers[uid] = _aligned(scale)
    call.buffers[Uid.DESCALE_DS] = call.buffers[Uid.SCALE_DS].reciprocal()
    if scales is None:
        scaled_dtypes = {Uid.SCALE_DS: dout.dtype} | {_SCALE_OF[uid]: dtype for uid, dtype in formats.items()}
        for learned in _learned_by_run(dout.dtype):
            execute(plan, call.buffers, device)
            for uid in learned:
                call.buffers[uid] = _scale_for(call.buffers[_AMAX[uid]], scaled_dtypes[uid])
            call.buffers[Uid.DESCALE_DS] = call.buffers[Uid.SCALE_DS].reciprocal()
    execute(plan, call.buffers, device)
    call.finish()
    results = [Quantized(call.buffers[uid].reciprocal(), call.buffers[_AMAX[uid]]) for uid in _SCALES]
    for (uid, target), quantized in zip(targets.items(), results[1:], strict=True):
        rows = written[uid][:, : target.shape[1]]
        if target.dtype not in FP8_DTYPES:
            _convert(rows, quantized.descale, target)
        elif written[uid] is not target:
            target.copy_(rows)
    return GradientsQuantized(*results)


def fp8_call(problem: Problem, out: Tensor, lse: Tensor, dout: Tensor | None = None, gradients: Written | None = None) -> Call:
    """Returns the plan that a launcher needs, from tensors on the meta device. With dout it is the backward's plan.

    Raises as the launchers do, but does not check descales.
    """
    _check(problem, "forward" if dout is None else "backward")
    return unchecked_call(problem, out, lse, dout, gradients)


def unchecked_call(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor | None = None, gradients: Written | None = None
) -> Call:
    """Returns the plan as `fp8_call` does, without the launchers' checks, so that tests can ask cuDNN about it."""
    if dout is None or gradients is None:
        written = out if out.dtype in FP8_DTYPES else torch.empty_like(out, dtype=problem.q.dtype)
        return forward_call(problem, written, lse)
    targets = {Uid.DQ: gradients.dq, Uid.DK: gradients.dk, Uid.DV: gradients.dv}
    formats = {uid: target.dtype if target.dtype in FP8_DTYPES else dout.dtype for uid, target in targets.items()}
    if not problem.is_ragged:
        problem, out, lse, dout, targets = _in_whole_tiles(problem, out, lse, dout, targets, formats)
    return backward_call(problem, out, lse, dout, Written(*targets.values()))


_SCALES = (Uid.SCALE_DS, Uid.SCALE_DQ, Uid.SCALE_DK, Uid.SCALE_DV)  # in the order of GradientScales
_AMAX = dict(zip(_SCALES, (Uid.AMAX_DS, Uid.AMAX_DQ, Uid.AMAX_DK, Uid.AMAX_DV), strict=True))
_SCALE_OF = dict(zip((Uid.DQ, Uid.DK, Uid.DV), _SCALES[1:], strict=True))


def _learned_by_run(dtype: torch.dtype) -> tuple[tuple[Uid, ...], ...]:
    """Returns the scales that each run before the last one learns.

    The first run scales the gradients of scores by an upper bound of their magnitude. e5m2 reaches 2**30 below that bound, so it
    rounds as with the exact maximum. e4m3 does not, so its scale is learned first: the other maxima depend on it.
    """
    others = _SCALES[1:]
    return (others,) if dtype is torch.float8_e5m2 else ((Uid.SCALE_DS,), others)


def _in_whole_tiles(
    x: Problem, out: Tensor, lse: Tensor, dout: Tensor, targets: dict[Uid, Tensor], formats: dict[Uid, torch.dtype]
) -> tuple[Problem, Tensor, Tensor, Tensor, dict[Uid, Tensor]]:
    """Returns the dense tensors of a backward and the tensors for its gradients, copied if their rows do not fill whole tiles.

    cuDNN 9.19 did not write dq of the last three of 333 queries on an NVIDIA H200.
    """
    extra_q, extra_kv = -x.longest_q % KEY_TILE, -x.longest_kv % KEY_TILE
    extra = {Uid.DQ: extra_q, Uid.DK: extra_kv, Uid.DV: extra_kv}
    written = {
        uid: target if target.dtype == formats[uid] and not extra[uid] else _with_rows(target, extra[uid], formats[uid])
        for uid, target in targets.items()
    }
    if not extra_q and not extra_kv:
        return x, out, lse, dout, written
    q, out, dout = (_padded(t, extra_q) for t in (x.q, out, dout))
    k, v = (_padded(t, extra_kv) for t in (x.k, x.v))
    cu_seqlens_q, cu_seqlens_kv = x.cu_seqlens_q, x.cu_seqlens_kv
    if cu_seqlens_q is None:
        cu_seqlens_q, cu_seqlens_kv = (
            torch.arange(0, (x.batch + 1) * n, n, dtype=torch.int32, device=q.device) for n in (x.longest_q, x.longest_kv)
        )
    padded = dataclasses.replace(x, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    return padded, out, torch.nn.functional.pad(lse, (0, extra_q), value=NEG_INF), dout, written


def _with_rows(t: Tensor, extra: int, dtype: torch.dtype) -> Tensor:
    """Returns memory for `t`, [b, s, h, d], and `extra` rows."""
    batch, length, *rest = t.shape
    if not extra:
        return torch.empty_like(t, dtype=dtype)
    return torch.empty(batch, length + extra, *rest, dtype=dtype, device=t.device)


def _padded(t: Tensor, extra: int) -> Tensor:
    if not extra:
        return t
    padded = _with_rows(t, extra, t.dtype)
    padded[:, : t.shape[1]].copy_(t)
    padded[:, t.shape[1] :].zero_()
    return padded


def _bounding_scale(x: Problem, buffers: dict[int, Tensor]) -> Tensor:
    """Returns a scale for the scores' gradient P * (dout . v - delta) * softmax_scale, from an upper bound over all rows."""
    largest = [_amax(buffers[t], buffers[descale]) for t, descale in ((Uid.V, Uid.DESCALE_V), (Uid.DOUT, Uid.DESCALE_DOUT))]
    return _scale_for(2.0 * abs(x.softmax_scale) * x.v.shape[-1] * largest[0] * largest[1], buffers[Uid.DOUT].dtype)


def _numbers_of_weights(x: Problem, descales: Descales) -> dict[int, Tensor]:
    device = x.q.device
    return {
        Uid.DESCALE_Q: _aligned(_one(descales.q)),
        Uid.DESCALE_K: _aligned(_one(descales.k)),
        Uid.DESCALE_V: _aligned(_one(descales.v)),
        Uid.SCALE_S: _number(WEIGHTS_SCALE, device),
        Uid.DESCALE_S: _number(1.0 / WEIGHTS_SCALE, device),
    }


def _check(x: Problem, direction: str, **descales: Tensor) -> None:
    """Raises PlanNotSupported if a rule applies, or if cuDNN's kernel may never end."""
    for name, descale in descales.items():
        if descale.dtype is not torch.float32:
            raise TypeError(f"descale_{name} is {descale.dtype}; accepted: torch.float32")
    call = Fp8Call(
        direction,
        head_dim_qk=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        one_dtype=x.q.dtype == x.k.dtype == x.v.dtype,
        per_tensor=all(map(_is_one, descales.values())),
        is_packed=x.is_ragged,
        one_query=x.longest_q == 1,
        is_bottom_right=x.bottom_right and (x.window_left is not None or x.window_right is not None),
        has_bias=x.bias is not None,
        has_sink=x.has_sink,
        has_mods=x.mods is not None,
        has_dropout=x.dropout_p > 0,
    )
    error = fp8_error(call)
    if error is None and direction == "forward" and _may_hang(x):
        error = (
            "the window may leave queries without a key, and cuDNN's FP8 forward may then never end "
            "(https://github.com/NVIDIA/cudnn-frontend/issues/1009); use backend='triton'"
        )
    if error is not None:
        raise PlanNotSupported(error)


def _may_hang(x: Problem) -> bool:
    """Returns whether queries may see no key although their sequence has keys.

    That happens if a query lies past the last key by more than the window's left side.
    """
    return x.window_left is not None and (x.has_padding or x.longest_q - 1 - x.window_left >= x.longest_kv)


def _is_one(t: Tensor) -> bool:
    return all(n == 1 or step == 0 for n, step in zip(t.shape, t.stride(), strict=True))


def _one(t: Tensor) -> Tensor:
    """Returns the number that is expanded to `t`."""
    return t.as_strided((1,), (1,))


def _aligned(t: Tensor) -> Tensor:
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _empty(device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


def _unit(device: torch.device) -> Quantized:
    """Returns the descale and amax of an empty result."""
    return Quantized(torch.ones(1, device=device), torch.zeros(1, device=device))


@constant
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _amax(t: Tensor, descale: Tensor) -> Tensor:
    """Returns the largest magnitude in an FP8 tensor, fp32 [1]. Without the sign bit, bytes have the order of their numbers."""
    return t.view(torch.uint8).bitwise_and(0x7F).amax().view(t.dtype).float() * descale


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale from `amax` to the dtype's largest number, or 1 if there is no such scale."""
    scale = _largest(dtype) / amax
    return torch.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


def _convert(source: Tensor, descale: Tensor, target: Tensor) -> None:
    target.copy_(source)
    target.mul_(descale.reshape(()))
