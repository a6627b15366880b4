"""The eager backend: the reference's arithmetic in blocks of query rows, on any device, in linear memory, forward and backward.

It computes in fp32 (fp64 for fp64 inputs), and rounds at the points at which FP8 kernels round. It uses no atomics, so its results
repeat bitwise if torch's matrix products do. On the CPU they do for a fixed number of threads. On CUDA they do on one stream, or on
several streams with CUBLAS_WORKSPACE_CONFIG=:4096:8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexattn.dispatch import cpu_attention
from flexattn.dispatch.neutral import is_capturing
from flexattn.dispatch.pages import without_pages
from flexattn.dispatch.spec import AttentionSpec, Band, Direction, Gradients, Operands, empty_outputs

if TYPE_CHECKING:
    from flexattn.dispatch.reference import Sequences

SUPPORT_IS_FINAL = True
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCORE_BYTES = 16 << 20  # bytes of a block's scores over all heads. A CPU is slower above it. The backward needs five times that.
BAND_ROWS = 128  # rows of a block if there is a band. With more rows, more of the computed scores would be hidden.


def unsupported(spec: AttentionSpec, direction: Direction) -> str | None:
    if spec.dtype not in DTYPES and spec.fp8 is None:
        return f"dtype {spec.dtype} is not supported; use one of {', '.join(map(str, DTYPES))}"
    if spec.batch_invariant and direction == "forward":
        return "the rounding of torch's matrix products may depend on the batch; use backend='triton', or leave out batch_invariant"
    return None


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    if cpu_attention.takes(spec, x) and (results := cpu_attention.forward(spec, x)) is not None:
        return results
    from flexattn.dispatch import quantization, reference  # here, as most calls on a CPU need torch's operator alone

    spec, x = without_pages(spec, x)
    out, lse, max_logit = empty_outputs(spec, x)
    out.zero_()
    lse.fill_(reference.NEG_INF)
    max_logit.fill_(reference.NEG_INF)
    whole = reference.Differentiable.of(quantization.dequantize(spec, x, lse.dtype))
    with torch.no_grad(), torch.autocast(x.q.device.type, enabled=False):
        for sequences, rows, cols in blocks(spec, x, lse.element_size()):
            block = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: t.to(lse.dtype))
            block_out, block_lse, row_max = reference.attend(spec, x, sequences, rows, cols, block, rounds=True)
            tokens = sequences.q[rows.start : rows.stop]
            reference.token_view(out, spec.q_format, sequences.batch, tokens).copy_(block_out)
            reference.lse_view(lse, spec.q_format, sequences.batch, tokens).copy_(block_lse)
            if spec.return_max_logit:
                torch.maximum(max_logit, row_max.amax((0, 2)), out=max_logit)
    return out, lse, max_logit


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Recomputes each block and differentiates it with autograd, so that only one block's graph exists at a time.

    out and lse are recomputed, because that is more exact. If spec.is_part, they cover keys that are not in this call, and are used
    as they are.
    """
    if torch.is_inference_mode_enabled():  # autograd works only outside of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return backward(spec, x, out, lse, dout, dlse)
    if cpu_attention.takes(spec, x) and dlse is None and (result := cpu_attention.backward(spec, x, out, lse, dout)) is not None:
        return result
    from flexattn.dispatch import quantization, reference  # here, as most calls on a CPU need torch's operator alone

    whole = reference.Differentiable.of(quantization.dequantize(spec, x, lse.dtype))
    if spec.fp8 is not None:
        dout = quantization.dout_of(spec, x, dout, lse.dtype)
    # A row of dq belongs to one block. Every other gradient is a sum over blocks, in the dtype of the arithmetic.
    sums = whole.map(lambda t: torch.zeros(t.shape, dtype=lse.dtype, device=t.device))
    dq_dtype, _ = spec.results.gradient_dtypes(spec.out_dtype)
    sums = sums._replace(q=x.q.new_zeros(x.q.shape, dtype=dq_dtype), bias=sums.bias if spec.needs_bias_grad else None)
    captured_sums = spec.mods.wanted(sums.mod_tensors) if spec.mods else ()
    with torch.autocast(x.q.device.type, enabled=False):
        for sequences, rows, cols in blocks(spec, x, lse.element_size()):
            block = reference.slice_block(spec, whole, sequences, rows, cols).map(lambda t: as_leaf(t, lse.dtype))
            tokens = sequences.q[rows.start : rows.stop]
            block_dout = reference.token_view(dout, spec.q_format, sequences.batch, tokens).to(lse.dtype)
            block_dlse = None if dlse is None else reference.lse_view(dlse, spec.q_format, sequences.batch, tokens).to(lse.dtype)
            given_lse = reference.lse_view(lse, spec.q_format, sequences.batch, tokens) if spec.is_part else None
            with torch.enable_grad():
                block_out, statistic, _ = reference.attend(spec, x, sequences, rows, cols, block, rounds=True, given_lse=given_lse)
            if spec.is_part:  # the sum of the weights carries the gradient of the divisor of all weights.
                whole_out = reference.token_view(out, spec.q_format, sequences.batch, tokens).to(lse.dtype)
                delta = (whole_out * block_dout).sum(-1)
                block_dlse = -delta if block_dlse is None else block_dlse - delta
            outputs, seeds = [block_out], [block_dout]
            if block_dlse is not None:
                outputs.append(statistic)
                seeds.append(block_dlse)
            targets = reference.slice_block(spec, sums, sequences, rows, cols)
            pairs: list[tuple[Tensor | None, Tensor | None]] = list(zip(block[:-1], targets[:-1], strict=True))
            pairs += zip(spec.mods.wanted(block.mod_tensors) if spec.mods else (), captured_sums, strict=True)
            needed = [(leaf, target) for leaf, target in pairs if leaf is not None and target is not None]
            # A mod may ignore the score, or a tensor that it captures.
            grads = torch.autograd.grad(outputs, [leaf for leaf, _ in needed], seeds, allow_unused=spec.mods is not None)
            for (_, target), grad in zip(needed, grads, strict=True):
                if grad is not None:
                    target += grad
    dbias = None if x.bias is None or sums.bias is None else sums.bias.to(x.bias.dtype)
    doffset = None if x.softmax_offset is None or sums.softmax_offset is None else sums.softmax_offset.to(x.softmax_offset.dtype)
    captured = spec.mods.wanted(x.mod_tensors) if spec.mods else ()
    dmod_tensors = tuple(total.to(t.dtype) for total, t in zip(captured_sums, captured, strict=True)) or None
    dq, dk, dv = spec.results.stored((sums.q, sums.k, sums.v), (spec.q_format, spec.kv_format), spec.out_dtype)
    return Gradients(dq, dk, dv, dbias, doffset, dmod_tensors)


