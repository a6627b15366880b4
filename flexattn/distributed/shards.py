"""Conversion between full tensors and a rank's tokens: shard, unshard, positions."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.distributed.exchange import all_gather, waiting
from flexattn.distributed.layout import Runs, rows_of, size_of
from flexattn.distributed.plans import Plan


def shard(plan: Plan, *tensors: Tensor, dim: int | None = None, keys: bool = False) -> Tensor | tuple[Tensor, ...]:
    """Returns this rank's tokens of each full tensor, contiguous and in the plan's order. Nothing is sent.

    Use it for inputs, labels, masks and positions.

    Args:
        tensors: any dtype and device, equal on all ranks.
        dim: dim of the tokens. None: 0 for packed documents, else 1, after the batch.
        keys: whether the tokens are keys, if these differ from the queries.

    Returns:
        One tensor, or a tuple if you passed several.

    Raises:
        ValueError: the dim of a tensor does not have the number of tokens of the full sequence.
    """
    dim = _dim(plan, dim)
    runs, length = (plan.kv_runs[plan.rank], plan.length_kv) if keys else (plan.q_runs[plan.rank], plan.length)
    for t in tensors:
        _check("tensors", t, dim, length)
    parts = tuple(_cut(t, dim, runs) for t in tensors)
    return parts[0] if len(parts) == 1 else parts


def unshard(plan: Plan, tensor: Tensor, *, dim: int | None = None, keys: bool = False) -> Tensor:
    """Returns the full tensor on each rank, from what `shard` returned. Uses one all-gather. The result has no gradient.

    To compute a loss, sum it over ranks instead. tensor, dim, keys: as in `shard`.

    Raises:
        ValueError: the dim of the tensor does not have this rank's number of tokens.
    """
    dim = _dim(plan, dim)
    all_runs, length = (plan.kv_runs, plan.length_kv) if keys else (plan.q_runs, plan.length)
    _check("tensor", tensor, dim, size_of(all_runs[plan.rank]))
    most = max(size_of(runs) for runs in all_runs)
    own = tensor.detach().movedim(dim, 0)
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: own.shape[0]] = own
    received = padded.new_empty((plan.ranks * most, *own.shape[1:]))
    with waiting("unshard", plan.group):
        all_gather(received, padded, plan.group).wait()
    whole = own.new_empty((length, *own.shape[1:]))
    for rank, runs in enumerate(all_runs):
        for run, rows in zip(runs, rows_of(runs), strict=True):
            whole[run.start : run.stop] = received[rank * most + rows.start : rank * most + rows.stop]
    return whole.movedim(0, dim).contiguous()


def positions(plan: Plan, *, keys: bool = False, device: torch.device | str | None = None) -> Tensor:
    """Returns the position in its document of each of this rank's tokens, for rotary embeddings: int64 [tokens].

    keys: whether the tokens are keys. device: None for the default device.
    """
    runs, side = (plan.kv_runs, plan.mask.kv) if keys else (plan.q_runs, plan.mask.q)
    parts = [torch.arange(part.start, part.stop, device="cpu") for run in runs[plan.rank] for _, part in side.within(run)]
    whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")
    return whole.to(torch.get_default_device() if device is None else device)


def _dim(plan: Plan, dim: int | None) -> int:
    if dim is None:
        return 0 if plan.is_packed else 1
    return dim


def _check(name: str, t: Tensor, dim: int, length: int) -> None:
    if not -t.dim() <= dim < t.dim() or t.shape[dim] != length:
        raise ValueError(
            f"{name}: shape {tuple(t.shape)} does not have {length} tokens in dim {dim}. Pass the dim of the tokens as dim"
        )


def _cut(t: Tensor, dim: int, runs: Runs) -> Tensor:
    parts = [t.narrow(dim, run.start, run.size) for run in runs]
    return torch.cat(parts, dim) if parts else t.narrow(dim, 0, 0).contiguous()
