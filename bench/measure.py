"""Measurements of a call: device time, the host's time to enqueue it, peak memory; and the ceilings of the same run."""

from __future__ import annotations

import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from flexattn import BackendError
from flexattn.bench.check import Checker
from flexattn.bench.counts import Work, roofline
from flexattn.bench.implementations import Implementation, Unavailable
from flexattn.bench.inputs import Tensors
from flexattn.bench.record import Ceilings, Row
from flexattn.bench.shapes import Workload

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MEASURES = {
    "cuda": (
        "CUDA events around one call; median and quartiles over calls that take turns with the others', L2 emptied before each for "
        "longer than the host takes to enqueue it"
    ),
    "cpu": "wall time of one call; median and quartiles over calls that take turns with the others'",
}
HOST = "time until a call returns to Python, with nothing before it in the device's queue; median and 99th percentile"
MEMORY = (
    "the most that torch's allocator held during one call less what it held before: inputs apart, outputs and workspaces included"
)

WARM_UPS = 3
HEAD_START = 2.0  # time for which the device is kept busy before a call, in multiples of the host's time to enqueue it
HOST_SHARE = 0.3  # share of the budget, spent before the calls are timed on the device
ROUNDS = {"cuda": (5, 200), "cpu": (3, 20)}  # at least, at most
FLUSH_BYTES = 2**30  # several times any L2
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}


class Samples(NamedTuple):
    """Milliseconds of one implementation's calls on the device, and on the host until they returned (none on a CPU)."""

    ms: list[float]
    host_ms: list[float]


Calls = Mapping[str, Callable[[], object]]
Timer = Callable[[Calls], dict[str, Samples]]


def time_on_device(calls: Calls, budget_ms: float) -> dict[str, Samples]:
    """Times all calls in turns, with about `budget_ms` of device time for each.

    A call is enqueued while the device is still busy, so the host's time does not count: before it, L2 is emptied by writing
    FLUSH_BYTES, repeatedly if the host needs longer.
    """
    host = _wall_times(calls, HOST_SHARE * budget_ms, "cuda")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    start, end = _events()
    for _ in range(WARM_UPS):
        start.record()
        flush.zero_()
        end.record()
    torch.cuda.synchronize()
    flush_ms = start.elapsed_time(end)
    flushes = {name: max(1, math.ceil(HEAD_START * statistics.median(ms) / flush_ms)) for name, ms in host.items()}

    def turn(name: str) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        start, end = _events()
        for _ in range(flushes[name]):
            flush.zero_()
        start.record()
        calls[name]()
        end.record()
        return [(start, end)]

    began = time.perf_counter()
    in_turns(calls, 1, turn)
    torch.cuda.synchronize()
    affordable = budget_ms * len(calls) / ((time.perf_counter() - began) * 1e3)
    events = in_turns(calls, _rounds("cuda", affordable), turn)
    torch.cuda.synchronize()
    return {name: Samples([start.elapsed_time(end) for start, end in events[name]], host[name]) for name in calls}


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def in_turns(keys: Iterable[K], rounds: int, turn: Callable[[K], Iterable[T]]) -> dict[K, list[T]]:
    """Returns the samples of `turn(key)` for each key over all rounds.

    The keys alternate, and the first one changes from round to round, because each call warms the GPU for its successor.
    """
    order = list(keys)
    samples: dict[K, list[T]] = {key: [] for key in order}
    for n in range(rounds):
        first = n % len(order) if order else 0
        for key in order[first:] + order[:first]:
            samples[key] += turn(key)
    return samples


def _wall_times(calls: Calls, budget_ms: float, device: str) -> dict[str, list[float]]:
    """Returns the milliseconds until each call returns, if the device's queue is empty; the calls alternate."""
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else int

    def turn(name: str) -> list[float]:
        wait()
        before = time.perf_counter()
        calls[name]()
        return [(time.perf_counter() - before) * 1e3]

    for _ in range(WARM_UPS if device == "cuda" else 1):
        began = time.perf_counter()
        in_turns(calls, 1, turn)
        wait()
        round_ms = (time.perf_counter() - began) * 1e3
    return in_turns(calls, _rounds(device, budget_ms * len(calls) / round_ms), turn)


def time_on_cpu(calls: Calls, budget_ms: float) -> dict[str, Samples]:
    """Times all calls in turns without a device: a call is over when it returns."""
    return {name: Samples(ms, []) for name, ms in _wall_times(calls, budget_ms, "cpu").items()}


def _rounds(device: str, affordable: float) -> int:
    least, most = ROUNDS[device]
    return min(most, max(least, int(affordable)))


