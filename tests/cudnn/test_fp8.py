"""FP8 on cuDNN without a GPU: the code around its emulated graphs, against the reference in fp64; and its refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import flexattn
from flexattn import ops
from flexattn.dispatch import canary, cudnn_backend, cudnn_rules
from flexattn.dispatch.cudnn_rules import refusal
from flexattn.dispatch.heuristics import preference
from flexattn.dispatch.options import attention_backend
from flexattn.dispatch.select import RuntimeFailure
from flexattn.dispatch.spec import AttentionSpec, Band, Direction, Fp8, Operands, as_bshd, empty_outputs
from flexattn.integrations.te import Float8CurrentScalingQuantizer, fused_attn_bwd, fused_attn_fwd
from flexattn.kernels_cudnn import attention, fp8
from flexattn.kernels_cudnn import plans as plans_module
from flexattn.kernels_cudnn.attention import Written
from flexattn.kernels_cudnn.fp8 import Descales, fp8_call
from flexattn.kernels_cudnn.graphs import Uid
from flexattn.kernels_cudnn.plans import PlanNotSupported
from flexattn.kernels_cudnn.problem import without_data
from flexattn.kernels_triton.common import crossovers
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs, reference_attention, reference_gradients
from tests.api.test_support import on_h200
from tests.support import cudnn_emulator
from tests.support.fp8_cases import E4M3, E5M2, Case, backward, forward, make_case, rounded_attention, takes_backward


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> cudnn_emulator.EmulatedPlans:
    plans = cudnn_emulator.EmulatedPlans()
    for module in (attention, fp8):
        monkeypatch.setattr(module, "execute", cudnn_emulator.execute)
        monkeypatch.setattr(module, "PLANS", plans)
    monkeypatch.setattr(plans_module, "PLANS", plans)  # `prepare` asks there
    cudnn_backend.prepared_calls.clear()
    return plans


EQUAL = {"lengths_q": [150, 150], "lengths_kv": [133, 133]}
UNEVEN = {"lengths_q": [133, 40], "lengths_kv": [81, 150], "padding": True, "gap": 3}
EMPTY = {"lengths_q": [133, 0, 40, 70], "lengths_kv": [81, 40, 150, 0], "padding": True, "gap": 3}
PACKED = {**EMPTY, "padding": False}
CASES: dict[str, dict[str, Any]] = {
    "bshd": EQUAL,
    "sbhd": {**EQUAL, "fmt": "sbhd"},
    "bhsd": {**EQUAL, "fmt": "bhsd"},
    "strided": {**EQUAL, "strided": True},
    "causal": {**EQUAL, "call": {"attn_mask_type": "causal"}},
    "window": {"lengths_q": [133, 133], "lengths_kv": [150, 150], "call": {"window_size": (9, 4), "bottom_right_diagonal": False}},
    "one key head": {**EQUAL, "num_heads": 5, "num_heads_kv": 1},
    "e5m2": {**EQUAL, "dtype": E5M2},
    "e4m3 gradients": {**EQUAL, "dout_dtype": E4M3, "call": {"attn_mask_type": "causal"}},
    "scales of 1": {**EQUAL, "fills": False},
    "outliers": {**EQUAL, "outliers": True},
    "lengths": UNEVEN,
    "lengths, sbhd": {**UNEVEN, "fmt": "sbhd"},
    "lengths, causal": {**UNEVEN, "call": {"attn_mask_type": "padding_causal"}},
    "empty sequences": EMPTY,
    "thd": {**PACKED, "fmt": "thd", "gap": 0},
    "thd with gaps": {**PACKED, "fmt": "thd"},
    "thd, causal": {**PACKED, "fmt": "thd", "call": {"attn_mask_type": "padding_causal"}},
    "mixed": {**EMPTY, "fmt": "thd_2bshd"},
    "head dim 64": {**EQUAL, "head_dim_qk": 64, "head_dim_v": 64},
    "head dims 192 and 128": {**EQUAL, "head_dim_qk": 192},
}


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    case = make_case(**CASES[name])
    ref_out, ref_lse = case.reference()
    budget = rounded_attention(case)
    out, lse = forward(case, torch.float32)
    check_close("out", out, ref_out, budget.out)
    check_close("lse", lse, ref_lse, budget.lse, atol=1e-4)
    if takes_backward(case):
        exact = case.reference_gradients()
        grads = backward(case, out.bfloat16(), lse, torch.float32)
        for what, got, ref, eager in zip(("dq", "dk", "dv"), grads, exact[:3], budget.gradients, strict=True):
            check_close(what, got, ref, eager, factor=GRADIENT_FACTOR)
    else:
        assert re.search("backward (supports|does not support)", str(cudnn_backend.rule_error(as_call(case)[0], "backward")))
    assert all(sdpa.strides_out[2] % 16 == 0 for sdpa in emulated.asked)


@pytest.mark.parametrize("name", ["bshd", "lengths, sbhd", "empty sequences", "thd with gaps"])
def test_the_plan_that_is_asked_for_ahead_is_the_one_that_runs(name: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    case = make_case(**CASES[name])
    out, lse = forward(case, torch.bfloat16)
    problem, spec = case.problem(), case.spec
    shadows = {field: without_data(t) for field, t in vars(problem).items() if isinstance(t, torch.Tensor)}
    ahead = fp8_call(type(problem)(**(vars(problem) | shadows)), without_data(as_bshd(out, spec.q_format)), without_data(lse))
    assert ahead.sdpa == emulated.asked[-1]
    if takes_backward(case):
        backward(case, out, lse, torch.bfloat16)
        grads = (torch.empty(t.shape, dtype=torch.bfloat16, device="meta") for t in (case.given.q, case.given.k, case.given.v))
        views = (as_bshd(t, f) for t, f in zip(grads, (spec.q_format, spec.kv_format, spec.kv_format), strict=True))
        dout = without_data(as_bshd(case.dout, spec.q_format))
        ahead = fp8_call(
            type(problem)(**(vars(problem) | shadows)),
            without_data(as_bshd(out, spec.q_format)),
            without_data(lse),
            dout,
            Written(*views),
        )
        assert ahead.sdpa == emulated.asked[-1]


def test_learned_scales_use_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three runs take the largest gradient to the end of the dtype's range, and none past it."""
    runs: list[dict[int, torch.Tensor]] = []
    monkeypatch.setattr(fp8, "execute", lambda *args: runs.append(args[1]) or cudnn_emulator.execute(*args))
    for dout_dtype, learning in ((E5M2, 2), (E4M3, 3)):
        case = make_case(**EQUAL, dout_dtype=dout_dtype)
        out, lse = forward(case, torch.bfloat16)
        runs.clear()
        backward(case, out, lse, torch.float32)
        assert len(runs) == learning
        for uid in (Uid.DQ, Uid.DK, Uid.DV):
            assert runs[-1][uid].float().abs().max() == torch.finfo(dout_dtype).max


