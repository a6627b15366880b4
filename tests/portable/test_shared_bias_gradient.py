"""The kernel for the gradient of a bias that many batch entries share: the result of the kernel for every call, and its loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BIAS_GRADIENT, SHARED_BIAS_GRADIENT
from flexattn.kernels_triton.portable import shared_bias_gradient as kernels
from flexattn.kernels_triton.portable.score_gradients import bias_gradient
from flexattn.kernels_triton.portable.shared_bias_gradient import shared_bias_gradient, unsupported
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, SQ, SKV, D = 4, 2, 37, 20, 16

CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "plain": (torch.float32, 2, {}),
    "one for all": (torch.float16, 1, {"softmax_scale": 0.7}),
    "pre-scale, causal": (torch.bfloat16, 2, {"bias_type": "pre_scale_bias", "attn_mask_type": "causal_bottom_right"}),
    "key mask": (torch.float32, 2, {"mask": torch.rand(BATCH, 1, 1, SKV, generator=torch.Generator().manual_seed(5)) > 0.5}),
    "sink": (torch.float32, 2, {"softmax_type": "off-by-one", "window_size": (9, 30)}),
    "two parts": (torch.float32, 2, {}),
}


def gradient(monkeypatch: pytest.MonkeyPatch, name: str, splits: int | None, shift: float = 0.0) -> Tensor:
    """Returns the gradient of a bias. splits: those of the kernel for shared biases; None: the kernel for every call."""
    dtype, entries, options = CASES[name]
    seen: list[str] = []

    def watched(*arguments: Any) -> None:
        seen.append(name)
        shared_bias_gradient(*arguments, splits=splits)

    monkeypatch.setattr(kernels, "unsupported", unsupported if splits is not None else lambda problem: "it is not asked for")
    monkeypatch.setattr(kernels, "shared_bias_gradient", watched)
    generator = torch.Generator().manual_seed(0)
    d = 48 if name == "two parts" else D
    shapes = (BATCH, SQ, HEADS, d), (BATCH, SKV, 1, d), (BATCH, SKV, 1, d), (entries, HEADS, SQ, SKV)
    leaves = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    call = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    bias = leaves[3] if not shift else leaves[3].float() + shift
    out = flexattn.attention(*leaves[:3], bias=bias, backend="triton", **call)
    (found,) = torch.autograd.grad(out, leaves[3], torch.randn(out.shape, generator=generator).to(DEVICE, dtype))
    assert seen == ([] if splits is None else [name])
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "key mask" else pytest.mark.slow) for name in CASES])
def test_equals_the_kernel_for_every_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradient(monkeypatch, name, None)
    torch.testing.assert_close(gradient(monkeypatch, name, 2 if name == "key mask" else 1), wanted)


@pytest.mark.slow
def test_repeats_and_large_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(*(gradient(monkeypatch, "plain", 2) for _ in range(2)))
    torch.testing.assert_close(gradient(monkeypatch, "plain", 1, -9e4), gradient(monkeypatch, "plain", None, -9e4))


def problem(batch: int = BATCH, d: int = D, **fields: Any) -> Problem:
    q = torch.zeros(batch, SQ, HEADS, d, dtype=torch.bfloat16)
    return Problem(q, q, q, 0.1, **{"bias": torch.zeros(2, HEADS, SQ, SQ, dtype=torch.bfloat16), **fields})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (problem(), None),
        (problem(bias=torch.zeros(1, HEADS, SQ, SQ)), None),
        (problem(bias=None), "only a bias with all heads"),
        (problem(bias=torch.zeros(2, 1, SQ, SQ)), "only a bias with all heads"),
        (problem(bias=torch.zeros(2, HEADS, 1, SQ)), "only a bias with all heads"),
        (problem(bias=torch.zeros(BATCH, HEADS, SQ, SQ)), "a bias of its own"),
        (problem(seqused_kv=torch.ones(BATCH, dtype=torch.int32)), "equal lengths"),
        (problem(softcap=2.0), "no softcap"),
        (problem(dropout_p=0.5, rng_state=torch.zeros(2, dtype=torch.int64)), "no softcap"),
        (problem(d=96), None),
        (problem(d=136), "head dims up to 128, not 136 and 136"),
    ],
)
def test_other_calls_are_left_to_the_other_kernel(given: Problem, text: str | None) -> None:
    assert unsupported(given) == text if text is None else text in str(unsupported(given))
    if text is not None:
        with pytest.raises(ValueError, match=text):
            shared_bias_gradient(given, None, given.q, given.q)


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 80])
def test_the_loop_copies_ahead_and_reads_no_bias(sm: int) -> None:
    """The kernel for every call waits for each load of its loop, and reads the bias in each iteration."""
    requests, warps = [], []
    for d in (32, 48, 64):
        x = problem(32, d)
        statistics = (*torch.zeros(3, 32, HEADS, SQ), torch.zeros(1, dtype=torch.int32), torch.zeros(32, HEADS, SQ))
        with recorded_launches() as launches:
            bias_gradient(x, statistics, x.q, None, x.bias.clone(), x.tile(BIAS_GRADIENT, sm))
            shared_bias_gradient(x, statistics, x.q, x.bias.clone(), x.tile(SHARED_BIAS_GRADIENT, sm))
        warps += [(x.tile(BIAS_GRADIENT, sm).num_warps, x.tile(SHARED_BIAS_GRADIENT, sm).num_warps)]
        requests += [request_for(launch, sm) for launch in launches if "dbias" in launch.kernel.__name__]
    reports = compile_sound(requests)
    for old, new, (old_warps, new_warps) in zip(reports[::2], reports[1::2], warps, strict=True):
        before, after = (max(report.loops, key=lambda loop: sum(loop.values())) for report in (old, new))
        assert new.loop_spill_share <= 0.01, new
        assert after["LDGSTS"] > 0
        assert 2 * after["LDG"] * new_warps < before["LDG"] * old_warps
        assert sum(after.values()) * new_warps < sum(before.values()) * old_warps