def peak_bytes(call: Callable[[], object]) -> int:
    """Returns the bytes that MEMORY defines; CUDA only."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def measure_ceilings(timer: Timer, device: str) -> Ceilings:
    """Measures the two ceilings of the roofline: a matrix product (bf16; fp32 on a CPU) and a copy."""
    size, dtype = MATMUL_SIZE[device], torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    source = torch.ones(COPY_BYTES[device], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    [matmul] = timer({"matmul": lambda: a @ b}).values()
    [copy] = timer({"copy": lambda: target.copy_(source)}).values()
    return Ceilings(
        matmul_tflops=2 * size**3 / statistics.median(matmul.ms) * 1e-9,
        matmul_size=size,
        matmul_dtype=str(dtype).removeprefix("torch."),
        copy_gb_s=2 * COPY_BYTES[device] / statistics.median(copy.ms) * 1e-6,  # read and written
        copy_bytes=COPY_BYTES[device],
    )


def measure(
    workload: Workload,
    direction: str,
    candidates: Sequence[Implementation],
    tensors: Tensors,
    checker: Checker,
    work: Work,
    ceilings: Ceilings | None,
    timer: Timer | None,
) -> list[Row]:
    """Returns a row for each candidate. `timer` gets a candidate if its results pass the check; None: only check."""
    rows: dict[str, Row] = {}
    timed: dict[str, Callable[[], object]] = {}
    for candidate in candidates:
        name = candidate.name
        rows[name] = Row(name, candidate.version, workload.name, direction, "checked")
        with warnings.catch_warnings(record=True) as said:  # SDPA gives its reasons as warnings
            warnings.simplefilter("always")
            try:
                prepared = candidate.prepare(workload, tensors, direction)
                poison(tensors)
                results = prepared.results()
            except Exception as e:  # any error of a peer becomes its row in the table
                rows[name] = rows[name]._replace(status="refused", reason=reason_of(e, [str(w.message) for w in said]))
                continue
        try:
            checker.check(direction, results)
        except AssertionError as e:
            rows[name] = rows[name]._replace(status="wrong", reason=str(e))
        else:
            timed[name] = prepared.timed
        del results
    if timer is None or ceilings is None or not timed:
        return list(rows.values())
    memory = {name: peak_bytes(call) for name, call in timed.items()} if tensors.q.is_cuda else {}
    for name, samples in timer(timed).items():
        us = quartiles([1e3 * ms for ms in samples.ms])
        tflops, gb_s = work.flops / us["us"] * 1e-6, work.bytes / us["us"] * 1e-3
        rows[name] = rows[name]._replace(
            status="measured",
            calls=len(samples.ms),
            us=us["us"],
            us_q1=us["us_q1"],
            us_q3=us["us_q3"],
            tflops=tflops,
            gb_s=gb_s,
            share=tflops / ceilings.matmul_tflops,
            roofline_share=tflops / roofline(work, ceilings.matmul_tflops, ceilings.copy_gb_s).attainable_tflops,
            host_us=statistics.median(samples.host_ms) * 1e3 if samples.host_ms else None,
            host_us_p99=statistics.quantiles(samples.host_ms, n=100, method="inclusive")[-1] * 1e3 if samples.host_ms else None,
            peak_mib=memory[name] / 2**20 if memory.get(name) else None,  # 0: outputs and workspace were allocated before
        )
    return list(rows.values())


def quartiles(samples: Sequence[float], name: str = "us") -> dict[str, float]:
    """Returns the median of samples as `name`, and the quartiles as `name`_q1 and `name`_q3."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {name: median, f"{name}_q1": q1, f"{name}_q3": q3}


def poison(tensors: Tensors) -> None:
    """Fills memory that torch's allocator hands out next with NaN, so that an element that no kernel writes is found."""
    if tensors.q.is_cuda:
        torch.cuda.empty_cache()
        size = sum(t.numel() * t.element_size() for t in tensors[:4])
        torch.full((4 * size,), 255, dtype=torch.uint8, device=tensors.q.device)  # NaN in every float type


NOISE = re.compile(r"\(Triggered internally at [^)]*\)|Exception raised from .*", re.DOTALL)  # positions in torch's sources
A_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)")  # a path on one machine: its last part is enough
ADVICE = ("Set TORCH", "For even more developer", "You can suppress", "target: ", "args[", "kwargs", "import torch._dynamo")
SAYS_NOTHING = re.compile(r"(not used because:?|has been runtime disabled\.?)\s*$")  # the words of backends that were not selected


def reason_of(e: Exception, warned: Sequence[str] = ()) -> str:
    """Returns one line with the error and the warnings before it, without advice."""
    head = str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {e}".removesuffix(": ")
    if isinstance(e, BackendError):
        *_, head = str(e).splitlines()[:2]  # the second has the backend's reason; the others' reasons follow
    lines = [[line for line in text.splitlines() if not line.strip().startswith(ADVICE)] for text in [head, *warned]]
    texts = [" ".join(A_PATH.sub(r"\1", NOISE.sub("", "\n".join(kept))).split()) for kept in lines]
    return "; ".join(text[:300] for text in dict.fromkeys(texts) if not SAYS_NOTHING.search(text))
