"""attention() and merge_attention() from end to end, against the reference and against changes that must not change a result."""

from __future__ import annotations

import doctest
import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import functional
from flexattn.call_options import DEFAULTS, TENSOR_OPTIONS
from flexattn.testing import (
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)

LENGTHS_Q, LENGTHS_KV = (5, 0, 17), (9, 4, 3)  # an empty sequence, and one with more queries than keys: rows that see nothing
SLOPES_OF_8 = [2.0**-n for n in range(1, 9)]  # the example of Press et al. (2022), section 3
LOOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums in another order


@pytest.fixture(params=["eager", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return request.param


def leaves(inputs: Inputs, **more: Any) -> dict[str, Any]:
    """Returns attention's arguments; q, k, v and all other differentiable ones are leaves."""
    call = {**inputs._asdict(), **more}
    return {
        name: t.detach().requires_grad_() if name in ("q", "k", "v", "bias", "softmax_offset") and t is not None else t
        for name, t in call.items()
    }


COMBINATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bshd causal": ({"lengths_q": (17, 17)}, {"attn_mask_type": "causal"}),
    "sbhd cross, window, strided": (
        {"qkv_format": "sbhd", "lengths_q": (5, 5), "lengths_kv": (17, 17), "strided": True},
        {"window_size": (3, 2)},
    ),
    "bhsd padding, top-left window": (
        {"qkv_format": "bhsd", "lengths_q": LENGTHS_Q, "lengths_kv": LENGTHS_KV, "padding": True, "gap": 2},
        {"attn_mask_type": "padding", "window_size": (4, -1), "bottom_right_diagonal": False},
    ),
    "thd causal, gaps, bf16": (
        {"qkv_format": "thd", "lengths_q": LENGTHS_Q, "gap": 2, "dtype": torch.bfloat16, "outliers": True},
        {"attn_mask_type": "padding_causal"},
    ),
    "thd everything": (
        {"qkv_format": "thd", "lengths_q": LENGTHS_Q, "lengths_kv": LENGTHS_KV, "head_dim_v": 8},
        {
            "attn_mask_type": "padding_causal_bottom_right",
            "window_size": (7, 0),
            "bias_type": "pre_scale_bias",
            "bias": torch.randn(3, 1, 17, 9),
            "softmax_type": "learnable",
            "softmax_offset": torch.tensor([0.5, -1.0, 0.0, 2.0]),
            "softmax_scale": 0.4,
            "softcap": 3.0,
            "dropout_p": 0.25,
            "rng_state": torch.tensor([2**40 + 1, 7]),
        },
    ),
    "thd to bshd cache": (
        {"qkv_format": "thd_2bshd", "lengths_q": (1, 3), "lengths_kv": (9, 12)},
        {"attn_mask_type": "padding_causal_bottom_right", "bias_type": "alibi", "softmax_type": "off-by-one"},
    ),
    "bf16, float32 bias and offset": (
        {"lengths_q": (17, 17), "dtype": torch.bfloat16},
        {
            "bias_type": "post_scale_bias",
            "bias": torch.randn(1, 4, 17, 17),
            "softmax_type": "learnable",
            "softmax_offset": torch.randn(4),
        },
    ),
}


@pytest.mark.sample("backend")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_matches_the_reference(backend, device, name):
    shapes, options = COMBINATIONS[name]
    options = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in options.items()}
    inputs = make_inputs(**shapes, device=device)
    assert flexattn.explain(**leaves(inputs, **options), backend=backend).backward.backend == backend
    call = leaves(inputs, **options)
    out, lse, max_logit = flexattn.attention(**call, backend=backend, return_lse=True, return_max_logit=True)
    dout, dlse = make_dout(inputs), make_dlse(inputs)
    torch.autograd.backward([out, lse], [dout, dlse])

    slopes = (
        {"alibi_slopes": torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], device=device)} if "alibi" in options.values() else {}
    )
    spec, x = make_call(inputs, **options, **slopes)
    exact = reference_attention(spec, x)
    same_dtype = reference_attention(spec, x, dtype=spec.dtype)
    for label, got, ref, eager in zip(("out", "lse", "max_logit"), (out, lse, max_logit), exact, same_dtype, strict=True):
        check_close(label, got, ref, eager)
    exact_gradients = reference_gradients(spec, x, dout, dlse)
    eager_gradients = reference_gradients(spec, x, dout, dlse, dtype=spec.dtype)
    labels = ("q", "k", "v", "bias", "softmax_offset")
    for label, ref, eager in zip(labels, exact_gradients[:-1], eager_gradients[:-1], strict=True):
        assert (ref is None) == (call.get(label) is None)
        if ref is not None:
            check_close(f"d{label}", call[label].grad, ref, eager, factor=GRADIENT_FACTOR)


