"""Strategies "gather" and "halo": each rank fetches all keys, or the keys that its queries see.

If there are many keys, they come in slices of heads: the next slice travels during attention to the present one, and so do the
gradients of the previous one. The first slice is small, because nothing overlaps its transfer. In a backward the last one is small
too, because nothing overlaps the transfer of its gradients.

If keys come in one slice, calls that see only this rank's own keys read them in place. They do not wait for messages. Symmetric
memory is read before all calls: attention fills every multiprocessor, and would delay the kernel that reads it, and the other ranks
with it. The backward fetches the keys again to save memory. Gradients travel in float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.options import snapshot
from flexattn.distributed import calls as local_calls
from flexattn.distributed import capture, exchange, peer_memory, slices
from flexattn.distributed.calls import Calls, InputGradients, Part, Results, Seeds, Shared, Strategy
from flexattn.distributed.capture import tables
from flexattn.distributed.exchange import (
    LocalGradients,
    ReduceScatter,
    SendReceiveLists,
    make_reduce_scatter,
    make_send_receive_lists,
)
from flexattn.distributed.lanes import Lanes
from flexattn.distributed.layout import Run, Runs, common, joined, places, positions, size_of, union, without
from flexattn.distributed.plans import Plan
from flexattn.distributed.sums import Addend


class _RankWork(NamedTuple):
    lists: SendReceiveLists
    calls: Calls
    reduce_scatter: ReduceScatter
    adds: tuple[bool, ...]  # for each call, whether other calls or ranks add to the gradients of its keys
    has_own: bool  # whether some calls need no data of other ranks


@functools.lru_cache(32)
def _busiest(plan: Plan, strategy: str) -> tuple[int, float]:
    """Returns the most rows that any rank receives, and the most scores that any computes. Slices follow these on all ranks."""
    work = plan.work(strategy)
    return work.received, work.areas[0]


@tables(32)
def _work(plan: Plan, strategy: str, wants_diagonal: bool, is_one: bool, device: torch.device) -> _RankWork:
    """Returns a rank's work. is_one: whether keys come in one slice. Pieces on own keys then need not wait for it."""
    rank, own = plan.rank, plan.kv_runs[plan.rank]
    rows = size_of(plan.q_runs[rank])
    within = (Run(0, rows), Run(0, size_of(own))) if plan.is_packed else None
    wanted = [plan.fetched(strategy, other) for other in range(plan.ranks)]
    held = plan.held(strategy, rank)
    pieces = [(piece, positions(piece.keys, held)) for piece in plan.pieces(rank, held)]
    own_pieces = []
    if is_one and plan.ranks > 1:
        own_pieces = [piece._replace(keys=joined(places(keys, own))[0]) for piece, keys in pieces if _lies_in_one_run(keys, own)]
        pieces = [(piece, keys) for piece, keys in pieces if not _lies_in_one_run(keys, own)]
        held = union([*without(wanted[rank], own), *(run for _, keys in pieces for run in keys)])
    held_pieces = [piece._replace(keys=joined(places(keys, held))[0]) for piece, keys in pieces]
    all_calls = [
        call._replace(is_own=is_own)
        for is_own, group in ((False, held_pieces), (True, own_pieces))
        for call in local_calls.make_calls(
            group, plan.is_packed, plan.mask.blocks, wants_diagonal, device, within if is_own else None
        )
    ]
    calls = Calls.of(all_calls, rows)
    lists = make_send_receive_lists(plan.kv_runs, wanted, held, rank)
    addends = [
        [Addend(n, run, run.start - call.keys.start) for run in union(piece.keys for piece in call.pieces)]
        for n, call in enumerate(calls.longest_first)
    ]
    by_call = list(zip(addends, calls.longest_first, strict=True))
    held_addends, own_addends = (
        [one for group, call in by_call if call.is_own is is_own for one in group] for is_own in (False, True)
    )
    have_all = (n for n, call in enumerate(calls.longest_first) if call.is_own and call.keys == Run(0, size_of(own)))
    reduce_scatter = make_reduce_scatter(
        lists, LocalGradients(calls=len(addends), whole=next(have_all, None), held=held_addends, own=own_addends)
    )
    return _RankWork(lists, calls, reduce_scatter, _adds(plan, calls, held), bool(own_pieces))


def _lies_in_one_run(keys: Runs, own: Runs) -> bool:
    return len(keys) == 1 and any(run.start <= keys[0].start and keys[0].stop <= run.stop for run in own)


