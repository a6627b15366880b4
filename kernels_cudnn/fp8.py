"""Launchers of attention in FP8 on cuDNN, with scales per tensor.

On sm_90 cuDNN writes out, dq, dk and dv in FP8 only, so it needs the scale of each before it runs. The scale of out follows from v,
because each element of out is a mean of elements of v. The scales of the gradients come from the maxima that a first run writes.
The FP8 results are converted to fp16, bf16 or fp32, and keep their precision.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_cudnn.attention import KEY_TILE, NEG_INF, Call, Written, backward_call, forward_call, write_empty
from flexattn.kernels_cudnn.execute import execute
from flexattn.kernels_cudnn.graphs import ALIGNMENT, Uid
from flexattn.kernels_cudnn.lengths import constant
from flexattn.kernels_cudnn.plans import PLANS, PlanNotSupported
from flexattn.kernels_cudnn.problem import Problem

LARGEST_SCALE = 2.0**120  # with this limit, neither a scale nor its inverse is infinite or denormal.
WEIGHTS_SCALE = 256.0  # weights are at most 1, and e4m3 ends at 448. 256 uses that range and is exact.


class Descales(NamedTuple):
    """Dequantisation factors of q, k and v: one fp32 number each, expanded to any shape."""

    q: Tensor
    k: Tensor
    v: Tensor


class Incoming(NamedTuple):
    """Tensors that the backward reads in addition to q, k and v: the forward's results and the gradient of out."""

    out: Tensor  # fp16 or bf16.
    lse: Tensor
    dout: Tensor  # FP8.
    descale_dout: Tensor  # fp32 [1].


def fp8_forward(problem: Problem, descales: Descales, out: Tensor, lse: Tensor, directory: str | None = None) -> None:
    """Writes out and lse as `attention_forward` does, from q, k and v in FP8.

    Raises PlanNotSupported if cuDNN does not support the problem. Nothing is written then.
    """
    _check(problem)
    device = out.device
    if problem.is_empty:
        write_empty(problem, out, lse, None)
        return
    written = torch.empty_like(out, dtype=problem.q.dtype)
    numbers = _numbers_of_weights(problem, descales)
    numbers[Uid.AMAX_OUT] = _empty(device)
    call = forward_call(problem, written, lse, None, numbers)
    scale = call.buffers[Uid.SCALE_OUT] = _scale_for(_amax(call.buffers[Uid.V], numbers[Uid.DESCALE_V]), written.dtype)
    execute(PLANS.get(call.sdpa, device, directory), call.buffers, device)
    call.finish()
    _convert(written, scale.reciprocal(), out)


def fp8_backward(
    problem: Problem, descales: Descales, incoming: Incoming, gradients: Written, directory: str | None = None
) -> None:
    """Writes dq, dk and dv, from q, k, v and dout in FP8.

    The forward's results may come from any kernel. cuDNN computes the gradients in the dtype of `dout`. The plan runs twice, or
    three times if `dout` is e4m3. Each run learns scales from the maxima of the run before.

    Raises PlanNotSupported if cuDNN does not support the problem.
    """
    out, lse, dout, descale_dout = incoming
    device = out.device
    targets = {Uid.DQ: gradients.dq, Uid.DK: gradients.dk, Uid.DV: gradients.dv}
    if problem.is_empty:
        for target in targets.values():
            target.zero_()
        return
    problem, out, lse, dout, written = _in_whole_tiles(problem, out, lse, dout, targets)
    numbers = _numbers_of_weights(problem, descales)
    numbers |= {Uid.DESCALE_OUT: _number(1.0, device), Uid.DESCALE_DOUT: _aligned(_one(descale_dout))}
    numbers |= {amax: _empty(device) for amax in _AMAX.values()}
    call = backward_call(problem, out, lse, dout, Written(*written.values()), numbers)
    plan = PLANS.get(call.sdpa, device, directory)
    buffers = call.buffers
    buffers |= {Uid.SCALE_DS: _bounding_scale(problem, buffers), **{scale: _number(1.0, device) for scale in _SCALES[1:]}}
    for learned in (*_learned_by_run(dout.dtype), ()):
        buffers[Uid.DESCALE_DS] = buffers[Uid.SCALE_DS].reciprocal()
        execute(plan, buffers, device)
        for uid in learned:
            buffers[uid] = _scale_for(buffers[_AMAX[uid]], dout.dtype)
    call.finish()
    for scale, (uid, target) in zip(_SCALES[1:], targets.items(), strict=True):
        _convert(written[uid][:, : target.shape[1]], buffers[scale].reciprocal(), target)


