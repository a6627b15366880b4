"""Collectives of context parallelism: all-to-alls of keys, values and heads, reduce-scatters of gradients, and ring steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.distributed import peer_memory
from flexattn.distributed.capture import Group
from flexattn.distributed.layout import Run, Runs, common, places, rows_of, size_of, union, without
from flexattn.distributed.near import SymmetricFetch, make_symmetric_fetch, pull_of_rows, row_size, starts
from flexattn.distributed.sums import NO_STEPS, Addend, RowMove, SumSteps, copy_all
from flexattn.validation import FP8_DTYPES

if TYPE_CHECKING:
    from torch.distributed import Work


@contextlib.contextmanager
def waiting(what: str, group: Group) -> Iterator[None]:
    """Turns a failure of the group into an error that names the exchange and this rank."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} failed in {what}: {e}. Another rank may have raised an "
            "error or made another call. Read the output of all ranks, and run them with FLEXATTN_CHECK=1, which compares their "
            "calls. The timeout of init_process_group limits how long ranks wait"
        ) from e


class SendReceiveLists(NamedTuple):
    """Send and receive lists of one rank, for an all-to-all of keys and values.

    Keys lie in `kv_runs`, and each rank receives the runs that it needs. A rank writes received rows directly to their place among
    the rows that it holds. If there are few runs, each travels in a message of its own.
    """

    sends: tuple[Runs, ...]  # For each receiver, rows of this rank's tensor. Empty for itself.
    receives: tuple[Runs, ...]  # For each sender, rows among those held. Empty for itself.
    own: tuple[tuple[Run, Run], ...]  # this rank's rows that it needs itself, and their place among the held rows
    held: int  # number of rows held
    gaps: Runs  # held rows of keys that no query sees
    rows: int  # number of rows of this rank's tensor
    held_sends: tuple[Runs, ...] | None  # The rows of `sends` among those held. None if some are not held.
    by_runs: bool  # Whether each run has a message of its own. Equal on all ranks.
    is_whole: bool  # Whether all ranks need all rows and have equally many. Equal on all ranks.
    is_local: bool  # whether the held rows are this rank's tensor, unchanged
    symmetric: SymmetricFetch | None  # The same exchange through symmetric memory. None for many ranks.


# limits of messages for single runs, within one host: each message takes the host several microseconds
MOST_RANKS, MOST_MESSAGES = 8, 16


def make_send_receive_lists(kv_runs: Sequence[Runs], wanted: Sequence[Runs], held: Runs, rank: int) -> SendReceiveLists:
    """Returns a rank's lists. wanted: runs for each rank, sorted and disjoint. held: runs that this rank has room for."""
    ranks = range(len(kv_runs))
    own, needed = kv_runs[rank], tuple(common(union(held), wanted[rank]))
    outgoing = [tuple(common(needed if receiver == rank else wanted[receiver], own)) for receiver in ranks]
    incoming = [tuple(common(needed, kv_runs[sender])) for sender in ranks]
    sends = tuple(() if receiver == rank else places(runs, own) for receiver, runs in enumerate(outgoing))
    receives = tuple(() if sender == rank else places(runs, held) for sender, runs in enumerate(incoming))
    own_pairs = tuple(zip(places(outgoing[rank], own), places(incoming[rank], held), strict=True))
    held_rows = size_of(held)
    filled = [*(run for runs in receives for run in runs), *(places for _, places in own_pairs)]
    gaps = tuple(without((Run(0, held_rows),), filled))
    held_sends = _sends_among_held(sends, own_pairs)
    sizes = [size_of(runs) for runs in kv_runs]
    is_whole = len(set(sizes)) == 1 and sizes[0] > 0 and all(size_of(runs) == sum(sizes) for runs in wanted)
    by_runs = _fits_messages(kv_runs, wanted)
    symmetric = make_symmetric_fetch(kv_runs, wanted, held, rank) if 1 < len(kv_runs) <= peer_memory.MOST_RANKS else None
    rows = size_of(own)
    is_local = own_pairs == ((Run(0, rows), Run(0, held_rows)),)
    return SendReceiveLists(sends, receives, own_pairs, held_rows, gaps, rows, held_sends, by_runs, is_whole, is_local, symmetric)


def _sends_among_held(sends: Sequence[Runs], own: Sequence[tuple[Run, Run]]) -> tuple[Runs, ...] | None:
    """Returns the rows that a rank sends, among those that it holds. None if it does not hold all of them."""
    held_sends: list[Runs] = []
    for runs in sends:
        places = []
        for run in runs:
            shifts = [places.start - rows.start for rows, places in own if rows.start <= run.start and run.stop <= rows.stop]
            if not shifts:
                return None
            places.append(Run(run.start + shifts[0], run.stop + shifts[0]))
        held_sends.append(tuple(places))
    return tuple(held_sends)


