"""What surrounds cuDNN: layouts, lengths, offsets, padding, queries that see nothing; with cuDNN itself emulated, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import cudnn_emulator
from test_support import ROWS, make_case

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.spec import Gradients
from flexattn.kernels_cudnn import attention
from flexattn.testing import GRADIENT_FACTOR, check_close, reference_attention, reference_gradients


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[cudnn_emulator.EmulatedPlans]:
    plans = cudnn_emulator.EmulatedPlans()
    monkeypatch.setattr(attention, "execute", cudnn_emulator.execute)
    monkeypatch.setattr(attention, "PLANS", plans)
    cudnn_backend._exact_shapes.clear()
    yield plans
    cudnn_backend._exact_shapes.clear()


CASES = {f"{section}: {name}": row for section, rows in ROWS.items() for name, row in rows.items()}


@pytest.mark.parametrize("bucketed", [False, True], ids=["exact", "bucketed"])
@pytest.mark.parametrize("name", CASES)
def test_row(name: str, bucketed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    row = CASES[name]
    row = row._replace(inputs={"dtype": torch.bfloat16, **row.inputs})
    case = make_case(row, "cpu")
    spec = case.spec._replace(return_max_logit="return_max_logit" in row.call)
    asked = spec._replace(device_type="cuda", capability=(9, 0), dropout_in_sixteenths=True)
    if reason := cudnn_backend.rule_error(asked, "forward"):
        pytest.skip(f"refused: {reason}")
    if bucketed:
        monkeypatch.setattr(cudnn_backend, "EXACT_SHAPES", 0)
    out, lse, max_logit = cudnn_backend.forward(spec, case.operands)
    exact = reference_attention(case.spec, case.operands)
    same_dtype = reference_attention(case.spec, case.operands, dtype=case.spec.dtype)
    got = (out, lse, max_logit) if spec.return_max_logit else (out, lse)
    for what, g, ref, eager in zip(("out", "lse", "max_logit"), got, exact, same_dtype, strict=False):
        check_close(what, g, ref, eager)
    if cudnn_backend.rule_error(asked, "backward"):
        return
    gradients = cudnn_backend.backward(spec, case.operands, out, lse, case.dout, None)
    exact_gradients = reference_gradients(case.spec, case.operands, case.dout)
    budget = reference_gradients(case.spec, case.operands, case.dout, dtype=case.spec.dtype)
    for what, g, ref, eager in zip(Gradients._fields, gradients, exact_gradients, budget, strict=True):
        assert (g is None) == (ref is None)
        if g is not None:
            check_close(what, g, ref, eager, factor=GRADIENT_FACTOR)
