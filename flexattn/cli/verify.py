"""`python -m flexattn verify`: checks the kernels of this machine's GPU against the reference, times a few calls beside SDPA, and
prints a report for an issue.

Each check runs in one of several processes, so that compilation takes less time and a crash is one failed check. Compiled kernels
stay on disk: a second run is faster. Without a GPU, a few small calls run in Triton's interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexattn
from flexattn import attention, explain
from flexattn.cli import Parser, program
from flexattn.testing import FORWARD_FACTOR, GRADIENT_FACTOR, check_close

MAX_FP8_ERROR = 0.12  # a share of the largest value: e4m3 has three bits of mantissa
POLICIES = ("auto", "always", "never")  # values of FLEXATTN_HOPPER that together reach each kernel family of a GPU
STARTED, ENDED = "started", "ended"


class Case(NamedTuple):
    """A call that is checked. options: returns further arguments of `attention`, given the device."""

    name: str
    head_dim: int
    head_dim_v: int = 0  # 0: head_dim
    batch: int = 2
    queries: int = 333
    keys: int = 333
    heads: int = 4
    heads_kv: int = 2
    dtype: torch.dtype = torch.bfloat16
    has_gradient: bool = True
    minimum: int = 0  # compute capability
    options: Callable[[str], dict[str, Any]] = lambda device: {}

    def tensors(self, device: str) -> list[Tensor]:
        sizes = ((self.queries, self.heads, self.head_dim), (self.keys, self.heads_kv, self.head_dim))
        shapes = [*sizes, (self.keys, self.heads_kv, self.head_dim_v or self.head_dim)]
        generator = torch.Generator(device).manual_seed(0)

        def random(tokens: int, heads: int, columns: int) -> Tensor:
            shape = (tokens, heads, columns) if self.batch == 0 else (self.batch, tokens, heads, columns)
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        return [random(*shape).requires_grad_(self.has_gradient) for shape in shapes]


def _causal(device: str) -> dict[str, object]:
    return {"attn_mask_type": "causal"}


def _packed(device: str) -> dict[str, object]:
    offsets = torch.tensor([0, 100, 100, 433, 600], dtype=torch.int32, device=device)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 333, "max_seqlen_kv": 333}
    return {"qkv_format": "thd", "attn_mask_type": "padding_causal", **lengths}


def _bias(device: str) -> dict[str, object]:
    generator = torch.Generator(device).manual_seed(1)
    bias = torch.randn(1, 4, 333, 333, generator=generator, device=device).to(torch.bfloat16)
    return {"bias_type": "post_scale_bias", "bias": bias}


def _score_mod(device: str) -> dict[str, object]:
    table = torch.linspace(-1, 1, 4 * 700, device=device).reshape(4, 700)
    return {"score_mod": lambda score, b, h, i, j: score + table[h, i - j + 340]}


def _documents(device: str) -> dict[str, object]:
    return {"mask_mod": lambda b, h, i, j: (i // 64 == j // 64) | (j < 10)}


CASES = (
    # The first three have the kernels of the timed calls, which are then compiled.
    Case("causal, head dim 128", 128, batch=1, queries=1100, keys=1100, heads_kv=4, options=_causal),
    Case("causal, head dim 64", 64, batch=1, queries=1100, keys=1100, heads_kv=4, options=_causal),
    Case("causal, head dim 256", 256, batch=1, queries=1100, keys=1100, heads_kv=4, options=_causal),
    Case("decode over split keys", 128, queries=1, keys=5000, heads=8, has_gradient=False),
    Case("packed sequences", 128, batch=0, queries=600, keys=600, options=_packed),
    Case("FP8", 128, queries=512, keys=512, minimum=89, options=lambda device: {"fp8_recipe": flexattn.fp8.Recipe()}),
    Case("score_mod with a table", 64, heads_kv=4, options=_score_mod),
    Case("mask_mod", 128, options=_documents),
    Case("head dims 192 and 128", 192, 128, options=_causal),
    Case("bias with its gradient", 64, options=_bias),
    Case("full, head dim 96, float16", 96, queries=300, keys=700, dtype=torch.float16),
    Case("window", 64, keys=800, options=lambda device: {"attn_mask_type": "causal_bottom_right", "window_size": (100, 0)}),
    Case("ALiBi and softcap", 64, options=lambda device: {"bias_type": "alibi", "softcap": 20.0, "attn_mask_type": "causal"}),
    Case("dropout", 64, options=lambda device: {"dropout_p": 0.3, "rng_state": torch.tensor([5, 7], device=device)}),
    Case("float32", 64, queries=200, keys=300, dtype=torch.float32),
    Case("head dim 512", 512, batch=1, queries=200, keys=200, options=_causal),
)
# Triton's interpreter is about a million times slower than a GPU.
SMALL_CASES = (
    Case("causal, head dim 64", 64, batch=1, queries=70, keys=70, heads=2, heads_kv=1, options=_causal),
    Case("full, head dim 40, float32", 40, batch=1, queries=33, keys=50, heads=1, heads_kv=1, dtype=torch.float32),
    Case("mask_mod", 32, batch=1, queries=70, keys=70, heads=2, heads_kv=2, options=_documents),
)


class Outcome(NamedTuple):
    """The result of a check. failure: None if it is right."""

    name: str
    kernels: str
    failure: str | None = None
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command. The exit status is 1 if a check failed or did not end in time."""
    parser = Parser(
        prog=program("verify"),
        description="Checks each kernel family of this machine's GPU against an fp64 reference, times a few calls beside torch's "
        "scaled_dot_product_attention, and prints a report to paste into an issue. It takes less than two minutes.",
    )
    parser.add_target()
    parser.add_argument("--seconds", type=float, default=110, help="stop after this time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the report to a file")
    parser.add_argument("--part", metavar="N/M", help="run only each M-th check from N on, and print lines of JSON")
    args = parser.parse_args(arguments)
    stop = time.monotonic() + args.seconds
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    parser.imitate(args.target)
    if args.part is not None:
        number, parts = map(int, args.part.split("/"))
        return _run_part(number, parts)
    outcomes = _outcomes(stop - (15 if torch.cuda.is_available() else 0))
    times = _times(stop) if torch.cuda.is_available() else []
    text = report(outcomes, times)
    print(text)  # noqa: T201
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    return int(any(outcome.failure is not None for outcome in outcomes))


