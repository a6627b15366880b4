"""Triton's interpreter with the programs of a launch in turns: another one goes on, drawn at random, whenever one is at an atomic.

Triton runs one program after the other, so that none ever waits for one that comes later, nor finds another's work half done.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

from triton.runtime import interpreter

_MOST_TURNS = 200_000  # of a launch, which then is taken for one that never ends
_SECONDS = 60.0  # that a program may take between two atomics


class NeverEnds(Exception):
    """Programs of a launch wait for what none of them does."""


class _Turns:
    """One launch: programs in threads of their own, of which one goes on at a time, `at_once` of them begun and not ended."""

    def __init__(self, programs: list[Callable[[], None]], rng: Random, at_once: int) -> None:
        self.rng, self.waiting, self.at_once = rng, list(programs), at_once
        self.turn: dict[int, threading.Semaphore] = {}
        self.number = threading.local()
        self.control = threading.Semaphore(0)
        self.ended: int | None = None
        self.errors: list[BaseException] = []
        self.is_over = False

    def _run(self, number: int, program: Callable[[], None]) -> None:
        self.number.own = number
        self.turn[number].acquire()
        try:
            if not self.is_over:
                program()
        except NeverEnds:
            pass
        except BaseException as e:
            self.errors.append(e)
        self.ended = number
        self.control.release()

    def give_way(self) -> None:
        """Called by a program: the others may go on."""
        number = self.number.own
        self.control.release()
        self.turn[number].acquire()
        if self.is_over:
            raise NeverEnds

    def run(self) -> None:
        threads: dict[int, threading.Thread] = {}
        begun = turns = 0
        while True:
            while self.waiting and len(threads) < self.at_once:
                self.turn[begun] = threading.Semaphore(0)
                threads[begun] = threading.Thread(target=self._run, args=(begun, self.waiting.pop(0)), daemon=True)
                threads[begun].start()
                begun += 1
            if not threads:
                break
            turns += 1
            self.is_over = self.is_over or turns > _MOST_TURNS or bool(self.errors)
            number = self.rng.choice(sorted(threads))
            self.turn[number].release()
            assert self.control.acquire(timeout=_SECONDS), "a program goes on without an atomic"
            if self.ended is not None:
                del threads[self.ended]
                self.ended = None
            if self.is_over:
                self.waiting.clear()
        if self.errors:
            raise self.errors[0]
        if self.is_over:
            raise NeverEnds(f"{begun} programs have had {turns} turns")


@contextmanager
def interleaved(seed: int, at_once: int) -> Iterator[None]:
    """Inside, the programs of each launch go on in turns, `at_once` of them at a time.

    Raises NeverEnds in the launch whose programs wait for ever.
    """
    builder = interpreter.interpreter_builder
    rng, own_rmw, whole = Random(seed), type(builder).create_atomic_rmw, interpreter.GridExecutor
    current: list[_Turns] = []

    def create_atomic_rmw(self: Any, *args: Any) -> Any:
        if current:
            place = self.grid_idx
            current[0].give_way()
            self.grid_idx = place
        return own_rmw(self, *args)

    class Collected:
        """In a kernel's place: runs its programs once the last one is called."""

        def __init__(self, fn: Any) -> None:
            self.fn, self.programs = fn, []
            self.__signature__, self.__name__, self.__globals__ = inspect.signature(fn), fn.__name__, fn.__globals__

        def __call__(self, **given: Any) -> None:
            self.programs.append(functools.partial(self.run, builder.grid_idx, given))
            if len(self.programs) == builder.grid_dim[0]:
                current.append(_Turns(self.programs, rng, at_once))
                try:
                    current[0].run()
                finally:
                    current.clear()

        def run(self, place: Any, given: dict[str, Any]) -> None:
            builder.grid_idx = place
            self.fn(**given)

    class Executor(whole):  # type: ignore[misc, valid-type]
        def __init__(self, fn: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(fn, *args, **kwargs)
            self.fn = Collected(fn)

    with (
        mock.patch.object(type(builder), "create_atomic_rmw", create_atomic_rmw),
        mock.patch.object(interpreter, "GridExecutor", Executor),
    ):
        yield