def as_leaf(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in `dtype` that is a leaf for autograd. If it was made in inference mode, it is copied."""
    return (t.clone() if t.is_inference() else t.detach()).to(dtype).requires_grad_()


def prepare(spec: AttentionSpec, x: Operands, direction: Direction) -> None:
    """Does nothing, because this backend compiles nothing."""


def can_be_recorded() -> bool:
    """Returns False, because the blocks depend on the values of cu_seqlens."""
    return False


def watched(watcher: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
    """Returns a context that watches nothing, because this backend launches nothing itself."""
    return contextlib.nullcontext()


def blocks(spec: AttentionSpec, x: Operands, itemsize: int) -> Iterator[tuple[Sequences, range, range]]:
    """Yields (sequences, rows, cols): several sequences if all their scores fit SCORE_BYTES, else one in chunks of rows."""
    if spec.padding and is_capturing(x.q.device):
        raise RuntimeError(
            "the eager backend reads cu_seqlens on the host, which a CUDA graph cannot capture; use backend='triton', or a dense "
            "format without padding"
        )
    from flexattn.dispatch import reference  # here, as in `forward`

    left, right, _ = spec.band
    banded = left is not None or right is not None
    for sequences in reference.split_sequences(spec, x):
        len_q, len_kv = len(sequences.q), len(sequences.kv)
        width = len_kv if left is None or right is None else max(0, min(len_kv, left + right + BAND_ROWS))
        row_bytes = max(1, spec.num_heads * width * itemsize)
        if x.kv_indices is not None:  # the gathered keys and values of a row, beside its scores.
            for_a_key = spec.num_heads + spec.num_heads_kv * (spec.head_dim_qk + spec.head_dim_v)
            row_bytes = max(1, x.kv_indices.shape[-1] * spec.kv_block * for_a_key * itemsize)
        together = max(1, SCORE_BYTES // max(1, row_bytes * len_q))
        row_step = max(1, SCORE_BYTES // row_bytes)
        row_step = min(row_step, BAND_ROWS) if banded else row_step
        for batch in _chunks(sequences.batch, together):
            for rows in _chunks(range(len_q), row_step):
                keys = range(len_kv) if spec.kv_lists else _visible_keys(spec.band, sequences, rows)
                yield sequences._replace(batch=batch), rows, keys


def _visible_keys(band: Band, sequences: Sequences, rows: range) -> range:
    """Returns the keys that at least one of the rows sees."""
    shift, len_kv = sequences.shift(band), len(sequences.kv)
    start = 0 if band.left is None else min(max(rows.start + shift - band.left, 0), len_kv)
    stop = len_kv if band.right is None else min(max(rows.stop + shift + band.right, start), len_kv)
    return range(start, stop)


def _chunks(positions: range, step: int) -> list[range]:
    return [positions[i : i + step] for i in range(0, len(positions), step)]
