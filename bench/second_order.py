"""Tangents and double backwards: time beside forward, backward, the math backend and jvp-flash-attention.

    python -m flexattn.bench.second_order --out second_order.json [--only PATTERN ...]

Each row is a direction of a cell: the device time of one call in microseconds (`measure.time_on_device`), as median and quartiles.
A jvp includes its forward, and a double backward is the call that differentiates gradients alone. Before the timing, the results of
another implementation are compared with flexattn's. Needs a GPU; `pip install --no-deps jvp_flash_attention` brings that peer,
which has no double backward.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexattn import attention
from flexattn.bench import harness
from flexattn.bench.harness import Call, Program, Row
from flexattn.bench.measure import peak_bytes

Shape = tuple[int, int, int, int]  # batch, tokens, heads, head dim
CELLS: dict[str, Shape] = {
    "DiT-XL/2": (256, 256, 16, 72),
    "8 x 2048": (8, 2048, 16, 128),
    "8 x 2048, 64": (8, 2048, 16, 64),
    "8 x 2048, 96": (8, 2048, 16, 96),
    "1 x 16384": (1, 16384, 16, 128),
}
BUDGET_MS = 300.0  # device time of each call
MOST_SCORES = 2**30  # for the math backend, whose matrices of more scores do not fit
JVP_FLASH_DIMS = (16, 32, 64, 128, 256)


def qkv_of(shape: Shape, device: str = "cuda") -> list[Tensor]:
    """Returns q, k, v and the gradient of out."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def math_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def jvp_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from jvp_flash_attention.jvp_attention import JVPAttn  # type: ignore[import-not-found, unused-ignore]

    out: Tensor = JVPAttn.fwd_dual(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return out


def calls_of(attend: Callable[..., Tensor], shape: Shape, device: str = "cuda") -> dict[str, Call]:
    """Returns the calls of each direction."""
    *qkv, dout = qkv_of(shape, device)
    if attend is jvp_flash_attention:  # its layout is bhsd: it copies tensors of another one
        qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
        return {"forward": lambda: attend(*qkv), "jvp": lambda: torch.func.jvp(attend, tuple(qkv), tuple(reversed(qkv)))}
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = attend(*leaves)
    gradients = torch.autograd.grad(attend(*leaves), leaves, dout, create_graph=True)
    return {
        "forward": lambda: attend(*qkv),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        "jvp": lambda: torch.func.jvp(attend, tuple(qkv), tuple(reversed(qkv))),
        "double backward": lambda: torch.autograd.grad(gradients, leaves, tuple(reversed(qkv)), retain_graph=True),
    }


def wrong(calls: Mapping[str, Call], shape: Shape, device: str = "cuda") -> str:
    """Returns the first direction whose results differ from flexattn's, with the error; "": all agree."""
    expected = calls_of(ours, shape, device)
    for direction, call in calls.items():
        got, first = (x if isinstance(x, tuple) else (x,) for x in (call(), expected[direction]()))
        error = max(map(harness.distance, got, first))
        if not error < harness.WORST:
            return f"{direction}: error {error:.1e}"
    return ""


def measure(shape: Shape) -> Iterator[Row]:
    """Yields a row for each direction and implementation."""
    batch, length, heads, head_dim = shape
    implementations: dict[str, Callable[..., Tensor]] = {"flexattn": ours}
    if batch * heads * length**2 <= MOST_SCORES:
        implementations["math"] = math_backend
    if importlib.util.find_spec("jvp_flash_attention") and head_dim in JVP_FLASH_DIMS:
        implementations["jvp-flash-attention"] = jvp_flash_attention
    for name, attend in implementations.items():
        calls, row = calls_of(attend, shape), {"shape": shape, "implementation": name}
        if attend is not ours and (error := wrong(calls, shape)):
            yield row | {"status": "wrong", "error": error}
            continue
        for direction, times in harness.times(calls, BUDGET_MS).items():
            memory: dict[str, Any] = {"peak_mib": peak_bytes(calls[direction]) / 2**20}
            yield row | {"direction": direction, **times, **memory, "status": "measured"}
        del calls
        harness.free_memory()


def line(row: Row) -> str:
    facts = f"{row['us']:10.0f} us {row['peak_mib']:9.0f} MiB" if "us" in row else row["error"]
    return f"{row['cell']:14} {row['implementation']:20} {row.get('direction', ''):16} {facts}"


PROGRAM = Program("flexattn.bench.second_order", __doc__, "cell", CELLS, lambda shape, options: measure(shape), line)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
