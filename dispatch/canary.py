"""FLEXATTN_CANARY=1: a check of a backend against the reference, on a small input, before it first runs a spec."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.neutral import is_capturing, neutral_state
from flexattn.dispatch.quantization import dout_of
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.sample import sample_operands
from flexattn.dispatch.select import OWN_DROPOUT, RuntimeFailure, backend_module
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.forks import fork_safe

_log = logging.getLogger(__name__)

LONGEST = (150, 130)  # queries and keys of the input: more than one tile of each, with a partial last tile.
GAP = 3  # unused rows after each packed sequence.
# The tolerance is this factor times the largest error of plain torch in the same dtype. The canary looks for wrong results, not for
# rounding errors.
FACTOR = 4.0
ROUNDINGS = 16.0  # additional tolerance, in roundings of the largest value, if plain torch happens to be exact.
CANCELLED = 1e-9  # a gradient below it in fp64 is a sum whose terms cancel, as of a softmax over one key.
SHORT_ACCUMULATOR = 2.0**-10  # tolerance relative to the largest score, because some GPUs accumulate FP8 products in 14 bits.
ROUNDED_WEIGHTS = 2.0**-4  # the largest rounding error of a weight in e4m3. One kernel sums rounded weights.
_CAPACITY = 1024

_passed: OrderedDict[tuple[str, AttentionSpec, Direction], None] = OrderedDict()
_lock = fork_safe(threading.Lock())


def mismatch(name: str, spec: AttentionSpec, direction: Direction, device: torch.device) -> str | None:
    """Returns the error of a backend's result for `spec`, or None if it is right. A right result is not checked again.

    The eager backend is not checked, because it shares its arithmetic with the reference. Dropout is not checked if the backend
    draws its own. Mods and block masks are not checked, because a spec does not have their tensors. While a CUDA graph is
    captured, nothing is checked. Packed sequences are checked with and without gaps. The check waits for the device.
    """
    key = (name, spec, direction)
    if name == "eager" or key in _passed or is_capturing(device):
        return None
    if spec.mods is not None or spec.block_size is not None:
        _log.info("the canary cannot check %s with a mod or a block mask, whose tensors it does not have", name)
    elif spec.dropout and name in OWN_DROPOUT:
        _log.info("the canary cannot check %s with dropout, because it draws its own", name)
    else:
        for gap in (0, GAP) if "thd" in (spec.q_format, spec.kv_format) else (0,):
            x = sample_operands(spec, device, *_lengths(spec), gap=gap)
            try:
                with neutral_state():
                    wrong = _compare(name, spec, x, direction)
            except RuntimeFailure as e:  # a failure of these shapes only.
                _log.info("the canary cannot check %s, which refuses its input: %s", name, e)
                continue
            if wrong is not None:
                return f"the canary found it wrong: {wrong}"
    with _lock:
        _passed[key] = None
        while len(_passed) > _CAPACITY:
            _passed.popitem(last=False)
    return None


def clear() -> None:
    """Forgets all checks."""
    with _lock:
        _passed.clear()


def _compare(name: str, spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
    backend, device = backend_module(name), x.q.device
    spec = spec._replace(results=spec.results._replace(packing=""))  # q, k and v have different lengths here.
    if spec.fp8 is not None:
        return _compare_fp8(name, spec, x, direction)
    exact, eager = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    if direction == "forward":
        got = backend.forward(spec, x)
        names = ("out", "lse", "max_logit") if spec.return_max_logit else ("out", "lse")
        return _first_difference(names, got, exact, eager)
    # A backward gets the results of an exact forward, because its forward may run on another backend.
    statistics = torch.float64 if spec.dtype is torch.float64 else torch.float32
    out, lse = exact[0].to(spec.dtype), exact[1].to(statistics)
    generator = torch.Generator(device).manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device=device).to(spec.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device=device).to(statistics) if spec.needs_lse_grad else None
    gradients = backend.backward(spec, x, out, lse, dout, dlse)
    exact_gradients, eager_gradients = (reference_gradients(spec, x, dout, dlse, dtype) for dtype in (torch.float64, spec.dtype))
    found = gradients[:-1], exact_gradients[:-1], eager_gradients[:-1]
    return _first_difference(gradients._fields[:-1], *found, terms=_sum_of_products(spec))


def _compare_fp8(name: str, spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
    """Compares in FP8. The tolerance comes from the error of the eager backend's emulation."""
    backend, emulated = backend_module(name), backend_module("eager")
    exact, eager = reference_attention(spec, x), emulated.forward(spec, x)
    if direction == "forward":
        results = backend.forward(spec, x)
        if wrong := _first_difference(("out",), results, exact, eager):
            return wrong
        tolerance = SHORT_ACCUMULATOR * max(1.0, float(exact[2].abs().max()))
        if _sums_rounded_weights(name, spec, x):
            tolerance += ROUNDED_WEIGHTS
        names = ("out", "lse", "max_logit") if spec.return_max_logit else ("out", "lse")
        errors = {names[i]: _error(results[i], exact[i]) for i in range(1, len(names))}
        return next((f"{name} is off by {error:.3g}" for name, error in errors.items() if not error <= tolerance), None)
    assert spec.fp8 is not None
    generator = torch.Generator(x.q.device).manual_seed(1)
    dout = torch.randn(exact[0].shape, generator=generator, device=x.q.device).to(spec.out_dtype)
    if name == "cudnn":
        dout = dout.to(spec.fp8.grad_dtype)
    else:  # the backward quantises a 16-bit dout.
        x = x._replace(descales=x.descales[:3])
    dlse = torch.randn(exact[1].shape, generator=generator, device=x.q.device) if spec.needs_lse_grad else None
    arguments = (exact[0].to(spec.out_dtype), exact[1].float(), dout, dlse)
    exact_dout = dout_of(spec, x, dout, torch.float64)
    expected = reference_gradients(spec, x, exact_dout, dlse)
    got, budget = backend.backward(spec, x, *arguments), emulated.backward(spec, x, *arguments)
    return _first_difference(got._fields[:-1], got[:-1], expected[:-1], budget[:-1], _sum_of_products(spec))