def _fits_messages(kv_runs: Sequence[Runs], wanted: Sequence[Runs]) -> bool:
    """Returns whether each rank sends and receives few runs, but at least one: NCCL connects all ranks in their first messages."""
    if len(kv_runs) > MOST_RANKS:
        return False
    counts = [[0, 0] for _ in kv_runs]
    for receiver, sender in itertools.permutations(range(len(kv_runs)), 2):
        count = sum(1 for _ in common(wanted[receiver], kv_runs[sender]))
        counts[receiver][0] += count
        counts[sender][1] += count
    return all(max(pair) <= MOST_MESSAGES and any(pair) for pair in counts)


def as_sent(t: Tensor) -> Tensor:
    """Returns a tensor as collectives take it: the bytes of an FP8 tensor."""
    return t.view(torch.uint8) if t.dtype in FP8_DTYPES else t


def all_gather(received: Tensor, own: Tensor, group: Group) -> Any:
    """Starts an all-gather of equally shaped tensors into `received`. Returns a work object to wait for."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
    return gather(as_sent(received), as_sent(own), group=group, async_op=True)


def all_to_all(
    received: Tensor, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]], group: Group, wait: bool = False
) -> Any:
    """Starts an all-to-all of (received, sent) rows by rank, or completes it if `wait`. Returns a work object."""
    receives, sends = (list(count) for count in counts)
    return dist.all_to_all_single(as_sent(received), as_sent(sent), receives, sends, group=group, async_op=not wait)


def from_first_rank(t: Tensor, group: Group) -> Tensor:
    """Returns rank 0's tensor on each rank of the group. Overwrites t."""
    with waiting("the exchange of rank 0's rng_state", group):
        dist.broadcast(t, group_src=0, group=group)
    return t


def all_reduce_max(t: Tensor, group: Group, what: str = "the exchange of the largest scores") -> Tensor:
    """Returns the element-wise maximum over ranks. Overwrites t. what: the name of the exchange in an error."""
    with waiting(what, group):
        dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
    return t


class PendingReceive(NamedTuple):
    """Tensors in transit, and the work objects to wait for. `what` names them in an error."""

    received: tuple[Tensor, ...]
    works: Sequence[Work]
    kept: tuple[Tensor, ...]  # alive until they have been sent
    what: str

    def wait(self, group: Group) -> tuple[Tensor, ...]:
        with waiting(self.what, group):
            for work in self.works:
                work.wait()
        return self.received


def begin_fetch(
    tensors: Sequence[Tensor], lists: SendReceiveLists, group: Group, is_near: bool
) -> tuple[tuple[Tensor, ...], PendingReceive | None]:
    """Starts to fetch the rows [held, ...] that this rank needs from all ranks' tensors [rows, ...].

    is_near: whether ranks use symmetric memory (`peer_memory.are_near`).

    Returns tensors that contain this rank's own rows, and an object for `finish_fetch` to wait for. None with a single rank.
    """
    if lists.is_local:
        rooms = tuple(x.contiguous() for x in tensors)
    else:
        rooms = tuple(x.new_empty((lists.held, *x.shape[1:])) for x in tensors)
    if is_near and lists.symmetric is not None and _fetch_symmetric(tensors, rooms, lists, group):
        return rooms, None
    is_alone = len(lists.sends) == 1
    if is_alone or not lists.by_runs:
        _copy_own_rows(tensors, rooms, lists)
        return rooms, None if is_alone else _exchange_packed(tensors, lists, group)
    places = lists.held_sends
    if places is None or all(x.is_contiguous() for x in tensors):
        pending = _exchange_runs([x.contiguous() for x in tensors], rooms, (lists.sends, lists.receives), group, KEYS)
        _copy_own_rows(tensors, rooms, lists)
        return rooms, pending
    _copy_own_rows(tensors, rooms, lists)  # makes contiguous runs of them
    return rooms, _exchange_runs(rooms, rooms, (places, lists.receives), group, KEYS)


