"""Backwards for sm_90 whose programs divide the query heads of a key head: the parts, their choice, gradients, compiled kernels."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn import emulator
from flexattn.dispatch import triton_backend
from flexattn.dispatch.plan import Device, Kernel, Op, record
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import crossovers, facts
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.gluon import work_order
from flexattn.kernels_triton.gluon.query_walk import HeadParts, Walk, heads_of_part, num_parts
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts
from flexattn.kernels_triton.hopper import backward, backward_fused, conditions, fp8_backward, fp8_backward_fused
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.testing import make_call, make_dout, make_inputs
from tests.hopper.test_attention import FEATURES, FUSED, LOOP_INSTRUCTIONS, SLACK, SPLIT, on_hopper
from tests.hopper.test_attention import check as check_on_gpu
from tests.hopper.test_attention import launches as launches
from tests.hopper.test_dropout import dropped
from tests.hopper.test_emulated import check, check_persistent
from tests.hopper.test_fp8_backward import check as check_fp8_two_kernels
from tests.hopper.test_fp8_emulated import check_backward_of
from tests.hopper.test_fused_192 import check_run as check_192
from tests.support.compiled_kernels import check_loops, compile_sound
from tests.support.gluon_calls import EVERYTHING, check_bits_repeat, without_gpu

GROUP = {"num_heads": 5, "num_heads_kv": 1}  # in parts of 2, 2 and 1 heads
PACKED = {"lengths_q": [70, 0, 130], "lengths_kv": [150, 40, 70], "qkv_format": "thd", "gap": 3}
SINKS = torch.tensor([0.5, -2.0, 1.0, 0.0, 0.3])
ALIBI = {"bias_type": "alibi", "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.3, 0.7])}


def divide(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(work_order, "number_of_head_parts", lambda problem, rows: number)


def problem_of(batch: int, tokens: int, heads: tuple[int, int], dim: int, queries: int | None = None, **more: Any) -> Problem:
    sides = ((queries or tokens, heads[0]), (tokens, heads[1]))
    q, k = (torch.empty((batch, length, h, dim), dtype=torch.bfloat16, device="meta") for length, h in sides)
    return Problem(q, k, k, softmax_scale=0.1, **more)


@gluon.jit
def _parts_kernel(out_ptr, heads_kv, group, number, heads):
    work = Work(
        table_ptr=None,
        num_heads=heads_kv * group,
        group_size=group,
        blocks=1,
        heads_per_l2_section=1,
        walk=Walk(turn=None, wave=None),
        parts=HeadParts(number=number, heads=heads),
    )
    part = gl.program_id(0)
    h_kv, h, visited = heads_of_part(part, work)
    gl.store(out_ptr + 4 * part, h_kv)
    gl.store(out_ptr + 4 * part + 1, h)
    gl.store(out_ptr + 4 * part + 2, visited)
    gl.store(out_ptr + 4 * part + 3, num_parts(work))


@pytest.mark.parametrize(("group", "number"), [(7, 3), (71, 4), (71, 8), (6, 3), (4, 4), (5, 2)])
def test_parts_have_each_head_once(group: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, number)
    parts = head_parts(problem_of(1, 256, (2 * group, 2), 64), 128)
    assert parts is not None
    assert parts.number == number
    out = torch.full((2 * number, 4), -1, dtype=torch.int32)
    assert not emulator.launch(_parts_kernel, (2 * number,), out, 2, group, *parts).findings
    visited = [(h_kv, h) for h_kv, first, heads, _ in out.tolist() for h in range(first, first + heads)]
    assert visited == [(h // group, h) for h in range(2 * group)]
    assert set(out[:, 3].tolist()) == {2 * number}
    assert max(out[:, 2]) == -(-group // number)  # no part has more heads than it must


MODELS = {
    "Falcon 7B": ((8, 2048, (71, 1), 64), {"window_right": 0}, HeadParts(2, 36)),
    "StarCoder2 3B": ((1, 16384, (24, 2), 128), {"window_right": 0, "window_left": 4095}, HeadParts(4, 3)),
    "a narrower window": ((1, 16384, (24, 2), 128), {"window_right": 0, "window_left": 2046}, None),
    "many programs": ((1, 16384, (32, 8), 128), {"window_right": 0, "window_left": 4095}, None),
    "a wide head dim": ((1, 16384, (24, 2), 192), {"window_right": 0, "window_left": 4095}, None),
    "Gemma 2B": ((4, 4096, (8, 1), 256), {"window_right": 0}, HeadParts(2, 4)),
    "Qwen2.5 7B": ((4, 4096, (28, 4), 128), {"window_right": 0}, None),
    "32 heads over 1": ((2, 4096, (32, 1), 128), {"window_right": 0}, HeadParts(4, 8)),
    "without a mask": ((2, 4096, (32, 1), 128), {}, HeadParts(4, 8)),
    "little memory": ((1, 1024, (8, 1), 64), {"window_right": 0}, HeadParts(4, 2)),
    "few queries": ((64, 4096, (71, 1), 64, 16), {"window_right": 0}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_parts_fill_the_device_and_no_more_memory_than_dq(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_order, "num_processors", lambda device: 132)
    shape, more, expected = MODELS[name]
    x = problem_of(*shape, **more)
    parts = head_parts(x, 128)
    assert parts == expected
    number = 1 if parts is None else parts.number
    assert number == 1 or number * (x.k.numel() + x.v.numel()) <= x.q.numel()
    work, programs = backward_work(x, 128, "kv", 2**20, is_fused=True, parts=parts)
    assert work.parts == parts
    assert programs == number * x.k.shape[:-1].numel() // 128


def test_calls_with_few_keys_have_the_fused_backward_if_their_heads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "num_processors", lambda device: 132)
    monkeypatch.setattr(facts, "capability_of", lambda device: 90)
    monkeypatch.setattr(facts, "has_large_l2", lambda device: True)
    x = problem_of(8, 2048, (71, 1), 64, window_right=0)
    assert crossovers.slower("sm_90 fused", facts.facts_of(x)) is None
    one_head = problem_of(2, 2048, (1, 1), 64, window_right=0)
    assert "36 keys" in str(crossovers.slower("sm_90 fused", facts.facts_of(one_head)))


def test_a_call_in_parts_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the sums is allocated in the call, so a replay and another framework can give their own."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())  # the interpreter's allows only portable kernels
    spec, x = make_call(
        make_inputs(lengths_q=[17], num_heads=71, num_heads_kv=1, head_dim_qk=64, head_dim_v=64, dtype=torch.bfloat16),
        attn_mask_type="causal",
        return_max_logit=False,
    )
    q, k, v, out, dout = (torch.empty(8, 2048, h, 64, dtype=torch.bfloat16, device="meta") for h in (71, 1, 1, 71, 71))
    spec, x = spec._replace(device_type="cuda", capability=(9, 0)), triton_backend.on_meta(x)._replace(q=q, k=k, v=v)
    lse = torch.empty(8, 71, 2048, device="meta")
    plan = record(
        lambda: triton_backend.backward(spec, x, out, lse, dout, None)[:3], [q, k, v, out, lse, dout], Device((9, 0), 132)
    )
    launches = [step.launch for step in plan.steps if isinstance(step, Kernel)]
    (fused,) = (launch for launch in launches if launch.kernel.__name__ == "_attn_bwd_fused_hopper_kernel")
    assert fused.programs == 2 * 8 * 16
    sums = [step.arguments[0].shape for step in plan.steps if isinstance(step, Op) and step.func is torch.ops.aten.sum.dim_IntList]
    assert sums == [(8, 2048, 1, 2, 64)] * 2


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_batches_with_dropout_and_alibi_emulated(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and slopes go by the head among all heads. The last part has fewer heads."""
    divide(monkeypatch, 3)
    call = {"attn_mask_type": "padding_causal_bottom_right", **ALIBI, **dropped()}
    packed = PACKED | {"lengths_q": [0, 130], "lengths_kv": [40, 70]}
    check(dim // 64, call, head_dim_qk=dim, head_dim_v=dim, **packed, **GROUP)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window, sinks": (EVERYTHING | {"softmax_offset": SINKS}, PACKED | GROUP | {"padding": True}),
    "two key heads": (
        {"attn_mask_type": "causal"},
        {"lengths_q": [150] * 2, "lengths_kv": [200] * 2, "num_heads": 6, "num_heads_kv": 2},
    ),
    "softcap": ({"softcap": 3.0}, {"lengths_q": [70], "lengths_kv": [130], "qkv_format": "sbhd"} | GROUP),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_emulated(name: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    call, inputs = CALLS[name]
    check(5, call, head_dim_qk=dims[0], head_dim_v=dims[1], **inputs)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("variant", ["persistent", "converting"])
@pytest.mark.parametrize("name", CALLS)
def test_persistent_programs_emulated(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs do not convert dq then."""
    divide(monkeypatch, 2)
    call, inputs = CALLS[name]
    check_persistent(6, call, variant, head_dim_qk=64, head_dim_v=64, **inputs)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("kernels", [fp8_backward, fp8_backward_fused], ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("name", CALLS)
def test_fp8_emulated(name: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 2)
    call, inputs = CALLS[name]
    (check_backward_of if kernels is fp8_backward_fused else check_fp8_two_kernels)(
        5, call, head_dim_qk=64, head_dim_v=64, **inputs
    )


@pytest.mark.slow
@without_gpu
def test_head_dim_192_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, 3)
    check_192(5, {"attn_mask_type": "padding_causal"}, **PACKED, **GROUP)


@on_hopper
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", [*CALLS, "packed, dropout, alibi"])
def test_on_a_gpu(name: str, number: int, dim: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    divide(monkeypatch, number)
    packed = ({"attn_mask_type": "padding_causal_bottom_right", **ALIBI, **dropped()}, PACKED | GROUP)
    call, inputs = CALLS.get(name, packed)
    on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    check_on_gpu(launches, on_gpu, head_dim_qk=dim, head_dim_v=dim, **inputs)


@on_hopper
@pytest.mark.parametrize("deterministic", [False, True])
def test_bits_repeat(deterministic: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of dk and dv, and of dq if it is requested."""
    divide(monkeypatch, 3)
    call, inputs = CALLS["two key heads"]
    given = make_inputs(head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16, device="cuda", **inputs)
    spec, x = make_call(given, **call, deterministic=deterministic, return_max_logit=False)
    check_bits_repeat(spec, x, make_dout(given))
    assert set(launches[1:]) == set(SPLIT if deterministic else FUSED)


def launches_in_parts(dim: int, features: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """Returns the launches of the kernels for dk and dv, with the fused one's tile for the call and with persistent programs."""
    divide(monkeypatch, 2)
    q, k = (torch.zeros(256, heads, dim, dtype=torch.bfloat16) for heads in (5, 1))
    offsets = torch.tensor([0, 128, 256], dtype=torch.int32)
    lengths: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets) | {
        "max_seqlen_q": 128,
        "max_seqlen_kv": 128,
    }
    if features != "everything":
        q, k, lengths = q.view(2, 128, 5, dim), k.view(2, 128, 1, dim), {}
    more = FEATURES[features] | ({"softmax_offset": torch.zeros(5)} if features == "everything" else {})
    problem = Problem(q, k, k, softmax_scale=0.1, **more, **lengths)
    lse = torch.zeros(5, 256) if lengths else torch.zeros(2, 5, 128)
    call = Backward(problem, q, lse, q, None, *(torch.zeros_like(t) for t in (q, k, k)))
    found = {}
    for name in ("two-kernel", "fused", "persistent"):
        with recorded_launches() as seen:
            if name == "two-kernel":
                backward.hopper_backward(call)
            else:
                tile = conditions.fused_tile(problem)
                backward_fused.fused_backward(call, replace(tile, is_persistent=name == "persistent"))
        (found[name],) = (x for x in seen if "dkdv_hopper" in x.kernel.__name__ or "fused_hopper" in x.kernel.__name__)
    return found


# Reloads in the loops of both warpgroups, with Triton 3.6 and 3.7; without parts there are up to 6
SPILLS = {(name, 64, features): 5 for name in ("fused", "persistent") for features in ("causal", "everything")}


@pytest.mark.sample("dim", "features")
@pytest.mark.slow
@pytest.mark.parametrize("features", ["causal", "everything"])
@pytest.mark.parametrize("dim", [64, 128])
def test_compiled(dim: int, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all heads in one part, these kernels for 5 heads over one have as many spills in their loops."""
    found = launches_in_parts(dim, features, monkeypatch)
    reports = compile_sound([request_for(launch, 90) for launch in found.values()])
    for name, report in zip(found, reports, strict=True):
        loops = [loop for loop in report.loops if "HGMMA" in loop]
        spills = sum(loop.get("STL", 0) + loop.get("LDL", 0) for loop in loops)
        assert spills <= SPILLS.get((name, dim, features), 0), f"{name}: {spills}, {report}"
        assert report.idle_barriers == 0, f"{name}: {report}"
        assert name != "fused" or report.exposed_exponentials == 0, f"{name}: {report}"
        assert not report.warnings, f"{name}: {report.warnings}"
        assert set(report.matrix_instructions) == {"HGMMA"}, name
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90], name
        expected = LOOP_INSTRUCTIONS["dkdv" if name == "two-kernel" else name, dim, features]
        check_loops((name, dim, features), loops, expected, SLACK + 0.01)  # the number of heads is no constant
