"""Kernels for forward-mode and second derivatives, in Triton's interpreter against fp64, and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn import attention, create_block_mask
from flexattn.block_mask import block_lists
from flexattn.dispatch import second_order, triton_second_order
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.problem import Along, Problem
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.second_order.launch import Incoming, Modified, Repeated, Wanted, attention_double_backward
from flexattn.kernels_triton.second_order.tiles import tiles_for
from flexattn.mods.second import second
from flexattn.mods.trace import trace_mods
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_dlse, make_dout, make_inputs, reference_attention
from tests.support.compiled_kernels import compile_sound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def hides(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx + q_idx) % 3 != 0


def shows_blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Hides half of the pairs of the first block of 16 keys, all of the second, and none of the third."""
    return (kv_idx // 16 % 3 != 1) & ((kv_idx >= 16) | (q_idx % 2 == 0) | (kv_idx == 3))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(DEVICE)


def scaled_by(table: Tensor, slope: float = 0.5) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.tanh(score) * table[h, kv_idx] + slope * table[h, q_idx] * score.square()

    return score_mod


def shifted_by(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: 1.5 * score + table[h, kv_idx]


DENSE: dict[str, Any] = {"lengths_q": [19, 19], "lengths_kv": [37, 37]}
PACKED: dict[str, Any] = {"qkv_format": "thd", "lengths_q": [19, 0, 5], "lengths_kv": [3, 3, 18], "gap": 3}
# name -> (inputs, options); a bias and a softmax_offset get tangents
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed, causal, sink": (PACKED, {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "learnable"}),
    "window, softcap, bias": (
        DENSE | {"qkv_format": "bhsd"},
        {"window_size": (9, 5), "softcap": 1.5, "bias_type": "pre_scale_bias"},
    ),
    "two parts, dropout, alibi": (
        DENSE | {"head_dim_qk": 40, "head_dim_v": 24},
        {"dropout_p": 0.25, "bias_type": "alibi", "softmax_type": "off-by-one"},
    ),
    "bias, mask_mod": (DENSE | {"qkv_format": "sbhd", "strided": True}, {"bias_type": "post_scale_bias", "mask_mod": hides}),
    "captures, window": (DENSE, {"score_mod": scaled_by, "window_size": (9, 5), "softcap": 3.0}),
    "captures, block mask": (PACKED | {"gap": 0}, {"score_mod": scaled_by, "block_mask": 16, "softmax_type": "learnable"}),
    "captures of first order, bias, dropout": (
        DENSE,
        {"score_mod": shifted_by, "bias_type": "post_scale_bias", "dropout_p": 0.25, "mask_mod": hides, "deterministic": True},
    ),
    "block mask, bias": (DENSE, {"block_mask": 16, "bias_type": "pre_scale_bias", "softcap": 2.0}),
    "packed, causal": (PACKED, {"attn_mask_type": "padding_causal_bottom_right"}),
    "two parts, window": (DENSE | {"head_dim_qk": 40, "head_dim_v": 24}, {"window_size": (9, 5)}),
    "shared bias": ({"lengths_q": [19] * 4, "lengths_kv": [37] * 4}, {"bias_type": "post_scale_bias"}),
    "padding, outliers": (
        {"lengths_q": [19, 0, 5], "lengths_kv": [21, 3, 0], "padding": True, "outliers": True},
        {"attn_mask_type": "padding_causal"},
    ),
}

BY_DEFAULT = {
    ("packed, causal, sink", "fp32"),
    ("window, softcap, bias", "fp32"),
    ("two parts, dropout, alibi", "fp32"),
}


def make(case: str, dtype: torch.dtype) -> tuple[AttentionSpec, Operands, list[Tensor | None], Tensor, Tensor]:
    """Returns spec, operands, tangents, dout and dlse."""
    given, options = CASES[case]
    inputs, options = make_inputs(**{"qkv_format": "bshd"} | given, dtype=dtype, device=DEVICE), {**options}
    mask_mod, score_mod, size = (options.pop(name, None) for name in ("mask_mod", "score_mod", "block_mask"))
    if options.get("bias_type") in ("pre_scale_bias", "post_scale_bias"):
        options["bias"] = randn(2 if case == "shared bias" else 1, 4, 19, 37).to(dtype)
    if options.get("bias_type") == "alibi":
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
    if options.get("softmax_type") == "learnable":
        options["softmax_offset"] = randn(4).float()
    if "dropout_p" in options:
        options["rng_state"] = torch.tensor([11, 13], device=DEVICE)
    if size is not None:
        sizes = max(given["lengths_q"]), max(given["lengths_kv"])
        mask, mask_mod = create_block_mask(shows_blocks, None, None, *sizes, DEVICE, BLOCK_SIZE=size), shows_blocks
        options["blocks"] = block_lists(mask, len(given["lengths_q"]), 4, *sizes, inputs.q.device)
    if score_mod is not None:
        score_mod = score_mod(randn(4, 37).float().requires_grad_())
    if score_mod is not None or mask_mod is not None:
        options["mods"] = trace_mods(score_mod, mask_mod)
    spec, x = make_call(inputs, **options)
    x = x._replace(mod_tensors=tuple(t.detach() for t in x.mod_tensors))
    along = [None if t is None else torch.where(t.isnan(), t, randn(*t.shape).to(t.dtype)) for t in second_order.inputs(x)]
    return spec, x, along, make_dout(inputs), make_dlse(inputs)


def mod_of(spec: AttentionSpec, along: Any, wanted: list[bool]) -> second_order.SecondMod | None:
    if spec.mods is None or spec.mods.score is None:
        return None
    return second(spec.mods.text, tuple(t is not None for t in along[5:]), tuple(wanted[5:]))


def results(spec: AttentionSpec, x: Operands, along: Any, dout: Tensor, dlse: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the results of the plain operations in `dtype`."""
    spec = spec._replace(dtype=dtype)

    def cast(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.nan_to_num(0.0).to(dtype)

    x = x._replace(**{name: cast(getattr(x, name)) for name in ("q", "k", "v", "bias", "softmax_offset")})
    x = x._replace(mod_tensors=tuple(t.to(dtype) for t in x.mod_tensors))
    wanted = [t is not None for t in along]
    found = second_order.double_backward(spec, x, cast(dout), cast(dlse), [cast(t) for t in along], wanted)
    return named(found.ddout, found.ddlse, found.inputs)


def named(out: Tensor, lse: Tensor, inputs: Any) -> dict[str, Tensor]:
    names = ("out", "lse", "q", "k", "v", "bias", "softmax_offset", "capture")
    return {name: t for name, t in zip(names, (out, lse, *inputs), strict=False) if t is not None}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case}-{name}", marks=[] if (case, name) in BY_DEFAULT else [mark])
        for case in CASES
        for name, dtype, mark in (("fp32", torch.float32, pytest.mark.slow), ("bf16", torch.bfloat16, pytest.mark.exhaustive))
    ],
)
def test_kernels_equal_the_formulas_in_fp64(case: str, dtype: torch.dtype) -> None:
    spec, x, along, dout, dlse = make(case, dtype)
    lse = reference_attention(spec, x)[1].float()
    ref = results(spec, x, along, dout, dlse, torch.float64)
    eager = results(spec, x, along, dout, dlse, torch.float32)
    wanted = [t is not None for t in along]
    given, mod = triton_second_order.Given(lse, dout, dlse), mod_of(spec, along, wanted)
    first = triton_second_order.tangent(spec, x, lse, along, mod_of(spec, along, [False] * len(along)))
    found = triton_second_order.double_backward(spec, x, given, along, wanted, mod)
    got = named(found.ddout, found.ddlse, found.inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, (found.ddout, found.ddlse), strict=True))
    if spec.deterministic:
        again = triton_second_order.double_backward(spec, x, given, along, wanted, mod)
        assert all(a is b or torch.equal(a, b) for a, b in zip(found.inputs, again.inputs, strict=True))
    assert got.keys() == ref.keys()
    for name, t in got.items():
        atol = 3e-5 if dtype is torch.float32 else 1e-2
        scale = float(ref[name].abs().max().clamp_min(1.0))
        check_close(name, t, ref[name], eager[name], factor=GRADIENT_FACTOR, atol=atol * scale)


@pytest.mark.parametrize("case", ["packed, causal", pytest.param("two parts, window", marks=pytest.mark.slow)])
def test_a_double_backward_takes_a_forward_with_its_tangent(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of both replaces the one of the tangent. Here the formulas in fp64 compute its results."""
    spec, x, along, dout, dlse = make(case, torch.bfloat16)
    out, lse, max_logit = reference_attention(spec, x)[:3]
    exact = x._replace(**{name: getattr(x, name).nan_to_num(0.0).double() for name in "qkv"})
    tout, tlse = second_order.tangent(spec._replace(dtype=torch.float64), exact, [None if t is None else t.double() for t in along])
    joint = out.bfloat16(), lse.float(), max_logit, tout.bfloat16(), tlse.float()
    monkeypatch.setattr(triton_second_order, "joint", lambda *_: joint)
    monkeypatch.setattr(triton_second_order, "joint_unsupported", lambda *_: None)
    wanted = [t is not None for t in along]
    given = triton_second_order.Given(lse.float(), dout, dlse)
    with recorded_launches() as launches:
        triton_second_order.double_backward(spec, x, given, along, wanted, None)
    assert len(launches) == 2
    found = triton_second_order.double_backward(spec, x, given, along, wanted, None)
    assert found.ddout is joint[3]
    assert found.ddlse is joint[4]
    ref, eager = (results(spec, x, along, dout, dlse, dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, t in named(found.ddout, found.ddlse, found.inputs).items():
        check_close(name, t, ref[name], eager[name], factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("fmt", ["bshd", pytest.param("thd", marks=pytest.mark.slow)])
def test_attention_takes_them(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = (
        {"lengths_q": [9, 9], "lengths_kv": [9, 9]} if fmt == "bshd" else {"lengths_q": [9, 5], "lengths_kv": [7, 9]}
    )
    inputs = make_inputs(fmt, **given, device=DEVICE)
    names, tensors = ("q", "k", "v"), inputs[:3]
    along = tuple(randn(*t.shape).float() for t in tensors)
    others = {name: value for name, value in inputs._asdict().items() if name not in names and value is not None}
    calls: list[str] = []
    for name in ("tangent", "double_backward"):
        kernel = getattr(triton_second_order, name)

        def counted(*arguments: Any, name: str = name, kernel: Callable[..., Any] = kernel) -> Any:
            calls.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(triton_second_order, name, counted)

    def run(backend: str) -> Any:
        def loss(*qkv: Tensor) -> Tensor:
            return attention(*qkv, **others, attn_mask_type="padding" if fmt == "thd" else "causal", backend=backend).pow(3).sum()

        return torch.func.jvp(torch.func.grad(loss, (0, 1, 2)), tensors, along)

    wanted = run("eager")
    assert not calls
    torch.testing.assert_close(run("triton"), wanted, rtol=1e-3, atol=1e-3)
    assert {*calls} == {"tangent", "double_backward"}


def test_other_calls_take_the_formulas() -> None:
    spec, x, _, _, _ = make("window, softcap, bias", torch.float32)

    def reason(spec: AttentionSpec, x: Operands = x) -> str | None:
        return triton_second_order.unsupported(spec, x, True)

    assert reason(spec) is None
    assert x.bias is not None
    assert "that all keys share" in str(reason(spec, x._replace(bias=x.bias[..., :1])))
    assert "kv_indices" in str(reason(spec._replace(kv_lists=True)))
    assert "up to 256" in str(reason(spec._replace(head_dim_v=264)))
    assert "float64" in str(reason(spec._replace(dtype=torch.float64)))


def test_explain_names_the_kernels_of_derivatives() -> None:
    q = randn(1, 16, 2, 16).bfloat16()

    def told(**options: Any) -> str:
        details = str(flexattn.explain(q, q, q, **options).details)
        return details.partition("tangents and second derivatives: ")[2].partition("\n")[0]

    assert told(backend="eager") == "torch operations"
    assert told(backend="triton", bias=q.new_zeros(1, 1, 16, 16), bias_type="post_scale_bias") == "triton"
    assert told(backend="eager", fp8_recipe=flexattn.fp8.Recipe()) == ""


class _Reads(TorchDispatchMode):
    """Counts the operations that wait for the device, which a CUDA graph cannot contain."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func) in ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default")
        return func(*args, **kwargs or {})


def test_launches_wait_for_no_device() -> None:
    spec, x, along, dout, dlse = make("captures of first order, bias, dropout", torch.bfloat16)
    lse, wanted = torch.zeros(2, 4, 19, device=DEVICE), [t is not None for t in along]
    mod = mod_of(spec, along, wanted)
    with recorded_launches() as launches, _Reads() as reads:
        triton_second_order.double_backward(spec, x, triton_second_order.Given(lse, dout, dlse), along, wanted, mod)
        assert not reads.count
        torch.ones(1).item()
    assert reads.count == 1
    assert len(launches) == 6  # a tangent, k with v, q, the bias, two for captures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_in_a_cuda_graph() -> None:
    attend = functools.partial(attention, deterministic=True)
    q, *along = (randn(2, 64, 2, 64 + n).bfloat16()[..., :64].contiguous() for n in range(4))

    def run() -> tuple[Any, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, q, q)]
        gradients = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return *torch.func.jvp(attend, (q, q, q), tuple(along)), *torch.autograd.grad(gradients, leaves, along)

    wanted = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run()
    for t in found:
        t.detach().zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("is_repeated", [False, True])
def test_these_kernels_compile_without_a_block_mask(is_repeated: bool) -> None:
    """Without a block mask the kernels' loops are others, and Triton 3.6 refuses more than later releases."""
    x, sums = torch.zeros(1, 200, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 200)
    memory = Repeated(x, x, sums) if is_repeated else torch.zeros_like(x)
    call, along, tiles = Modified(Problem(x, x, x, softmax_scale=0.1)), Along(x, x, x), tiles_for(90, 64, 2, is_plain=True)
    with pretended_device(90, 132), recorded_launches() as launches:
        attention_double_backward(call, along, Incoming(sums, x), memory, Wanted(), tiles)
    for report in compile_sound([request_for(launch, 90) for launch in launches]):
        assert set(report.matrix_instructions) == {"HGMMA"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 72), (torch.bfloat16, 104), (torch.bfloat16, 256), (torch.float32, 128)]
)
def test_compiled(dtype: torch.dtype, dim: int, capability: int) -> None:
    inputs = make_inputs(lengths_q=[200], lengths_kv=[200], head_dim_qk=dim, head_dim_v=dim, dtype=dtype)
    mods = trace_mods(scaled_by(torch.randn(4, 200, requires_grad=True)), hides)
    mask = create_block_mask(hides, None, None, 200, 200, "cpu", BLOCK_SIZE=128)
    blocks = block_lists(mask, 1, 4, 200, 200, torch.device("cpu"))
    bias = torch.randn(1, 4, 200, 200, dtype=dtype)
    spec, x = make_call(
        inputs, attn_mask_type="causal", softcap=2.0, mods=mods, blocks=blocks, bias=bias, bias_type="post_scale_bias"
    )
    x = x._replace(mod_tensors=tuple(t.detach() for t in x.mod_tensors))
    along = list(second_order.inputs(x))
    wanted = [t is not None for t in along]
    out, lse, _ = reference_attention(spec, x, torch.float32)
    given = triton_second_order.Given(lse, out.to(dtype), None)
    with pretended_device(capability, 132), recorded_launches() as launches:
        triton_second_order.double_backward(spec, x, given, along, wanted, mod_of(spec, along, wanted))
    assert len(launches) == 5  # a tangent, k with v, q, the bias, the capture
    for report in compile_sound([request_for(launch, capability) for launch in launches]):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[capability]


@pytest.mark.parametrize("name", ["q", "bias", "tangent", "dout"])
def test_what_is_stored_negated_is_read_as_it_is(name: str) -> None:
    """The imaginary part of a conjugate is such a view, whose memory has the other sign."""
    shapes = {"q": (1, 19, 2, 16), "k": (1, 23, 2, 16), "tangent": (1, 19, 2, 16), "dout": (1, 19, 2, 16), "bias": (1, 2, 19, 23)}
    tensors = {name: randn(*shape).float() for name, shape in shapes.items()}

    def derivatives(t: dict[str, Tensor]) -> list[Tensor]:
        def call(q: Tensor, bias: Tensor) -> Tensor:
            return attention(q, t["k"], t["k"], bias=bias, backend="triton")  # type: ignore[no-any-return]

        inputs, along = (t["q"], t["bias"]), (t["tangent"], t["bias"].sin())
        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(call(*leaves), leaves, t["dout"], create_graph=True)
        return [*torch.func.jvp(call, inputs, along), *first, *torch.autograd.grad(first, leaves, along)]

    wanted = derivatives(tensors)
    found = derivatives(tensors | {name: torch._neg_view(tensors[name].neg())})
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
