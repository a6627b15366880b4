"""Advice about head dims: padding is suggested if it helps, and a backend that is suggested for larger ones runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch import cudnn_backend, eager_backend, triton_backend
from flexattn.dispatch.select import BackendError, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Fp8
from tests.dispatch.test_select import ON_CUDA

DIMS = (4, 12, 16, 250, 256, 257, 264, 300, 505, 512, 513, 520, 569, 576, 577, 1024)


def spec_of(dim_qk: int, dim_v: int, **changes: Any) -> AttentionSpec:
    own = {"num_heads": 8, "num_heads_kv": 8, "head_dim_qk": dim_qk, "head_dim_v": dim_v, "length_q": 1024, "length_kv": 1024}
    return ON_CUDA._replace(**{"dtype": torch.bfloat16, **own, **changes})


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dim_of", ["q and k", "v"])
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_padding_is_advised_where_it_helps(backend: str, dim_of: str, dim: int, direction: Direction) -> None:
    unsupported = {"triton": triton_backend.unsupported, "cudnn": cudnn_backend.rule_error}[backend]

    def spec(dim: int) -> AttentionSpec:
        return spec_of(dim, 64) if dim_of == "q and k" else spec_of(64, dim)

    reason = unsupported(spec(dim), direction)
    padded = unsupported(spec(-(-dim // 8) * 8), direction)
    if reason is None:
        assert dim % 8 == 0
        return
    assert reason.startswith(f"the head dim of {dim_of} is {dim}; ")
    assert ("pad it with zeros" in reason) == (padded is None)
    assert ("larger ones run on backend='eager'" in reason) == (padded is not None)
    assert ("pass v in parts of up to 512 columns" in reason) == (backend == "triton" and dim_of == "v" and padded is not None)
    assert eager_backend.unsupported(spec(dim), direction) is None


@pytest.mark.parametrize(
    ("backend", "direction", "dims"),
    [
        ("triton", "forward", (576, 512)),
        ("triton", "backward", (576, 512)),
        ("cudnn", "forward", (512, 512)),
        ("cudnn", "backward", (256, 256)),
    ],
)
def test_the_widest_head_dims_run(backend: str, direction: Direction, dims: tuple[int, int]) -> None:
    unsupported = {"triton": triton_backend.unsupported, "cudnn": cudnn_backend.rule_error}[backend]
    assert unsupported(spec_of(*dims), direction) is None
    assert unsupported(spec_of(dims[0] + 8, 64), direction) is not None
    assert unsupported(spec_of(64, dims[1] + 8), direction) is not None


def test_fp32_ends_at_256() -> None:
    assert triton_backend.unsupported(spec_of(256, 256, dtype=torch.float32), "backward") is None
    reason = triton_backend.unsupported(spec_of(512, 512, dtype=torch.float32), "backward")
    assert reason is not None
    assert reason.startswith("the head dim of q and k is 512; in fp32 the kernels support multiples of 8 up to 256")
    assert reason.endswith("larger ones run in 16 bits, or on backend='eager'")


def test_keys_in_fp8_end_at_256() -> None:
    assert triton_backend.unsupported(spec_of(256, 256, kv_dtype=torch.float8_e4m3fn), "forward") is None
    reason = triton_backend.unsupported(spec_of(512, 512, kv_dtype=torch.float8_e4m3fn), "forward")
    assert reason is not None
    assert reason.startswith("the head dim of q and k is 512; with FP8 keys the kernels support multiples of 8 up to 256")
    assert reason.endswith("larger ones run with 16-bit keys, or on backend='eager'")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("dim", "can_pad"), [(40, True), (250, True), (257, False), (264, False), (512, False)])
def test_fp8_is_told_to_pad_where_that_helps(dim: int, can_pad: bool, direction: Direction) -> None:
    fp8 = Fp8((False, False, False), 0, torch.bfloat16, torch.float8_e5m2, bf16_backward=False)
    spec = spec_of(dim, dim, dtype=torch.float8_e4m3fn, fp8=fp8)
    for reason in (triton_backend.unsupported(spec, direction), cudnn_backend.rule_error(spec, direction)):
        assert reason is not None
        assert ("with zeros" in reason) == can_pad or "pad smaller ones with zeros" in reason
        assert ("larger ones run on backend='eager'" in reason) != can_pad
    assert eager_backend.unsupported(spec, direction) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_fallback_gives_no_reason_for_a_backend_that_cannot(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_backend, "device_error", lambda *_: "cuDNN is not here")
    select.cache_clear()
    decision = select(spec_of(640, 512), direction, "auto")
    select.cache_clear()
    assert decision.backend == "eager"
    assert decision.why == "the first of triton, cudnn, eager that can run the call"
    assert decision.warning is not None
    assert "larger ones run on backend='eager'" in decision.warning
    with pytest.raises(BackendError, match="eager: can run it; ask for it with backend='eager'"):
        select(spec_of(640, 512), direction, "triton")
    select.cache_clear()
