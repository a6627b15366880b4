"""score_mod and mask_mod on cuDNN without a GPU: the results of the graphs' nodes, against the reference in fp64; and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands
from flexattn.kernels_cudnn import attention
from flexattn.kernels_cudnn import plans as plans_module
from flexattn.testing import GRADIENT_FACTOR, Inputs, check_close, make_dout, reference_attention, reference_gradients
from tests.support import cudnn_emulator
from tests.support.cudnn_mods import CALLS, CASES, SHAPES, WITH, Case, mods_call

LENGTHS = {
    "equal": ([133, 133], [150, 150]),
    "uneven": ([133, 40], [81, 150]),
    "fewer keys": ([150, 150], [81, 81]),
    "empty": ([133, 0, 40, 70], [81, 40, 150, 0]),
    "whole tiles": ([128, 128], [256, 256]),
    "half a tile": ([128, 128], [192, 192]),
    "few keys": ([129, 129], [3, 3]),
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[cudnn_emulator.EmulatedPlans]:
    plans = cudnn_emulator.EmulatedPlans()
    monkeypatch.setattr(attention, "execute", cudnn_emulator.execute)
    monkeypatch.setattr(attention, "PLANS", plans)
    monkeypatch.setattr(plans_module, "PLANS", plans)  # `prepare` asks there
    monkeypatch.setattr(attention, "_reads_ragged_padding", lambda: True)
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()
    yield plans
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()


def check(case: Case, spec: AttentionSpec, x: Operands, given: Inputs, plans: cudnn_emulator.EmulatedPlans) -> None:
    """Checks the results, and that the plan that is built ahead is the plan that runs."""
    if case.refused:
        assert case.refused in str(cudnn_backend.rule_error(spec, "forward"))
        return
    assert cudnn_backend.rule_error(spec, "forward") is None
    cudnn_backend.prepare(spec, x, "forward")
    out, lse, max_logit = cudnn_backend.forward(spec, x)
    exact, same_dtype = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    got = (out, lse, max_logit) if spec.return_max_logit else (out, lse)
    for what, g, ref, eager in zip(("out", "lse", "max_logit"), got, exact, same_dtype, strict=False):
        check_close(what, g, ref, eager)
    if case.backward_refused:
        assert case.backward_refused in str(cudnn_backend.rule_error(spec, "backward"))
        return
    assert cudnn_backend.rule_error(spec, "backward") is None
    cudnn_backend.prepare(spec, x, "backward")
    dout = make_dout(given)
    gradients = cudnn_backend.backward(spec, x, out, lse, dout, None)
    exact_gradients = reference_gradients(spec, x, dout)
    budget = reference_gradients(spec, x, dout, dtype=spec.dtype)
    for what, g, ref, eager in zip(Gradients._fields, gradients, exact_gradients, budget, strict=True):
        assert (g is None) == (ref is None)
        if g is not None:
            check_close(what, g, ref, eager, factor=GRADIENT_FACTOR)
    assert plans.asked[::2] == plans.asked[1::2]
    assert len(plans.asked) == 4


@pytest.mark.sample("shape")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_mods(name: str, shape: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    spec, x, given = mods_call(CASES[name], SHAPES[shape], LENGTHS, "cpu")
    check(CASES[name], spec, x, given, emulated)


@pytest.mark.sample
@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("call", CALLS)
def test_mods_with_the_rest(call: str, name: str, emulated: cudnn_emulator.EmulatedPlans) -> None:
    spec, x, given = mods_call(CASES[name], CALLS[call], LENGTHS, "cpu")
    check(CASES[name], spec, x, given, emulated)
