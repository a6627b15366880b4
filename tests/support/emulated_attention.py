"""Launches of the kernels of gluon_attention.py in the emulator: descriptors, tables and results, in the library's terms."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn import emulator
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)

KERNELS = Path(__file__).parent / "gluon_attention.py"
BLOCK = 128  # queries of a forward tile and keys of a backward tile: two warpgroups of 64 rows
OPEN = 1 << 30  # a side of the band without a limit
LOG2E = math.log2(math.e)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
HARMLESS = {"tma-out-of-bounds"}  # a tile may have a half that lies past its sequence's end


class Span(NamedTuple):
    """Place of one sequence: `start` in tokens, and the number of its first head."""

    start: int
    length: int
    head: int


class Problem(NamedTuple):
    """A call, its oracle in fp64 and the error budget of the same dtype."""

    spec: AttentionSpec
    x: Operands
    dout: torch.Tensor
    reference: tuple[torch.Tensor, ...]
    eager: tuple[torch.Tensor, ...]
    gradients: Gradients
    eager_gradients: Gradients


@functools.lru_cache(32)
def problem(mask: str = "no_mask", window: tuple[int, int] = (-1, -1), **inputs: Any) -> Problem:
    """Returns the problem of these lengths (tuples); cached, because the same problem runs with many seeds."""
    given = make_inputs(**inputs)
    spec, x = make_call(given, attn_mask_type=mask, window_size=window)
    dout = make_dout(given)
    return Problem(
        spec,
        x,
        dout,
        reference_attention(spec, x),
        reference_attention(spec, x, dtype=spec.dtype),
        reference_gradients(spec, x, dout),
        reference_gradients(spec, x, dout, dtype=spec.dtype),
    )


def sequences(t: torch.Tensor, fmt: str, cu_seqlens: torch.Tensor | None, padded: torch.Tensor | None) -> list[Span]:
    if fmt == "thd":
        assert cu_seqlens is not None
        starts = cu_seqlens if padded is None else padded
        return [Span(int(starts[b]), int(cu_seqlens[b + 1] - cu_seqlens[b]), 0) for b in range(len(cu_seqlens) - 1)]
    batch, s, heads = (t.shape[fmt.index(dim)] for dim in "bsh")
    lengths = [s] * batch if cu_seqlens is None else cu_seqlens.diff().tolist()
    if fmt == "bshd":
        return [Span(b * s, lengths[b], 0) for b in range(batch)]
    return [Span(0, lengths[b], b * heads) for b in range(batch)]  # sbhd, bhsd: a batch is so many more heads


def ragged(t: torch.Tensor, fmt: str, rows: int, columns: int | None = None) -> TensorDescriptor:
    """Returns descriptors of boxes [rows, columns] of one head. A box ends with its sequence."""
    token, head, dim = t.stride(fmt.index("t" if fmt == "thd" else "s")), t.stride(fmt.index("h")), t.shape[-1]
    heads = t.shape[fmt.index("h")] * (t.shape[fmt.index("b")] if fmt in ("sbhd", "bhsd") else 1)
    block = [1, 1, rows, 1, columns or dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[t.dtype])
    far = 0x7FFF0000
    return TensorDescriptor(t, [far, far, 1 << 30, heads, dim], [(1 << 34) - token, token, token, head, 1], block, layout)


def table(spec: AttentionSpec, x: Operands) -> torch.Tensor:
    """One row for each sequence: start, length and first head of queries and keys, and the shift of the diagonal."""
    q = sequences(x.q, spec.q_format, x.cu_seqlens_q, x.cu_seqlens_q_padded)
    kv = sequences(x.k, spec.kv_format, x.cu_seqlens_kv, x.cu_seqlens_kv_padded)
    shifts = [b.length - a.length if spec.band.bottom_right else 0 for a, b in zip(q, kv, strict=True)]
    return torch.tensor([[*a, *b, shift] for a, b, shift in zip(q, kv, shifts, strict=True)], dtype=torch.int32)


def band(spec: AttentionSpec) -> tuple[int, int]:
    return tuple(OPEN if side is None or side < 0 else side for side in (spec.band.left, spec.band.right))  # type: ignore[return-value]


def forward(
    kernels: ModuleType, case: Problem, seed: int, programs: int = 3, block_n: int = 64, stages: int = 2
) -> tuple[emulator.Report, torch.Tensor, torch.Tensor]:
    """Returns the report, out (NaN if an element was not written) and lse [b, h, max_q]."""
    spec, x = case.spec, case.x
    sizes, left_right = table(spec, x), band(spec)
    out = torch.full((*x.q.shape[:-1], spec.head_dim_v), float("nan"), dtype=x.q.dtype)
    max_q = max(int(sizes[:, 1].max()), 1)
    lse = torch.full((len(sizes), spec.num_heads, max_q), float("nan"))
    row_blocks = -(-max_q // BLOCK)
    report = emulator.launch(
        kernels.attention_fwd,
        (programs,),
        ragged(x.q, spec.q_format, 64),
        ragged(x.k, spec.kv_format, block_n),
        ragged(x.v, spec.kv_format, block_n),
        ragged(out, spec.q_format, 64),
        lse,
        sizes,
        x.softmax_scale * LOG2E,
        spec.num_heads,
        spec.num_heads // spec.num_heads_kv,
        row_blocks,
        row_blocks * spec.num_heads * len(sizes),
        max_q,
        *left_right,
        BLOCK_N=block_n,
        HEAD_DIM=spec.head_dim_qk,
        STAGES=stages,
        seed=seed,
    )
    return report, out, lse


def backward(kernels: ModuleType, case: Problem, seed: int, stages: int = 2) -> tuple[emulator.Report, Gradients]:
    """Returns the report, dq (fp32), dk and dv. Elements of dk and dv that were not written are NaN."""
    spec, x = case.spec, case.x
    sizes, left_right = table(spec, x), band(spec)
    max_q, max_kv = (max(int(sizes[:, column].max()), 1) for column in (1, 4))
    lse, delta = (_by_sequence(case, sizes, max_q, t) for t in (case.reference[1], _delta(case)))
    dq = torch.zeros(x.q.shape)
    dk, dv = (torch.full(t.shape, float("nan"), dtype=t.dtype) for t in (x.k, x.v))
    report = emulator.launch(
        kernels.attention_bwd,
        (-(-max_kv // BLOCK), spec.num_heads_kv, len(sizes)),
        ragged(x.q, spec.q_format, 64),
        ragged(case.dout, spec.q_format, 64),
        ragged(x.k, spec.kv_format, 64),
        ragged(x.v, spec.kv_format, 64),
        ragged(dq, spec.q_format, 64, spec.head_dim_qk // 2),
        ragged(dk, spec.kv_format, 64),
        ragged(dv, spec.kv_format, 64),
        lse,
        delta,
        sizes,
        x.softmax_scale * LOG2E,
        x.softmax_scale,
        spec.num_heads,
        spec.num_heads // spec.num_heads_kv,
        max_q,
        *left_right,
        HEAD_DIM=spec.head_dim_qk,
        STAGES=stages,
        seed=seed,
    )
    return report, Gradients(dq, dk, dv, *[None] * (len(Gradients._fields) - 3))


def _delta(case: Problem) -> torch.Tensor:
    """sum(out * dout), [b, h, s] or [h, total]."""
    spec, out = case.spec, case.reference[0]
    delta = (out * case.dout.double()).sum(-1)
    order = [spec.q_format[:-1].index(dim) for dim in ("ht" if spec.q_format == "thd" else "bhs")]
    return delta.permute(order)


def _by_sequence(case: Problem, sizes: torch.Tensor, max_q: int, values: torch.Tensor) -> torch.Tensor:
    """[b, h, s] or [h, total] as fp32 [b, h, max_q]; NaN past each sequence's end."""
    rows = torch.full((len(sizes), case.spec.num_heads, max_q), float("nan"))
    for b, (start, length) in enumerate(sizes[:, :2].tolist()):
        rows[b, :, :length] = values[:, start : start + length] if case.spec.q_format == "thd" else values[b, :, :length]
    return rows


