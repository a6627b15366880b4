"""Mods inside the Triton kernels against the fp64 reference: every op, formats, masks and features; random mods."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn.dispatch import eager_backend, triton_backend
from flexattn.dispatch.mod_program import OPS
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, CompileRequest, request_for
from flexattn.kernels_triton.common import tiles as configs
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.mods import lowering
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.portable.score_gradients import capture_gradients
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
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
from tests.fuzz.check import NOTHING
from tests.support.compiled_kernels import compile_sound

GPU = torch.cuda.is_available()
HEADS = 4
LOOP_SPILLS = 0.08  # share of a loop's instructions, as in tests/common/test_tiles.py with every feature


def lengths(*values: int) -> list[int]:
    """Small for the interpreter, and past the largest tile for a compiled kernel; never a power of two, 0 stays 0."""
    return [value * 7 for value in values] if GPU else list(values)


def check(
    mods: tuple[Any, Any],
    device: str,
    call: dict[str, Any] | None = None,
    with_dlse: bool = True,
    again: bool = False,
    **inputs: Any,
) -> list[Tensor]:
    """Forward and backward of one call against the oracle; returns all results. again: they have the same bits in a second call."""
    given_inputs = make_inputs(device=device, **inputs)
    traced = trace_mods(*mods, needs_grad=True)
    spec, x = make_call(given_inputs, mods=traced, **(call or {}))
    for direction in ("forward", "backward"):
        assert triton_backend.unsupported(spec, direction) is None
    out, lse, max_logit = triton_backend.forward(spec, x)
    exact, same_dtype = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    for name, got, want, budget in zip(("out", "lse", "max_logit"), (out, lse, max_logit), exact, same_dtype, strict=True):
        check_close(name, got, want, budget)
    dout, dlse = make_dout(given_inputs), make_dlse(given_inputs) if with_dlse else None
    gradients = triton_backend.backward(spec, x, out, lse, dout, dlse)
    wanted, budgets = (reference_gradients(spec, x, dout, dlse, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    results = [out, lse, max_logit]
    for name, got, want, budget in zip(gradients._fields[:-1], gradients, wanted, budgets, strict=False):
        assert (got is None) == (want is None)
        if got is not None:
            # If g is a product, a compiler may fuse g - g into an addition that leaves its rounding.
            check_close(name, got, want, budget, factor=GRADIENT_FACTOR, atol=None if want.any() else NOTHING)
            results.append(got)
    captured = list(zip(gradients.dmod_tensors or (), wanted.dmod_tensors or (), budgets.dmod_tensors or (), strict=True))
    for got, want, budget in captured:
        check_close("dcaptured", got, want, budget, factor=GRADIENT_FACTOR)
        results.append(got)
    if again:
        second = triton_backend.backward(spec, x, out, lse, dout, dlse)
        found = [t for t in (*second[:-1], *(second.dmod_tensors or ())) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, results[3:], strict=True))
    return results


def rand(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device, dtype)


def softcap(device: str) -> tuple[Any, Any]:
    cap = 1.5
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap), None


def alibi(device: str) -> tuple[Any, Any]:
    slopes = rand(HEADS, device=device).abs()
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(), None


def relative_bias(device: str) -> tuple[Any, Any]:
    table = rand(HEADS, 41, device=device, dtype=torch.bfloat16)
    return lambda score, b, h, i, j: score + table[h, (j - i).clamp(-20, 20) + 20], None


def documents(device: str) -> tuple[Any, Any]:
    ids = torch.arange(600, device=device, dtype=torch.int32) // 11
    return None, lambda b, h, i, j: (ids[i] == ids[j]) & (i - j < 9)


def dense_bias_and_mask(device: str) -> tuple[Any, Any]:
    bias, hidden = rand(4, 1, 500, 500, device=device), rand(4, 500, device=device) > 1.0
    return lambda score, b, h, i, j: score * 1.5 + bias[b, 0, i, j], lambda b, h, i, j: ~hidden[b, j] | (h == 1)


def ignores_the_score(device: str) -> tuple[Any, Any]:
    return lambda score, b, h, i, j: ((i * 7 + j * 3) % 11) * 0.25 - h, None


MODS = [softcap, alibi, relative_bias, documents, dense_bias_and_mask, ignores_the_score]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("make_mods", MODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_and_packed(make_mods: Any, dtype: torch.dtype, device: str) -> None:
    formats = {torch.float32: ("thd", "sbhd"), torch.float16: ("bshd",), torch.bfloat16: ("bhsd_2thd",)}
    for fmt in formats[dtype]:
        check(
            make_mods(device),
            device,
            {"attn_mask_type": "padding_causal_bottom_right" if fmt == "thd" else "padding"},
            qkv_format=fmt,
            padding=True,
            gap=3,
            lengths_q=lengths(37, 0, 5),
            lengths_kv=lengths(50, 9, 0),
            dtype=dtype,
        )


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("make_mods", MODS)
def test_with_every_feature(make_mods: Any, device: str) -> None:
    (sq,), (skv,) = lengths(45), lengths(37)
    generator = torch.Generator().manual_seed(5)
    call = {
        "attn_mask_type": "padding_causal_bottom_right",
        "window_size": (25, 0),
        "bias_type": "post_scale_bias",
        "bias": torch.randn(1, 4, sq, 1, generator=generator).to(device),
        "softcap": 8.0,
        "softmax_type": "learnable",
        "softmax_offset": torch.randn(4, generator=generator).to(device),
        "dropout_p": 0.2,
        "rng_state": torch.tensor((-7777777777777, 31415926535), device=device),
    }
    check(
        make_mods(device),
        device,
        call,
        qkv_format="thd_2bhsd",
        gap=5,
        padding=True,
        strided=True,
        outliers=True,
        lengths_q=[sq, 0, sq // 2],
        lengths_kv=[skv // 3, 4, skv],
        head_dim_qk=40,
        head_dim_v=24,
    )


UNARY = {
    "abs": torch.abs, "ceil": torch.ceil, "cos": torch.cos, "cosh": torch.cosh, "erf": torch.erf, "erfc": torch.erfc,
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "floor": torch.floor, "neg": torch.neg, "relu": torch.relu,
    "round": torch.round,
    "sigmoid": torch.sigmoid, "sign": torch.sign, "sin": torch.sin, "sinh": torch.sinh, "tan": lambda x: torch.tan(x * 0.2),
    "tanh": torch.tanh, "trunc": torch.trunc, "log": lambda x: (x.abs() + 0.5).log(), "log2": lambda x: (x.abs() + 0.5).log2(),
    "log10": lambda x: (x.abs() + 0.5).log10(), "log1p": lambda x: x.abs().log1p(), "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.5).rsqrt(), "reciprocal": lambda x: (x.abs() + 0.5).reciprocal(),
    "isnan": lambda x: torch.isnan(x) | (x > 0), "isinf": lambda x: torch.isinf(x) | (x > 0),
    "_to_copy": lambda x: x.to(torch.int32).float(),
    "logical_not": lambda x: torch.logical_not(x > 0.5), "full": lambda x: x + torch.full((), 2.5),
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": lambda x, y: x / (y.abs() + 1), "maximum": torch.maximum,
    "minimum": torch.minimum, "pow": lambda x, y: (x.abs() + 0.5) ** (y * 0.1) + x**3,
    "where": lambda x, y: torch.where(x > y, x, y),
    "eq": lambda x, y: (x.round() == y).float(), "ne": lambda x, y: (x.round() != y).float(), "lt": lambda x, y: (x < y) * x,
    "le": lambda x, y: (x <= y) * x, "gt": lambda x, y: (x > y) * x, "ge": lambda x, y: (x >= y) * y,
    "clamp": lambda x, y: x.clamp(-0.5, 0.75) + y.clamp(min=x), "fmod": lambda x, y: torch.fmod(x, y.abs() + 0.75),
    "remainder": lambda x, y: torch.remainder(x, 2.5) + y, "logical_and": lambda x, y: torch.logical_and(x > 0, y > 0) * x,
    "logical_or": lambda x, y: torch.logical_or(x > 0, y > 0) * x, "logical_xor": lambda x, y: torch.logical_xor(x > 0, y > 0) * x,
}  # fmt: skip
INTEGER = {
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor, "bitwise_not": lambda i, j: ~i + j,
    "floor_divide": lambda i, j: (i - j) // 3 + (j - i) // -4 + i // (j - 300),
    "remainder": lambda i, j: (i - j) % 5 + i % (j - 300),
    "fmod": lambda i, j: torch.fmod(i - j, 7), "trunc": lambda i, j: torch.div(i - j, 4, rounding_mode="trunc"),
    "shift": lambda i, j: (i * 3 - j) ** 2 % 13, "wide": lambda i, j: (i * 1000003 * (j + 5) * 77777) % 17,
    "abs": lambda i, j: (i - j).abs().neg().sign(), "clamp": lambda i, j: (i - j).clamp(-3, 4).maximum(j - 30).minimum(i),
    "bool": lambda i, j: (i > j).int() + (i == j) * 2 - (~(j > 3)).long(), "int8": lambda i, j: (i * 37 + j).to(torch.int8),
    "signs": lambda i, j: (i - j) * (j - i + 3) % 7,
}  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("name", sorted(UNARY))
def test_unary_op(name: str, device: str) -> None:
    mod = lambda score, b, h, i, j: UNARY[name](score * 3) + (j - i) * 0.0625  # noqa: E731
    assert any(node.target is getattr(torch.ops.aten, name) for node in trace_mods(mod, None).program.score.nodes)
    check((mod, None), device, lengths_q=lengths(20), lengths_kv=lengths(35), num_heads=1, num_heads_kv=1)


@pytest.mark.sample
@pytest.mark.parametrize("name", sorted(BINARY))
def test_binary_op(name: str, device: str) -> None:
    column = rand(600, device=device)
    mod = lambda score, b, h, i, j: BINARY[name](score * 2, column[j]) + score  # noqa: E731
    assert any(node.target is getattr(torch.ops.aten, name) for node in trace_mods(mod, None).program.score.nodes)
    check((mod, None), device, lengths_q=lengths(20), lengths_kv=lengths(35), num_heads=1, num_heads_kv=1)


@pytest.mark.sample
@pytest.mark.parametrize("name", sorted(INTEGER))
def test_integer_op(name: str, device: str) -> None:
    mod = lambda score, b, h, i, j: score + INTEGER[name](i, j) * 0.125  # noqa: E731
    check((mod, None), device, lengths_q=lengths(20), lengths_kv=lengths(35), num_heads=1, num_heads_kv=1)


def test_every_op_of_a_program_is_lowered_and_tested() -> None:
    by_hand = {"index", "full", "_to_copy", "clamp"}
    assert set(OPS) <= set(lowering.OPS) | by_hand
    tested = {*UNARY, *BINARY, *INTEGER, "index", "bitwise_not"}
    assert set(OPS) <= tested, set(OPS) - tested


# Random mods: expressions over the score, the indices and reads; they are smooth if a gradient flows.
LEAVES = [
    "score",
    "column[j]",
    "row[b, h, i]",
    "table[h, (i - j) % 9]",
    "scale",
    "(i - j).abs() * 0.05",
    "torch.full((), 0.75)",
    "(h + 1)",
]
NODES = [
    "({0} + {1})", "({0} - {1})", "({0} * {1})", "torch.tanh({0})", "torch.sigmoid({0}) * {1}", "{0} / ({1} * {1} + 1)",
    "torch.where(i >= j, {0}, {1})", "torch.where((i + b) % 3 == h, {0}, {1} - 1)", "torch.sin({0})", "torch.exp(-({0}) * ({0}))",
    "torch.sqrt(({0}) * ({0}) + 0.5)", "torch.nn.functional.softplus(torch.tanh({0}))", "({0} + 2.0 * ((j // 3) & 1))",
]  # fmt: skip
expressions = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.builds(lambda node, x, y: node.format(x, y), st.sampled_from(NODES), inner, inner),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=40 if GPU else 4, deadline=None)
@given(expressions)
def test_random_mods(expression: str) -> None:
    device = "cuda" if GPU else "cpu"
    scope: dict[str, Any] = {"torch": torch, "scale": 0.8, "column": rand(600, device=device)}
    scope |= {"row": rand(2, HEADS, 600, device=device), "table": rand(HEADS, 9, device=device)}
    scope["mod"] = eval(f"lambda score, b, h, i, j: {expression} + 0.0 * j", scope)
    call = {"attn_mask_type": "padding_causal"}
    check((scope["mod"], None), device, call, padding=True, gap=2, lengths_q=lengths(30, 7), lengths_kv=lengths(21, 33))


@pytest.mark.filterwarnings("error:tl.where")
def test_ops_of_constants(device: str) -> None:
    """A kernel has a constant as a number, which has no sign function, no conversion and no rounding to 16 bits."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seven, two_and_a_half = torch.full((), 7, device="cpu"), torch.full((), 2.5, device="cpu")
        score = torch.where((seven > 2) ^ (kv_idx > 3), score * torch.full((), 1 / 3, dtype=torch.bfloat16, device="cpu"), score)
        return (
            score * torch.sign(-two_and_a_half) + kv_idx * torch.sign(seven) / 8 + q_idx * two_and_a_half.to(torch.int64) * kv_idx
        )

    check((mod, None), device, lengths_q=lengths(5), lengths_kv=lengths(7))


