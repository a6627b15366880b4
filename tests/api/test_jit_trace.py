"""A function recorded by torch.jit.trace returns the results of a plain call for new inputs of the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import append_kv, attention, attention_backward, create_block_mask, merge_attention, mods
from flexattn.integrations import te
from flexattn.integrations.sdpa import scaled_dot_product_attention
from flexattn.nn import qk_norm_rope

BATCH, TOKENS, HEADS, DIM = 2, 16, 2, 16
SLOPES = torch.tensor([0.5, 0.25])
BLOCKS = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, TOKENS, TOKENS, "cpu", 16)
TABLE = torch.randn(32, HEADS)
ANGLES = torch.randn(TOKENS, DIM // 2).repeat(1, 2)


def starts(x: Tensor) -> Tensor:
    """Returns cu_seqlens of lengths that depend on values."""
    ends = (x[:, :, 0, 0] > -0.5).sum(1).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def packed(x: Tensor) -> Tensor:
    tokens, cu_seqlens = x.flatten(0, 1), starts(x)
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return attention(tokens, tokens, tokens, **arguments, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)


def padded(x: Tensor) -> Tensor:
    return attention(x, x, x, attn_mask_type="padding_causal", cu_seqlens_q=starts(x), cu_seqlens_kv=starts(x))


def by_input(x: Tensor) -> Tensor:
    table = x[0, :, 0, :1] @ x[0, :, 0, :1].T
    return attention(x, x, x, score_mod=lambda score, b, h, q_idx, kv_idx: score + table[q_idx, kv_idx])


def sdpa(x: Tensor, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(x.transpose(1, 2) for _ in range(3)), attn_mask=mask)


def by_number(x: Tensor) -> Tensor:
    """A number on the CPU that depends on the input is an input, not a constant."""

    def score_mod(graph: Any, score: Any, tensors: Any) -> Any:
        return graph.mul(a=score, b=tensors["factor"])

    return attention(x, x, x, score_mod=te.TEScoreMod(score_mod, score_mod_tensors={"factor": x.detach().abs().max()}))


def merged(x: Tensor) -> Tensor:
    halves = (attention(x, 2 * x[:, half], x[:, half], return_lse=True) for half in (slice(0, 8), slice(8, 16)))
    return merge_attention(*next(halves), *next(halves))[0]


def appended(x: Tensor) -> Tensor:
    caches = torch.zeros(BATCH, 2 * TOKENS, HEADS, DIM), torch.zeros(BATCH, 2 * TOKENS, HEADS, DIM)
    append_kv(*caches, x, 2 * x, seqused_kv=torch.tensor([1, 3], dtype=torch.int32))
    return caches[0] + caches[1]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: attention(x, x, x, attn_mask_type="causal"),
    "grouped": lambda x: attention(x, x[:, :, :1], x[:, :, :1], softcap=2.0),
    "mod of a constant": lambda x: attention(x, x, x, score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (i - j)),
    "mod of an input": by_input,
    "library's mod": lambda x: attention(x, x, x, score_mod=mods.relative_bias(TABLE)),
    "callback": by_number,
    "mask": lambda x: attention(x, x, x, mask_mod=lambda b, h, i, j: j <= i),
    "block mask": lambda x: attention(x, x, x, block_mask=BLOCKS),
    "alibi": lambda x: attention(x, x, x, bias_type="alibi", attn_mask_type="causal"),
    "packed": packed,
    "padded": padded,
    "bool mask": lambda x: sdpa(x, x[0, :, 0] @ x[0, :, 0].T > 0),
    "bool mask of ones": lambda x: sdpa(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()),
    "float mask": lambda x: sdpa(x, x[0, :, 0] @ x[0, :, 0].T),
    "merged": merged,
    "norm and positions": lambda x: qk_norm_rope(x, x, (ANGLES, ANGLES), q_weight=TABLE[:DIM, 0], k_weight=TABLE[:DIM, 1])[0],
}
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "appended": appended,
    "backward": lambda x: attention_backward(x, x, x, x, *attention(x, x, x, return_lse=True)).dq,
}


def inputs(seed: int) -> Tensor:
    return torch.randn(BATCH, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_gives_what_the_call_gives(name: str) -> None:
    call = CALLS[name]
    traced = torch.jit.trace(call, (inputs(0).requires_grad_(),), check_trace=False)
    x = inputs(1).requires_grad_()
    got, wanted = traced(x), call(x)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # torch.jit may fuse torch's own ops
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x)[0] for out in (got, wanted)), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FORWARD)
def test_a_trace_without_gradients_gives_what_the_call_gives(name: str) -> None:
    call = FORWARD[name]
    with torch.no_grad():
        traced = torch.jit.trace(call, (inputs(0),), check_trace=False)
        assert torch.equal(traced(inputs(1)), call(inputs(1)))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_dropout_draws_anew() -> None:
    traced = torch.jit.trace(lambda x: attention(x, x, x, dropout_p=0.5), (inputs(0),), check_trace=False)
    assert not torch.equal(traced(inputs(0)), traced(inputs(0)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_block_mask_is_made_before_a_trace() -> None:
    def call(x: Tensor) -> Tensor:
        block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, TOKENS, TOKENS, "cpu", 16)
        return attention(x, x, x, block_mask=block_mask)

    with pytest.raises(RuntimeError, match=r"under torch.jit.trace.*accepted: a mask created before the trace, or mask_mod"):
        torch.jit.trace(call, (inputs(0),), check_trace=False)