def test_zeros_are_right() -> None:
    case = make_case(**EQUAL)
    zero = case._replace(given=case.given._replace(**{name: torch.zeros_like(getattr(case.given, name)) for name in "qkv"}))
    one = torch.ones(1)
    zero = zero._replace(descales=Descales(one, one, one), dout=torch.zeros_like(case.dout), descale_dout=one)
    out, lse = forward(zero, torch.float32)
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 133.0).log())
    assert not any(grad.any() for grad in backward(zero, out.bfloat16(), lse, torch.float32))


@pytest.mark.parametrize("lengths", [([0, 0], [5, 7]), ([5, 7], [0, 0])], ids=["no query", "no key"])
def test_nothing_to_run(lengths: tuple[list[int], list[int]], emulated: cudnn_emulator.EmulatedPlans) -> None:
    case = make_case(lengths_q=lengths[0], lengths_kv=lengths[1], padding=True)
    out, lse = forward(case, torch.float32)
    assert not out.any()
    assert (lse == -torch.inf).all()
    grads = backward(case, out.bfloat16(), lse, torch.float32)
    assert not any(grad.any() for grad in grads)
    assert emulated.asked == []


def test_a_scale_that_is_expanded_is_one_scale() -> None:
    """Every granularity arrives as [b, h, blocks]."""
    case = make_case(**EQUAL)
    expected, _ = forward(case, torch.float32)
    numbers = torch.stack([torch.zeros(1), *case.descales]).flatten()  # off 16 bytes
    case = case._replace(descales=Descales(*(number.expand(2, 4, 1) for number in numbers[1:, None, None, None])))
    assert torch.equal(forward(case, torch.float32)[0], expected)


