"""No length, batch size, stride, window, scale or address makes Triton compile a kernel again.

A kernel with a bias has a form for each of the divisors 8, 4, 2 and 1 of its strides and keys. Each compiles once."""

from __future__ import annotations

import pytest

# Runs without the interpreter, with a driver that names a GPU and launches nothing. `warmup` makes all decisions on whether a
# kernel is compiled, with the arguments that a launch would have. Compilations are counted, and make no code.
COUNT_COMPILATIONS = """
import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class NoGpu:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(NoGpu())
triton.compiler.compile = lambda *_, **__: "no code"  # before a kernel is called, which keeps the function

from flexattn.kernels_triton.portable.backward import attention_backward
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.portable.forward import attention_forward
from flexattn.kernels_triton.runtime.compiler import options_of
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.common.problem import Backward, Problem

HEADS, D = 6, 72  # a head dim of which 16 is no divisor: strides are then not always multiples of 16
TILE = Tile(64, 64, 4, 1)

def run(batch, sq, skv, fmt, window, scale, offset):
    def tensor(heads, length, d=D):
        if fmt == "thd":
            return torch.zeros(batch * length, heads, d, dtype=torch.bfloat16)
        dense = torch.zeros(batch, heads, length, d, dtype=torch.bfloat16)
        return dense.transpose(1, 2)
    def small(*values):  # at any address
        return torch.tensor([0] * offset + list(values), dtype=torch.int32)[offset:]
    q, k, v, out = tensor(HEADS, sq), tensor(2, skv), tensor(2, skv), tensor(HEADS, sq)
    cu = {}
    if fmt == "thd":
        cu = dict(cu_seqlens_q=small(*range(0, batch * sq + 1, sq)), cu_seqlens_kv=small(*range(0, batch * skv + 1, skv)))
    bias = torch.zeros(1, HEADS, sq, skv + offset)[..., offset:]
    problem = Problem(
        q, k, v, scale, window_left=window, window_right=window, bias=bias, max_seqlen_q=sq, max_seqlen_kv=skv, **cu
    )
    lse = torch.zeros(HEADS, batch * sq) if fmt == "thd" else torch.zeros(batch, HEADS, sq)
    with recorded_launches() as launches:
        attention_forward(problem, out, lse, torch.zeros(HEADS), tile=TILE)
        attention_forward(problem, out, lse, None, tile=TILE, splits=1 + batch)
        gradients = [torch.zeros_like(t) for t in (q, k, v)]
        attention_backward(Backward(problem, out, lse, out, lse, *gradients, dbias=bias.clone()), TILE, TILE)
    for launch in launches:
        options = options_of(launch.tile.num_warps, launch.tile.num_stages)
        launch.kernel.warmup(*launch.arguments, grid=(1,), **options)
    return [launch.kernel for launch in launches]

# The heads of few queries share tiles, by another kernel.
MANY = [(2, 64, 64, 16, 1.0, 0), (1, 17, 2, 1, 0.3, 1), (16, 33, 1000, 2**20, 1.0, 3), (1, 64, 16, 0, 2.5, 0)]
MANY += [(31, 255, 129, 7, 0.0, 2), (1, 200, 70, 3, 0.7, 5)]
FEW = [(2, 2, 64, 16, 1.0, 0), (1, 3, 2, 1, 0.3, 1), (16, 5, 1000, 2**20, 1.0, 3), (1, 2, 16, 0, 2.5, 0), (31, 16, 129, 7, 0.0, 2)]
FEW += [(1, 4, 70, 3, 0.7, 5)]
# The first calls have all forms of a bias: at two alignments, and shared by batch entries or, with one entry, not.
FORMS = 4
for fmt in ("bhsd", "thd"):
    for calls in (MANY, FEW):
        kernels, counted = {}, []
        for batch, sq, skv, window, scale, offset in calls:
            kernels |= {kernel.__name__: kernel for kernel in run(batch, sq, skv, fmt, window, scale, offset)}
            counted.append({name: len(kernel.device_caches[0][0]) for name, kernel in kernels.items()})
        before, after = counted[FORMS - 1], counted[-1]
        print(fmt, before, after)
        assert len(kernels) == 6 and all(before.values())
        assert all(before[name] <= FORMS * one for name, one in counted[0].items()), f"{fmt}: {counted[0]}, {before}"
        assert before == after, f"{fmt}: {after} compilations after new lengths, {before} before"
"""


@pytest.mark.slow
def test_nothing_that_varies_compiles_again(forked_python) -> None:
    done = forked_python("-c", COUNT_COMPILATIONS)
    assert done.returncode == 0, done.stdout + done.stderr