# --- The checks


def _cases() -> tuple[Case, ...]:
    if not torch.cuda.is_available():
        return SMALL_CASES
    major, minor = torch.cuda.get_device_capability()
    return tuple(case for case in CASES if case.minimum <= 10 * major + minor)


def _run_part(number: int, parts: int) -> int:
    """Checks each `parts`-th case from `number` on, with each kernel family; prints lines of JSON."""
    for case in _cases()[number::parts]:
        seen: set[str] = set()
        for policy in POLICIES:
            os.environ["FLEXATTN_HOPPER"] = policy
            start = time.monotonic()
            kernels = "none"
            try:
                kernels = _kernels_of(case)
                if kernels in seen:
                    continue
                seen.add(kernels)
                _say(STARTED, Outcome(case.name, kernels))
                failure = check(case)
            except Exception as error:
                failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _say(ENDED, Outcome(case.name, kernels, failure, round(time.monotonic() - start, 1)))
    return 0


def _say(event: str, outcome: Outcome) -> None:
    print(json.dumps({"event": event, **outcome._asdict()}), flush=True)  # noqa: T201


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _kernels_of(case: Case) -> str:
    if _device() == "cpu":
        return "portable, interpreted"
    return explain(*case.tensors("cuda"), backend="triton", **case.options("cuda")).runs_on


def check(case: Case) -> str | None:
    """Compares a call and its gradients with fp64; returns the failure, or None if it is right."""
    device = _device()
    leaves, options = case.tensors(device), case.options(device)
    got = _results(leaves, {**options, "backend": "triton"})
    in_fp8 = options.pop("fp8_recipe", None) is not None
    exact = [x.detach().double().requires_grad_(case.has_gradient) for x in leaves]
    bias = options.get("bias")
    in_fp64 = options if bias is None else {**options, "bias": bias.double()}
    reference = _results(exact, {**in_fp64, "backend": "eager"})
    if in_fp8:
        error = ((got["out"].double() - reference["out"]).abs().max() / reference["out"].abs().max()).item()
        if not all(x.isfinite().all() for x in got.values()):
            return "a result is not finite"
        return None if error <= MAX_FP8_ERROR else f"out: the largest error is {error:.2g} of the largest value"
    eager = _results(leaves, {**options, "backend": "eager"})
    try:
        for name, value in got.items():
            factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
            check_close(name, value, reference[name], eager[name], factor=factor)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


