"""mbarriers and named barriers: their state, the order that they establish, and checks of their use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexattn.emulator import context
from flexattn.emulator.ordering import Actor, Knowledge
from flexattn.emulator.report import Site, show

if TYPE_CHECKING:
    from flexattn.emulator.asynchronous import Commit, TmaLoad
    from flexattn.emulator.scheduler import Partition

_REMEMBERED = 3  # the number of arrivals in a description.


@dataclass(frozen=True, slots=True)
class _Observation:
    """A partition's last wait at an mbarrier: the phase, the partition's time, and the place."""

    phase: int
    time: int
    site: Site


class MBarrier:
    """An mbarrier (PTX ISA, "mbarrier"): a phase ends when no arrivals are pending and the tx-count is 0.

    phase: the number of phases that have ended, which is the number of the current phase. A wait names its parity.
    pending: arrivals that the current phase still needs.
    tx: bytes that the current phase expects, minus the bytes that landed.
    in_flight: bytes of TMA loads that were issued and have not landed.
    """

    def __init__(self, actor: Actor, name: str, count: int, partition: Partition) -> None:
        self.actor, self.name, self.count, self.site = actor, name, count, partition.site
        self.phase, self.pending, self.tx, self.in_flight = 0, count, 0, 0
        self._initialised = (partition.actor, partition.time)
        self._arrived = Knowledge()  # the knowledge of all arrivals so far.
        self._completed = Knowledge()  # that knowledge at the end of the last phase.
        self._observations: dict[Partition, _Observation] = {}
        self._log: list[str] = []

    def describe(self) -> str:
        text = f"{self.name}: in phase #{self.phase} (parity {self.phase & 1}), {self.pending} of {self.count} arrivals pending"
        if self.tx or self.in_flight:
            text += f", tx-count {self.tx:+d} bytes, {self.in_flight} bytes in flight"
        return text + ("; last arrivals: " + "; ".join(self._log[-_REMEMBERED:]) if self._log else "; nobody ever arrived")

    def is_known_to(self, partition: Partition) -> bool:
        """Returns whether the init is ordered before the partition's next access."""
        actor, time = self._initialised
        return partition.knowledge.happened.get(actor, 0) >= time

    def arrive(self, partition: Partition, count: int) -> None:
        self._take(partition, count, f"arrive({count})")
        self._complete_if_done()

    def commit(self, arrival: Commit) -> None:
        """Counts a tcgen05.commit: one arrival, when all products before it have ended."""
        self._take(arrival, 1, "commit")
        self._complete_if_done()

    def expect(self, partition: Partition, nbytes: int) -> None:
        """Counts an mbarrier.arrive.expect_tx: one arrival, and `nbytes` to land."""
        self._take(partition, 1, f"expect({nbytes})")
        self.tx += nbytes
        self._complete_if_done()

    def land(self, nbytes: int, load: TmaLoad) -> None:
        """Counts the complete_tx of a part of a TMA load."""
        program, issued = context.program(), show(load.site, load.partition.name)
        self.in_flight -= nbytes
        if load.phase != self.phase:
            program.find(
                "expect-bytes",
                f"a TMA load issued in phase #{load.phase} of {self.name} lands in phase #{self.phase}: the phase ended before all "
                f"its bytes had arrived, so it expects too few; issued at {issued}",
                load.site,
            )
        self.tx -= nbytes
        self._complete_if_done()
        if self.pending == 0 and self.tx < 0:
            message = f"phase #{self.phase} of {self.name} gets {-self.tx} bytes more than it expects; load at {issued}"
            program.find("expect-bytes", message, load.site)
            self.tx = 0
            self._complete_if_done()

    def has_passed(self, parity: int) -> bool:
        """Returns whether mbarrier.try_wait.parity succeeds: it does if the phase before the current one has this parity."""
        return (self.phase - 1) & 1 == parity

    def awaited_phase(self, partition: Partition, parity: int) -> int:
        """Returns the phase of a wait: the next one of its parity after the phases that this partition knows to have ended."""
        program, last = context.program(), self._observations.get(partition)
        if last is None:
            ended = partition.knowledge.happened.get(self.actor, 0)
            phase = ended - 1 if (ended - 1) & 1 == parity else ended
        else:
            phase = last.phase + (parity != last.phase & 1)
            if phase == last.phase >= 0:
                message = f"{partition.name} waits again for phase #{phase} (parity {parity}) of {self.name}, which it has seen"
                program.find("phase-repeat", message)
        if phase < self.phase - 1:
            outcome = "passes on another phase of that parity" if self.has_passed(parity) else "has missed its phase and blocks"
            program.find(
                "phase-alias",
                f"{partition.name} waits for phase #{phase} (parity {parity}) of {self.name}, which is in phase #{self.phase}: "
                f"the wait {outcome}",
            )
        return phase

    def observe(self, partition: Partition, phase: int) -> None:
        """Records a wait that has passed. The partition gets the knowledge of all that arrived."""
        partition.knowledge.join(self._completed)
        self._observations[partition] = _Observation(max(phase, -1), partition.time, partition.site)

    def _take(self, partition: Partition | Commit, count: int, what: str) -> None:
        if count > self.pending:
            context.program().find("arrive-overflow", f"{what} by {partition.name}, more than are pending; {self.describe()}")
            self.pending = count
        self._log.append(f"{partition.name} {what} in phase #{self.phase} at line {partition.line}")
        del self._log[:-_REMEMBERED]
        partition.release_to(self._arrived)
        self.pending -= count

    def _complete_if_done(self) -> None:
        if self.pending or self.tx:
            return
        program, phase, before = context.program(), self.phase, self.phase - 1
        self._arrived.reach(self.actor, phase + 1)
        for partition, last in self._observations.items():
            if last.phase == before and self._arrived.happened.get(partition.actor, 0) < last.time:
                program.find(
                    "phase-alias",
                    f"{self.name} completes phase #{phase} without being ordered after {partition.name}'s wait for phase #{before} "
                    f"({show(last.site)}): under another schedule that wait could miss its phase and see the other parity",
                    last.site,
                )
        for partition in program.partitions:
            if partition.awaits == (self, before):
                program.find(
                    "phase-alias",
                    f"{self.name} completes phase #{phase} while {partition.name} still waits for phase #{before} "
                    f"({show(partition.site)}) and may miss it",
                    partition.site,
                )
        self.phase, self.pending = phase + 1, self.count
        self._completed = Knowledge(self._arrived)


class NamedBarrier:
    """One of the 16 barriers of bar.sync and bar.arrive (PTX ISA, "barrier"). A generation ends when `count` threads arrived."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count = number, count
        self.generation = self.threads = 0
        self.arrived: list[Partition] = []
        self._entering = Knowledge()
        self._completed = Knowledge()

    def describe(self) -> str:
        who = f", arrived: {', '.join(partition.name for partition in self.arrived)}" if self.arrived else ""
        return f"bar {self.number}: {self.threads} of {self.count} threads, generation {self.generation}{who}"

    def enter(self, partition: Partition) -> int:
        """Counts the arrival of a partition's threads, and returns the number of their generation."""
        program, generation = context.program(), self.generation
        if partition in self.arrived:
            program.find("named-barrier", f"{partition.name} arrives twice in one generation ({self.describe()})")
        self.threads += partition.threads
        self.arrived.append(partition)
        partition.release_to(self._entering)
        if self.threads > self.count:
            program.find("named-barrier", f"{self.describe()}: more than its count")
        if self.threads >= self.count:
            self.generation, self.threads, self.arrived = generation + 1, 0, []
            self._completed = Knowledge(self._entering)
        return generation

    def leave(self, partition: Partition) -> None:
        partition.knowledge.join(self._completed)