def check_forward(case: Problem, report: emulator.Report, out: torch.Tensor, lse: torch.Tensor) -> None:
    assert not report.bugs, str(report)
    assert {finding.kind for finding in report.findings} <= HARMLESS, str(report)
    _check("out", out, case.x.q, case.reference[0], case.eager[0])
    sizes = table(case.spec, case.x)
    by_sequence = [_by_sequence(case, sizes, lse.shape[-1], t) for t in (case.reference[1], case.eager[1])]
    written = ~by_sequence[0].isnan()
    assert lse[~written].isnan().all()
    check_close("lse", lse[written], by_sequence[0][written], by_sequence[1][written])


def check_backward(case: Problem, report: emulator.Report, gradients: Gradients) -> None:
    assert not report.bugs, str(report)
    assert {finding.kind for finding in report.findings} <= HARMLESS, str(report)
    for name, token in (("dq", case.x.q), ("dk", case.x.k), ("dv", case.x.v)):
        got, want, budget = (getattr(g, name) for g in (gradients, case.gradients, case.eager_gradients))
        _check(name, got, token, want, budget, GRADIENT_FACTOR, is_sum=name == "dq")


def _check(
    name: str,
    got: torch.Tensor,
    token: torch.Tensor,
    want: torch.Tensor,
    budget: torch.Tensor,
    factor: float = 2.0,
    is_sum: bool = False,
) -> None:
    """Compares the tokens with the oracle, and asserts that nothing is written past the sequences."""
    padding = token[..., :1].isnan().expand(got.shape)
    assert (got[padding] == 0).all() if is_sum else got[padding].isnan().all(), f"{name} is written past a sequence's end"
    check_close(name, got.masked_fill(padding, 0.0).to(token.dtype), want, budget, factor=factor)


def edited(edits: Sequence[tuple[str, str]], folder: Path) -> ModuleType:
    """Returns the kernels with each (old, new) replaced in their text; each old must occur."""
    text = KERNELS.read_text()
    for old, new in edits:
        assert old in text, f"the kernels have no {old!r}"
        text = text.replace(old, new)
    path = folder / "edited.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["edited"] = module  # inspect reads the source from it
    spec.loader.exec_module(module)
    return module
