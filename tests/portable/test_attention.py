"""The Triton kernels against the fp64 oracle: interpreted without a GPU, compiled and on larger shapes with one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import FP32_GRADIENTS, Gradients, Results, Window, as_bshd
from flexattn.kernels_triton.common import tiles
from flexattn.kernels_triton.common.preprocess import new_statistics, row_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.portable import backward as backward_kernels
from flexattn.kernels_triton.portable import forward as forward_kernels
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.fuzz.delta import score_roundings

GPU = torch.cuda.is_available()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RNG_STATE = (-7777777777777, 31415926535)  # a negative seed and an offset of more than 32 bits: torch may draw both


def lengths(*values: int) -> list[int]:
    """Small for the interpreter, and past the largest tile for a compiled kernel; never a power of two, 0 stays 0."""
    return [value * 7 for value in values] if GPU else list(values)


def check(call: dict[str, Any], device: str, with_dlse: bool = True, **inputs: Any) -> tuple[torch.Tensor, ...]:
    """Forward and backward of one call against the oracle; returns all results."""
    given = make_inputs(device=device, **inputs)
    spec, x = make_call(given, **call)
    for direction in ("forward", "backward"):
        assert triton_backend.unsupported(spec, direction) is None
    out, lse, max_logit = triton_backend.forward(spec, x)
    reference = reference_attention(spec, x)
    eager = reference_attention(spec, x, dtype=spec.dtype)
    is_cut = device == "cuda" and spec.dtype is torch.float32  # plain torch adds in another order, without cuts
    lost = score_roundings(spec.head_dim_qk, x.softmax_scale, cut=True) if is_cut else 0.0
    for name, got, want, budget in zip(("out", "lse"), (out, lse), reference, eager, strict=False):
        check_close(name, got, want, budget, largest_score=lost)
    # the kernels take a softmax_scale of 0 as 1e-37; if the reference is 0, only this budget allows their results
    check_close("max_logit", max_logit, reference[2], eager[2], atol=1e-30 if x.softmax_scale == 0.0 else None)
    dout, dlse = make_dout(given), make_dlse(given) if with_dlse else None
    gradients = triton_backend.backward(spec, x, out, lse, dout, dlse)
    wanted = reference_gradients(spec, x, dout, dlse)
    budgets = reference_gradients(spec, x, dout, dlse, dtype=spec.dtype)
    for name in Gradients._fields:
        got, want = getattr(gradients, name), getattr(wanted, name)
        assert (got is None) == (want is None)
        if got is not None:
            rows = lse.numel() / got.shape[:-1].numel() if name == "dbias" else 1.0  # an entry adds the roundings of so many
            check_close(name, got, want, getattr(budgets, name), factor=GRADIENT_FACTOR, largest_score=lost * rows**0.5)
    return out, lse, max_logit, *(g for g in gradients if g is not None)


@pytest.mark.sample("fmt", "mask", "dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "sbhd_2thd"])
def test_format_mask_dtype(fmt: str, mask: str, dtype: torch.dtype, device: str) -> None:
    # an empty query side, an empty key side, more queries than keys (rows that see nothing, at the bottom right) and fewer
    check(
        {"attn_mask_type": mask},
        device,
        qkv_format=fmt,
        padding=True,
        gap=3,
        lengths_q=lengths(37, 0, 5, 60),
        lengths_kv=lengths(60, 9, 0, 33),
        dtype=dtype,
    )


@pytest.mark.sample("fmt", "mask", "sq")
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(70, 33), (33, 70), (1, 70), (65, 1), (64, 64)])
def test_dense_without_lengths(fmt: str, mask: str, sq: int, skv: int, device: str) -> None:
    check({"attn_mask_type": mask}, device, qkv_format=fmt, lengths_q=lengths(sq, sq), lengths_kv=lengths(skv, skv))


@pytest.mark.sample("bottom_right")
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (1, 1), (20, 7), (-1, 9), (40, -1), (10**9, 10**9), (0, -1)], ids=str)
def test_window(window: tuple[int, int], bottom_right: bool, device: str) -> None:
    # (1, 1): the last key that a block's last query sees begins a block, and so does the last query that sees a block's last key
    call = {"window_size": window, "bottom_right_diagonal": bottom_right}
    heads = {"num_heads": 2, "num_heads_kv": 1}
    check(call, device, qkv_format="thd", lengths_q=lengths(100, 5, 41), lengths_kv=lengths(70, 90, 41), **heads)


@pytest.mark.sample
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [(None, -20), (-11, None), (40, -11), (-30, 60), (None, -200), (5, -11), (None, -1)], ids=str)
def test_window_beside_the_diagonal(window: tuple[int | None, int | None], bottom_right: bool, device: str) -> None:
    call = {"window_size": Window(*window), "bottom_right_diagonal": bottom_right}
    heads = {"num_heads": 2, "num_heads_kv": 1}
    check(call, device, qkv_format="thd", lengths_q=lengths(100, 5, 41), lengths_kv=lengths(70, 90, 41), **heads)


@pytest.mark.sample
@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right"])
def test_causal_window(mask: str, device: str) -> None:
    check({"attn_mask_type": mask, "window_size": (17, -1)}, device, lengths_q=lengths(70), lengths_kv=lengths(101))


DIMS = ((8, 8), (16, 40), (24, 96), (64, 64), (80, 72), (192, 128), (128, 192), (256, 256), (264, 320), (512, 512), (576, 512))


@pytest.mark.sample
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int], device: str) -> None:
    for dtype in DTYPES[:2] if max(dims) <= 256 else DTYPES[1:]:
        check(
            {"attn_mask_type": "causal"},
            device,
            lengths_q=lengths(40),
            lengths_kv=lengths(35),
            head_dim_qk=dims[0],
            head_dim_v=dims[1],
            dtype=dtype,
        )


@pytest.mark.sample("heads", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (12, 1), (22, 2)], ids=str)
def test_grouped_heads(heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    # In half types with 12 and 11 query heads per key head, two programs compute dk and dv, and the last one's share may be
    # smaller.
    check(
        {"attn_mask_type": "padding_causal"},
        device,
        qkv_format="thd",
        lengths_q=lengths(33, 7),
        num_heads=heads[0],
        num_heads_kv=heads[1],
        dtype=dtype,
    )


BIAS_SHAPES = [(2, 4, 1, 1), (1, 4, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1)]


@pytest.mark.sample("spans")
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize(
    "spans",
    # a bias of one number, of one dim, and of all dims by default
    [
        pytest.param(s, marks=() if sum(s) in (0, 1, 4) else pytest.mark.exhaustive)
        for s in itertools.product([False, True], repeat=4)
    ],
    ids=lambda s: "".join("bhqk"[i] if on else "1" for i, on in enumerate(s)),
)
def test_bias(spans: tuple[bool, ...], kind: str, device: str) -> None:
    (sq,), (skv,) = lengths(20), lengths(40)
    full = (2, 4, sq, skv)
    shape = tuple(size if on else 1 for on, size in zip(spans, full, strict=True))
    bias = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(3))
    check({"bias_type": kind, "bias": bias, "softcap": 5.0}, device, lengths_q=[sq, sq], lengths_kv=[skv, skv])


@pytest.mark.sample("shape", "softmax_type", "kind")
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, lengths(40)[0], 1)], ids=str)
def test_bias_that_is_one_number_a_row(shape: tuple[int, ...], softmax_type: str, kind: str, device: str) -> None:
    """Its gradient is close to 0, so plain sums of half types are no measure of it."""
    bias = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(3)).bfloat16()
    call = {"bias_type": kind, "bias": bias, "attn_mask_type": "padding_causal_bottom_right", "softmax_type": softmax_type}
    check(call, device, qkv_format="thd", gap=2, lengths_q=lengths(40, 9), lengths_kv=lengths(7, 60), dtype=torch.bfloat16)


def test_bias_of_ragged_sequences_in_a_view(device: str) -> None:
    q_lengths, kv_lengths = lengths(40, 9), lengths(7, 60)
    larger = torch.full((1, 4, max(kv_lengths), 2 * max(q_lengths)), float("nan"), dtype=torch.bfloat16, device=device)
    bias = larger.transpose(2, 3)[:, :, ::2]  # [1, 4, sq, skv] with no contiguous dim
    bias.copy_(torch.randn(bias.shape))
    call = {"bias_type": "post_scale_bias", "bias": bias, "attn_mask_type": "padding_causal_bottom_right"}
    check(call, device, qkv_format="thd", gap=2, lengths_q=q_lengths, lengths_kv=kv_lengths, dtype=torch.bfloat16)


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_a_bias_past_the_keys_of_a_sequence_is_not_read(mask: str, device: str) -> None:
    """Eight keys of a row are copied at once, so some are past the end. NaN there would reach gradients through the softcap."""
    q_lengths, kv_lengths = lengths(20, 16), lengths(24, 13)
    given = make_inputs(device=device, lengths_q=q_lengths, lengths_kv=kv_lengths, dtype=torch.bfloat16, padding=True)
    bias = torch.randn(2, 4, max(q_lengths), max(kv_lengths), device=device).bfloat16()
    results = []
    for value in (0.0, float("nan")):
        bias[1, :, :, kv_lengths[1] :] = value
        call = {"bias_type": "pre_scale_bias", "bias": bias.clone(), "softcap": 5.0, "attn_mask_type": mask}
        spec, x = make_call(given, **call)
        out, lse, _ = triton_backend.forward(spec, x)
        gradients = triton_backend.backward(spec, x, out, lse, make_dout(given), None)
        results.append([t for t in (out, lse, *gradients) if t is not None])
    for zeros, nans in zip(*results, strict=True):
        assert torch.equal(zeros, nans)


@pytest.mark.sample("mask", "slopes_shape")
@pytest.mark.parametrize("slopes_shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_alibi(slopes_shape: tuple[int, ...], mask: str, device: str) -> None:
    slopes = torch.rand(slopes_shape, generator=torch.Generator().manual_seed(4)).to(device)
    call = {"bias_type": "alibi", "alibi_slopes": slopes, "attn_mask_type": mask}
    check(call, device, qkv_format="thd", lengths_q=lengths(40, 51), lengths_kv=lengths(66, 20))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap: float, device: str) -> None:
    # 0.5 puts most scores on the flat part of tanh, 30 on its straight part
    check({"softcap": softcap, "attn_mask_type": "causal"}, device, lengths_q=lengths(50), dtype=torch.float32)


@pytest.mark.sample("softcap")
@pytest.mark.parametrize(
    ("softcap", "dtype"),
    [(1e4, torch.float16), *itertools.product((1e4, 1e7, 1e30), (torch.bfloat16, torch.float32))],  # plain fp16 holds no 1e7
    ids=str,
)
def test_large_softcap(softcap: float, dtype: torch.dtype, device: str) -> None:
    """A tanh that is exact to 5e-7 moves logits by 5e-7 times the softcap."""
    check({"softcap": softcap, "attn_mask_type": "causal"}, device, lengths_q=lengths(50), dtype=dtype)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sink(kind: str, device: str) -> None:
    offset = torch.tensor([-3.0, 0.0, 2.5, float("-inf")], device=device) if kind == "learnable" else None
    call = {"softmax_type": kind, "softmax_offset": offset, "attn_mask_type": "padding_causal_bottom_right"}
    check(call, device, qkv_format="thd", gap=1, lengths_q=lengths(40, 0, 33), lengths_kv=lengths(21, 6, 50))


def test_small_operands_in_any_view(device: str) -> None:
    larger = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(6)).to(device)
    sink = {"softmax_type": "learnable", "softmax_offset": larger[0, :, 1]}
    check(sink | {"bias_type": "alibi", "alibi_slopes": larger[..., 2].abs()}, device, lengths_q=lengths(30, 30))
    check({"softmax_type": "learnable", "softmax_offset": larger[0, :1, 0].expand(4)}, device, lengths_q=lengths(30))


@pytest.mark.parametrize("p", [0.1, 0.999])  # of 2**16, 65.536 stay: 66
def test_dropout(p: float, device: str) -> None:
    state = torch.tensor(RNG_STATE, device=device)
    call = {"dropout_p": p, "rng_state": state, "attn_mask_type": "padding_causal"}
    check(call, device, qkv_format="thd", gap=2, lengths_q=lengths(20, 40), lengths_kv=lengths(25, 40))


@pytest.mark.sample("dims")
@pytest.mark.parametrize("dims", [(40, 24), (264, 512), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_together(dtype: torch.dtype, dims: tuple[int, int], device: str) -> None:
    if dtype is torch.float32 and max(dims) > 256:
        pytest.skip("in fp32 the kernels end at head dim 256")
    (sq,), (skv,) = lengths(66), lengths(50)
    generator = torch.Generator().manual_seed(5)
    call = {
        "attn_mask_type": "padding_causal_bottom_right",
        "window_size": (25, 0),
        "bias_type": "post_scale_bias",
        "bias": torch.randn(1, 4, sq, skv, generator=generator).to(device, dtype),
        "softcap": 8.0,
        "softmax_type": "learnable",
        "softmax_offset": torch.randn(4, generator=generator).to(device),
        "dropout_p": 0.2,
        "rng_state": torch.tensor(RNG_STATE, device=device),
        "softmax_scale": 0.3,
    }
    check(
        call,
        device,
        qkv_format="thd_2bhsd",
        gap=5,
        padding=True,
        strided=True,
        outliers=True,
        lengths_q=[sq, 0, sq // 2],
        lengths_kv=[skv // 3, 4, skv],
        num_heads=4,
        num_heads_kv=2,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
    )


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers(dtype: torch.dtype, device: str) -> None:
    check({"attn_mask_type": "causal"}, device, lengths_q=lengths(75), head_dim_qk=64, head_dim_v=64, outliers=True, dtype=dtype)


def test_strided_views(device: str) -> None:
    for fmt in ("bshd", "sbhd", "bhsd", "thd"):
        check({}, device, qkv_format=fmt, lengths_q=lengths(20, 20), strided=True)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-3])
def test_scale(scale: float, device: str) -> None:
    check({"softmax_scale": scale, "attn_mask_type": "causal_bottom_right"}, device, lengths_q=lengths(50), lengths_kv=lengths(40))


def test_broadcast_operands(device: str) -> None:
    given = make_inputs(lengths_q=lengths(20, 20), device=device)
    spec, x = make_call(given)
    shared = x._replace(k=x.k[:1].expand_as(x.k), v=x.v[:1].expand_as(x.v))
    copied = x._replace(k=shared.k.contiguous(), v=shared.v.contiguous())
    dout = make_dout(given)[:, :1].expand_as(given.q)
    for got, want in zip(triton_backend.forward(spec, shared), triton_backend.forward(spec, copied), strict=True):
        assert torch.equal(got, want)
    out, lse, _ = triton_backend.forward(spec, copied)
    got = triton_backend.backward(spec, shared, out, lse, dout, None)
    want = triton_backend.backward(spec, copied, out, lse, dout.contiguous(), None)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


def test_dout_expanded_from_a_scalar(device: str) -> None:
    given = make_inputs(lengths_q=lengths(40), device=device)
    spec, x = make_call(given)
    out, lse, _ = triton_backend.forward(spec, x)
    dout = torch.ones((), device=device).expand_as(out)
    got = triton_backend.backward(spec, x, out, lse, dout, None)
    want = triton_backend.backward(spec, x, out, lse, dout.contiguous(), None)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(128, 32, 4, 2), Tile(32, 128, 4, 2)], ids=str)
@pytest.mark.sample
def test_any_tile(tile: Tile, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "select_tile", lambda *_, **__: tile)
    call = {
        "attn_mask_type": "padding_causal_bottom_right",
        "window_size": (60, 0),
        "dropout_p": 0.3,
        "rng_state": torch.tensor(RNG_STATE, device=device),
    }
    check(call, device, qkv_format="thd", gap=1, lengths_q=lengths(150, 31), lengths_kv=lengths(140, 70))


@pytest.mark.parametrize("lengths_q", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("fmt", ["thd", "bshd"])
def test_nothing_to_attend(fmt: str, lengths_q: list[int], device: str) -> None:
    given = make_inputs(fmt, lengths_q=lengths_q, lengths_kv=[4 for _ in lengths_q], padding=True, gap=2, device=device)
    call = {"softmax_type": "learnable", "softmax_offset": torch.zeros(4, device=device)}
    spec, x = make_call(given, **call)
    if not lengths_q and fmt == "thd":  # tokens without a sequence
        x = x._replace(q=torch.full((5, 4, 16), float("nan"), device=device), k=torch.full((7, 2, 16), float("nan"), device=device))
        x = x._replace(v=x.k)
    out, lse, max_logit = triton_backend.forward(spec, x)
    assert out.shape == x.q.shape
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert (max_logit == float("-inf")).all()
    gradients = triton_backend.backward(spec, x, out, lse, torch.ones_like(out), None)
    assert not any(g.any() for g in gradients if g is not None)


@pytest.mark.sample
@pytest.mark.parametrize(
    "values", [[0, 50, 20, 90], [0, 40, 200, 10**9], [-5, 30, 40, 80], [80, 60, 40, 0], [0, -(2**31), 2**31 - 1, 80]], ids=str
)
@pytest.mark.parametrize("gaps", [False, True])
def test_wrong_cu_seqlens_stay_in_bounds(values: list[int], gaps: bool, device: str) -> None:
    # The tensors lie inside larger ones: a write outside of them is an error, and so is a NaN from outside in a result.
    total, margin = 80, 64
    wrong = torch.tensor(values, dtype=torch.int32, device=device)
    fine = torch.tensor([0, 20, 50, 80], dtype=torch.int32, device=device)

    def inside(heads: int, fill: float | None) -> torch.Tensor:
        whole = torch.full((total + 2 * margin, heads, 16), float("nan"), device=device)
        view = whole[margin : margin + total]
        view.copy_(torch.randn(view.shape) if fill is None else torch.full(view.shape, fill))
        return view

    given = make_inputs("thd", lengths_q=[20, 30, 30], device=device)
    spec, x = make_call(given, attn_mask_type="padding_causal")
    cu = (fine, fine, wrong, wrong) if gaps else (wrong, wrong, None, None)
    x = x._replace(q=inside(4, None), k=inside(2, None), v=inside(2, None), max_seqlen_q=80, max_seqlen_kv=80)
    x = x._replace(cu_seqlens_q=cu[0], cu_seqlens_kv=cu[1], cu_seqlens_q_padded=cu[2], cu_seqlens_kv_padded=cu[3])
    given_to_kernels = triton_backend.to_problem(spec, x)
    out, dq, dk, dv = inside(4, 7.0), inside(4, 7.0), inside(2, 7.0), inside(2, 7.0)
    lse = torch.zeros(4, total, device=device)
    forward_kernels.attention_forward(given_to_kernels, out, lse)
    backward_kernels.attention_backward(Backward(given_to_kernels, out.nan_to_num(), lse, inside(4, 1.0), None, dq, dk, dv))
    for t in (out, dq, dk, dv):
        whole = t._base
        assert whole is not None
        for outside in (whole[:margin], whole[margin + total :]):
            assert outside.isnan().all(), "something outside the tensor was written"
        assert not t.isnan().any(), "something outside the tensor was read"


def test_nan_and_inf_stay_in_their_rows(device: str) -> None:
    given = make_inputs(lengths_q=lengths(40), device=device)
    spec, x = make_call(given)
    clean, _, _ = triton_backend.forward(spec, x)
    x.q[0, 3, 1] = float("nan")
    x.q[0, 5, 2] = float("inf")
    dirty, lse, _ = triton_backend.forward(spec, x)
    touched = torch.zeros(clean.shape[:3], dtype=torch.bool, device=device)
    touched[0, 3, 1] = touched[0, 5, 2] = True
    assert dirty[touched].isnan().all()
    assert torch.equal(dirty[~touched], clean[~touched])
    assert lse[0, 1, 3].isnan()


@pytest.mark.slow
def test_repeated_runs_are_bitwise_equal(device: str) -> None:
    (sq,), (skv,) = lengths(66), lengths(50)
    bias = torch.randn(1, 1, 1, skv, device=device)
    call = {
        "bias_type": "post_scale_bias",
        "bias": bias,
        "softmax_type": "learnable",
        "softmax_offset": torch.randn(12, device=device),
        "dropout_p": 0.2,
        "rng_state": torch.tensor(RNG_STATE, device=device),
        "deterministic": True,
    }
    batch = 2 if GPU else 1
    inputs = {"lengths_q": [sq] * batch, "lengths_kv": [skv] * batch, "num_heads": 12, "num_heads_kv": 1, "dtype": torch.bfloat16}
    first = check(call, device, **inputs)
    for _ in range(64 if GPU else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, check(call, device, **inputs), strict=True))


def test_formats_agree_to_the_bit(device: str) -> None:
    """One batch in every format gives the same numbers, dropout included: the format only decides addresses."""
    sizes = lengths(40, 23)
    state = torch.tensor(RNG_STATE, device=device)
    results = []
    for fmt in ("bshd", "sbhd", "bhsd", "thd"):
        given = make_inputs(fmt, lengths_q=sizes, padding=True, device=device, seed=9)
        spec, x = make_call(given, attn_mask_type="padding_causal", dropout_p=0.25, rng_state=state)
        out, _, _ = triton_backend.forward(spec, x)
        if fmt == "thd":
            results.append(out)
        else:
            results.append(torch.cat([as_bshd(out, fmt)[b, :n] for b, n in enumerate(sizes)]))
    assert all(torch.equal(rows, results[0]) for rows in results[1:])


@pytest.mark.sample("fmt", "head_dim_v")
@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("head_dim_v", [16, 80])
def test_row_statistics(fmt: str, head_dim_v: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for statistics alone writes the same results as the dq kernel, and nothing else."""
    inputs = {"lengths_q": lengths(37, 0, 71), "lengths_kv": lengths(20, 9, 33), "head_dim_v": head_dim_v}
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")  # the portable dq kernel
    given = make_inputs(fmt, padding=True, gap=3, device=device, dtype=torch.bfloat16, **inputs)
    offset = torch.tensor([-3.0, 0.0, 2.5, float("-inf")], device=device)
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "learnable", "softmax_offset": offset}
    spec, x = make_call(given, **call)
    out, lse, _ = triton_backend.forward(spec, x)
    dout, dlse = make_dout(given), make_dlse(given)
    left: list[Any] = []
    monkeypatch.setattr(backward_kernels, "new_statistics", lambda *given: left.append(new_statistics(*given)) or left[0])
    gradients = triton_backend.backward(spec, x, out, lse, dout, dlse)
    doffset = torch.empty_like(offset)
    rows = (as_bshd(out, fmt), lse, as_bshd(dout, fmt))
    problem = triton_backend.to_problem(spec, x)
    alone = row_statistics(Backward(problem, *rows, dlse, problem.q, problem.k, problem.v, doffset))
    # torch.empty is filled with NaN here, so unwritten memory is equal too.
    torch.testing.assert_close(alone[:2], left[0][0][:2], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(doffset, gradients.dsoftmax_offset, rtol=1e-4, atol=1e-5)
    assert all(t.isfinite().any() for t in alone[:2])


@pytest.mark.sample
@pytest.mark.parametrize(
    "inputs",
    [
        {"qkv_format": "thd", "padding": True, "gap": 3, "head_dim_qk": 80, "head_dim_v": 48},
        {"qkv_format": "bhsd", "num_heads": 12, "num_heads_kv": 1},  # dk and dv are sums of fp32 parts
        {"qkv_format": "sbhd", "head_dim_qk": 320, "head_dim_v": 264},  # dk and dv have launches of their own
    ],
    ids=str,
)
@pytest.mark.parametrize("fp32", FP32_GRADIENTS[1:])
def test_gradients_in_float32_round_to_those_in_16_bits(fp32: str, inputs: dict[str, Any], device: str) -> None:
    sizes = ((37, 0, 9), (20, 9, 33)) if inputs["qkv_format"] == "thd" else ((71, 71), (33, 33))
    given = make_inputs(lengths_q=lengths(*sizes[0]), lengths_kv=lengths(*sizes[1]), dtype=torch.bfloat16, device=device, **inputs)
    mask = "padding_causal" if inputs["qkv_format"] == "thd" else "causal_bottom_right"
    spec, x = make_call(given, attn_mask_type=mask, deterministic=True)
    out, lse, _ = triton_backend.forward(spec, x)
    dout = make_dout(given)
    wanted = triton_backend.backward(spec, x, out, lse, dout, None)
    found = triton_backend.backward(spec._replace(results=Results(fp32=fp32)), x, out, lse, dout, None)
    for name in ("dq", "dk", "dv"):
        got, want = getattr(found, name), getattr(wanted, name)
        is_named = name[1:] in fp32.removeprefix("d")
        assert got.dtype is (torch.float32 if is_named else torch.bfloat16)
        assert torch.equal(got.bfloat16(), want)
        assert bool((got != want).any()) is is_named


def test_fp32_gradients_under_a_large_lse(device: str) -> None:
    """Every score is exact here, but an lse near 200 and its probabilities are not. The backward's sums correct that."""
    inputs = make_inputs(lengths_q=[40], lengths_kv=[50], num_heads_kv=4, device=device)
    generator = torch.Generator().manual_seed(3)
    whole = (torch.randint(-1, 2, t.shape, generator=generator).to(t) for t in (inputs.q, inputs.k))
    inputs = inputs._replace(**dict(zip("qk", whole, strict=True)))
    bias = torch.full((1, 1, 1, 1), 200.0, device=device)
    spec, x = make_call(inputs, bias_type="post_scale_bias", bias=bias, softmax_scale=0.25)
    out, lse, _ = triton_backend.forward(spec, x)
    assert lse.min() > 200.0
    dout = make_dout(inputs)
    found = triton_backend.backward(spec, x, out, lse, dout, None)
    exact, budget = (reference_gradients(spec, x, dout, dtype=dtype) for dtype in (torch.float64, torch.float32))
    for name in ("dq", "dk", "dv"):
        got, ref, eager = (getattr(gradients, name) for gradients in (found, exact, budget))
        check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)


def test_lse_gradient_alone(device: str) -> None:
    given = make_inputs(lengths_q=lengths(40), device=device)
    spec, x = make_call(given)
    out, lse, _ = triton_backend.forward(spec, x)
    dlse = make_dlse(given)
    got = triton_backend.backward(spec, x, out, lse, torch.zeros_like(out), dlse)
    want = reference_gradients(spec, x, torch.zeros_like(out), dlse)
    budget = reference_gradients(spec, x, torch.zeros_like(out), dlse, dtype=spec.dtype)
    for name in ("dq", "dk"):
        check_close(name, getattr(got, name), getattr(want, name), getattr(budget, name), factor=GRADIENT_FACTOR)
    assert not got.dv.any()
