"""The launchers of attention in FP8 on cuDNN: scales per tensor, and what cuDNN wants to know before it has computed it.

On sm_90 cuDNN writes out, dq, dk and dv in FP8 alone, so that each needs a scale beforehand. That of out follows from v, of whose
elements each element of out is a mean. Those of the gradients come with the call (delayed scaling), or are learned from the
maxima that a first run writes (current scaling), which costs that run. What was asked for in fp16, bf16 or fp32 is written from
the FP8 result, and has its precision.
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

LARGEST_SCALE = 2.0**120  # so that neither a scale nor its inverse is infinite or denormal
WEIGHTS_SCALE = 256.0  # weights are at most 1: 256 uses e4m3's range, of which 448 is the end, and is exact


class Descales(NamedTuple):
    """Factors of q, k and v in FP8 that give their values: fp32, one number each, expanded to any shape."""

    q: Tensor
    k: Tensor
    v: Tensor


class Incoming(NamedTuple):
    """Tensors that the backward reads beside q, k and v: the forward's results and the gradient of out."""

    out: Tensor  # in FP8 with descale_out, or in fp16 or bf16 without
    descale_out: Tensor | None  # fp32 [1], as the next
    lse: Tensor
    dout: Tensor  # in FP8
    descale_dout: Tensor


class GradientScales(NamedTuple):
    """Factors of the gradients of the scores, q, k and v before they are quantised; fp32 [1]."""

    ds: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Quantized(NamedTuple):
    """Descale and amax of a tensor that a launcher wrote; fp32 [1]."""

    descale: Tensor  # for FP8; what was asked for in another dtype has been multiplied by it
    amax: Tensor  # the largest magnitude before quantisation


class GradientsQuantized(NamedTuple):
    ds: Quantized
    dq: Quantized
    dk: Quantized
    dv: Quantized


def fp8_forward(
    problem: Problem, descales: Descales, out: Tensor, lse: Tensor, scale_out: Tensor | None = None, directory: str | None = None
) -> Quantized:
    """Write out and lse as `attention_forward` does, from q, k and v in FP8.

    `out` is in FP8, or in another dtype into which the FP8 result is converted. `scale_out` is fp32 [1], what out is multiplied by
    before it is quantised; None: what takes the largest magnitude in v to the end of the range.

    Raises PlanNotSupported for what cuDNN does not take, before anything is written.
    """
    _check(problem, "forward", **descales._asdict())
    device = out.device
    if problem.is_empty:
        write_empty(problem, out, lse, None)
        return _nothing(device)
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
    """Write dq, dk and dv, from q, k, v and dout in FP8.

    What comes in may be of any forward, whichever kernel it was. The gradients are in FP8, or in another dtype into which the FP8
    result is converted: cuDNN computes them in the dtype of `dout`.
    Without `scales` it runs twice, for e4m3 `dout` three times, to learn them from the maxima of the runs before.

    Raises as `fp8_forward` does.
    """
    out, descale_out, lse, dout, descale_dout = incoming
    _check(problem, "backward", **descales._asdict(), dout=descale_dout)
    device = out.device
    targets = {Uid.DQ: gradients.dq, Uid.DK: gradients.dk, Uid.DV: gradients.dv}
    if problem.is_empty:
        for target in targets.values():
            target.zero_()
        return GradientsQuantized(*(_nothing(device) for _ in _SCALES))
    formats = {uid: target.dtype if target.dtype in FP8_DTYPES else dout.dtype for uid, target in targets.items()}
    problem, out, lse, dout, written = _in_whole_tiles(problem, out, lse, dout, targets, formats)
    numbers = _numbers_of_weights(problem, descales)
    numbers[Uid.DESCALE_OUT] = _number(1.0, device) if descale_out is None else _aligned(_one(descale_out))
    numbers[Uid.DESCALE_DOUT] = _aligned(_one(descale_dout))
    numbers |= {amax: _empty(device) for amax in _AMAX.values()}
    call = backward_call(problem, out, lse, dout, Written(*(written[uid] for uid in targets)), numbers)
    plan = PLANS.get(call.sdpa, device, directory)
    given = scales or GradientScales(_bounding_scale(problem, call.buffers), *(_number(1.0, device) for _ in targets))
    for uid, scale in zip(_SCALES, given, strict=True):
        call.buffers[uid] = _aligned(scale)
    call.buffers[Uid.DESCALE_DS] = call.buffers[Uid.SCALE_DS].reciprocal()
    if scales is None:
        scaled_to = {Uid.SCALE_DS: dout.dtype} | {_SCALE_OF[uid]: dtype for uid, dtype in formats.items()}
        for learned in _lessons(dout.dtype):
            execute(plan, call.buffers, device)
            for uid in learned:
                call.buffers[uid] = _scale_for(call.buffers[_AMAX[uid]], scaled_to[uid])
            call.buffers[Uid.DESCALE_DS] = call.buffers[Uid.SCALE_DS].reciprocal()
    execute(plan, call.buffers, device)
    call.finish()
    told = [Quantized(call.buffers[uid].reciprocal(), call.buffers[_AMAX[uid]]) for uid in _SCALES]
    for (uid, target), quantized in zip(targets.items(), told[1:], strict=True):
        found = written[uid][:, : target.shape[1]]
        if target.dtype not in FP8_DTYPES:
            _convert(found, quantized.descale, target)
        elif written[uid] is not target:
            target.copy_(found)
    return GradientsQuantized(*told)