def test_examples_of_the_docstring_hold():
    found = doctest.testmod(functional)
    assert found.attempted > 5
    assert found.failed == 0


def test_signature_and_docstring_have_the_arguments_of_the_one_list():
    """The signature has types and defaults. "Default" in the text of an argument means a default that depends on the call."""
    parameters = inspect.signature(functional.attention).parameters
    assert list(parameters) == ["q", "k", "v", *DEFAULTS]
    assert {parameters[name].annotation for name in TENSOR_OPTIONS} == {"Tensor | None"}
    assert not any(re.search("Array|Blocks|State", p.annotation) for p in parameters.values())
    entry = re.compile(r"^        (\w+(?:, \w+)*) \((.*?)\): ", re.MULTILINE)
    documented = {name: kind for names, kind in entry.findall(functional.attention.__doc__) for name in names.split(", ")}
    assert documented.keys() == parameters.keys()
    for name, default in DEFAULTS.items():
        shown = f'"{default}"' if isinstance(default, str) else default
        assert documented[name].endswith(", optional" if default is None else f", default {shown}"), name


def test_what_is_returned_is_what_is_asked_for():
    q, k, v = make_inputs("bhsd", lengths_q=(5, 5), head_dim_v=8)[:3]
    shapes = {"out": (2, 4, 5, 8), "lse": (2, 4, 5), "max_logit": (4,)}

    def returned(**ask: bool) -> Any:
        return flexattn.attention(q, k, v, qkv_format="bhsd", **ask)

    assert returned().shape == shapes["out"]
    for ask, expected in (
        ({"return_lse": True}, ("out", "lse")),
        ({"return_max_logit": True}, ("out", "max_logit")),
        ({"return_lse": True, "return_max_logit": True}, ("out", "lse", "max_logit")),
    ):
        results = returned(**ask)
        assert isinstance(results, tuple)
        assert results._fields == expected
        assert [tuple(t.shape) for t in results] == [shapes[name] for name in expected]
        torch.testing.assert_close(results[0], returned(), rtol=0, atol=0)
    with pytest.raises(TypeError, match="by position"):
        flexattn.attention(q, k, v, "bhsd")


@pytest.mark.parametrize(("q_format", "permutation"), [("sbhd", (1, 0, 2, 3)), ("bhsd", (0, 2, 1, 3))])
def test_the_format_is_only_a_layout(backend, device, q_format, permutation):
    q, k, v = make_inputs("bshd", lengths_q=(17, 17), lengths_kv=(9, 9), device=device)[:3]
    out = flexattn.attention(q, k, v, attn_mask_type="causal", backend=backend)
    views = [t.permute(permutation) for t in (q, k, v)]
    permuted = flexattn.attention(*views, qkv_format=q_format, attn_mask_type="causal", backend=backend)
    assert permuted.is_contiguous()
    torch.testing.assert_close(permuted.permute(permutation), out, rtol=0, atol=0)


