"""One process of random calls: configurations in turn, many calls of each, a line of JSON before and after each call."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.fuzz.check import check_by_name, config_of
from tests.fuzz.config import Where, draw_config, features
from tests.support import guarded_memory
from tests.support.guarded_memory import Allocations, guarded_allocations

ROOT = Path(__file__).parents[2]
CANDIDATES = 4  # each configuration is the one of so many with the most new pairs of features
ENOUGH_FAILURES = 3  # after so many failures of a configuration the next one begins


class Plan(NamedTuple):
    """The calls of one process."""

    where: Where
    first: int  # the seed of its first configuration
    seconds: float
    values: int  # calls of each configuration
    has_guards: bool = True  # whether tensors lie between guard bytes: without them a memory checker sees each tensor's end


def names(plan: Plan, until: float) -> Iterator[str]:
    """Yields names of calls; `send(True)` goes on with the next configuration."""
    seen: set[tuple[Any, Any]] = set()
    first = plan.first
    while time.monotonic() < until:
        pairs = {}
        for seed in range(first, first + CANDIDATES):
            pairs[seed] = set(combinations(features(draw_config(seed, plan.where)).items(), 2))
        seed = max(pairs, key=lambda seed: len(pairs[seed] - seen))
        seen |= pairs[seed]
        first += CANDIDATES
        for n in range(plan.values):
            if time.monotonic() >= until or (yield f"{seed}.{n}"):
                break


def run(plan: Plan, note: Callable[[dict[str, Any]], None]) -> None:
    """Makes calls until the time is up or a CUDA error ends all.

    note: receives the name of each call before it, and its features, kernel families and defects after it.
    """
    from flexattn import call_cache

    until = time.monotonic() + plan.seconds
    in_turn, name, failures = names(plan, until), None, 0
    known: dict[str, int] = {}
    families: set[str] = set()
    collecting = collected_families(families) if plan.where.backend == "triton" else contextlib.nullcontext()
    with memory(plan.has_guards) as allocations, collecting, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                name = next(in_turn) if name is None else in_turn.send(failures >= ENOUGH_FAILURES)
            except StopIteration:
                break
            if name.endswith(".0"):
                failures = 0
            is_over, kept, began = False, call_cache.cache_info()["hits"], time.monotonic()
            note({"begins": name})
            try:
                wrong = check_by_name(plan.where, name, allocations)
            except Exception as e:
                wrong, is_over = told(e), "CUDA error" in str(e)
            failures += bool(wrong)
            note(
                {
                    "name": name,
                    "has": [f"{group}: {feature}" for group, feature in features(config_of(plan.where, name)).items()],
                    "dims": dims(plan.where, name),
                    "kept": call_cache.cache_info()["hits"] - kept,
                    "seconds": round(time.monotonic() - began, 3),
                    "families": sorted(families),
                    **({"kernels": now} if (now := kernels(plan.where)) != known else {}),
                    "wrong": wrong,
                }
            )
            families.clear()
            known = now
            if is_over:
                break


def told(error: BaseException) -> list[str]:
    """Returns the message of the error that led to this one, in its first and last lines, and then the traceback's last lines."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    message = [line for line in "".join(traceback.format_exception_only(root)).splitlines() if line.strip()]
    lines = [*message[:1], *message[1:][-1:], *"".join(traceback.format_exception(error)).splitlines()[-12:]]
    return [line.replace(f"{ROOT}{os.sep}", "").replace(f"{sys.prefix}{os.sep}", "") for line in lines]  # no path of a machine


def dims(where: Where, name: str) -> list[int]:
    config = config_of(where, name)
    return [config.head_dim_qk, config.head_dim_v]


def kernels(where: Where) -> dict[str, int]:
    """Returns how many kernels of each name were compiled, or loaded from disk, so far."""
    if where.backend != "triton" or where.device != "cuda":
        return {}
    from flexattn.kernels_triton.runtime import launch

    return Counter(key[0].__name__ for key in list(launch._kernels))


@contextlib.contextmanager
def memory(has_guards: bool) -> Iterator[Allocations]:
    if has_guards:
        with guarded_allocations() as allocations:
            yield allocations
        return
    with mock.patch.object(guarded_memory, "GUARD", 0):
        yield Allocations()


@contextlib.contextmanager
def collected_families(found: set[str]) -> Iterator[None]:
    """Collects the names of the kernel families that are chosen inside, with their directions."""
    from flexattn.kernels_triton import families

    right = families.choose

    def choose(call: Any, policy: Any) -> Any:
        choice = right(call, policy)
        found.add(f"{choice.family.name} {choice.family.direction}")
        return choice

    with mock.patch.object(families, "choose", choose):
        yield


def main(plan: Plan, log: str) -> None:
    with open(log, "w") as file:

        def write_line(what: dict[str, Any]) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        run(plan, write_line)
    sys.stdout.flush()