def _adds(plan: Plan, calls: Calls, held: Runs) -> tuple[bool, ...]:
    """Returns for each call whether another rank or another call sees one of its keys. held: positions of fetched keys."""
    elsewhere = union(run for rank in range(plan.ranks) if rank != plan.rank for run in plan.needs(rank))
    own = plan.kv_runs[plan.rank]
    seen = [
        union(run for piece in call.pieces for run in positions(piece.keys, own if call.is_own else held))
        for call in calls.longest_first
    ]
    return tuple(
        any(common(union([*elsewhere, *(run for j, other in enumerate(seen) if j != i for run in other)]), keys))
        for i, keys in enumerate(seen)
    )


@functools.lru_cache(256)
def _slices(plan: Plan, strategy: str, sizes: tuple[int, ...], is_near: bool, ends: int) -> list[slices.Slice]:
    """Returns the slices of heads in which keys come. sizes: batch, query heads, key heads, both head dims together, bytes."""
    batch, heads, heads_kv, dims, itemsize = sizes
    received, area = _busiest(plan, strategy)
    load = slices.Load(received * batch * heads_kv * dims * itemsize, 2 * area * batch * heads * dims, is_near)
    return slices.key_slices(heads, heads_kv, load, ends)


class _Fetches(NamedTuple):
    """The fetches of one direction: the slices in which keys come, and the work between them."""

    slices: list[slices.Slice]
    work: _RankWork
    is_near: bool  # whether ranks use symmetric memory


@dataclasses.dataclass(frozen=True)
class Gather(Strategy):
    """Strategy that fetches keys. `strategy` is "gather" or "halo".

    kept: the fetches by direction and environment, because all tensors of one call, and of the calls kept with it, are alike.
    """

    plan: Plan
    strategy: str
    kept: dict[Hashable, _Fetches]

    def fetches(self, qkv: tuple[Tensor, Tensor, Tensor], has_slopes: bool, ends: int) -> _Fetches:
        """Returns the fetches for tensors like these. ends: number of small slices, see `key_slices`."""
        q, k, v = qkv
        key, may_keep = (ends, snapshot()), not capture.is_capturing(q.device)  # `tables` notes the tables that a CUDA graph reads
        if may_keep and (known := self.kept.get(key)) is not None:
            return known
        batch = 1 if self.plan.is_packed else k.shape[0]
        is_near = peer_memory.are_near(self.plan.group, q.device)
        sizes = batch, q.shape[-2], k.shape[-2], k.shape[-1] + v.shape[-1], k.element_size()
        parts = _slices(self.plan, self.strategy, sizes, is_near, ends)
        fetches = _Fetches(parts, _work(self.plan, self.strategy, has_slopes, len(parts) == 1, q.device), is_near)
        if may_keep:
            self.kept[key] = fetches
        return fetches

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        fetcher = _SliceFetcher(self, (q, k, v), shared, ends=1)
        if len(fetcher.slices) == 1:
            results = local_calls.attend_all(fetcher.calls, fetcher.next(0), fetcher.contexts[0], fetcher.lanes, own=fetcher.own)
        else:
            results = local_calls.empty_results(q, v.shape[-1], self.scores.out_dtype(q))
            for i, (q_heads, _) in enumerate(fetcher.slices):
                heads = slice(*q_heads)
                fetcher.lanes.is_last = i + 1 == len(fetcher.slices)
                into = Results(results.out[..., heads, :], results.lse[..., heads, :])
                local_calls.attend_all(fetcher.calls, fetcher.next(i), fetcher.contexts[i], fetcher.lanes, into)
        fetcher.lanes.join()
        return results, (q, k, v, *results)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> InputGradients:
        q, k, v, out, lse = saved
        packed, group = self.plan.is_packed, self.plan.group
        fetcher = _SliceFetcher(self, (q, k, v), shared, ends=2)
        lanes, reduce_scatter, is_one = fetcher.lanes, fetcher.work.reduce_scatter, len(fetcher.slices) == 1
        dtype, wide = self.scores.out_dtype(q), local_calls.sum_dtype(q.dtype)
        fp32 = [self.scores.fp32_gradients("dkv" if adds else "none") for adds in fetcher.work.adds]
        place = reduce_scatter.place if is_one else None  # rows of a call's dk and dv that become the results without a copy
        if place is not None and fp32[place.source] != "none" and dtype != wide:
            place = None
        adopted = fetcher.calls.whole if is_one else None  # a call whose dq becomes the result
        dq = None if adopted is not None else torch.empty(q.shape, dtype=dtype, device=q.device)
        totals: tuple[Tensor, ...] = ()
        if place is None:
            totals = tuple(torch.empty(t.shape, dtype=dtype, device=t.device) for t in (k, v))
        shared_sums = shared.zeros()
        # gradients of a slice in transit, this rank's part of the sums, and the rows for the sums
        pending_gradients: tuple[exchange.PendingReceive, Sequence[Tensor], Sequence[Tensor]] | None = None

        def finish() -> None:
            """Writes the sums of the slice whose gradients are in transit, if there is one."""
            if pending_gradients is not None:
                exchange.finish_reduce_scatter(*pending_gradients, reduce_scatter, group)

        for i, (q_heads, kv_heads) in enumerate(fetcher.slices):
            heads = slice(*q_heads)
            part = fetcher.next(i)
            lanes.is_last = i + 1 == len(fetcher.slices)
            results_and_seeds = Results(out[..., heads, :], lse[..., heads, :]), seeds.for_heads(heads)
            gradients = local_calls.differentiate_all(
                fetcher.calls, part, *results_and_seeds, fetcher.contexts[i], lanes, fp32, fetcher.own
            )
            for total, more in zip(shared_sums, local_calls.whole_gradients(gradients.shared, shared, q_heads), strict=True):
                if total is not None and more is not None:
                    total += more
            shares = gradients.dk, gradients.dv
            if place is not None:
                totals = tuple(local_calls.tokens_first(by_call[place.source][place.rows], packed) for by_call in shares)
            if adopted is not None:
                dq = local_calls.tokens_first(gradients.dq[adopted], packed)
            assert dq is not None
            with lanes.back():
                rooms = local_calls.tokens_first(part.k, packed), local_calls.tokens_first(part.v, packed)
                pending = exchange.begin_reduce_scatter(shares, rooms, wide, reduce_scatter, group)
            if is_one:
                lanes.fork()
            with lanes.side() if is_one else lanes.back():  # while gradients are in transit
                gradients.write_dq(fetcher.calls, local_calls.tokens_first(dq, packed)[..., heads, :])
                rows = [local_calls.tokens_first(t, packed)[..., slice(*kv_heads), :] for t in totals]
                sums = exchange.sum_own(shares, rows, wide, reduce_scatter, place)
            if is_one:
                lanes.meet()
            with lanes.back():
                finish()
                pending_gradients = pending, sums, rows
                lanes.keep(*gradients.kept)
        with lanes.back():
            finish()
        lanes.join()
        dk, dv = totals
        assert dq is not None
        return InputGradients(dq, dk, dv, shared_sums)


