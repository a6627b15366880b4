"""The portable forward with a bias in 16 bits, compiled for sm_90: how a tile of the bias is loaded."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, request_for
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound


def forward_report(length: int, monkeypatch: pytest.MonkeyPatch) -> CompileReport:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    q = torch.empty(2, length, 4, 32, dtype=torch.bfloat16)
    bias = torch.empty(1, 4, length, length, dtype=torch.bfloat16)
    with pretended_device(90, 132), recorded_launches() as launches:
        attention(q, q, q, bias=bias, bias_type="post_scale_bias", backend="triton")
    (report,) = compile_sound([request_for(launches[0], 90)])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("length", [384, 381])
def test_a_bias_is_loaded_for_the_layout_of_the_products(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """384: rows begin at multiples of 16 bytes, and copies of 16 bytes are asynchronous."""
    report = forward_report(length, monkeypatch)
    loops = [loop for loop in report.loops if "HGMMA" in loop]
    assert len(loops) == 2  # blocks without and with a mask
    for loop in loops:
        if length % 8 == 0:
            assert "LDG" not in loop
        # A tile has 32 exponentials a thread. If the compiler chooses the load's layout for the statistics, it has them twice.
        assert loop["MUFU"] < 2 * 32
    assert not report.spill_store_bytes
