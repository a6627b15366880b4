"""Finds races between the streams of `flexattn.distributed.lanes` on a CPU, from writes, waits and frees.

Each stream has a vector clock (Lamport, 1978; Fidge, 1988). An op must come after the writes to its inputs and after all uses of
its outputs. The stream that allocated memory may reuse it as soon as it is freed, so it must have waited for all other streams'
uses by then; torch's caching allocator requires this. A collective runs on a separate stream, which waits for the current one. A
wait for the collective is a wait for that stream. A CUDA graph begins on the stream of a call: if one of its streams waits for
another stream, that one must have waited for one of the graph's streams before.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexattn.distributed import exchange, lanes, peer_memory

COLLECTIVES = "c10d"


class _Use(NamedTuple):
    stream: str
    time: int
    bytes: range  # from the first to the last


def _bytes(t: Tensor) -> range:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    first, size = t.storage_offset(), t.element_size()
    return range(first * size, (first + (last + 1 if t.numel() else 0)) * size)


class _Memory:
    """A storage: the stream that allocated it, and the time of each stream's last read and write."""

    def __init__(self, storage: Any, home: str, made_by: str) -> None:
        self.alive, self.home, self.made_by = StorageWeakRef(storage), home, made_by
        self.reads: list[_Use] = []
        self.writes: list[_Use] = []


class Races(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches ops while it is entered; `found` has a line for each race."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = "main"
        self.clocks: dict[str, Counter[str]] = {}
        self.memory: dict[int, _Memory] = {}
        self.freed: list[_Memory] = []
        self.found: list[str] = []
        self.streams: Counter[str] = Counter()  # ops on each
        self.joined = {"main"}  # streams that a CUDA graph of the call has by now

    def clock(self, stream: str) -> Counter[str]:
        return self.clocks.setdefault(stream, Counter())

    def wait(self, who: str, clock: Counter[str]) -> None:
        self.clocks[who] = self.clock(who) | clock

    def _after(self, stream: str, uses: list[_Use], what: str, of: range | None = None) -> None:
        for other, time, used in uses:
            apart = of is not None and (used.stop <= of.start or of.stop <= used.start)
            if other != stream and self.clock(stream)[other] < time and not apart:
                self.found.append(f"{stream} did not wait for {other}: {what}")

    def look_for_freed(self, stream: str) -> None:
        """Checks freed memory of this stream, because its next op may get it."""
        for key, memory in list(self.memory.items()):
            if memory.alive.expired():
                self.freed.append(self.memory.pop(key))
        for memory in [memory for memory in self.freed if memory.home == stream]:
            self.freed.remove(memory)
            what = f"memory of {memory.made_by} is used again"
            self._after(stream, memory.reads, what)
            self._after(stream, memory.writes, what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look_for_freed(self.current)
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        result = func(*args, **(kwargs or {}))
        stream, name = self.current, str(func)
        if func.namespace == COLLECTIVES:
            stream = COLLECTIVES
            self.wait(stream, self.clock(self.current))
        self.clock(stream)[stream] += 1
        self.streams[stream] += 1
        time = self.clock(stream)[stream]
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write]
        if func.namespace == COLLECTIVES and "send" not in name:
            written = given
        writes = {t.untyped_storage()._cdata for t in tree_leaves(written) if isinstance(t, Tensor)}
        for t in given:
            self._used(t, stream, time, name, t.untyped_storage()._cdata in writes, is_view=func.is_view)
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.memory:
                made = self.memory[t.untyped_storage()._cdata] = _Memory(t.untyped_storage(), stream, name)
                made.writes.append(_Use(stream, time, _bytes(t)))
        return result

    def _used(self, t: Tensor, stream: str, time: int, name: str, is_written: bool, *, is_view: bool) -> None:
        storage = t.untyped_storage()
        known = self.memory.get(storage._cdata)
        if known is None:  # from before, all of which was waited for; or a number that becomes a tensor
            home = self.current if name.startswith("aten.lift_fresh") else "main"
            known = self.memory[storage._cdata] = _Memory(storage, home, f"what {name} was given")
        if is_view:
            return
        where = _bytes(t)
        self._after(stream, known.writes, f"{name} uses memory of {known.made_by}", where)
        if is_written:
            self._after(stream, known.reads, f"{name} overwrites memory of {known.made_by}", where)
        (known.writes if is_written else known.reads).append(_Use(stream, time, where))


class _Stream:
    def __init__(self, races: Races, name: str) -> None:
        self.races, self.name, self.cuda_stream = races, name, hash(name)

    def wait_stream(self, other: _Stream) -> None:
        if other.name not in self.races.joined:
            self.races.found.append(f"{self.name} waits for {other.name}, which a graph of the call does not have")
        self.races.joined.add(self.name)
        self.races.wait(self.name, self.races.clock(other.name))

    def record_event(self) -> Counter[str]:
        return Counter(self.races.clock(self.name))

    def wait_event(self, event: Counter[str]) -> None:
        self.races.wait(self.name, event)


@contextlib.contextmanager
def watched() -> Iterator[Races]:
    """Yields a detector of races for calls within this context. The lanes are streams that only keep clocks."""
    races = Races()
    names = iter(("side", "early", "back"))

    @contextlib.contextmanager
    def stream(which: _Stream) -> Iterator[None]:
        before, races.current = races.current, which.name
        yield
        races.current = before

    def current_stream(device: Any) -> _Stream:
        races.joined = {races.current}  # the state when a graph begins with the call
        return _Stream(races, races.current)

    fake = SimpleNamespace(
        current_stream=current_stream, Stream=lambda device, priority=0: _Stream(races, next(names)), stream=stream
    )
    wait = exchange.PendingReceive.wait

    pull = peer_memory.Exchange.pull

    def pulling(self: peer_memory.Exchange, *pulls: peer_memory.Pull) -> None:
        pull(self, *pulls)
        for of in pulls:
            of.out.mul_(1)  # the kernel writes it, which no op of torch tells

    begin, ends = peer_memory.PeerMemory.begin, dict[int, Counter[str]]()

    def beginning(self: peer_memory.PeerMemory) -> peer_memory.Memory:
        races.wait(races.current, ends.get(id(self), Counter()))  # as on a GPU, of the exchange before
        return begin(self)

    def ending(self: peer_memory.PeerMemory) -> None:
        ends[id(self)] = Counter(races.clock(races.current))

    def waiting(pending: exchange.PendingReceive, group: Any) -> tuple[Tensor, ...]:
        races.wait(races.current, races.clock(COLLECTIVES))
        return wait(pending, group)

    with pytest.MonkeyPatch.context() as patch, races:
        patch.setattr(lanes, "torch", SimpleNamespace(cuda=fake))
        patch.setattr(lanes, "has_streams", lambda device: True)
        patch.setattr(exchange.PendingReceive, "wait", waiting)
        patch.setattr(peer_memory.Exchange, "pull", pulling)
        patch.setattr(peer_memory.PeerMemory, "begin", beginning)
        patch.setattr(peer_memory.PeerMemory, "end", ending)
        lanes._streams.cache_clear()
        yield races
        lanes._streams.cache_clear()