def test_heads_are_independent(backend, device):
    """Permuting the query heads of each group, and the groups, permutes out, lse and max_logit."""
    q, k, v = make_inputs("bshd", lengths_q=(17, 17), device=device)[:3]
    options = {"attn_mask_type": "causal", "return_lse": True, "return_max_logit": True, "backend": backend}
    out, lse, max_logit = flexattn.attention(q, k, v, **options)
    heads, groups = [3, 2, 0, 1], [1, 0]
    moved = flexattn.attention(q[:, :, heads], k[:, :, groups], v[:, :, groups], **options)
    for got, expected in zip(moved, (out[:, :, heads], lse[:, heads], max_logit[heads]), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_constant_added_to_every_score_shifts_lse_alone(backend, device):
    q, k, v = make_inputs("bshd", lengths_q=(17, 17), device=device)[:3]
    bias = torch.randn(1, 4, 17, 17, device=device)
    options = {"attn_mask_type": "causal", "bias_type": "post_scale_bias", "return_lse": True, "return_max_logit": True}
    out, lse, max_logit = flexattn.attention(q, k, v, bias=bias, backend=backend, **options)
    shifted = flexattn.attention(q, k, v, bias=bias + 3.0, backend=backend, **options)
    for got, expected in zip(shifted, (out, lse + 3.0, max_logit + 3.0), strict=True):
        torch.testing.assert_close(got, expected, **LOOSE)


@pytest.mark.sample
def test_packing_changes_nothing(backend, device):
    """thd, thd with gaps and padded bshd hold the same sequences; dropout and bias follow positions within each."""
    options = {
        "attn_mask_type": "padding_causal",
        "dropout_p": 0.3,
        "rng_state": torch.tensor([11, 2], device=device),
        "bias_type": "post_scale_bias",
        "bias": torch.randn(1, 4, 20, 20, device=device),
        "return_lse": True,
        "backend": backend,
    }

    def real_tokens(x: Tensor) -> Tensor:
        return ~x[..., 0, 0].isnan()

    def sequences(inputs: Inputs) -> list[Tensor]:
        """out, lse, dq, dk and dv of each sequence's real tokens, one sequence after another."""
        call = leaves(inputs)
        out, lse = flexattn.attention(**call, **options)
        out.backward(torch.linspace(-1.0, 1.0, out.shape[-1], device=device).expand_as(out))
        real = real_tokens(inputs.q)
        return [out[real], lse.movedim(-2, -1)[real], *(call[name].grad[real] for name in "qkv")]

    padded = make_inputs("bshd", lengths_q=LENGTHS_Q, padding=True, gap=3, device=device)
    gaps = make_inputs("thd", lengths_q=LENGTHS_Q, gap=3, device=device)._replace(max_seqlen_q=20, max_seqlen_kv=20)
    q, k, v = (t[real_tokens(t)] for t in gaps[:3])
    packed = sequences(gaps._replace(q=q, k=k, v=v, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None))
    for other in (gaps, padded):
        for got, expected in zip(sequences(other), packed, strict=True):
            torch.testing.assert_close(got, expected, **LOOSE)


@pytest.mark.sample(values=False)
@pytest.mark.slow
def test_dropout_is_one_linear_map_of_v(backend, device):
    """<dv, v> = <dout, out> only if the backward drops the same weights as the forward, also if a compiled graph draws the seed."""
    call = leaves(make_inputs("bshd", lengths_q=(17, 17), device=device), dropout_p=0.5, backend=backend)
    torch.compiler.reset()
    for attention in (flexattn.attention, torch.compile(flexattn.attention, fullgraph=True, backend="aot_eager")):
        out = attention(**call)
        dout = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, call["v"], dout)
        torch.testing.assert_close((dv * call["v"]).sum(), (dout * out).sum(), **LOOSE)


def test_default_alibi_slopes():
    def slopes(heads: int) -> Tensor:
        """Read off lse: with equal scores, two keys and the diagonal on the first, lse = log(1 + exp(-slope))."""
        q, k = torch.zeros(1, 1, heads, 8), torch.zeros(1, 2, heads, 8)
        call = {"bias_type": "alibi", "window_size": (-1, 1), "bottom_right_diagonal": False, "return_lse": True}
        _, lse = flexattn.attention(q.double(), k.double(), k.double(), **call)
        return -torch.log(torch.exp(lse[0, :, 0]) - 1)

    torch.testing.assert_close(slopes(8).tolist(), SLOPES_OF_8)
    torch.testing.assert_close(slopes(12).tolist(), [*SLOPES_OF_8, *(2.0 ** -(n / 2) for n in (1, 3, 5, 7))])
    torch.testing.assert_close(slopes(1).tolist(), [2.0**-8])


def test_each_row_of_a_padded_batch_has_its_own_slopes(backend, device):
    inputs, lengths = make_inputs("bshd", lengths_q=(17, 5), padding=True, device=device), (17, 5)
    slopes = torch.tensor([[0.5, 0.1, 0.02, 1.0], [0.03, 2.0, 0.7, 0.2]], device=device)
    alibi = {"bias_type": "alibi", "backend": backend}
    whole = flexattn.attention(**inputs._asdict(), attn_mask_type="padding", alibi_slopes=slopes, **alibi)
    for b, length in enumerate(lengths):
        alone = flexattn.attention(*(t[b : b + 1, :length] for t in inputs[:3]), alibi_slopes=slopes[b], **alibi)
        torch.testing.assert_close(whole[b : b + 1, :length], alone, **LOOSE)


