"""The scheduler: partitions are threads, one of which runs at a time, and a seed decides the next event."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from flexattn.emulator.asynchronous import AsyncCopy, Commit, Operation, Product, Queue, TmaStore, Wgmma
from flexattn.emulator.barriers import MBarrier
from flexattn.emulator.ordering import Knowledge
from flexattn.emulator.report import EmulationError, Finding, Report, Site, current_site, show

SCHEDULES = ("eager", "lazy", "round-robin", "random")

_JOIN_SECONDS = 5.0  # the time for a thread to stop.
_CHANGE_OF_FAVOUR = 0.03  # the probability that a random schedule draws new weights in a step.
_WARP = 32


class _Stop(BaseException):
    """Ends a partition's thread once the run is over."""


class Partition:
    """One partition of gl.warp_specialize, or the program before it. It is a sequential actor."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        warps: int,
        parent: Partition | None,
    ) -> None:
        self.name, self.warps, self.number = name, warps, len(scheduler.partitions)
        self.function, self.arguments, self.result = function, arguments, None
        self.actor = scheduler.new_actor()
        self.knowledge: Knowledge = Knowledge(parent.knowledge if parent else None)
        self.knowledge.reach(self.actor, 1)
        self.wgmmas: Queue[Wgmma] = Queue(scheduler.new_actor())
        self.stores: Queue[TmaStore] = Queue(scheduler.new_actor())
        self.copies: Queue[AsyncCopy] = Queue(scheduler.new_actor())  # numbered by their groups
        self.products: Queue[Product | Commit] = Queue(scheduler.new_actor())
        self.site: Site = ()
        self.awaits: tuple[MBarrier, int] | None = None  # the mbarrier and phase of a wait that blocks it.
        self.finished = False
        self.ready: Callable[[], bool] | None = None  # whether it can run again. If None, it is not blocked.
        self.blocked_on: Callable[[], str] | None = None
        self.polled: tuple[object, object] | None = None  # the element that its last operation polled, and the number there.
        self.weight = 1.0
        # A plain lock is several times faster than a semaphore. It is locked while the partition waits for its turn.
        self._turn = threading.Lock()
        self._turn.acquire()

    @property
    def threads(self) -> int:
        return self.warps * _WARP

    @property
    def time(self) -> int:
        return self.knowledge.happened[self.actor]

    @property
    def line(self) -> int:
        return self.site[0][1] if self.site else 0

    @property
    def can_run(self) -> bool:
        return not self.finished and (self.ready is None or self.ready())

    def release_to(self, other: Knowledge) -> None:
        """Adds everything that the partition did so far to `other`. Later events are not included."""
        other.join(self.knowledge)
        self.tick()

    def fence(self) -> None:
        self.knowledge.fence()
        self.tick()

    def tick(self) -> None:
        self.knowledge.reach(self.actor, self.time + 1)

    def wait_for_turn(self) -> None:
        self._turn.acquire()

    def give_turn(self) -> None:
        if self._turn.locked():  # it is unlocked here only if a run is being stopped.
            self._turn.release()

    def describe(self) -> str:
        if self.finished:
            return f"  {self.name}: finished"
        return f"  {self.name}: at {show(self.site)}\n      {self.blocked_on() if self.blocked_on else 'running'}"


class Scheduler:
    """Runs the partitions of one program and the operations in flight, in an order that random numbers decide.

    A partition runs until its next scheduling point. Every operation on shared memory, barriers and asynchronous engines has one.
    There, any partition that is not blocked may continue, and any operation in flight may act. TMA and cp.async act in any order.
    The wgmmas of a partition act in the order of issue, and so do its tcgen05 products and commits.
    """

    def __init__(self, report: Report, rng: random.Random, max_steps: int, trace: bool) -> None:
        self.report, self.rng = report, rng
        self.partitions: list[Partition] = []
        self.in_flight: list[Operation] = []
        self.steps = 0
        self._actors = 0
        self._current: Partition | None = None
        self._threads: list[threading.Thread] = []
        self._over, self._stopping = threading.Event(), False
        self._error: Exception | None = None
        self._max_steps, self._trace = max_steps, trace
        self._operations_weight = 1.0

    def new_actor(self) -> int:
        self._actors += 1
        return self._actors

    @property
    def current(self) -> Partition:
        """Returns the partition whose code is running."""
        assert self._current is not None
        return self._current

    def find(self, kind: str, message: str, site: Site | None = None) -> None:
        """Records a finding. If no site is given, it is the kernel's current line."""
        if site is None:
            site = current_site()
            message += f"  @ {show(site, self._current.name if self._current else None)}"
        self.report.add(Finding(kind, message, site))

    def fatal(self, kind: str, message: str) -> NoReturn:
        """Records a finding that ends the run, and raises EmulationError."""
        self.find(kind, message)
        raise EmulationError(f"{kind}: {message}")

    def run(self, name: str, function: Callable[[], Any], warps: int, timeout_s: float) -> None:
        """Runs the program to its end. Raises the error of a partition, or EmulationError after a fatal finding."""
        main = self.start(name, function, (), warps, None)
        main.give_turn()
        if not self._over.wait(timeout_s):
            message = f"{timeout_s} s have passed; a loop that does not synchronise?\n{self.state()}"
            self.report.add(Finding("timeout", message))
            self._stop(EmulationError(f"timeout: {message}"))
            for thread in self._threads:  # one of them is in an endless loop.
                if thread.ident is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        if self._error is not None:
            raise self._error

    def start(
        self, name: str, function: Callable[..., object], arguments: Sequence[object], warps: int, parent: Partition | None
    ) -> Partition:
        partition = Partition(self, name, function, arguments, warps, parent)
        if self.report.schedule == "random":
            partition.weight = 10 ** self.rng.uniform(-1.5, 1)
        self.partitions.append(partition)
        thread = threading.Thread(target=self._thread_main, args=(partition,), daemon=True)
        self._threads.append(thread)
        thread.start()
        return partition

    def step(self) -> None:
        """Executes a scheduling point. It comes before an operation acts."""
        partition = self.current
        partition.site = current_site()
        partition.polled = None
        self._schedule(partition)
        if self._trace:
            self.report.trace.append((self.steps, partition.name, show(partition.site)))

    def block(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Lets others run until `ready`. If there is a deadlock, `describe` returns the reason of the wait."""
        partition = self.current
        if ready():
            return
        partition.ready, partition.blocked_on = ready, describe
        self._schedule(partition)
        partition.ready = partition.blocked_on = None

    def state(self) -> str:
        """Describes the state of every partition and barrier, for a deadlock."""
        return "\n".join(partition.describe() for partition in self.partitions)

    def finish(self) -> None:
        """Ends the run. It is called when all partitions have ended and nothing is in flight."""
        self._over.set()

    def _thread_main(self, partition: Partition) -> None:
        partition.wait_for_turn()
        try:
            if self._stopping:
                return
            self._current = partition
            with np.errstate(all="ignore"):
                partition.result = partition.function(*partition.arguments)
                self._check_end(partition)
            partition.finished = True
            self._schedule(partition)
        except _Stop:
            pass
        except Exception as error:  # run() raises it again, in the launching thread.
            self._stop(error)

    def _check_end(self, partition: Partition) -> None:
        for queue, kind, what in (
            (partition.wgmmas, "wgmma-not-waited", "wgmma in flight"),
            (partition.stores, "store-not-waited", "TMA stores that may still read shared memory"),
            (partition.copies, "copy-not-waited", "cp.async in flight"),
        ):
            if left := len(queue.pending):
                last = queue.pending[-1].site
                message = f"{partition.name} ends with {left} {what}; the last was issued at {show(last)}"
                self.find(kind, message, last)

    def _schedule(self, me: Partition) -> None:
        """Picks operations until it picks a partition. Then that partition runs, and `me` waits for its next turn."""
        while True:
            if self._stopping:
                raise _Stop
            self.steps += 1
            if self.steps > self._max_steps:
                self.fatal("step-limit", f"more than {self._max_steps} steps; partitions that wait for each other?\n{self.state()}")
            picked = self._pick(me)
            if picked is None:
                return
            if isinstance(picked, Partition):
                break
            self._act(picked)
        if picked is not me:
            picked.give_turn()
            if me.finished:
                return
            me.wait_for_turn()
            if self._stopping:
                raise _Stop
        self._current = me

    def _pick(self, me: Partition) -> Partition | Operation | None:
        """Returns the next partition or operation, or None if the program has ended. Raises EmulationError in a deadlock."""
        partitions = [partition for partition in self.partitions if partition.can_run]
        operations = self.in_flight.copy()
        for partition in self.partitions:
            for pending in (partition.wgmmas.pending, partition.products.pending):
                for operation in pending:
                    if not operation.done:
                        operations.append(operation)
                        break
        if not partitions and not operations:
            if all(partition.finished for partition in self.partitions):
                self.finish()
                return None
            message = f"step {self.steps}: every partition waits and nothing is in flight\n{self.state()}"
            self.report.add(Finding("deadlock", message))
            raise EmulationError(f"deadlock: {message}")
        schedule = self.report.schedule
        if schedule == "eager" and operations:
            return operations[0]
        if schedule == "lazy" and partitions:
            operations = []
        if schedule == "round-robin" and partitions and not (operations and self.rng.random() < 0.5):
            return min(partitions, key=lambda partition: (partition.number - me.number - 1) % len(self.partitions))
        if schedule == "random" and self.rng.random() < _CHANGE_OF_FAVOUR:
            for partition in self.partitions:
                partition.weight = 10 ** self.rng.uniform(-2, 1)
            self._operations_weight = 10 ** self.rng.uniform(-2, 1)
        weights = [partition.weight for partition in partitions] + [self._operations_weight] * len(operations)
        choices: list[Partition | Operation] = [*partitions, *operations]
        return self.rng.choices(choices, weights)[0] if len(choices) > 1 else choices[0]

    def _act(self, operation: Operation) -> None:
        operation.act()
        self.forget_landed()

    def forget_landed(self) -> None:
        self.in_flight = [operation for operation in self.in_flight if not operation.done]

    def _stop(self, error: Exception) -> None:
        if not self._stopping:
            self._error = error
        self._stopping = True
        for partition in self.partitions:
            if not partition.finished:
                partition.give_turn()
        self._over.set()
