"""The forward with a tangent for sm_90, in the emulator or on a GPU, against fp64: its conditions, tiles and compiled kernels."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexattn import attention
from flexattn.bench.emulated import emulated
from flexattn.dispatch import second_order, triton_backend
from flexattn.dispatch.explain import explain
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.problem import Along, Problem
from flexattn.kernels_triton.common.tiles import HOPPER_TANGENT, HopperTile
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.hopper import conditions, tangent
from flexattn.kernels_triton.hopper.conditions import tangent_unsupported
from flexattn.kernels_triton.runtime.device import capability_of, pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, UNEVEN, check_results

HAS_HOPPER = torch.cuda.is_available() and capability_of(torch.device("cuda")) == 90
DEVICE = "cuda" if HAS_HOPPER else "cpu"
here = pytest.mark.skipif(torch.cuda.is_available() and not HAS_HOPPER, reason="no GPU of compute capability 9.0")
DENSE: dict[str, Any] = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
WINDOW = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (90, 0)}


def run(seed: int, call: dict[str, Any], dims: tuple[int, int], tile: HopperTile | None = None, **inputs: Any) -> None:
    """Compares the kernel, in the emulator or on a GPU, with the formulas."""
    given = make_inputs(**{"dtype": torch.bfloat16} | inputs, head_dim_qk=dims[0], head_dim_v=dims[1], device=DEVICE)
    spec, x = make_call(given, **call)
    generator = torch.Generator().manual_seed(seed)
    # A tangent of all keys alike shifts the tangents of a row's scores, which cancels in the results.
    along = [torch.randn(t.shape, generator=generator).to(t.dtype).to(DEVICE) for t in (x.q, x.k, x.v)]
    along[1] += 3 * torch.randn(x.k.shape[-1:], generator=generator).to(x.k.dtype).to(DEVICE)
    with contextlib.nullcontext({}) if HAS_HOPPER else emulated(seed, tangent) as reports:
        problem = triton_backend.to_problem(spec, x)
        (out, lse, _), tout = empty_outputs(spec, x), empty_outputs(spec, x)[0]
        rows = Along(*(as_bshd(t, fmt) for t, fmt in zip(along, (spec.q_format, spec.kv_format, spec.kv_format), strict=True)))
        memory = tangent.TangentResults(as_bshd(out, spec.q_format), as_bshd(tout, spec.q_format), lse)
        tlse = tangent.forward_with_tangent(problem, rows, memory, tile)
    assert len(reports) == (not HAS_HOPPER)
    for report in reports.values():
        assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    check_results(spec, x, out, lse)

    def wanted(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {name: getattr(x, name).nan_to_num(0.0).to(dtype) for name in "qkv"}
        return second_order.tangent(spec._replace(dtype=dtype), x._replace(**tensors), [t.to(dtype) for t in along] + [None, None])

    for name, got, exact, budget in zip(("tout", "tlse"), (tout, tlse), wanted(torch.float64), wanted(spec.dtype), strict=True):
        check_close(name, got, exact, budget, factor=GRADIENT_FACTOR)


@here
@pytest.mark.parametrize(
    "dims",
    [(96, 88), *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((64, 64), (72, 80), (128, 128)))],
    ids=str,
)
def test_equals_the_formulas_in_fp64(dims: tuple[int, int]) -> None:
    """Packed sequences of all kinds, and blocks that no edge cuts, for which consumers take turns."""
    seed = sum(dims) // 8
    run(seed, WINDOW, dims, qkv_format="thd", gap=3, **UNEVEN)
    tile = next(tile for tile in HOPPER_TANGENT if max(dims) <= tile.head_dim_v)
    run(seed + 1, {}, dims, replace(tile, is_lazy=not tile.is_lazy, pingpong=True), **DENSE)


@pytest.mark.skipif(not HAS_HOPPER, reason="no GPU of compute capability 9.0; the emulator runs smaller calls above")
@pytest.mark.parametrize("dim", [40, 64, 72, 96, 128])
@pytest.mark.parametrize("pingpong", [False, True])
def test_long_sequences_on_a_gpu(dim: int, pingpong: bool) -> None:
    """Programs have several tiles, and rings of keys go round many times."""
    tile = replace(next(tile for tile in HOPPER_TANGENT if dim <= tile.head_dim_v), pingpong=pingpong)
    shape = {"lengths_q": [1500] * 3, "lengths_kv": [1700] * 3, "num_heads": 8, "num_heads_kv": 4}
    run(dim, {}, (dim, dim), tile, **shape)
    run(dim + 1, {"attn_mask_type": "causal"}, (dim, dim), tile, **shape, qkv_format="bhsd", dtype=torch.float16)
    run(dim + 2, {"window_size": (200, 100)}, (dim, dim), tile, **shape, qkv_format="sbhd")


@pytest.mark.slow
@here
def test_attention_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func.jvp of attention() launches one kernel, whose results have first derivatives. They launch it again."""
    launched: list[Any] = []
    kernel = tangent.forward_with_tangent

    def counted(*arguments: Any) -> torch.Tensor:
        launched.append(arguments)
        return kernel(*arguments)

    monkeypatch.setattr(tangent, "forward_with_tangent", counted)
    if not HAS_HOPPER:
        monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())
        monkeypatch.setattr(conditions, "capability_of", lambda device: 90)
    inputs = make_inputs(
        lengths_q=[70], lengths_kv=[70], num_heads=2, num_heads_kv=1, head_dim_qk=64, head_dim_v=64, dtype=torch.bfloat16
    )
    generator = torch.Generator().manual_seed(3)
    qkv = [t.to(DEVICE) for t in inputs[:3]]
    along = tuple(torch.randn(t.shape, generator=generator).to(t) for t in qkv)
    weight = torch.ones((), dtype=torch.bfloat16, device=DEVICE, requires_grad=True)

    def run(backend: str, dtype: torch.dtype, **options: Any) -> Any:
        leaf = weight.to(dtype)
        q, k, v = (t.to(dtype) for t in qkv)
        tangents = tuple(t.to(dtype) for t in along)
        return torch.func.jvp(
            lambda q, k, v: attention(q * leaf, k, v, causal=True, backend=backend, **options), (q, k, v), tangents
        )

    def gradient_of(out: torch.Tensor, tout: torch.Tensor) -> float:
        (gradient,) = torch.autograd.grad(out.sum() + tout.square().sum(), weight, retain_graph=True)
        return float(gradient)

    exact = run("eager", torch.float64)
    budget = run("eager", torch.bfloat16)
    with contextlib.nullcontext() if HAS_HOPPER else emulated(5, tangent):
        got = run("triton", torch.bfloat16)
        assert len(launched) == 1
        gradients = [gradient_of(*got), gradient_of(*exact)]
        assert len(launched) == 2  # a second derivative has the tangents from it
    for name, t, ref, same in zip(("out", "tout"), got, exact, budget, strict=True):
        check_close(name, t.detach(), ref.detach(), same.detach(), factor=GRADIENT_FACTOR)
    assert gradients[0] == pytest.approx(gradients[1], rel=2e-2)
    gradient_of(*run("triton", torch.bfloat16, softcap=20.0))
    assert len(launched) == 2


