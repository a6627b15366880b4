"""What is measured of a call: device time, the host's time to enqueue it, peak memory; and the ceilings of the same run."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from flexattn.bench.check import Checker
from flexattn.bench.counts import Work, roofline
from flexattn.bench.implementations import Implementation, Unavailable
from flexattn.bench.inputs import Tensors
from flexattn.bench.record import Ceilings, Row
from flexattn.bench.shapes import Workload

MEASURES = {
    "cuda": "CUDA events around one call; median and quartiles over calls that take turns with the others', L2 emptied before each",
    "cpu": "wall time of one call; median and quartiles over calls that take turns with the others'",
}
HOST = "time until the call returns to Python, the device's queue short; median and 99th percentile of the calls that were timed"
MEMORY = (
    "the most that torch's allocator held during one call less what it held before: inputs apart, outputs and workspaces included"
)

WARM_UPS = 3
ROUNDS = {"cuda": (5, 200), "cpu": (3, 20)}  # at least, at most
FLUSH_BYTES = 2**30  # several times any L2; writing it also takes longer than a host takes to enqueue a call
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}


class Samples(NamedTuple):
    """Of one implementation, for each call: milliseconds on the device, and on the host until the call returned."""

    ms: list[float]
    host_ms: list[float]


Calls = Mapping[str, Callable[[], object]]
Timer = Callable[[Calls], dict[str, Samples]]


def time_on_device(calls: Calls, budget_ms: float) -> dict[str, Samples]:
    """All calls taking turns, in about `budget_ms` of device time for each of them."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def one_round() -> list[tuple[torch.cuda.Event, torch.cuda.Event, float]]:
        events = []
        for call in calls.values():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.zero_()
            start.record()
            before = time.perf_counter()
            call()
            host = time.perf_counter() - before
            end.record()
            events.append((start, end, host * 1e3))
        torch.cuda.synchronize()  # a full queue would hold the host up
        return events

    for _ in range(WARM_UPS):
        events = one_round()
    round_ms = events[0][0].elapsed_time(events[-1][1])
    rounds = [one_round() for _ in range(_rounds("cuda", budget_ms * len(calls) / round_ms))]
    return {
        name: Samples([row[i][0].elapsed_time(row[i][1]) for row in rounds], [row[i][2] for row in rounds])
        for i, name in enumerate(calls)
    }


def time_on_cpu(calls: Calls, budget_ms: float) -> dict[str, Samples]:
    """The same without a device: a call is over when it returns."""
    times: dict[str, list[float]] = {name: [] for name in calls}

    def one_round() -> float:
        began = time.perf_counter()
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - before) * 1e3)
        return (time.perf_counter() - began) * 1e3

    round_ms = one_round()
    for samples in times.values():
        samples.clear()
    for _ in range(_rounds("cpu", budget_ms * len(calls) / round_ms)):
        one_round()
    return {name: Samples(ms, ms) for name, ms in times.items()}


def _rounds(device: str, affordable: float) -> int:
    least, most = ROUNDS[device]
    return min(most, max(least, int(affordable)))


def peak_bytes(call: Callable[[], object]) -> int:
    """What MEMORY says; CUDA only."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def measure_ceilings(timer: Timer, device: str) -> Ceilings:
    """The rates of a matrix product (bf16; on a CPU fp32) and of a copy: the two ceilings of the roofline."""
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
    """A row for each candidate. Only those whose results pass the check are given to `timer`; without one they are only checked."""
    rows: dict[str, Row] = {}
    timed: dict[str, Callable[[], object]] = {}
    for candidate in candidates:
        name = candidate.name
        rows[name] = Row(name, candidate.version, workload.name, direction, "checked")
        with warnings.catch_warnings(record=True) as said:  # SDPA gives its reasons as warnings
            warnings.simplefilter("always")
            try:
                prepared = candidate.prepare(workload, tensors, direction)
                results = prepared.results()
            except Exception as e:  # whatever keeps a peer from running is its row in the table
                rows[name] = rows[name]._replace(status="refused", reason=_reason(e, [str(w.message) for w in said]))
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
        q1, median, q3 = statistics.quantiles(samples.ms, n=4, method="inclusive")
        tflops, gb_s = work.flops / median * 1e-9, work.bytes / median * 1e-6
        rows[name] = rows[name]._replace(
            status="measured",
            calls=len(samples.ms),
            us=median * 1e3,
            us_q1=q1 * 1e3,
            us_q3=q3 * 1e3,
            tflops=tflops,
            gb_s=gb_s,
            share=tflops / ceilings.matmul_tflops,
            roofline_share=tflops / roofline(work, ceilings.matmul_tflops, ceilings.copy_gb_s).attainable_tflops,
            host_us=statistics.median(samples.host_ms) * 1e3,
            host_us_p99=statistics.quantiles(samples.host_ms, n=100, method="inclusive")[-1] * 1e3,
            peak_mib=memory[name] / 2**20 if name in memory else None,
        )
    return list(rows.values())


def _reason(e: Exception, warned: Sequence[str]) -> str:
    """One line: what was raised, and what was warned of before."""
    head = str(e) if isinstance(e, Unavailable) else f"{type(e).__name__}: {e}"
    return "; ".join(" ".join(text.split())[:300] for text in dict.fromkeys([head, *warned]))
