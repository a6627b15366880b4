"""FP8 in plain torch: scales, the cast, the scale of each row, the rotation. Tests compare the kernels with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Granularity = Literal["tensor", "head", "batch_head", "block"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
BLOCK_ROWS = 128
LARGEST_SCALE, SMALLEST_SCALE = 2.0**120, 2.0**-120  # with these limits, no scale and no inverse is infinite or denormal.
P_SCALE = 256.0  # scale of the softmax weights relative to the row's largest weight. It fills e4m3 up to a factor of 448 / 256.


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Returns the scale that fills the range of `dtype` with values up to `amax`, or 1 if amax is 0 or nearly 0.

    The scale of a finite amax is at least SMALLEST_SCALE. If a margin would make it smaller, the margin is reduced.
    """
    scale = torch.full_like(amax, LARGEST[dtype] * 2.0**-margin) / amax  # dividing a number by a tensor would round twice.
    scale = scale.clamp(min=SMALLEST_SCALE)
    return torch.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


class Unquantized(NamedTuple):
    """A tensor to quantise to FP8."""

    x: Tensor
    fmt: str
    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    max_seqlen: int
    scale: Tensor | None  # [h | 1], with delayed scaling.
    rotation: bool = False
    history: Tensor | None = None  # [amax_history_len, h | 1], with a scale. Its first row becomes the maximum of itself and amax.