def _sum_of_products(spec: AttentionSpec) -> float:
    """Returns the size of a key's sum over the queries of products of dout and values, which are normal numbers."""
    return math.sqrt(spec.head_dim_v * LONGEST[0] * spec.group_size)


def _sums_rounded_weights(name: str, spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether the backend sums rounded softmax weights. Only Triton's FP8 kernel for sm_90 does."""
    if name != "triton":
        return False
    choice = triton_backend.choice_of(spec, x, "forward")
    return choice is not None and choice.family.name == "sm_90 FP8"


def _lengths(spec: AttentionSpec) -> tuple[list[int], list[int]]:
    """Returns the lengths of two sequences, or of four if they share a bias. They do not exceed the spec's length classes.

    They differ if `spec` has lengths.
    """
    longest = [min(most, known) if known else most for most, known in zip(LONGEST, (spec.length_q, spec.length_kv), strict=True)]
    pairs = 2 if spec.bias_is_shared else 1
    if not spec.padding:
        return [longest[0]] * 2 * pairs, [longest[1]] * 2 * pairs
    return [longest[0], max(1, longest[0] // 3)] * pairs, [max(1, longest[1] // 2), longest[1]] * pairs


def _first_difference(
    names: tuple[str, ...],
    got: tuple[Tensor | None, ...],
    exact: tuple[Tensor | None, ...],
    eager: tuple[Tensor | None, ...],
    terms: float = 0.0,
) -> str | None:
    """Returns the first result that is wrong, with its error, or None. terms: the size of the terms of a sum that cancels."""
    for name, g, e, same_dtype in zip(names, got, exact, eager, strict=False):
        if g is None or e is None or same_dtype is None:
            continue
        error, budget = _error(g, e), _error(same_dtype, e)
        finite = e[e.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        if largest < CANCELLED:
            largest = terms
        limit = FACTOR * budget + ROUNDINGS * torch.finfo(g.dtype).eps * largest
        if not error <= limit:
            return f"{name} is off by {error:.3g}, and plain torch is off by {budget:.3g}"
    return None


def _error(got: Tensor, exact: Tensor) -> float:
    got = got.double()
    difference = torch.where(got == exact, 0.0, (got - exact).abs()).nan_to_num(nan=float("inf"))
    return float(difference.max()) if difference.numel() else 0.0
