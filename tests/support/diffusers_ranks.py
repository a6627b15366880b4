"""Calls of diffusers' attention over the ranks of a mesh, compared with one process in float64."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flexattn.integrations.diffusers import register

B, S, H, D = 2, 12, 4, 8


def _tensors() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(B, S, H, D, generator=generator, dtype=torch.float64) for _ in range(4))
    return [q, k, v], dout


def _run(qkv: list[Tensor], dout: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = dispatch_attention_fn(*leaves, backend="flexattn", **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def compare(degrees: dict[str, int], mask: Tensor | None) -> None:
    """Compares out and the gradients of this rank's tokens with a call over all tokens. mask: [b, keys]."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (degrees.get("ring_degree", 1), degrees.get("ulysses_degree", 1))
    config = ContextParallelConfig(**degrees, convert_to_fp32=False)
    config.setup(rank, ranks, torch.device("cpu"), init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")))
    qkv, dout = _tensors()
    part = slice(rank * S // ranks, (rank + 1) * S // ranks)
    found = _run(
        [x[:, part] for x in qkv], dout[:, part], attn_mask=mask, parallel_config=ParallelConfig(context_parallel_config=config)
    )
    for one, whole in zip(found, _run(qkv, dout, attn_mask=mask), strict=True):
        torch.testing.assert_close(one, whole[:, part], atol=1e-6, rtol=0)


def main(rank: int, ranks: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    register()
    keys = torch.arange(S) < torch.tensor([[9], [S]])
    compare({"ring_degree": ranks}, None)
    compare({"ulysses_degree": ranks}, None)
    compare({"ulysses_degree": ranks}, keys)
    for mask, options, text in (
        (keys, {}, "ring_degree 2"),
        (None, {"dropout_p": 0.5}, "dropout_p is 0.5 with context parallelism"),
    ):
        config = ContextParallelConfig(ring_degree=ranks)
        config.setup(rank, ranks, torch.device("cpu"), init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ring", "ulysses")))
        with pytest.raises(ValueError, match=text):
            _run(*_tensors(), attn_mask=mask, parallel_config=ParallelConfig(context_parallel_config=config), **options)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
