"""One program of the grid: its operations on shared memory, barriers and asynchronous engines, with all checks."""

from __future__ import annotations

import linecache
import random
import re
from collections.abc import Callable, Sequence

import numpy as np
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as hopper_mbarrier

from flexattn.emulator import rules
from flexattn.emulator.asynchronous import Accumulator, AsyncCopy, Commit, Product, TmaLoad, TmaStore, Wgmma
from flexattn.emulator.barriers import MBarrier, NamedBarrier
from flexattn.emulator.dtypes import Array, DType, Layout, poison
from flexattn.emulator.memory import REDUCED, Descriptor, GlobalBuffer, writer_number
from flexattn.emulator.ordering import Access, Actor
from flexattn.emulator.report import Finding, GluonError, Report, current_site, show
from flexattn.emulator.scheduler import Scheduler
from flexattn.emulator.shared import Allocation, SharedView
from flexattn.emulator.tensor import TensorAllocation, TensorView
from flexattn.emulator.values import Operand, Tensor

_ASSIGNED_NAME = re.compile(r"\s*(\w+)\s*=")


class Cta(Scheduler):
    """One thread block. Each public method executes one operation of the language, and starts with a scheduling point."""

    def __init__(
        self,
        report: Report,
        rng: random.Random,
        program_id: tuple[int, ...],
        number: int,
        race_detector: bool,
        max_steps: int,
        trace: bool,
    ) -> None:
        super().__init__(report, rng, max_steps, trace)
        self.program_id, self.number = program_id, number
        self.grid = report.grid
        self._race_detector = race_detector
        self._allocations: list[Allocation] = []
        self._named_barriers: dict[int, NamedBarrier] = {}
        self._shared_bytes = 0
        self._tensor_columns = 0

    # Partitions

    def warp_specialize(
        self,
        functions: Sequence[tuple[Callable[..., object], Sequence[object]]],
        warps: Sequence[int],
        registers: Sequence[int] | None,
    ) -> object:
        """Runs the default partition and its workers, and returns the result of the default partition."""
        if len(self.partitions) > 1:
            raise GluonError("warp_specialize entered a second time in one program")
        workers = len(functions) - 1
        if len(warps) != workers or (registers is not None and len(registers) != workers):
            raise GluonError(f"warp_specialize of {workers} workers with worker_num_warps={warps}, worker_num_regs={registers}")
        for function, arguments in functions[1:]:
            if any(isinstance(argument, Tensor) for argument in arguments):
                raise GluonError(f"the worker {function.__name__} gets a tensor; accepted: scalars, pointers, shared memory")
        parent = self.current
        self.report.registers, wrong = rules.split_registers(parent.warps, warps, registers)
        if wrong is not None:
            self.find("register-budget", wrong)
        names = [function.__name__ for function, _ in functions]
        started = []
        for i, (function, arguments) in enumerate(functions):
            name = names[i] if names.count(names[i]) == 1 else f"{names[i]}#{names[:i].count(names[i])}"
            started.append(self.start(name, function, arguments, parent.warps if i == 0 else warps[i - 1], parent))
        parent.tick()
        parent.site = current_site()
        self.block(lambda: all(partition.finished for partition in started), lambda: "waits for its partitions to end")
        for partition in started:
            parent.knowledge.join(partition.knowledge)
        return started[0].result

    def finish(self) -> None:
        for named in self._named_barriers.values():
            if named.threads:
                self.report.add(Finding("named-barrier-leftover", f"the kernel ends with {named.describe()}"))
        for barrier in self._mbarriers():
            if barrier.tx or barrier.in_flight:
                self.report.add(Finding("expect-bytes", f"the kernel ends with {barrier.describe()}"))
        for partition in self.partitions:
            queue = partition.products
            if self.partitions[0].knowledge.happened.get(queue.actor, 0) < queue.issued:
                message = f"the last tcgen05 product or commit of {partition.name} may still run; issued at"
                self.report.add(Finding("product-not-waited", f"{message} {show(queue.last)}", queue.last))
        super().finish()

    def state(self) -> str:
        barriers = [named.describe() for named in self._named_barriers.values() if named.threads]
        barriers += [barrier.describe() for barrier in self._mbarriers() if barrier.tx]
        return "\n".join([f"  program {self.program_id}", super().state(), *("  " + text for text in barriers)])

    def _mbarriers(self) -> list[MBarrier]:
        return [barrier for allocation in self._allocations for barrier in allocation.mbarriers.values()]

    # Shared memory

    def check_layout(self, layout: Layout) -> None:
        rules.check_warps(layout, self.current.warps, self.current.name)

    def allocate(self, dtype: DType, shape: list[int], layout: Layout, value: Tensor | None) -> SharedView:
        name = _assigned_name() or f"shared{len(self._allocations)}"
        allocation = Allocation(name, dtype, shape, isinstance(layout, hopper_mbarrier.MBarrierLayout))
        self._allocations.append(allocation)
        self._shared_bytes += rules.allocated_bytes(allocation.nbytes, allocation.is_barrier)
        self.report.shared_bytes = max(self.report.shared_bytes, self._shared_bytes)
        if self._shared_bytes > rules.SHARED_MEMORY_BYTES:
            self.find(
                "smem-limit", f"with {name} the program has {self._shared_bytes} bytes, and sm_90 has {rules.SHARED_MEMORY_BYTES}"
            )
        view = SharedView.whole(allocation, dtype, layout)
        if value is not None:
            self.shared_store(view, value)
        return view

    def shared_load(self, view: SharedView, layout: Layout) -> Tensor:
        self.step()
        self.check_layout(layout)
        partition = self.current
        self._access(view, "load", partition.actor, partition.time, write=False, generic=True)
        self._check_written(view, "a load")
        return Tensor(view.data.copy(), view.dtype, layout)

    def shared_store(self, view: SharedView, value: Tensor) -> None:
        self.step()
        if not isinstance(value, Tensor) or value.shape != view.shape or value.dtype.name != view.dtype.name:
            raise GluonError(f"store of {value!r} to {view!r}, which is {view.dtype.name}{view.shape}")
        partition = self.current
        self._access(view, "store", partition.actor, partition.time, write=True, generic=True)
        view.data[...] = value.data
        view.written[...] = True

    def fence(self) -> None:
        self.step()
        self.current.fence()

    def _access(self, view: SharedView, what: str, actor: Actor, time: int, *, write: bool, generic: bool) -> bool:
        """Checks an access against earlier ones. Returns whether the async proxy may miss ordinary stores, and must read poison.

        If there is a race, the simulated memory decides the value that is read.
        """
        partition = self.current
        access = Access(actor, time, generic, partition.name, what, self.current.site)
        misses = False
        for earlier, was_write in view.allocation.history.add(view.region, access, write):
            if not partition.knowledge.knows(earlier):
                if self._race_detector:
                    now, then = "write" if write else "read", "write" if was_write else "read"
                    self.find(
                        "race",
                        f"{what} ({now}) of {view!r} by {partition.name} is not ordered after the {earlier.what} ({then}) by "
                        f"{earlier.who} at {show(earlier.site)}",
                    )
            elif was_write and earlier.generic and not generic and not partition.knowledge.is_fenced(earlier):
                misses = True
                self.find(
                    "missing-fence",
                    f"{what} of {view!r} by {partition.name} goes through the async proxy, and no fence_async_shared lies between "
                    f"it and the {earlier.what} by {earlier.who} at {show(earlier.site)}",
                )
        return misses

    def _check_written(self, view: SharedView, what: str) -> None:
        if not view.written.all():
            self.find("uninitialised-read", f"{what} of {view!r}, part of which nothing wrote, or whose TMA load has not landed")

    # mbarriers

    def init_barrier(self, view: SharedView, count: int) -> None:
        self.step()
        before = view.allocation.mbarriers.get(view.region)
        if before is not None:
            message = f"init of {view!r}, initialised at {show(before.site)} and in use: {before.describe()}"
            self.find("barrier-reinit", message)
        view.allocation.mbarriers[view.region] = MBarrier(self.new_actor(), repr(view), count, self.current)
        self.current.tick()

    def invalidate_barrier(self, view: SharedView) -> None:
        self.step()
        self._barrier(view, "invalidate")
        del view.allocation.mbarriers[view.region]

    def expect(self, view: SharedView, nbytes: int, predicate: Operand) -> None:
        self.step()
        if predicate:
            self._barrier(view, "expect").expect(self.current, nbytes)

    def arrive(self, view: SharedView, count: int, predicate: Operand) -> None:
        self.step()
        if predicate:
            self._barrier(view, "arrive").arrive(self.current, count)

    def wait(self, view: SharedView, phase: Operand, predicate: Operand) -> None:
        self.step()
        if not predicate:
            return
        barrier, partition, parity = self._barrier(view, "wait"), self.current, int(phase)
        if parity not in (0, 1):
            self.find("phase", f"wait on {view!r} with phase {parity}; there are 0 and 1")
            parity &= 1
        awaited = barrier.awaited_phase(partition, parity)
        partition.awaits = (barrier, awaited)

        def describe() -> str:
            missed = ", which it missed" if awaited < barrier.phase - 1 else ""
            return f"waits for {view!r} parity {parity} (phase #{awaited}{missed}); {barrier.describe()}"

        self.block(lambda: barrier.has_passed(parity), describe)
        partition.awaits = None
        barrier.observe(partition, awaited)

    def _barrier(self, view: SharedView, operation: str) -> MBarrier:
        if view.dtype.name != "int64" or view.numel != 1:
            raise GluonError(f"mbarrier.{operation} of {view!r}, which is {view.dtype.name}{view.shape}; accepted: one int64")
        barrier = view.allocation.mbarriers.get(view.region)
        if barrier is None:
            self.fatal("barrier-uninitialised", f"{operation} on {view!r}, which has no init before it")
        if not barrier.is_known_to(self.current):
            self.find("barrier-uninitialised", f"{operation} on {view!r} is not ordered after its init at {show(barrier.site)}")
        return barrier

    # Named barriers

    def named_barrier(self, kind: str, number: int, count: int, times: int) -> None:
        """Executes bar.sync or bar.arrive, `times` in every thread of the partition."""
        self.step()
        partition = self.current
        reserved = rules.RESERVED_BARRIERS + max(0, len(self.partitions) - 2)
        name = f"bar.{kind} {number}, {count}"
        if not reserved <= number < rules.NAMED_BARRIERS:
            self.find(
                "named-barrier",
                f"{name}: free are {reserved} to {rules.NAMED_BARRIERS - 1}; Triton uses 0 for the default partition, 1 for all "
                "warps, and 2 on for workers",
            )
        barrier = self._named_barriers.setdefault(number, NamedBarrier(number, count))
        if barrier.count != count:
            self.find("named-barrier", f"{name}: others use it with a count of {barrier.count}")
        if count % 32 or count <= 0:
            self.find("named-barrier", f"{name}: the count must be a multiple of 32")
        if times != 1:
            self.find("named-barrier", f"{name} runs {times} times in each thread, as the operand has {times} elements a thread")
        generation = barrier.enter(partition)
        if kind == "sync":
            self.block(lambda: barrier.generation > generation, lambda: f"waits at {name}; {barrier.describe()}")
            barrier.leave(partition)

    # TMA

    def tma_load(
        self, descriptor: Descriptor, coord: Sequence[Operand], barrier_view: SharedView, target: SharedView, predicate: Operand
    ) -> None:
        self.step()
        if not predicate:
            return
        barrier, place = self._barrier(barrier_view, "TMA load"), [int(c) for c in coord]
        self._check_tma(descriptor, place, target, "TMA load")
        self._access(target, "TMA load", barrier.actor, barrier.phase + 1, write=True, generic=False)
        target.data[...] = poison(target.dtype)
        target.written[...] = False
        barrier.in_flight += descriptor.nbytes
        self.in_flight.append(TmaLoad(self.current, descriptor, place, barrier, target, self.current.site, self.rng))

    def tma_store(self, descriptor: Descriptor, coord: Sequence[Operand], source: SharedView, reduction: str | None) -> None:
        self.step()
        what, place, stores = "TMA reduction" if reduction else "TMA store", [int(c) for c in coord], self.current.stores
        self._check_tma(descriptor, place, source, what)
        stores.issued += 1
        misses = self._access(source, what, stores.actor, stores.issued, write=False, generic=False)
        self._check_written(source, f"a {what}")
        store = TmaStore(stores.issued, self.current, self.number, descriptor, place, source, reduction, misses, self.current.site)
        stores.pending.append(store)
        self.in_flight.append(store)

    def store_wait(self, outstanding: int) -> None:
        """Executes cp.async.bulk.wait_group: all TMA stores have read their sources, except for the `outstanding` last ones."""
        self.step()
        stores = self.current.stores
        stores.retire(outstanding)
        self.forget_landed()
        self.current.knowledge.reach(stores.actor, stores.waited)

    def _check_tma(self, descriptor: Descriptor, coord: Sequence[int], view: SharedView, what: str) -> None:
        rules.check_tma(descriptor, coord, view, what)
        if descriptor.lies_outside(coord):
            self.find("tma-out-of-bounds", f"{what} at {list(coord)}, wholly outside the tensor {descriptor.shape}")
        elif overrun := descriptor.overrun(coord):
            self.find("out-of-bounds", f"{what}: {overrun}")

    # cp.async

    def async_copy(self, target: SharedView, source: GlobalBuffer, offset: Array, active: Array) -> None:
        self.step()
        if target.shape != list(offset.shape) or target.dtype.name != source.dtype.name:
            found = f"{source.dtype.name}{list(offset.shape)}"
            raise GluonError(f"cp.async of {found} to {target!r}, which is {target.dtype.name}{target.shape}")
        copies = self.current.copies
        self._access(target, "cp.async", copies.actor, copies.issued + 1, write=True, generic=True)
        target.data[...] = poison(target.dtype)
        target.written[...] = False
        copy = AsyncCopy(copies.issued + 1, target, source.data, offset, active, self.current.site)
        copies.pending.append(copy)
        self.in_flight.append(copy)

    def commit_copies(self) -> None:
        """Executes cp.async.commit_group: the copies since the last commit are a group, which may be empty."""
        self.step()
        self.current.copies.issued += 1

    def wait_for_copies(self, outstanding: int) -> None:
        """Executes cp.async.wait_group: all groups have landed, except for the `outstanding` last ones."""
        self.step()
        copies = self.current.copies
        copies.retire(outstanding)
        self.forget_landed()
        self.current.knowledge.reach(copies.actor, copies.waited)

    # wgmma

    def wgmma(
        self, a: Tensor | SharedView, b: SharedView, accumulator: Operand, use_accumulator: Operand, is_async: bool
    ) -> Operand:
        self.step()
        partition, queue = self.current, self.current.wgmmas
        rules.check_wgmma(a, b, accumulator, partition.warps)
        self.check_layout(accumulator.layout)
        queue.issued += 1
        misses = False
        for operand in (a, b):
            if isinstance(operand, SharedView):
                misses |= self._access(operand, "wgmma operand", queue.actor, queue.issued, write=False, generic=False)
                self._check_written(operand, "wgmma")
        operation = Wgmma(queue.issued, a, b, accumulator, bool(use_accumulator), misses, self.current.site)
        queue.pending.append(operation)
        self.report.wgmmas += 1
        if is_async:
            return Accumulator(operation)
        return self._retire_wgmmas(0, [Accumulator(operation), a])[0]

    def wgmma_wait(self, outstanding: int, deps: list[object]) -> list[object]:
        """Returns deps, with each Accumulator replaced by its result."""
        self.step()
        return self._retire_wgmmas(outstanding, deps)

    def _retire_wgmmas(self, outstanding: int, deps: list[object]) -> list[object]:
        partition, queue = self.current, self.current.wgmmas
        retired = queue.retire(outstanding)
        partition.knowledge.reach(queue.actor, queue.waited)
        for operation in retired:
            if isinstance(operation.a, Tensor) and not any(dep is operation.a for dep in deps):
                self.find(
                    "wgmma-register-operand",
                    f"operand A, in registers, of the wgmma at {show(operation.site)} is not among the deps of the wait that "
                    "retires it: its registers may be used again while the wgmma reads them",
                )
        return [self._result(dep, outstanding) if isinstance(dep, Accumulator) else dep for dep in deps]

    def _result(self, accumulator: Accumulator, outstanding: int) -> Tensor:
        operation, queue = accumulator.operation, self.current.wgmmas
        result: Array
        if operation.done and operation.number <= queue.waited:
            result = operation.result
        else:
            later = queue.issued - operation.number
            self.find(
                "wgmma-wait",
                f"warpgroup_mma_wait({outstanding}) returns the result of a wgmma that may still run: {later} were issued after "
                f"it, and {outstanding} may be outstanding; it was issued at {show(operation.site)}",
            )
            result = np.full(accumulator.shape, np.nan, np.float32)
        return Tensor(result, accumulator.dtype, accumulator.layout)

    # Tensor memory and tcgen05

    def allocate_tensor(self, dtype: DType, shape: list[int], layout: Layout, value: Tensor | None) -> TensorView:
        allocation = TensorAllocation(_assigned_name() or "tensor", dtype, shape, layout)
        self._tensor_columns += allocation.columns
        self.report.tensor_columns = max(self.report.tensor_columns, self._tensor_columns)
        if self._tensor_columns > rules.TENSOR_MEMORY_COLUMNS:
            message = f"with {allocation.name} the program has {self._tensor_columns} columns of tensor memory"
            self.find("tmem-limit", f"{message}, and sm_100 has {rules.TENSOR_MEMORY_COLUMNS}")
        view = TensorView.whole(allocation, dtype, shape, layout)
        if value is not None:
            self.tensor_store(view, value, True)
        return view

    def tensor_load(self, view: TensorView, layout: Layout) -> Tensor:
        """Executes tcgen05.ld and its wait. Triton compiles a load to both."""
        self.step()
        partition = self.current
        rules.check_tensor_access(view, layout, partition.warps, "a load")
        self._access_tensor(view, "load", partition.actor, partition.time, write=False)
        if not view.is_written:
            self.find("uninitialised-read", f"a load of {view!r}, part of which nothing wrote")
        return Tensor(view.data, view.dtype, layout)

    def tensor_store(self, view: TensorView, value: Tensor, predicate: Operand) -> None:
        """Executes tcgen05.st and its wait. Triton compiles a store to both."""
        self.step()
        if not isinstance(value, Tensor) or value.shape != view.shape or value.dtype.name != view.dtype.name:
            raise GluonError(f"store of {value!r} to {view!r}, which is {view.dtype.name}{view.shape}")
        partition = self.current
        rules.check_tensor_access(view, value.layout, partition.warps, "a store")
        if predicate:
            self._access_tensor(view, "store", partition.actor, partition.time, write=True)
            view.write(value.data)

    def tensor_fence(self, side: str) -> None:
        """Executes a tcgen05.fence before or after a synchronisation of threads."""
        self.step()
        knowledge = self.current.knowledge
        if side == "before":
            knowledge.offer()
            self.current.tick()
        else:
            knowledge.order()

    def tcgen05_mma(self, a: SharedView | TensorView, b: SharedView, accumulator: TensorView, use_accumulator: Operand) -> None:
        self.step()
        rules.check_product(a, b, accumulator)
        queue, adds, misses = self.current.products, bool(use_accumulator), False
        queue.issued += 1
        for operand in (a, b):
            if isinstance(operand, TensorView):
                self._access_tensor(operand, "product's operand", queue.actor, queue.issued, write=False)
                written = operand.is_written
            else:
                misses |= self._access(operand, "product's operand", queue.actor, queue.issued, write=False, generic=False)
                written = bool(operand.written.all())
            if not written and not self._writes(operand):
                self.find("uninitialised-read", f"a product of {operand!r}, part of which nothing wrote, or that has not landed")
        self._access_tensor(accumulator, "product's sum", queue.actor, queue.issued, write=True)
        if adds and not accumulator.is_written and not self._writes(accumulator):
            self.find("uninitialised-read", f"a product is added to {accumulator!r}, part of which nothing wrote")
        self._issue(Product(queue.issued, a, b, accumulator, adds, misses, self.current.site))
        self.report.products += 1

    def tcgen05_commit(self, view: SharedView) -> None:
        self.step()
        barrier, partition = self._barrier(view, "commit"), self.current
        partition.products.issued += 1
        self._issue(Commit(partition.products.issued, partition, partition.products.actor, barrier, self.current.site))

    def _issue(self, operation: Product | Commit) -> None:
        queue = self.current.products
        queue.last = operation.site
        queue.pending = [*(earlier for earlier in queue.pending if not earlier.done), operation]

    def _writes(self, view: object) -> bool:
        """Returns whether a pending product of the current partition writes the view or a part of it."""
        return any(isinstance(op, Product) and op.writes(view) for op in self.current.products.pending if not op.done)

    def _access_tensor(self, view: TensorView, what: str, actor: Actor, time: int, *, write: bool) -> None:
        """Checks an access against earlier ones. A partition's own loads and stores are in order, and so are its products."""
        partition, knowledge = self.current, self.current.knowledge
        access = Access(actor, time, False, partition.name, what, self.current.site)
        for earlier, was_write in view.allocation.history.add(view.region, access, write):
            if earlier.actor == actor:
                continue
            now, then = "write" if write else "read", "write" if was_write else "read"
            pair = f"{what} ({now}) of {view!r} by {partition.name}", f"{earlier.what} ({then}) by {earlier.who}"
            if not knowledge.knows(earlier):
                if self._race_detector:
                    self.find("race", f"{pair[0]} is not ordered after the {pair[1]} at {show(earlier.site)}")
            elif earlier.actor != partition.actor and not knowledge.is_ordered(earlier):
                self.find("tensor-fence", f"{pair[0]} lacks a tcgen05.fence on its side or on that of the {pair[1]}")

    # Global memory through pointers

    def poll(self, buffer: GlobalBuffer, index: int) -> None:
        """Executes an atomic that adds 0. If it repeats the last operation, as in a loop, others run until the number changes."""
        partition, place = self.current, (buffer, index)
        before = partition.polled
        self.step()
        if before is not None and before[0] == place:
            number = before[1]
            self.block(lambda: buffer.data[index] != number, lambda: f"polls an element of global memory, which stays {number}")
        partition.polled = place, buffer.data[index]

    def global_write(self, buffer: GlobalBuffer, index: Array, values: Array, reduction: bool) -> None:
        """Writes through pointers. Stores and atomics act at once, and delays between programs are not modelled."""
        writer = REDUCED if reduction else writer_number(self.number, self.current.number)
        buffer.write(index, values, writer, current_site(), f"{self.current.name} of program {self.program_id}")


def _assigned_name() -> str | None:
    """Returns the variable that the kernel's current line assigns to."""
    filename, line, _ = current_site()[0]
    assigned = _ASSIGNED_NAME.match(linecache.getline(filename, line))
    return assigned[1] if assigned else None
