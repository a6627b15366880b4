"""Logits of any size, from a bias, a score_mod or ALiBi: every kernel family has finite and right results, both ways."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import AuxRequest, attention
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.large_logits import LARGEST, LARGEST_OF_GRADIENTS, check_logits
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.kernels_triton.blackwell import backward as blackwell_backward
from flexattn.kernels_triton.blackwell import forward as blackwell_forward
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD
from flexattn.kernels_triton.hopper import backward as hopper_backward
from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.hopper import fp8_backward as hopper_fp8_backward
from flexattn.kernels_triton.hopper import fp8_backward_fused as hopper_fp8_fused
from flexattn.kernels_triton.hopper import fp8_forward as hopper_fp8_forward
from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.mods.trace import trace_mods
from flexattn.testing import GRADIENT_FACTOR, Inputs, check_close, make_call, make_inputs
from tests.common.test_split_kv import split_in
from tests.support.fp8_calls import BLOCK_ROWS, make_fp8_call
from tests.support.gluon_calls import without_gpu
from tests.support.hopper_fp8_calls import backward_of, fp8_call, run_backward, run_forward
from tests.support.large_logits import HEADS, HEADS_KV, SLOPES, Case, Rounding, check, make_case

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


def features_of(case: Case, how: str) -> dict[str, Any]:
    """Returns the arguments that make `attention` add case.added."""
    added = case.added
    if how == "alibi":
        slopes = torch.tensor(SLOPES, device=added.device)
        return {"bias_type": "alibi", "alibi_slopes": slopes, "bottom_right_diagonal": True}
    if how == "score_mod":
        return {"score_mod": lambda s, b, h, i, j: s + added[h, i, j]}
    if how == "replacing":
        return {"score_mod": lambda s, b, h, i, j: torch.where(added[h, i, j] != 0, added[h, i, j], s)}
    if how == "pre_scale_bias":
        return {"bias_type": how, "bias": (added / case.scale).clamp(-3.4e38, 3.4e38)[None].requires_grad_()}
    return {"bias_type": "post_scale_bias", "bias": added.clone()[None].requires_grad_()}


def run(case: Case, how: str, **more: Any) -> dict[str, Tensor]:
    """Forward and backward by the public API."""
    q, k, v = (t.detach().requires_grad_() for t in case[:3])
    features = features_of(case, how)
    out, lse = attention(q, k, v, backend="triton", return_lse=True, softmax_scale=case.scale, **features, **more)
    out.backward(case.dout)
    got = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if how == "post_scale_bias":
        got["dadded"] = features["bias"].grad[0]
    return got  # type: ignore[return-value]  # there are gradients


CASES = [
    ("hidden", "post_scale_bias"),
    ("hidden", "score_mod"),
    ("hidden", "replacing"),
    ("ladder", "post_scale_bias"),
    ("ladder", "score_mod"),
    ("alibi", "alibi"),
]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
def test_portable(kind: str, how: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = make_case(kind, dtype, 21, 75, 16, device)
    check(run(case, how), case, Rounding(dtype), replaces=how == "replacing")


def test_behind_a_band(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf before and after any value: a window's edges go through every block; some rows see nothing at all."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = make_case("ladder", torch.float32, 60, 45, 16, device)
    i, j = torch.arange(60, device=device)[:, None] - 15, torch.arange(45, device=device)
    band = {"attn_mask_type": "causal_bottom_right", "window_size": (20, 0)}
    check(run(case, "post_scale_bias", **band), case, Rounding(torch.float32), visible=(j <= i) & (j >= i - 20))


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "how"), [CASES[0], CASES[4]], ids=str)
def test_keys_split(kind: str, how: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a value hides all keys of a row, the result is the mean of all keys, however many each split has."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    combined = split_in(3, monkeypatch)
    case = make_case(kind, dtype, 7, 210, 16, device)
    check(run(case, how), case, Rounding(dtype))
    assert combined == [3]


def call_of(case: Case, how: str, dtype: torch.dtype) -> tuple[Inputs, AttentionSpec, Operands]:
    """Returns the spec and the operands of a backend."""
    lengths = {"lengths_q": [case.q.shape[1]], "lengths_kv": [case.k.shape[1]], "num_heads": HEADS, "num_heads_kv": HEADS_KV}
    dim = case.q.shape[-1]
    given = make_inputs(**lengths, head_dim_qk=dim, head_dim_v=dim, dtype=dtype, device=str(case.q.device))
    given = given._replace(q=case.q, k=case.k, v=case.v)
    features = features_of(case, how)
    if "score_mod" in features:
        features = {"mods": trace_mods(features["score_mod"], None, needs_grad=True)}
    features = {name: value.detach() if isinstance(value, Tensor) else value for name, value in features.items()}
    return given, *make_call(given, softmax_scale=case.scale, **features, return_max_logit=False)


def run_gluon(
    case: Case, how: str, forward: Callable[..., None], backwards: dict[str, Callable[..., None]], splits: int = 1
) -> dict[str, Tensor]:
    problem = triton_backend.to_problem(*call_of(case, how, case.q.dtype)[1:])
    out, lse = torch.full_like(case.q, float("nan")), torch.full((1, HEADS, case.q.shape[1]), float("nan"))
    forward(problem, out, lse, splits=splits)
    got = {"out": out, "lse": lse}
    for name, backward in backwards.items():
        gradients = [torch.full_like(t, float("nan")) for t in case[:3]]
        backward(Backward(problem, out, lse, case.dout, None, *gradients))
        got |= {f"{name} {of}": t for of, t in zip(("dq", "dk", "dv"), gradients, strict=True)}
    return got


def run_hopper(case: Case, how: str, splits: int = 1) -> dict[str, Tensor]:
    backwards: dict[str, Callable[..., None]] = {"split": hopper_backward.hopper_backward}
    if case.q.shape[-1] <= 128:
        backwards["one pass"] = hopper_fused.fused_backward
    return run_gluon(case, how, hopper_forward.hopper_forward, backwards, splits)


EMULATED = [
    ("hidden", "post_scale_bias", torch.float16, 64),
    ("hidden", "score_mod", torch.bfloat16, 64),
    ("ladder", "post_scale_bias", torch.bfloat16, 128),
    ("alibi", "alibi", torch.float16, 64),
]


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize(("kind", "how", "dtype", "dim"), EMULATED, ids=str)
def test_hopper(kind: str, how: str, dtype: torch.dtype, dim: int) -> None:
    case = make_case(kind, dtype, 70, 150, dim)
    for seed in (1, 2):
        with emulated(seed, hopper_forward, hopper_backward, hopper_fused) as reports:
            got = run_hopper(case, how)
        assert len(reports) == 4
        assert not any(report.bugs for report in reports.values())
        check(got, case, Rounding(dtype))


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize(("kind", "how", "dtype", "dim"), EMULATED, ids=str)
def test_blackwell(kind: str, how: str, dtype: torch.dtype, dim: int) -> None:
    case = make_case(kind, dtype, 70, 150, dim)
    backwards: dict[str, Callable[..., None]] = {"one pass": blackwell_backward.blackwell_backward}
    with emulated(1, blackwell_forward, blackwell_backward) as reports:
        got = run_gluon(case, how, blackwell_forward.blackwell_forward, backwards)
    assert len(reports) == 2
    assert not any(report.bugs for report in reports.values())
    check(got, case, Rounding(dtype))


@pytest.mark.slow
@without_gpu
def test_hopper_columns() -> None:
    """The kernel of dk and dv whose warpgroups divide the columns, at head dim 256."""
    case = make_case("hidden", torch.bfloat16, 40, 80, 256)
    with emulated(1, hopper_forward, hopper_backward) as reports:
        got = run_hopper(case, "post_scale_bias")
    assert not any(report.bugs for report in reports.values())
    check(got, case, Rounding(torch.bfloat16))


@pytest.mark.slow
@without_gpu
def test_hopper_keys_split() -> None:
    case = make_case("hidden", torch.bfloat16, 3, 300)
    with emulated(1, hopper_forward, hopper_backward, hopper_fused) as reports:
        got = run_hopper(case, "post_scale_bias", splits=3)
    assert not any(report.bugs for report in reports.values())
    check(got, case, Rounding(torch.bfloat16))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_part_of_the_keys(has_bias: bool, dtype: torch.dtype, device: str) -> None:
    """With (out, lse) of all keys, gradients of two parts sum to those of all keys, though a part's weights do not sum to 1."""
    case = make_case("hidden", dtype, 21, 75, 16, device)
    case = case._replace(added=case.added.clamp(min=-2.0 if has_bias else 0.0))
    whole = Problem(case.q, case.k, case.v, softmax_scale=case.scale, bias=case.added[None] if has_bias else None)
    out, lse = torch.empty_like(case.q), torch.empty(1, HEADS, 21, device=device)
    attention_forward(whole, out, lse)
    sums = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in zip(("dq", "dk", "dv"), case[:3], strict=True)}
    for keys in (slice(0, 32), slice(32, 75)):
        own = {"k": case.k[:, keys], "v": case.v[:, keys], "bias": None if whole.bias is None else whole.bias[..., keys]}
        gradients = [torch.empty_like(t) for t in (case.q, own["k"], own["v"])]
        part = dataclasses.replace(whole, **own, is_part=True)
        attention_backward(Backward(part, out, lse, case.dout, None, *gradients))
        sums["dq"] += gradients[0]
        sums["dk"][:, keys] = gradients[1]
        sums["dv"][:, keys] = gradients[2]
    check(sums, case, Rounding(dtype))