def test_infinities_past_the_last_query_do_not_reach_the_gradient_of_a_sink(device: str) -> None:
    """A temperature for each query is read as 0 past the end, where the score is infinite or NaN."""
    temperatures = 1 + rand(*lengths(7), device=device).abs()
    sink = {"softmax_type": "learnable", "softmax_offset": rand(HEADS, device=device)}
    sizes = {"lengths_q": lengths(7), "lengths_kv": lengths(40), "dtype": torch.float32}
    check((lambda score, b, h, i, j: score / temperatures[i], None), device, sink, **sizes)


def test_a_power_of_0_is_a_tile(device: str) -> None:
    check((lambda score, b, h, i, j: score**0, None), device, lengths_q=lengths(5), lengths_kv=lengths(7))
    check((lambda score, b, h, i, j: score * (j**0 + 1), None), device, lengths_q=lengths(5), lengths_kv=lengths(7))


def test_infinities_where_nothing_is_visible_stay_there(device: str) -> None:
    """log(0) and 1/0 under the mask, in rows past the end and in their derivatives, reach no result."""
    weight, column = torch.tensor([0.1], device=device).requires_grad_(), rand(300, device=device).requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score / (i - j) + torch.log(score.abs() * (i - j)) * weight[0] + column[j] / (i - j)

    given_inputs = make_inputs("thd", lengths_q=lengths(20, 9), gap=2, device=device)
    traced = trace_mods(score_mod, lambda b, h, i, j: i > j, needs_grad=True)
    spec, x = make_call(given_inputs, mods=traced, attn_mask_type="padding")
    for backend in (triton_backend, eager_backend):
        out, lse, _ = backend.forward(spec, x)
        gradients = backend.backward(spec, x, out, lse, make_dout(given_inputs), None)
        assert gradients.dmod_tensors is not None
        assert all(t.isfinite().all() for t in (out, *gradients[:3], *gradients.dmod_tensors))
        assert gradients.dq.any()
        assert all(t.any() for t in gradients.dmod_tensors)


