"""The FP8 kernels: the quantisation pass bit by bit, and attention both ways against the fp64 oracle; interpreted or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_calls import E4M3, E5M2, check, make_fp8_call

from flexattn.block_mask import block_lists, create_block_mask
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.spec import Operands
from flexattn.kernels_triton.quantize import transpose_tokens, unrotate
from flexattn.score_mod import trace_mods
from flexattn.testing import make_inputs

GPU = torch.cuda.is_available()
BF16 = torch.bfloat16

wide = pytest.mark.exhaustive


def lengths(*values: int) -> list[int]:
    """Small for the interpreter, and past the largest tile for a compiled kernel."""
    return [value * 5 for value in values] if GPU else list(values)


@pytest.mark.parametrize("granularity", quantization.GRANULARITIES)
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_the_pass_is_torchs_cast_to_the_bit(fmt: str, granularity: str, device: str) -> None:
    for dtype in (E4M3, E5M2):
        given = make_inputs(
            fmt, lengths_q=[70, 0, 5, 150], padding=True, gap=3, head_dim_qk=96, dtype=BF16, outliers=True, device=device
        )
        x = given.q.clone()
        x.view(-1, *x.shape[-2:])[4, 1, 5], x.view(-1, *x.shape[-2:])[5, 1, 6] = float("nan"), -float("inf")
        longest = given.max_seqlen_q or x.shape[1]
        rows = 64 if granularity == "block" else 0
        call = (x, fmt, given.cu_seqlens_q, given.cu_seqlens_q_padded, longest, None, dtype, granularity, rows, 1, False)
        run = triton_backend.quantizer(x)
        assert run is not None
        got, want = run(*call), quantization.quantize(*call)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g.nan_to_num(nan=-1.0) if g.dtype is torch.float32 else g.float().nan_to_num(nan=-1e9),
                               w.nan_to_num(nan=-1.0) if w.dtype is torch.float32 else w.float().nan_to_num(nan=-1e9))  # fmt: skip
        assert int(got[0].float().isnan().sum()) == 2


def test_a_cast_saturates_and_rounds_to_even(device: str) -> None:
    """Delayed scaling by 1: every bf16 number, as torch casts it where that does not overflow."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(BF16).view(1, 1024, 2, 32).to(device)
    scale = torch.ones(1, device=device)
    for dtype in (E4M3, E5M2):
        got, _, _ = triton_backend._quantize(x, "bshd", None, None, 1024, scale, dtype, "tensor", 0, 0, False)
        largest = quantization.LARGEST[dtype]
        want = torch.where(x.isfinite(), x.float().clamp(-largest, largest), torch.nan).to(dtype)
        same = (got.view(torch.uint8) == want.view(torch.uint8)) | (got.float().isnan() & want.float().isnan())
        assert bool(same.all())


