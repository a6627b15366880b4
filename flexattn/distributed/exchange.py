"""Collectives of context parallelism: all-to-alls of keys, values and heads, reduce-scatters of gradients, and ring steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.distributed import peer_memory
from flexattn.distributed.layout import Run, Runs, common, row_of, rows_of, size_of, union, without
from flexattn.distributed.near import Near, make_near, pull_of_rows, row_size, starts
from flexattn.distributed.sums import NO_STEPS, Move, Share, Steps, copy_all
from flexattn.validation import FP8_DTYPES


@contextlib.contextmanager
def waiting(what: str, group: Any) -> Iterator[None]:
    """Turns a failure of the group into an error that names the exchange and this rank."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} did not get through {what}: {e}. Another rank may have "
            "raised before it, or called something else: see its output, and run all with FLEXATTN_CHECK=1, which compares what "
            "the ranks are about to do. How long ranks wait is the timeout of init_process_group"
        ) from e


class Route(NamedTuple):
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
    near: Near | None  # The same exchange through symmetric memory. None for many ranks.

    @property
    def is_local(self) -> bool:
        """Returns whether the held rows are this rank's tensor, unchanged."""
        return self.own == ((Run(0, self.rows), Run(0, self.held)),)

    @property
    def is_alone(self) -> bool:
        return len(self.sends) == 1


# limits of messages for single runs, within one host: each message takes the host several microseconds
MOST_RANKS, MOST_MESSAGES = 8, 16


def make_route(kv_runs: Sequence[Runs], wanted: Sequence[Runs], held: Runs, rank: int) -> Route:
    """Returns a rank's lists. wanted: runs for each rank, sorted and disjoint. held: runs that this rank has room for."""
    ranks = range(len(kv_runs))
    own, mine = kv_runs[rank], tuple(common(union(held), wanted[rank]))
    outgoing = [tuple(common(mine if to == rank else wanted[to], own)) for to in ranks]
    incoming = [tuple(common(mine, kv_runs[of])) for of in ranks]
    sends = tuple(() if to == rank else _places(runs, own) for to, runs in enumerate(outgoing))
    receives = tuple(() if of == rank else _places(runs, held) for of, runs in enumerate(incoming))
    kept = tuple(zip(_places(outgoing[rank], own), _places(incoming[rank], held), strict=True))
    count = size_of(held)
    taken = [*(run for runs in receives for run in runs), *(places for _, places in kept)]
    gaps = tuple(without((Run(0, count),), taken))
    held_sends = _moved_sends(sends, kept)
    sizes = [size_of(runs) for runs in kv_runs]
    is_whole = len(set(sizes)) == 1 and sizes[0] > 0 and all(size_of(runs) == sum(sizes) for runs in wanted)
    by_runs = _fits_messages(kv_runs, wanted)
    near = make_near(kv_runs, wanted, held, rank) if 1 < len(kv_runs) <= peer_memory.MOST_RANKS else None
    return Route(sends, receives, kept, count, gaps, size_of(own), held_sends, by_runs, is_whole, near)


def _moved_sends(sends: Sequence[Runs], own: Sequence[tuple[Run, Run]]) -> tuple[Runs, ...] | None:
    """Returns the rows that a rank sends, among those that it holds. None if it does not hold all of them."""
    found: list[Runs] = []
    for runs in sends:
        places = []
        for run in runs:
            moved = [places.start - rows.start for rows, places in own if rows.start <= run.start and run.stop <= rows.stop]
            if not moved:
                return None
            places.append(Run(run.start + moved[0], run.stop + moved[0]))
        found.append(tuple(places))
    return tuple(found)


def _places(runs: Runs, among: Runs) -> Runs:
    """Returns the rows of `runs` in a tensor that holds the runs `among`. Each run must lie in one of these."""
    rows = rows_of(among)
    starts = [row_of(run.start, among, rows) for run in runs]
    return tuple(Run(start, start + run.size) for start, run in zip(starts, runs, strict=True))


