"""Backwards on a GPU: parts of the keys by the out and lse of all, on each family of kernels, and graphs that are retained."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention_backward, call_cache, ops
from flexattn.dispatch.reference import reference_gradients
from flexattn.functional import bind_call
from flexattn.testing import GRADIENT_FACTOR, check_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

LENGTH, CUTS = 700, (0, 250, 700)


def make_tensors(dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, LENGTH, heads, head_dim, device="cuda", generator=generator).to(dtype) for heads in (6, 2, 2)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 64)]
)
def test_parts_add_up(dtype: torch.dtype, head_dim: int, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal over all keys, by parts: the queries from a part's first key on."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    q, k, v = make_tensors(dtype, head_dim)
    how: dict[str, Any] = {"attn_mask_type": "causal", "deterministic": deterministic, "backend": "triton"}
    out, lse = flexattn.attention(q, k, v, **how, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    x, settings = bind_call(*(t.clone().requires_grad_() for t in (q, k, v)), **how)
    exact, budget = (reference_gradients(ops.spec_to_run(x, settings), x, dout, dlse, kind) for kind in (torch.float64, dtype))
    for _ in range(4):  # played from the third on
        dq = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
        parts = []
        for begin, end in itertools.pairwise(CUTS):
            rows = slice(begin, None)
            parts.append(
                attention_backward(
                    *(dout[:, rows], q[:, rows], k[:, begin:end], v[:, begin:end], out[:, rows], lse[..., rows]),
                    dlse=dlse[..., rows],
                    **how,
                )
            )
            dq[:, rows] += parts[-1].dq
        found = {"dq": dq, "dk": torch.cat([part.dk for part in parts], 1), "dv": torch.cat([part.dv for part in parts], 1)}
        for name, got in found.items():
            want, same_dtype = (getattr(gradients, name) for gradients in (exact, budget))
            check_close(name, got, want, same_dtype, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_retained_graph_of_the_first_call_gives_the_same_bits_each_time(backend: str) -> None:
    """The first backward is computed, the second taken down, the others are played; likewise of a later call."""
    leaves = [t.requires_grad_() for t in make_tensors(torch.bfloat16, 128)]

    def attend() -> Tensor:
        out: Tensor = flexattn.attention(*leaves, attn_mask_type="causal", deterministic=True, backend=backend)
        return out

    out = attend()
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for graph in (out, attend(), attend()):
        for _ in range(4):
            found = torch.autograd.grad(graph, leaves, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for _ in range(4):  # of a scalar, whose dout has strides of its own
            torch.autograd.grad(graph.sum(), leaves, retain_graph=True)
    assert call_cache.cache_info()["recordings"] >= 2
