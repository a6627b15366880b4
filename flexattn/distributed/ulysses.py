"""Strategy "ulysses": an all-to-all gives each rank all tokens of some heads, and another one brings the results back.

Jacobs et al., "DeepSpeed Ulysses" (2023, https://arxiv.org/abs/2309.14509). Any numbers of heads with at least one query head for
each rank: a rank gets the key heads that its query heads read, which several ranks may get; their gradients are summed in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.distributed.calls import (
    Calls,
    Part,
    Results,
    Scores,
    Seeds,
    Shared,
    Sums,
    apart,
    attend_all,
    by_rows,
    differentiate_all,
    make_calls,
    of_heads,
    rows_first,
    sum_dtype,
    whole_gradients,
)
from flexattn.distributed.capture import tables
from flexattn.distributed.exchange import all_to_all, as_sent, waiting
from flexattn.distributed.lanes import Lanes
from flexattn.distributed.layout import Run, Runs, cut, size_of
from flexattn.distributed.plans import Plan
from flexattn.distributed.ring import Ring
from flexattn.distributed.sums import add_up


class Split(NamedTuple):
    """Heads by rank, and the key heads that they read."""

    q: tuple[Run, ...]
    kv: tuple[Run, ...]

    @classmethod
    def of(cls, heads: int, heads_kv: int, ranks: int) -> Split:
        group = heads // heads_kv
        q = cut(heads, ranks)
        return cls(tuple(q), tuple(Run(run.start // group, (run.stop - 1) // group + 1) for run in q))


def local_key_heads(split: Split, rank: int, group: int) -> tuple[int, ...] | None:
    """Returns for each query head of a rank its key head among the rank's; None where they are as grouped heads are anyway."""
    q, kv = split.q[rank], split.kv[rank]
    found = [head // group - kv.start for head in range(q.start, q.stop)]
    even = q.size % kv.size == 0 and found == [i // (q.size // kv.size) for i in range(q.size)]
    return None if even else tuple(found)


@tables(None)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places).to(device)


@tables(64)
def _order(runs: tuple[Runs, ...], is_of_whole: bool, device: torch.device) -> Tensor | None:
    """Returns for each row of the whole its row in a tensor of one rank's rows after another's, or the reverse; None: the same."""
    rows = torch.cat([torch.arange(*run) for of in runs for run in of] or [torch.arange(0)])
    if torch.equal(rows, torch.arange(len(rows))):
        return None
    return (rows.argsort() if is_of_whole else rows).to(device)


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """Returns x with its rows in another order, in words of eight bytes where it has such."""
    if order is None:
        return x.contiguous()
    words = as_sent(x)
    row = words.shape[-1] * words.element_size()
    if words.is_contiguous() and row % 8 == 0 and words.storage_offset() * words.element_size() % 8 == 0:
        words = words.view(torch.int64)
    return words.index_select(0, order).view(x.dtype)


def _are_even(heads: tuple[Run, ...], count: int) -> bool:
    """Returns whether ranks have equally many heads of `count`, none in two of them."""
    return count % len(heads) == 0 and heads == tuple(cut(count, len(heads)))


def to_heads(x: Tensor, runs: tuple[Runs, ...], heads: tuple[Run, ...], group: Any) -> Tensor:
    """Returns [whole, ..., own heads, d], in the whole's order, of each rank's [rows, ..., h, d]; heads may be in several ranks."""
    width = heads[dist.get_rank(group)].size
    if _are_even(heads, x.shape[-2]):
        sent = x.reshape(*x.shape[:-2], len(heads), width, x.shape[-1]).movedim(-3, 0).contiguous().view(-1)
    else:
        sent = torch.cat([x[..., run.start : run.stop, :].reshape(-1) for run in heads])
    of_row = _head_row(x)
    sends = [size_of(runs[dist.get_rank(group)]) * of_row * run.size for run in heads]
    receives = [size_of(of) * width * of_row for of in runs]
    received = x.new_empty(sum(receives))
    with waiting("the all-to-all from tokens to heads", group):
        all_to_all(received, sent, (receives, sends), group, wait=True)
    by_rank = received.view(sum(map(size_of, runs)), *x.shape[1:-2], width, x.shape[-1])
    return _in_order(by_rank, _order(runs, True, x.device))


def to_rows(x: Tensor, runs: tuple[Runs, ...], heads: tuple[Run, ...], total: tuple[int, Any]) -> Tensor:
    """Returns each rank's [rows, ..., h, d] of [whole, ..., own heads, d]: sums in the ranks' order where several have a head.

    total: h, and the group.
    """
    all_heads, group = total
    rank = dist.get_rank(group)
    own, row = size_of(runs[rank]), _head_row(x)
    sends, receives = [size_of(of) * row * x.shape[-2] for of in runs], [own * row * run.size for run in heads]
    received = x.new_empty(sum(receives))
    with waiting("the all-to-all from heads to tokens", group):
        all_to_all(received, _in_order(x, _order(runs, False, x.device)).view(-1), (receives, sends), group, wait=True)
    if _are_even(heads, all_heads):
        by_rank = received.view(len(heads), own, *x.shape[1:-1], x.shape[-1])
        return by_rank.movedim(0, -3).flatten(-3, -2)
    by_heads = zip(torch.split(received, receives), heads, strict=True)
    parts = [t.view(own, *x.shape[1:-2], run.size, x.shape[-1]) for t, run in by_heads]
    if sum(run.size for run in heads) == all_heads:
        return torch.cat(parts, -2)
    found = x.new_zeros((own, *x.shape[1:-2], all_heads, x.shape[-1]))
    for part, run in zip(parts, heads, strict=True):
        found[..., run.start : run.stop, :] += part
    return found


def _head_row(x: Tensor) -> int:
    """Returns the elements of one head in one row of [rows, h, d] or [rows, b, h, d]."""
    return x.shape[-1] * (x.shape[1] if x.dim() == 4 else 1)


@tables(32)
def _calls(plan: Plan, wants_diagonal: bool, device: torch.device) -> Calls:
    calls = make_calls(plan.whole_pieces(), plan.is_packed, plan.mask.blocks, wants_diagonal, device)
    return Calls.of(calls, plan.length)


class Ulysses(NamedTuple):
    """A call of attention by heads; `heads` and `heads_kv` are the whole's.

    between: where `plan` has the ranks and tokens of one host, the plan of all hosts, over which a ring goes on; else None.
    """

    plan: Plan
    scores: Scores
    heads: int
    heads_kv: int
    between: Plan | None = None

    @property
    def _split(self) -> Split:
        return Split.of(self.heads, self.heads_kv, self.plan.ranks)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Returns this rank's heads of q's rows, or of what has its dims, for all tokens."""
        packed = self.plan.is_packed
        return _swapped(to_heads(_swapped(x, packed), self.plan.q_runs, self._split.q, self.plan.group), packed)

    def _to_rows(self, x: Tensor) -> Tensor:
        """Returns all heads of this rank's rows: the inverse."""
        packed = self.plan.is_packed
        total = (self.heads, self.plan.group)
        return _swapped(to_rows(_swapped(x, packed), self.plan.q_runs, self._split.q, total), packed).contiguous()

    def _part(self, whole_q: Tensor, kv: Tensor, dim: int) -> tuple[Part, tuple[int, ...] | None]:
        places = local_key_heads(self._split, self.plan.rank, self.heads // self.heads_kv)
        if places is not None:
            kv = as_sent(kv).index_select(-2, _index(places, kv.device)).view(kv.dtype)
        return Part(whole_q, *apart(kv, dim, self.plan.is_packed)), places

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's heads of all tokens: of q, and of k and v together."""
        plan = self.plan
        return self._to_heads(q), to_heads(rows_first(k, v, plan.is_packed), plan.kv_runs, self._split.kv, plan.group)

    def gathered_results(self, results: Results) -> Results:
        """Returns this rank's heads of the results of all tokens."""
        lse = _rows_as_lse(self._to_heads(_lse_as_rows(results.lse)))
        return Results(self._to_heads(results.out), lse)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        """Returns out and lse of this rank's queries, and what a backward needs."""
        plan = self.plan
        whole_q, kv = self.gathered(q, k, v)
        part, _ = self._part(whole_q, kv, k.shape[-1])
        context = of_heads(self.scores, shared, self._split.q[plan.rank], q.device)
        if self.between is None:
            found = attend_all(_calls(plan, shared.alibi_slopes is not None, q.device), part, context, _one_lane(q))
        else:
            found, _ = Ring(self.between, context[0]).forward(*part, context[1])
        lse = self._to_rows(_lse_as_rows(found.lse))
        return Results(self._to_rows(found.out), _rows_as_lse(lse)), (whole_q, kv, *found)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> Sums:
        """Returns the gradients of this rank's q, k and v, and this rank's part of those of the shared tensors."""
        whole_q, kv, out, lse = saved
        plan, packed = self.plan, self.plan.is_packed
        dout, dlse, dout8 = seeds
        dim = kv.shape[-1] - dout.shape[-1]
        own_dlse = None if dlse is None else _rows_as_lse(self._to_heads(_lse_as_rows(dlse)))
        own = Seeds(self._to_heads(dout), own_dlse, None if dout8 is None else self._to_heads(dout8))
        part, places = self._part(whole_q, kv, dim)
        heads = self._split.q[plan.rank]
        context = of_heads(self.scores, shared, heads, whole_q.device)
        if self.between is None:
            calls = _calls(plan, shared.alibi_slopes is not None, whole_q.device)
            is_shared = sum(run.size for run in self._split.kv) > self.heads_kv or places is not None
            is_sum = is_shared or len(calls.longest_first) > 1
            fp32 = "dkv" if is_sum else "none"
            found = differentiate_all(calls, part, Results(out, lse), own, context, _one_lane(whole_q), fp32)
            of_context = found.shared
            if calls.is_one:
                dq = by_rows(found.dq[0], packed)
            else:
                dq = torch.empty(whole_q.shape, dtype=self.scores.out_dtype(whole_q), device=whole_q.device)
                found.write_dq(calls, by_rows(dq, packed))
            dtype = sum_dtype(whole_q.dtype) if is_sum else self.scores.out_dtype(whole_q)
            dkv = torch.empty((*kv.shape[:-2], part.k.shape[-2], kv.shape[-1]), dtype=dtype, device=kv.device)
            for total, shares in zip((dkv[..., :dim], dkv[..., dim:]), (found.dk, found.dv), strict=True):
                add_up(total, [call.keys for call in calls.longest_first], shares)
        else:
            ring = Ring(self.between, context[0])
            dq, dk, dv, of_context = ring.backward((*part, out, lse), own, context[1])
            dkv = rows_first(dk, dv, packed)
        if places is not None:
            all_heads = dkv.new_zeros((*dkv.shape[:-2], kv.shape[-2], dkv.shape[-1]))
            dkv = all_heads.index_add_(-2, _index(places, dkv.device), dkv)
        dkv = to_rows(dkv, plan.kv_runs, self._split.kv, (self.heads_kv, plan.group))
        of_shared = whole_gradients(of_context, shared, heads)
        return Sums(self._to_rows(dq.to(self.scores.out_dtype(whole_q))), *apart(dkv, dim, packed), of_shared)


def _one_lane(x: Tensor) -> Lanes:
    return Lanes(x.device, are_apart=False)


def _swapped(x: Tensor, is_packed: bool) -> Tensor:
    """Returns [b, s, h, d] as [s, b, h, d] or the reverse; packed tensors begin with their tokens anyway."""
    return x if is_packed else x.transpose(0, 1)


def _lse_as_rows(lse: Tensor) -> Tensor:
    """Returns lse, [b, h, s] or [h, t], with out's dims: [b, s, h, 1] or [t, h, 1]."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _rows_as_lse(rows: Tensor) -> Tensor:
    """Returns the inverse of `_lse_as_rows`."""
    return rows.squeeze(-1).transpose(-1, -2).contiguous()
