"""Strategies "gather" and "halo": a rank's queries stay, and the keys that they see come: all of them, or those that are needed.

The backward fetches the keys again rather than keep them, and sends their gradients in float32 to the ranks that have the keys.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.distributed.calls import (
    Call,
    Part,
    Results,
    Scores,
    Shared,
    Sums,
    apart,
    attend_all,
    differentiate_all,
    make_calls,
    rows_first,
)
from flexattn.distributed.exchange import Route, fetch, give_back, make_route
from flexattn.distributed.plans import Plan


class _Work(NamedTuple):
    route: Route
    calls: list[Call]


@functools.lru_cache(maxsize=32)
def _work(plan: Plan, strategy: str, wants_diagonal: bool, device: torch.device) -> _Work:
    wanted = [plan.fetched(strategy, rank) for rank in range(plan.ranks)]
    pieces = plan.pieces(plan.rank, wanted[plan.rank])
    return _Work(make_route(plan.kv_runs, wanted, plan.rank), make_calls(pieces, plan.is_packed, wants_diagonal, device))


class Gather(NamedTuple):
    """A call of attention by keys that come; `strategy` is "gather" or "halo"."""

    plan: Plan
    strategy: str
    scores: Scores

    def _part(self, q: Tensor, k: Tensor, v: Tensor, work: _Work) -> Part:
        packed = self.plan.is_packed
        return Part(q, *apart(fetch(rows_first(k, v, packed), work.route, self.plan.group), k.shape[-1], packed))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        """Returns out and lse of this rank's queries, and what a backward needs."""
        work = _work(self.plan, self.strategy, shared.alibi_slopes is not None, q.device)
        results = attend_all(work.calls, self._part(q, k, v, work), (self.scores, shared), self.plan.is_packed)
        return results, (q, k, v, *results)

    def backward(self, saved: tuple[Tensor, ...], seeds: tuple[Tensor, Tensor | None], shared: Shared) -> Sums:
        """Returns the gradients of this rank's q, k and v, and this rank's part of those of the shared tensors."""
        q, k, v, out, lse = saved
        work = _work(self.plan, self.strategy, shared.alibi_slopes is not None, q.device)
        part, packed = self._part(q, k, v, work), self.plan.is_packed
        sums = differentiate_all(work.calls, part, Results(out, lse), seeds, (self.scores, shared))
        tokens = k.shape[0 if packed else 1]
        grad = give_back(rows_first(sums.dk, sums.dv, packed), work.route, tokens, self.plan.group)
        dk, dv = apart(grad, k.shape[-1], packed)
        return sums._replace(dk=dk, dv=dv)