def _fetch_symmetric(tensors: Sequence[Tensor], rooms: Sequence[Tensor], lists: SendReceiveLists, group: Group) -> bool:
    """Fetches the rows through symmetric memory, and writes them and own rows to `rooms`. Returns False if there is none."""
    symmetric = lists.symmetric
    assert symmetric is not None
    places = starts(symmetric.most_sent, list(map(row_size, tensors)))
    with waiting(KEYS, group):
        pulling = peer_memory.begin(group, tensors[0].device, places[-1]) if symmetric.most_sent else None
        if pulling is None and symmetric.most_sent:
            return False
        if pulling is None:
            _copy_own_rows(tensors, rooms, lists)
            return True
        own_tensors, moves = list(map(as_sent, tensors)), symmetric.moves
        is_placed = lists.is_local or not all(map(peer_memory.can_read, own_tensors))
        if is_placed:
            _copy_own_rows(tensors, rooms, lists)
        else:  # own rows are copied while the rows of other ranks travel
            _clear_gaps(rooms, lists)
            moves += tuple(peer_memory.RemoteRows(peer_memory.OWN, rows.start, to.start, rows.size) for rows, to in lists.own)
        for x, first in zip(own_tensors, places, strict=False):
            sent = pulling.room(first, (symmetric.most_sent, *x.shape[1:]), x.dtype)
            copy_all([(sent[slice(*to)], x[slice(*rows)]) for rows, to in symmetric.copies])
        pulling.open()
        each = zip(places, rooms, own_tensors, strict=False)
        pulling.pull(*(pull_of_rows(first, room, moves, None if is_placed else own) for first, room, own in each))
        pulling.close()
    return True


def _copy_own_rows(tensors: Sequence[Tensor], rooms: Sequence[Tensor], lists: SendReceiveLists) -> None:
    if not lists.is_local:
        pairs = list(zip(map(as_sent, tensors), map(as_sent, rooms), strict=True))
        copy_all([(room[slice(*places)], x[slice(*rows)]) for x, room in pairs for rows, places in lists.own])
    if lists.gaps:
        _clear_gaps(rooms, lists)


def _clear_gaps(rooms: Sequence[Tensor], lists: SendReceiveLists) -> None:
    for room in map(as_sent, rooms):
        for gap in lists.gaps:
            room[slice(*gap)].zero_()


def _exchange_runs(
    sources: Sequence[Tensor], rooms: tuple[Tensor, ...], runs: tuple[Sequence[Runs], Sequence[Runs]], group: Group, what: str
) -> PendingReceive:
    """Starts to send and receive runs of rows. Each run is a message from and to its place.

    runs: runs to send and runs to receive, for each rank.
    """
    messages = []
    for x, room in zip(map(as_sent, sources), map(as_sent, rooms), strict=True):
        for rank, (outgoing, incoming) in enumerate(zip(*runs, strict=True)):
            messages += [dist.P2POp(dist.isend, x[slice(*run)], group=group, group_peer=rank) for run in outgoing]
            messages += [dist.P2POp(dist.irecv, room[slice(*run)], group=group, group_peer=rank) for run in incoming]
    return PendingReceive(rooms, _start_messages(messages, what, group), tuple(sources), what)


KEYS, GRADIENTS = "the exchange of keys and values", "the exchange of the gradients of keys and values"


def _exchange_packed(tensors: Sequence[Tensor], lists: SendReceiveLists, group: Group) -> PendingReceive:
    """Starts an all-to-all with one packed message for each rank, or an all-gather if all ranks need all rows."""
    if lists.is_whole:
        own = tuple(x.contiguous() for x in tensors)
        rooms = tuple(x.new_empty((len(lists.sends) * lists.rows, *x.shape[1:])) for x in tensors)
        with waiting(KEYS, group):
            return PendingReceive(rooms, [all_gather(room, x, group) for room, x in zip(rooms, own, strict=True)], own, KEYS)
    counts = [size_of(runs) for runs in lists.receives], [size_of(runs) for runs in lists.sends]
    runs = [run for runs in lists.sends for run in runs]
    sent = tuple(torch.cat([as_sent(x)[slice(*run)] for run in runs]) if runs else as_sent(x)[:0].contiguous() for x in tensors)
    received = tuple(x.new_empty((sum(counts[0]), *x.shape[1:])) for x in tensors)
    with waiting(KEYS, group):
        works = [all_to_all(target, source, counts, group) for target, source in zip(received, sent, strict=True)]
    return PendingReceive(received, works, sent, KEYS)


def finish_fetch(
    fetch: tuple[tuple[Tensor, ...], PendingReceive | None], lists: SendReceiveLists, group: Group
) -> tuple[Tensor, ...]:
    """Returns the rows that this rank needs, in the order of the full sequence."""
    rooms, pending = fetch
    if pending is None:
        return rooms
    received = pending.wait(group)
    if not lists.by_runs:
        for x, room in zip(map(as_sent, received), map(as_sent, rooms), strict=True):
            row = 0
            for runs in lists.receives:
                for places in runs:
                    room[slice(*places)] = x[row : row + places.size]
                    row += places.size
                if lists.is_whole and not runs:
                    row += lists.rows  # This rank's own rows are in place already.
    return rooms