def fp8_call(problem: Problem, out: Tensor, lse: Tensor, dout: Tensor | None = None, gradients: Written | None = None) -> Call:
    """With tensors on the meta device, the plan that one of the launchers would need; with dout, that of the backward.

    Raises as they do, but for what descales say.
    """
    _check(problem, "forward" if dout is None else "backward")
    return unchecked_call(problem, out, lse, dout, gradients)


def unchecked_call(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor | None = None, gradients: Written | None = None
) -> Call:
    """`fp8_call` for what the launchers refuse too, to ask cuDNN about it."""
    if dout is None or gradients is None:
        written = out if out.dtype in FP8_DTYPES else torch.empty_like(out, dtype=problem.q.dtype)
        return forward_call(problem, written, lse)
    targets = dict(zip((Uid.DQ, Uid.DK, Uid.DV), gradients, strict=False))
    formats = {uid: target.dtype if target.dtype in FP8_DTYPES else dout.dtype for uid, target in targets.items()}
    if not problem.is_ragged:
        problem, out, lse, dout, targets = _in_whole_tiles(problem, out, lse, dout, targets, formats)
    return backward_call(problem, out, lse, dout, Written(*targets.values()))


_SCALES = (Uid.SCALE_DS, Uid.SCALE_DQ, Uid.SCALE_DK, Uid.SCALE_DV)  # in the order of GradientScales
_AMAX = dict(zip(_SCALES, (Uid.AMAX_DS, Uid.AMAX_DQ, Uid.AMAX_DK, Uid.AMAX_DV), strict=True))
_SCALE_OF = dict(zip((Uid.DQ, Uid.DK, Uid.DV), _SCALES[1:], strict=True))


def _lessons(dtype: torch.dtype) -> tuple[tuple[Uid, ...], ...]:
    """Returns the scales that each run before the last is for.

    No gradient of a score is above a bound, from which the first run has its scale. e5m2 reaches 2**30 below it, so that it rounds
    as it would from the exact maximum; e4m3 does not, and its scale is learned first, as the other maxima depend on it.
    """
    others = _SCALES[1:]
    return (others,) if dtype is torch.float8_e5m2 else ((Uid.SCALE_DS,), others)


