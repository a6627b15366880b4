"""batch_invariant calls in the forward for sm_90, in the emulator: the bits of a sequence alone, in a batch and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.common import problem as problems
from flexattn.kernels_triton.common.split_kv import number_of_splits
from flexattn.kernels_triton.hopper import conditions
from flexattn.kernels_triton.hopper import forward as hopper_forward
from flexattn.kernels_triton.runtime.device import pretended_device
from tests.support.gluon_calls import HARMLESS, without_gpu

LENGTHS = (300, 150, 600)
HEADS, HEADS_KV, DIM = 4, 2, 64


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "SPLIT_PIECE", 256)


def attend(rows: list[int], counts: list[int], capacity: int, **call: Any) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, len(LENGTHS), 640, HEADS_KV, DIM, generator=generator).bfloat16()[:, rows, :capacity]
    own = [torch.randn(n, HEADS, DIM, generator=generator).bfloat16() for n in LENGTHS]
    x, settings = bind_call(
        torch.cat([own[b][LENGTHS[b] - n :] for b, n in zip(rows, counts, strict=True)]),
        k,
        v,
        qkv_format="thd_2bshd",
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
        max_seqlen_q=max(counts),
        seqused_kv=torch.tensor([LENGTHS[b] for b in rows], dtype=torch.int32),
        batch_invariant=True,
        **call,
    )
    spec = ops.spec_to_run(x, settings)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    problem = triton_backend.to_problem(spec, x)
    with emulated(3, hopper_forward) as reports:
        with pretended_device(90, 132):
            assert conditions.forward_unsupported(problem, as_bshd(out, spec.q_format)) is None
            assert number_of_splits(problem, 1, 132) == max(2, -(-capacity // 256))
        hopper_forward.hopper_forward(problem, as_bshd(out, spec.q_format), lse)
    for report in reports.values():
        assert {finding.kind for finding in report.findings} <= HARMLESS
    return list(zip(out.split(counts), lse.T.split(counts), strict=True))


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("call", [{}, {"window_size": (200, 0)}, {"softcap": 5.0}], ids=str)
def test_alone_in_a_batch_and_in_chunks(call: dict[str, Any]) -> None:
    alone = [attend([b], [70], LENGTHS[b], **call)[0] for b in range(3)]
    for counts in ([70, 70, 70], [1, 1, 1], [65, 3, 30]):
        for b, ((out, lse), count) in enumerate(zip(attend([0, 1, 2], counts, 640, **call), counts, strict=True)):
            assert torch.equal(out, alone[b][0][70 - count :]), (counts, b)
            assert torch.equal(lse, alone[b][1][70 - count :]), (counts, b)