def _fits_messages(kv_runs: Sequence[Runs], wanted: Sequence[Runs]) -> bool:
    """Returns whether each rank sends and receives few runs, but at least one: NCCL connects all ranks in their first messages."""
    if len(kv_runs) > MOST_RANKS:
        return False
    counts = [[0, 0] for _ in kv_runs]
    for to, of in itertools.permutations(range(len(kv_runs)), 2):
        count = sum(1 for _ in common(wanted[to], kv_runs[of]))
        counts[to][0] += count
        counts[of][1] += count
    return all(max(pair) <= MOST_MESSAGES and any(pair) for pair in counts)


def as_sent(t: Tensor) -> Tensor:
    """Returns a tensor as collectives take it: the bytes of an FP8 tensor."""
    return t.view(torch.uint8) if t.dtype in FP8_DTYPES else t


def all_gather(received: Tensor, own: Tensor, group: Any) -> Any:
    """Starts an all-gather of equally shaped tensors into `received`. Returns a work object to wait for."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
    return gather(as_sent(received), as_sent(own), group=group, async_op=True)


def all_to_all(received: Tensor, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]], group: Any, wait: bool = False) -> Any:
    """Starts an all-to-all of (received, sent) rows by rank, or completes it if `wait`. Returns a work object."""
    receives, sends = (list(count) for count in counts)
    return dist.all_to_all_single(as_sent(received), as_sent(sent), receives, sends, group=group, async_op=not wait)


def of_first_rank(t: Tensor, group: Any) -> Tensor:
    """Returns rank 0's tensor on each rank of the group. Overwrites t."""
    with waiting("the exchange of rank 0's rng_state", group):
        dist.broadcast(t, dist.get_global_rank(group, 0), group=group)
    return t


def largest(t: Tensor, group: Any, what: str = "the exchange of the largest scores") -> Tensor:
    """Returns the element-wise maximum over ranks. Overwrites t. what: the name of the exchange in an error."""
    with waiting(what, group):
        dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
    return t


class Pending(NamedTuple):
    """Tensors in transit, and the work objects to wait for. `what` names them in an error."""

    received: tuple[Tensor, ...]
    works: Sequence[Any]
    kept: tuple[Tensor, ...]  # alive until they have been sent
    what: str

    def wait(self, group: Any) -> tuple[Tensor, ...]:
        with waiting(self.what, group):
            for work in self.works:
                work.wait()
        return self.received


def begin_fetch(tensors: Sequence[Tensor], route: Route, group: Any) -> tuple[tuple[Tensor, ...], Pending | None]:
    """Starts to fetch the rows [held, ...] that this rank needs from all ranks' tensors [rows, ...].

    Returns tensors that contain this rank's own rows, and an object for `finish_fetch` to wait for. None with a single rank.
    """
    if route.is_local:
        rooms = tuple(x.contiguous() for x in tensors)
    else:
        rooms = tuple(x.new_empty((route.held, *x.shape[1:])) for x in tensors)
    if route.near is not None and _pulled(tensors, rooms, route, group):
        return rooms, None
    if route.is_alone or not route.by_runs:
        _place_own(tensors, rooms, route)
        return rooms, None if route.is_alone else _packed(tensors, route, group)
    places = route.held_sends
    if places is None or all(x.is_contiguous() for x in tensors):
        pending = _by_runs([x.contiguous() for x in tensors], rooms, (route.sends, route.receives), group, KEYS)
        _place_own(tensors, rooms, route)
        return rooms, pending
    _place_own(tensors, rooms, route)  # makes contiguous runs of them
    return rooms, _by_runs(rooms, rooms, (places, route.receives), group, KEYS)


