"""The FP8 kernels: the quantisation pass bit by bit, and attention both ways against the fp64 oracle; interpreted or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import attention, fp8
from flexattn.block_mask import block_lists, create_block_mask
from flexattn.dispatch import eager_backend, quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.dispatch.spec import Operands, Results, as_bshd, parse_format
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.quantize import transpose_tokens, unrotate
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import Inputs, make_dout, make_inputs
from tests.support.compiled_kernels import compile_sound
from tests.support.fp8_calls import E4M3, E5M2, check, make_fp8_call
from tests.support.guarded_memory import guarded_allocations

GPU = torch.cuda.is_available()
BF16 = torch.bfloat16

wide = pytest.mark.exhaustive


def lengths(*values: int) -> list[int]:
    """Small for the interpreter, and past the largest tile for a compiled kernel."""
    return [value * 5 for value in values] if GPU else list(values)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """NaN has several codes."""
    if got.element_size() == 1:
        return bool(((got.view(torch.uint8) == want.view(torch.uint8)) | (got.float().isnan() & want.float().isnan())).all())
    return torch.equal(got, want)


def tensors_of(given: Inputs, scales: Any = (None, None, None), rotation: bool = False) -> list[Unquantized]:
    """q, k and v of inputs, with a NaN and an infinity in a row of their own each."""
    q_format, kv_format = parse_format(given.qkv_format)
    tensors = []
    for name, fmt, scale in zip("qkv", (q_format, kv_format, kv_format), scales, strict=True):
        x = getattr(given, name).clone()
        rows = as_bshd(x, fmt)
        rows = rows if fmt == "thd" else rows[0]
        rows[4, 1, 5], rows[5, 1, 6] = float("nan"), -float("inf")
        side = "q" if name == "q" else "kv"
        lengths = (getattr(given, f"cu_seqlens_{side}"), getattr(given, f"cu_seqlens_{side}_padded"))
        longest = getattr(given, f"max_seqlen_{side}") or x.shape[fmt.index("s")]
        tensors.append(Unquantized(x, fmt, *lengths, longest, scale, rotation and name != "v"))
    return tensors


FORMATS: dict[str, dict[str, Any]] = {
    "bshd": {"padding": True, "gap": 3, "lengths_q": [70, 0, 5, 33], "lengths_kv": [9, 70, 7, 34]},
    "thd": {"gap": 3, "lengths_q": [70, 0, 5, 33], "lengths_kv": [9, 70, 7, 34]},
    "sbhd_2thd": {"padding": True, "lengths_q": [70, 0, 5, 33], "lengths_kv": [9, 70, 7, 34]},
    "bhsd": {"lengths_q": [70, 70], "lengths_kv": [40, 40], "strided": True},
}


SHOWN = (("bshd", "head"), ("thd", "block"), ("thd", "batch_head"), ("bhsd", "tensor"))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [
        pytest.param(fmt, granularity, marks=() if (fmt, granularity) in SHOWN else wide)
        for fmt in FORMATS
        for granularity in quantization.GRANULARITIES
    ],
)
def test_the_pass_is_torchs_cast_to_the_bit(fmt: str, granularity: str, device: str) -> None:
    """q, k and v together, of different lengths, heads and head dims, with a NaN and an infinity each; and q alone."""
    given = make_inputs(fmt, **FORMATS[fmt], head_dim_qk=96, head_dim_v=48, dtype=BF16, outliers=True, device=device)
    rows = 64 if granularity == "block" else 0
    tensors = tensors_of(given)
    assert triton_backend.can_quantize(given.q)
    for some, dtype in ((tensors, E4M3), (tensors[:1], E5M2)):
        got, want = (module.quantize(some, dtype, granularity, rows, 1) for module in (triton_backend, quantization))
        for data, exact in zip(got[0], want[0], strict=True):
            assert same_bits(data, exact)
            assert int(data.float().isnan().sum()) == 2
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
        assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_delayed_scaling_notes_the_amax_while_it_casts(fmt: str, device: str) -> None:
    given = make_inputs(fmt, **FORMATS[fmt], head_dim_qk=32, head_dim_v=32, dtype=BF16, device=device)
    for granularity, heads in (("head", (4, 2, 2)), ("tensor", (1, 1, 1))):
        scales = [torch.arange(1, n + 1, device=device, dtype=torch.float32) * 100 for n in heads]
        tensors = tensors_of(given, scales)
        # A head's earlier amax stays if it is larger, and the rows of earlier steps always stay.
        noted = [torch.tensor([[0.0, 1e4] * n, [0.5] * 2 * n], device=device)[:, :n].contiguous() for n in heads]
        found = []
        for module in (triton_backend, quantization):
            histories = [t.clone() for t in noted]
            noting = [t._replace(history=history) for t, history in zip(tensors, histories, strict=True)]
            data, descales, amax = module.quantize(noting, E4M3, granularity, 0, 0)
            found.append((*data, *descales, amax, *histories))
            assert torch.equal(torch.cat(histories, 1)[0], torch.maximum(torch.cat(noted, 1)[0], amax))
            assert all(bool((history[1] == 0.5).all()) for history in histories)
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_a_cast_saturates_and_rounds_to_even(device: str) -> None:
    """Delayed scaling by 1: every bf16 number becomes torch's cast if the cast does not overflow."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(BF16).view(1, 1024, 2, 32).to(device)
    scale = torch.ones(1, device=device)
    for dtype in (E4M3, E5M2):
        (got,), _, _ = triton_backend.quantize([Unquantized(x, "bshd", None, None, 1024, scale)], dtype, "tensor", 0, 0)
        largest = quantization.LARGEST[dtype]
        want = torch.where(x.isfinite(), x.float().clamp(-largest, largest), torch.nan).to(dtype)
        assert same_bits(got, want)