def _results(leaves: Sequence[Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Returns out and the gradients of a call, by name."""
    named = dict(zip(("dq", "dk", "dv"), leaves, strict=True))
    bias = options.get("bias")
    if bias is not None:
        options = {**options, "bias": bias.detach().requires_grad_()}
        named["dbias"] = options["bias"]
    out = attention(*leaves, **options)
    if not leaves[0].requires_grad:
        return {"out": out}
    generator = torch.Generator(out.device).manual_seed(2)
    dout = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    gradients = torch.autograd.grad(out, list(named.values()), dout)
    return {"out": out, **dict(zip(named, gradients, strict=True))}


def _outcomes(stop: float) -> list[Outcome]:
    """Runs all checks in processes, and returns their outcomes, in the order of the cases."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = min(8, max(1, cores // 2), len(_cases())) if _device() == "cuda" else 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(flexattn.__file__).parent.parent), *sys.path])}
    processes = []
    for number in range(parts):
        command = [sys.executable, "-m", "flexattn", "verify", "--part", f"{number}/{parts}"]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outcomes: list[Outcome] = []
    for number, process in enumerate(processes):
        try:
            said, errors = process.communicate(timeout=max(1.0, stop - time.monotonic()))
            end = f"its process ended with {process.returncode}: {errors.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            end = "it did not end in time; run the command again, compiled kernels are kept"
        outcomes += _read(said, [case.name for case in _cases()[number::parts]], end)
    names = [case.name for case in _cases()]
    return sorted(outcomes, key=lambda outcome: names.index(outcome.name))


def _read(said: str, names: Sequence[str], end: str) -> Iterator[Outcome]:
    """Yields the outcomes that a process printed, and a failure for each of its cases that has none. end: the reason."""
    found: dict[tuple[str, str], Outcome] = {}
    for line in said.splitlines():
        if line.startswith('{"event"'):
            fields = json.loads(line)
            event, outcome = fields.pop("event"), Outcome(**fields)
            found[outcome.name, outcome.kernels] = outcome if event == ENDED else outcome._replace(failure=end)
    yield from found.values()
    done = {outcome.name for outcome in found.values()}
    yield from (Outcome(name, "not reached", end) for name in names if name not in done)


# --- Times


class Time(NamedTuple):
    """Times in ms of one call; None if it failed."""

    name: str
    forward: float | None
    backward: float | None
    sdpa_forward: float | None
    sdpa_backward: float | None


def _times(stop: float) -> list[Time]:
    return [_time(head_dim) for head_dim in (64, 128, 256) if time.monotonic() < stop - 8]


def _time(head_dim: int, length: int = 2048) -> Time:
    heads = 2048 // head_dim
    shape = (4, length, heads, head_dim)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    os.environ["FLEXATTN_HOPPER"] = "auto"
    ours = _both(functools.partial(attention, *leaves, attn_mask_type="causal", backend="triton"), leaves)
    return Time(f"causal, b4 s{length} h{heads} d{head_dim}", *ours, *_both(functools.partial(_sdpa, *leaves), leaves))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
    return out.transpose(1, 2)


def _both(call: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Returns the times of the forward and of the backward of a call; None for a call that fails."""
    try:
        out = call()
        dout = torch.randn_like(out)
        with torch.no_grad():
            forward = _median(call)
        return forward, _median(functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True))
    except Exception as error:
        print(f"not timed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)  # noqa: T201
        return None, None


def _median(call: Callable[[], object], count: int = 11) -> float:
    """Returns the median time of a call on the GPU in ms."""
    event: Any = torch.cuda.Event
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
    for _ in range(3):
        call()
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[count // 2])


# --- The report


def report(outcomes: Sequence[Outcome], times: Sequence[Time]) -> str:
    """Returns the report in Markdown."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    lines = [f"### flexattn verify: {_machine()}", "", _versions(), ""]
    lines.append(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks are right." + (" FAILURES are below." if failed else ""))
    lines += ["", "| check | kernels | result |", "|---|---|---|"]
    lines += [f"| {x.name} | {x.kernels} | {'right' if x.failure is None else 'FAILED'} |" for x in outcomes]
    if times:
        lines += ["", "Times in ms, forward / backward, of SDPA's FlashAttention on the right:", ""]
        lines += ["| call | flexattn | SDPA | SDPA / flexattn |", "|---|---:|---:|---:|"]
        for x in times:
            ratios = (_ratio(x.sdpa_forward, x.forward), _ratio(x.sdpa_backward, x.backward))
            cells = (_pair(x.forward, x.backward), _pair(x.sdpa_forward, x.sdpa_backward), " / ".join(ratios))
            lines.append(f"| {x.name} | {' | '.join(cells)} |")
    if failed:
        lines += ["", "FAILURES:", *(f"- {x.name} ({x.kernels}): {x.failure}" for x in failed)]
    return "\n".join(lines)


def _pair(forward: float | None, backward: float | None) -> str:
    return " / ".join("-" if x is None else f"{x:.3f}" for x in (forward, backward))


def _ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def _machine() -> str:
    if not torch.cuda.is_available():
        return "no GPU. Only Triton's interpreter was checked, on small calls: this says nothing about a GPU"
    from flexattn.kernels_triton.runtime import imitation

    properties = torch.cuda.get_device_properties(0)
    name = imitation.label(properties.name)
    sizes = f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    return f"{name}, sm_{properties.major}{properties.minor}, {sizes}"


def _versions() -> str:
    import platform

    import triton

    driver = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text()) if driver.exists() else None
    loaded = match[0] if match else "none"
    cuda = torch.version.cuda or "none"
    return (
        f"flexattn {flexattn.__version__}, torch {torch.__version__}, CUDA {cuda}, triton {triton.__version__}, driver {loaded}, "
        f"python {platform.python_version()}, {platform.system()}"
    )