def test_rotation(device: str) -> None:
    for head_dim in (32, 80, 96):
        x = make_inputs("bshd", lengths_q=[70], head_dim_qk=head_dim, dtype=BF16, device=device).q
        matrix = quantization.rotation_matrix(head_dim, x.device)
        assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim, device=device), atol=1e-6)
        call = (x, "bshd", None, None, 70, None, E4M3, "head", 0, 0, True)
        (got, descale, _), (want, _, _) = triton_backend._quantize(*call), quantization.quantize(*call)
        # a sum of products that rounds otherwise may fall on the other side of a boundary of E4M3
        assert float((got.float() != want.float()).float().mean()) < 0.01
        back = unrotate((got.float() * descale.view(1, 1, -1, 1)).to(BF16)).float()
        assert float((back - x.float()).norm() / x.float().norm()) < 0.05


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_transposed_copies(fmt: str, device: str) -> None:
    given = make_inputs(fmt, lengths_q=[70, 0, 5, 33], padding=True, gap=3, head_dim_qk=48, device=device)
    x = given.q.to(E4M3)
    copy = transpose_tokens(x, given.cu_seqlens_q, given.cu_seqlens_q_padded, given.max_seqlen_q or 0)
    assert given.cu_seqlens_q is not None
    starts = (given.cu_seqlens_q if given.cu_seqlens_q_padded is None else given.cu_seqlens_q_padded).tolist()
    for b, n in enumerate(given.cu_seqlens_q.diff().tolist()):
        rows = x[starts[b] :] if fmt == "thd" else x[b]
        columns = copy[:, :, (starts[b] + 16 * b) // 16 * 16 :] if fmt == "thd" else copy[b]
        assert torch.equal(columns[:, :, :n].float(), rows[:n].permute(1, 2, 0).float())
        assert not columns[:, :, n : -(-n // 16) * 16].float().any()


MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")


@pytest.mark.parametrize(
    ("fmt", "mask", "granularity"),
    [
        ("thd", "padding_causal", "head"),
        ("bshd", "padding", "block"),
        ("sbhd_2thd", "padding_causal_bottom_right", "batch_head"),
        *(
            pytest.param(fmt, mask, granularity, marks=wide)
            for fmt in ("bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "sbhd_2thd")
            for mask in MASKS
            for granularity in ("tensor", "block")
        ),
    ],
)
def test_format_mask_scaling(fmt: str, mask: str, granularity: str, device: str) -> None:
    # an empty query side, an empty key side, more queries than keys (rows that see nothing, at the bottom right) and fewer
    given = make_inputs(
        fmt, lengths_q=lengths(37, 0, 5, 70), lengths_kv=lengths(70, 9, 0, 33), padding=True, gap=3, dtype=BF16, device=device
    )
    check(given, granularity, attn_mask_type=mask)


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 80), *(pytest.param(dims, marks=wide) for dims in ((16, 48), (128, 128), (192, 128), (128, 192), (256, 256)))],
    ids=str,
)
def test_head_dims(dims: tuple[int, int], device: str) -> None:
    given = make_inputs(
        lengths_q=lengths(40, 40), lengths_kv=lengths(70, 70), head_dim_qk=dims[0], head_dim_v=dims[1], dtype=BF16, device=device
    )
    check(given, "block", E5M2, attn_mask_type="causal")


@pytest.mark.parametrize("heads", [(6, 2), pytest.param((33, 3), marks=wide)], ids=str)
def test_grouped_heads(heads: tuple[int, int], device: str) -> None:
    given = make_inputs(
        "thd", lengths_q=lengths(33, 7), num_heads=heads[0], num_heads_kv=heads[1], dtype=torch.float16, device=device, strided=True
    )
    check(given, attn_mask_type="padding_causal")


def _features(device: str) -> dict[str, dict[str, Any]]:
    (sq, skv) = lengths(40, 70)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(1, 4, sq, skv, generator=generator).to(device)
    offset = torch.randn(4, generator=generator).to(device)
    return {
        "window": {"window_size": (20, 7), "bottom_right_diagonal": False},
        "pre_scale_bias and a sink": {
            "bias_type": "pre_scale_bias",
            "bias": bias,
            "softmax_type": "learnable",
            "softmax_offset": offset,
        },
        "post_scale_bias and softcap": {"bias_type": "post_scale_bias", "bias": bias, "softcap": 3.0},
        "alibi and dropout": {
            "bias_type": "alibi",
            "alibi_slopes": torch.full((4,), 0.1, device=device),
            "dropout_p": 0.4,
            "rng_state": torch.tensor([5, 7], device=device),
            "softmax_type": "off-by-one",
        },
        "score_mod": {
            "mods": trace_mods(
                lambda s, b, h, i, j: torch.sin(s) + 0.5 * s + 0.01 * (i - j), lambda b, h, i, j: (i + j) % 5 != 0, (), True
            )
        },
    }


@pytest.mark.parametrize(
    "feature", ["window", "pre_scale_bias and a sink", "post_scale_bias and softcap", "alibi and dropout", "score_mod"]
)
def test_features(feature: str, device: str) -> None:
    given = make_inputs(lengths_q=lengths(40, 40), lengths_kv=lengths(70, 70), dtype=BF16, device=device)
    check(given, "block" if "bias" in feature else "head", **_features(device)[feature])


def test_captures_get_gradients(device: str) -> None:
    table = torch.randn(4, device=device, requires_grad=True)
    mods = trace_mods(lambda s, b, h, i, j: s + table[h] * (i - j), None)
    given = make_inputs(lengths_q=lengths(40, 40), lengths_kv=lengths(70, 70), dtype=BF16, device=device)
    check(given, mods=mods)


def test_block_mask(device: str) -> None:
    sq, skv = lengths(60, 70)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, sq, skv, device=device, BLOCK_SIZE=32)
    mods = trace_mods(None, mask.mask_mod)
    given = make_inputs(lengths_q=[sq, sq], lengths_kv=[skv, skv], dtype=BF16, device=device)
    check(given, "block", mods=mods, blocks=block_lists(mask, 2, 4, sq, skv, mask.kv_indices.device))