@pytest.mark.parametrize(
    "head_dim", [96, pytest.param(256, marks=pytest.mark.slow), *(pytest.param(dim, marks=wide) for dim in (32, 80, 128, 192))]
)
def test_rotation(head_dim: int, device: str) -> None:
    given = make_inputs("bshd", lengths_q=[70], head_dim_qk=head_dim, head_dim_v=32, dtype=BF16, device=device)
    matrix = quantization.rotation_matrix(head_dim, given.q.device)
    assert torch.allclose(matrix @ matrix.T, torch.eye(head_dim, device=device), atol=1e-6)
    tensors = [Unquantized(getattr(given, name), "bshd", None, None, 70, None, name != "v") for name in "qkv"]
    for granularity, rows in (("head", 0), ("block", 64)):
        got, want = (module.quantize(tensors, E4M3, granularity, rows, 0) for module in (triton_backend, quantization))
        for a, b in zip(got[0], want[0], strict=True):
            # a sum of products that rounds differently may fall on the other side of a boundary of E4M3
            assert float((a.float() != b.float()).float().mean()) < 0.01
        assert torch.equal(got[0][2].float(), want[0][2].float())
    (q, k, _), descales, _ = triton_backend.quantize(tensors, E4M3, "head", 0, 0)
    rotated = [(t.float() * descale.view(1, 1, -1, 1)).to(BF16) for t, descale in zip((q, k), descales, strict=False)]
    for back, x in zip(unrotate(*rotated), (given.q, given.k), strict=True):
        assert float((back.float() - x.float()).norm() / x.float().norm()) < 0.05