class SourceRows(NamedTuple):
    """Rows of one source of a sum."""

    source: int
    rows: slice


class ReduceScatter(NamedTuple):
    """Reduce-scatter of the gradients of fetched rows. Its sources are this rank's addends, and then the received rows."""

    sent: SumSteps  # Sums to send to other ranks, in the order of `SendReceiveLists.receives`.
    own: SumSteps  # this rank's part of the sums with several addends, one after another
    arrived: SumSteps  # Received rows, the only source, are added to the same sums.
    summed: list[RowMove]  # destinations of those sums
    plain: SumSteps  # this rank's rows with one addend or none
    counts: tuple[list[int], list[int]]  # rows for each rank: received, sent
    place: SourceRows | None  # a source with all of this rank's rows, and maybe rows of others
    by_runs: bool  # as in `SendReceiveLists`
    symmetric: SymmetricFetch | None


class LocalGradients(NamedTuple):
    """Gradients that this rank's calls compute: for each call, of held rows, and of rows of this rank's own tensors.

    whole: a call whose gradients cover all rows of this rank's tensors, and maybe others. None if there is none.
    """

    calls: int
    whole: int | None
    held: Sequence[Addend]
    own: Sequence[Addend]


def make_reduce_scatter(lists: SendReceiveLists, local: LocalGradients) -> ReduceScatter:
    """Returns the steps that sum the gradients of this rank's calls over ranks.

    Sums start with this rank's addends and continue in the order of ranks, so they are deterministic.
    """
    row, sent = 0, NO_STEPS
    for run in (run for runs in lists.receives for run in runs):
        sent += SumSteps.of(run, local.held, row)
        row += run.size
    runs = tuple(run for rank_runs in lists.sends for run in rank_runs)
    arrivals = [Addend(local.calls, run, place.start) for run, place in zip(runs, rows_of(runs), strict=True)]
    row, steps, plain = 0, NO_STEPS, NO_STEPS
    summed: list[RowMove] = []
    not_needed = without((Run(0, lists.rows),), [rows for rows, _ in lists.own])
    for rows, place in (*lists.own, *((run, None) for run in not_needed)):
        moved = 0 if place is None else place.start - rows.start

        def shifted(run: Run, by: int = moved) -> Run:
            return Run(run.start - by, run.stop - by)

        held_addends = [] if place is None else [share._replace(rows=shifted(share.rows)) for share in local.held]
        addends = sorted([*held_addends, *local.own])
        summed_runs = union([*runs, *_overlaps([share.rows for share in addends])])
        for run in common(summed_runs, (rows,)):
            steps += SumSteps.of(run, [*addends, *arrivals], row)
            summed.append(RowMove(slice(*run), 0, slice(row, row + run.size)))
            row += run.size
        for run in without((rows,), summed_runs):
            plain += SumSteps.of(run, addends, run.start)
    counts = [size_of(rank_runs) for rank_runs in lists.sends], [size_of(rank_runs) for rank_runs in lists.receives]
    return ReduceScatter(
        sent,
        *steps.split_sources(local.calls),
        summed,
        plain,
        counts,
        _source_of_all_rows(lists, local),
        lists.by_runs,
        lists.symmetric,
    )


def _source_of_all_rows(lists: SendReceiveLists, local: LocalGradients) -> SourceRows | None:
    if local.whole is not None:
        return SourceRows(local.whole, slice(0, lists.rows))
    places = [places for _, places in lists.own]
    if local.calls != 1 or len(local.held) != 1 or len(places) != 1 or places[0].size != lists.rows:
        return None
    [(source, rows, first)], [place] = local.held, places
    if place.start < rows.start or place.stop > rows.stop:
        return None
    return SourceRows(source, slice(place.start - rows.start + first, place.stop - rows.start + first))


def _overlaps(runs: Sequence[Run]) -> Runs:
    """Returns the positions that are in more than one of the runs."""
    written: Runs = ()
    overlaps: list[Run] = []
    for run in runs:
        overlaps += common(written, (run,))
        written = union((*written, run))
    return union(overlaps)