def _pulled(tensors: Sequence[Tensor], rooms: Sequence[Tensor], route: Route, group: Any) -> bool:
    """Fetches the rows through symmetric memory, and writes them and own rows to `rooms`. Returns False if there is none."""
    near = route.near
    assert near is not None
    places = starts(near.most_sent, list(map(row_size, tensors)))
    with waiting(KEYS, group):
        pulling = peer_memory.begin(group, tensors[0].device, places[-1]) if near.most_sent else None
        if pulling is None and near.most_sent:
            return False
        if pulling is None:
            _place_own(tensors, rooms, route)
            return True
        owns, moves = list(map(as_sent, tensors)), near.moves
        is_placed = route.is_local or not all(map(peer_memory.can_read, owns))
        if is_placed:
            _place_own(tensors, rooms, route)
        else:  # own rows are copied while the rows of other ranks travel
            _clear_gaps(rooms, route)
            moves += tuple(peer_memory.Move(peer_memory.OWN, rows.start, to.start, rows.size) for rows, to in route.own)
        for x, first in zip(owns, places, strict=False):
            sent = pulling.room(first, (near.most_sent, *x.shape[1:]), x.dtype)
            copy_all([(sent[slice(*to)], x[slice(*rows)]) for rows, to in near.copies])
        pulling.open()
        each = zip(places, rooms, owns, strict=False)
        pulling.pull(*(pull_of_rows(first, room, moves, None if is_placed else own) for first, room, own in each))
        pulling.close()
    return True


def _place_own(tensors: Sequence[Tensor], rooms: Sequence[Tensor], route: Route) -> None:
    whole = list(zip(map(as_sent, tensors), map(as_sent, rooms), strict=True))
    own = () if route.is_local else route.own
    copy_all([(room[slice(*places)], x[slice(*rows)]) for x, room in whole for rows, places in own])
    _clear_gaps(rooms, route)


def _clear_gaps(rooms: Sequence[Tensor], route: Route) -> None:
    for room in map(as_sent, rooms):
        for gap in route.gaps:
            room[slice(*gap)].zero_()


def _by_runs(
    sources: Sequence[Tensor], rooms: tuple[Tensor, ...], runs: tuple[Sequence[Runs], Sequence[Runs]], group: Any, what: str
) -> Pending:
    """Starts to send and receive runs of rows. Each run is a message from and to its place.

    runs: runs to send and runs to receive, for each rank.
    """
    messages = []
    for x, room in zip(map(as_sent, sources), map(as_sent, rooms), strict=True):
        for rank, (outgoing, incoming) in enumerate(zip(*runs, strict=True)):
            messages += [dist.P2POp(dist.isend, x[slice(*run)], group=group, group_peer=rank) for run in outgoing]
            messages += [dist.P2POp(dist.irecv, room[slice(*run)], group=group, group_peer=rank) for run in incoming]
    return Pending(rooms, _exchange(messages, what, group), tuple(sources), what)


KEYS, GRADIENTS = "the exchange of keys and values", "the exchange of the gradients of keys and values"


def _packed(tensors: Sequence[Tensor], route: Route, group: Any) -> Pending:
    """Starts an all-to-all with one packed message for each rank, or an all-gather if all ranks need all rows."""
    if route.is_whole:
        own = tuple(x.contiguous() for x in tensors)
        rooms = tuple(x.new_empty((len(route.sends) * route.rows, *x.shape[1:])) for x in tensors)
        with waiting(KEYS, group):
            return Pending(rooms, [all_gather(room, x, group) for room, x in zip(rooms, own, strict=True)], own, KEYS)
    counts = [size_of(runs) for runs in route.receives], [size_of(runs) for runs in route.sends]
    runs = [run for runs in route.sends for run in runs]
    sent = tuple(torch.cat([as_sent(x)[slice(*run)] for run in runs]) if runs else as_sent(x)[:0].contiguous() for x in tensors)
    received = tuple(x.new_empty((sum(counts[0]), *x.shape[1:])) for x in tensors)
    with waiting(KEYS, group):
        works = [all_to_all(to, of, counts, group) for to, of in zip(received, sent, strict=True)]
    return Pending(received, works, sent, KEYS)


def finish_fetch(begun: tuple[tuple[Tensor, ...], Pending | None], route: Route, group: Any) -> tuple[Tensor, ...]:
    """Returns the rows that this rank needs, in the order of the full sequence."""
    rooms, pending = begun
    if pending is None:
        return rooms
    received = pending.wait(group)
    if not route.by_runs:
        for x, room in zip(map(as_sent, received), map(as_sent, rooms), strict=True):
            row = 0
            for runs in route.receives:
                for places in runs:
                    room[slice(*places)] = x[row : row + places.size]
                    row += places.size
                if route.is_whole and not runs:
                    row += route.rows  # This rank's own rows are in place already.
    return rooms