def _in_whole_tiles(
    x: Problem, out: Tensor, lse: Tensor, dout: Tensor, targets: dict[Uid, Tensor], formats: dict[Uid, torch.dtype]
) -> tuple[Problem, Tensor, Tensor, Tensor, dict[Uid, Tensor]]:
    """The backward's tensors, dense, in copies with whole tiles of rows where they are not so, and where to write the gradients.

    Of 333 queries cuDNN 9.19 left dq of the last three unwritten on an NVIDIA H200.
    """
    more_q, more_kv = -x.longest_q % KEY_TILE, -x.longest_kv % KEY_TILE
    more = {Uid.DQ: more_q, Uid.DK: more_kv, Uid.DV: more_kv}
    written = {
        uid: target if target.dtype == formats[uid] and not more[uid] else _with_rows(target, more[uid], formats[uid])
        for uid, target in targets.items()
    }
    if not more_q and not more_kv:
        return x, out, lse, dout, written
    q, out, dout = (_padded(t, more_q) for t in (x.q, out, dout))
    k, v = (_padded(t, more_kv) for t in (x.k, x.v))
    cu_seqlens_q, cu_seqlens_kv = x.cu_seqlens_q, x.cu_seqlens_kv
    if cu_seqlens_q is None:
        cu_seqlens_q, cu_seqlens_kv = (
            torch.arange(0, (x.batch + 1) * n, n, dtype=torch.int32, device=q.device) for n in (x.longest_q, x.longest_kv)
        )
    padded = dataclasses.replace(x, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    return padded, out, torch.nn.functional.pad(lse, (0, more_q), value=NEG_INF), dout, written


def _with_rows(t: Tensor, more: int, dtype: torch.dtype) -> Tensor:
    """Room for `t`, [b, s, h, d], and `more` rows."""
    batch, length, *rest = t.shape
    if not more:
        return torch.empty_like(t, dtype=dtype)
    return torch.empty(batch, length + more, *rest, dtype=dtype, device=t.device)


def _padded(t: Tensor, more: int) -> Tensor:
    if not more:
        return t
    padded = _with_rows(t, more, t.dtype)
    padded[:, : t.shape[1]].copy_(t)
    padded[:, t.shape[1] :].zero_()
    return padded


def _bounding_scale(x: Problem, buffers: dict[int, Tensor]) -> Tensor:
    """For the scores' gradient P * (dout . v - delta) * softmax_scale, which no two rows of dout and v take past it."""
    largest = [_amax(buffers[t], buffers[descale]) for t, descale in ((Uid.V, Uid.DESCALE_V), (Uid.DOUT, Uid.DESCALE_DOUT))]
    return _scale_for(2.0 * abs(x.softmax_scale) * x.v.shape[-1] * largest[0] * largest[1], buffers[Uid.DOUT].dtype)


def _numbers_of_weights(x: Problem, descales: Descales) -> dict[Uid, Tensor]:
    device = x.q.device
    return {
        Uid.DESCALE_Q: _aligned(_one(descales.q)),
        Uid.DESCALE_K: _aligned(_one(descales.k)),
        Uid.DESCALE_V: _aligned(_one(descales.v)),
        Uid.SCALE_S: _number(WEIGHTS_SCALE, device),
        Uid.DESCALE_S: _number(1.0 / WEIGHTS_SCALE, device),
    }


def _check(x: Problem, direction: str, **descales: Tensor) -> None:
    """Raises PlanNotSupported for what the rules are against, or what would never end."""
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
            "the left side of the window may leave queries without a key, where cuDNN's FP8 forward may never end "
            "(https://github.com/NVIDIA/cudnn-frontend/issues/1009); use backend='triton'"
        )
    if error is not None:
        raise PlanNotSupported(error)


def _may_hang(x: Problem) -> bool:
    """Returns whether queries with keys in their sequence may see none: past the last key, by more than the window's left side."""
    return x.window_left is not None and (x.has_padding or x.longest_q - 1 - x.window_left >= x.longest_kv)


def _is_one(t: Tensor) -> bool:
    return all(n == 1 or step == 0 for n, step in zip(t.shape, t.stride(), strict=True))


def _one(t: Tensor) -> Tensor:
    """The number that is expanded to `t`."""
    return t.as_strided((1,), (1,))


def _aligned(t: Tensor) -> Tensor:
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _empty(device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


def _nothing(device: torch.device) -> Quantized:
    return Quantized(torch.ones(1, device=device), torch.zeros(1, device=device))


@constant
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _amax(t: Tensor, descale: Tensor) -> Tensor:
    """fp32 [1], the largest magnitude in an FP8 tensor: without their sign, its bytes are in the order of what they stand for."""
    return t.view(torch.uint8).bitwise_and(0x7F).amax().view(t.dtype).float() * descale


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that takes `amax` to the dtype's largest number; 1 where there is no such scale."""
    scale = _largest(dtype) / amax
    return torch.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


def _convert(source: Tensor, descale: Tensor, target: Tensor) -> None:
    target.copy_(source)
    target.mul_(descale.reshape(()))