def begin_reduce_scatter(
    shares: Sequence[Sequence[Tensor]], rooms: Sequence[Tensor], dtype: torch.dtype, reduce_scatter: ReduceScatter, group: Group
) -> PendingReceive:
    """Starts to send the gradients of fetched rows to the ranks that own the rows.

    shares: this rank's addends for each tensor in `rooms`. They are summed before they are sent, in `dtype`.
    """
    receives, sends = reduce_scatter.counts
    received = tuple(torch.empty((sum(receives), *room.shape[1:]), dtype=dtype, device=room.device) for room in rooms)
    symmetric = reduce_scatter.symmetric
    if symmetric is not None and symmetric.most_fetched:
        places = starts(symmetric.most_fetched, list(map(row_size, received)))
        with waiting(GRADIENTS, group):
            pulling = peer_memory.begin(group, rooms[0].device, places[-1])
            if pulling is not None:
                rows = symmetric.most_fetched
                sent = tuple(pulling.room(first, (rows, *x.shape[1:]), dtype) for x, first in zip(received, places, strict=False))
                reduce_scatter.sent.run(sent, shares)
                pulling.open()
                pulling.pull(*(pull_of_rows(first, x, symmetric.back) for x, first in zip(received, places, strict=False)))
                pulling.close()
                return PendingReceive(received, [], (), GRADIENTS)
    sent = tuple(torch.empty((sum(sends), *room.shape[1:]), dtype=dtype, device=room.device) for room in rooms)
    reduce_scatter.sent.run(sent, shares)
    if len(sends) == 1:
        return PendingReceive(received, [], sent, GRADIENTS)
    if reduce_scatter.by_runs:  # one exchange for all tensors
        return _exchange_runs(sent, received, (_runs_by_rank(sends), _runs_by_rank(receives)), group, GRADIENTS)
    with waiting(GRADIENTS, group):
        works = [all_to_all(target, source, reduce_scatter.counts, group) for target, source in zip(received, sent, strict=True)]
    return PendingReceive(received, works, sent, GRADIENTS)


def _runs_by_rank(counts: Sequence[int]) -> list[Runs]:
    """Returns the rows of each rank in a tensor with `counts` rows of one rank after another."""
    ends = itertools.accumulate(counts, initial=0)
    return [(Run(*pair),) if pair[1] > pair[0] else () for pair in itertools.pairwise(ends)]


def sum_own(
    shares: Sequence[Sequence[Tensor]],
    totals: Sequence[Tensor],
    dtype: torch.dtype,
    reduce_scatter: ReduceScatter,
    place: SourceRows | None,
) -> list[Tensor]:
    """Returns this rank's part of the sums with several addends, in `dtype`, and writes all other rows to `totals`.

    This needs no data of other ranks. place: rows of the addends that `totals` already are, so that they are not copied. None:
    there are no such rows.
    """
    rows = sum(move.rows.stop - move.rows.start for move in reduce_scatter.summed)
    sums = [torch.empty((rows, *t.shape[1:]), dtype=dtype, device=t.device) for t in totals]
    reduce_scatter.own.run(sums, shares)
    plain = reduce_scatter.plain if place is None else reduce_scatter.plain.without(place.source)
    plain.run(totals, shares)
    return sums


def finish_reduce_scatter(
    pending: PendingReceive, sums: Sequence[Tensor], totals: Sequence[Tensor], reduce_scatter: ReduceScatter, group: Group
) -> None:
    """Adds the received gradients to the results of `sum_own`, and writes the sums to this rank's rows of `totals`."""
    received = pending.wait(group)
    reduce_scatter.arrived.run(sums, [(t,) for t in received])
    copy_all([(total[to], sum_[rows]) for total, sum_ in zip(totals, sums, strict=True) for to, _, rows in reduce_scatter.summed])


def _start_messages(messages: list[dist.P2POp], what: str, group: Group) -> Sequence[Work]:
    """Starts messages. NCCL uses the current device, which may differ from the device of the tensors."""
    if not messages:
        return []
    device = messages[0].tensor.device
    with waiting(what, group), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return dist.batch_isend_irecv(messages)


RING = "a step of the ring"


def rotate(x: Tensor, rows: int, group: Group) -> PendingReceive:
    """Starts to send x to the next rank and to receive `rows` rows from the previous one."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = x.new_empty((rows, *x.shape[1:]))
    messages, sent = [], x.contiguous()
    if x.shape[0]:
        messages.append(dist.P2POp(dist.isend, as_sent(sent), group=group, group_peer=(rank + 1) % ranks))
    if rows:
        messages.append(dist.P2POp(dist.irecv, as_sent(received), group=group, group_peer=(rank - 1) % ranks))
    return PendingReceive((received,), _start_messages(messages, RING, group), (sent,), RING)
