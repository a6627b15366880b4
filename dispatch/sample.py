"""Random operands for a spec, to compile its kernels and to check its results."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Operands

# These values differ enough from every default and from 0 to show in bf16 if a kernel ignores them.
SCALE = 2.5  # the factor of the usual scale.
SOFTCAP = 2.25
DROPOUT = 0.4375  # 7/16, because cuDNN needs multiples of 1/16.
SLOPES = (0.05, 0.5)  # ALiBi's slopes, from the first head to the last.
DESCALES = (0.5, 1.5)  # factors of FP8 keys beside other queries, from the first head to the last.
LISTED = 24  # entries of a list of keys.
SEED, OFFSET = 0x1357_9BDF_0246_8ACE, 0x0F1E_2D3C_4B5A_6978  # both halves of the seed matter.


def sample_operands(
    spec: AttentionSpec, device: torch.device | str, lengths_q: list[int], lengths_kv: list[int], seed: int = 0, gap: int = 0
) -> Operands:
    """Returns operands of `spec` for sequences with these lengths: standard normal tensors, with padding only in dense formats.

    If the spec has no padding, all lengths must be equal. gap: the number of unused rows after each packed sequence.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def tokens(fmt: str, lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype | None = None) -> Tensor:
        total = sum(lengths) + gap * len(lengths)
        sizes = {"b": len(lengths), "s": max(lengths), "t": total, "h": heads, "d": head_dim}
        return normal(*(sizes[dim] for dim in fmt), dtype=dtype or spec.dtype)

    def offsets(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)

    def starts(fmt: str, lengths: list[int]) -> Tensor | None:
        return offsets([length + gap for length in lengths]) if gap and fmt == "thd" else None

    batch, longest_q, longest_kv = len(lengths_q), max(lengths_q), max(lengths_kv)
    bias = None
    if spec.bias_dims is not None:
        entries = max((n for n in range(2, batch) if batch % n == 0), default=batch) if spec.bias_is_shared else batch
        full = (entries, spec.num_heads, longest_q, longest_kv)
        bias = normal(*(size if spans else 1 for size, spans in zip(full, spec.bias_dims, strict=True)), dtype=spec.dtype)
    sides: dict[str, Any] = dict.fromkeys(("seqused_q", "seqused_kv", "page_table", "kv_indices", "kv_index_counts", "out"))
    if spec.kv_lists:
        tokens_q = (sum(lengths_q) + gap * batch,) if spec.q_format == "thd" else (batch, longest_q)
        shape = (*tokens_q, *((spec.kv_lists,) if spec.kv_lists > 1 else ()), LISTED)
        blocks = -(-longest_kv // spec.kv_block)  # an entry of -1 is empty, as some others are in shorter sequences.
        sides["kv_indices"] = torch.randint(-1, blocks, shape, generator=generator, device=device, dtype=torch.int32)
    for end, fmt, lengths in (("q", spec.q_format, lengths_q), ("kv", spec.kv_format, lengths_kv)):
        sides[f"cu_seqlens_{end}"] = offsets(lengths) if spec.padding else None
        sides[f"cu_seqlens_{end}_padded"] = starts(fmt, lengths)
        sides[f"max_seqlen_{end}"] = max(lengths)
    return Operands(
        q=tokens(spec.q_format, lengths_q, spec.num_heads, spec.head_dim_qk),
        k=tokens(spec.kv_format, lengths_kv, spec.num_heads_kv, spec.head_dim_qk, spec.kv_dtype),
        v=tokens(spec.kv_format, lengths_kv, spec.num_heads_kv, spec.head_dim_v, spec.kv_dtype),
        bias=bias,
        alibi_slopes=torch.linspace(*SLOPES, spec.num_heads, dtype=torch.float32, device=device)
        if spec.bias_type == "alibi"
        else None,
        softmax_offset=normal(spec.num_heads) if spec.softmax_type == "learnable" else None,
        **sides,
        rng_state=_rng_state(spec, seed, batch).to(device) if spec.dropout else None,
        softmax_scale=SCALE * spec.head_dim_qk**-0.5,
        softcap=SOFTCAP if spec.softcap else 0.0,
        dropout_p=DROPOUT if spec.dropout else 0.0,
        descales=_descales(spec, batch, (longest_q, longest_kv), device),
    )


def _rng_state(spec: AttentionSpec, seed: int, batch: int) -> Tensor:
    """Returns a seed and offset. If the spec has an origin, there is a row for each sequence, within a group of eight keys."""
    state = torch.tensor([SEED + seed, OFFSET], device="cpu")
    if not spec.has_origin:
        return state
    rows = [(5 * b, 16 * b, 3 * b * spec.num_heads, b % 8) for b in range(1, batch + 1)]
    return torch.cat((state.expand(batch, 2), torch.tensor(rows, device="cpu")), 1)


def _descales(spec: AttentionSpec, batch: int, lengths: tuple[int, int], device: torch.device | str) -> list[Tensor]:
    """Returns descales of q, k, v and dout, all 1, in the dims of the spec's descales. If only keys are in FP8, theirs differ."""
    if spec.kv_dtype is not None:
        return [torch.linspace(*DESCALES, spec.num_heads_kv, dtype=torch.float32, device=device).view(1, -1, 1) for _ in "kv"]
    if spec.fp8 is None:
        return []
    rows = spec.fp8.block_rows
    heads_and_lengths = (
        (spec.num_heads, lengths[0]),
        (spec.num_heads_kv, lengths[1]),
        (spec.num_heads_kv, lengths[1]),
        (spec.num_heads, lengths[0]),
    )
    sizes = ((batch, heads, max(1, -(-length // rows)) if rows else 1) for heads, length in heads_and_lengths)
    return [
        torch.ones(
            [size if varies else 1 for size, varies in zip(full, spec.fp8.descale_dims, strict=True)],
            dtype=torch.float32,
            device=device,
        )
        for full in sizes
    ]


def with_rng_state(x: Operands) -> Operands:
    """Returns the operands with an rng_state, if dropout needs one and the call leaves it out."""
    if x.dropout_p == 0.0 or x.rng_state is not None:
        return x
    return x._replace(rng_state=torch.zeros(2, dtype=torch.int64, device=x.q.device))
