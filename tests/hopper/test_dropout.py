"""Dropout, max_logit and shared tiles in the kernels of sm_90: emulated and compiled anywhere, run compiled on such a GPU.

The dropped weights must be the reference's, bit for bit: one weight more or less is far outside the error budget.
`test_drawn_weights` compares the bits themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.philox import dropout_keep
from flexattn.dispatch.spec import AttentionSpec, Operands, as_bshd, empty_outputs
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.arguments import Dropout
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.gluon import conditions as gluon_conditions
from flexattn.kernels_triton.gluon.dropout import drawn_weights, dropout_state, kept
from flexattn.kernels_triton.hopper import backward as hopper_backward
from flexattn.kernels_triton.hopper import backward_fused as hopper_fused
from flexattn.kernels_triton.hopper import conditions
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.hopper.test_attention import choose_persistent, on_hopper
from tests.hopper.test_emulated import check as check_emulated
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import HARMLESS, SINKS, UNEVEN, without_gpu

DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def dropped(device: str = "cpu", p: float = 0.3) -> dict[str, Any]:
    # an offset above 32 bits; the kernels read its lower ones
    return {"dropout_p": p, "rng_state": torch.tensor([2**40 + 17, 2**33 + 5], device=device)}


class DropoutMeta(NamedTuple):
    HAS_DROPOUT: bool = True


@gluon.jit
def _keep_kernel(
    out_ptr,
    rng_state_ptr,
    dropout_threshold,
    h,
    first_query,
    first_key,
    COLUMNS: gl.constexpr,
    KEYS_ARE_ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    META: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    state = dropout_state(Dropout(rng_state_ptr, dropout_threshold, 1.0), 3, META)
    drawn = drawn_weights(state, h, first_query, first_key, COLUMNS, KEYS_ARE_ROWS, META, GROUP)
    ones = gl.full([64, COLUMNS], 1.0, gl.float32, layout=LAYOUT)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + rows * COLUMNS + columns, kept(ones, drawn, KEYS_ARE_ROWS, META))


@pytest.mark.parametrize("group", [1, 4], ids=lambda group: f"group{group}")
@pytest.mark.parametrize("keys_are_rows", [False, True], ids=["keys columns", "keys rows"])
@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_drawn_weights(columns: int, keys_are_rows: bool, group: int, p: float, device: str) -> None:
    if group > 1 and keys_are_rows:
        pytest.skip("heads share tiles in the forward alone, whose keys are columns")
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    out = torch.full((64, columns), float("nan"), device=device)
    threshold = Problem(out, out, out, softmax_scale=1.0, dropout_p=p).dropout.threshold
    rng_state = dropped(device)["rng_state"]
    arguments = (out, rng_state, threshold, 2, 192, 320, columns, keys_are_rows, group, DropoutMeta())
    if device == "cuda":
        _keep_kernel[(1,)](*arguments, num_warps=4)
    else:
        assert not emulator.launch(_keep_kernel, (1,), *arguments).findings
    num_queries, num_keys = (columns, 64) if keys_are_rows else (64 // group, columns)
    heads = torch.arange(5, 5 + group, device=device)
    keep = dropout_keep(rng_state, p, heads, range(192, 192 + num_queries), range(320, 320 + num_keys)).float()
    expected = keep[0].T if keys_are_rows else keep.transpose(0, 1).reshape(64, columns)
    assert torch.equal(out, expected)


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dropout_emulated(dims: tuple[int, int]) -> None:
    call = {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "learnable", "softmax_offset": SINKS, **dropped()}
    check_emulated(dims[0] % 20, call, qkv_format="thd", gap=3, head_dim_qk=dims[0], head_dim_v=dims[1], **UNEVEN)


def forward(spec: AttentionSpec, x: Operands, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) of a direct launch."""
    problem = triton_backend.to_problem(spec, x)
    out, lse, max_logit = empty_outputs(spec._replace(return_max_logit=True), x)
    hopper_forward.hopper_forward(problem, as_bshd(out, spec.q_format), lse, max_logit, group=group)
    return out, lse, max_logit


def check_forward(spec: AttentionSpec, x: Operands, results: tuple[Tensor, Tensor, Tensor]) -> None:
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    for name, got, want, same_dtype in zip(("out", "lse", "max_logit"), results, exact, budget, strict=True):
        check_close(name, got, want, same_dtype)


