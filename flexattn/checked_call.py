"""A kept call under FLEXATTN_CHECK=1: each call checks its values, and one replay in a hundred is compared with unrecorded runs.

A generator with a fixed seed draws these replays, so a program that runs again compares the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import ops
from flexattn.cached_call import CachedCall
from flexattn.dispatch.describe import describe
from flexattn.dispatch.neutral import is_capturing
from flexattn.dispatch.select import backend_module
from flexattn.dispatch.spec import Gradients

SHARE = 0.01  # share of replays that are compared
# Kernels may add in any order. Their sums may differ by one rounding of a number, and by this share of the tensor's largest number,
# which is enough for float32 sums of a million terms. Sums of numbers that cancel, such as a sink's gradient, may differ by more:
# two unrecorded calls give their spread.
ORDER = 2.0**-14
_SPREAD = 8.0  # times the difference of two unrecorded calls
_draw = random.Random(0).random

_NAMES = {"forward": ("out", "lse", "max_logit"), "backward": ("dq", "dk", "dv", "dbias", "dsoftmax_offset")}


class CheckedCall(CachedCall):
    """A `CachedCall` that compares some of its replays with unrecorded runs."""

    is_checked = True

    def forward(self, tensors: Sequence[Tensor | None], addresses: Sequence[int]) -> Sequence[Any]:
        """Runs the call as a `CachedCall` does. Raises ValueError for wrong values and RuntimeError for a wrong replay."""
        x = self.operands(tensors)
        ops.check_operands(self.spec, x)
        again = self._drawn(tensors) if self.forwards.recording is not None else None
        results = super().forward(tensors, addresses)
        if self.forwards.recording is not None:  # else `ops` has checked them
            ops.check_logits(self.spec, self.forward_backend(tensors), x, results[1], "forward")
        if again is not None:
            is_exact = self.forward_backend(tensors) is backend_module("triton")
            self._compare("forward", (*results, *tensors[self.layout.num_inputs :]), again, self.compute_forward, is_exact)
        return results

    def backward(self, inputs: Sequence[Any]) -> Gradients:
        """Does what a `CachedCall` does, and raises ValueError for large logits and RuntimeError for a wrong replay."""
        again = self._drawn(inputs) if self._has_recorded_backward() else None
        spec = self.backward_spec(inputs)
        gradients = super().backward(inputs)
        if self._has_recorded_backward():
            ops.check_logits(spec, self.backward_backend(inputs, spec), self.operands(inputs), inputs[-3], "backward")
        if again is not None:

            def run(x: Sequence[Tensor | None]) -> Sequence[Any]:
                return self._as_gradients(self.compute_backward(x)).flat()

            self._compare("backward", (*gradients.flat(), *inputs[self.layout.num_inputs :]), again, run, False)
        return gradients

    def _has_recorded_backward(self) -> bool:
        return any(runs.recording is not None for runs in self.backwards.values())

    def _drawn(self, inputs: Sequence[Tensor | None]) -> list[tuple[object, ...]] | None:
        """Returns the inputs of two more runs if this run is drawn, else None. FP8 buffers and out are copied."""
        if is_capturing(self.layout.device) or _draw() >= SHARE:
            return None
        read = [i < self.layout.num_inputs and self.layout.names[i : i + 1] != ("out",) for i in range(len(inputs))]
        return [tuple(t if t is None or is_read else t.clone() for t, is_read in zip(inputs, read, strict=True)) for _ in range(2)]

    def _compare(
        self,
        direction: str,
        replayed: Sequence[Any],
        again: list[tuple[Any, ...]],
        run: Callable[[Sequence[Any]], Sequence[Any]],
        is_exact: bool,
    ) -> None:
        """Raises RuntimeError if a replay's results, or the buffers behind its operands, differ from unrecorded runs."""
        first, second = ((*run(inputs), *inputs[self.layout.num_inputs :]) for inputs in again)
        for n, (got, want, other) in enumerate(zip(replayed, first, second, strict=True)):
            if got is want is None:
                continue
            wrong = _wrong(got, want, other, is_exact or self.spec.deterministic)
            if wrong:
                known = _NAMES[direction]
                name = known[n] if n < len(known) else f"result (number {n})"
                q, k, v = (tuple(t.shape) for t in again[0][:3])
                raise RuntimeError(
                    f"FLEXATTN_CHECK=1: a replayed {direction} gave another {name} than the same call unrecorded: {wrong}. The "
                    f"call: {describe(self.spec)}; q, k and v of {q}, {k} and {v}. Please report this. Until then, run "
                    "flexattn.call_cache.clear_cache() before each call, so that it is not replayed"
                )


def _wrong(got: Tensor, want: Tensor, other: Tensor, is_exact: bool) -> str:
    """Returns a text on a replay's wrong result, or "" if it is right. other: the result of a second unrecorded run."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return f"{got.dtype} {tuple(got.shape)} in place of {want.dtype} {tuple(want.shape)}"
    a, b, c = (t.double() for t in (got, want, other))
    same = (a == b) | (a.isnan() & b.isnan())
    if not is_exact and b.numel():
        finite = b.where(b.isfinite(), 0.0).abs()
        spread = (b - c).nan_to_num(0.0, 0.0, 0.0).abs().max() * _SPREAD
        same |= (a - b).abs() <= torch.finfo(want.dtype).eps * finite + ORDER * finite.max() + spread
    if bool(same.all()):
        return ""
    place = tuple((~same).nonzero()[0].tolist())
    count = int((~same).sum())
    return f"{count} of {same.numel()} numbers differ, first at {place}: {a[place].item():.7g} in place of {b[place].item():.7g}"
