"""The forward with a tangent for sm_90: the emulator against fp64, its conditions and tiles, and the compiled kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.bench.emulated import emulated
from flexattn.dispatch import second_order, triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HOPPER_TANGENT, HopperTile
from flexattn.kernels_triton.hopper import tangent
from flexattn.kernels_triton.hopper.conditions import tangent_tile
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.second_order.launch import Along
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, UNEVEN, check_results, without_gpu

DENSE: dict[str, Any] = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 1}
WINDOW = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (90, 0)}


def run(seed: int, call: dict[str, Any], dims: tuple[int, int], tile: HopperTile | None = None, **inputs: Any) -> None:
    given = make_inputs(dtype=torch.bfloat16, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)
    spec, x = make_call(given, **call)
    generator = torch.Generator().manual_seed(seed)
    # A tangent of all keys alike shifts the tangents of a row's scores, which cancels in the results.
    along = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in (x.q, x.k, x.v)]
    along[1] += 3 * torch.randn(t.shape[-1:] if (t := x.k) is not None else (), generator=generator).to(x.k.dtype)
    with emulated(seed, tangent) as reports:
        problem = triton_backend.to_problem(spec, x)
        (out, lse, _), tout = empty_outputs(spec, x), empty_outputs(spec, x)[0]
        rows = Along(*(as_bshd(t, fmt) for t, fmt in zip(along, (spec.q_format, spec.kv_format, spec.kv_format), strict=True)))
        memory = tangent.TangentResults(as_bshd(out, spec.q_format), as_bshd(tout, spec.q_format), lse)
        tlse = tangent.forward_with_tangent(problem, rows, memory, tile)
    (report,) = reports.values()
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    check_results(spec, x, out, lse)

    def wanted(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = {name: getattr(x, name).nan_to_num(0.0).to(dtype) for name in "qkv"}
        return second_order.tangent(spec._replace(dtype=dtype), x._replace(**tensors), [t.to(dtype) for t in along] + [None, None])

    for name, got, exact, budget in zip(("tout", "tlse"), (tout, tlse), wanted(torch.float64), wanted(torch.bfloat16), strict=True):
        check_close(name, got, exact, budget, factor=GRADIENT_FACTOR)


@without_gpu
@pytest.mark.parametrize(
    "dims",
    [(64, 64), pytest.param((72, 80), marks=pytest.mark.slow), (96, 88), pytest.param((128, 128), marks=pytest.mark.slow)],
    ids=str,
)
def test_emulated(dims: tuple[int, int]) -> None:
    """Packed sequences of all kinds, and blocks that no edge cuts."""
    seed = sum(dims) // 8
    run(seed, WINDOW, dims, qkv_format="thd", gap=3, **UNEVEN)
    run(seed + 1, {}, dims, **DENSE)