@pytest.mark.parametrize("how", ["portable", pytest.param("sm_90", marks=without_gpu)])
def test_a_part_whose_lse_is_large(how: str, device: str) -> None:
    """All keys of a part are hidden, of rows with other keys: probabilities are exp(logit - lse) with the given lse, so 0."""
    case = make_case("hidden", torch.bfloat16, 21, 75, device=device)
    lse = torch.full((1, HEADS, 21), -1e5, device=device)
    problem = Problem(case.q, case.k, case.v, softmax_scale=case.scale, bias=torch.full_like(case.added[None], -2e5), is_part=True)
    gradients = [torch.full_like(t, float("nan")) for t in case[:3]]
    call = Backward(problem, torch.zeros_like(case.q), lse, case.dout, None, *gradients)
    if how == "portable":
        attention_backward(call)
    else:
        with emulated(1, hopper_backward):
            hopper_backward.hopper_backward(call)
    assert not any(t.count_nonzero() for t in gradients)


def scaled_case(dtype: torch.dtype, scale: float, device: str) -> Case:
    """Returns a case of two heads whose exact logits are multiples of scale / 64, up to 9 times the scale."""
    case = make_case("hidden", dtype, 40, 75, 64, device)
    q, dout = case.q[:, :, :2], case.dout[:, :, :2]
    return case._replace(q=q, k=case.k[:, :, :1], v=case.v[:, :, :1], dout=dout, scale=scale)


