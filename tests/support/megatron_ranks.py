"""Megatron-Core's GPT with context parallelism over gloo, compared with its own attention in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from flexattn.integrations.megatron import with_flexattn
from tests.support.megatron_models import (
    batch_of,
    build,
    causal_mask,
    config_of,
    gradients,
    loss_of,
    packed_of,
    positions_of,
    run_on_a_cpu,
    start,
)

LENGTHS = (8, 20, 12)


def own_part(x: Tensor, lengths: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Returns chunks rank and 2 * ranks - 1 - rank of each document's 2 * ranks chunks, as Megatron deals tokens."""
    parts = [document.chunk(2 * ranks, 1) for document in x.split(list(lengths), 1)]
    return torch.cat([part[chunk] for part in parts for chunk in (rank, 2 * ranks - 1 - rank)], 1)


def whole(lengths: Sequence[int], batch: int) -> list[Tensor]:
    """Returns the loss and the gradients of Megatron's own attention, each document by itself."""
    model = build(config_of())
    parts = zip(*(x.split(list(lengths), 1) for x in batch_of(sum(lengths), batch)), strict=True)
    loss = torch.stack([loss_of(model, *part, causal_mask(part[0].shape[1])) for part in parts]).sum()
    return [loss.detach(), *gradients(model, loss)]


def parts(lengths: Sequence[int], batch: int, rank: int, ranks: int, **options: Any) -> list[Tensor]:
    """Returns the same as `whole`, of all ranks together, each with its own tokens."""
    model = build(config_of(context_parallel_size=ranks, **options), with_flexattn(get_gpt_layer_local_spec()))
    tokens, labels = (own_part(x, lengths, rank, ranks) for x in batch_of(sum(lengths), batch))
    packed: dict[str, Any] = {}
    if len(lengths) > 1:
        packed = {"packed_seq_params": packed_of(lengths), "positions": own_part(positions_of(lengths), lengths, rank, ranks)}
    loss = loss_of(model, tokens, labels, **packed)
    result = [loss.detach(), *gradients(model, loss)]
    for x in result:
        dist.all_reduce(x)
    return result


def main(rank: int, ranks: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    run_on_a_cpu(pytest.MonkeyPatch())
    start(ranks)
    expected = {lengths: whole(lengths, batch) for lengths, batch in (((24,), 2), (LENGTHS, 1))}
    parallel_state.destroy_model_parallel()
    start(ranks, cp=ranks)
    for exchange in ("p2p", "all_gather", "a2a"):
        for lengths, results in expected.items():
            found = parts(lengths, 2 if lengths == (24,) else 1, rank, ranks, cp_comm_type=exchange)
            for x, y in zip(found, results, strict=True):
                torch.testing.assert_close(x, y, atol=2e-5 * float(y.abs().max()) + 1e-9, rtol=0)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
