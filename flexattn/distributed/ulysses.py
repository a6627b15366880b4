"""Strategy "ulysses": an all-to-all gives each rank all tokens of some heads, and another one brings the results back.

Jacobs et al., "DeepSpeed Ulysses" (2023, https://arxiv.org/abs/2309.14509). Any numbers of heads with at least one query head for
each rank: a rank gets the key heads that its query heads read, which several ranks may get; their gradients are summed in float32.
Where each rank has key heads of its own and they are many, heads come and go in slices: the next one, and the results of the one
before, travel while one is attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.distributed import heads as exchange
from flexattn.distributed import slices
from flexattn.distributed.calls import (
    Calls,
    Found,
    Part,
    Results,
    Scores,
    Seeds,
    Shared,
    Sums,
    attend_all,
    by_rows,
    differentiate_all,
    empty_results,
    make_calls,
    of_heads,
    sum_dtype,
    whole_gradients,
)
from flexattn.distributed.capture import tables
from flexattn.distributed.exchange import as_sent
from flexattn.distributed.heads import Side, Split, local_key_heads
from flexattn.distributed.lanes import Lanes
from flexattn.distributed.layout import size_of
from flexattn.distributed.plans import Plan
from flexattn.distributed.ring import Ring
from flexattn.distributed.sums import add_up


@tables(None)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places).to(device)


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

    def _slices(self, q: Tensor) -> list[Split]:
        """Returns the heads of all ranks, slice by slice. q: this rank's rows of all heads, or what has their dims."""
        plan = self.plan
        if self.between is not None:
            return [self._split]
        received = (plan.length - plan.length // plan.ranks) * (1 if plan.is_packed else q.shape[0])
        return self._split.slices(slices.head_slices(self.heads, self.heads_kv, plan.ranks, received))

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns this rank's heads of all tokens, of q, k and v: [slices, whole, ..., heads, d]."""
        coming = _Coming(self, self._slices(q), (q, k, v), "qkk")
        for i in range(len(coming.splits)):
            coming.next(i)
        return coming.rooms

    def gathered_results(self, results: Results) -> tuple[Tensor, ...]:
        """Returns out and lse of all tokens and this rank's heads, slice after slice."""
        coming = _Coming(self, self._slices(results.out), (results.out, _lse_as_rows(results.lse)), "qq")
        found: list[Tensor] = []
        for i in range(len(coming.splits)):
            out, lse = coming.next(i)
            found += self._by_rows(out), _rows_as_lse(self._by_rows(lse))
        return tuple(found)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        """Returns out and lse of this rank's queries, and what a backward needs."""
        plan = self.plan
        results = empty_results(q, v.shape[-1], self.scores.out_dtype(q))
        coming = _Coming(self, self._slices(q), (q, k, v), "qkk")
        going = _Going(self, coming.splits, (results.out, _lse_as_rows(results.lse)), "qq")
        kept: list[Tensor] = []
        for i, split in enumerate(coming.splits):
            part, _ = self._part(split, coming.next(i))
            context = of_heads(self.scores, shared, split.q[plan.rank], q.device)
            if self.between is None:
                found = attend_all(_calls(plan, shared.alibi_slopes is not None, q.device), part, context, _one_lane(q))
            else:
                found, _ = Ring(self.between, context[0]).forward(*part, context[1])
            going.add(i, (self._by_rows(found.out), self._by_rows(_lse_as_rows(found.lse))))
            kept += found
        going.finish()
        return results, (*coming.rooms, *kept)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> Sums:
        """Returns the gradients of this rank's q, k and v, and this rank's part of those of the shared tensors."""
        rooms, kept = saved[:3], saved[3:]
        plan, like = self.plan, seeds.dout
        given = [t for t in (like, None if seeds.dlse is None else _lse_as_rows(seeds.dlse), seeds.dout8) if t is not None]
        coming = _Coming(self, self._split.slices(rooms[0].shape[0]), given, "q" * len(given))
        dtype, is_sum = self.scores.out_dtype(rooms[0]), self._sums_keys(coming.splits, shared, like)
        kinds = (dtype, *(sum_dtype(rooms[0].dtype) if is_sum else dtype,) * 2)
        room = self._rooms_of_gradients(like, rooms, kinds)
        going = _Going(self, coming.splits, room, "qkk")
        of_shared = shared.zeros()
        for i, split in enumerate(coming.splits):
            dout, *more = map(self._by_rows, coming.next(i))
            dlse = None if seeds.dlse is None else _rows_as_lse(more.pop(0))
            own = Seeds(dout, dlse, more[0] if more else None)
            qkv = [t[i] for t in rooms]
            heads = split.q[plan.rank]
            context = of_heads(self.scores, shared, heads, like.device)
            found, of_context = self._differentiated(split, qkv, Results(*kept[2 * i : 2 * i + 2]), own, context, is_sum)
            going.add(i, [t.to(kind) for t, kind in zip(found, kinds, strict=True)])
            for total, of_heads_here in zip(of_shared, whole_gradients(of_context, shared, heads), strict=True):
                if total is not None and of_heads_here is not None:
                    total += of_heads_here
        going.finish()
        return Sums(*room, of_shared)

    def _sums_keys(self, splits: Sequence[Split], shared: Shared, q: Tensor) -> bool:
        """Returns whether gradients of keys are sums, and so in float32: of calls, of hosts, or of ranks that have a key head."""
        if self.between is not None or sum(run.size for split in splits for run in split.kv) > self.heads_kv:
            return True
        return len(_calls(self.plan, shared.alibi_slopes is not None, q.device).longest_first) > 1

    def _rooms_of_gradients(
        self, dout: Tensor, qkv: Sequence[Tensor], kinds: Sequence[torch.dtype]
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = dout.shape[-3], *(size_of(self.plan.kv_runs[self.plan.rank]),) * 2
        sizes = zip(rows, (self.heads, self.heads_kv, self.heads_kv), (t.shape[-1] for t in qkv), strict=True)
        dq, dk, dv = (
            torch.empty((*dout.shape[:-3], *size), dtype=kind, device=dout.device) for size, kind in zip(sizes, kinds, strict=True)
        )
        return dq, dk, dv

    def _differentiated(
        self,
        split: Split,
        qkv: Sequence[Tensor],
        results: Results,
        seeds: Seeds,
        context: tuple[Scores, Shared],
        is_sum: bool,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the gradients of a slice's q, k and v, [whole, ..., heads, d], and those of the shared tensors.

        is_sum: whether the gradients of keys are to be added to others.
        """
        part, places = self._part(split, qkv)
        if self.between is None:
            calls = _calls(self.plan, context[1].alibi_slopes is not None, part.q.device)
            fp32 = "dkv" if is_sum else "none"
            found = differentiate_all(calls, part, results, seeds, context, _one_lane(part.q), fp32)
            gradients, of_shared = self._sums(calls, part, found), found.shared
        else:
            *of_ring, of_shared = Ring(self.between, context[0]).backward((*part, *results), seeds, context[1])
            gradients = [self._by_rows(t) for t in of_ring]
        if places is not None:
            index = _index(places, part.q.device)
            sums = [t.new_zeros(of.shape, dtype=sum_dtype(t.dtype)) for t, of in zip(gradients[1:], qkv[1:], strict=True)]
            gradients[1:] = [total.index_add_(-2, index, t.to(total.dtype)) for total, t in zip(sums, gradients[1:], strict=True)]
        return gradients, of_shared

    def _sums(self, calls: Calls, part: Part, found: Found) -> list[Tensor]:
        """Returns the gradients of q, k and v of all calls together: those of one call as they are."""
        if calls.is_one:
            dq = found.dq[0]
        else:
            dq = self._by_rows(part.q).new_empty(self._by_rows(part.q).shape, dtype=self.scores.out_dtype(part.q))
            found.write_dq(calls, dq)
        sums = [dq]
        for x, shares in ((part.k, found.dk), (part.v, found.dv)):
            keys = self._by_rows(x)
            if len(shares) == 1 and shares[0].shape == keys.shape:
                sums.append(shares[0])
            else:
                kind = shares[0].dtype if len(shares) == 1 else sum_dtype(x.dtype)
                total = torch.empty(keys.shape, dtype=kind, device=x.device)
                add_up(total, [call.keys for call in calls.longest_first], shares)
                sums.append(total)
        return sums

    def _part(self, split: Split, qkv: Sequence[Tensor]) -> tuple[Part, tuple[int, ...] | None]:
        """Returns a slice as calls take it, and for each query head its key head where those are not as grouped heads are."""
        q, k, v = map(self._by_rows, qkv)
        places = local_key_heads(split, self.plan.rank, self.heads // self.heads_kv)
        if places is not None:
            index = _index(places, q.device)
            k, v = (as_sent(t).index_select(-2, index).view(t.dtype) for t in (k, v))
        return Part(q, k, v), places

    def _by_rows(self, t: Tensor) -> Tensor:
        """Returns a view with the tokens first, [s, b, h, d] or [t, h, d], of one as calls take it, or the reverse."""
        return by_rows(t, self.plan.is_packed)


class _Coming:
    """Tensors whose heads come slice after slice, the next one always on its way; `rooms` have those that came.

    tensors: of this rank's rows and all heads, as calls take them. kinds: "q" or "k" for each, whose rows and heads it has.
    """

    def __init__(self, call: Ulysses, splits: Sequence[Split], tensors: Sequence[Tensor], kinds: str) -> None:
        self.splits, self._group = splits, call.plan.group
        self._tensors = tensors = [by_rows(t, call.plan.is_packed) for t in tensors]
        self._sides = [_sides(call.plan, split, kinds) for split in splits]
        rank = call.plan.rank
        self.rooms = tuple(
            x.new_empty((len(splits), sum(map(size_of, side.runs)), *x.shape[1:-2], side.heads[rank].size, x.shape[-1]))
            for x, side in zip(tensors, self._sides[0], strict=True)
        )
        self._begun = self._begin(0)

    def _begin(self, i: int) -> exchange.Sent:
        return exchange.begin_to_heads(self._tensors, self._sides[i], self._group)

    def next(self, i: int) -> list[Tensor]:
        """Returns slice i, [whole, ..., heads, d], which is the one after that of the call before, and begins with the next one."""
        begun, rooms = self._begun, [room[i] for room in self.rooms]
        if i + 1 < len(self.splits):
            self._begun = self._begin(i + 1)
        exchange.finish_to_heads(begun, self._sides[i], rooms, self._group)
        return rooms


class _Going:
    """Results of slices that travel to the ranks whose rows they are while the next one is computed; rooms: of all heads."""

    def __init__(self, call: Ulysses, splits: Sequence[Split], rooms: Sequence[Tensor], kinds: str) -> None:
        self._rooms, self._group = [by_rows(t, call.plan.is_packed) for t in rooms], call.plan.group
        self._sides = [_sides(call.plan, split, kinds) for split in splits]
        self._begun: tuple[exchange.Sent, list[Side]] | None = None

    def add(self, i: int, tensors: Sequence[Tensor]) -> None:
        """Begins to send slice i, [whole, ..., heads, d], and writes to the rooms what came of the one before."""
        begun = exchange.begin_to_tokens(tensors, self._sides[i], self._group), self._sides[i]
        self.finish()
        self._begun = begun

    def finish(self) -> None:
        """Writes to the rooms what came of the last slice."""
        if self._begun is not None:
            exchange.finish_to_tokens(*self._begun, self._rooms, self._group)


def _sides(plan: Plan, split: Split, kinds: str) -> list[Side]:
    sides = {"q": Side(plan.q_runs, split.q), "k": Side(plan.kv_runs, split.kv)}
    return [sides[kind] for kind in kinds]


def _one_lane(x: Tensor) -> Lanes:
    return Lanes(x.device, are_apart=False)


def _lse_as_rows(lse: Tensor) -> Tensor:
    """Returns lse, [b, h, s] or [h, t], with out's dims: [b, s, h, 1] or [t, h, 1]."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _rows_as_lse(rows: Tensor) -> Tensor:
    """Returns the inverse of `_lse_as_rows`."""
    return rows.squeeze(-1).transpose(-1, -2).contiguous()
