"""Entry of calls that all ranks make: under FLEXATTN_CHECK=1 they say, before the first collective, what they are about to do."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.dispatch.options import check_values, peer_memory
from flexattn.distributed.exchange import waiting
from flexattn.mods.captures import find_captures
from flexattn.mods.eager import runs_as_it_is


def breaks_graphs(function: Any) -> None:
    """Keeps torch.compile out of a function, and of all that it calls: it breaks its graph before the call.

    The name is that by which torch.compiler.disable marks functions, whose import alone takes a second.
    """
    function._torchdynamo_disable = True
    runs_as_it_is(function)


def agree(group: Any, what: str, own: dict[str, Any], error: Exception | None) -> None:
    """Raises `error`, this rank's own; and under FLEXATTN_CHECK=1, on every rank, where one has an error or says something else.

    own: what this rank is about to do, which must be equal on all; it is pickled. `what` names the call in the text.
    """
    if not check_values():
        if error is not None:
            raise error
        return
    own = own | {"FLEXATTN_PEER_MEMORY": peer_memory()}
    said: list[Any] = [None] * dist.get_world_size(group)
    with waiting(f"the comparison of the ranks' calls of {what}", group):
        dist.all_gather_object(said, (own, None if error is None else f"{type(error).__name__}: {error}"), group=group)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(said) if text is not None]
    if failed:
        raise ValueError(f"{what} is refused on another rank, so on all: {'; '.join(failed)}")
    for name in own:
        values = [others.get(name) for others, _ in said]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))
            raise ValueError(f"{what} differs among ranks in {name}: {by_rank}; accepted: the same on all ranks of the group")


def digest_of(t: Tensor | None) -> str | None:
    """Returns a text that is equal for tensors of equal numbers, in any process; reads the tensor on the host."""
    if t is None:
        return None
    flat = t.detach().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def numbers_of(mod: Any) -> tuple[Any, ...]:
    """Returns what a mod reads, as texts that are equal where the numbers are, in any process; nothing of one that has no key."""
    found = find_captures(mod)
    whole = hashlib.sha256(repr(_plain(found.key)).encode()).hexdigest()[:16]
    return (whole, *found.floats, *((name, digest_of(t)) for name, t in found.tensors))


def _plain(key: Any) -> Any:
    """Returns the numbers and texts in a key, and of all else the kind: what prints alike in every process."""
    if isinstance(key, (tuple, list)):
        return [_plain(part) for part in key]
    return key if key is None or isinstance(key, (bool, int, float, str, bytes)) else type(key).__name__
