"""Results against the reference, before anything is timed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.bench.inputs import SOFTCAP, Tensors, bias_of
from flexattn.bench.shapes import Workload
from flexattn.dispatch.spec import AttentionSpec, Band, Operands
from flexattn.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    reference_attention,
    reference_gradients,
)

REFERENCE_SCORES = 2**28  # that the reference may materialise at once, several times, in fp64
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}
CHECK = (
    "in fp64 on one sequence (the last; of a packed batch the longest) and one key head with all its query heads, within the "
    "budget of flexattn.testing.check_close; elsewhere for NaN and infinity"
)


class Error(NamedTuple):
    """Error of a result against the reference in fp64, and that of plain torch in the same dtype."""

    name: str
    max: float
    rms: float
    eager_max: float
    eager_rms: float
    worst: tuple[tuple[tuple[int, ...], float, float], ...]  # (coordinates in what was compared, got, reference), worst first


class Checker:
    """Compares the results of one workload with the reference, which is computed when it is first needed."""

    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        self.workload = workload
        self._tensors = tensors
        sequence = workload.lengths_q.index(max(workload.lengths_q)) if workload.is_ragged else workload.batch - 1
        self._len_q, self._len_kv = workload.lengths_q[sequence], workload.lengths_kv[sequence]
        self._start_q, self._start_kv = sum(workload.lengths_q[:sequence]), sum(workload.lengths_kv[:sequence])
        self._sequence = sequence

    def cut(self, name: str, t: Tensor) -> Tensor:
        """Returns the part of a result or input that is compared: [1, s, h of one group, d]."""
        heads = slice(-1, None) if name in ("k", "v", "dk", "dv") else slice(-self.workload.group_size, None)
        if not self.workload.is_ragged:
            return t[self._sequence : self._sequence + 1, :, heads]
        start, length = (self._start_kv, self._len_kv) if name in ("k", "v", "dk", "dv") else (self._start_q, self._len_q)
        return t[None, start : start + length, heads]

    @functools.cached_property
    def _call(self) -> tuple[AttentionSpec, Operands, Tensor]:
        w, t = self.workload, self._tensors
        q, k, v, dout = (self.cut(name, x).contiguous() for name, x in zip(("q", "k", "v", "dout"), t[:4], strict=True))
        heads = slice(-w.group_size, None)
        bias = bias_of(t, w, heads)
        spec, x = make_call(
            Inputs(q, k, v, "bshd", *(None,) * 6),
            attn_mask_type=w.attn_mask_type.removeprefix("padding_") if w.attn_mask_type != "padding" else "no_mask",
            window_size=w.window_size,
            bias_type="alibi" if t.alibi_slopes is not None else "no_bias" if bias is None else "post_scale_bias",
            bias=bias,
            alibi_slopes=None if t.alibi_slopes is None else t.alibi_slopes[heads].contiguous(),
            softmax_type=w.softmax_type,
            softmax_offset=None if t.softmax_offset is None else t.softmax_offset[heads].contiguous(),
            softcap=SOFTCAP if w.score == "softcap" else 0.0,
            return_max_logit=False,
        )
        return spec, x, dout

    @functools.cached_property
    def _forward(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._twice("forward")

    @functools.cached_property
    def _backward(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._twice("backward")

    def _twice(self, direction: str) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """By name, the results in fp64 and in the workload's own dtype."""
        spec, x, dout = self._call
        rows = max(1, REFERENCE_SCORES // (self.workload.group_size * self._len_kv))
        ref, eager = (_reference(direction, spec, x, dout, dtype, rows) for dtype in (torch.float64, spec.dtype))
        return ref, eager

    def errors(self, direction: str, results: Mapping[str, Tensor]) -> list[Error]:
        """For each result, by name."""
        found = []
        for name in RESULTS[direction]:
            ref, eager = (kind[name] for kind in (self._forward if name == "out" else self._backward))
            got = self.cut(name, results[name]).to(torch.float64)
            error, budget = (got - ref).abs(), (eager.to(torch.float64) - ref).abs()
            error = error.nan_to_num(nan=float("inf"))
            worst = []
            for flat in error.flatten().topk(min(3, error.numel())).indices.tolist():
                at = _indices(flat, error.shape)
                worst.append((at, float(got[at]), float(ref[at])))
            (largest, rms), (eager_largest, eager_rms) = (
                (float(e.amax()), float(e.square().mean().sqrt())) for e in (error, budget)
            )
            found.append(Error(name, largest, rms, eager_largest, eager_rms, tuple(worst)))
        return found

    def check(self, direction: str, results: Mapping[str, Tensor]) -> None:
        """Raises AssertionError with the worst elements if a result differs from the reference by more than CHECK allows."""
        for name in RESULTS[direction]:
            ref, eager = (kind[name] for kind in (self._forward if name == "out" else self._backward))
            factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
            check_close(name, self.cut(name, results[name]), ref, eager, factor=factor)
            assert results[name].isfinite().all(), f"{name} is not finite outside what was compared"


def _reference(direction: str, spec: AttentionSpec, x: Operands, dout: Tensor, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    """The reference, so many queries at a time: rows of out and dq are one block's, dk and dv are sums over blocks."""
    len_q = x.q.shape[1]
    if len_q <= rows:
        return _block(direction, spec, x, dout, dtype)
    assert x.alibi_slopes is None, "ALiBi counts from a diagonal that a block of queries does not know"
    assert not spec.band.bottom_right or spec.band.left is spec.band.right is None
    blocks = []
    for first in range(0, len_q, rows):
        left, right, _ = spec.band
        part = slice(first, min(first + rows, len_q))
        keys = slice(0, None if right is None else part.stop + right)
        # The same keys, counted from the block's first query.
        band = Band(None if left is None else left - first, None if right is None else right + first, False)
        cut = x._replace(q=x.q[:, part], k=x.k[:, keys], v=x.v[:, keys], bias=None if x.bias is None else x.bias[:, :, part, keys])
        blocks.append(_block(direction, spec._replace(band=band), cut, dout[:, part], dtype))
    if direction == "forward":
        return {"out": torch.cat([block["out"] for block in blocks], 1)}
    sums = {name: torch.zeros(t.shape, dtype=dtype, device=t.device) for name, t in (("dk", x.k), ("dv", x.v))}
    for name, total in sums.items():
        for block in blocks:
            total[:, : block[name].shape[1]] += block[name]
    return {"dq": torch.cat([block["dq"] for block in blocks], 1), **sums}


def _block(direction: str, spec: AttentionSpec, x: Operands, dout: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    if direction == "forward":
        return {"out": reference_attention(spec, x, dtype)[0]}
    gradients = reference_gradients(spec, x, dout, dtype=dtype)
    return {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def _indices(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the indices of an element of a flattened tensor. torch.unravel_index would import sympy, which takes a second."""
    at: list[int] = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        at.insert(0, rest)
    return tuple(at)
