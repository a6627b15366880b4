"""TransformerEngine's `softcap`, and its `thd_attention_policies`: masks of their own for some sequences of a packed batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention_backend
from flexattn.integrations import te

H, H_KV, D, D_V = 4, 2, 16, 8
LENGTHS_Q, LENGTHS_KV = (3, 7, 4, 6, 1), (5, 7, 9, 2, 4)


def _ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def _inputs(gap: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns q, k and v, and the lengths of the packed sequences; gap: tokens of padding behind each of them."""
    generator = torch.Generator().manual_seed(0)
    rows = [sum(lengths) + gap * len(lengths) for lengths in (LENGTHS_Q, LENGTHS_KV)]
    shapes = ((rows[0], H, D), (rows[1], H_KV, D), (rows[1], H_KV, D_V))
    qkv = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    lengths: dict[str, Any] = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_kv": max(LENGTHS_KV)}
    for side, of_side in (("q", LENGTHS_Q), ("kv", LENGTHS_KV)):
        lengths[f"cu_seqlens_{side}"] = _ends(of_side)
        if gap:
            lengths[f"cu_seqlens_{side}_padded"] = _ends(tuple(n + gap for n in of_side))
    return qkv, lengths


def _policy(*ids: int, mask: str = "padding_causal", window: tuple[int, int] = (-1, 0), **more: Any) -> dict[str, Any]:
    return {"sequence_ids": torch.tensor(ids, dtype=torch.int32), "mask_type": mask, "window_size": window} | more


POLICIES = [
    _policy(1, 3),
    _policy(0, mask="padding", window=(-1, -1)),
    _policy(mask="padding_causal"),  # of no sequence
    _policy(2, mask="padding", window=(2, 1), bottom_right_diagonal=False),
    _policy(4, mask="causal_padding", window=(2, 0)),
]
BOTTOM_RIGHT = [_policy(0, 2, mask="padding_causal_bottom_right", window=(3, 0)), _policy(1, 3, 4, mask="padding", window=(1, 2))]


def _module(**options: Any) -> te.DotProductAttention:
    return te.DotProductAttention(H, (D, D_V), num_gqa_groups=H_KV, qkv_format="thd", **options).cpu()


def _alone(module: te.DotProductAttention, qkv: list[Tensor], lengths: dict[str, Any], policies: list[dict[str, Any]]) -> Tensor:
    """Returns the result of a call for each sequence by itself; 0 in padding."""
    out = qkv[0].new_zeros(qkv[0].shape[0], H * D_V)
    starts = [lengths.get(f"cu_seqlens_{side}_padded", lengths[f"cu_seqlens_{side}"]).tolist() for side in ("q", "kv")]
    for policy in policies:
        for i in policy["sequence_ids"].tolist():
            parts = [slice(start[i], start[i] + n[i]) for start, n in zip(starts, (LENGTHS_Q, LENGTHS_KV), strict=True)]
            mask = {"attn_mask_type": policy["mask_type"], "window_size": policy["window_size"]}
            mask["bottom_right_diagonal"] = policy.get("bottom_right_diagonal")
            ends = {f"cu_seqlens_{side}": _ends((n[i],)) for side, n in (("q", LENGTHS_Q), ("kv", LENGTHS_KV))}
            longest = {"max_seqlen_q": LENGTHS_Q[i], "max_seqlen_kv": LENGTHS_KV[i]}
            own = module(qkv[0][parts[0]], qkv[1][parts[1]], qkv[2][parts[1]], **mask, **ends, **longest)
            out = out.index_add(0, torch.arange(parts[0].start, parts[0].stop), own)
    return out


def _compare(module: te.DotProductAttention, policies: list[dict[str, Any]], gap: int, tolerance: float, **options: Any) -> None:
    dtype = torch.float64 if tolerance < 1e-9 else torch.float32
    qkv, lengths = _inputs(gap, dtype)
    leaves = qkv + list(module.parameters())
    found = module(*qkv, **lengths, thd_attention_policies=policies, **options)
    expected = _alone(module, qkv, lengths, policies)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for x, y in zip(
        [found, *torch.autograd.grad(found, leaves, dout)], [expected, *torch.autograd.grad(expected, leaves, dout)], strict=True
    ):
        torch.testing.assert_close(x, y, atol=tolerance, rtol=0)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("policies", [POLICIES, BOTTOM_RIGHT], ids=("mixed", "bottom right"))
def test_each_sequence_has_the_mask_of_its_policy(policies: list[dict[str, Any]], gap: int) -> None:
    _compare(_module(), policies, gap, 1e-11)


@pytest.mark.parametrize(
    "options", [{"checkpoint_core_attention": True}, {"thd_attention_policy_dispatch": "grouped"}, {"softcap": 0.7}], ids=str
)
def test_policies_with_other_arguments(options: dict[str, Any]) -> None:
    module = _module(softmax_type="learnable", softcap=options.get("softcap", 0.0))
    torch.nn.init.normal_(module.softmax_offset, generator=torch.Generator().manual_seed(2))  # type: ignore[arg-type]
    _compare(module, POLICIES, 0, 1e-5, **options)


@pytest.mark.slow
def test_policies_on_triton() -> None:
    with attention_backend("triton"):
        _compare(_module(), BOTTOM_RIGHT, 2, 1e-4)


