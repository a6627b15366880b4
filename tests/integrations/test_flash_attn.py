"""FlashAttention 2's names against attention written out in float64."""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.integrations import flash_attn as fa


def reference(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Returns out and lse of one dense batch, in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    sq, sk = s.shape[-2:]
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    if slopes is not None:
        s = s - slopes.double().view(-1, s.shape[1], 1, 1) * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    s = s.masked_fill(hidden, -math.inf)
    lse = s.logsumexp(-1)
    weights = s.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return (weights @ v).transpose(1, 2), lse


def inputs(b=2, sq=5, sk=9, h=4, h_k=2, d=16):
    torch.manual_seed(0)
    return [torch.randn(b, s, n, d, requires_grad=True) for s, n in ((sq, h), (sk, h_k), (sk, h_k))]


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (3, 4)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.9])},
    "causal alibi": {"causal": True, "alibi_slopes": torch.rand(2, 4, generator=torch.Generator().manual_seed(1))},
}


def expected(q, k, v, case):
    named = {"window_size": "window", "alibi_slopes": "slopes"}
    return reference(q, k, v, **{named.get(n, n): x for n, x in case.items()})


def without_keys(lse):
    """Returns FlashAttention 2's lse: +inf for a query that sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("sq", [5, 12])
def test_dense(case, sq):
    q, k, v = inputs(sq=sq)
    out, lse, probs = fa.flash_attn_func(q, k, v, **case, return_attn_probs=True)
    right, right_lse = expected(q, k, v, case)
    assert probs.shape == (0,)
    close(out, right)
    close(lse, without_keys(right_lse))
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(right, (q, k, v), dout.double()), strict=True):
        close(a, b)
    close(fa.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **case), right)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_varlen(case):
    q, k, v = inputs(b=2)
    lengths_q, lengths_k = (5, 2), (3, 9)
    pieces = [[t[i, : n[i]] for i in range(2)] for t, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
    x, y, z = (torch.cat(p) for p in pieces)
    packed = (torch.tensor([0, 5, 7]).int(), torch.tensor([0, 3, 12]).int(), 5, 9)
    out, lse, _ = fa.flash_attn_varlen_func(x, y, z, *packed, **case, return_attn_probs=True)
    for i, rows in enumerate((slice(0, 5), slice(5, 7))):
        options = dict(case)
        if "alibi_slopes" in case and case["alibi_slopes"].dim() == 2:
            options["alibi_slopes"] = case["alibi_slopes"][i]
        right, right_lse = expected(*(p[i][None] for p in pieces), options)
        close(out[rows], right[0])
        close(lse[:, rows], without_keys(right_lse[0]))
    close(fa.flash_attn_varlen_kvpacked_func(x, torch.stack((y, z), 1), *packed, **case), out)


def test_qkv_in_one_tensor():
    torch.manual_seed(0)
    qkv = torch.randn(2, 6, 3, 4, 16, requires_grad=True)
    out = fa.flash_attn_qkvpacked_func(qkv, causal=True)
    right, _ = reference(*qkv.unbind(2), causal=True)
    close(out, right)
    dout = torch.randn_like(out)
    (gradient,), (right_gradient,) = torch.autograd.grad(out, qkv, dout), torch.autograd.grad(right, qkv, dout.double())
    close(gradient, right_gradient)
    cu_seqlens = torch.tensor([0, 6, 12]).int()
    close(fa.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_seqlens, 6, causal=True), right.flatten(0, 1))


def test_dropout_follows_the_seed():
    q, k, v = inputs()
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(fa.flash_attn_func(q, k, v, 0.5))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_what_is_refused():
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"return_attn_probs is True and dropout_p is 0\.5"):
        fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cache(case):
    q, k, v = (t.detach() for t in inputs(sq=2))
    new_k, new_v = torch.randn(2, 2, 2, 2, 16).unbind(0)
    before = k.clone()
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    out, lse = fa.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths, return_softmax_lse=True, **case)
    for i, n in enumerate((3, 7)):
        assert torch.equal(k[i], torch.cat((before[i, :n], new_k[i], before[i, n + 2 :])))
        assert torch.equal(v[i, n : n + 2], new_v[i])
        options = dict(case)
        if "alibi_slopes" in case and case["alibi_slopes"].dim() == 2:
            options["alibi_slopes"] = case["alibi_slopes"][i]
        right, right_lse = expected(q[i][None], k[i, : n + 2][None], v[i, : n + 2][None], options)
        close(out[i], right[0])
        close(lse[i], without_keys(right_lse[0]))


def test_padding_goes_and_returns():
    x = torch.randn(2, 4, 3)
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest, lengths = fa.bert_padding.unpad_input(x, mask)
    assert torch.equal(tokens, torch.cat((x[0, 1:], x[1, :1])))
    assert cu_seqlens.tolist() == [0, 3, 4]
    assert cu_seqlens.dtype == torch.int32
    assert longest == 3
    assert lengths.tolist() == [3, 1]
    assert torch.equal(fa.bert_padding.pad_input(tokens, indices, 2, 4), x * mask[..., None])
    unused = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]])
    *_, cu_seqlens, longest, lengths = fa.bert_padding.unpad_input(x, mask, unused)
    assert cu_seqlens.tolist() == [0, 4, 5]
    assert longest == 4
    assert lengths.tolist() == [3, 1]


def test_install(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(RuntimeError, match="another flash_attn is installed"):
        fa.install()
    fa.install(override=True)
    fa.install()
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import unpad_input

    assert flash_attn_func is fa.flash_attn_func
    assert unpad_input is fa.bert_padding.unpad_input


def test_the_page_runs(monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        monkeypatch.setitem(sys.modules, name, fa)
    page = (Path(__file__).parents[2] / "docs" / "flash_attn.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    for block in blocks:
        exec(block, {})


OPTIONS = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (fa.flash_attn_kvpacked_func, ["q", "kv"]),
        (fa.flash_attn_qkvpacked_func, ["qkv"]),
        (
            fa.flash_attn_varlen_kvpacked_func,
            ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
        ),
        (fa.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen"]),
    ],
)
def test_functions_of_packed_tensors_show_flash_attentions_parameters(function: Callable[..., Any], first: list[str]) -> None:
    """Callers look for their arguments in the signature."""
    assert list(inspect.signature(function).parameters) == [*first, *OPTIONS]
