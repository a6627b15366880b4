"""The kernel before a backward: it writes the zeros to which a fused backward adds dq, and the zeros of its counters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.statistics_tiles import place_of_program
from flexattn.testing import make_call, make_inputs
from tests.support.hopper_fp8_calls import E4M3, moved

UNEVEN = {"lengths_q": [100, 0, 300, 1], "lengths_kv": [30, 9, 70, 40], "num_heads": 2, "num_heads_kv": 1}
FORMATS: dict[str, dict[str, Any]] = {
    "bshd": {"lengths_q": [300] * 2, "lengths_kv": [70] * 2, "num_heads": 2, "num_heads_kv": 1},
    "bshd, padded": {"padding": True, **UNEVEN},
    "thd": {"gap": 3, **UNEVEN},
    "thd, in reverse": {"gap": 3, "in_reverse": True, **UNEVEN},
}


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("head_dim", [40, 96, 128])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sample("name", "head_dim", "size", "is_quantised", values=False)
def test_sums_of_dq_begin_at_zero(name: str, head_dim: int, size: int, is_quantised: bool, device: str) -> None:
    """Each tile with a query, and the counter in tile 0, are zeros; the kernel writes nothing else."""
    fmt = name.partition(",")[0]
    lengths = FORMATS[name]["lengths_q"]
    given = make_inputs(fmt, dtype=torch.bfloat16, head_dim_qk=head_dim, head_dim_v=head_dim, **FORMATS[name])
    mask = "padding" if fmt == "thd" or "padded" in name else "no_mask"
    problem = moved(triton_backend.to_problem(*make_call(given, attn_mask_type=mask, return_max_logit=False)), device)
    out, dout = (torch.randn_like(problem.q) for _ in range(2))
    batch, heads, num_tokens = problem.batch, problem.num_heads, problem.q.shape[-3]
    lse = torch.zeros((heads, num_tokens) if fmt == "thd" else (batch, heads, num_tokens), device=device)
    data = dout
    if is_quantised:
        descale, data = torch.ones(batch, heads, -(-problem.longest_q // 128), device=device), dout.to(E4M3)
        descales = (*(torch.ones(1, 1, 1, device=device),) * 3, descale)
        how: dict[str, Any] = {"descales": descales, "scale_rows": 128, "copies16": (dout,), "dout_is_to_come": True}
        problem = dataclasses.replace(problem, **how)
    tiled = tiled_statistics(Backward(problem, out, lse, data, None, dout, dout, dout), size, with_dq_sums=True)
    assert tiled.dq_sums is not None
    found = tiled.dq_sums.cpu().view(-1, size, head_dim)
    assert found.shape[0] * 2 * size == tiled.statistics.numel()
    wanted = torch.full_like(found, float("nan"))
    wanted[0].view(-1)[:size] = 0
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]  # packed, without the gaps
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        first = 1 + h * tiled.tiles + (starts[b] + b * size) // size if fmt == "thd" else 1 + (b * heads + h) * tiled.tiles
        wanted[first : first + -(-lengths[b] // size)] = 0
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    bare = tiled_statistics(Backward(problem, out, lse, data, None, dout, dout, dout), size)
    assert bare.dq_sums is bare.dq_arrivals is tiled.dq_arrivals is None


@pytest.mark.parametrize(("batch", "heads", "sq"), [(2, 3, 300), (1, 5, 1)])
def test_blocks_are_counted_from_zero(batch: int, heads: int, sq: int, device: str) -> None:
    """For each batch element and head, blocks of keys are counted after their dq has been added to the sums."""
    x = torch.randn(batch, sq, heads, 64, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(batch, heads, sq, device=device)
    backward = Backward(Problem(x, x, x, softmax_scale=0.1), x, lse, x, None, x, x, x)
    arrivals = tiled_statistics(backward, 64, with_dq_sums=True, with_dq_arrivals=True).dq_arrivals
    assert arrivals is not None
    assert arrivals.shape == (batch * heads,)
    assert not arrivals.any()


@triton.jit
def _places_kernel(out_ptr, blocks, num_heads):
    block, h, b = place_of_program(blocks, num_heads)
    row = out_ptr + 3 * tl.program_id(0)
    tl.store(row, b)
    tl.store(row + 1, h)
    tl.store(row + 2, block)


def test_the_last_place_comes_first(device: str) -> None:
    """Each place once, from the last to the first: the backward then begins at the end of the kernel before."""
    batch, heads, blocks = 2, 3, 5
    out = torch.empty(batch * heads * blocks, 3, dtype=torch.int32, device=device)
    _places_kernel[(out.shape[0],)](out, blocks, heads)
    assert out.tolist() == [[b, h, n] for b in range(batch) for h in range(heads) for n in range(blocks)][::-1]
