"""What a warm call costs the host, forward and backward, on each backend and beside torch's SDPA.

    python -m flexattn.bench.host_cost
    python -m flexattn.bench.host_cost --out bench/results/host_cost.json

The problems are so small that the GPU waits for the host: the time between two calls is then the host's. Each figure is the median
over rounds of calls, the implementations taking turns; between rounds the device is waited for. Results are checked against the
reference before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import flexattn
from flexattn.dispatch.describe import versions
from flexattn.dispatch.select import select
from flexattn.testing import check_close, make_call, make_inputs, reference_attention

HEADS, HEADS_KV, HEAD_DIM = 8, 8, 64
LENGTHS = {"bshd": [128, 128], "bshd padded": [128, 60], "thd": [128, 60]}
CALLS, ROUNDS, WARM_UPS = 50, 40, 5
MEASURES = "microseconds of the host for one call, without waiting for the device; median over rounds, with quartiles"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flexattn.bench.host_cost", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "needs a GPU, and torch.cuda.is_available() is False\n")
    rows = [row for name in LENGTHS for row in measure(name)]
    print(f"{torch.cuda.get_device_name()}, {versions()}\n{MEASURES}")
    for row in rows:
        quartiles = f"({row['low']:.1f} to {row['high']:.1f})"
        print(f"{row['call']:12} {row['direction']:9} {row['implementation']:20} {row['us']:8.1f}  {quartiles}")
    print(f"{'':12} {'selection':9} {'of a known spec':20} {selection_cost():8.2f}")
    if args.out is not None:
        record = {
            "command": f"python -m flexattn.bench.host_cost {shlex.join(argv if argv is not None else sys.argv[1:])}",
            "device": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "versions": versions(),
            "measures": MEASURES,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(name: str) -> list[dict[str, Any]]:
    """The rows of one kind of call: each implementation that takes it, in each direction."""
    fmt, _, padded = name.partition(" ")
    inputs = make_inputs(
        fmt,
        lengths_q=LENGTHS[name],
        padding=bool(padded),
        num_heads=HEADS,
        num_heads_kv=HEADS_KV,
        head_dim_qk=HEAD_DIM,
        head_dim_v=HEAD_DIM,
        dtype=torch.bfloat16,
        device="cuda",
    )
    inputs = inputs._replace(cu_seqlens_kv=inputs.cu_seqlens_q)  # self-attention
    mask = "causal" if inputs.cu_seqlens_q is None else "padding_causal"
    leaves = {which: getattr(inputs, which).nan_to_num().requires_grad_() for which in "qkv"}
    dout = torch.randn_like(inputs.q)
    call = inputs._asdict() | leaves | {"attn_mask_type": mask}
    forwards: dict[str, Callable[[], Any]] = {
        f"flexattn {backend}": functools.partial(flexattn.attention, **call, backend=backend) for backend in ("triton", "cudnn")
    }
    if name == "bshd":
        q, k, v = (leaves[which].transpose(1, 2) for which in "qkv")
        for label, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):

            def sdpa(backend: SDPBackend = backend) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

            forwards[label] = sdpa
    spec, x = make_call(inputs, attn_mask_type=mask)
    exact, budget = reference_attention(spec, x)[0], reference_attention(spec, x, dtype=spec.dtype)[0]
    for forward in forwards.values():
        check_close("out", forward(), exact, budget)

    def both(forward: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(forward(), list(leaves.values()), dout)

    rows = []
    for direction, calls in (("forward", forwards), ("both", {label: both(forward) for label, forward in forwards.items()})):
        times: dict[str, list[float]] = {label: [] for label in calls}
        for round_number in range(WARM_UPS + ROUNDS):
            for label, function in calls.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(CALLS):
                    function()
                if round_number >= WARM_UPS:
                    times[label].append((time.perf_counter() - began) / CALLS * 1e6)
        for label, found in times.items():
            low, us, high = statistics.quantiles(found, n=4)
            rows.append({"call": name, "direction": direction, "implementation": label, "us": us, "low": low, "high": high})
    return rows


def selection_cost() -> float:
    """Microseconds of one selection for a spec that was seen before."""
    q = torch.empty(1, 128, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    spec = flexattn.explain(q, q, q).spec
    began = time.perf_counter()
    for _ in range(10_000):
        select(spec, "forward", "auto")
    return (time.perf_counter() - began) / 10_000 * 1e6


if __name__ == "__main__":
    sys.exit(main())