def test_one_policy_of_all_sequences_is_one_call() -> None:
    qkv, lengths = _inputs(0)
    module = _module()
    found = module(*qkv, **lengths, thd_attention_policies=[_policy(*range(5), window=(2, 0))])
    assert torch.equal(found, module(*qkv, **lengths, attn_mask_type="padding_causal", window_size=(2, 0)))


def test_the_diagonal_of_the_call_is_that_of_policies_without_one() -> None:
    qkv, lengths = _inputs(0)
    policies = [_policy(*range(5), mask="padding", window=(1, 1))]
    for diagonal in (True, False):
        found = _module()(*qkv, **lengths, thd_attention_policies=policies, bottom_right_diagonal=diagonal)
        own = _module(bottom_right_diagonal=diagonal)(*qkv, **lengths, attn_mask_type="padding", window_size=(1, 1))
        assert torch.equal(found, own)


def test_dropout_draws_for_each_policy() -> None:
    qkv, lengths = _inputs(0)
    module = _module(attention_dropout=0.5)
    torch.manual_seed(0)
    first = module(*qkv, **lengths, thd_attention_policies=BOTTOM_RIGHT)
    torch.manual_seed(0)
    assert torch.equal(first, module(*qkv, **lengths, thd_attention_policies=BOTTOM_RIGHT))
    assert not torch.equal(first, module(*qkv, **lengths, thd_attention_policies=BOTTOM_RIGHT))
    assert torch.isfinite(torch.autograd.grad(first.sum(), qkv)[0]).all()


def _capped(qkv: list[Tensor], cap: float, bias: Tensor | float) -> Tensor:
    """Returns attention of [b, s, h, d] tensors whose scores are capped before the bias is added."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(H // H_KV, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = cap * torch.tanh(scores / cap) + bias
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(2)


@pytest.mark.parametrize("is_biased", [False, True])
def test_softcap(is_biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, H, D), (2, 9, H_KV, D), (2, 9, H_KV, D_V))
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    bias = torch.randn(1, H, 9, 9, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias} if is_biased else {}
    module = te.DotProductAttention(H, (D, D_V), num_gqa_groups=H_KV, qkv_format="bshd", softcap=0.7).cpu()
    for given, cap in ((None, 0.7), (0.3, 0.3)):
        found, expected = module(*qkv, softcap=given, **options), _capped(qkv, cap, bias if is_biased else 0.0)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        gradients = (torch.autograd.grad(x.square().sum(), qkv) for x in (found, expected))
        for x, y in zip(*gradients, strict=True):
            torch.testing.assert_close(x, y, atol=1e-11, rtol=0)
    assert not torch.equal(module(*qkv, softcap=0.0), found)


def test_softcap_in_the_answer_of_backend_selection() -> None:
    params = te.AttentionParams(qkv_layout="bshd_bshd_bshd", softcap=3.0)
    assert te.get_attention_backend(params) == te.get_attention_backend(te.AttentionParams(qkv_layout="bshd_bshd_bshd"))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no list": ({"thd_attention_policies": []}, ValueError, "accepted: a list of at least one dict"),
    "no window": (
        {"thd_attention_policies": [{"sequence_ids": torch.arange(5), "mask_type": "padding"}]},
        ValueError,
        "window_size",
    ),
    "another name": ({"thd_attention_policies": [_policy(*range(5), softcap=1.0)]}, ValueError, "has .*'softcap'"),
    "no padding": ({"thd_attention_policies": [_policy(*range(5), mask="causal")]}, ValueError, "'causal'; accepted: a type with"),
    "a mask type": ({"thd_attention_policies": [_policy(*range(5), mask="diagonal")]}, ValueError, "attn_mask_type is 'diagonal'"),
    "a window": ({"thd_attention_policies": [_policy(*range(5), window=(-3, 0))]}, ValueError, "window_size is"),
    "ids": (
        {"thd_attention_policies": [_policy() | {"sequence_ids": torch.ones(5)}]},
        ValueError,
        r"policies\[0\]\['sequence_ids'\] is",
    ),
    "too few": ({"thd_attention_policies": [_policy(0, 1)]}, ValueError, "has 2 sequence_ids for 5 sequences"),
    "twice": ({"thd_attention_policies": [_policy(0, 1, 2), _policy(2, 3)]}, ValueError, "each one in one policy"),
    "order": ({"thd_attention_policies": [_policy(0, 2, 1, 3, 4)]}, ValueError, r"\[0, 2, 1, 3, 4\].*ascending"),
    "dispatch": ({"thd_attention_policy_dispatch": "fast"}, ValueError, "accepted: auto, grouped"),
    "a mask": ({"attn_mask_type": "padding"}, ValueError, "comes with attn_mask_type; accepted: None"),
    "a bias": ({"core_attention_bias_type": "alibi"}, ValueError, "core_attention_bias_type 'alibi'"),
    "a score_mod": ({"score_mod": lambda *_: None}, ValueError, "comes with score_mod"),
    "fp8": ({"fp8_output": True}, ValueError, "FP8 or return_max_logit"),
    "a negative cap": ({"softcap": -1.0}, ValueError, "softcap is -1.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    options, error, text = WRONG[name]
    qkv, lengths = _inputs(0)
    with pytest.raises(error, match=text):
        _module()(*qkv, **lengths, **{"thd_attention_policies": POLICIES} | options)


def test_dense_tensors() -> None:
    x = torch.randn(2, 9, H, D)
    with pytest.raises(ValueError, match="comes with qkv_format 'bshd'"):
        te.DotProductAttention(H, D, qkv_format="bshd")(x, x, x, thd_attention_policies=[_policy(0, 1)])
