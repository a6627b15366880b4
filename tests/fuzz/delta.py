"""Errors of delta, the sum of out * dout of a row, and of dp, which cancels it if a row has one key, or keys that are alike.

A score's gradient is p * (dp - delta). Where these cancel, what is left is their rounding, of which plain torch has another.
`oracle.exact` makes noise in gradients of such errors, which act as gradients of lse do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.calls import Call
from tests.fuzz.config import HALF, Config
from tests.fuzz.oracle import Result

# Roundings of float32 beside cuts; and of out and of p in 16 bits (see `delta_errors`).
ROW_STEPS, ROW_OUT_STEPS = 4.0, 4.0
FP8_ROUNDINGS = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}  # half of the distance of two neighbours, relative to them
ADDED_AT_ONCE = 16  # products that a tensor core adds to a sum before it cuts it: up to a unit in the last place is lost each time


def delta_errors(call: Any, ref: Result) -> Tensor:
    """Returns a bound of the error of delta and dp in each row, shaped like lse, with the sign of delta.

    - float32: a sum is rounded ROW_STEPS times. A tensor core cuts it head_dim_v / ADDED_AT_ONCE times, and loses half a unit in
      the last place each time on average. The size is that of a product of dout and v, whose numbers have a size of 1, or of
      delta, which is dp if there is one key.
    - 16 bits, with u half of the dtype's eps: p is rounded before its product with v, and then out. If a row has one key whose p is
      not 1, all columns of out have the same factor, at most 1 + u, and so has delta. Otherwise these are independent errors of
      at most u of each term, whose standard deviation is u / sqrt(3) times the root of the sum of squares. It is the same for p as
      for out, because the variance of a column of out is the sum of squares of p. The largest of many rows is 4.5 deviations off:
      sqrt(2 / 3) * 4.5 = 3.7, at most ROW_OUT_STEPS.
    """
    if call.dout is None:
        return torch.zeros_like(ref.lse)
    config, terms = call.config, _terms(call, ref)
    delta = terms.sum(-1)
    dout = call.dout.double().nan_to_num(0.0, 0.0, 0.0)
    size = torch.maximum(dout.square().sum(-1).sqrt() / (1.0 - config.dropout_p), delta.abs())
    cuts = config.head_dim_v / ADDED_AT_ONCE / 2.0 if is_cut(config) else 0.0
    eps = torch.finfo(torch.float64 if config.dtype is torch.float64 else torch.float32).eps
    errors = (ROW_STEPS + cuts) * eps * size
    if config.dtype in HALF:
        out_error = ROW_OUT_STEPS * terms.square().sum(-1).sqrt() + delta.abs()
        is_rounded = row_of_out(ref.is_rounded, config.q_format)[..., 0]
        errors = errors + torch.finfo(config.dtype).eps / 2.0 * torch.where(is_rounded, out_error, 0.0)
    return _as_lse(errors * delta.sign(), config.q_format)


def tangent_errors(call: Any, ref: Result, tout: Tensor) -> tuple[Tensor, Tensor]:
    """Returns bounds of the errors of delta and dp, and of their tangents, in each row, shaped like lse, with the sign of delta.

    tout: the exact tangent of out. dp's tangent is a product of dout and a tangent of v, whose numbers have a size of 1, rounded as
    dp is. Delta's has it times p, which is exp of a score less lse: both are rounded, and the score's and lse's product with
    log2(e) too, by lse * eps together.
    """
    if call.dout is None:
        return torch.zeros_like(ref.lse), torch.zeros_like(ref.lse)
    config = call.config
    dout = call.dout.double().nan_to_num(0.0, 0.0, 0.0)
    signs = _as_lse(_terms(call, ref).sum(-1).sign(), config.q_format)
    cuts = config.head_dim_v / ADDED_AT_ONCE / 2.0 if is_cut(config) else 0.0
    eps = torch.finfo(torch.float64 if config.dtype is torch.float64 else torch.float32).eps / (1.0 - config.dropout_p)
    sizes = _as_lse(dout.square().sum(-1).sqrt(), config.q_format)
    errors = (ROW_STEPS + cuts + ref.lse.detach().abs().nan_to_num(0.0, 0.0, 0.0)) * eps * sizes
    if config.dtype in HALF:
        errors = errors + _as_lse(tangent_of_delta_errors(call, tout), config.q_format)
    return delta_errors(call, ref), errors * signs


def tangent_of_delta_errors(call: Any, tout: Tensor) -> Tensor:
    """Returns a bound of the error of delta's tangent, a sum of tout * dout, that rounding to 16 bits makes in each row of out.

    tout: the exact tangent of out. Weights are rounded before their product with the tangent of v, as in `delta_errors`. Dropout's
    factor makes the weight of a single key inexact.
    """
    terms = tout * call.dout.double().nan_to_num(0.0, 0.0, 0.0)
    return torch.finfo(call.config.dtype).eps / 2.0 * (ROW_OUT_STEPS * terms.square().sum(-1).sqrt() + terms.sum(-1).abs())


def fp8_delta_deviations(call: Call, ref: Result) -> Tensor:
    """Returns a bound of the standard deviation of dp - delta in a call in FP8, shaped like lse, with the sign of delta.

    - A row of v in FP8 times its scale is rounded to out's dtype, by at most u, even if there is one key, whose weight is exact.
    - A recipe rounds v to E4M3 and dout to its gradients' dtype, each number by a uniform error of at most u of it, whose
      deviation is u / sqrt(3). dp is a sum of products of dout and v, whose numbers have a size of 1, so these errors add up to
      the root of the sum of squares of dout. Where few products cancel, it is more than any share of what is left.
    """
    if call.dout is None:
        return torch.zeros_like(ref.lse)
    config, terms = call.config, _terms(call, ref)
    variances = (torch.finfo(config.dtype).eps / 2.0) ** 2 * terms.square().sum(-1)
    if config.fp8_of == "recipe":
        dout = call.dout.double().nan_to_num(0.0, 0.0, 0.0) / (1.0 - config.dropout_p)
        roundings = FP8_ROUNDINGS["float8_e4m3fn"] ** 2 + FP8_ROUNDINGS[config.fp8] ** 2
        variances = variances + roundings / 3.0 * dout.square().sum(-1)
    return _as_lse(variances.sqrt() * terms.sum(-1).sign(), config.q_format)


def _terms(call: Any, ref: Result) -> Tensor:
    """Returns out * dout, shaped like out; 0 where padding is not finite."""
    assert call.dout is not None
    return ref.out.detach() * call.dout.double().nan_to_num(0.0, 0.0, 0.0)


def _as_lse(rows: Tensor, q_format: str) -> Tensor:
    """Returns numbers of rows, laid out as out is, laid out as lse is."""
    return rows.T if q_format == "thd" else rows.permute([q_format.index(dim) for dim in "bhs"])


def score_roundings(head_dim: int, scale: float, cut: bool) -> float:
    """Returns the error of a score in float32, in roundings of a number of size 1. cut: tensor cores add the products.

    A score is a sum of head_dim products of a size of 1, whose roundings stay if the sum cancels or a softcap shrinks it. Each is a
    relative error of the score's weight.
    """
    return (ROW_STEPS + (head_dim / ADDED_AT_ONCE / 2.0 if cut else 0.0)) * abs(scale) * head_dim**0.5


def is_cut(config: Config) -> bool:
    """Tells if tensor cores add."""
    return (config.where.backend, config.where.device) == ("triton", "cuda")


def row_of_out(statistic: Tensor, q_format: str) -> Tensor:
    """Returns a tensor of lse's shape, a number a row, to broadcast over out."""
    if q_format == "thd":
        return statistic.T[..., None]
    return statistic.permute(["bhs".index(dim) for dim in q_format[:-1]])[..., None]