def check_compiled(architectures: tuple[int, ...], head_dims: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """Wide rotations may spill, because matrix instructions take registers. No other kernel spills or has such instructions."""
    requests, names = [], []
    for head_dim in head_dims:
        given = make_inputs("thd", lengths_q=[64, 64], head_dim_qk=head_dim, head_dim_v=head_dim, dtype=BF16)
        for what, rotation, granularity, scales in (
            ("plain", False, "head", (None,) * 3),
            ("rotated", True, "head", (None,) * 3),
            ("blocks", False, "block", (None,) * 3),
            ("delayed", False, "tensor", (torch.ones(1),) * 3),
            ("unrotate", True, "", ()),
        ):
            if what not in kinds:
                continue
            for sm in architectures:
                with pretended_device(sm, 132), recorded_launches() as launches:
                    if what == "unrotate":
                        unrotate(given.q, given.k)
                    else:
                        rows = 128 if granularity == "block" else 0
                        tensors = tensors_of(given, scales, rotation)
                        if what == "delayed":
                            tensors = [t._replace(history=torch.zeros(4, 1)) for t in tensors]
                        triton_backend.quantize(tensors, E4M3, granularity, rows, 0)
                requests += [request_for(launch, sm) for launch in launches]
                names += [(what, head_dim, sm) for _ in launches]
    for name, report in zip(names, compile_sound(requests), strict=True):
        what, head_dim, sm = name
        rotates = what in ("rotated", "unrotate")
        spills = 0 if not rotates else 32 if sm in (90, 100) or head_dim <= 128 else 512
        assert report.spill_store_bytes <= spills, f"{name}: {report}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm], f"{name}: {report}"
        assert set(report.matrix_instructions) == ({MATRIX_INSTRUCTION[sm]} if rotates else set()), f"{name}: {report}"


MATRIX_INSTRUCTION = {89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


@pytest.mark.slow
def test_compiled() -> None:
    check_compiled((90,), (128,), ("plain", "rotated"))


@wide
def test_compiled_for_all() -> None:
    check_compiled((89, 90, 100, 120), (32, 64, 96, 128, 192, 256), ("plain", "rotated", "blocks", "delayed", "unrotate"))


@pytest.mark.parametrize(("fmt", "in_reverse"), [("bshd", False), ("thd", False), ("thd", True)])
def test_transposed_copies(fmt: str, in_reverse: bool, device: str) -> None:
    lengths = [70, 0, 5, 33]
    given = make_inputs(fmt, lengths_q=lengths, padding=True, gap=3, in_reverse=in_reverse, head_dim_qk=48, device=device)
    x = given.q.to(E4M3)
    copy = transpose_tokens(x, given.cu_seqlens_q, given.cu_seqlens_q_padded, given.max_seqlen_q or 0)
    assert given.cu_seqlens_q is not None
    starts = (given.cu_seqlens_q if given.cu_seqlens_q_padded is None else given.cu_seqlens_q_padded).tolist()
    for b, n in enumerate(given.cu_seqlens_q.diff().tolist()):
        rows = x[starts[b] :] if fmt == "thd" else x[b]
        before = int(given.cu_seqlens_q[b])  # because sequences follow one another, whatever the order of their slots
        columns = copy[:, :, (before + 16 * b) // 16 * 16 :] if fmt == "thd" else copy[b]
        assert torch.equal(columns[:, :, :n].float(), rows[:n].permute(1, 2, 0).float())
        assert not columns[:, :, n : -(-n // 16) * 16].float().any()


MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")


@pytest.mark.sample
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
        fmt, lengths_q=lengths(37, 0, 5, 60), lengths_kv=lengths(60, 9, 0, 33), padding=True, gap=3, dtype=BF16, device=device
    )
    check(given, granularity, attn_mask_type=mask)


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 80), *(pytest.param(dims, marks=wide) for dims in ((16, 48), (128, 128), (192, 128), (128, 192), (256, 256)))],
    ids=str,
)
def test_head_dims(dims: tuple[int, int], device: str) -> None:
    given = make_inputs(
        lengths_q=lengths(40), lengths_kv=lengths(70), head_dim_qk=dims[0], head_dim_v=dims[1], dtype=BF16, device=device
    )
    check(given, "block", E5M2, attn_mask_type="causal")


@pytest.mark.slow
def test_gradients_in_float32_round_to_those_in_16_bits(device: str) -> None:
    given = make_inputs("thd", lengths_q=lengths(37, 5), lengths_kv=lengths(70, 9), padding=True, gap=3, dtype=BF16, device=device)
    spec, x = make_fp8_call(given, "block", attn_mask_type="padding_causal")
    out, lse, _ = triton_backend.forward(spec, x)
    for backend in (triton_backend, eager_backend):
        wanted, found = (
            backend.backward(spec._replace(results=Results(fp32=fp32)), x, out, lse, make_dout(given), None)
            for fp32 in ("none", "dqkv")
        )
        for got, want in zip(found[:3], wanted[:3], strict=True):
            assert got.dtype is torch.float32
            assert torch.equal(got.to(BF16), want)
            assert (got != want).any()


@pytest.mark.slow
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


@pytest.mark.sample
@pytest.mark.parametrize(
    "feature", ["window", "pre_scale_bias and a sink", "post_scale_bias and softcap", "alibi and dropout", "score_mod"]
)
def test_features(feature: str, device: str) -> None:
    given = make_inputs(lengths_q=lengths(40), lengths_kv=lengths(70), dtype=BF16, device=device)
    check(given, "block" if "bias" in feature else "head", **_features(device)[feature])


@pytest.mark.slow
def test_captures_get_gradients(device: str) -> None:
    table = torch.randn(4, device=device, requires_grad=True)
    mods = trace_mods(lambda s, b, h, i, j: s + table[h] * (i - j), None)
    given = make_inputs(lengths_q=lengths(40), lengths_kv=lengths(70), dtype=BF16, device=device)
    check(given, mods=mods)


@pytest.mark.slow
def test_block_mask(device: str) -> None:
    sq, skv = lengths(60, 70)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, sq, skv, device=device, BLOCK_SIZE=32)
    mods = trace_mods(None, mask.mask_mod)
    given = make_inputs(lengths_q=[sq, sq], lengths_kv=[skv, skv], dtype=BF16, device=device)
    check(given, "block", mods=mods, blocks=block_lists(mask, 2, 4, sq, skv, mask.kv_indices.device))