def test_repeated_runs_are_equal_to_the_bit(device: str) -> None:
    given = make_inputs("thd", lengths_q=lengths(37, 70), gap=3, dtype=BF16, device=device)
    for a, b in zip(*(check(given, "block", attn_mask_type="padding_causal") for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_outliers(device: str) -> None:
    """Scores far apart: weights of 0 and 1, and what saturates."""
    given = make_inputs(lengths_q=lengths(40, 40), lengths_kv=lengths(70, 70), dtype=BF16, outliers=True, device=device)
    check(given, "head", attn_mask_type="causal_bottom_right")


@pytest.mark.parametrize("which", ["q", "dout"])
def test_nan_stays_in_its_row(which: str, device: str) -> None:
    """A NaN in a row of q or dout is in that row's results, and of another sequence's nowhere."""
    given = make_inputs("thd", lengths_q=lengths(40, 40), dtype=BF16, device=device)
    first = lengths(40)[0]
    spec, x = make_fp8_call(given, attn_mask_type="padding")
    if which == "q":
        x.q[3, 1, 5] = torch.nan
    out, lse, _ = triton_backend.forward(spec, x)
    rows = out.isnan().any(-1).any(-1).nonzero().flatten().tolist()
    assert rows == ([3] if which == "q" else [])
    dout = torch.ones(out.shape, device=device).to(E4M3)
    if which == "dout":
        dout[3, 1, 5] = torch.nan
    backward = x._replace(descales=(*x.descales, torch.ones(1, 1, 1, device=device)))
    dq, dk, dv = triton_backend.backward(spec, backward, out, lse, dout, None)[:3]
    assert dq.isnan().any(-1).any(-1).nonzero().flatten().tolist() == [3]
    for gradient in (dk, dv):
        assert not gradient[first:].isnan().any()


def test_zeros(device: str) -> None:
    given = make_inputs(lengths_q=lengths(40), dtype=BF16, device=device)
    spec, x = make_fp8_call(given._replace(q=given.q * 0, k=given.k * 0, v=given.v * 0))
    assert all(bool((descale == 1).all()) for descale in x.descales)
    out, lse, _ = triton_backend.forward(spec, x)
    assert not out.any()
    assert torch.allclose(lse, torch.full_like(lse, lengths(40)[0]).log())


def test_support_says_what_is_missing() -> None:
    def error(change: dict[str, Any]) -> str:
        given = make_inputs(lengths_q=[3], dtype=BF16)
        spec, _ = make_fp8_call(given)
        return triton_backend.support_error(spec._replace(**change), "forward") or ""

    assert "multiples of 16" in error({"head_dim_qk": 24})
    assert "FP8 matrix instructions begin" in error({"device_type": "cuda", "capability": (8, 6)})
    assert isinstance(make_fp8_call(make_inputs(lengths_q=[3], dtype=BF16))[1], Operands)
