"""Calls in FP8 with block masks: blocks of 32 and more compile, and smaller ones are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexattn import attention, create_block_mask, fp8
from flexattn.dispatch import eager_backend, triton_backend
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import Direction, Fp8
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.dispatch.test_head_dims import spec_of
from tests.support.compiled_kernels import compile_sound

FP8 = Fp8((False, False, False), 0, torch.bfloat16, torch.float8_e5m2, bf16_backward=False)


def attend(block_size: tuple[int, int], backend: str | None, length: int = 70) -> Tensor:
    x = torch.randn(1, length, 1, 32, dtype=torch.bfloat16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu", BLOCK_SIZE=block_size)
    out: Tensor = attention(x, x, x, block_mask=mask, fp8_recipe=fp8.Recipe(), backend=backend)
    return out


@pytest.mark.parametrize(("block_size", "enough"), [((16, 16), (32, 32)), ((64, 48), (64, 64)), ((16, 128), (32, 128))])
def test_small_blocks_are_refused(block_size: tuple[int, int], enough: tuple[int, int]) -> None:
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        spec = spec_of(64, 64, dtype=torch.float8_e4m3fn, fp8=FP8, block_size=block_size)
        reason = triton_backend.unsupported(spec, direction)
        assert f"must be a multiple of 32, and it is {block_size}; make it with BLOCK_SIZE={enough}" in str(reason)
        assert triton_backend.unsupported(spec._replace(block_size=enough), direction) is None
        assert eager_backend.unsupported(spec, direction) is None


@pytest.mark.slow
def test_a_call_with_small_blocks_has_another_backend() -> None:
    with pytest.raises(BackendError, match="must be a multiple of 32"):
        attend((16, 16), "triton")
    assert attend((16, 16), None).isfinite().all()


@pytest.mark.slow
def test_the_smallest_blocks_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    with pretended_device(90, 132), recorded_launches() as launches:
        attend((32, 96), "triton")
    (forward,) = (launch for launch in launches if launch.kernel.__name__ == "_attn_fwd_kernel")
    compile_sound([request_for(forward, 90)])
