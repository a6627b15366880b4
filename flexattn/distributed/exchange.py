"""Collectives: rows of keys that travel to the ranks that need them, gradients that travel back, heads for rows, rings."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.distributed.layout import Run, Runs, common, row_of, rows_of, size_of, union
from flexattn.validation import FP8_DTYPES


@contextlib.contextmanager
def waiting(what: str, group: Any) -> Iterator[None]:
    """Turns a failure of the group into an error that says what this rank waited for."""
    try:
        yield
    except RuntimeError as e:
        raise RuntimeError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} did not get through {what}: {e}. Another rank may have "
            "raised before it, or called something else: see its output, and run all with FLEXATTN_CHECK=1, which compares what "
            "the ranks are about to do. How long ranks wait is the timeout of init_process_group"
        ) from e


class Route(NamedTuple):
    """Rows that one rank sends and receives, for keys that lie in `kv_runs` and are wanted in runs of the whole's order."""

    sends: tuple[Runs, ...]  # by rank that gets them: rows of this rank's tensor
    receives: tuple[int, ...]  # by rank that gives them: how many
    order: Runs  # rows of what is received, in the order of the whole
    is_whole: bool  # whether all ranks want all rows, and have equally many


def make_route(kv_runs: Sequence[Runs], wanted: Sequence[Runs], rank: int) -> Route:
    """Returns a rank's route. wanted: by rank, sorted and apart."""
    ranks = range(len(kv_runs))
    own, own_rows = kv_runs[rank], rows_of(kv_runs[rank])
    sends = []
    for other in ranks:
        runs = common(wanted[other], own)
        sends.append(tuple(_moved(run, row_of(run.start, own, own_rows)) for run in runs))
    receives, order, row = [], [], 0
    for other in ranks:
        runs = list(common(wanted[rank], kv_runs[other]))
        for run in runs:
            order.append((run.start, Run(row, row + run.size)))
            row += run.size
        receives.append(size_of(runs))
    total = size_of(union(run for runs in kv_runs for run in runs))
    even = len({size_of(runs) for runs in kv_runs}) == 1
    is_whole = even and total > 0 and all(size_of(runs) == total for runs in wanted)
    return Route(tuple(sends), tuple(receives), tuple(rows for _, rows in sorted(order)), is_whole)


def _moved(run: Run, row: int) -> Run:
    return Run(row, row + run.size)


def as_sent(t: Tensor) -> Tensor:
    """Returns a tensor as collectives take it: its bytes, where it is in FP8."""
    return t.view(torch.uint8) if t.dtype in FP8_DTYPES else t


def all_gather(received: Tensor, own: Tensor, group: Any) -> Any:
    """Begins to write all ranks' tensors, of one shape, one after another into `received`; returns what to wait for."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
    return gather(as_sent(received), as_sent(own), group=group, async_op=True)


def all_to_all(received: Tensor, sent: Tensor, counts: tuple[Sequence[int], Sequence[int]], group: Any, wait: bool = False) -> Any:
    """Begins, or with `wait` makes, an exchange of (received, sent) rows by rank; returns what to wait for."""
    receives, sends = (list(count) for count in counts)
    return dist.all_to_all_single(as_sent(received), as_sent(sent), receives, sends, group=group, async_op=not wait)


def of_first_rank(t: Tensor, group: Any) -> Tensor:
    """Returns rank 0's tensor on each rank of the group; t is written to."""
    with waiting("the exchange of rank 0's rng_state", group):
        dist.broadcast(t, dist.get_global_rank(group, 0), group=group)
    return t


def largest(t: Tensor, group: Any, what: str = "the exchange of the largest scores") -> Tensor:
    """Returns the largest of all ranks' numbers, one by one; t is written to. `what` names the exchange in an error."""
    with waiting(what, group):
        dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
    return t


