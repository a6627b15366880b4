"""The indexer of sparse attention against dense scores: selected keys, their scores with gradients, and the training loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention, key_weights, select_keys, selection_loss

HEADS, DIM, N = 3, 8, 4


def inputs(*lead: int, keys: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (*lead, HEADS, DIM), (*lead[:-1], keys, 1, DIM), (*lead, HEADS)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def dense_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float = DIM**-0.5) -> Tensor:
    return torch.einsum("bihj,bih->bij", torch.einsum("bihd,bjd->bihj", q, k[:, :, 0]).mul(scale).relu(), weights)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal_bottom_right"])
def test_keys_and_scores_are_the_best_of_dense_scores(mask: str, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexattn.dispatch.eager_backend, "SCORE_BYTES", 600)  # a few queries in each chunk
    q, k, weights = inputs(2, 7)
    order = ["bshd".index(dim) for dim in fmt]
    window = {"window_size": (6, 0)} if mask != "no_mask" else {}
    chosen = select_keys(
        q.permute(order), k.permute(order), weights, N, qkv_format=fmt, attn_mask_type=mask, softmax_scale=0.5, **window
    )
    scores = dense_scores(q, k, weights, 0.5)
    if mask != "no_mask":
        distance = torch.arange(7)[:, None] + 4 - torch.arange(11)
        scores = scores.masked_fill((distance < 0) | (distance > 6), -torch.inf)
    best = scores.topk(N, -1)
    assert chosen.kv_indices.dtype == torch.int32
    assert torch.equal(chosen.kv_indices.sort(-1).values, best.indices.int().sort(-1).values)
    torch.testing.assert_close(chosen.scores, scores.gather(-1, chosen.kv_indices.long()))
    seed = torch.linspace(-1, 1, chosen.scores.numel(), dtype=torch.float64).view(chosen.scores.shape)
    wanted = torch.autograd.grad(scores.gather(-1, chosen.kv_indices.long()), (q, k, weights), seed)
    for got, right in zip(torch.autograd.grad(chosen.scores, (q, k, weights), seed), wanted, strict=True):
        torch.testing.assert_close(got, right)


def test_packed_sequences_select_their_own_keys() -> None:
    q, k, weights = inputs(1, 9, keys=9)
    packed: dict[str, Any] = flexattn.packed([2, 0, 7])
    chosen = select_keys(q[0], k[0], weights[0], N, causal=True, **packed)
    for first, end in ((0, 2), (2, 9)):
        own = select_keys(q[:, first:end], k[:, first:end], weights[:, first:end], N, causal=True)
        assert torch.equal(chosen.kv_indices[first:end].sort(-1).values, own.kv_indices[0].sort(-1).values)
        torch.testing.assert_close(chosen.scores[first:end].sort(-1).values, own.scores[0].sort(-1).values)
    assert chosen.kv_indices[0].tolist().count(-1) == N - 1


@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_lengths_in_use_are_those_of_the_sequences(fmt: str) -> None:
    q, k, weights = inputs(2, 7)
    order = ["bshd".index(dim) for dim in fmt]
    lengths: dict[str, Any] = {"seqused_q": torch.tensor([7, 3]).int(), "seqused_kv": torch.tensor([2, 11]).int()}
    options: dict[str, Any] = {"attn_mask_type": "padding", "qkv_format": fmt, **lengths}
    moved = [t.detach().permute(order) for t in (q, k)]
    chosen = select_keys(*moved, weights, N, **options)
    _, lse = attention(moved[0], moved[1], moved[1], return_lse=True, **options)
    got = key_weights(*moved, lse, chosen.kv_indices, **options)
    for b, (len_q, len_kv) in enumerate(((7, 2), (3, 11))):
        row = q[b : b + 1, :len_q].detach(), k[b : b + 1, :len_kv].detach()
        own = select_keys(*row, weights[b : b + 1, :len_q], N)
        torch.testing.assert_close(chosen.scores[b, :len_q], own.scores[0])
        _, own_lse = attention(row[0], row[1], row[1], return_lse=True)
        torch.testing.assert_close(got[b, :len_q], key_weights(*row, own_lse, own.kv_indices)[0])
        assert not got[b, len_q:].any()


def test_lists_may_be_empty() -> None:
    """The first sequence has no keys."""
    q, k, _ = (t.detach()[0] for t in inputs(1, 6, keys=4))
    packed: dict[str, Any] = flexattn.packed([2, 4], [0, 4])
    _, lse = attention(q, k, k, return_lse=True, **packed)
    got = key_weights(q, k, lse, torch.arange(4).expand(6, 4).int(), **packed)
    assert not got[:2].any()
    torch.testing.assert_close(got[2:].sum(-1), torch.full((4,), float(HEADS), dtype=torch.float64))
    assert key_weights(q, k, lse, torch.empty(6, 0, dtype=torch.int32), **packed).shape == (6, 0)


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_weights_are_those_of_the_softmax_summed_over_heads(heads_kv: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, s, h, DIM, generator=generator, dtype=torch.float64) for s, h in ((7, 4), (11, 2), (11, 2)))
    shape = (2, 7, 11) if heads_kv == 1 else (2, 7, 2, 11)
    lists = torch.rand(shape, generator=generator).argsort(-1)[..., :N].int()
    lists[:, 2] = -1
    options: dict[str, Any] = {"attn_mask_type": "causal_bottom_right", "softcap": 2.0}
    _, lse = attention(q, k, v, return_lse=True, **options)
    got = key_weights(q, k, lse, lists, **options)
    scores = 2.0 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * DIM**-0.5 / 2.0)
    scores = scores.masked_fill(torch.arange(7)[:, None] + 4 < torch.arange(11), -torch.inf)
    weights = scores.softmax(-1).transpose(1, 2)  # [b, i, h, j]
    weights = weights.sum(2) if heads_kv == 1 else weights.unflatten(2, (2, 2)).sum(3)
    torch.testing.assert_close(got, weights.gather(-1, lists.clamp(min=0).long()).masked_fill(lists < 0, 0.0))


def test_the_loss_is_the_divergence_from_the_weights() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(2, 3, N, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.rand(2, 3, N, generator=generator, dtype=torch.float64)
    lists = torch.arange(N).expand(2, 3, N).int().clone()
    lists[0, 0, 2:], lists[1, 1] = -1, -1
    weights[lists < 0] = 0.0
    losses = []
    for b, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        is_key = lists[b, i] >= 0
        target = weights[b, i][is_key] / weights[b, i].sum()
        losses.append(torch.nn.functional.kl_div(scores[b, i][is_key].log_softmax(-1), target, reduction="sum"))
    loss, wanted = selection_loss(scores, weights, lists), torch.stack(losses).mean()
    torch.testing.assert_close(loss, wanted)
    (got,), (right,) = torch.autograd.grad(loss, scores), torch.autograd.grad(wanted, scores)
    torch.testing.assert_close(got, right)


def test_errors_name_the_argument() -> None:
    q, k, weights = inputs(2, 7)
    for options, text in (
        ({"n": 0}, "n is 0; accepted: an int of at least 1"),
        ({"k": k.expand(-1, -1, 3, -1)}, "k has 3 heads; accepted: 1"),
        ({"weights": weights[..., :2]}, r"weights has shape \(2, 7, 2\); accepted: \[2, 7, 3\]"),
        ({"bias": torch.zeros(1)}, r"bias is given to select_keys\(\)"),
        ({"return_lse": True}, r"return_lse is given to select_keys\(\)"),
        ({"softcap": 2.0}, r"softcap is given to select_keys\(\)"),
        ({"mask": torch.zeros(7, 11, dtype=torch.float64)}, r"mask in floating point is given to select_keys\(\)"),
        ({"bias_type": "alibi"}, r"bias_type is given to select_keys\(\)"),
        ({"atn_mask_type": "causal"}, r"atn_mask_type is given to select_keys\(\)"),
        ({"mask_mod": lambda b, h, i, j: j > h}, "the mask depends on the head"),
    ):
        with pytest.raises(ValueError, match=text):
            select_keys(**{"q": q, "k": k, "weights": weights, "n": N, **options})
    lists = torch.zeros(2, 7, N, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"kv_block_size is given to key_weights\(\)"):
        key_weights(q, k, q[..., 0], lists, kv_block_size=16)
    with pytest.raises(ValueError, match=r"bias_type is given to key_weights\(\)"):
        key_weights(q, k, q[..., 0], lists, bias_type="alibi")
    with pytest.raises(ValueError, match=r"lse has shape \(2, 7, 3\); accepted: \(2, 3, 7\)"):
        key_weights(q, k, q[..., 0], lists)
    with pytest.raises(TypeError, match=r"q has dtype torch.float8_e4m3fn; accepted: torch.float16"):
        select_keys(q.to(torch.float8_e4m3fn), k, weights, N)
