"""Two checkouts of the library timed against each other in one run, to find the cost of a change.

    python -m flexattn.bench.two_trees --other ../before --out two_trees.json

Each checkout runs in a separate process, which makes the same inputs and checks each result against its eager backend. The two
processes time calls in turns. The program calls only `attention()`, so it can compare any two versions. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

FLUSH_BYTES = 2**28  # written before each call, several times: empties L2, and hides the host's time to enqueue the call
FLUSHES = 6
ROUNDS, CALLS = 7, 12  # turns of each checkout, and calls in each
WORST = 2.0**-4  # share of a result's largest number: far above rounding in bf16 and FP8, far below a wrong result

Case = dict[str, Any]


def case(
    b: int, s: int, h: int, d: int, dtype: str = "bfloat16", h_kv: int | None = None, sq: int | None = None, **more: object
) -> Case:
    """Returns shapes and arguments of one case; `calls_of` reads `bias`, `mod`, `fp8` and `d_v`."""
    return {"b": b, "s": s, "h": h, "d": d, "dtype": dtype, "h_kv": h_kv or h, "sq": sq or s, **more}


CASES: dict[str, Case] = {
    "plain causal, d 128": case(2, 4096, 16, 128, attn_mask_type="causal"),
    "plain full, d 64": case(2, 4096, 32, 64),
    "plain causal, d 256, deterministic": case(2, 4096, 8, 256, attn_mask_type="causal", deterministic=True),
    "plain causal, 512 tokens": case(32, 512, 16, 128, attn_mask_type="causal"),
    "plain FP8 causal, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", fp8=True),
    "plain FP8 causal, deterministic": case(2, 4096, 16, 128, attn_mask_type="causal", fp8=True, deterministic=True),
    "plain FP8 full, d 64": case(2, 4096, 32, 64, fp8=True),
    "plain FP8 causal, d 192 and 128": case(2, 4096, 16, 192, d_v=128, attn_mask_type="causal", fp8=True),
    "plain FP8 causal, d 256": case(2, 4096, 8, 256, attn_mask_type="causal", fp8=True),
    "plain causal, d 192 and 128": case(2, 4096, 16, 192, d_v=128, attn_mask_type="causal"),
    "plain decode": case(32, 8192, 32, 128, h_kv=8, sq=1),
    "bias [1, h, s, s], d 128": case(2, 4096, 16, 128, bias=(1, 16, 4096, 4096), bias_type="post_scale_bias"),
    "bias [b, 1, 1, s], d 64": case(2, 4096, 32, 64, bias=(2, 1, 1, 4096), bias_type="post_scale_bias"),
    "bias [b, 1, 1, s], d 128, deterministic": case(
        2, 4096, 16, 128, bias=(2, 1, 1, 4096), bias_type="post_scale_bias", deterministic=True
    ),
    "ALiBi causal, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", bias_type="alibi"),
    "ALiBi causal, d 64": case(2, 4096, 32, 64, attn_mask_type="causal", bias_type="alibi"),
    "ALiBi causal, 512 tokens": case(32, 512, 16, 128, attn_mask_type="causal", bias_type="alibi"),
    "score_mod of a head's slope, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", mod="slope"),
    "score_mod table of distances, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", mod="table"),
    "softcap, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", softcap=30.0),
    "ALiBi FP8 causal, d 128": case(2, 4096, 16, 128, attn_mask_type="causal", bias_type="alibi", fp8=True),
    "bias decode": case(32, 8192, 32, 128, h_kv=8, sq=1, bias=(32, 1, 1, 8192), bias_type="post_scale_bias"),
    "bias float32, d 64": case(2, 2048, 16, 64, dtype="float32", bias=(2, 1, 1, 2048), bias_type="post_scale_bias"),
}


def calls_of(one: Case) -> dict[str, Callable[[str], object]]:
    """Returns the forward and the backward of a case, each as call(backend) -> results."""
    import flexattn
    from flexattn import fp8

    torch.manual_seed(0)
    arguments = dict(one)
    b, s, h, d, h_kv, sq = (arguments.pop(name) for name in ("b", "s", "h", "d", "h_kv", "sq"))
    dtype = getattr(torch, arguments.pop("dtype"))
    d_v = arguments.pop("d_v", d)
    q, k, v = (
        torch.randn(b, length, heads, dim, device="cuda", dtype=dtype).requires_grad_()
        for length, heads, dim in ((sq, h, d), (s, h_kv, d), (s, h_kv, d_v))
    )
    bias, mod, is_fp8 = arguments.pop("bias", None), arguments.pop("mod", None), arguments.pop("fp8", False)
    if bias is not None:
        arguments["bias"] = torch.randn(bias, device="cuda", dtype=dtype)
    if is_fp8:
        arguments["fp8_recipe"] = fp8.Recipe()
    slopes, table = torch.rand(h, device="cuda"), torch.randn(2 * s, device="cuda")
    if mod == "slope":
        arguments["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)
    if mod == "table":
        arguments["score_mod"] = lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + s]
    dout = torch.randn(b, sq, h, d_v, device="cuda", dtype=dtype)
    leaves = [q, k, v]

    def forward(backend: Any) -> list[Tensor]:
        with torch.no_grad():
            return [flexattn.attention(q, k, v, **arguments, backend=backend)]

    graphs: dict[str, Tensor] = {}

    def backward(backend: Any) -> list[Tensor]:
        if backend not in graphs:
            graphs[backend] = flexattn.attention(q, k, v, **arguments, backend=backend)
        return list(torch.autograd.grad(graphs[backend], leaves, dout, retain_graph=True))

    return {"forward": forward} if sq == 1 else {"forward": forward, "backward": backward}


def error_of(call: Callable[[str], list[Tensor]]) -> float:
    """Returns the largest error against the eager backend, as a share of the eager backend's largest number."""
    pairs = list(zip(call("triton"), call("eager"), strict=True))
    return max(((got.float() - ref.float()).abs().amax() / ref.float().abs().amax()).item() for got, ref in pairs)


