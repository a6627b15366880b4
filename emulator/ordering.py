"""Happens-before relation: vector clocks, and the order of accesses to shared memory.

Every actor has its own time, which advances at each of its releases:

- A partition.
- Its queue of wgmma, joined by warpgroup_mma_wait.
- Its queue of TMA stores, joined by store_wait.
- Its queue of cp.async, whose time is the number of a group, joined by wait_group.
- Its queue of tcgen05 products, joined by a wait on the mbarrier of their commit.
- An mbarrier, whose time is the number of its phase. A TMA load acts for its mbarrier, and a wait on the phase joins it.

If no chain of releases and acquires orders two accesses, they are a race in every schedule. That includes schedules in which they
happen in the right order (Lamport 1978). The detector is FastTrack's (Flanagan and Freund 2009), with reads kept per actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexattn.emulator.report import Site

Actor = int
Clock = dict[Actor, int]
Rectangle = tuple[tuple[int, int], ...]  # [low, high) along each dimension of an allocation.


@dataclass(frozen=True, slots=True)
class Access:
    """One access to shared or tensor memory.

    generic: whether it is an ordinary load or store. TMA and products use the async proxy instead.
    """

    actor: Actor
    time: int
    generic: bool
    who: str
    what: str
    site: Site


class Knowledge:
    """Events that an actor knows to have happened, and the part of them that the async proxy sees too.

    TMA and wgmma read shared memory through the async proxy, which sees ordinary stores only after a fence.proxy.async (PTX ISA,
    "Async proxy"). The writer or the reader may execute the fence. Later releases pass on the events that it covers.

    If two threads access tensor memory, both sides of the barrier between them need a tcgen05.fence (PTX ISA, "tcgen05.fence"). A
    fence before the release marks accesses as `offered`. A fence after the acquire marks them as `ordered`.
    """

    __slots__ = ("fenced", "happened", "offered", "ordered")

    def __init__(self, other: Knowledge | None = None) -> None:
        self.happened: Clock = dict(other.happened) if other else {}
        self.fenced: Clock = dict(other.fenced) if other else {}
        self.offered: Clock = dict(other.offered) if other else {}
        self.ordered: Clock = dict(other.ordered) if other else {}

    def join(self, other: Knowledge) -> None:
        _join(self.happened, other.happened)
        _join(self.fenced, other.fenced)
        _join(self.offered, other.offered)

    def reach(self, actor: Actor, time: int) -> None:
        """Records that everything that `actor` did up to `time` has happened."""
        self.happened[actor] = max(time, self.happened.get(actor, 0))

    def fence(self) -> None:
        _join(self.fenced, self.happened)

    def offer(self) -> None:
        """Executes a tcgen05.fence::before_thread_sync."""
        _join(self.offered, self.happened)

    def order(self) -> None:
        """Executes a tcgen05.fence::after_thread_sync."""
        _join(self.ordered, self.offered)

    def knows(self, access: Access) -> bool:
        return self.happened.get(access.actor, 0) >= access.time

    def is_fenced(self, access: Access) -> bool:
        return self.fenced.get(access.actor, 0) >= access.time

    def is_ordered(self, access: Access) -> bool:
        return self.ordered.get(access.actor, 0) >= access.time


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


@dataclass(slots=True)
class _Record:
    write: Access | None
    reads: dict[Actor, Access]


class History:
    """The accesses to one allocation: for each rectangle the last write, and the last read of each actor after it."""

    def __init__(self) -> None:
        self._records: dict[Rectangle, _Record] = {}

    def add(self, rectangle: Rectangle, access: Access, write: bool) -> list[tuple[Access, bool]]:
        """Records an access, and returns the earlier accesses that conflict with it. Each has a flag that is True for a write."""
        conflicts: list[tuple[Access, bool]] = []
        for known, record in list(self._records.items()):
            if known != rectangle and not overlap(known, rectangle):
                continue
            if record.write is not None:
                conflicts.append((record.write, True))
            if write:
                conflicts += [(read, False) for read in record.reads.values()]
                if _covers(rectangle, known):
                    del self._records[known]
        if write:
            self._records[rectangle] = _Record(access, {})
        else:
            self._records.setdefault(rectangle, _Record(None, {})).reads[access.actor] = access
        return conflicts


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b, strict=True))


def show_part(name: str, region: Rectangle, shape: Sequence[int]) -> str:
    """Returns a part of an allocation as text: name[2][0:16], without the last dimensions that it covers."""
    parts = [
        ":" if (low, high) == (0, n) else f"{low}" if high == low + 1 else f"{low}:{high}"
        for (low, high), n in zip(region, shape, strict=True)
    ]
    while parts and parts[-1] == ":":
        parts.pop()
    return name + "".join(f"[{part}]" for part in parts)


def _covers(a: Rectangle, b: Rectangle) -> bool:
    return all(low <= other_low and other_high <= high for (low, high), (other_low, other_high) in zip(a, b, strict=True))
