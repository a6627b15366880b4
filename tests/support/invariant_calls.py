"""Batch-invariant calls of a kernel in Gluon, in the emulator: sequences alone, in batches, in chunks, packed and over pages."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import ops
from flexattn.bench.emulated import PROGRAMS, emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import as_bshd, empty_outputs
from flexattn.functional import bind_call
from flexattn.kernels_triton.common.split_kv import number_of_splits
from flexattn.kernels_triton.runtime.device import pretended_device
from tests.support.gluon_calls import HARMLESS
from tests.support.pages import make_pool

HEADS, HEADS_KV = 4, 2


class Kernel(NamedTuple):
    """A forward: the module that `emulated` takes, its launcher, the module with its conditions, and the device."""

    module: ModuleType
    launch: Any
    conditions: ModuleType
    capability: int


def attend(
    kernel: Kernel,
    lengths: tuple[int, ...],
    rows: list[int],
    counts: list[int],
    *,
    capacity: int = 0,
    page_size: int = 0,
    dim: int = 64,
    **call: Any,
) -> list[tuple[Tensor, Tensor]]:
    """Returns out and lse of the last queries of sequences `rows`, `counts` of each, in one call.

    capacity: of a dense cache, or of pages; 0: the keys are packed, as in training.
    """
    generator = torch.Generator().manual_seed(0)
    longest = max(lengths)
    k, v = torch.randn(2, len(lengths), longest + 40, HEADS_KV, dim, generator=generator).bfloat16()
    own = [torch.randn(n, HEADS, dim, generator=generator).bfloat16() for n in lengths]
    used = [lengths[b] for b in rows]
    where: dict[str, Any] = {"qkv_format": "thd_2bshd", "seqused_kv": torch.tensor(used, dtype=torch.int32)}
    if page_size:
        pool = make_pool(k[rows, :capacity], v[rows, :capacity], used, page_size, seed=page_size)
        k, v = pool.k.nan_to_num(0.0), pool.v.nan_to_num(0.0)
        where |= {"page_table": pool.page_table, "max_seqlen_kv": capacity}
    elif capacity:
        k, v = k[rows, :capacity], v[rows, :capacity]
    else:
        k, v = (torch.cat([x[b, : lengths[b]] for b in rows]) for x in (k, v))
        where = {"qkv_format": "thd", "cu_seqlens_kv": torch.tensor([0, *used]).cumsum(0).int(), "max_seqlen_kv": max(used)}
    x, settings = bind_call(
        torch.cat([own[b][lengths[b] - n :] for b, n in zip(rows, counts, strict=True)]),
        k,
        v,
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
        max_seqlen_q=max(counts),
        batch_invariant=True,
        **where,
        **call,
    )
    spec = ops.spec_to_run(x, settings)
    out, lse, _ = (t.fill_(float("nan")) for t in empty_outputs(spec, x))
    problem = triton_backend.to_problem(spec, x)
    with emulated(3, kernel.module) as reports, pretended_device(kernel.capability, PROGRAMS):
        assert kernel.conditions.forward_unsupported(problem, as_bshd(out, spec.q_format)) is None
        assert number_of_splits(problem, 1, PROGRAMS) == max(2, -(-problem.longest_kv // problem.piece))
        kernel.launch(problem, as_bshd(out, spec.q_format), lse)
    for report in reports.values():
        assert {finding.kind for finding in report.findings} <= HARMLESS
    return list(zip(out.split(counts), lse.T.split(counts), strict=True))


def check(kernel: Kernel, lengths: tuple[int, ...], ways: list[tuple[list[int], dict[str, Any]]], **call: Any) -> None:
    """Compares sequences alone, packed, with the last queries of each in one call.

    ways: (numbers of queries, arguments of `attend`) of the calls.
    """
    most = [max(counts[b] for counts, _ in ways) for b in range(len(lengths))]
    alone = [attend(kernel, lengths, [b], [most[b]], **call)[0] for b in range(len(lengths))]
    for counts, how in ways:
        found = attend(kernel, lengths, [*range(len(lengths))], counts, **how, **call)
        for b, ((out, lse), count) in enumerate(zip(found, counts, strict=True)):
            assert torch.equal(out, alone[b][0][most[b] - count :]), (counts, how, b)
            assert torch.equal(lse, alone[b][1][most[b] - count :]), (counts, how, b)