def fp8_call(problem: Problem, out: Tensor, lse: Tensor, dout: Tensor | None = None, gradients: Written | None = None) -> Call:
    """Returns the plan that a launcher needs, from tensors on the meta device. With dout it is the backward's plan.

    Raises as the launchers do.
    """
    if dout is None or gradients is None:
        _check(problem)
        return forward_call(problem, torch.empty_like(out, dtype=problem.q.dtype), lse)
    targets = {Uid.DQ: gradients.dq, Uid.DK: gradients.dk, Uid.DV: gradients.dv}
    if problem.is_ragged:
        return backward_call(problem, out, lse, dout, Written(*(torch.empty_like(t, dtype=dout.dtype) for t in targets.values())))
    problem, out, lse, dout, written = _in_whole_tiles(problem, out, lse, dout, targets)
    return backward_call(problem, out, lse, dout, Written(*written.values()))


_SCALES = (Uid.SCALE_DS, Uid.SCALE_DQ, Uid.SCALE_DK, Uid.SCALE_DV)
_AMAX = dict(zip(_SCALES, (Uid.AMAX_DS, Uid.AMAX_DQ, Uid.AMAX_DK, Uid.AMAX_DV), strict=True))


def _learned_by_run(dtype: torch.dtype) -> tuple[tuple[Uid, ...], ...]:
    """Returns the scales that each run before the last one learns.

    The first run scales the gradients of scores by an upper bound of their magnitude. e5m2 reaches 2**30 below that bound, so it
    rounds as with the exact maximum. e4m3 does not, so its scale is learned first: the other maxima depend on it.
    """
    others = _SCALES[1:]
    return (others,) if dtype is torch.float8_e5m2 else ((Uid.SCALE_DS,), others)


def _in_whole_tiles(
    x: Problem, out: Tensor, lse: Tensor, dout: Tensor, targets: dict[Uid, Tensor]
) -> tuple[Problem, Tensor, Tensor, Tensor, dict[Uid, Tensor]]:
    """Returns the dense tensors of a backward, copied if their rows do not fill whole tiles, and memory for its gradients.

    The gradients have the dtype of `dout`. cuDNN 9.19 did not write dq of the last three of 333 queries on an NVIDIA H200.
    """
    extra_q, extra_kv = -x.longest_q % KEY_TILE, -x.longest_kv % KEY_TILE
    written = {uid: _with_rows(t, extra_q if uid == Uid.DQ else extra_kv, dout.dtype) for uid, t in targets.items()}
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


def _check(x: Problem) -> None:
    """Raises PlanNotSupported if cuDNN's forward may never end."""
    if _may_hang(x):
        raise PlanNotSupported(
            "the window may leave queries without a key, and cuDNN's FP8 forward may then never end "
            "(https://github.com/NVIDIA/cudnn-frontend/issues/1009); use backend='triton'"
        )


def _may_hang(x: Problem) -> bool:
    """Returns whether queries may see no key although their sequence has keys.

    That happens if a query lies past the last key by more than the window's left side.
    """
    return x.window_left is not None and (x.has_padding or x.longest_q - 1 - x.window_left >= x.longest_kv)


def _one(t: Tensor) -> Tensor:
    """Returns the number that is expanded to `t`."""
    return t.as_strided((1,), (1,))


def _aligned(t: Tensor) -> Tensor:
    return t if t.data_ptr() % ALIGNMENT == 0 else t.clone()


def _empty(device: torch.device) -> Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


@constant
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.float32, device=device)


def _amax(t: Tensor, descale: Tensor) -> Tensor:
    """Returns the largest magnitude in an FP8 tensor, fp32 [1]. Without the sign bit, bytes have the order of their numbers."""
    return t.view(torch.uint8).bitwise_and(0x7F).amax().view(t.dtype).float() * descale


def _scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale from `amax` to the dtype's largest number, or 1 if there is no such scale."""
    scale = torch.finfo(dtype).max / amax
    return torch.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


def _convert(source: Tensor, descale: Tensor, target: Tensor) -> None:
    target.copy_(source)
    target.mul_(descale.reshape(()))
