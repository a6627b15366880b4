"""Operations and bytes of a workload, as FlashAttention counts them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flexattn.bench.shapes import Workload
from flexattn.dispatch.spec import Band, make_band

FLOPS = (
    "forward 2 * heads * (head_dim_qk + head_dim_v) for each visible (query, key) pair, backward 2.5 times that, both 3.5 times; "
    "a mask that is only causal counts its diagonal as half, so a square counts half of its pairs (FlashAttention's count)"
)
BYTES = "forward: each of q, k, v, out and a dense bias once; backward: also dout, dq, dk, dv, dbias; both: the sum of the two"
KERNEL_FLOPS = (
    "a kernel's own matrix products, 2 * heads * head dim for each visible pair: forward q k^T and p v; dq q k^T, dout v^T and "
    "ds k; dkdv the first two again, p^T dout and ds^T q"
)
KERNEL_BYTES = "each tensor that the kernel reads or writes once"
BACKWARD = 2.5  # five matrix products for the forward's two


class Work(NamedTuple):
    flops: float
    bytes: float


def band_of(workload: Workload) -> Band:
    return make_band(workload.attn_mask_type, workload.window_size, None)


def visible_pairs(len_q: int, len_kv: int, band: Band) -> float:
    """(query, key) pairs of one sequence and head that the band shows; see FLOPS for the diagonal of a causal mask."""
    diagonal = torch.arange(len_q, dtype=torch.int64) + (len_kv - len_q if band.bottom_right else 0)
    first = torch.zeros_like(diagonal) if band.left is None else (diagonal - band.left).clamp(min=0)
    last = torch.full_like(diagonal, len_kv - 1) if band.right is None else (diagonal + band.right).clamp(max=len_kv - 1)
    pairs = int((last - first + 1).clamp(min=0).sum())
    is_only_causal = band.left is None and band.right == 0
    return pairs - (0.5 * int(((diagonal >= 0) & (diagonal < len_kv)).sum()) if is_only_causal else 0.0)


def total_pairs(workload: Workload) -> float:
    """Visible pairs of one head, over all sequences."""
    band = band_of(workload)
    shapes = list(zip(workload.lengths_q, workload.lengths_kv, strict=True))
    pairs = {shape: visible_pairs(*shape, band) for shape in set(shapes)}
    return sum(pairs[shape] for shape in shapes)


def tensor_bytes(workload: Workload) -> dict[str, int]:
    """Bytes of each of q, k, v, out and a dense bias; a gradient is as large as its tensor."""
    size = getattr(torch, workload.dtype).itemsize
    tokens_q, tokens_kv = sum(workload.lengths_q), sum(workload.lengths_kv)
    is_dense = workload.score == "dense_bias"
    bias = workload.biases * workload.num_heads * workload.seqlen_q * workload.seqlen_kv if is_dense else 0
    return {
        "q": tokens_q * workload.num_heads * workload.head_dim_qk * size,
        "k": tokens_kv * workload.num_heads_kv * workload.head_dim_qk * size,
        "v": tokens_kv * workload.num_heads_kv * workload.head_dim_v * size,
        "out": tokens_q * workload.num_heads * workload.head_dim_v * size,
        "bias": bias * size,
    }


def work(workload: Workload, direction: str) -> Work:
    """Returns the counts that FLOPS and BYTES define."""
    forward = 2 * workload.num_heads * (workload.head_dim_qk + workload.head_dim_v) * total_pairs(workload)
    tensors = sum(tensor_bytes(workload).values())
    return {
        "forward": Work(forward, tensors),
        "backward": Work(BACKWARD * forward, 2 * tensors),
        "both": Work((1 + BACKWARD) * forward, 3 * tensors),
    }[direction]


def kernel_work(workload: Workload, kernel: str) -> Work:
    """Returns the counts that KERNEL_FLOPS and KERNEL_BYTES define for "forward", "dq" or "dkdv"."""
    pairs = 2 * workload.num_heads * total_pairs(workload)
    d_qk, d_v = workload.head_dim_qk, workload.head_dim_v
    size = tensor_bytes(workload)
    q, k, v, out = (size[name] for name in ("q", "k", "v", "out"))
    return {
        "forward": Work(pairs * (d_qk + d_v), q + k + v + out),
        "dq": Work(pairs * (2 * d_qk + d_v), q + k + v + out + out + q),  # reads out and dout, writes dq
        "dkdv": Work(pairs * (2 * d_qk + 2 * d_v), q + k + v + out + k + v),  # reads dout
    }[kernel]


class Roofline(NamedTuple):
    """Place of a kernel under the two ceilings that were measured in the same run (Williams et al., "Roofline", CACM 2009)."""

    intensity: float  # FLOP per byte
    ridge: float  # FLOP per byte below which the copy rate is the ceiling
    attainable_tflops: float

    @property
    def bound(self) -> str:
        return "memory" if self.intensity < self.ridge else "matrix products"


def roofline(work: Work, matmul_tflops: float, copy_gb_s: float) -> Roofline:
    intensity = work.flops / work.bytes
    ridge = matmul_tflops * 1e3 / copy_gb_s
    return Roofline(intensity, ridge, min(matmul_tflops, intensity * copy_gb_s * 1e-3))


def largest_matrix_bytes(workload: Workload) -> int:
    """Returns the bytes of all scores in fp32: the least memory of an implementation that stores them."""
    return 4 * workload.num_heads * sum(q * kv for q, kv in zip(workload.lengths_q, workload.lengths_kv, strict=True))
