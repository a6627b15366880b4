"""Calls of `attention` drawn at random from all that it takes, so that features meet which no grid has side by side."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import create_block_mask, mods
from flexattn.block_mask import block_lists
from flexattn.dispatch.spec import AttentionSpec, Operands, parse_format
from flexattn.score_mod import trace_mods
from flexattn.testing import GRADIENT_FACTOR, Inputs, check_close, make_call, make_inputs

HALF = (torch.bfloat16, torch.float16)
# What is left of a gradient of 0, as of a query that sees one key: fp32 roundings of the terms, whose size is some tens.
NOTHING = 1e-4
# Roundings of fp32 in a gradient, relative to the largest: dp and delta, a few times as large, cancel.
CANCELLED = 32.0


class RandomCall(NamedTuple):
    inputs: Inputs
    arguments: dict[str, Any]  # of attention(), beside the inputs
    spec: AttentionSpec  # the same call, made without attention()
    operands: Operands


def draw_call(seed: int, device: str, dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...], longest: int) -> RandomCall:
    """Lengths are at most `longest`, and 300 where only keys are as many."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    inputs = _inputs(rng, seed, device, dtypes, head_dims, longest)
    q_format, kv_format = parse_format(inputs.qkv_format)
    num_heads, dtype = inputs.q.shape[q_format.index("h")], inputs.q.dtype
    sq = inputs.max_seqlen_q if inputs.max_seqlen_q is not None else inputs.q.shape[q_format.index("s")]
    skv = inputs.max_seqlen_kv if inputs.max_seqlen_kv is not None else inputs.k.shape[kv_format.index("s")]
    has_lengths = inputs.cu_seqlens_q is not None
    batch = len(inputs.cu_seqlens_q) - 1 if inputs.cu_seqlens_q is not None else inputs.q.shape[q_format.index("b")]

    call: dict[str, Any] = {"deterministic": rng.random() < 0.4}
    mask = rng.choice(["", "", "causal", "causal_bottom_right"])
    call["attn_mask_type"] = "_".join(filter(None, ["padding" if has_lengths else "", mask])) or "no_mask"
    if rng.random() < 0.4:
        call["window_size"] = (rng.choice([-1, 0, 5, 40, 100]), 0 if mask else rng.choice([-1, 0, 7, 60]))
    if not mask and rng.random() < 0.5:
        call["bottom_right_diagonal"] = rng.random() < 0.5
    kind = rng.random()
    if kind < 0.25:
        bias = randn(*(rng.choice([1, size]) for size in (batch, num_heads, sq, skv))).to(rng.choice([dtype, torch.float32]))
        bias = bias.mT.contiguous().mT if rng.random() < 0.3 else bias
        call |= {"bias_type": rng.choice(["pre_scale_bias", "post_scale_bias"]), "bias": bias.requires_grad_()}
    elif kind < 0.35:
        call |= {"bias_type": "alibi", "alibi_slopes": rng.choice([randn(num_heads), randn(batch, num_heads)]).abs()}
    if rng.random() < 0.4:
        call["softmax_type"] = rng.choice(["off-by-one", "learnable"])
        if call["softmax_type"] == "learnable":
            call["softmax_offset"] = randn(num_heads).to(rng.choice([dtype, torch.float32])).requires_grad_()
    if rng.random() < 0.2:
        call["softmax_scale"] = rng.choice([0.5, 1.0])
    if rng.random() < 0.2:
        call["softcap"] = rng.choice([2.0, 20.0])
    if rng.random() < 0.25:
        call["dropout_p"] = rng.choice([0.1, 0.5, 0.9])
        call["rng_state"] = torch.tensor([rng.randint(-(2**60), 2**60), rng.randint(0, 2**40)], device=device)
    spec_only: dict[str, Any] = {}
    score_mod = _score_mod(rng, randn, num_heads, batch, max(sq, skv)) if rng.random() < 0.35 else None
    mask_mod, block_mask = None, None
    if rng.random() < 0.25:
        mask_mod = _mask_mod(rng, device, max(sq, skv))
        if rng.random() < 0.5 and sq and skv:
            block_mask = create_block_mask(mask_mod, rng.choice([None, batch]), rng.choice([None, num_heads]), sq, skv, device)
            spec_only["blocks"] = block_lists(block_mask, batch, num_heads, sq, skv, inputs.q.device)
    if score_mod or mask_mod:
        spec_only["mods"] = trace_mods(score_mod, mask_mod, needs_grad=True)
    spec, operands = make_call(inputs, **call, **spec_only, return_max_logit=False)
    masks = {"block_mask": block_mask} if block_mask is not None else {"mask_mod": mask_mod}
    return RandomCall(inputs, call | {"score_mod": score_mod} | masks, spec, operands)