def quantize(
    tensors: Sequence[Unquantized], dtype: torch.dtype, granularity: str, block_rows: int, margin: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns (data, descales, amax) of the tensors.

    data: for each tensor, laid out as its x. descales: for each tensor, fp32 [b | 1, h | 1, blocks | 1]. amax: all in one flat
        tensor.
    """
    results = [_quantized(t, dtype, granularity, block_rows, margin) for t in tensors]
    data, descales, amaxes = (list(each) for each in zip(*results, strict=True))
    return data, descales, torch.cat([amax.flatten() for amax in amaxes])


def _quantized(t: Unquantized, dtype: torch.dtype, granularity: str, block_rows: int, margin: int) -> tuple[Tensor, Tensor, Tensor]:
    x, fmt, scale = t.x, t.fmt, t.scale
    rows = as_bshd(x, fmt).float()
    if t.rotation:
        rows = rotated(rows, rotation_matrix(x.shape[-1], x.device))
    sizes = amax_sizes(x, fmt, t.cu_seqlens, t.max_seqlen, granularity, block_rows)
    if 0 in sizes:  # there are no sequences, only tokens outside of them.
        return torch.zeros(x.shape, dtype=dtype, device=x.device), rows.new_empty(sizes), rows.new_empty(sizes)
    b, position = _places(x, fmt, t.cu_seqlens, t.cu_seqlens_padded)
    group = groups(b, position, rows.shape[-2], sizes, block_rows)
    is_real = position >= 0
    if t.cu_seqlens is not None and t.cu_seqlens.shape[0] > 1:
        is_real = is_real & (position < t.cu_seqlens.long().diff().clamp(max=t.max_seqlen)[b])
    magnitude = torch.where(rows.isfinite() & is_real[..., None, None], rows.abs(), 0.0).amax(-1)
    amax = magnitude.new_zeros(sizes).flatten().scatter_reduce(0, group.flatten(), magnitude.flatten(), "amax").view(sizes)
    if t.history is not None:
        note_amax(t.history, amax)
    scales = scale_of(amax, dtype, margin) if scale is None else scale.view(1, -1, 1)
    data = cast(rows, scales.flatten()[group][..., None], dtype)
    data = torch.where(is_real[..., None, None], data.view(torch.uint8), 0).view(dtype)
    return as_bshd(data, fmt).contiguous(), 1.0 / scales, amax


def note_amax(history: Tensor, amax: Tensor) -> None:
    """Raises the first row of a history, which has the maximum of the present step, to `amax`."""
    newest = history[0]
    torch.maximum(newest, amax.view(-1), out=newest)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x * scale in `dtype`. Finite values saturate, and others become NaN."""
    scaled = (x * scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return torch.where(x.isfinite(), scaled, torch.nan).to(dtype)


def dequantize(spec: AttentionSpec, x: Operands, dtype: torch.dtype) -> Operands:
    """Returns the operands with q, k and v dequantised to `dtype`, as far as they are in FP8."""
    if spec.kv_dtype is not None:
        lengths = x.packing("kv")[:2]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        k, v = (
            (t.to(wide) * d.to(wide)).to(dtype) if d.dim() == 4 else dequantize_one(t, d, spec.kv_format, *lengths, 0, dtype)
            for t, d in zip((x.k, x.v), x.descales, strict=True)
        )
        return x._replace(k=k, v=v)
    if spec.fp8 is None:
        return x
    q = dequantize_side(spec, x, "q", x.q, x.descales[0], dtype)
    k, v = (dequantize_side(spec, x, "kv", t, descale, dtype) for t, descale in zip((x.k, x.v), x.descales[1:3], strict=True))
    return x._replace(q=q, k=k, v=v)


def dequantize_side(
    spec: AttentionSpec, x: Operands, side: Literal["q", "kv"], data: Tensor, descale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns a dequantised tensor. side: "q" for a tensor laid out as q or dout, "kv" for one laid out as k or v."""
    assert spec.fp8 is not None
    fmt = spec.q_format if side == "q" else spec.kv_format
    return dequantize_one(data, descale, fmt, *x.packing(side)[:2], spec.fp8.block_rows, dtype)


def dout_of(spec: AttentionSpec, x: Operands, dout: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns dout in `dtype`, with the values that an FP8 backward reads. 16 bits are rounded with a scale per BLOCK_ROWS rows."""
    assert spec.fp8 is not None
    if dout.element_size() == 1:
        return dequantize_side(spec, x, "q", dout, x.descales[3], dtype)
    packing = x.packing("q")
    source = Unquantized(dout, spec.q_format, *packing, None)
    (data,), (descale,), _ = quantize([source], spec.fp8.grad_dtype, "block", BLOCK_ROWS, 0)
    return dequantize_one(data, descale, spec.q_format, *packing[:2], BLOCK_ROWS, dtype)


def dout_like(spec: AttentionSpec, x: Operands, out: Tensor) -> Tensor:
    """Returns out's values in the dtype of dout in a backward of such operands."""
    return out if spec.fp8 is None or len(x.descales) == 3 else out.to(spec.fp8.grad_dtype)


def dequantize_one(
    data: Tensor,
    descale: Tensor,
    fmt: str,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    block_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns data * descale in `dtype`, laid out as data. block_rows is used only if there are several blocks."""
    sizes = descale.shape[0], descale.shape[1], descale.shape[2]
    if sizes[0] == 0:  # there are no sequences, only tokens outside of them.
        return torch.zeros_like(data, dtype=dtype)
    group = groups(*_places(data, fmt, cu_seqlens, cu_seqlens_padded), data.shape[fmt.index("h")], sizes, block_rows)
    wide = torch.float64 if dtype is torch.float64 else torch.float32  # a descale may be 0 or infinite in 16 bits
    rows = as_bshd(data, fmt).to(wide) * descale.to(wide).flatten()[group][..., None]
    return as_bshd(rows.to(dtype), fmt)


def amax_sizes(
    x: Tensor, fmt: str, cu_seqlens: Tensor | None, max_seqlen: int, granularity: str, block_rows: int
) -> tuple[int, int, int]:
    """Returns the sizes [b | 1, h | 1, blocks | 1] of a tensor's scales."""
    batch = x.shape[fmt.index("b")] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        batch if granularity in ("batch_head", "block") else 1,
        x.shape[fmt.index("h")] if granularity != "tensor" else 1,
        num_blocks(max_seqlen, block_rows) if granularity == "block" else 1,
    )


def num_blocks(max_seqlen: int, block_rows: int) -> int:
    # sym_max keeps a compiled graph valid for all lengths.
    return torch.sym_max(1, -(-max_seqlen // block_rows))  # type: ignore[no-any-return, no-untyped-call]


def _places(x: Tensor, fmt: str, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each token, and its position there.

    If a token is in no sequence, its position is negative or past the sequence's length.
    """
    if fmt != "thd":
        batch, tokens = as_bshd(x, fmt).shape[:2]
        b = torch.arange(batch, device=x.device)[:, None].expand(batch, tokens)
        return b, torch.arange(tokens, device=x.device).expand(batch, tokens)
    assert cu_seqlens is not None
    token = torch.arange(x.shape[0], device=x.device)
    if cu_seqlens.shape[0] < 2:
        return token * 0, token * 0 - 1
    starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1].long().clamp(0, x.shape[0])
    if cu_seqlens_padded is None:
        b = torch.searchsorted(starts, token, right=True) - 1
    else:  # slots may be in any order, and an empty slot may lie inside of another one.
        first_rows = torch.where(cu_seqlens.diff() > 0, starts, x.shape[0])
        ordered, order = first_rows.sort(stable=True)
        b = order[(torch.searchsorted(ordered, token, right=True) - 1).clamp(min=0)]
    b = b.clamp(min=0)
    return b, token - starts[b]


def groups(b: Tensor, position: Tensor, heads: int, sizes: tuple[int, int, int], block_rows: int) -> Tensor:
    """Returns for each token and head the index of its scale in a flat [b | 1, h | 1, blocks | 1]."""
    h = torch.arange(heads, device=b.device)
    group = (b[..., None] if sizes[0] > 1 else 0) * sizes[1] + (h if sizes[1] > 1 else h * 0)
    block = (position // block_rows).clamp(0, sizes[2] - 1) if sizes[2] > 1 else position * 0
    return (group * sizes[2] + block[..., None]).expand(*position.shape, heads)


def rotation_matrix(head_dim: int, device: torch.device) -> Tensor:
    """Returns an orthogonal matrix, fp32 [d, d]: diag(signs) times Hadamard matrices.

    The size of the Hadamard matrices is the largest power of two that divides the head dim.
    """
    size = head_dim & -head_dim
    i = torch.arange(head_dim, device=device)
    both = i[:, None] & i % size
    for shift in (4, 2, 1):
        both = both ^ both >> shift
    is_inside = i[:, None] // size == i // size
    matrix = torch.where(is_inside, torch.where(both & 1 == 1, -1.0, 1.0), 0.0)
    # The signs come from a fixed hash. Without them, a constant row would become one outlier. Only the low 16 bits of the
    # multiplier are used, because Inductor treats a larger one as an int32. Bit 15 of the product does not depend on the higher
    # bits.
    signs = torch.where((i * (0x9E3779B1 & 0xFFFF) >> 15) & 1 == 1, -1.0, 1.0)
    return signs[:, None] * matrix / math.sqrt(size)


def rotated(rows: Tensor, matrix: Tensor) -> Tensor:
    """Returns the product in fp32. Autocast is off, because it would round both factors to 16 bits."""
    with torch.autocast(rows.device.type, enabled=False):
        return rows @ matrix


class _RoundedWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weights: Tensor) -> Tensor:
        return (weights * P_SCALE).to(torch.float8_e4m3fn).to(weights.dtype) / P_SCALE

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, scores: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype  # type: ignore[attr-defined]
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        dtype = ctx.dtype  # type: ignore[attr-defined]
        if gradient.numel() == 0:
            return gradient, None
        scale = scale_of(gradient.abs().amax(-1, keepdim=True), dtype)
        return cast(gradient, scale, dtype).to(gradient.dtype) / scale, None


def round_weights(weights: Tensor) -> Tensor:
    """Rounds softmax weights, relative to their row's largest, as the FP8 kernels do. Their gradient is not rounded."""
    return _RoundedWeights.apply(weights)  # type: ignore[no-any-return, no-untyped-call]


def round_gradient(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scores unchanged. Their gradient is rounded to `dtype`, with a scale for each query."""
    return _RoundedGradient.apply(scores, dtype)  # type: ignore[no-any-return, no-untyped-call]
