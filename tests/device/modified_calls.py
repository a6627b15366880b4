"""Calls with modified scores, dropout and packed batches, as `attention()` brings them to the kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.block_mask import block_lists, create_block_mask
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands, empty_gradients, empty_outputs
from flexattn.kernels_triton.common.problem import Backward, Forward
from flexattn.kernels_triton.families import Policy
from flexattn.mods import both, causal, document, relative_bias
from flexattn.mods.trace import trace_mods
from flexattn.testing import Inputs, make_call

if TYPE_CHECKING:
    from tests.device.small_calls import Shape

DOCUMENTS = 4  # of a sequence
BUCKETS = 32  # of a relative bias
_PACKED = (8, 1, 7, 4, 3, 2, 2, 5)  # eighths of the longest sequence


def lengths_of(longest: int, batch: int) -> list[int]:
    """Returns the lengths of a packed batch, from an eighth of the longest up to it."""
    return [longest * _PACKED[n % len(_PACKED)] // 8 for n in range(batch)]


def _alibi(heads: int, tokens: int, device: str) -> dict[str, Any]:
    return {"bias_type": "alibi", "alibi_slopes": torch.linspace(0.01, 0.5, heads, device=device)}


def _relative(heads: int, tokens: int, device: str) -> dict[str, Any]:
    table = torch.linspace(-1.0, 1.0, heads * BUCKETS, device=device).reshape(BUCKETS, heads)
    return {"mods": trace_mods(relative_bias(table), None, needs_grad=True)}


def _documents(heads: int, tokens: int, device: str) -> dict[str, Any]:
    documents = torch.arange(tokens, device=device) * DOCUMENTS // tokens
    mask = document(documents)
    blocks = create_block_mask(both(causal(), mask), None, None, tokens, tokens, device)
    lists = block_lists(blocks, 1, heads, tokens, tokens, documents.device)
    return {"mods": trace_mods(None, mask, needs_grad=True), "blocks": lists}


def _dropout(heads: int, tokens: int, device: str) -> dict[str, Any]:
    return {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2], device=device)}


MASKS: dict[str, tuple[Callable[[int, int, str], dict[str, Any]], str]] = {
    "alibi": (_alibi, "causal"),
    "relative": (_relative, "causal"),
    "documents": (_documents, "causal"),
    "dropout": (_dropout, "causal"),
    "dropout open": (_dropout, "no_mask"),
    "packed": (lambda heads, tokens, device: {}, "padding_causal"),
    "packed open": (lambda heads, tokens, device: {}, "padding"),
}
"""By the name of a mask: the function that returns the options of a call, and its attn_mask_type."""


def operands(shape: Shape, device: str) -> tuple[AttentionSpec, Operands]:
    """Returns the spec and the operands of a shape with one of the masks."""
    options, mask_type = MASKS[shape.mask]
    source = "cpu" if device == "meta" else device
    lengths = lengths_of(shape.keys, shape.batch) if mask_type.startswith("padding") else None
    dims = (shape.batch, shape.keys) if lengths is None else (sum(lengths),)

    def rows(heads: int, head_dim: int) -> Tensor:
        t = torch.empty(*dims, heads, head_dim, dtype=torch.bfloat16, device=device)
        return t if device == "meta" else t.normal_()

    q = rows(shape.heads, shape.head_dim_qk)
    k, v = (rows(shape.heads_kv, head_dim) for head_dim in (shape.head_dim_qk, shape.head_dim_v))
    starts = None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = None if lengths is None else shape.keys
    inputs = Inputs(q, k, v, "bshd" if lengths is None else "thd", starts, starts, None, None, longest, longest)
    made = options(shape.heads, shape.keys, source)
    spec, x = make_call(inputs, attn_mask_type=mask_type, return_max_logit=False, **made)
    return spec._replace(device_type="cuda", capability=(9, 0)), triton_backend.on_meta(x) if device == "meta" else x


def calls_of(shape: Shape, device: str) -> tuple[Forward, Backward]:
    """Returns the forward and the backward, whose out and lse are not yet computed."""
    spec, x = operands(shape, device)
    out, lse, max_logit = empty_outputs(spec, x)
    forward = triton_backend._forward_call(spec, x, (out, lse, max_logit))
    results = (out, lse, torch.empty_like(out) if device == "meta" else torch.randn_like(out), None)
    return forward, triton_backend._backward_call(spec, x, results, empty_gradients(spec, x), Policy())