def _inputs(
    rng: Random, seed: int, device: str, dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...], longest: int
) -> Inputs:
    q_format = rng.choice(["bshd", "sbhd", "bhsd", "thd"])
    kv_format = rng.choice([q_format, q_format, "bshd", "thd", "bhsd"])
    has_lengths = "thd" in (q_format, kv_format) or rng.random() < 0.4
    batch = rng.choice([1, 2, 3])
    most = rng.choice([5, longest // 3, longest])
    if has_lengths:
        lengths_q = [rng.choice([0, 1, rng.randint(1, most), most]) for _ in range(batch)]
        lengths_kv = [rng.choice([0, 1, rng.randint(1, 300), 130]) for _ in range(batch)]
    else:
        lengths_q, lengths_kv = [rng.choice([1, 3, most])] * batch, [rng.choice([1, 17, 150, 300])] * batch
    num_heads_kv, head_dim = rng.choice([1, 2, 3]), rng.choice(head_dims)
    return make_inputs(
        q_format if q_format == kv_format else f"{q_format}_2{kv_format}",
        lengths_q=lengths_q if any(lengths_q) else [3] * batch,
        lengths_kv=lengths_kv if any(lengths_kv) else [20] * batch,
        padding=has_lengths,
        gap=rng.choice([0, 3]) if has_lengths else 0,
        num_heads=num_heads_kv * rng.choice([1, 2, 4]),
        num_heads_kv=num_heads_kv,
        head_dim_qk=head_dim,
        head_dim_v=rng.choice([head_dim, head_dim, head_dims[0]]),
        dtype=rng.choice(dtypes),
        device=device,
        strided=rng.random() < 0.3,
        seed=seed,
    )


def check_gradient(call: RandomCall, name: str, got: Tensor, want: Tensor, same_dtype: Tensor) -> None:
    """`check_close`, with what fp32 leaves of terms that cancel. Dropout divides those it keeps by their probability."""
    if want.any():
        cancelled = CANCELLED / (1.0 - call.arguments.get("dropout_p", 0.0))
        check_close(name, got, want, same_dtype, factor=GRADIENT_FACTOR, largest_score=cancelled)
    else:
        assert got.abs().le(NOTHING).all(), f"{name} is up to {got.abs().max()}, and the reference's is 0"


def _score_mod(rng: Random, randn: Any, num_heads: int, batch: int, longest: int) -> Any:
    by_head, by_key, scalar = randn(num_heads), randn(batch, longest + 1), randn(1)[0] + 3.0
    for captured in (by_head, by_key, scalar):
        captured.requires_grad_(rng.random() < 0.6)
    return rng.choice(
        [
            lambda score, b, h, i, j: score + by_head[h] * (i - j).abs(),
            lambda score, b, h, i, j: scalar * torch.tanh(score / scalar) + by_key[b, j],
            lambda score, b, h, i, j: torch.where((i + j) % 3 == 0, score * by_head[h], score - by_key[b, j]),
            lambda score, b, h, i, j: score * torch.sigmoid(by_key[b, i]),
            lambda score, b, h, i, j: torch.where(j % 5 != h, score, float("-inf")),
            mods.relative_bias(randn(16, num_heads).requires_grad_()),
            mods.softcap(4.0),
        ]
    )


def _mask_mod(rng: Random, device: str, longest: int) -> Any:
    size = rng.randint(1, 60)
    return rng.choice(
        [
            mods.document(torch.arange(longest + 1, device=device) // size),
            mods.either(mods.causal(), mods.sliding_window(0, size)),
            mods.dilated_sliding_window(size, 3),
            lambda b, h, i, j: (i + j + h) % 4 != 0,
            lambda b, h, i, j: (i // size == j // size) | (h == 1),
        ]
    )
