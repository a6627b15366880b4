"""The portable forward with a bias in 16 bits, compiled for sm_90: how a tile of the bias is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import AuxRequest, attention, create_block_mask
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.portable import forward
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import launch, recorded_launches
from tests.support.compiled_kernels import compile_sound
from tests.support.memory_check import checked_memory


def forward_report(length: int, monkeypatch: pytest.MonkeyPatch, **arguments: object) -> CompileReport:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    q = torch.empty(2, length, 4, 32, dtype=torch.bfloat16)
    bias = torch.empty(1, 4, length, length, dtype=torch.bfloat16)
    with pretended_device(90, 132), recorded_launches() as launches:
        attention(q, q, q, bias=bias, bias_type="post_scale_bias", backend="triton", **arguments)  # type: ignore[arg-type]
    (report,) = compile_sound([request_for(launches[0], 90)])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("length", [384, 380, 382, 381])
def test_a_bias_is_loaded_for_the_layout_of_the_products(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an even length begin at multiples of 4, 8 or 16 bytes, and such copies are asynchronous."""
    report = forward_report(length, monkeypatch)
    loops = [loop for loop in report.loops if "HGMMA" in loop]
    assert len(loops) == (1 if length % 64 == 0 else 2)  # whole tiles, and a tile with the end
    if length % 2 == 0:
        assert "LDG" not in loops[0]
    for loop in loops:
        # A tile has 32 exponentials a thread. If the compiler chooses the load's layout for the statistics, it has them twice.
        assert loop["MUFU"] < 2 * 32
    assert report.loop_spill_share <= 0.04  # the tile limits registers


@pytest.mark.slow
def test_a_mask_of_keys_is_loaded_once_for_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread would otherwise load the mask of its own 16 keys, byte by byte."""
    report = forward_report(384, monkeypatch, mask=torch.ones(2, 1, 1, 384, dtype=torch.bool))
    loops = [loop for loop in report.loops if "HGMMA" in loop]
    assert [loop["LDG"] for loop in loops] == [1]
    assert report.loop_spill_share <= 0.04  # the tile limits registers


def check_fact(handle: Any, name: str, values: list[int]) -> None:
    """Raises AssertionError if a kernel tells the compiler something about a tile that does not hold."""
    data = handle.data
    if data.ndim == 2:
        rows = data.reshape(len(data), -1, values[1])
        if name == "tt.constancy":
            assert (rows == rows[..., :1]).all()
        elif name == "tt.divisibility":
            assert (rows[..., 0] % values[1] == 0).all()
    seen.append(name)


seen: list[str] = []
DOCUMENTS = torch.tensor([0, 13, 61, 72], dtype=torch.int32)
CALLS: dict[str, dict[str, Any]] = {
    "a window": {"window_size": (21, 0)},
    "blocks of 48": {
        "block_mask": create_block_mask(lambda b, h, i, j: (i + j) % 5 != 2, None, None, 72, 72, "cpu", BLOCK_SIZE=48)
    },
    "pieces": {"attn_mask_type": "causal", "batch_invariant": True},
    "lengths": {"attn_mask_type": "padding", "cu_seqlens_q": DOCUMENTS[:2] + 3, "cu_seqlens_kv": DOCUMENTS[:2] + 5},
}


@pytest.mark.sample("width")
@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU Triton does not interpret calls on a CPU")
@pytest.mark.parametrize(("name", "width"), [*((name, 72) for name in CALLS), ("a window", 68), ("pieces", 70)])
def test_a_load_of_a_bias_tells_the_compiler_the_truth(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns begin at multiples of 8, 4 or 2, and the masks of as many columns are equal, whatever keys a tile has."""
    from triton.runtime.interpreter import TensorHandle

    monkeypatch.setattr(TensorHandle, "set_attr", check_fact)
    seen.clear()
    q, k, v = (torch.randn(1, width, 1, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, width, width, requires_grad=True)
    request = AuxRequest(entropy=True, column_sums=True)
    out = attention(q, k, v, bias=bias, **CALLS[name], backend="triton", return_aux=request).out
    out.square().sum().backward()
    assert {"tt.constancy", "tt.divisibility"} <= {*seen}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's accesses are checked")
@pytest.mark.parametrize("rows", [1, 0])
def test_a_call_of_no_queries_reads_no_row(rows: int) -> None:
    """`rows`: of a bias that all queries share, or that has a row for each of them."""
    q, k, v = (torch.ones(1, length, 2, 16, requires_grad=True) for length in (0, 70, 70))
    bias = torch.ones(1, 1, rows, 70, requires_grad=True)
    with checked_memory():
        out, lse, max_logit = attention(
            q, k, v, bias=bias, bias_type="post_scale_bias", return_lse=True, return_max_logit=True, backend="triton"
        )
        gradients = torch.autograd.grad((out, lse), (q, k, v, bias), (torch.ones_like(out), torch.ones_like(lse)))
    assert (out.numel(), lse.numel(), max_logit.tolist()) == (0, 0, [float("-inf")] * 2)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU Triton does not interpret calls on a CPU")
@pytest.mark.parametrize(("causal", "keys"), [(False, 99), (True, 99), (False, 96)])
def test_a_mask_of_keys_beside_a_bias(causal: bool, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask differs by sequence, and hides scores that are no numbers, in whole tiles and in one with the end."""
    q, k, v = (torch.randn(2, keys, heads, 16) for heads in (2, 1, 1))
    mask = torch.rand(2, 1, 1, keys) < 0.6
    mask[0, ..., :40] = False
    bias = torch.randn(2, 2, keys, keys).masked_fill(~mask, float("nan"))
    bias[..., 3] = float("-inf")
    call: dict[str, Any] = {"mask": mask, "attn_mask_type": "causal" if causal else "no_mask"}
    want = attention(
        *(x.double() for x in (q, k, v)), bias=bias.double().nan_to_num(0.0, neginf=float("-inf")), **call, backend="eager"
    )
    constants = set()

    def launch_noting(kernel: Any, programs: int, device: Any, tile: Any, arguments: Any) -> None:
        meta = arguments[-1]
        constants.add((meta.MASKS_KEYS, meta.IS_WHOLE, meta.IS_NEAR))
        launch(kernel, programs, device, tile, arguments)

    monkeypatch.setattr(forward, "launch", launch_noting)
    near = attention(q, k, v, bias=bias, **call, backend="triton")
    monkeypatch.setattr(Problem, "is_near", False)
    far = attention(q, k, v, bias=bias, **call, backend="triton")
    assert constants == {(True, keys == 96, True), (True, keys == 96, False)}
    assert torch.equal(near, far)
    torch.testing.assert_close(near.double(), want, atol=2e-6, rtol=1e-5)


def test_elements_of_a_head_are_counted_with_32_bits_if_these_suffice() -> None:
    def is_near(keys: int, stride: int, bias_stride: int) -> bool:
        q = torch.empty(1, 3, 1, 16, device="meta")
        k = torch.empty_strided((1, keys, 1, 16), (keys * stride, stride, 16, 1), device="meta")
        bias = torch.empty_strided((1, 1, 3, keys), (0, 0, bias_stride, 1), device="meta")
        return Problem(q, k, k, softmax_scale=1.0, bias=bias).is_near

    assert is_near(2**20, 2**10, 2**20)
    assert not is_near(2**20, 2**11, 2**20)
    assert not is_near(2**20, 2**10, 2**23)