def plain_call(case: Case, dtype: torch.dtype, backend: str, **more: Any) -> tuple[Tensor, ...]:
    """Returns out, lse and the gradients, with the tensors in this dtype."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in case[:3])
    out, lse = attention(q, k, v, backend=backend, return_lse=True, softmax_scale=case.scale, **more)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), case.dout.to(dtype))


@pytest.mark.sample("scale", "dtype")
@pytest.mark.parametrize("scale", [2.0**12, 2.0**22])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_logits_up_to_the_bound(dtype: torch.dtype, scale: float, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are right up to LARGEST, and backwards up to LARGEST_OF_GRADIENTS; beyond, float32's are."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = scaled_case(dtype, scale, device)
    exact, budget = (plain_call(case, of, "eager") for of in (torch.float64, dtype))
    largest = exact[1].abs().max()
    assert (largest < LARGEST_OF_GRADIENTS) == (scale < 2.0**22)
    assert LARGEST / 2 < largest < LARGEST or scale < 2.0**22
    got = plain_call(case, dtype, "triton")
    check_close("out", got[0], exact[0], budget[0])
    check_close("lse", got[1], exact[1], budget[1])
    if scale < 2.0**22 or dtype is torch.float32:
        check_close("dv", got[4], exact[4], budget[4], factor=GRADIENT_FACTOR)


@without_gpu
def test_plain_logits_up_to_the_bound_on_sm_90() -> None:
    """The maximum of this tile may lag behind, and float16 has the smallest range."""
    case = scaled_case(torch.float16, 2.0**22, "cpu")
    problem = Problem(*(t.contiguous() for t in case[:3]), softmax_scale=case.scale)
    out, lse = torch.empty(case.q.shape, dtype=case.q.dtype), torch.empty(1, 2, 40)
    with emulated(1, hopper_forward):
        hopper_forward.hopper_forward(problem, out, lse, tile=next(tile for tile in HOPPER_FORWARD.values() if tile.is_lazy))
    exact, budget = (plain_call(case, of, "eager") for of in (torch.float64, torch.float16))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plain_logits_beyond_the_bound(direction: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLEXATTN_CHECK=1 names the bound; a score_mod takes logits of any size."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = scaled_case(torch.bfloat16, 2.0**40 if direction == "forward" else 2.0**14, device)
    bound = {"forward": LARGEST, "backward": LARGEST_OF_GRADIENTS}[direction]
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    text = re.escape(f"accepted in a {direction} on the triton backend: up to {bound:.3g}")
    with pytest.raises(ValueError, match=text):
        plain_call(case, torch.bfloat16, "triton")
    exact, budget = (plain_call(case, dtype, "eager") for dtype in (torch.float64, torch.bfloat16))
    got = plain_call(case, torch.bfloat16, "triton", score_mod=lambda score, b, h, i, j: score * 1.0)
    check_close("out", got[0], exact[0], budget[0])
    check_close("dv", got[4], exact[4], budget[4], factor=GRADIENT_FACTOR)


def test_large_sinks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink below -2.3e38 counts as -inf; FLEXATTN_CHECK=1 names one that is too large."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    case = scaled_case(torch.bfloat16, 1.0, device)

    def call(value: float) -> tuple[Tensor, Tensor]:
        sinks = {"softmax_type": "learnable", "softmax_offset": torch.full((2,), value, device=device)}
        band = {"attn_mask_type": "causal_bottom_right"}  # hides all keys of the first queries of 40 over 30
        k, v = case.k[:, :30], case.v[:, :30]
        return attention(case.q, k, v, backend="triton", return_lse=True, **band, **(sinks if value != 0 else {}))  # type: ignore[no-any-return]

    for found, wanted in zip(call(-3e38), call(0.0), strict=True):
        assert torch.equal(found, wanted)
    assert (call(-3e38)[1] == float("-inf")).any()
    with pytest.raises(ValueError, match="a smaller softmax_scale, softmax_offset, q or k"):
        call(3e38)


@pytest.mark.parametrize(
    ("value", "is_fp8", "direction", "is_wrong"),
    [
        *((2.0**26, False, "forward", False), (2.0**26 + 8, False, "forward", True), (float("nan"), False, "forward", True)),
        *((2.0**22, True, "forward", False), (2.0**22 + 1, True, "forward", True), (float("-inf"), True, "forward", False)),
        *((-(2.0**16), False, "backward", False), (-(2.0**16) - 1, False, "backward", True)),
    ],
)
def test_what_a_check_of_logits_accepts(value: float, is_fp8: bool, direction: Direction, is_wrong: bool) -> None:
    inputs = make_inputs(lengths_q=[4], lengths_kv=[4], dtype=torch.bfloat16)
    spec, x = make_fp8_call(inputs) if is_fp8 else make_call(inputs)
    lse = torch.tensor([[[0.0, value]]])
    if is_wrong:
        with pytest.raises(ValueError, match="the logits of this call are so large that lse is"):
            check_logits(spec, x, lse, direction)
    else:
        check_logits(spec, x, lse, direction)
        check_logits(spec, x, lse[..., :0], direction)
    x.q.fill_(float("nan"))
    check_logits(spec, x, torch.tensor([float("nan")]), direction)  # with q's strides


E4M3 = torch.float8_e4m3fn


@pytest.mark.slow
@pytest.mark.sample("kind", "granularity")
@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize(("kind", "how"), [CASES[0], CASES[1], CASES[4]], ids=str)
def test_portable_fp8(kind: str, how: str, granularity: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = make_case(kind, torch.bfloat16, 21, 75, 32, device)
    given, spec, x = call_of(case, how, torch.bfloat16)
    features = {"bias_type": spec.bias_type, "bias": x.bias, "softmax_scale": case.scale, "return_max_logit": False}
    if how == "score_mod":
        features["mods"] = trace_mods(features_of(case, how)["score_mod"], None, needs_grad=True)
    spec, x = make_fp8_call(given, granularity, **features)
    assert all(torch.equal(descale, torch.full_like(descale, 2.0**-9)) for descale in x.descales)  # so that products are exact
    out, lse, _ = triton_backend.forward(spec, x)
    descale = x.descales[0].expand(1, HEADS, -1 if granularity == "block" else 1).contiguous()
    dout = (case.dout * 2.0**9).to(E4M3)
    gradients = triton_backend.backward(spec, x._replace(descales=(*x.descales, descale)), out, lse, dout, None)
    got = {"out": out, "lse": lse, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    assert BLOCK_ROWS < 75
    check(got, case, Rounding(torch.bfloat16, E4M3, E4M3))


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize(("kind", "how"), [CASES[0], CASES[1], CASES[4]], ids=str)
def test_hopper_fp8(kind: str, how: str) -> None:
    case = make_case(kind, torch.bfloat16, 70, 150)
    _, spec, x = call_of(case, how, torch.bfloat16)
    call = fp8_call(spec, x)
    with emulated(1, hopper_fp8_forward, hopper_fp8_backward, hopper_fp8_fused) as reports:
        out, lse = run_forward(call)
        got = {"out": out, "lse": lse}
        backward = backward_of(call, case.dout)._replace(out=out, lse=lse)
        for name, kernels in (("split", hopper_fp8_backward), ("one pass", hopper_fp8_fused)):
            gradients = run_backward(backward, kernels=kernels)
            got |= {f"{name} {of}": t for of, t in zip(("dq", "dk", "dv"), gradients, strict=True)}
    assert len(reports) == 4
    assert not any(report.bugs for report in reports.values())
    check(got, case, Rounding(torch.bfloat16, E4M3))


@pytest.mark.parametrize("how", ["portable", pytest.param("sm_90", marks=without_gpu)])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_descale_that_is_nan_shows(name: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    case = make_case("hidden", torch.bfloat16, 21, 75, device=device)
    given, spec, x = call_of(case._replace(added=torch.zeros_like(case.added)), "", torch.bfloat16)
    if how == "portable":
        fp8_spec, x = make_fp8_call(given, softmax_scale=case.scale, return_max_logit=False)
        x.descales["qkv".index(name)][0, 0] = float("nan")
        out, lse, _ = triton_backend.forward(fp8_spec, x)
    else:
        call = fp8_call(spec._replace(bias_type="no_bias", bias_dims=None), x._replace(bias=None))
        call.scales["qkv".index(name)].descale[0, 0] = float("nan")
        with emulated(1, hopper_fp8_forward):
            out, lse = run_forward(call)
    heads = 1 if name == "q" else HEADS // HEADS_KV
    assert out[:, :, :heads].isnan().all()
    assert not out[:, :, heads:].isnan().any()
    assert name == "v" or lse[:, :heads].isnan().all()


def test_a_key_hidden_by_infinity_in_a_row_of_the_lowest_number() -> None:
    """Its score is -inf and lse is the lowest number: their difference is -inf, not 0."""
    bias = torch.full((1, 2, 20, 20), torch.finfo(torch.float32).min)
    bias[..., 3] = -torch.inf
    bias[..., :5, :] = 0.0
    found = []
    for backend in ("triton", "eager"):
        tensors = [torch.randn(1, 20, 2, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
        call = {"bias": bias, "bias_type": "post_scale_bias", "backend": backend}
        out, aux = attention(*tensors, **call, return_aux=AuxRequest(column_sums=True))
        found.append([out.detach(), aux.column_sums, *torch.autograd.grad(out.sin().sum(), tensors)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
