"""cuDNN's launchers with results in layouts of their own. cuDNN is emulated, on any device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.spec import Results, dqkv_of, empty_gradients
from flexattn.kernels_cudnn import attention
from flexattn.kernels_cudnn import plans as plans_module
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.support import cudnn_emulator


@pytest.fixture(autouse=True, params=[True, False], ids=["reads all", "reads no ragged padding"])
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[cudnn_emulator.EmulatedPlans]:
    plans = cudnn_emulator.EmulatedPlans()
    monkeypatch.setattr(attention, "execute", cudnn_emulator.execute)
    monkeypatch.setattr(attention, "PLANS", plans)
    monkeypatch.setattr(plans_module, "PLANS", plans)
    monkeypatch.setattr(attention, "_reads_ragged_padding", lambda: request.param)
    monkeypatch.setattr(cudnn_emulator, "reads_ragged_padding", request.param)
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()
    yield plans
    for kept in (cudnn_backend.exact_shapes, cudnn_backend.prepared_calls):
        kept.clear()


@pytest.mark.parametrize(
    ("fmt", "results"),
    [
        ("bshd", Results("sbhd", packing="3hd")),
        ("bshd", Results(dq="sbhd", dkv="sbhd", packing="hd_h2d")),
        ("sbhd", Results("bhsd", "bshd", "bshd", "h3d")),
        ("thd", Results(packing="3hd")),
        ("thd", Results(packing="hd_h2d")),
    ],
)
def test_results(fmt: str, results: Results, emulated: cudnn_emulator.EmulatedPlans) -> None:
    """The results are right, the plan that is built ahead runs, and dense gradients are written in place."""
    lengths = [17, 9] if fmt == "thd" else [17, 17]
    inputs = make_inputs(fmt, lengths_q=lengths, lengths_kv=lengths, num_heads=2, num_heads_kv=2, dtype=torch.bfloat16)
    spec, x = make_call(inputs, attn_mask_type="padding_causal" if fmt == "thd" else "causal")
    spec = spec._replace(device_type="cuda", capability=(9, 0), return_max_logit=False)
    wanted, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    dout = make_dout(inputs)
    exact, same_dtype = (reference_gradients(spec, x, dout, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    spec = spec._replace(results=results)
    cudnn_backend.prepare(spec, x, "forward")
    out, lse, _ = cudnn_backend.forward(spec, x)
    check_close("out", out, wanted[0], budget[0])
    assert out.stride() == results.empty_out(x.q, fmt, x.v.shape[-1], out.dtype).stride()
    cudnn_backend.prepare(spec, x, "backward")
    written: list[torch.Tensor] = []
    real = cudnn_emulator.execute

    def execute(plan: object, buffers: dict[int, torch.Tensor], device: torch.device) -> None:
        written.extend(buffers.values())
        real(plan, buffers, device)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "execute", execute)
        stored = cudnn_backend.backward(spec, x, out, lse, dout, None)
    assert emulated.asked[::2] == emulated.asked[1::2]
    assert [None if t is None else t.shape for t in stored[:3]] == [
        None if t is None else t.shape for t in empty_gradients(spec, x)[:3]
    ]
    views = dqkv_of(spec, stored)
    for name, got, want, plain in zip(("dq", "dk", "dv"), views, exact, same_dtype, strict=False):
        check_close(name, got, want, plain, factor=GRADIENT_FACTOR)
    if fmt != "thd":  # cuDNN is not proved right for packed tokens with gaps, so it writes contiguous buffers
        addresses = {t.data_ptr() for t in written}
        assert all(t.data_ptr() in addresses for t in views)
    else:
        assert all(t.is_contiguous() for t in written if t.dim() == 3 and t.element_size() == 2 and t.shape == x.k.shape)
