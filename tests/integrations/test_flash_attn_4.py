"""FlashAttention 4's functions against attention written out in float64."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch

from flexattn.integrations import flash_attn
from flexattn.integrations.flash_attn import block_sparsity, cute
from tests.integrations.flash_attn_reference import band_of, close, reference

B, H, H_K, D = 2, 4, 2, 16


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, s, h, D, requires_grad=True) for s, h in ((5, H), (9, H_K), (9, H_K))]


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({}, (None, None)),
        ({"causal": True}, (None, 0)),
        ({"window_size": (2, None)}, (2, None)),
        ({"window_size": (2, 1)}, (2, 1)),
        ({"window_size": (None, -1)}, (None, -1)),
        ({"window_size": (3, -1)}, (3, -1)),
        ({"window_size": (1, -2)}, (None, None)),
        ({"window_size": (2, None), "causal": True}, (2, 0)),
    ],
    ids=str,
)
def test_dense(qkv: list[torch.Tensor], options: dict[str, Any], sides: tuple[int | None, int | None]) -> None:
    out, lse = cute.flash_attn_func(*qkv, **options, return_lse=True)
    right, right_lse = reference(*qkv, band_of(5, 9, *sides))
    close(out, right)
    close(lse, right_lse)
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, qkv, dout), torch.autograd.grad(right, qkv, dout.double()), strict=True):
        close(a, b)
    assert cute.flash_attn_func(*(t.detach() for t in qkv), **options)[1] is None


def test_sink(qkv: list[torch.Tensor]) -> None:
    sink = torch.randn(H, requires_grad=True)
    out, lse = cute.flash_attn_func(*qkv, causal=True, learnable_sink=sink, return_lse=True)
    right, right_lse = reference(*qkv, band_of(5, 9, right=0), sink=sink)
    close(out, right)
    close(lse, right_lse)
    dout = torch.randn_like(out)
    close(*(torch.autograd.grad(x, sink, dout.to(x.dtype))[0] for x in (out, right)))


def test_mods_take_lengths_and_aux(qkv: list[torch.Tensor]) -> None:
    table = torch.randn(H, requires_grad=True)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any, scalars: Any) -> Any:
        return score + aux[0][h] * (i - j + info.seqlen_k - info.seqlen_q) * scalars[0]

    def mask_mod(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any, scalars: Any) -> Any:
        return (j <= i + info.seqlen_k - info.seqlen_q) & (j % 3 != h % 2)

    i, j = torch.arange(5)[:, None], torch.arange(9)
    bias = table.double()[:, None, None] * (i - j + 4) * 0.5
    seen = (j <= i + 4) & (j % 3 != torch.arange(H)[:, None, None] % 2)
    out, lse = cute.flash_attn_func(
        *qkv, score_mod=score_mod, mask_mod=mask_mod, aux_tensors=[table], aux_scalars=(0.5,), return_lse=True
    )
    right, right_lse = reference(*qkv, seen, bias=bias)
    close(out, right)
    close(lse, right_lse)
    dout = torch.randn_like(out)
    leaves = [*qkv, table]
    for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(right, leaves, dout.double()), strict=True):
        close(a, b)


@pytest.mark.parametrize("is_packed", [False, True])
def test_lengths_of_sequences(qkv: list[torch.Tensor], is_packed: bool) -> None:
    """Mods count positions within their sequence; offsets give the beginning of each sequence."""
    q, k, v = (t.detach() for t in qkv)
    used_q, used_k = torch.tensor([4, 5], dtype=torch.int32), torch.tensor([7, 3], dtype=torch.int32)
    lengths: dict[str, Any] = {"seqused_q": used_q, "seqused_k": used_k}
    tensors = [q, k, v]
    if is_packed:
        tensors = [t.flatten(0, 1) for t in tensors]
        lengths["cu_seqlens_q"] = torch.tensor([0, 5, 10], dtype=torch.int32)
        lengths["cu_seqlens_k"] = torch.tensor([0, 9, 18], dtype=torch.int32)
        lengths |= {"max_seqlen_q": 5, "max_seqlen_k": 9}
    bias = torch.randn(18)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
        return score + aux[0][j + info.offset_k] * (j < info.seqlen_k)

    plain = cute.flash_attn_varlen_func(*tensors, **lengths, causal=True, return_lse=True)
    modified = cute.flash_attn_varlen_func(*tensors, **lengths, score_mod=score_mod, aux_tensors=[bias], return_lse=True)
    for b in range(B):
        n, m = int(used_q[b]), int(used_k[b])
        parts = q[b : b + 1, :n], k[b : b + 1, :m], v[b : b + 1, :m]
        first = 9 * b if is_packed else 0
        for (out, lse), right in (
            (plain, reference(*parts, band_of(n, m, right=0))),
            (modified, reference(*parts, band_of(n, m), bias=bias.double()[first : first + m])),
        ):
            close(out[5 * b : 5 * b + n] if is_packed else out[b, :n], right[0][0])
            close(lse[:, 5 * b : 5 * b + n] if is_packed else lse[b, :, :n], right[1][0])


def test_blocks() -> None:
    """Lists of blocks of 16 queries and 32 keys: one in part, one whole."""
    q, k, v = torch.randn(1, 40, H, D), *torch.randn(2, 1, 96, H_K, D)
    partial = torch.tensor([[0], [1], [2]]).expand(1, 1, 3, 1)
    whole = torch.tensor([[1], [2], [0]]).expand(1, 1, 3, 1)
    count = torch.ones(1, 1, 3, dtype=torch.int32)
    blocks = block_sparsity.BlockSparseTensorsTorch(count, partial.int(), count, whole.int(), block_size=(16, 32))
    out, _ = cute.flash_attn_func(q, k, v, block_sparse_tensors=blocks, mask_mod=lambda b, h, i, j, info, aux: (i + j) % 2 == 0)
    i, j = torch.arange(40)[:, None], torch.arange(96)
    in_partial, in_whole = (lists[0, 0, :, 0][i // 16] == j // 32 for lists in (partial, whole))
    close(out, reference(q, k, v, in_whole | (in_partial & ((i + j) % 2 == 0)))[0])
    with pytest.raises(ValueError, match="block_sparse_tensors has block_size None"):
        cute.flash_attn_func(q, k, v, block_sparse_tensors=blocks._replace(block_size=None))


def test_qv_gives_lse_by_query(qkv: list[torch.Tensor]) -> None:
    q, k, v = qkv
    qv = torch.randn(B, 5, H, D)
    scores = torch.einsum("bqhd,bkhd->bhqk", qv.double(), v.double().repeat_interleave(H // H_K, 2)) / math.sqrt(2 * D)
    out, lse = cute.flash_attn_func(q, k, v, qv, causal=True, return_lse=True)
    right, right_lse = reference(q, k, v, band_of(5, 9, right=0), scale=1 / math.sqrt(2 * D), bias=scores)
    close(out, right)
    close(lse, right_lse.transpose(1, 2))


def test_qv_alone_gives_scores_of_v(qkv: list[torch.Tensor]) -> None:
    _, _, v = qkv
    qv = torch.randn(B, 5, H, D)
    out, _ = cute.flash_attn_func(None, None, v, qv, causal=True)
    close(out, reference(qv, v, v, band_of(5, 9, right=0))[0])
    starts = {"cu_seqlens_q": torch.tensor([0, 5, 10]).int(), "cu_seqlens_k": torch.tensor([0, 9, 18]).int()}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    packed, _ = cute.flash_attn_varlen_func(None, None, v.flatten(0, 1), qv.flatten(0, 1), **starts, **longest, causal=True)
    close(packed.view_as(out), out)
    with pytest.raises(ValueError, match="q passed, k missing, qv missing"):
        cute.flash_attn_func(qkv[0], None, v)


def test_lse_comes_detached_where_a_gradient_is_needed(qkv: list[torch.Tensor]) -> None:
    _, lse = cute.flash_attn_func(*qkv)
    _, asked = cute.flash_attn_func(*qkv, return_lse=True)
    assert lse is not None
    assert asked is not None
    assert torch.equal(lse, asked)
    assert (lse.requires_grad, asked.requires_grad) == (False, True)
    assert cute.flash_attn_func(*(t.detach() for t in qkv))[1] is None


def test_combine(qkv: list[torch.Tensor]) -> None:
    q, k, v = (t.detach() for t in qkv)
    parts = [cute.flash_attn_func(q, k[:, part], v[:, part], return_lse=True) for part in (slice(4), slice(4, 9))]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts if lse is not None])
    right, right_lse = reference(q, k, v, band_of(5, 9))
    out, lse = cute.flash_attn_combine(outs, lses)
    close(out, right)
    close(lse, right_lse.transpose(1, 2))
    packed, none = cute.flash_attn_combine(outs.flatten(1, 2), lses.flatten(1, 2), return_lse=False)
    assert none is None
    close(packed.view_as(out), right)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"score_mod_bwd": lambda *x: x}, NotImplementedError, "score_mod_bwd is not supported"),
        ({"gather_kv_indices": torch.zeros(1)}, TypeError, "kv_indices has dtype torch.float32"),
        ({"mask_mod": lambda *x: x, "causal": True}, ValueError, "mask_mod comes with causal True"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_there_says_so(qkv: list[torch.Tensor], arguments: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        cute.flash_attn_func(*qkv, **arguments)


def test_install_gives_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("flash_attn", "flash_attn_interface", "flash_attn_3")]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", dict(sys.modules))
        flash_attn.install(override=True)
        assert vars(sys.modules["flash_attn.cute"])["interface"] is cute  # for `import flash_attn.cute.interface as interface`
        found = {name: sys.modules[name] for name in ("flash_attn.cute.interface", "flash_attn_interface", "flash_attn_3")}
    assert found["flash_attn.cute.interface"] is cute
    assert found["flash_attn_interface"] is found["flash_attn_3"] is flash_attn.flash_attn_3


@pytest.mark.parametrize("is_packed", [False, True])
def test_gathered_keys_are_those_of_a_mask(is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, qv, k, v = (torch.randn(2, s, h, d, generator=generator) for s, h, d in ((5, 4, 8), (5, 4, 16), (9, 1, 8), (9, 1, 16)))
    indices = torch.rand(2, 5, 9, generator=generator).argsort(-1)[..., :4].int()
    indices[:, 0, 1:] = -1
    seen = torch.zeros(2, 5, 10, dtype=torch.bool).scatter(-1, torch.where(indices < 0, 9, indices).long(), True)
    options: dict[str, Any] = {"return_lse": True, "mask_mod": lambda b, h, i, j, info, aux: seen[b, i, j]}
    wanted, wanted_lse = cute.flash_attn_func(q, k, v, qv, **options)
    if is_packed:
        flat = [x.flatten(0, 1) for x in (q, k, v, qv)]
        lengths = {"cu_seqlens_q": torch.tensor([0, 5, 10]).int(), "cu_seqlens_k": torch.tensor([0, 9, 18]).int()}
        lists = indices.flatten(0, 1)
        out, lse = cute.flash_attn_varlen_func(
            *flat, **lengths, max_seqlen_q=5, max_seqlen_k=9, gather_kv_indices=lists, return_lse=True
        )
    else:
        out, lse = cute.flash_attn_func(q, k, v, qv, gather_kv_indices=indices, return_lse=True)
    torch.testing.assert_close(out, wanted.view(out.shape))
    torch.testing.assert_close(lse, wanted_lse.reshape(lse.shape))