class Place(NamedTuple):
    """Rows of one source of a sum."""

    source: int
    rows: slice


class Returns(NamedTuple):
    """Reduce-scatter of the gradients of fetched rows. Its sources are this rank's addends, and then the received rows."""

    sent: Steps  # Sums to send to other ranks, in the order of `SendReceiveLists.receives`.
    own: Steps  # this rank's part of the sums with several addends, one after another
    arrived: Steps  # Received rows, the only source, are added to the same sums.
    summed: list[Move]  # destinations of those sums
    plain: Steps  # this rank's rows with one addend or none
    counts: tuple[list[int], list[int]]  # rows for each rank: received, sent
    place: Place | None  # a source with all of this rank's rows, and maybe rows of others
    by_runs: bool  # as in `SendReceiveLists`
    near: Near | None


class Made(NamedTuple):
    """Gradients that this rank's calls compute: for each call, of held rows, and of rows of this rank's own tensors.

    whole: a call whose gradients cover all rows of this rank's tensors, and maybe others. None if there is none.
    """

    calls: int
    whole: int | None
    held: Sequence[Share]
    own: Sequence[Share]


def make_returns(route: Route, made: Made) -> Returns:
    """Returns the steps that sum the gradients of this rank's calls over ranks.

    Sums start with this rank's addends and continue in the order of ranks, so they are deterministic.
    """
    row, sent = 0, NO_STEPS
    for run in (run for runs in route.receives for run in runs):
        sent += Steps.of(run, made.held, row)
        row += run.size
    runs = tuple(run for of in route.sends for run in of)
    arrivals = [Share(made.calls, run, at.start) for run, at in zip(runs, rows_of(runs), strict=True)]
    row, steps, plain = 0, NO_STEPS, NO_STEPS
    summed: list[Move] = []
    away = without((Run(0, route.rows),), [rows for rows, _ in route.own])
    for rows, places in (*route.own, *((run, None) for run in away)):
        moved = 0 if places is None else places.start - rows.start

        def here(run: Run, by: int = moved) -> Run:
            return Run(run.start - by, run.stop - by)

        of_held = [] if places is None else [share._replace(rows=here(share.rows)) for share in made.held]
        own = sorted([*of_held, *made.own])
        both = union([*runs, *_several([share.rows for share in own])])
        for run in common(both, (rows,)):
            steps += Steps.of(run, [*own, *arrivals], row)
            summed.append(Move(slice(*run), 0, slice(row, row + run.size)))
            row += run.size
        for run in without((rows,), both):
            plain += Steps.of(run, own, run.start)
    counts = [size_of(of) for of in route.sends], [size_of(of) for of in route.receives]
    return Returns(sent, *steps.apart(made.calls), summed, plain, counts, _place_of_all(route, made), route.by_runs, route.near)


def _place_of_all(route: Route, made: Made) -> Place | None:
    if made.whole is not None:
        return Place(made.whole, slice(0, route.rows))
    places = [places for _, places in route.own]
    if made.calls != 1 or len(made.held) != 1 or len(places) != 1 or places[0].size != route.rows:
        return None
    [(source, share, first)], [of] = made.held, places
    if of.start < share.start or of.stop > share.stop:
        return None
    return Place(source, slice(of.start - share.start + first, of.stop - share.start + first))


def _several(runs: Sequence[Run]) -> Runs:
    """Returns the positions that are in more than one of the runs."""
    written: Runs = ()
    found: list[Run] = []
    for run in runs:
        found += common(written, (run,))
        written = union((*written, run))
    return union(found)


