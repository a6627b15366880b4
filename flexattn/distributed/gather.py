"""Strategies "gather" and "halo": a rank's queries stay, and the keys that they see come: all of them, or those that are needed.

Where they are many, keys come in slices of heads: those of the next slice travel while one is attended to, and so do the gradients
of the one before. The backward fetches the keys again rather than keep them; gradients travel in float32.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.distributed import exchange
from flexattn.distributed.calls import (
    Call,
    Part,
    Results,
    Scores,
    Seeds,
    Shared,
    Sums,
    apart,
    attend_all,
    differentiate_all,
    empty_results,
    make_calls,
    of_heads,
    rows_first,
    sum_dtype,
    whole_gradients,
)
from flexattn.distributed.exchange import Route, make_route
from flexattn.distributed.layout import Run, Runs, cut, places, size_of
from flexattn.distributed.plans import Plan

SLICE_BYTES = 16 << 20  # received for one slice at least: below, the latency of a collective is more than what a slice hides
MOST_SLICES = 4


class _Work(NamedTuple):
    route: Route
    rows: Runs  # places of what is fetched in the tensor that calls read
    held: int  # rows of that tensor, of which those between are of keys that nothing sees
    calls: list[Call]
    received: int  # rows, by the rank that receives most: the same on all ranks, as the number of slices must be


class _Slice(NamedTuple):
    q: Run
    kv: Run


@functools.lru_cache(maxsize=32)
def _work(plan: Plan, strategy: str, wants_diagonal: bool, device: torch.device) -> _Work:
    wanted = [plan.fetched(strategy, rank) for rank in range(plan.ranks)]
    held = plan.held(strategy, plan.rank)
    calls = make_calls(plan.pieces(plan.rank, held), plan.is_packed, plan.mask.blocks, wants_diagonal, device)
    rows = places(wanted[plan.rank], held)
    return _Work(make_route(plan.kv_runs, wanted, plan.rank), rows, size_of(held), calls, plan.work(strategy).received)


def slices_of(heads: int, heads_kv: int, received_bytes: int) -> list[_Slice]:
    """Returns the slices of heads in which keys come, whose number is the same on all ranks."""
    count = max(1, min(MOST_SLICES, heads_kv, received_bytes // SLICE_BYTES))
    group = heads // heads_kv
    return [_Slice(Run(group * run.start, group * run.stop), run) for run in cut(heads_kv, count)]


class Gather(NamedTuple):
    """A call of attention by keys that come; `strategy` is "gather" or "halo"."""

    plan: Plan
    strategy: str
    scores: Scores

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns what a backward begins from beside results: the same, as it brings keys again."""
        return q, k, v

    def gathered_results(self, results: Results) -> Results:
        """Returns results as a backward takes them: the same."""
        return results

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        """Returns out and lse of this rank's queries, and what a backward needs."""
        packed, dim = self.plan.is_packed, k.shape[-1]
        coming = _Coming(self, q, rows_first(k, v, packed), shared)
        if len(coming.slices) == 1:
            results = attend_all(coming.work.calls, Part(q, *apart(coming.next(0), dim, packed)), coming.context(0), packed)
            return results, (q, k, v, *results)
        results = empty_results(q, v.shape[-1], packed, self.scores.out_dtype(q))
        for i, (of_q, _) in enumerate(coming.slices):
            heads = slice(*of_q)
            part = Part(q[..., heads, :], *apart(coming.next(i), dim, packed))
            found = attend_all(coming.work.calls, part, coming.context(i), packed)
            results.out[..., heads, :], results.lse[..., heads, :] = found
        return results, (q, k, v, *results)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> Sums:
        """Returns the gradients of this rank's q, k and v, and this rank's part of those of the shared tensors."""
        q, k, v, out, lse = saved
        packed, dim, group, wide = self.plan.is_packed, k.shape[-1], self.plan.group, sum_dtype(q.dtype)
        kv = rows_first(k, v, packed)
        coming = _Coming(self, q, kv, shared)
        dq = torch.empty(q.shape, dtype=self.scores.out_dtype(q), device=q.device)
        dkv = torch.empty(kv.shape, dtype=wide, device=kv.device)
        of_shared = shared.zeros()
        returning: list[exchange.Pending] = []
        for i, (of_q, _) in enumerate(coming.slices):
            heads = slice(*of_q)
            part = Part(q[..., heads, :], *apart(coming.next(i), dim, packed))
            own = Results(out[..., heads, :], lse[..., heads, :]), seeds.of_heads(heads)
            sums = differentiate_all(coming.work.calls, part, *own, of_heads(self.scores, shared, of_q, q.device))
            dq[..., heads, :] = sums.dq
            for total, more in zip(of_shared, whole_gradients(sums.shared, shared, of_q), strict=True):
                if total is not None and more is not None:
                    total += more
            grad = exchange.pick(rows_first(sums.dk, sums.dv, packed), coming.work.rows)
            returning.append(exchange.begin_return(grad, coming.work.route, group))
        for pending, (_, of_kv) in zip(returning, coming.slices, strict=True):
            dkv[..., slice(*of_kv), :] = exchange.finish_return(pending, coming.work.route, kv.shape[0], group)
        return Sums(dq, *apart(dkv, dim, packed), of_shared)


class _Coming:
    """Slices of keys that come one after another, the next one always on its way."""

    def __init__(self, call: Gather, q: Tensor, kv: Tensor, shared: Shared) -> None:
        self.kv, self.group, self.whole, self.device = kv, call.plan.group, (call.scores, shared), q.device
        self.work = _work(call.plan, call.strategy, shared.alibi_slopes is not None, q.device)
        row_bytes = math.prod(kv.shape[1:]) * kv.element_size()
        self.slices = slices_of(q.shape[-2], kv.shape[-2], self.work.received * row_bytes)
        self.pending = self._begin(0)

    def _begin(self, i: int) -> exchange.Pending:
        return exchange.begin_fetch(self.kv[..., slice(*self.slices[i].kv), :], self.work.route, self.group)

    def context(self, i: int) -> tuple[Scores, Shared]:
        """Returns the arguments of the heads in slice i."""
        return self.whole if len(self.slices) == 1 else of_heads(*self.whole, self.slices[i].q, self.device)

    def next(self, i: int) -> Tensor:
        """Returns the keys of slice i, which is the one after that of the call before, and begins with the next one."""
        pending = self.pending
        if i + 1 < len(self.slices):
            self.pending = self._begin(i + 1)
        return exchange.spread(exchange.finish_fetch(pending, self.work.route, self.group), self.work.rows, self.work.held)
