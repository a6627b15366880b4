"""torchtitan's debug model with context parallelism over gloo, compared with one process."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed.context_parallel import apply_cp_to_forward, prepare_context_parallel_input

from flexattn.integrations.torchtitan import FlexAttention, ScaledDotProductAttention, VarlenAttention
from tests.support.torchtitan_models import batch_of, build, config_of, create_masks_without_compiling, gradients, loss_of

LENGTHS = (100, 28, 200, 184)  # 512 tokens: a block of torch's mask for each of two ranks, twice


def compare(inner: Any, mesh: DeviceMesh, balancer: str | None) -> None:
    """Compares the loss and the gradients of all ranks with one process over all tokens."""
    lengths = LENGTHS if isinstance(inner, FlexAttention.Config) else (sum(LENGTHS),)
    batch = batch_of(lengths, batch=1)
    results = []
    for is_cut in (False, True):
        model = build(config_of(inner, layers=1))
        masks = model.get_attention_masks(batch[2]) if isinstance(inner, FlexAttention.Config) else None  # type: ignore[operator]
        tokens, labels, positions = batch
        if is_cut:
            apply_cp_to_forward([block.attention.inner_attention for block in model.layers.values()], mesh)  # type: ignore[operator, union-attr]
            extra = {"positions": positions, "attention_masks": masks}
            tokens, labels, extra = prepare_context_parallel_input(tokens, labels, extra, mesh, torch.device("cpu"), balancer)
            positions, masks = extra["positions"], extra["attention_masks"]
            assert tokens.shape[1] == batch[0].shape[1] // mesh.size()
        loss = loss_of(model, (tokens, labels, positions), masks)
        result = [loss.detach(), *gradients(model, loss)]
        if is_cut:
            for x in result:
                dist.all_reduce(x)
        results.append(result)
    for whole, found in zip(*results, strict=True):
        torch.testing.assert_close(found, whole, atol=2e-5 * float(whole.abs().max()), rtol=0)


def main(rank: int, ranks: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    create_masks_without_compiling()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    for balancer in ("headtail", "ptrr", None):
        compare(FlexAttention.Config(), mesh, balancer)
    for balancer in ("headtail", None):
        compare(ScaledDotProductAttention.Config(), mesh, balancer)
    with pytest.raises(NotImplementedError, match="Variable-length attention CP"):
        apply_cp_to_forward([VarlenAttention.Config().build()], mesh)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