def begin_return(
    shares: Sequence[Sequence[Tensor]], rooms: Sequence[Tensor], dtype: torch.dtype, returns: Returns, group: Any
) -> Pending:
    """Starts to send the gradients of fetched rows to the ranks that own the rows.

    shares: this rank's addends for each tensor in `rooms`. They are summed before they are sent, in `dtype`.
    """
    receives, sends = returns.counts
    received = tuple(torch.empty((sum(receives), *room.shape[1:]), dtype=dtype, device=room.device) for room in rooms)
    near = returns.near
    if near is not None and near.most_fetched:
        places = starts(near.most_fetched, list(map(row_size, received)))
        with waiting(GRADIENTS, group):
            pulling = peer_memory.begin(group, rooms[0].device, places[-1])
            if pulling is not None:
                rows = near.most_fetched
                sent = tuple(pulling.room(at, (rows, *x.shape[1:]), dtype) for x, at in zip(received, places, strict=False))
                returns.sent.run(sent, shares)
                pulling.open()
                pulling.pull(*(pull_of_rows(at, x, near.back) for x, at in zip(received, places, strict=False)))
                pulling.close()
                return Pending(received, [], (), GRADIENTS)
    sent = tuple(torch.empty((sum(sends), *room.shape[1:]), dtype=dtype, device=room.device) for room in rooms)
    returns.sent.run(sent, shares)
    if len(sends) == 1:
        return Pending(received, [], sent, GRADIENTS)
    if returns.by_runs:  # one exchange for all tensors
        return _by_runs(sent, received, (_by_rank(sends), _by_rank(receives)), group, GRADIENTS)
    with waiting(GRADIENTS, group):
        works = [all_to_all(to, of, returns.counts, group) for to, of in zip(received, sent, strict=True)]
    return Pending(received, works, sent, GRADIENTS)


def _by_rank(counts: Sequence[int]) -> list[Runs]:
    """Returns the rows of each rank in a tensor with `counts` rows of one rank after another."""
    ends = itertools.accumulate(counts, initial=0)
    return [(Run(*pair),) if pair[1] > pair[0] else () for pair in itertools.pairwise(ends)]


def own_sums(
    shares: Sequence[Sequence[Tensor]], totals: Sequence[Tensor], dtype: torch.dtype, returns: Returns, place: Place | None
) -> list[Tensor]:
    """Returns this rank's part of the sums with several addends, in `dtype`, and writes all other rows to `totals`.

    This needs no data of other ranks. place: rows of the addends that `totals` already are, so that they are not copied. None:
    there are no such rows.
    """
    rows = sum(move.rows.stop - move.rows.start for move in returns.summed)
    sums = [torch.empty((rows, *t.shape[1:]), dtype=dtype, device=t.device) for t in totals]
    returns.own.run(sums, shares)
    plain = returns.plain if place is None else returns.plain.without(place.source)
    plain.run(totals, shares)
    return sums


def finish_return(pending: Pending, sums: Sequence[Tensor], totals: Sequence[Tensor], returns: Returns, group: Any) -> None:
    """Adds the received gradients to the results of `sum_own`, and writes the sums to this rank's rows of `totals`."""
    received = pending.wait(group)
    returns.arrived.run(sums, [(t,) for t in received])
    copy_all([(total[to], of[at]) for total, of in zip(totals, sums, strict=True) for to, _, at in returns.summed])


def _exchange(messages: list[Any], what: str, group: Any) -> Sequence[Any]:
    """Starts messages. NCCL uses the current device, which may differ from the device of the tensors."""
    if not messages:
        return []
    device = messages[0].tensor.device
    with waiting(what, group), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return dist.batch_isend_irecv(messages)


RING = "a step of the ring"


def rotate(x: Tensor, rows: int, group: Any) -> tuple[Tensor, Sequence[Any]]:
    """Starts to send x to the next rank and to receive `rows` rows from the previous one. Returns these and the work objects."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = x.new_empty((rows, *x.shape[1:]))
    messages = []
    if x.shape[0]:
        messages.append(dist.P2POp(dist.isend, as_sent(x.contiguous()), group=group, group_peer=(rank + 1) % ranks))
    if rows:
        messages.append(dist.P2POp(dist.irecv, as_sent(received), group=group, group_peer=(rank - 1) % ranks))
    return received, _exchange(messages, RING, group)


def wait(works: Sequence[Any], group: Any) -> None:
    with waiting(RING, group):
        for work in works:
            work.wait()