@pytest.mark.parametrize("dims", [(True, False, False), (False, True, False), (False, False, True)], ids=["batch", "head", "block"])
def test_other_granularities_are_refused(dims: tuple[bool, bool, bool]) -> None:
    spec, _ = as_call(make_case(**EQUAL))
    assert spec.fp8 is not None
    for direction in ("forward", "backward"):
        reason = cudnn_backend.rule_error(spec._replace(fp8=spec.fp8._replace(descale_dims=dims)), direction)
        assert "one scale per FP8 tensor" in str(reason)


HANGS = {
    "lengths": {**UNEVEN, "lengths_kv": [150, 150], "call": {"attn_mask_type": "padding", "window_size": (9, 4)}},
    "packed": {**PACKED, "fmt": "thd", "call": {"attn_mask_type": "padding_causal", "window_size": (9, 0)}},
    "more queries": {"lengths_q": [150, 150], "lengths_kv": [140, 140], "call": {"window_size": (9, -1)}},
}


@pytest.mark.parametrize("name", HANGS)
def test_what_may_never_end_is_refused(name: str) -> None:
    case = make_case(**HANGS[name])
    case = case._replace(spec=case.spec._replace(band=case.spec.band._replace(bottom_right=False)))
    with pytest.raises(PlanNotSupported, match="cudnn-frontend/issues/1009"):
        forward(case, torch.float32)
    out, lse, _ = empty_outputs(case.spec, case.x)
    with pytest.raises(PlanNotSupported, match="cudnn-frontend/issues/1009"):
        fp8_call(case.problem(), as_bshd(out, case.spec.q_format), lse)


def test_what_may_never_end_is_refused_before_it_is_built() -> None:
    """The spec of 250 queries and 200 keys equals that of equally many."""
    case = make_case(lengths_q=[250, 250], lengths_kv=[200, 200], call={"window_size": (9, -1)})
    spec, x = as_call(case)
    spec = spec._replace(band=spec.band._replace(bottom_right=False))
    assert cudnn_backend.rule_error(spec, "forward") is None
    assert "cudnn-frontend/issues/1009" in str(cudnn_backend.provisional(spec, x, "forward"))
    with pytest.raises(RuntimeFailure, match="cudnn-frontend/issues/1009"):
        cudnn_backend.prepare(spec, x, "forward")


def test_a_window_under_which_each_query_sees_a_key_runs() -> None:
    """The last of 150 queries sees key 139 of 140."""
    case = make_case(lengths_q=[150], lengths_kv=[140], call={"window_size": (10, -1), "bottom_right_diagonal": False})
    out, _ = forward(case, torch.float32)
    check_close("out", out, case.reference()[0], rounded_attention(case).out)


def as_call(case: Case) -> tuple[AttentionSpec, Operands]:
    """Returns the spec and operands that the operators would make of a case on an H200."""
    spec = case.spec._replace(
        dtype=case.given.q.dtype, fp8=Fp8((False, False, False), 0, torch.bfloat16, case.dout.dtype, bf16_backward=False)
    )
    scales = [descale.reshape(1, 1, 1) for descale in (*case.descales, case.descale_dout)]
    x = case.x._replace(q=case.given.q, k=case.given.k, v=case.given.v, descales=scales)
    return on_h200(spec, x), x