def test_other_calls_are_refused() -> None:
    q = torch.empty(2, 256, 4, 64, dtype=torch.bfloat16, device="meta")

    def reason(q: torch.Tensor = q, **options: Any) -> str:
        with pretended_device(90, 132):
            return str(tangent_unsupported(Problem(q, q, q, softmax_scale=0.1, **options)))

    assert reason() == reason(window_left=10, window_right=0) == "None"
    assert "up to 128" in reason(q.new_empty(2, 256, 4, 136))
    assert "not float32" in reason(q.float())
    for options in ({"softcap": 1.0}, {"has_sink": True}, {"dropout_p": 0.5}):
        assert "only scaled scores" in reason(**options)
    with pretended_device(80, 108):
        assert "sm_90" in str(tangent_unsupported(Problem(q, q, q, softmax_scale=0.1)))


def test_explain_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())

    inputs = make_inputs(lengths_q=[300], lengths_kv=[300], dtype=torch.bfloat16)

    def told(**options: Any) -> str:
        spec, x = make_call(inputs, **{"return_max_logit": False} | options)
        spec = spec._replace(device_type="cuda", capability=(9, 0))
        return str(explain(spec, "triton", x).second_order)

    assert told() == "triton, with a jvp and its forward in one kernel"
    assert told(softcap=1.0) == told(return_max_logit=True) == "triton"


@pytest.mark.slow
def test_compiled() -> None:
    """The committed tiles neither spill more than a few registers nor have products in series."""
    requests = []
    for tile in HOPPER_TANGENT:
        q = torch.empty(2, 1024, 16, tile.head_dim_v, dtype=torch.bfloat16, device="meta")
        memory = tangent.TangentResults(q, q, torch.empty(2, 16, 1024, device="meta"))
        with pretended_device(90, 132), recorded_launches() as launches:
            tangent.forward_with_tangent(Problem(q, q, q, softmax_scale=0.1, window_right=0), Along(q, q, q), memory, tile)
        requests.append(request_for(launches[-1], 90))
    for report in compile_sound(requests):
        assert report.spill_store_bytes <= 64
        assert not report.warnings
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
        assert set(report.matrix_instructions) == {"HGMMA"}