def test_no_two_mods_share_a_compiled_kernel(device: str) -> None:
    """Triton keeps a kernel under the text of its constants, so that text must determine the mod."""
    texts = []
    for factor in (2, 3, 2):
        traced = trace_mods(lambda score, b, h, i, j: score * factor, lambda b, h, i, j: i > factor * j, needs_grad=True)  # noqa: B023
        mods, _ = triton_backend._lowered(traced.program, (), True)
        texts.append([str(mods), *(function.__name__ for function in (mods.score, mods.gradient, mods.mask))])
    assert all(a != b for a, b in zip(texts[0], texts[1], strict=True))
    assert texts[0][1:] == texts[2][1:]


def test_the_source_is_readable(device: str) -> None:
    slopes = rand(HEADS, device=device)
    traced = trace_mods(lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score * slopes[h], -math.inf), None)
    captures = [(c.name, c.dtype, c.ndim) for c in traced.program.captures]
    function = lowering.lower(
        traced.program.score, "score_mod", ("score", "b", "h", "q_idx", "kv_idx"), lowering.layouts(captures, traced.tensors)
    )
    assert lowering.source_of(function) == "\n".join(
        [
            "@triton.jit",
            f"def {function.__name__}(score, b, h, q_idx, kv_idx, captures):",
            "    slopes = captures[0]",
            "    slopes_size0 = mod_math.read_size(captures[1])",
            "    ge = q_idx >= kv_idx",
            "    slopes_value = tl.load(slopes + h, mask=(h < slopes_size0), other=0.0)",
            "    mul = score * slopes_value",
            '    where = tl.where(ge, mul, float("-inf"))',
            "    return where",
            "",
        ]
    )