@pytest.mark.sample
@pytest.mark.parametrize("name", ["bshd", "lengths, sbhd", "empty sequences", "thd with gaps", "e4m3 gradients"])
def test_the_backend(name: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    """From a spec and its operands; the plan that is built ahead is the plan that runs."""
    case = make_case(**CASES[name])
    spec, x = as_call(case)
    assert cudnn_backend.rule_error(spec, "forward") is None
    cudnn_backend.prepare(spec, x, "forward")
    out, lse, _ = cudnn_backend.forward(spec, x)
    budget = rounded_attention(case)
    check_close("out", out, case.reference()[0], budget.out)
    if takes_backward(case):
        assert cudnn_backend.rule_error(spec, "backward") is None
        cudnn_backend.prepare(spec, x, "backward")
        gradients = cudnn_backend.backward(spec, x, out, lse, case.dout, None)
        for what, got, ref, eager in zip(("dq", "dk", "dv"), gradients, case.reference_gradients(), budget.gradients, strict=False):
            assert got.dtype is torch.bfloat16
            check_close(what, got, ref, eager, factor=GRADIENT_FACTOR)
    assert emulated.asked[::2] == emulated.asked[1::2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lengths, causal", "e4m3 gradients", "scales of 1"])
def test_the_canary_finds_it_right(name: str) -> None:
    spec, _ = as_call(make_case(**CASES[name]))
    for direction in ("forward", "backward"):
        assert canary.mismatch("cudnn", spec, direction, torch.device("cpu")) is None


def test_a_call_by_name(monkeypatch: pytest.MonkeyPatch, emulated: cudnn_emulator.EmulatedPlans) -> None:
    """It is quantised inside, with gradients of the 16-bit tensors; if scales are by head, the refusal says what to change."""
    monkeypatch.setattr(cudnn_backend, "device_error", lambda *args: None)
    monkeypatch.setattr(cudnn_backend, "_known_bad", lambda *args: None)
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: on_h200(ops.make_spec(x, settings, (9, 0)), x))
    exact = make_inputs(lengths_q=[140], lengths_kv=[133], head_dim_qk=128, head_dim_v=128, dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (exact.q, exact.k, exact.v)]
    recipe = flexattn.fp8.Recipe(fp8_format="HYBRID", granularity="tensor")
    call = {"fp8_recipe": recipe, "attn_mask_type": "causal", "backend": "cudnn"}
    explained = flexattn.explain(*leaves, **call)
    assert (explained.forward.backend, explained.backward.backend) == ("cudnn", "cudnn")
    automatic = flexattn.explain(*leaves, **{**call, "backend": "auto"})
    assert automatic.forward.backend == automatic.backward.backend == "triton"
    assert "auto does not select cuDNN in FP8" in automatic.forward.why
    out = flexattn.attention(*leaves, **call)
    gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    out = out.detach()
    spec, x = make_call(exact._replace(q=exact.q.detach(), k=exact.k.detach(), v=exact.v.detach()), attn_mask_type="causal")
    wanted = reference_gradients(spec, x, torch.ones_like(out))
    for got, ref in zip((out, *gradients), (reference_attention(spec, x)[0], *wanted[:3]), strict=True):
        assert got.dtype is torch.bfloat16
        assert float((got.double() - ref).square().mean().sqrt()) < 0.1 * float(ref.square().mean().sqrt())
    assert [sdpa.fp8 is not None for sdpa in emulated.asked] == [True] * len(emulated.asked)
    with pytest.raises(flexattn.BackendError, match="quantise with granularity='tensor', or use backend='triton'"):
        flexattn.attention(*leaves, **{**call, "fp8_recipe": flexattn.fp8.Recipe()})


# For each rule, in its order: the direction and the changes of a call that it refuses, and of a close one that no rule refuses.
AGAINST: list[tuple[tuple[Direction, dict[str, Any]], tuple[Direction, dict[str, Any]]]] = [
    (("forward", {"fp8": Fp8((False, True, False), 0, torch.bfloat16, E5M2, False)}), ("forward", {})),
    (("forward", {"head_dim_v": 272}), ("forward", {"head_dim_v": 256})),
    (("forward", {"head_dim_qk": 40, "head_dim_v": 40}), ("forward", {"head_dim_qk": 256, "head_dim_v": 16})),
    (("backward", {"head_dim_qk": 64}), ("backward", {})),
    (("backward", {"kv_format": "thd"}), ("forward", {"kv_format": "thd"})),
    (("forward", {"band": Band(None, 0, True)}), ("forward", {"band": Band(None, 0, False)})),
    (("forward", {"length_q": 1}), ("backward", {"length_q": 1})),
    (("forward", {"bias_type": "alibi"}), ("forward", {})),
    (("forward", {"softmax_type": "learnable"}), ("forward", {})),
    (("forward", {"mods": object()}), ("forward", {})),
    (("forward", {"dropout": True}), ("forward", {})),
    (("forward", {"return_max_logit": True}), ("backward", {"return_max_logit": True})),
]


@pytest.mark.parametrize("d_o_in_fp8", [True, False])
def test_a_gradient_in_16_bits_comes_quantised(
    d_o_in_fp8: bool, monkeypatch: pytest.MonkeyPatch, emulated: cudnn_emulator.EmulatedPlans
) -> None:
    """fused_attn_bwd quantises it if cuDNN is named; every other caller gets a refusal with a name, and no result."""
    monkeypatch.setattr(cudnn_backend, "device_error", lambda *args: None)
    monkeypatch.setattr(cudnn_backend, "_known_bad", lambda *args: None)
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: on_h200(ops.make_spec(x, settings, (9, 0)), x))
    quantize, shape = Float8CurrentScalingQuantizer(E4M3), (1, 140, 2, 128)
    q, k, v, d_o = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(4))
    cu = torch.tensor([0, 140], dtype=torch.int32)
    lengths: dict[str, Any] = {"max_seqlen_q": 140, "max_seqlen_kv": 140, "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    call: dict[str, Any] = {"fake_dtype": torch.bfloat16, "fused_attention_backend": "FP8", "qkv_layout": "bshd_bshd_bshd"}
    call |= lengths | {"q": quantize(q), "k": quantize(k), "v": quantize(v), "o_format": "bshd", "attn_mask_type": "causal"}
    results = {}
    for backend in ("cudnn", "eager"):
        with attention_backend(backend):  # type: ignore[arg-type]
            out, aux = fused_attn_fwd(is_training=True, **call)
            how: dict[str, Any] = {"do_format": "bshd", "dqkv_layout": "bshd_bshd_bshd", "aux_ctx_tensors": aux}
            results[backend] = fused_attn_bwd(**call, o=out, d_o=quantize(d_o) if d_o_in_fp8 else d_o, **how)[:3]
    assert [sdpa.direction for sdpa in emulated.asked if sdpa.fp8 is not None].count("backward") > 0
    for got, want in zip(results["cudnn"], results["eager"], strict=True):
        assert float((got.double() - want.double()).norm()) < 0.1 * float(want.double().norm())


def test_auto_leaves_fp8_to_triton_so_that_a_16_bit_gradient_never_comes_to_cudnn() -> None:
    spec, x = as_call(make_case(**CASES["bshd"]))
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        for direction in ("forward", "backward"):
            assert "cudnn" not in preference(spec._replace(capability=capability), direction).order
    assert not [rule for rule in crossovers.RULES["cudnn"] if "float8" in str(rule.dtype)], (
        "a rule would put cuDNN into auto's order"
    )
    out, lse, _ = cudnn_backend.forward(spec, x)
    with pytest.raises(ValueError, match=r"dout is torch.bfloat16, and cuDNN's FP8 backward needs dout in FP8 with a descale"):
        cudnn_backend.backward(spec, x._replace(descales=x.descales[:3]), out, lse, torch.zeros_like(out), None)


def test_each_rule_has_a_case() -> None:
    assert len(AGAINST) == len(cudnn_rules.FP8)
    fp8_spec = as_call(make_case(**CASES["bshd"]))[0]
    for rule, ((direction, against), (near_direction, near)) in zip(cudnn_rules.FP8, AGAINST, strict=True):
        spec = fp8_spec._replace(**against)
        reason = rule.reason.format(spec=spec)
        assert rule.applies(spec)
        assert cudnn_backend.rule_error(spec, direction) == reason
        assert refusal(cudnn_rules.FP8, fp8_spec._replace(**near), near_direction) is None
        assert all(refusal(cudnn_rules.FP8, spec, each) != reason for each in cudnn_rules.BOTH if each not in rule.directions)
        assert any(
            advice in rule.reason
            for advice in ("backend='triton'", "backend='eager'", "attn_mask_type='causal'", "pad with zeros", "quantise")
        )
