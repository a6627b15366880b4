"""Peak extra memory of one forward and backward on a CPU: the eager backend, and attention that stores its scores.

    python -m flexattn.bench.memory --out bench/results/eager_memory.json

Extra memory is the process's largest resident size during the call minus its size just before, so out and the gradients count. Each
number comes from a new process, after a small call of the same kind has loaded torch's modules. Linux only. On a GPU
`python -m flexattn bench --preset scaling` measures the same for the peers too, with torch's allocator.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from flexattn.bench import record
from flexattn.bench.implementations import EAGER, ours
from flexattn.bench.inputs import make_tensors
from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import Workload, dense

MATERIALISED = "materialised"
MEASURES = "peak extra resident memory of one forward + backward, MiB"
WARM_UP_SEQLEN = 64


def workload(seqlen: int, heads: int, head_dim: int, causal: bool) -> Workload:
    mask = "causal" if causal else "no_mask"
    return dense(
        f"memory-s{seqlen}", "memory", 1, seqlen, (heads, heads), (head_dim, head_dim), attn_mask_type=mask, dtype="float32"
    )


def _eager(shape: Workload) -> Callable[[], object]:
    [implementation] = [i for i in ours("cpu") if i.name == EAGER]
    return implementation.prepare(shape, make_tensors(shape, "cpu"), "both").timed


def _materialised(shape: Workload) -> Callable[[], object]:
    q, k, v, dout = (t.transpose(1, 2).contiguous() for t in make_tensors(shape, "cpu")[:4])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    hidden = torch.ones(shape.seqlen_q, shape.seqlen_kv, dtype=torch.bool).triu(1) if shape.is_causal else None

    def call() -> object:
        scores = q @ k.transpose(-1, -2) * shape.head_dim_qk**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.autograd.grad(scores.softmax(-1) @ v, leaves, dout)

    return call


VARIANTS = {EAGER: _eager, MATERIALISED: _materialised}


def extra_bytes(variant: str, shape: Workload) -> int:
    """Returns the extra bytes of a call, in a process that has run nothing else."""
    VARIANTS[variant](workload(WARM_UP_SEQLEN, shape.num_heads, shape.head_dim_qk, shape.is_causal))()
    call = VARIANTS[variant](shape)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])  # maxrss would include memory that the imports have freed
    before = resident_pages * resource.getpagesize()
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def measure(variant: str, shape: Workload) -> float:
    """Returns the extra MiB of a call, measured in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return round(pool.submit(extra_bytes, variant, shape).result() / 2**20, 1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flexattn.bench.memory",
        description="peak extra memory of attention forward + backward, batch 1, fp32 (Linux)",
    )
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--materialised-up-to", type=int, default=4096, metavar="SEQLEN", help="its memory is quadratic (default 4096)"
    )
    parser.add_argument("--out", type=Path, help="also write the result")
    args = parser.parse_args(arguments)

    shapes = [workload(seqlen, args.heads, args.head_dim, args.causal) for seqlen in args.seqlens]
    rows = []
    print(f"{shapes[0]}, forward + backward, peak extra MiB")
    print(f"{'seqlen':>8} {'eager':>10} {'materialised':>14} {'one score matrix':>18}")
    for shape in shapes:
        figures: dict[str, float] = {}
        for variant in VARIANTS:
            row = Row(variant, f"torch {torch.__version__}", shape.name, "both", "measured")
            if variant == EAGER or shape.seqlen_q <= args.materialised_up_to:
                figures[variant] = measure(variant, shape)
                rows.append(row._replace(peak_mib=figures[variant]))
            else:
                rows.append(row._replace(status="refused", reason="its memory is quadratic: not measured at this length"))
        scores = args.heads * shape.seqlen_q**2 * 4 / 2**20
        plain = f"{figures[MATERIALISED]:.1f}" if MATERIALISED in figures else "-"
        print(f"{shape.seqlen_q:>8} {figures[EAGER]:>10.1f} {plain:>14} {scores:>18.1f}", flush=True)
    if args.out is not None:
        command = record.command_line("flexattn.bench.memory", arguments, args.out)
        names = {shape.name: shape for shape in shapes}
        device = {**record.device_facts(), "type": "cpu"}
        record.write(args.out, Record(command, record.now(), device, record.versions(), None, {"memory": MEASURES}, names, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
