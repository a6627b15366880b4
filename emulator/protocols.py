"""Protocols for classes of the emulator whose files cannot import each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from flexattn.emulator.ordering import Actor, Knowledge
from flexattn.emulator.report import Site

Layout = Any  # a Gluon layout object.


class AnyPartition(Protocol):
    """A partition (`scheduler.Partition`), for barriers and asynchronous operations."""

    name: str
    number: int
    actor: Actor
    knowledge: Knowledge
    site: Site

    @property
    def awaits(self) -> tuple[Any, int] | None: ...

    @property
    def threads(self) -> int: ...

    @property
    def warps(self) -> int: ...

    @property
    def time(self) -> int: ...

    @property
    def line(self) -> int: ...

    def release_to(self, other: Knowledge) -> None: ...


class AnyArrival(Protocol):
    """An arrival at an mbarrier: by a partition, or by a commit (`asynchronous.Commit`)."""

    @property
    def name(self) -> str: ...

    @property
    def line(self) -> int: ...

    def release_to(self, other: Knowledge) -> None: ...


class AnyLoad(Protocol):
    """A TMA load (`asynchronous.TmaLoad`), for its mbarrier."""

    @property
    def partition(self) -> AnyPartition: ...

    @property
    def site(self) -> Site: ...

    @property
    def phase(self) -> int: ...


class Program(Protocol):
    """The running program (`cta.Cta`), for memory, values and barriers."""

    @property
    def partitions(self) -> Sequence[AnyPartition]: ...

    @property
    def current(self) -> AnyPartition: ...

    def find(self, kind: str, message: str, site: Site | None = None) -> None: ...

    def fatal(self, kind: str, message: str) -> NoReturn: ...

    def shared_load(self, view: Any, layout: Layout) -> Any: ...

    def shared_store(self, view: Any, value: Any) -> None: ...

    def tensor_load(self, view: Any, layout: Layout) -> Any: ...

    def tensor_store(self, view: Any, value: Any, predicate: Any) -> None: ...
