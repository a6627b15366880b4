"""Strategy "ulysses": an all-to-all gives each rank all tokens of some heads, and another one returns the results.

Jacobs et al., "DeepSpeed Ulysses" (2023, https://arxiv.org/abs/2309.14509). There must be at least one query head for each rank. A
rank gets the key heads that its query heads read. If several ranks get the same key head, its gradients are summed in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.dispatch.spec import Fp32Gradients
from flexattn.distributed import calls as local_calls
from flexattn.distributed import peer_memory
from flexattn.distributed.calls import Calls, InputGradients, Part, Results, Seeds, Shared, Strategy
from flexattn.distributed.capture import Group, tables
from flexattn.distributed.exchange import all_to_all, as_sent, waiting
from flexattn.distributed.lanes import Lanes
from flexattn.distributed.layout import Run, Runs, cut, rows_of, size_of
from flexattn.distributed.near import row_size, starts
from flexattn.distributed.peer_memory import Exchange, Pull, RemoteRows, RowLayout
from flexattn.distributed.plans import Plan
from flexattn.distributed.ring import Ring
from flexattn.distributed.sums import add_up


class Split(NamedTuple):
    """Query heads of each rank, and the key heads that they read."""

    q: tuple[Run, ...]
    kv: tuple[Run, ...]

    @classmethod
    def of(cls, heads: int, heads_kv: int, ranks: int) -> Split:
        group = heads // heads_kv
        q = cut(heads, ranks)
        return cls(tuple(q), tuple(Run(run.start // group, (run.stop - 1) // group + 1) for run in q))


def local_key_heads(split: Split, rank: int, group: int) -> tuple[int, ...] | None:
    """Returns the local key head of each of a rank's query heads. None if heads are grouped evenly."""
    q, kv = split.q[rank], split.kv[rank]
    key_heads = [head // group - kv.start for head in range(q.start, q.stop)]
    even = q.size % kv.size == 0 and key_heads == [i // (q.size // kv.size) for i in range(q.size)]
    return None if even else tuple(key_heads)


@tables(None)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places, device="cpu").to(device)


@tables(64)
def _order(runs: tuple[Runs, ...], is_of_whole: bool, device: torch.device) -> Tensor | None:
    """Returns indices between rows of the full sequence and rows sorted by rank. None if both orders are equal.

    is_of_whole: indices of rows by rank, for each row of the full sequence. Else the reverse.
    """
    rows = torch.cat([torch.arange(*run, device="cpu") for part in runs for run in part] or [torch.arange(0, device="cpu")])
    if torch.equal(rows, torch.arange(len(rows), device="cpu")):
        return None
    return (rows.argsort() if is_of_whole else rows).to(device)


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    """Returns x with its rows in another order, copied in words of eight bytes if possible."""
    if order is None:
        return x.contiguous()
    words = as_sent(x)
    row = words.shape[-1] * words.element_size()
    if words.is_contiguous() and row % 8 == 0 and words.storage_offset() * words.element_size() % 8 == 0:
        words = words.view(-1).view(words.shape).view(torch.int64)  # also sets strides of dims of size 1 to multiples of a word
    return words.index_select(0, order).view(x.dtype)


def _open_exchange(tensors: Sequence[Tensor], places: Sequence[int], group: Group) -> Exchange | None:
    """Returns an exchange with each rank's tensors at these bytes of symmetric memory. None if messages must be used."""
    pulling = peer_memory.begin(group, tensors[0].device, places[-1])
    if pulling is not None:
        for x, first in zip(map(as_sent, tensors), places, strict=False):
            pulling.room(first, x.shape, x.dtype).copy_(x)
        pulling.open()
    return pulling


def to_heads(tensors: Sequence[Tensor], runs: tuple[Runs, ...], heads: Sequence[tuple[Run, ...]], group: Group) -> list[Tensor]:
    """Returns tensors [all rows, ..., own heads, d], in the order of the full sequence, from each rank's [rows, ..., h, d].

    heads: for each tensor, the heads of each rank. Several ranks may have the same.
    """
    rank, most = dist.get_rank(group), max(map(size_of, runs))
    places = starts(most, list(map(row_size, tensors)))
    with waiting("the exchange from tokens to heads", group):
        pulling = _open_exchange(tensors, places, group)
        if pulling is None:
            return _exchange_concatenated(tensors, heads, lambda x, head_runs: _to_heads_by_messages(x, runs, head_runs, group))
        pulls = []
        for x, first, head_runs in zip(tensors, places, heads, strict=False):
            own, (*_, all_heads, dim) = head_runs[rank], x.shape
            out = x.new_empty((sum(map(size_of, runs)), *x.shape[1:-2], own.size, dim))
            sides = RowLayout(own.size * dim), RowLayout(all_heads * dim, own.start * dim)
            pulls.append(Pull(out, first, _moves_to_whole(runs, _batch(x)), sides, own.size * dim))
        pulling.pull(*pulls)
        pulling.close()
    return [pull.out for pull in pulls]


class HeadRuns(NamedTuple):
    """Heads of a tensor: those of each rank, and their total number."""

    by_rank: tuple[Run, ...]
    total: int

    @property
    def are_even(self) -> bool:
        """Returns whether ranks have equally many heads, and none in common."""
        ranks = len(self.by_rank)
        return self.total % ranks == 0 and self.by_rank == tuple(cut(self.total, ranks))


def to_rows(tensors: Sequence[Tensor], runs: tuple[Runs, ...], heads: Sequence[HeadRuns], group: Group) -> list[Tensor]:
    """Returns each rank's [rows, ..., h, d] from [all rows, ..., own heads, d]. Sums a head of several ranks, in their order."""
    rank, whole = dist.get_rank(group), sum(map(size_of, runs))
    widest = [max(run.size for run in head_runs.by_rank) for head_runs in heads]
    places = starts(whole, [row_size(x) // max(x.shape[-2], 1) * n for x, n in zip(tensors, widest, strict=True)])
    with waiting("the exchange from heads to tokens", group):
        pulling = _open_exchange(tensors, places, group)
        if pulling is None:
            return _exchange_concatenated(tensors, heads, lambda x, head_runs: _to_rows_by_messages(x, runs, head_runs, group))
        received = [_room_of_heads(x, size_of(runs[rank]), head_runs) for x, head_runs in zip(tensors, heads, strict=True)]
        pulling.pull(*_pulls_of_heads(tensors, places, received, [_moves_to_rows(runs, rank, _batch(x)) for x in tensors]))
        pulling.close()
    return [parts[0] if head_runs.are_even else _summed(parts, head_runs) for parts, head_runs in zip(received, heads, strict=True)]


def _room_of_heads(x: Tensor, rows: int, heads: HeadRuns) -> list[Tensor]:
    """Returns a tensor for rows of all heads. If heads of ranks are summed, returns one for each rank."""
    shape = (rows, *x.shape[1:-2])
    return [
        x.new_empty((*shape, n, x.shape[-1])) for n in ([heads.total] if heads.are_even else [run.size for run in heads.by_rank])
    ]


def _pulls_of_heads(
    tensors: Sequence[Tensor], places: Sequence[int], outputs: Sequence[Sequence[Tensor]], moves: Sequence[tuple[RemoteRows, ...]]
) -> Iterator[Pull]:
    """Yields pulls of all ranks' heads into one tensor side by side, or into one tensor for each rank."""
    for x, first, parts, rank_moves in zip(tensors, places, outputs, moves, strict=False):
        for rank, part in enumerate(parts):
            width = x.shape[-1] * (x.shape[-2] if len(parts) == 1 else part.shape[-2])
            written = RowLayout(part.shape[-2] * x.shape[-1], 0, width if len(parts) == 1 else 0)
            own = rank_moves if len(parts) == 1 else tuple(move for move in rank_moves if move.source == rank)
            yield Pull(part, first, own, (written, RowLayout(width)), width)


def _batch(x: Tensor) -> int:
    """Returns the batch size of [rows, b, h, d], or 1 for [rows, h, d]."""
    return x.shape[1] if x.dim() == 4 else 1


@functools.lru_cache(256)
def _moves_to_whole(runs: tuple[Runs, ...], batch: int) -> tuple[RemoteRows, ...]:
    return tuple(
        RemoteRows(rank, at.start * batch, run.start * batch, run.size * batch)
        for rank, rank_runs in enumerate(runs)
        for at, run in zip(rows_of(rank_runs), rank_runs, strict=True)
    )


@functools.lru_cache(256)
def _moves_to_rows(runs: tuple[Runs, ...], own: int, batch: int) -> tuple[RemoteRows, ...]:
    return tuple(
        RemoteRows(rank, run.start * batch, at.start * batch, run.size * batch)
        for rank in range(len(runs))
        for at, run in zip(rows_of(runs[own]), runs[own], strict=True)
    )


_Heads = TypeVar("_Heads")


def _exchange_concatenated(
    tensors: Sequence[Tensor], heads: Sequence[_Heads], travel: Callable[[Tensor, _Heads], Tensor]
) -> list[Tensor]:
    """Returns `travel` of each tensor. Equally shaped neighbours are concatenated along the head dim for one exchange."""
    results: list[Tensor] = []
    pairs = zip(tensors, heads, strict=True)
    for (dtype, _, same_heads), group in itertools.groupby(pairs, lambda pair: (pair[0].dtype, pair[0].shape[:-1], pair[1])):
        alike = [x for x, _ in group]
        whole = as_sent(alike[0]) if len(alike) == 1 else torch.cat(list(map(as_sent, alike)), -1)
        moved = travel(whole, same_heads)
        parts = torch.split(moved, [x.shape[-1] for x in alike], -1)  # copied, because outputs of an operator must not share memory
        results += [t.view(dtype) if len(parts) == 1 else t.clone(memory_format=torch.contiguous_format).view(dtype) for t in parts]
    return results


def _to_heads_by_messages(x: Tensor, runs: tuple[Runs, ...], heads: tuple[Run, ...], group: Group) -> Tensor:
    width = heads[dist.get_rank(group)].size
    if HeadRuns(heads, x.shape[-2]).are_even:
        sent = x.reshape(*x.shape[:-2], len(heads), width, x.shape[-1]).movedim(-3, 0).contiguous().view(-1)
    else:
        sent = torch.cat([x[..., run.start : run.stop, :].reshape(-1) for run in heads])
    row = _head_row(x)
    sends = [size_of(runs[dist.get_rank(group)]) * row * run.size for run in heads]
    receives = [size_of(rank_runs) * width * row for rank_runs in runs]
    received = x.new_empty(sum(receives))
    all_to_all(received, sent, (receives, sends), group, wait=True)
    by_rank = received.view(sum(map(size_of, runs)), *x.shape[1:-2], width, x.shape[-1])
    return _in_order(by_rank, _order(runs, True, x.device))


def _to_rows_by_messages(x: Tensor, runs: tuple[Runs, ...], heads: HeadRuns, group: Group) -> Tensor:
    own, row = size_of(runs[dist.get_rank(group)]), _head_row(x)
    sends, receives = ([size_of(part) * row * x.shape[-2] for part in runs], [own * row * run.size for run in heads.by_rank])
    received = x.new_empty(sum(receives))
    all_to_all(received, _in_order(x, _order(runs, False, x.device)).view(-1), (receives, sends), group, wait=True)
    if heads.are_even:
        by_rank = received.view(len(heads.by_rank), own, *x.shape[1:-1], x.shape[-1])
        return by_rank.movedim(0, -3).flatten(-3, -2)
    by_heads = zip(torch.split(received, receives), heads.by_rank, strict=True)
    return _summed([t.view(own, *x.shape[1:-2], run.size, x.shape[-1]) for t, run in by_heads], heads)


def _summed(parts: Sequence[Tensor], heads: HeadRuns) -> Tensor:
    """Returns all heads from those of each rank. A head of several ranks is summed in their order."""
    if sum(run.size for run in heads.by_rank) == heads.total:
        return torch.cat(list(parts), -2)
    total = parts[0].new_zeros((*parts[0].shape[:-2], heads.total, parts[0].shape[-1]))
    for part, run in zip(parts, heads.by_rank, strict=True):
        total[..., run.start : run.stop, :] += part
    return total


def _head_row(x: Tensor) -> int:
    """Returns the elements of one head in one row of [rows, h, d] or [rows, b, h, d]."""
    return x.shape[-1] * _batch(x)


@tables(32)
def _calls(plan: Plan, wants_diagonal: bool, device: torch.device) -> Calls:
    calls = local_calls.make_calls(plan.whole_pieces(), plan.is_packed, plan.mask.blocks, wants_diagonal, device)
    return Calls.of(calls, plan.length)


@dataclasses.dataclass(frozen=True)
class Ulysses(Strategy):
    """Strategy that exchanges heads for tokens. `heads` and `heads_kv` are the numbers of all heads.

    between: the plan of all hosts for a ring, if `plan` has the ranks and tokens of one host. Else None.
    """

    plan: Plan
    heads: int
    heads_kv: int
    between: Plan | None = None

    @property
    def _split(self) -> Split:
        return Split.of(self.heads, self.heads_kv, self.plan.ranks)

    def _to_heads(self, *tensors: Tensor | None) -> list[Any]:
        """Returns this rank's heads for all tokens, from tensors like q. None for None."""
        plan, heads = self.plan, self._split.q
        return self._exchange(tensors, lambda present: to_heads(present, plan.q_runs, [heads] * len(present), plan.group))

    def _to_rows(self, *tensors: Tensor) -> list[Tensor]:
        """Returns all heads of this rank's rows: the inverse."""
        plan, heads = self.plan, HeadRuns(self._split.q, self.heads)
        rows = self._exchange(tensors, lambda present: to_rows(present, plan.q_runs, [heads] * len(present), plan.group))
        return [x.contiguous() for x in rows]

    def _exchange(self, tensors: Sequence[Tensor | None], exchange: Callable[[list[Tensor]], list[Tensor]]) -> list[Any]:
        packed = self.plan.is_packed
        received = iter(exchange([local_calls.tokens_first(x, packed) for x in tensors if x is not None]))
        return [None if x is None else local_calls.tokens_first(next(received), packed) for x in tensors]

    def _part(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Part, tuple[int, ...] | None]:
        """Returns this rank's heads as calls take them, and the key head of each query head if they are not grouped evenly."""
        places = local_key_heads(self._split, self.plan.rank, self.heads // self.heads_kv)
        if places is not None:
            k, v = (as_sent(x).index_select(-2, _index(places, x.device)).view(x.dtype) for x in (k, v))
        return Part(q, k, v), places

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns this rank's heads of all tokens."""
        plan, split = self.plan, self._split
        if plan.q_runs == plan.kv_runs:
            heads = split.q, split.kv, split.kv
            return tuple(self._exchange((q, k, v), lambda present: to_heads(present, plan.q_runs, heads, plan.group)))
        keys = self._exchange((k, v), lambda present: to_heads(present, plan.kv_runs, (split.kv, split.kv), plan.group))
        return (*self._to_heads(q), *keys)

    def gathered_results(self, results: Results) -> Results:
        """Returns this rank's heads of the results of all tokens."""
        out, lse = self._to_heads(results.out, _lse_as_rows(results.lse))
        return Results(out, _rows_as_lse(lse))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        plan = self.plan
        whole = self.gathered(q, k, v)
        part, _ = self._part(*whole)
        context = local_calls.for_heads(self.scores, shared, self._split.q[plan.rank], q.device)
        if self.between is None:
            local = local_calls.attend_all(_calls(plan, shared.alibi_slopes is not None, q.device), part, context, _one_lane(q))
        else:
            local, _ = Ring(context[0], self.between).forward(*part, context[1])
        out, lse = self._to_rows(local.out, _lse_as_rows(local.lse))
        return Results(out, _rows_as_lse(lse)), (*whole, *local)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> InputGradients:
        whole_q, whole_k, whole_v, out, lse = saved
        plan, packed = self.plan, self.plan.is_packed
        dout, dlse, dout8 = seeds
        dout, dlse, dout8 = self._to_heads(dout, None if dlse is None else _lse_as_rows(dlse), dout8)
        head_seeds = Seeds(dout, None if dlse is None else _rows_as_lse(dlse), dout8)
        part, places = self._part(whole_q, whole_k, whole_v)
        heads, out_dtype = self._split.q[plan.rank], self.scores.out_dtype(whole_q)
        context = local_calls.for_heads(self.scores, shared, heads, whole_q.device)
        if self.between is None:
            calls = _calls(plan, shared.alibi_slopes is not None, whole_q.device)
            is_shared = sum(run.size for run in self._split.kv) > self.heads_kv or places is not None
            is_sum = is_shared or len(calls.longest_first) > 1
            fp32: list[Fp32Gradients] = ["dkv" if is_sum else "none"] * len(calls.longest_first)
            gradients = local_calls.differentiate_all(calls, part, Results(out, lse), head_seeds, context, _one_lane(whole_q), fp32)
            shared_part = gradients.shared
            if calls.whole is None:
                dq = torch.empty(whole_q.shape, dtype=out_dtype, device=whole_q.device)
            else:
                dq = local_calls.tokens_first(gradients.dq[calls.whole], packed)
            gradients.write_dq(calls, local_calls.tokens_first(dq, packed))
            dtype, keys = local_calls.sum_dtype(whole_q.dtype) if is_sum else out_dtype, [call.keys for call in calls.longest_first]
            key_gradients = [
                _sum_of_calls(parts, local_calls.tokens_first(x, packed), keys, dtype)
                for x, parts in zip(part[1:], gradients[1:3], strict=True)
            ]
            key_gradients = [local_calls.tokens_first(x, packed) for x in key_gradients]
        else:
            ring = Ring(context[0], self.between)
            dq, *key_gradients, shared_part = ring.backward((*part, out, lse), head_seeds, context[1])
        if places is not None:
            index = _index(places, dq.device)  # several of a rank's heads may be one of the whole
            wholes = [x.new_zeros((*x.shape[:-2], whole_k.shape[-2], x.shape[-1])) for x in key_gradients]
            key_gradients = [whole.index_add_(-2, index, x) for whole, x in zip(wholes, key_gradients, strict=True)]
        dq, dk, dv = self._gradients_to_rows(dq.to(out_dtype), *key_gradients)
        shared_gradients = local_calls.whole_gradients(shared_part, shared, heads)
        return InputGradients(dq, dk, dv, shared_gradients)

    def _gradients_to_rows(self, dq: Tensor, dk: Tensor, dv: Tensor) -> list[Tensor]:
        plan, heads_kv = self.plan, HeadRuns(self._split.kv, self.heads_kv)
        if plan.q_runs == plan.kv_runs:
            heads = HeadRuns(self._split.q, self.heads), heads_kv, heads_kv
            return self._exchange((dq, dk, dv), lambda present: to_rows(present, plan.q_runs, heads, plan.group))
        key_gradients = self._exchange((dk, dv), lambda present: to_rows(present, plan.kv_runs, (heads_kv, heads_kv), plan.group))
        return [*self._to_rows(dq), *key_gradients]


def _sum_of_calls(shares: Sequence[Tensor], like: Tensor, keys: Sequence[Run], dtype: torch.dtype) -> Tensor:
    """Returns the sum of calls' gradients of their keys, for all rows of `like`. A single share with all rows is not copied."""
    if len(shares) == 1 and keys[0] == Run(0, like.shape[0]) and shares[0].dtype is dtype:
        return shares[0]
    total = torch.empty(like.shape, dtype=dtype, device=like.device)
    add_up(total, keys, shares)
    return total


def _one_lane(x: Tensor) -> Lanes:
    return Lanes(x.device, are_apart=False)


def _lse_as_rows(lse: Tensor) -> Tensor:
    """Returns lse, [b, h, s] or [h, t], with the dims of out: [b, s, h, 1] or [t, h, 1]."""
    return lse.transpose(-1, -2).unsqueeze(-1)


def _rows_as_lse(rows: Tensor) -> Tensor:
    """Returns the inverse of `_lse_as_rows`."""
    return rows.squeeze(-1).transpose(-1, -2).contiguous()