@pytest.mark.parametrize("offset", [200.0, -200.0])
def test_a_sink_far_from_the_scores(offset, backend, device):
    q, k, v = make_inputs("bshd", lengths_q=(17,), device=device)[:3]
    sink = {"softmax_type": "learnable", "softmax_offset": torch.full((4,), offset, device=device)}
    (out, lse), (got, got_lse) = (flexattn.attention(q, k, v, return_lse=True, backend=backend, **more) for more in ({}, sink))
    wanted = torch.logaddexp(lse, lse.new_tensor(offset))
    torch.testing.assert_close(got_lse, wanted, **LOOSE)
    torch.testing.assert_close(got, out * torch.exp(lse - wanted).mT[..., None], **LOOSE)


def test_deterministic_follows_torch(monkeypatch):
    inputs = make_inputs("bshd", lengths_q=(5, 5))
    assert not flexattn.explain(*inputs[:3]).spec.deterministic
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert flexattn.explain(*inputs[:3]).spec.deterministic
    assert not flexattn.explain(*inputs[:3], deterministic=False).spec.deterministic


SPLITS = [0, 6, 17]  # the keys before go to one side and the others to the other: none, some, all


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("split", SPLITS)
def test_merged_halves_are_the_whole(qkv_format, split):
    """Values and gradients of out and lse match, also if one side has no key for any query or, in thd, for a whole sequence."""
    lengths_q, lengths_kv = ((5, 9), (17, 0)) if qkv_format == "thd" else ((5, 5), (17, 17))
    call = leaves(make_inputs(qkv_format, lengths_q=lengths_q, lengths_kv=lengths_kv, dtype=torch.float64))
    mask = {"attn_mask_type": "padding"} if qkv_format == "thd" else {}
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}[qkv_format]

    def half(start: int, stop: int) -> tuple[Tensor, Tensor]:
        changes: dict[str, Any] = {name: call[name].narrow(axis, start, stop - start) for name in "kv"}
        if qkv_format == "thd":
            changes["cu_seqlens_kv"] = torch.tensor([0, stop - start, stop - start], dtype=torch.int32)
        return flexattn.attention(**(call | changes), **mask, return_lse=True)

    whole = flexattn.attention(**call, **mask, return_lse=True)
    merged = flexattn.merge_attention(*half(0, split), *half(split, 17), qkv_format=qkv_format)
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected)
    weights = [torch.randn_like(t) for t in whole]
    tensors = [call[name] for name in "qkv"]
    for got, expected in zip(
        torch.autograd.grad(merged, tensors, weights), torch.autograd.grad(whole, tensors, weights), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_merging_sides_without_keys():
    """-inf on either side leaves the other; on both gives 0 and -inf; and no gradient is NaN."""
    out_a, out_b = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(2))
    lse_a = torch.tensor([[[1.0, -math.inf, 2.0, -math.inf]]], requires_grad=True)
    lse_b = torch.tensor([[[-math.inf, 3.0, 2.0, -math.inf]]], requires_grad=True)
    out, lse = flexattn.merge_attention(out_a, lse_a, out_b, lse_b)
    both = (out_a[:, 2] + out_b[:, 2]) / 2
    torch.testing.assert_close(out[0], torch.stack([out_a[0, 0], out_b[0, 1], both[0], torch.zeros(1, 8)]))
    torch.testing.assert_close(lse[0, 0], torch.tensor([1.0, 3.0, 2.0 + math.log(2.0), -math.inf]))
    gradients = torch.autograd.grad([out, lse], [out_a, lse_a, out_b, lse_b], [torch.ones_like(out), torch.ones_like(lse)])
    assert all(g.isfinite().all() for g in gradients)
    torch.testing.assert_close(gradients[1][0, 0, [0, 1, 3]], torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.slow
def test_merging_is_in_float32_and_compiles():
    torch.compiler.reset()
    outs = [torch.randn(2, 5, 4, 8).bfloat16() for _ in range(2)]
    lses = [100 * torch.randn(2, 4, 5) for _ in range(2)]  # exp of these overflows
    arguments = outs[0], lses[0], outs[1], lses[1]
    out, lse = flexattn.merge_attention(*arguments)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact_out, exact_lse = flexattn.merge_attention(*(t.double() for t in arguments))
    torch.testing.assert_close(out, exact_out.bfloat16())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(flexattn.merge_attention, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*arguments), (out, lse), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
