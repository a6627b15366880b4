"""Tangents and second derivatives of a drawn call, compared with the oracle's."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.fuzz.calls import Call
from tests.fuzz.config import HALF
from tests.fuzz.delta import tangent_errors, tangent_of_delta_errors
from tests.fuzz.oracle import Twice, twice

if TYPE_CHECKING:
    from tests.fuzz.check import Verdicts

FACTOR = 4.0  # multiples of plain torch's error in the same dtype
# Roundings of a result, and of the sums that cancel in it: a score's tangent less its mean, dp less delta, and both of them again.
STEPS, CANCELLED, STEPS_OF_DOUBLE = 8.0, 256.0, 4096.0


def compare_second(verdicts: Verdicts, call: Call) -> None:
    """The tangents of out and lse along random tangents of the wanted tensors, and the double backward along the same."""
    if not call.wanted or (call.dout is None and call.dlse is None):
        return
    along = _draw(call)
    given = call.problem(), call.tensors, call.dout, call.dlse, along
    ref, same = (twice(*given, is_exact=exact, delta_errors=partial(tangent_errors, call)) for exact in (True, False))
    for name, t in _tangents(call, along).items():
        compare_one(verdicts, call, f"tangent of {name}", t, name, ref, same)
    for name, t in _double(call, along).items():
        compare_one(verdicts, call, f"second derivative for {name}", t, name, ref, same)


def _draw(call: Call) -> dict[str, Tensor]:
    """Returns tangents, with NaN where a tensor's padding is not finite."""
    found = {}
    for name in call.wanted:
        t = call.tensors[name].detach()
        drawn = torch.randn(t.shape, generator=call.generator, device=t.device).to(t.dtype)
        found[name] = torch.where(t.isfinite() & (t.abs() < 1e20), drawn, torch.nan)
    return found


def compare_one(verdicts: Verdicts, call: Any, what: str, got: Tensor, name: str, ref: Twice, same: Twice) -> None:
    """Judges one derivative. call: has the config. name: the derivative's in `Twice.found`."""
    dtype, is_double = call.config.dtype, call.config.dtype is torch.float64
    wanted, budget = ref.found[name], same.found[name]
    verdicts.never(f"{what} is not finite", ~got.isfinite().all())
    if name in call.config.captures and dtype in HALF:
        return  # as for the first gradients
    eps = torch.finfo(torch.float64 if is_double else torch.float32).eps / (1.0 - call.config.dropout_p)
    coarsest = max(torch.finfo(t).eps for t in (dtype, got.dtype))
    steps = STEPS_OF_DOUBLE if is_double else STEPS
    rounding = torch.as_tensor(steps * coarsest + CANCELLED * eps, dtype=torch.float64, device=got.device)
    least = (STEPS_OF_DOUBLE if is_double else CANCELLED) * eps * ref.size
    if dtype in HALF:  # dp less delta, of rounded weights
        least = least + torch.finfo(dtype).eps * ref.size / 16
        if name == "bias" and call.dout is not None:
            least = least + tangent_of_delta_errors(call, ref.found["out"]).amax() * math.sqrt(_scores_of_an_entry(call))
    # Captures may multiply a score's gradient and its tangent by the distance of a query and a key. Errors of several queries add
    # up, except in q's derivative, with the signs of few draws.
    noise = ref.noise.get(name) if name in ("q", "k", *call.config.captures) else None
    if noise is not None and name != "q":
        noise = FACTOR * noise
    verdicts.close(what, got, wanted, budget, FACTOR, rounding, least, noise)


def _scores_of_an_entry(call: Any) -> int:
    """Returns the number of scores that share an entry of the bias."""
    p = call.problem()
    sizes = (len(p.q.lengths), call.config.heads, max(p.q.lengths), max(p.kv.lengths))
    return math.prod(size for size, own in zip(sizes, call.tensors["bias"].shape, strict=True) if own == 1)


def _seeds(call: Call) -> dict[str, Tensor]:
    given = {"out": call.dout, "lse": call.dlse}
    return {name: t.detach().requires_grad_() for name, t in given.items() if t is not None}


def _results(call: Call) -> dict[str, Tensor]:
    from flexattn import attention

    found = attention(**call.arguments() | {"return_lse": True, "return_max_logit": False})
    return dict(zip(("out", "lse"), found, strict=True))


def _of_own_memory(t: Tensor) -> Tensor:
    """Returns a tensor whose elements lie apart, as torch demands of dual tensors."""
    return t.clone() if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)) else t


def _tangents(call: Call, along: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = call.tensors
    try:
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(_of_own_memory(kept[name].detach()), t) for name, t in along.items()}  # type: ignore[no-untyped-call]
            call.tensors = {name: duals.get(name, t.detach()) for name, t in kept.items()}
            unpacked: dict[str, Any] = {name: forward_ad.unpack_dual(t) for name, t in _results(call).items()}  # type: ignore[no-untyped-call]
            return {name: x.tangent for name, x in unpacked.items() if x.tangent is not None}
    finally:
        call.tensors = kept


def _double(call: Call, along: dict[str, Tensor]) -> dict[str, Tensor]:
    seeds, results = _seeds(call), _results(call)
    leaves = [call.tensors[name] for name in along]
    outputs = [results[name] for name in seeds]
    first = torch.autograd.grad(outputs, leaves, [*seeds.values()], create_graph=True, allow_unused=True)
    pairs = [(g, t) for g, t in zip(first, along.values(), strict=True) if g is not None and g.requires_grad]
    sources = [*seeds.values(), *leaves]
    if not pairs:
        return {}
    found = torch.autograd.grad([g for g, _ in pairs], sources, [t for _, t in pairs], allow_unused=True, materialize_grads=True)
    return dict(zip((*seeds, *along), found, strict=True))
