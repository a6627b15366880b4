"""FlashAttention 3's functions against attention written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from flexattn.integrations.flash_attn import flash_attn_3 as fa3
from tests.integrations.flash_attn_reference import band_of, close, reference

B, H, H_K, D = 2, 4, 2, 16


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(B, s, h, D, requires_grad=True) for s, h in ((5, H), (9, H_K), (9, H_K))]


def chunks(sq, sk, chunk):
    place = torch.arange(sq)[:, None] + sk - sq
    return torch.arange(sk) // chunk == place.div(chunk, rounding_mode="floor")


CASES = {
    "plain": ({}, lambda sq, sk: band_of(sq, sk)),
    "causal": ({"causal": True}, lambda sq, sk: band_of(sq, sk, right=0)),
    "window": ({"window_size": (2, 1)}, lambda sq, sk: band_of(sq, sk, 2, 1)),
    "window in tensors": ({"window_size": torch.tensor([2, 1])}, lambda sq, sk: band_of(sq, sk, 2, 1)),
    "chunks": ({"attention_chunk": 3}, lambda sq, sk: chunks(sq, sk, 3)),
    "causal chunks": ({"attention_chunk": 3, "causal": True}, lambda sq, sk: chunks(sq, sk, 3) & band_of(sq, sk, right=0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("sk", [9, 3])
def test_dense(qkv, case, sk):
    options, mask = case
    q, k, v = qkv[0], qkv[1][:, :sk], qkv[2][:, :sk]
    out, lse = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    right, right_lse = reference(q, k, v, mask(5, sk))
    close(out, right)
    close(lse, right_lse)
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, qkv, dout), torch.autograd.grad(right, qkv, dout.double()), strict=True):
        close(a, b)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_varlen_with_used_lengths(qkv, case):
    options, mask = case
    q, k, v = (t.detach() for t in qkv)
    starts = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32)
    used = torch.tensor([4, 5], dtype=torch.int32), torch.tensor([7, 3], dtype=torch.int32)
    out, lse = fa3.flash_attn_varlen_func(
        *(t.flatten(0, 1) for t in (q, k, v)), *starts, 5, 9, *used, **options, return_attn_probs=True
    )
    for i in range(B):
        n, m = int(used[0][i]), int(used[1][i])
        right, right_lse = reference(q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m], mask(n, m))
        close(out[5 * i : 5 * i + n], right[0])
        close(lse[:, 5 * i : 5 * i + n], right_lse[0])
    whole = fa3.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), *starts, 5, 9, **options)
    close(whole, reference(q, k, v, mask(5, 9))[0].flatten(0, 1))


def test_qv(qkv):
    q, k, v = qkv
    qv = torch.randn(B, 5, H, D)
    scores = torch.einsum("bqhd,bkhd->bhqk", qv.double(), v.double().repeat_interleave(H // H_K, 2)) / math.sqrt(2 * D)
    right, right_lse = reference(q, k, v, band_of(5, 9), scale=1 / math.sqrt(2 * D), bias=scores)
    out, lse = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True)
    close(out, right)
    close(lse, right_lse)


def test_descales_are_those_of_key_heads(qkv):
    q, k, v = (t.detach().to(torch.float8_e4m3fn) for t in qkv)
    scales = [torch.rand(B, H_K) + 0.5 for _ in range(3)]
    wide = [t.float() * s.repeat_interleave(t.shape[2] // H_K, 1)[:, None, :, None] for t, s in zip((q, k, v), scales, strict=True)]
    out = fa3.flash_attn_func(q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], causal=True)
    right = fa3.flash_attn_func(*wide, causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), right, rtol=0.1, atol=0.1)
    other = fa3.flash_attn_func(q, k, v, k_descale=scales[1], v_descale=scales[2], causal=True)
    assert not torch.allclose(other.float(), right, rtol=0.1, atol=0.1)


def test_qkv_in_one_tensor(qkv):
    q, k, v = qkv
    k, v = k[:, :5], v[:, :5]
    right, right_lse = reference(q, k, v, band_of(5, 5, right=0))
    out, lse = fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), causal=True, num_heads_q=H, return_attn_probs=True)
    close(out, right)
    close(lse, right_lse)
    close(fa3.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2)), reference(q, q, q, band_of(5, 5))[0])
    for wrong in (None, 3, 8):
        with pytest.raises(ValueError, match=f"num_heads_q is {wrong} and qkv has 8 heads"):
            fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=wrong)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"attention_chunk": 4}, {"causal": True}], ids=str)
def test_cache(is_packed, options):
    torch.manual_seed(0)
    n, m, ends, starts = (3, 1), (2, 4), (4, 2), (1, 0)  # queries and new tokens; end and start of the cached tokens
    q = [torch.randn(i, H, D) for i in n] if is_packed else list(torch.randn(B, 3, H, D))
    k, v = ([torch.randn(i, H_K, D) for i in m] if is_packed else list(torch.randn(B, 3, H_K, D)) for _ in range(2))
    k_cache, v_cache = torch.randn(2, B, 9, H_K, D).unbind(0)
    angles = torch.rand(9, D // 2, dtype=torch.float64)
    before = k_cache.clone()
    join = torch.cat if is_packed else torch.stack
    lengths = {"cu_seqlens_q": [0, 3, 4], "cu_seqlens_k_new": [0, 2, 6]} if is_packed else {}
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        join(q),
        k_cache,
        v_cache,
        join(k),
        join(v),
        None,
        angles.cos().float(),
        angles.sin().float(),
        cache_seqlens=torch.tensor(ends, dtype=torch.int32),
        cache_leftpad=torch.tensor(starts, dtype=torch.int32),
        rotary_seqlens=torch.tensor([2, 1], dtype=torch.int32),
        max_seqlen_q=3 if is_packed else None,
        return_softmax_lse=True,
        **{name: torch.tensor(x, dtype=torch.int32) for name, x in lengths.items()},
        **options,
    )
    assert [t.numel() for t in rest] == [0, 0]
    out, lse = (out.split(n), lse.split(n, 1)) if is_packed else (out, lse)

    def turned(x, places):
        z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[places][:, None]
        return torch.view_as_real(z).flatten(-2)

    for i, first in enumerate((2, 1)):
        new = turned(k[i], torch.arange(len(k[i])) + first)
        end = ends[i] + len(new)
        close(k_cache[i], torch.cat((before[i, : ends[i]].double(), new, before[i, end:].double())))
        assert torch.equal(v_cache[i, ends[i] : end], v[i])
        queries = turned(q[i], torch.full((len(q[i]),), first) + (torch.arange(len(q[i])) if "causal" in options else 0))
        sq, sk = len(queries), end - starts[i]
        mask = chunks(sq, sk, 4) if "attention_chunk" in options else band_of(sq, sk, right=0 if "causal" in options else None)
        right, right_lse = reference(queries[None], k_cache[i : i + 1, starts[i] : end], v_cache[i : i + 1, starts[i] : end], mask)
        close(out[i], right[0])
        close(lse[i], right_lse[0])


def test_cache_with_qv(qkv):
    q, k, v = (t.detach() for t in qkv)
    qv = torch.randn(B, 5, H, D)
    out = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, cache_seqlens=6, causal=True)
    close(out, fa3.flash_attn_func(q, k[:, :6], v[:, :6], qv=qv, causal=True))
    assert fa3.get_scheduler_metadata(2, 1, 9, H, H_K, D, torch.tensor([9, 9])) is None


def test_fp8_that_requires_a_gradient_runs_forward_alone(qkv):
    fp8 = [t.detach().to(torch.float8_e4m3fn).requires_grad_() for t in qkv]
    out = fa3.flash_attn_func(*fp8, causal=True)
    detached = fa3.flash_attn_func(*(t.detach() for t in fp8), causal=True)
    assert torch.equal(out, detached)
    assert (out.requires_grad, detached.requires_grad) == (True, False)
    with pytest.raises(NotImplementedError, match="a call with q, k and v in FP8 has no backward"):
        out.sum().backward()


def test_combine(qkv):
    q, k, v = qkv
    parts = [fa3.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True) for keys in (slice(0, 4), slice(4, 9))]
    lse = [lse.transpose(1, 2) for _, lse in parts]
    nothing = torch.full_like(parts[0][0], math.nan), torch.full_like(lse[0], -math.inf)
    right, right_lse = reference(q, k, v, band_of(5, 9))
    results = torch.stack([parts[0][0], parts[1][0], nothing[0]]), torch.stack([*lse, nothing[1]])
    out, total = fa3.flash_attn_combine(*results)
    close(out, right)
    close(total, right_lse.transpose(1, 2))
    written = torch.empty_like(out, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(results[0].detach(), results[1].detach(), written)[0] is written
    assert torch.equal(written, out.detach().bfloat16())
    assert fa3.flash_attn_combine(*results, out_dtype=torch.float16)[0].dtype == torch.float16
    in_16_bits = results[0].detach().bfloat16(), results[1].detach().bfloat16()
    wanted = fa3.flash_attn_combine(*(x.float() for x in in_16_bits))[0]
    assert torch.equal(fa3.flash_attn_combine(*in_16_bits, torch.empty_like(wanted))[0], wanted)
    out, total = fa3.flash_attn_combine(*(t[None].repeat(2, *[1] * t.dim()) for t in nothing))
    assert (out == 0).all()
    assert (total == -math.inf).all()
