"""CUDA graphs of calls over ranks. Tables that a graph reads are made before the capture and kept as long as it may replay.

A table holds tensors made from host data, such as document starts, the rows of a call or block masks. It is made once for each
plan. Making one during a capture raises an error, because the graph's memory pool would give its memory to later calls. A table
that a capture has read is kept forever, because nothing tells when the graph is deleted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from flexattn.dispatch.neutral import is_capturing as is_capturing
from flexattn.dispatch.neutral import is_fake, neutral_state
from flexattn.dispatch.options import check_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group: TypeAlias = "ProcessGroup | None"  # None: the default group, as torch.distributed takes it
_Table = TypeVar("_Table")
_read: dict[int, object] = {}  # tables that a captured graph may read, by id


def is_over_nccl(group: Group) -> bool:
    """Returns whether the group sends CUDA tensors over NCCL."""
    return "cuda:nccl" in dist.get_backend_config(group)


def refuse_making(device: torch.device) -> None:
    """Raises RuntimeError if a table would be made while a CUDA graph is captured."""
    if is_capturing(device):
        raise RuntimeError(
            "flexattn.distributed cannot make the tables of a call while a CUDA graph is captured. Make one call before the "
            "capture, forward and backward, with the same plan, strategy and options, on all ranks"
        )


def tables(maxsize: int | None) -> Callable[[Callable[..., _Table]], Callable[..., _Table]]:
    """Returns a decorator like functools.lru_cache, for functions that make tensors on their last argument, a device.

    Tensors are made in `neutral_state`. If a FakeTensorMode is active, they are fake and not cached.
    """

    def decorate(make: Callable[..., _Table]) -> Callable[..., _Table]:
        def checked(*arguments: Any) -> _Table:
            refuse_making(arguments[-1])
            with neutral_state():
                return make(*arguments)

        cached = functools.lru_cache(maxsize)(checked)

        @functools.wraps(make)
        def get(*arguments: Any) -> _Table:
            if is_fake():
                return make(*arguments)
            table = cached(*arguments)
            if is_capturing(arguments[-1]):
                _read[id(table)] = table
            return table

        get.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return get

    return decorate


def check(group: Group, device: torch.device) -> None:
    """Raises ValueError if a CUDA graph is being captured that cannot hold a call over this group."""
    if not is_capturing(device):
        return
    if not is_over_nccl(group):
        raise ValueError(
            f"the process group uses {dist.get_backend_config(group)} while a CUDA graph is captured. Use an NCCL group, whose "
            "collectives a graph can contain"
        )
    if check_values():
        raise ValueError(
            "FLEXATTN_CHECK is 1, which compares calls on the host, while a CUDA graph is captured. Set it to 0 for the capture, "
            "and to 1 only for calls before it"
        )
