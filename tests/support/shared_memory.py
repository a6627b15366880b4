"""Memory that the ranks of a group share on a CPU: a file of each, which all of them map."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from flexattn.distributed import peer_memory

BARRIERS: Counter[str] = Counter()


class Files:
    """As `peer_memory.Memory`: a rank's bytes are a file in a folder, and its barrier is the group's."""

    numbers = itertools.count()

    def __init__(self, folder: Path, group: Any, size: int) -> None:
        self._group, number = group, next(self.numbers)
        files = [str(folder / f"{number}_{rank}") for rank in range(group.size())]
        self._all = [torch.from_file(file, shared=True, size=size, dtype=torch.uint8) for file in files]
        self.own = self._all[group.rank()]
        self.own.fill_(0xFF)  # NaN in every dtype
        self.addresses = torch.tensor([t.data_ptr() for t in self._all])
        self._meet()

    def barrier(self) -> None:
        BARRIERS["all"] += 1
        self._meet()

    def _meet(self) -> None:
        with _disable_current_modes():  # on a GPU it is a kernel on the current stream, not a collective on one of its own
            dist.barrier(self._group)


def share(group: Any, device: torch.device) -> None:
    """Makes a group's ranks exchange by files."""
    folder = [tempfile.mkdtemp() if group.rank() == 0 else ""]
    dist.broadcast_object_list(folder, dist.get_global_rank(group, 0), group=group)
    peer_memory._MEMORIES[group, device] = peer_memory.PeerMemory(
        group.rank(), device, functools.partial(Files, Path(folder[0]), group)
    )