def with_gradients(device: str) -> tuple[Any, Any]:
    """Captures of every rank, read once and more, at indices of each kind; all need gradients, one of them in vain."""
    cap = torch.tensor(2.0, device=device).requires_grad_()
    slopes, table = (rand(*shape, device=device).requires_grad_() for shape in ((HEADS,), (HEADS, 21)))
    column = rand(4, 500, device=device).requires_grad_()
    dense = rand(1, HEADS, 500, 500, device=device, dtype=torch.bfloat16).mT.requires_grad_()
    unused = rand(3, device=device).requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        score = cap * torch.tanh(score / cap) - slopes[h] * (i - j).abs() * 0.01 + dense[0, h, i, j]
        score = score + table[h, (i - j).clamp(-10, 10) + 10] * table[0, 3] + column[b, j] + column[b, -1 - i // 2] * score
        return score + torch.round(unused[0])

    return score_mod, None


@pytest.mark.sample
@pytest.mark.parametrize(("dtype", "deterministic"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_gradients_of_captures(dtype: torch.dtype, deterministic: bool, device: str) -> None:
    call = {
        "attn_mask_type": "padding_causal",
        "dropout_p": 0.25,
        "rng_state": torch.tensor((8, 6), device=device),
        "softcap": 9.0,
        "deterministic": deterministic,
    }
    inputs: dict[str, Any] = {"qkv_format": "thd", "gap": 2, "lengths_q": lengths(0, 37), "lengths_kv": lengths(4, 35)}
    results = check(with_gradients(device), device, call, again=deterministic, **inputs, dtype=dtype)
    assert len(results) == 6 + 6


def test_infinite_gradients_of_captures_are_not_hidden(device: str) -> None:
    weights = torch.tensor([0.0, 1.0], device=device).requires_grad_()
    given_inputs = make_inputs(lengths_q=lengths(9), device=device)
    traced = trace_mods(lambda score, b, h, i, j: score * weights[1].sqrt() + weights[0].sqrt() * j, None, needs_grad=True)
    for deterministic in (False, True):
        spec, x = make_call(given_inputs, mods=traced, deterministic=deterministic)
        out, lse, _ = triton_backend.forward(spec, x)
        gradients = triton_backend.backward(spec, x, out, lse, make_dout(given_inputs), None)
        assert gradients.dmod_tensors is not None
        assert not gradients.dmod_tensors[0][0].isfinite()


def test_deterministic_gradients_of_captures_do_not_overflow(device: str) -> None:
    """Each tile adds the same number to one element, and the sum of all of them just fits its range."""
    t = torch.zeros((), device=device).requires_grad_()
    given_inputs = make_inputs(lengths_q=lengths(70), num_heads=2, num_heads_kv=2, device=device)
    traced = trace_mods(lambda score, b, h, i, j: score + t, None, needs_grad=True)
    spec, x = make_call(given_inputs, mods=traced, deterministic=True)
    out, lse, _ = triton_backend.forward(spec, x)
    gradients = triton_backend.backward(spec, x, out, lse, torch.zeros_like(out), torch.ones_like(lse))
    assert gradients.dmod_tensors is not None
    torch.testing.assert_close(gradients.dmod_tensors[0], torch.tensor(float(lse.numel()), device=device))


def requests(make_mods: Any, sm: int, head_dim: int) -> list[CompileRequest]:
    """Every kernel of a call, with the tiles that the device would use."""
    given_inputs = make_inputs(
        lengths_q=[64, 64], padding=True, gap=1, head_dim_qk=head_dim, head_dim_v=head_dim, dtype=torch.bfloat16
    )
    traced = trace_mods(*make_mods("cpu"), needs_grad=True)
    spec, x = make_call(given_inputs, mods=traced, attn_mask_type="padding_causal", return_max_logit=False)
    problem = triton_backend.to_problem(spec, x)
    lse, (dq, dk, dv, dout, out) = torch.zeros(2, HEADS, 65), (torch.zeros_like(t) for t in (x.q, x.k, x.v, x.q, x.q))
    captured = [torch.zeros_like(t) for t in x.mod_tensors if t.requires_grad]
    captured = captured[: len(traced.program.added_to)]
    with recorded_launches() as launches:
        attention_forward(problem, out, lse, tile=problem.tile(configs.FORWARD, sm))
        tiles = (problem.tile(configs.DQ, sm), problem.tile(configs.DKDV, sm))
        attention_backward(Backward(problem, out, lse, dout, None, dq, dk, dv, dcaptures=captured), *tiles)
        if captured:
            statistics = (*torch.zeros(3, *lse.shape), torch.zeros(1, dtype=torch.int32), lse)
            tile = problem.tile(configs.BIAS_GRADIENT, sm)
            for deterministic in (False, True):
                capture_gradients(problem, statistics, dout, captured, deterministic, tile)
    return [request_for(launch, sm) for launch in launches]


def check_compiled(cases: list[tuple[Any, int, int]]) -> None:
    wanted = [request for case in cases for request in requests(*case)]
    for request, report in zip(wanted, compile_sound(wanted), strict=True):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[request.sm], request
        assert report.loop_spill_share <= LOOP_SPILLS, f"{request}: {report.loop_spill_share:.1%}"
        if request.sm == 90 and "capture" not in request.kernel and request.constexprs["META"].BLOCK_M >= 64:
            assert report.matrix_instructions.keys() == {"HGMMA"} or "dkdv" in request.kernel, request


@pytest.mark.slow
def test_compiled_ahead_of_time() -> None:
    check_compiled([(with_gradients, 90, 64)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_every_mod_compiled_ahead_of_time(sm: int) -> None:
    check_compiled([(make_mods, sm, head_dim) for make_mods in (*MODS, with_gradients) for head_dim in (64, 128, 256)])


# As in tests/runtime/test_recompile.py: a driver that names a GPU and launches nothing, in a process without the interpreter.
COUNT_COMPILATIONS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class NoGpu:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(NoGpu())

from flexattn import create_block_mask
from flexattn.block_mask import block_lists
from flexattn.dispatch import eager_backend, triton_backend
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.compiler import options_of
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.common.problem import Backward
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_inputs

TILE = Tile(32, 32, 4, 1)

def run(batch, heads, length, scale, with_blocks):
    table = torch.zeros(batch, heads, length, requires_grad=True)
    ids = torch.zeros(length, dtype=torch.int32)
    mask_mod = lambda b, h, i, j: ids[i] == ids[j]
    traced = trace_mods(lambda score, b, h, i, j: score * scale + table[b, h, j], mask_mod, needs_grad=True)
    given = make_inputs(lengths_q=[length] * batch, num_heads=heads, num_heads_kv=heads)
    blocks = None
    if with_blocks:
        mask = create_block_mask(mask_mod, 1, 1, length, length, "cpu", 32)
        blocks = block_lists(mask, batch, heads, length, length, torch.device("cpu"))
    spec, x = make_call(given, mods=traced, blocks=blocks)
    problem = triton_backend.to_problem(spec, x)
    lse = torch.zeros(batch, heads, length)
    with recorded_launches() as launches:
        attention_forward(problem, torch.zeros_like(x.q), lse, tile=TILE)
        gradients = [torch.zeros_like(t) for t in (x.q, x.k, x.v)]
        attention_backward(Backward(problem, x.q, lse, x.q, None, *gradients, dcaptures=[table.detach()]), TILE, TILE)
    for launch in launches:
        options = options_of(launch.tile.num_warps, launch.tile.num_stages)
        launch.kernel.warmup(*launch.arguments, grid=(1,), **options)
    return [launch.kernel for launch in launches]

for with_blocks in (False, True):
    kernels = run(2, 2, 64, 1.0, with_blocks)
    before = [len(kernel.device_caches[0][0]) for kernel in kernels]
    for case in [(1, 2, 48, 0.5), (3, 4, 161, 1.0), (1, 1, 16, 16.0), (16, 2, 1, 2.0)]:
        run(*case, with_blocks)
    after = [len(kernel.device_caches[0][0]) for kernel in kernels]
    print([kernel.__name__ for kernel in kernels], before, after)
    assert len(kernels) == 5 and all(before) and before == after
"""


@pytest.mark.slow
def test_no_size_or_value_of_a_capture_compiles_again(forked_python: Any) -> None:
    done = forked_python("-c", COUNT_COMPILATIONS)
    assert done.returncode == 0, done.stdout + done.stderr