def test_tiles_past_the_end_have_no_factor(device: str) -> None:
    """The mask's block goes on behind the two blocks of scales of k and v, and NaN is in memory there."""
    sq, skv = 200, 110
    mask = create_block_mask(lambda b, h, i, j: i % 3 != j % 5, None, None, sq, skv, device=device, BLOCK_SIZE=256)
    q, k, v = (torch.randn(1, n, 1, 64, device=device).to(BF16).requires_grad_() for n in (sq, skv, skv))
    with guarded_allocations():
        out = attention(q, k, v, block_mask=mask, fp8_recipe=fp8.Recipe(granularity="block", block_rows=64), backend="triton")
        gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(t.isfinite().all() for t in (out, *gradients))


@pytest.mark.slow
def test_repeated_runs_are_equal_to_the_bit(device: str) -> None:
    given = make_inputs("thd", lengths_q=lengths(37, 70), gap=3, dtype=BF16, device=device)
    for a, b in zip(*(check(given, "block", attn_mask_type="padding_causal") for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_outliers(device: str) -> None:
    """Scores far apart: weights of 0 and 1, and values that saturate."""
    given = make_inputs(lengths_q=lengths(40), lengths_kv=lengths(70), dtype=BF16, outliers=True, device=device)
    check(given, "head", attn_mask_type="causal_bottom_right")


@pytest.mark.parametrize("which", ["q", "dout"])
def test_nan_stays_in_its_row(which: str, device: str) -> None:
    """A NaN in a row of q or dout reaches that row's results, and no result of another sequence."""
    given = make_inputs("thd", lengths_q=lengths(20, 20), dtype=BF16, device=device)
    first = lengths(20)[0]
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
        return triton_backend.unsupported(spec._replace(**change), "forward") or ""

    assert "multiples of 16" in error({"head_dim_qk": 24})
    assert "FP8 matrix instructions need" in error({"device_type": "cuda", "capability": (8, 6)})
    assert isinstance(make_fp8_call(make_inputs(lengths_q=[3], dtype=BF16))[1], Operands)
