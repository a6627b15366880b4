"""GPUs on which no cuDNN call was run yet: real plans for them, built without one, and their descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.explain import explain
from flexattn.dispatch.select import RuntimeFailure, answer_of, backend_module, forget_rejections, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.testing import make_call, make_inputs
from tests.api.test_support import on_h200
from tests.support import cudnn_stub

OTHERS = sorted(set(cudnn_stub.DEVICES) - {(9, 0)})


def call_of(
    capability: tuple[int, int], fmt: str = "bshd", head_dims: tuple[int, int] = (64, 64), length: int = 200, **call: Any
) -> tuple[AttentionSpec, Operands]:
    sizes = {"num_heads": 8, "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1], "dtype": torch.bfloat16}
    inputs = make_inputs(fmt, lengths_q=[length] * 2, lengths_kv=[length] * 2, **sizes)
    spec, x = make_call(inputs, return_max_logit=False, **call)
    return on_h200(spec, x)._replace(capability=capability), x


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN 9.19 and Triton, as far as the choice asks."""
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    monkeypatch.setattr(cudnn_backend, "library_error", lambda: None)
    monkeypatch.setattr(cudnn_backend, "_version", lambda: 91900)
    monkeypatch.setattr(cudnn_backend, "provisional", lambda spec, x, direction: None)
    select.cache_clear()
    yield
    monkeypatch.undo()
    forget_rejections()


@pytest.mark.usefixtures("all_there")
@pytest.mark.parametrize("capability", OTHERS, ids=str)
def test_triton_comes_first_and_cudnn_says_that_it_was_not_run(capability: tuple[int, int], monkeypatch: Any) -> None:
    spec, x = call_of(capability)
    said = f"not run on sm_{capability[0]}{capability[1]} yet"
    for direction in ("forward", "backward"):
        assert select(spec, direction, "auto").backend == "triton"  # type: ignore[arg-type]
        assert said in answer_of("cudnn", spec, direction)  # type: ignore[arg-type]
    assert f"  {said}" in explain(spec, "cudnn", x).details
    monkeypatch.setattr(backend_module("triton"), "unsupported", lambda spec, direction: "not today")
    select.cache_clear()
    assert select(spec, "forward", "auto").backend == "cudnn"
    assert "not run" not in explain(spec._replace(capability=(9, 0)), "cudnn", x).details


@pytest.mark.parametrize("capability", [(9, 0), *OTHERS], ids=str)
def test_dense_calls_share_plans_for_packed_ones_only_where_these_have_a_backward(capability: tuple[int, int]) -> None:
    cudnn_backend.exact_shapes.clear()
    shared = [cudnn_backend._is_bucketed(*call_of(capability, length=n)) for n in range(200, 200 + cudnn_backend.EXACT_SHAPES + 1)]
    cudnn_backend.exact_shapes.clear()
    assert any(shared) == (capability[0] in (9, 10))


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask_type": "causal", "head_dims": (128, 128)},
    "packed": {"fmt": "thd", "attn_mask_type": "padding_causal"},
    "head dim 256": {"head_dims": (256, 256)},
    "head dims 192 and 128": {"head_dims": (192, 128), "attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (50, 0)},
    "padded": {"attn_mask_type": "padding_causal_bottom_right"},
    "sink": {"softmax_type": "learnable", "softmax_offset": torch.zeros(8)},
    "dropout": {"dropout_p": 0.25, "rng_state": torch.zeros(2, dtype=torch.int64)},
    "bias": {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 8, 200, 200)},
}
# Backwards that cuDNN 9.19 declines on them, by the major capability.
SMALL = "hidden_dim should be less than or equal to 128"
PACKED = "ragged LSE is not supported for bprop"
DECLINED = {
    8: {"packed": PACKED, "head dim 256": SMALL, "head dims 192 and 128": SMALL},
    10: {"head dim 256": SMALL},
    12: {"packed": PACKED, "head dim 256": SMALL, "head dims 192 and 128": SMALL},
}


@pytest.fixture
def driver() -> None:
    if reason := ("a GPU is here" if torch.cuda.is_available() else cudnn_stub.missing()):
        pytest.skip(reason)
    cudnn_stub.load()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("capability", OTHERS, ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample("name", "capability")
def test_cudnn_decides(name: str, direction: Direction, capability: tuple[int, int], monkeypatch: Any) -> None:
    from flexattn.kernels_cudnn import plans

    monkeypatch.delenv("FLEXATTN_PLANS", raising=False)
    spec, x = call_of(capability, **CALLS[name])
    reason = DECLINED[capability[0]].get(name) if direction == "backward" else None
    forget_rejections()
    assert cudnn_backend.unsupported(spec, direction) is None
    with plans.without_device(cudnn_stub.DEVICES[capability]):
        if reason is None:
            cudnn_backend.prepare(spec, x, direction)
        else:
            with pytest.raises(RuntimeFailure, match=reason):
                cudnn_backend.prepare(spec, x, direction)
    plans.PLANS.clear()
