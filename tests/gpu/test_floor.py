"""A finite score that masks, on a GPU: each call, captured too, has one launch more than the option; a low score fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, call_cache
from flexattn.dispatch.replay import Recording
from flexattn.kernels_triton.runtime.launch import watched_launches
from tests.conftest import FreshPython

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

SHAPE = (2, 333, 4, 128)


def causal(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, score, -1e9)


def inputs() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(SHAPE, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def launches_of(**call: Any) -> list[str]:
    """Returns the kernels that a first call launches through Triton's launcher."""
    call_cache.clear_cache()
    seen: list[str] = []
    with watched_launches(lambda direct, programs, arguments: seen.append(direct.name if direct is not None else "unnamed")):
        attention(*inputs(), **call)
    return seen


def steps_of(**call: Any) -> list[str]:
    """Returns the steps that a call of that kind replays."""
    call_cache.clear_cache()
    qkv = inputs()
    for _ in range(3):
        attention(*qkv, **call)
    (kept,) = call_cache.kept_calls()
    assert isinstance(kept.forwards.recording, Recording)
    return [kind for kind, _, _ in kept.forwards.recording.steps]


@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_the_check_is_one_launch(backend: str) -> None:
    if backend == "cudnn":
        pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    option, number = ({"backend": backend, **how} for how in ({"attn_mask_type": "causal"}, {"score_mod": causal}))
    assert launches_of(**number) == [*launches_of(**option), "_floor_kernel"]
    assert steps_of(**number).count("launch") == steps_of(**option).count("launch") + 1


def test_the_results_are_the_options() -> None:
    qkv = inputs()
    dout = torch.randn_like(qkv[0])
    for _ in range(3):  # step by step, recorded, replayed
        found = [attention(*qkv, score_mod=causal), attention(*qkv, attn_mask_type="causal")]
        for a, b in zip(*(torch.autograd.grad(out, qkv, dout) for out in found), strict=True):
            torch.testing.assert_close(a, b)
        assert torch.equal(*found)


def test_a_captured_graph_replays_it() -> None:
    q, k, v = (t.detach() for t in inputs())
    for _ in range(3):
        attention(q, k, v, score_mod=causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, score_mod=causal)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, attn_mask_type="causal"))


FAILING = """
import sys, torch
from flexattn import attention

def causal(score, b, h, i, j):
    return torch.where(i >= j, score, -1e9)

q, k, v = (torch.randn(2, 333, 4, 128, device="cuda") for _ in "qkv")
how = {"score_mod": causal, "backend": sys.argv[2]}
if sys.argv[2] == "cudnn":
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
low_q, low_k = torch.full_like(q, 1e5), torch.full_like(k, -1e9 / 128 / 1e5 * 128**0.5 * 1.5)
for _ in range(int(sys.argv[1])):
    attention(q, k, v, **how)
torch.cuda.synchronize()
if sys.argv[3] == "captured":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, k, v, **how)
    torch.cuda.synchronize()
    q.copy_(low_q), k.copy_(low_k)
    torch.cuda.synchronize()
    print("before", flush=True)
    graph.replay()
else:
    print("before", flush=True)
    attention(low_q, low_k, v, **how)
    print("nothing waited", flush=True)
try:
    torch.cuda.synchronize()
except RuntimeError as e:
    print("raised", "device-side assert" in str(e), flush=True)
"""


@pytest.mark.parametrize(
    ("calls_before", "backend", "how"),
    [(0, "triton", "plain"), (3, "triton", "plain"), (3, "eager", "plain"), (3, "cudnn", "plain"), (3, "triton", "captured")],
)
def test_a_low_score_fails_an_assertion_on_the_device(calls_before: int, backend: str, how: str, fresh_python: FreshPython) -> None:
    """In a first call, and in a replayed one."""
    if backend == "cudnn":
        pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    done = fresh_python("-c", FAILING, str(calls_before), backend, how)
    assert "before" in done.stdout, done.stderr
    assert "raised True" in done.stdout, done.stdout + done.stderr
    assert "nothing waited" in done.stdout or how == "captured"
    assert "a query has no score above" in done.stdout + done.stderr
