"""A kernel that is played with: its launchers, tile and shape, and its check against the reference."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import flexattn
from flexattn.bench.check import Checker, Error
from flexattn.bench.implementations import KERNELS, Implementation, Launchers, one_kernel, with_launchers
from flexattn.bench.inputs import make_tensors
from flexattn.bench.shapes import Workload
from flexattn.bench.tiles import tile_name

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.device import Tile


PASSED, WRONG, REFUSED = 0, 1, 2  # exit statuses of the playground


class Subject(NamedTuple):
    """One kernel on one workload in the playground."""

    kernel: str
    workload: Workload
    launchers: Launchers  # the candidate
    tile: Tile
    committed: Tile
    arch: int

    @property
    def label(self) -> str:
        return f"{self.kernel} {tile_name(self.tile)}"

    def with_tile(self, tile: Tile) -> Subject:
        return self._replace(tile=tile, launchers=self.launchers._replace(tiles={self.kernel: tile}))


def small_enough(workload: Workload, tile: Tile) -> Workload:
    """Returns the workload with few heads and sequences, long enough for three blocks each way, the last of them partial."""
    return workload.shortened(2 * max(tile.block_m, tile.block_n) + 3)


def check(subject: Subject, workload: Workload, device: str) -> tuple[list[Error], str | None]:
    """Returns (errors of each result, the failure if there is one)."""
    direction, _ = KERNELS[subject.kernel]
    tensors = make_tensors(workload, device)
    checker = Checker(workload, tensors)
    results = with_launchers(subject.launchers, workload, tensors, direction).results()
    errors = checker.errors(direction, results)
    try:
        checker.check(direction, results)
    except AssertionError as e:
        return errors, str(e)
    return errors, None


def alone(subject: Subject, name: str) -> Implementation:
    """Returns the kernel as an implementation, with the subject's launchers and tile."""
    prepare = functools.partial(one_kernel, subject.kernel, subject.launchers)
    return Implementation(name, flexattn.__version__, prepare)