def _features(device: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Calls in which few queries share tiles, and one without shared tiles."""
    numbers = torch.Generator().manual_seed(0)
    offsets, slopes = torch.randn(8, generator=numbers).to(device), torch.rand(8, generator=numbers).to(device)
    bias = torch.randn(1, 8, 16, 200, generator=numbers).to(device, torch.bfloat16)
    heads = {"num_heads": 8, "num_heads_kv": 2}
    return {
        "thd, sink, dropout": (
            {"attn_mask_type": "padding_causal_bottom_right", "softmax_type": "learnable", "softmax_offset": offsets}
            | dropped(device),
            {"qkv_format": "thd", "gap": 3, "lengths_q": [50, 0, 7, 1], "lengths_kv": [150, 40, 70, 300], **heads},
        ),
        "decoding, alibi": (
            {"attn_mask_type": "causal_bottom_right", "bias_type": "alibi", "alibi_slopes": slopes},
            {"lengths_q": [1] * 3, "lengths_kv": [300] * 3, "num_heads": 8, "num_heads_kv": 1},
        ),
        "group of 6, window": (
            {"attn_mask_type": "padding", "window_size": (90, 20)},
            {"qkv_format": "sbhd", "padding": True, "lengths_q": [60, 12], "lengths_kv": [300, 200], "head_dim_qk": 192}
            | {"num_heads": 12, "num_heads_kv": 2},
        ),
        "group of 6, few queries": (
            {"attn_mask_type": "padding_causal_bottom_right", "window_size": (90, 0), "softmax_type": "learnable"}
            | {"softmax_offset": torch.cat([offsets, offsets[:4]]), **dropped(device)},
            {"qkv_format": "thd", "gap": 3, "lengths_q": [9, 0, 3, 1], "lengths_kv": [150, 40, 70, 300]}
            | {"num_heads": 12, "num_heads_kv": 2},
        ),
        "group of 7, bhsd": (
            {"attn_mask_type": "causal_bottom_right", "bias_type": "alibi", "alibi_slopes": torch.cat([slopes, slopes[:6]])},
            {"qkv_format": "bhsd", "lengths_q": [2] * 3, "lengths_kv": [300] * 3, "num_heads": 14, "num_heads_kv": 2},
        ),
        "group of 5, many splits": (
            {"attn_mask_type": "causal_bottom_right"},
            {"lengths_q": [3] * 2, "lengths_kv": [1500] * 2, "num_heads": 5, "num_heads_kv": 1, "head_dim_qk": 64},
        ),
        "bias": (
            {"bias_type": "post_scale_bias", "bias": bias},
            {"qkv_format": "bhsd", "lengths_q": [16] * 2, "lengths_kv": [200] * 2, **heads, "head_dim_qk": 64, "head_dim_v": 64},
        ),
        "many queries, off-by-one": (
            {"attn_mask_type": "padding_causal", "softmax_type": "off-by-one"},
            {"qkv_format": "thd", "lengths_q": [150, 0, 120], "num_heads": 4, "num_heads_kv": 2},
        ),
    }


def make_case(name: str, device: str) -> tuple[AttentionSpec, Operands]:
    call, inputs = _features(device)[name]
    given = make_inputs(**{"dtype": torch.bfloat16, "head_dim_qk": 128, "head_dim_v": 128, "device": device, **inputs})
    return make_call(given, **call, return_max_logit=True)


FEATURES = list(_features("cpu"))
GROUPS = dict(zip(FEATURES, (4, 8, 2, 6, 7, 5, 4, 1), strict=True))


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_heads_share_a_tile_emulated(name: str) -> None:
    spec, x = make_case(name, "cpu")
    problem = triton_backend.to_problem(spec, x)
    assert gluon_conditions.heads_of_a_tile(problem, conditions.forward_tile(problem)) == GROUPS[name]
    seed = 1 + FEATURES.index(name)
    with emulated(seed, hopper_forward) as reports:
        results = forward(spec, x)
    [report] = reports.values()
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    check_forward(spec, x, results)


def launches_of(dims: tuple[int, int]) -> dict[str, Launch]:
    """Launches of the kernels with dropout, and of the forward with max_logit whose heads share tiles."""
    q, k = (torch.zeros(2, 128, heads, dims[0], dtype=torch.bfloat16) for heads in (8, 2))
    v, out = (torch.zeros(2, 128, heads, dims[1], dtype=torch.bfloat16) for heads in (2, 8))
    lse = torch.zeros(2, 8, 128)
    problem = Problem(q, k, v, softmax_scale=0.1, window_right=0, bottom_right=True, **dropped())
    gradients = [torch.zeros_like(t) for t in (q, k, v)]
    with recorded_launches() as launches:
        hopper_forward.hopper_forward(problem, out, lse)
        hopper_backward.hopper_backward(Backward(problem, out, lse, out, None, *gradients))
        if max(dims) <= 128:
            hopper_fused.fused_backward(Backward(problem, out, lse, out, None, *gradients))
    found = {x.kernel.__name__: x for x in launches if "hopper" in x.kernel.__name__}
    few = Problem(q[:, :8], k, v, softmax_scale=0.1, window_right=0, bottom_right=True)
    with recorded_launches() as launches:
        hopper_forward.hopper_forward(few, out[:, :8], lse[..., :8], torch.zeros(8))
    return found | {"shared": launches[0]}


# Share of a loop's instructions: a few reloads of values that an iteration needs once.
LOOP_SPILLS = 0.01


@pytest.mark.slow
def test_forward_and_fused_compiled() -> None:
    launches = launches_of((128, 128))
    check_compiled({name: x for name, x in launches.items() if "dq" not in name and "dkdv" not in name})


@pytest.mark.exhaustive
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_compiled_ahead_of_time(dims: tuple[int, int]) -> None:
    check_compiled(launches_of(dims))


def check_compiled(launches: dict[str, Launch]) -> None:
    for name, report in zip(launches, compile_sound([request_for(x, 90) for x in launches.values()]), strict=True):
        assert report.loop_spill_share <= (0.0 if name == "shared" else LOOP_SPILLS), f"{name}: {report}"
        assert not report.warnings, f"{name}: {report.warnings}"
        assert set(report.matrix_instructions) == {"HGMMA"}, name
        for loop in (loop for loop in report.loops if "HGMMA" in loop):
            # Shuffles distribute the results of Philox: shared memory is only read for statistics, and there is no barrier for it.
            assert name == "shared" or 0 < loop["SHFL"] <= 16, f"{name}: {loop}"


@on_hopper
@pytest.mark.parametrize("name", FEATURES)
def test_heads_share_a_tile_on_the_device(name: str) -> None:
    spec, x = make_case(name, "cuda")
    check_forward(spec, x, forward(spec, x))


@on_hopper
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
@pytest.mark.parametrize("backward", ["split", "one pass", "persistent"])
def test_dropout_on_the_device(dims: tuple[int, int], mask: str, backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family against the oracle, and a backward of one family after a forward of the other."""
    deterministic = backward == "split"
    if backward == "persistent":
        choose_persistent(monkeypatch)
    lengths = {"lengths_q": [300, 0, 1, 700, 129], "lengths_kv": [333, 50, 500, 600, 0], "num_heads": 4, "num_heads_kv": 2}
    dims_given = {"head_dim_qk": dims[0], "head_dim_v": dims[1], "dtype": torch.bfloat16, "device": "cuda"}
    given = make_inputs("thd", gap=3, **lengths, **dims_given)
    spec, x = make_call(given, attn_mask_type=mask, deterministic=deterministic, return_max_logit=True, **dropped("cuda", 0.2))
    dout = make_dout(given)
    wanted, budgets = (reference_gradients(spec, x, dout, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    results = {}
    for wish in ("always", "never"):
        monkeypatch.setenv("FLEXATTN_HOPPER", wish)
        results[wish] = triton_backend.forward(spec, x)
        check_forward(spec, x, results[wish])
    for wish, other_wish in (("always", "never"), ("never", "always")):
        monkeypatch.setenv("FLEXATTN_HOPPER", wish)
        gradients = triton_backend.backward(spec, x, *results[other_wish][:2], dout, None)
        for name, got, want, budget in zip(("dq", "dk", "dv"), gradients, wanted, budgets, strict=False):
            check_close(name, got, want, budget, factor=GRADIENT_FACTOR)
