"""Results against the reference, before anything is timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    "budget of flexattn.testing.check_close; elsewhere for NaN and infinity; the gradient of a dense bias over all sequences that "
    "share the last matrix"
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
        """Returns the part of a result or input that is compared: [1, s, h of one group, d], or [1, h, sq, skv] of a bias."""
        if name == "dbias":
            return t[-1:, -self.workload.group_size :]
        heads = slice(-1, None) if name in ("k", "v", "dk", "dv") else slice(-self.workload.group_size, None)
        if not self.workload.is_ragged:
            return t[self._sequence : self._sequence + 1, :, heads]
        start, length = (self._start_kv, self._len_kv) if name in ("k", "v", "dk", "dv") else (self._start_q, self._len_q)
        return t[None, start : start + length, heads]

    def _bias(self, sequences: slice) -> Tensor | None:
        """Returns the bias of one group of heads of these sequences, which share a matrix, with -inf for hidden keys."""
        w, t = self.workload, self._tensors
        heads = slice(-w.group_size, None)
        bias = bias_of(t, w, heads) if t.dense_bias is None else t.dense_bias[-1:, heads]
        if t.sees is None:
            return bias
        hidden = ~t.sees[sequences, None, None]
        shape = hidden.shape[0], w.group_size, w.seqlen_q, w.seqlen_kv
        bias = torch.zeros((), dtype=t.q.dtype, device=t.q.device) if bias is None else bias
        return bias.expand(shape).masked_fill(hidden, float("-inf"))

    @functools.cached_property
    def _call(self) -> tuple[AttentionSpec, Operands, Tensor]:
        """Returns the call on the sequence that is compared."""
        parts = [self.cut(name, x).contiguous() for name, x in zip(("q", "k", "v", "dout"), self._tensors[:4], strict=True)]
        return self._make(parts, self._bias(slice(self._sequence, self._sequence + 1)))

    def _make(self, parts: Sequence[Tensor], bias: Tensor | None) -> tuple[AttentionSpec, Operands, Tensor]:
        w, t = self.workload, self._tensors
        q, k, v, dout = parts
        by_head = {"alibi_slopes": t.alibi_slopes, "softmax_offset": t.softmax_offset}
        cut: dict[str, Any] = {name: None if x is None else x[-w.group_size :].contiguous() for name, x in by_head.items()}
        spec, x = make_call(
            Inputs(q, k, v, "bshd", *(None,) * 6),
            attn_mask_type=w.attn_mask_type.removeprefix("padding_") if w.attn_mask_type != "padding" else "no_mask",
            window_size=w.window_size,
            bias_type="alibi" if t.alibi_slopes is not None else "no_bias" if bias is None else "post_scale_bias",
            bias=bias,
            softmax_type=w.softmax_type,
            softcap=SOFTCAP if w.score == "softcap" else 0.0,
            return_max_logit=False,
            **cut,
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
        if direction == "backward" and self._tensors.dense_bias is not None:
            ref, eager = (kind | {"dbias": self._dbias(dtype)} for kind, dtype in ((ref, torch.float64), (eager, spec.dtype)))
        return ref, eager

    def _dbias(self, dtype: torch.dtype) -> Tensor:
        """Returns the gradient of the last matrix of the bias, for one group of heads: the sum over the sequences that share it."""
        w = self.workload
        most = max(1, REFERENCE_SCORES // (w.group_size * w.seqlen_q * w.seqlen_kv))
        total = torch.zeros(1, w.group_size, w.seqlen_q, w.seqlen_kv, dtype=torch.float64, device=self._tensors.q.device)
        for first in range(w.batch - w.batch // w.biases, w.batch, most):
            sequences = slice(first, min(first + most, w.batch))
            heads = {
                "q": slice(-w.group_size, None),
                "dout": slice(-w.group_size, None),
                "k": slice(-1, None),
                "v": slice(-1, None),
            }
            parts = [getattr(self._tensors, name)[sequences, :, heads[name]] for name in ("q", "k", "v", "dout")]
            spec, x, dout = self._make(parts, self._bias(sequences))
            dbias = reference_gradients(spec, x, dout, dtype=dtype).dbias
            assert dbias is not None
            total += dbias.to(torch.float64).sum(0, keepdim=True)
        return total.to(dtype)

    def names(self, direction: str) -> tuple[str, ...]:
        """Returns the results that a direction has."""
        has_dbias = direction != "forward" and self._tensors.dense_bias is not None
        return (*RESULTS[direction], "dbias") if has_dbias else RESULTS[direction]

    def errors(self, direction: str, results: Mapping[str, Tensor]) -> list[Error]:
        """For each result, by name."""
        import numpy  # torch.unravel_index would import sympy, which takes a second

        found = []
        for name in self.names(direction):
            ref, eager = (kind[name] for kind in (self._forward if name == "out" else self._backward))
            got = self.cut(name, results[name]).to(torch.float64)
            error, budget = (got - ref).abs(), (eager.to(torch.float64) - ref).abs()
            error = error.nan_to_num(nan=float("inf"))
            worst = []
            for flat in error.flatten().topk(min(3, error.numel())).indices.tolist():
                at = tuple(map(int, numpy.unravel_index(flat, error.shape)))
                worst.append((at, float(got[at]), float(ref[at])))
            (largest, rms), (eager_largest, eager_rms) = (
                (float(e.amax()), float(e.square().mean().sqrt())) for e in (error, budget)
            )
            found.append(Error(name, largest, rms, eager_largest, eager_rms, tuple(worst)))
        return found

    def check(self, direction: str, results: Mapping[str, Tensor]) -> None:
        """Raises AssertionError with the worst elements if a result differs from the reference by more than CHECK allows."""
        for name in self.names(direction):
            ref, eager = (kind[name] for kind in (self._forward if name == "out" else self._backward))
            factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
            check_close(name, self.cut(name, results[name]), ref, eager, factor=factor)
            assert results[name].isfinite().all(), f"{name} is not finite outside what was compared"


def _reference(direction: str, spec: AttentionSpec, x: Operands, dout: Tensor, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    """The reference, so many queries at a time: rows of out and dq are one block's, dk and dv are sums over blocks."""
    len_q, (left, right, bottom_right) = x.q.shape[1], spec.band
    if left is not None and right is not None:  # a block sees few keys, so it may have more queries
        rows = max(rows, int(math.sqrt(left**2 + 4 * REFERENCE_SCORES // spec.num_heads) - left) // 2)
    if len_q <= rows:
        return _block(direction, spec, x, dout, dtype)
    assert x.alibi_slopes is None, "ALiBi counts from a diagonal that a block of queries does not know"
    assert not bottom_right or left is right is None or len_q == x.k.shape[1]
    blocks = []
    for first in range(0, len_q, rows):
        part = slice(first, min(first + rows, len_q))
        start = 0 if left is None else max(0, first - left)
        keys = slice(start, None if right is None else max(start, part.stop + right))
        # The same keys, counted from the block's first query and first key.
        band = Band(None if left is None else left - first + start, None if right is None else right + first - start, False)
        cut = x._replace(q=x.q[:, part], k=x.k[:, keys], v=x.v[:, keys], bias=None if x.bias is None else x.bias[:, :, part, keys])
        blocks.append((start, _block(direction, spec._replace(band=band), cut, dout[:, part], dtype)))
    if direction == "forward":
        return {"out": torch.cat([block["out"] for _, block in blocks], 1)}
    sums = {name: torch.zeros(t.shape, dtype=dtype, device=t.device) for name, t in (("dk", x.k), ("dv", x.v))}
    for name, total in sums.items():
        for start, block in blocks:
            total[:, start : start + block[name].shape[1]] += block[name]
    return {"dq": torch.cat([block["dq"] for _, block in blocks], 1), **sums}


def _block(direction: str, spec: AttentionSpec, x: Operands, dout: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    if direction == "forward":
        return {"out": reference_attention(spec, x, dtype)[0]}
    gradients = reference_gradients(spec, x, dout, dtype=dtype)
    return {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
