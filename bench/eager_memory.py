"""Peak extra memory of one forward and backward: the eager backend beside attention that materialises its scores.

    python -m bench.eager_memory --out bench/results/eager_memory.json

Extra is the process's largest resident size during the call less its size just before it, so out and the gradients count.
Each number comes from a fresh process, after a small call of the same kind has loaded what torch loads once.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

MIB = 2**20
WARM_UP_SEQLEN = 64


def eager(seqlen: int, heads: int, head_dim: int, causal: bool) -> Callable[[], object]:
    from flexattn.dispatch import eager_backend
    from flexattn.testing import make_call, make_dout, make_inputs

    inputs = make_inputs(lengths_q=[seqlen], num_heads=heads, num_heads_kv=heads, head_dim_qk=head_dim, head_dim_v=head_dim)
    spec, x = make_call(inputs, attn_mask_type="causal" if causal else "no_mask")
    dout = make_dout(inputs)

    def call() -> object:
        out, lse, _ = eager_backend.forward(spec, x)
        return eager_backend.backward(spec, x, out, lse, dout, None)

    return call


def materialised(seqlen: int, heads: int, head_dim: int, causal: bool) -> Callable[[], object]:
    import torch

    q, k, v = (torch.randn(1, heads, seqlen, head_dim, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, heads, seqlen, head_dim)
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1) if causal else None

    def call() -> object:
        scores = q @ k.transpose(-1, -2) * head_dim**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), dout)

    return call


VARIANTS = {"eager": eager, "materialised": materialised}


def extra_bytes(variant: str, seqlen: int, heads: int, head_dim: int, causal: bool) -> int:
    VARIANTS[variant](WARM_UP_SEQLEN, heads, head_dim, causal)()
    call = VARIANTS[variant](seqlen, heads, head_dim, causal)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])  # maxrss would hide what import had freed
    before = resident_pages * resource.getpagesize()
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def measure(*args: object) -> int:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(extra_bytes, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description="peak extra memory of attention forward + backward, batch 1, fp32 (Linux)")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--materialised-up-to", type=int, default=4096, metavar="SEQLEN", help="its memory is quadratic (default 4096)"
    )
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    args = parser.parse_args()

    rows = []
    print(f"b1 h{args.heads} d{args.head_dim} fp32{' causal' if args.causal else ''}, forward + backward, peak extra MiB")
    print(f"{'seqlen':>8} {'eager':>10} {'materialised':>14} {'one score matrix':>18}")
    for seqlen in args.seqlens:
        row: dict[str, float | None] = {"seqlen": seqlen, "eager_mib": None, "materialised_mib": None}
        for variant in VARIANTS:
            if variant == "eager" or seqlen <= args.materialised_up_to:
                row[f"{variant}_mib"] = round(measure(variant, seqlen, args.heads, args.head_dim, args.causal) / MIB, 1)
        scores = args.heads * seqlen**2 * 4 / MIB
        plain = "-" if row["materialised_mib"] is None else f"{row['materialised_mib']:.1f}"
        print(f"{seqlen:>8} {row['eager_mib']:>10.1f} {plain:>14} {scores:>18.1f}", flush=True)
        rows.append(row)

    if args.out is not None:
        flags = [f"--seqlens {' '.join(map(str, args.seqlens))}", f"--heads {args.heads}", f"--head-dim {args.head_dim}"]
        flags += ["--causal"] if args.causal else []
        flags += [f"--materialised-up-to {args.materialised_up_to}", f"--out bench/results/{args.out.name}"]
        result = {
            "command": " ".join(["python -m bench.eager_memory", *flags]),
            "measures": "peak extra resident memory of one forward + backward, MiB",
            "shape": {"batch": 1, "heads": args.heads, "head_dim": args.head_dim, "dtype": "float32", "causal": args.causal},
            "device": platform.processor() or platform.machine(),
            "versions": {"python": platform.python_version(), "torch": version("torch")},
            "rows": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