class _SliceFetcher:
    """Fetch of one slice of keys after another, always one ahead. ends: number of small slices, see `key_slices`."""

    def __init__(self, call: Gather, qkv: tuple[Tensor, Tensor, Tensor], shared: Shared, ends: int) -> None:
        self.group, self.packed, (self.q, self.k, self.v) = call.plan.group, call.plan.is_packed, qkv
        self.slices, work, self.is_near = call.fetches(qkv, shared.alibi_slopes is not None, ends)
        whole, is_one = (call.scores, shared), len(self.slices) == 1
        self.work, self.calls, self.lists = work, work.calls, work.lists
        self.own = Part(self.q, self.k, self.v) if work.has_own else None  # inputs of calls that need no data of other ranks
        # Kept until the end, because calls on other lanes read them.
        self.contexts = [whole] if is_one else [local_calls.for_heads(*whole, q_heads, self.q.device) for q_heads, _ in self.slices]
        # tensors that all calls write to
        has_sums = call.scores.peaks is not None or shared.has_sums
        pulls = self.is_near and ends == 2  # sums of own gradients overlap with it
        self.lanes = Lanes(self.q.device, are_apart=not has_sums and (len(work.calls.longest_first) > 1 or not is_one or pulls))
        self._are_own_first = work.has_own and not self.is_near
        self.lanes.is_last = self._are_own_first  # Fetch on the lane of the calls that need the keys, before all other calls.
        self.next_fetch = self._begin(0)

    def _lane(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context of the lane that fetches keys: the main lane, or the side lane if calls on own keys do not wait."""
        return self.lanes.side() if self._are_own_first else contextlib.nullcontext()

    def _begin(self, i: int) -> tuple[tuple[Tensor, ...], exchange.PendingReceive | None]:
        heads = slice(*self.slices[i].kv)
        with self._lane():
            tensors = [local_calls.tokens_first(t, self.packed)[..., heads, :] for t in (self.k, self.v)]
            return exchange.begin_fetch(tensors, self.lists, self.group, self.is_near)

    def next(self, i: int) -> Part:
        """Returns the queries and keys of slice i, and starts to fetch the next one. Call it for each slice in order."""
        self.lanes.let_go()
        fetch = self.next_fetch
        if i + 1 < len(self.slices):
            self.next_fetch = self._begin(i + 1)
        with self._lane():
            k, v = exchange.finish_fetch(fetch, self.lists, self.group)
        q = self.q if len(self.slices) == 1 else self.q[..., slice(*self.slices[i].q), :]
        return Part(q, local_calls.tokens_first(k, self.packed), local_calls.tokens_first(v, self.packed))