class Pending(NamedTuple):
    """A tensor that is on its way, and what to wait for; `what` names it in an error."""

    received: Tensor
    works: Sequence[Any]
    sent: Tensor  # kept until it has been sent
    what: str

    def wait(self, group: Any) -> Tensor:
        with waiting(self.what, group):
            for work in self.works:
                work.wait()
        return self.received


def begin_fetch(x: Tensor, route: Route, group: Any) -> Pending:
    """Begins to bring the rows that this rank needs, of all ranks' x [rows, ...]."""
    received = x.new_empty((sum(route.receives), *x.shape[1:]))
    what = "the exchange of keys and values"
    if route.is_whole:
        sent = x.contiguous()
        with waiting(what, group):
            work = all_gather(received, sent, group)
    else:
        sent = pick(x, [run for runs in route.sends for run in runs])
        counts = [size_of(runs) for runs in route.sends]
        with waiting(what, group):
            work = all_to_all(received, sent, (route.receives, counts), group)
    return Pending(received, [work], sent, what)


def finish_fetch(pending: Pending, route: Route, group: Any) -> Tensor:
    """Returns the rows [wanted, ...] that this rank needs, in the whole's order."""
    return pick(pending.wait(group), route.order)


def begin_return(grad: Tensor, route: Route, group: Any) -> Pending:
    """Begins to send gradients [wanted, ...] of what was fetched to the ranks that have it."""
    arranged = grad.new_empty(grad.shape)
    row = 0
    for run in route.order:  # the inverse of `finish_fetch`
        arranged[run.start : run.stop] = grad[row : row + run.size]
        row += run.size
    counts = [size_of(runs) for runs in route.sends]
    received = grad.new_empty((sum(counts), *grad.shape[1:]))
    what = "the exchange of the gradients of keys and values"
    with waiting(what, group):
        work = all_to_all(received, arranged, (counts, route.receives), group)
    return Pending(received, [work], arranged, what)


def finish_return(pending: Pending, route: Route, rows: int, group: Any) -> Tensor:
    """Returns the sum, in this rank's rows [rows, ...], of all ranks' gradients of what they fetched.

    Sums are made in the order of the ranks, so that they are the same in each run.
    """
    received = pending.wait(group)
    own = received.new_zeros((rows, *received.shape[1:]))
    row = 0
    for run in (run for runs in route.sends for run in runs):
        own[run.start : run.stop] += received[row : row + run.size]
        row += run.size
    return own


def pick(x: Tensor, runs: Sequence[Run]) -> Tensor:
    """Returns the runs of rows one after another; x itself where they are all of it."""
    if all(a.stop == b.start for a, b in itertools.pairwise(runs)) and size_of(runs) == x.shape[0]:
        return x.contiguous()
    return torch.cat([x[run.start : run.stop] for run in runs]) if runs else x[:0].contiguous()


def spread(x: Tensor, runs: Runs, rows: int) -> Tensor:
    """Returns [rows, ...] with x's rows in these runs, one after another, and zeros elsewhere; x itself where they are all."""
    if rows == x.shape[0]:
        return x
    found, row = x.new_zeros((rows, *x.shape[1:])), 0
    for run in runs:
        found[run.start : run.stop] = x[row : row + run.size]
        row += run.size
    return found


def rotate(x: Tensor, rows: int, group: Any) -> tuple[Tensor, list[Any]]:
    """Begins to send x to the next rank and to receive `rows` rows of the rank before; returns them and what to wait for."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = x.new_empty((rows, *x.shape[1:]))
    todo = []
    if x.shape[0]:
        todo.append(dist.P2POp(dist.isend, as_sent(x.contiguous()), group=group, group_peer=(rank + 1) % ranks))
    if rows:
        todo.append(dist.P2POp(dist.irecv, as_sent(received), group=group, group_peer=(rank - 1) % ranks))
    with waiting("a step of the ring", group):
        return received, dist.batch_isend_irecv(todo) if todo else []


def wait(works: Sequence[Any], group: Any) -> None:
    with waiting("a step of the ring", group):
        for work in works:
            work.wait()
