"""Comparison of ranks before a call: under FLEXATTN_CHECK=1, ranks compare their calls before the first collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.dispatch.options import check_values, peer_memory
from flexattn.distributed.capture import Group
from flexattn.distributed.exchange import waiting
from flexattn.mods.captures import find_captures


def agree(group: Group, what: str, facts: Mapping[str, object], error: Exception | None) -> None:
    """Raises this rank's own `error`. Under FLEXATTN_CHECK=1, raises on every rank if one has an error or if the calls differ.

    facts: properties of this rank's call that must be equal on all ranks. They are pickled. what: the name of the call.
    """
    if not check_values():
        if error is not None:
            raise error
        return
    facts = {**facts, "FLEXATTN_PEER_MEMORY": peer_memory()}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with waiting(f"the comparison of the ranks' calls of {what}", group):
        dist.all_gather_object(gathered, (facts, None if error is None else f"{type(error).__name__}: {error}"), group=group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text is not None]
    if failed:
        raise ValueError(f"{what} raised an error on another rank: {'; '.join(failed)}")
    for name in facts:
        values = [others.get(name) for others, _ in gathered]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"{what} differs among ranks in {name}: {by_rank}; accepted: the same on all ranks of the group")


def digest_of(t: Tensor | None) -> str | None:
    """Returns a text that is equal for tensors of equal numbers, in any process. Copies the tensor to the host."""
    if t is None:
        return None
    flat = t.detach().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def numbers_of(mod: object) -> tuple[object, ...]:
    """Returns digests of the values that a mod reads, the same in any process. A mod without a key gives none."""
    captures = find_captures(mod)
    whole = hashlib.sha256(repr(_plain(captures.key)).encode()).hexdigest()[:16]
    return (whole, *captures.floats, *((name, digest_of(t)) for name, t in captures.tensors))


def _plain(key: object) -> Any:
    """Returns a key with everything but numbers and texts replaced by type names, so that it prints the same in every process."""
    if isinstance(key, (tuple, list)):
        return [_plain(part) for part in key]
    return key if key is None or isinstance(key, (bool, int, float, str, bytes)) else type(key).__name__