def time_calls(call: Callable[[str], object], flush: Tensor) -> list[float]:
    """Returns the device time of CALLS calls in microseconds. The other checkout may lack `harness`, so it is not imported."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]  # type: ignore[no-untyped-call]
    for start, end in events:
        for _ in range(FLUSHES):
            flush.zero_()
        start.record()
        call("triton")
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def serve() -> None:
    """Runs in a checkout's process: reads requests, one JSON line each, and answers each with one line."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    calls: dict[str, Callable[[str], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if "prepare" in request:
            calls = calls_of(CASES[request["prepare"]])
            answer = {name: error_of(call) for name, call in calls.items()}
            for call in calls.values():
                time_calls(call, flush)
        else:
            answer = time_calls(calls[request["time"]], flush)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Checkout:
    """The process of one checkout."""

    def __init__(self, root: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # The source runs as text in the checkout's folder, so that imports find the checkout instead of this file's folder.
        source = f"import sys; exec(compile(open({str(Path(__file__).resolve())!r}).read(), 'two_trees', 'exec'))"
        command = [sys.executable, "-c", source, "--serve"]
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: str) -> None:
        stream: IO[str] = self.process.stdin  # type: ignore[assignment]
        stream.write(json.dumps(request) + "\n")
        stream.flush()

    def answer(self) -> Any:
        stream: IO[str] = self.process.stdout  # type: ignore[assignment]
        line = stream.readline()
        if not line:
            raise RuntimeError(f"a checkout's process ended with {self.process.wait()}; its error is above")
        return json.loads(line)


def compare(this: Checkout, other: Checkout, name: str) -> list[dict[str, Any]]:
    """Returns rows of one case: median and quartiles of both checkouts in microseconds, and this one's time over the other's."""
    from flexattn.bench.harness import quartiles

    checkouts = {"this": this, "other": other}
    for checkout in checkouts.values():
        checkout.ask(prepare=name)
    errors = {which: checkout.answer() for which, checkout in checkouts.items()}
    rows = []
    for direction in errors["this"]:
        times: dict[str, list[float]] = {"this": [], "other": []}
        for turn in range(ROUNDS):
            for which in ("this", "other") if turn % 2 == 0 else ("other", "this"):
                checkouts[which].ask(time=direction)
                times[which] += checkouts[which].answer()
        row: dict[str, Any] = {"case": name, "direction": direction}
        for which, us in times.items():
            row[which] = {**quartiles(us), "error": errors[which][direction]}
        row["ratio"] = row["this"]["us"] / row["other"]["us"]
        row["status"] = "measured" if errors["this"][direction] < WORST else "wrong"
        rows.append(row)
    return rows


def main() -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--other", type=Path, help="the root of the other checkout")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.other is None or not (options.other / "flexattn").is_dir():
        parser.error(f"--other is {options.other}; accepted: the root of a checkout, with a folder flexattn")
    if not torch.cuda.is_available():
        parser.error("no CUDA device; two_trees measures device time")
    from flexattn.bench.harness import Run

    this, other = Checkout(Path(__file__).resolve().parent.parent), Checkout(options.other)
    run = Run("flexattn.bench.two_trees", __doc__, options.out)
    for name in CASES:
        if options.only in name and time.monotonic() - start < options.seconds:
            for row in compare(this, other, name):
                run.add(row, f"{row['status']:8} {row['ratio']:6.3f} {row['this']['us']:9.1f} us {row['direction']:8} {name}")
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
