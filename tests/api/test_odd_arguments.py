"""Arguments of other libraries' functions that were once read as something else: strings as True, floats as ints, wrong shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexattn.integrations.te as te
from flexattn import fp8, nn
from flexattn.distributed.calls import Results, Scores
from flexattn.distributed.eight_bits import Fp8Call
from flexattn.distributed.whole_call import resume_forward, run_forward
from flexattn.integrations import flash_attn as fa2
from flexattn.integrations.flash_attn import cute as fa4
from flexattn.integrations.flash_attn import flash_attn_3 as fa3
from flexattn.integrations.flex import create_block_mask, flex_attention
from flexattn.integrations.sdpa import scaled_dot_product_attention
from flexattn.integrations.transformers.forward import attention_forward
from flexattn.integrations.xformers import memory_efficient_attention

X = torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(0))
ROW = X[:, :1]
CU = torch.tensor([0, 8, 16], dtype=torch.int32)
TOKENS = X.flatten(0, 1)
MHA = nn.MultiheadAttention(16, 2, batch_first=True)
DPA = te.DotProductAttention(4, 16, qkv_format="bshd")
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
TABLES = torch.rand(9, 4), torch.rand(9, 4)


def cached(module: Any = fa2, new: bool = False, **options: Any) -> object:
    caches = X.clone(), X.clone()
    return module.flash_attn_with_kvcache(ROW, *caches, *((ROW, ROW) if new else ()), **{"cache_seqlens": LENGTHS, **options})


def fused(**options: Any) -> object:
    backend = te.FusedAttnBackend["F16_arbitrary_seqlen"]
    names = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd", "attn_mask_type": "no_mask"}
    return te.fused_attn_fwd(True, 8, 8, CU, CU, X, X, X, X.dtype, backend, **{**names, **options})


def varlen(module: Any, *longest: object, **options: Any) -> object:
    return module.flash_attn_varlen_func(TOKENS, TOKENS, TOKENS, CU, CU, *(longest or (8, 8)), **options)


FLAGS: dict[str, Callable[[Any], object]] = {
    "is_causal": lambda x: scaled_dot_product_attention(X, X, X, is_causal=x),
    "enable_gqa": lambda x: flex_attention(X, X, X, enable_gqa=x),
    "return_lse": lambda x: flex_attention(X, X, X, return_lse=x),
    "separate_full_blocks": lambda x: create_block_mask(lambda *_: True, None, None, 8, 8, "cpu", separate_full_blocks=x),
    "causal": lambda x: fa2.flash_attn_func(X, X, X, causal=x),
    "return_attn_probs": lambda x: fa3.flash_attn_func(X, X, X, return_attn_probs=x),
    "return_softmax_lse": lambda x: cached(fa3, return_softmax_lse=x),
    "rotary_interleaved": lambda x: cached(rotary_interleaved=x),
    "causal of version 4": lambda x: fa4.flash_attn_func(X, X, X, causal=x),
    "need_weights": lambda x: MHA(X[..., 0, :], X[..., 0, :], X[..., 0, :], need_weights=x),
    "checkpoint_core_attention": lambda x: DPA(X, X, X, checkpoint_core_attention=x),
    "bottom_right_diagonal": lambda x: DPA(X, X, X, bottom_right_diagonal=x),
    "is_training": lambda x: te.fused_attn_fwd(
        x, 8, 8, CU, CU, X, X, X, X.dtype, "F16_arbitrary_seqlen", qkv_layout="bshd_bshd_bshd"
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_no_bool_is_refused(name: str) -> None:
    for value in ("False", torch.tensor(True), 2.0):
        with pytest.raises(TypeError, match=f"{name.split()[0]} is .*accepted: True, False"):
            FLAGS[name](value)


def test_flags_may_be_0_or_1() -> None:
    assert torch.equal(fa2.flash_attn_func(X, X, X, causal=1), fa2.flash_attn_func(X, X, X, causal=True))


def attend(**options: Any) -> object:
    """Attention as a model of transformers calls it."""
    heads_first = X.transpose(1, 2)
    given = {"query": heads_first, "key": heads_first, "value": heads_first, "attention_mask": None, **options}
    return attention_forward(torch.nn.Identity(), **given)


def blocks(counts: torch.Tensor, indices: torch.Tensor) -> object:
    given = fa4.block_sparsity.BlockSparseTensorsTorch(counts, indices, block_size=(16, 16))
    return fa4.flash_attn_func(X, X, X, block_sparse_tensors=given)


HALVES = X[None].repeat(2, 1, 1, 1, 1)
LSE = torch.zeros(2, 2, 8, 4)
ODD: dict[str, tuple[Callable[[], object], str]] = {
    "window of floats": (lambda: fa2.flash_attn_func(X, X, X, window_size=(3.7, 2.0)), "window_size is .*a pair of ints"),
    "window of one": (lambda: fa3.flash_attn_func(X, X, X, window_size=3), "window_size is .*a pair of ints"),
    "window of three": (lambda: fa4.flash_attn_func(X, X, X, window_size=(1, 2, 3)), "window_size is .*a pair of ints"),
    "longest as a float": (lambda: varlen(fa2, 8.9, 8), "max_seqlen_q is 8.9"),
    "negative chunk": (lambda: fa3.flash_attn_func(X, X, X, attention_chunk=-3), "attention_chunk is -3"),
    "chunk as a float": (lambda: fa3.flash_attn_func(X, X, X, attention_chunk=3.5), "attention_chunk is 3.5"),
    "used lengths as floats": (lambda: varlen(fa3, seqused_k=torch.tensor([7.9, 2.0])), "seqused is a torch.float32"),
    "cache lengths as floats": (lambda: cached(cache_seqlens=torch.tensor([3.9, 5.0])), "cache_seqlens is a torch.float32"),
    "cache length as a float": (lambda: cached(cache_seqlens=3.9), "cache_seqlens is 3.9"),
    "three cache lengths": (lambda: cached(cache_seqlens=LENGTHS.new_ones(3)), r"cache_seqlens .*accepted: shape \(\) or \(2,\)"),
    "negative cache length": (lambda: cached(cache_seqlens=-LENGTHS), r"cache_seqlens is \[-3, -5\]"),
    "negative padding": (lambda: cached(cache_leftpad=-LENGTHS), r"cache_leftpad is \[-3, -5\]"),
    "rows as floats": (lambda: cached(cache_batch_idx=torch.tensor([0.0, 1.9])), "cache_batch_idx is a torch.float32"),
    "rotary positions": (
        lambda: cached(fa3, True, rotary_cos=TABLES[0], rotary_sin=TABLES[1], rotary_seqlens=LENGTHS.float()),
        "rotary_seqlens is a torch.float32",
    ),
    "rotary tables": (lambda: cached(new=True, rotary_cos=TABLES[0], rotary_sin=TABLES[1][:, :3]), r"rotary_sin is .*= \[9, 4\]"),
    "long rotary tables": (
        lambda: cached(new=True, rotary_cos=torch.rand(9, 20), rotary_sin=torch.rand(9, 20)),
        "at most the head",
    ),
    "auxiliary results": (lambda: flex_attention(X, X, X, return_aux=True), "return_aux is True.*AuxRequest"),
    "scale as a string": (lambda: scaled_dot_product_attention(X, X, X, scale="1"), "softmax_scale is '1'"),
    "scale as a string, xformers": (lambda: memory_efficient_attention(X, X, X, scale="1"), "softmax_scale is '1'"),
    "bias without its type": (lambda: fused(attn_bias=X[:1, :, :, :8]), "attn_bias is given with attn_bias_type 'no_bias'"),
    "sinks without their type": (
        lambda: fused(softmax_offset=torch.zeros(4)),
        "softmax_offset is given with softmax_type 'vanilla'",
    ),
    "sinks in two dims": (
        lambda: fused(softmax_offset=torch.zeros(2, 2), softmax_type="learnable"),
        r"softmax_offset .*\[1, h, 1, 1\]",
    ),
    "qv of another dtype": (lambda: fa3.flash_attn_func(X, X, X, qv=X.bfloat16()), "accepted: one dtype"),
    "queries of ints": (lambda: fa4.flash_attn_func(X.int(), X, X, qv=X), "accepted: one dtype"),
    "qv of another length": (lambda: fa3.flash_attn_func(X, X, X, qv=X[:, :7]), r"qv is .*= \[2, 8, 4, d_v\]"),
    "qv with another dim": (lambda: cached(fa3, qv=ROW[None]), "qv is .*the same dims but the last"),
    "packed keys of three": (lambda: fa2.flash_attn_kvpacked_func(X, torch.stack((X, X, X), 2)), r"kv is .*= \[b, s, 2, h_k, d\]"),
    "two packed of three": (lambda: fa2.flash_attn_varlen_qkvpacked_func(TOKENS[:, None], CU, 8), r"qkv is .*\[t, 3, h, d\]"),
    "new keys of one sequence": (lambda: cached(k=ROW[:1], v=ROW[:1]), r"k is .*= \[2, n, 4, 16\]"),
    "values of another cache": (lambda: fa2.flash_attn_with_kvcache(ROW, X, X[:, :7]), r"v_cache is .*= \[2, 8, 4, d_v\]"),
    "a table of one row": (lambda: cached(block_table=LENGTHS), r"block_table is .*\[b, columns\]"),
    "offsets as a list": (
        lambda: fa3.flash_attn_varlen_func(TOKENS, TOKENS, TOKENS, [0, 8], CU, 8, 8),
        r"cu_seqlens_q is \[0, 8\]",
    ),
    "offsets of three": (
        lambda: fa3.flash_attn_with_kvcache(
            ROW, X.clone(), X.clone(), TOKENS[:3], TOKENS[:3], cache_seqlens=LENGTHS, cu_seqlens_k_new=CU.new_tensor([0, 1, 2, 3])
        ),
        r"cu_seqlens_k_new .*shape \(3,\)",
    ),
    "parts of another batch": (lambda: fa3.flash_attn_combine(HALVES, LSE[:, :1]), r"lse_partial is .*= \[2, 2, 8, 4\]"),
    "parts of ints": (lambda: fa3.flash_attn_combine(HALVES.int(), LSE), "out_partial is .*a floating dtype"),
    "out of ints": (lambda: fa3.flash_attn_combine(HALVES, LSE, X.int()), "out is .*a floating dtype"),
    "a mask of another batch": (lambda: fa2.bert_padding.unpad_input(X, torch.ones(1, 8)), r"attention_mask is .*shape \(2, 8\)"),
    "counts of blocks in floats": (
        lambda: blocks(torch.ones(2, 4, 1), torch.zeros(2, 4, 1, 1).int()),
        "mask_block_cnt is .*integers",
    ),
    "lists of other blocks": (
        lambda: blocks(torch.ones(2, 4, 2).int(), torch.zeros(2, 4, 1, 1).int()),
        r"mask_block_idx is .*= \[2, 4",
    ),
    "a mask of 0 and 1": (
        lambda: attend(attention_mask=torch.ones(1, 1, 8, 8).long(), position_bias=torch.ones(1, 1, 8, 8)),
        "attention_mask is .*bool, True for a visible key",
    ),
    "positions of ints": (lambda: attend(position_bias=torch.ones(1, 1, 8, 8).int()), "position_bias is .*floating point"),
    "selected keys in floats": (lambda: attend(indices=torch.rand(2, 8, 3)), "indices is .*integers"),
    "sinks of another dim": (lambda: attend(sinks=torch.rand(1, 2, 4, 8, 1)), r"sinks is .*\[2, 4, 8, 1\]"),
    "sinks of ints": (lambda: attend(sinks=torch.ones(2, 4, 8, 1).int()), "sinks is .*floating point"),
    "packed lengths in floats": (lambda: attend(cu_seq_lens_q=CU.float(), cu_seq_lens_k=CU), "cu_seq_lens_q or .*integers"),
    "packed batches": (
        lambda: attend(query=X[:1].transpose(1, 2), cu_seq_lens_q=CU[:2], cu_seq_lens_k=CU[:2]),
        "query has batch 1 and key 2",
    ),
    "foreign cache": (lambda: DPA(X, X, X, inference_params="cache"), "inference_params is 'cache'"),
    "ranks": (lambda: te.DotProductAttention(4, 16, tp_size="2"), "tp_size is '2'"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_argument_is_refused_by_name(name: str) -> None:
    call, text = ODD[name]
    with pytest.raises((TypeError, ValueError), match=text):
        call()


def test_a_scale_below_0_may_be_a_tensor() -> None:
    for door in (scaled_dot_product_attention, flex_attention):
        torch.testing.assert_close(door(X, X, X, scale=torch.tensor(-0.5)), door(-X, X, X, scale=0.5))


@pytest.mark.parametrize("name", ["qv", "learnable_sink"])
def test_a_call_over_pages_takes_what_requires_a_gradient(name: str) -> None:
    pages, table = X[:, :4], torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    given = (torch.randn(2, 1, 4, 16) if name == "qv" else torch.randn(4)).requires_grad_()
    call = {"seqused_k": LENGTHS, "page_table": table}
    out, _ = fa4.flash_attn_varlen_func(ROW, pages, pages, **call, **{name: given})
    with torch.no_grad():
        want, _ = fa4.flash_attn_varlen_func(ROW, pages, pages, **call, **{name: given})
    assert torch.equal(out, want)
    with pytest.raises(NotImplementedError, match="pages has no backward"):
        out.sum().backward()


def test_new_rows_of_a_cache_have_any_strides() -> None:
    spread = torch.stack((ROW, ROW), -1)[..., 0]
    for module in (fa2, fa3):
        caches, wanted = (X.clone(), X.clone()), (X.clone(), X.clone())
        module.flash_attn_with_kvcache(ROW, *caches, spread, spread, cache_seqlens=LENGTHS)
        module.flash_attn_with_kvcache(ROW, *wanted, ROW, ROW, cache_seqlens=LENGTHS)
        assert torch.equal(caches[0], wanted[0])
        assert torch.equal(caches[1], wanted[1])


@pytest.mark.parametrize("config", [None, "tokens"])
def test_a_resumed_forward_saves_what_a_forward_saves(config: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP8 already, q, k and v keep their data and descales; they are quantised only for a call with a config."""
    recipe = fp8.Recipe()
    q, k, v = (fp8.quantize(x, recipe) for x in (X, X + 1, X - 1))
    tensors = [q.data, k.data, v.data, None, None, None, None, q.descale, k.descale, v.descale]
    results = Results(torch.zeros(2, 8, 4, 16), torch.zeros(2, 4, 8))
    runner: Any = SimpleNamespace(
        scores=Scores(fp8_call=Fp8Call(recipe, config and SimpleNamespace(), None, torch.bfloat16, 0)),  # type: ignore[arg-type]
        gathered=lambda *qkv: qkv,
        gathered_results=tuple,
        forward=lambda q, k, v, shared: (results, (q, k, v, *results)),
    )
    if config is not None:
        tensors[:3] = X, X + 1, X - 1
        tensors[7:] = None, None, None
        monkeypatch.setattr("flexattn.distributed.quantise.quantise_qkv", lambda *_: [q, k, v])
    first, again = run_forward(runner, None, tensors), resume_forward(runner, None, tensors, results)  # type: ignore[arg-type]
    for one, other in zip((*first.saved, *first.descales), (*again.saved, *again.descales), strict=True):
        assert one is other
    assert all(descale is not None for descale in first.descales)
    assert first.saved[0] is q.data
    assert math.prod(first.saved[0].shape) == X.numel()
