"""The benchmark without a GPU: counts, records, comparisons and messages; if a result is wrong, it is not timed."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn.bench import check, command, counts, implementations, peers, record, run
from flexattn.bench import measure as bench_measure
from flexattn.bench.check import Checker
from flexattn.bench.counts import Work, visible_pairs, work
from flexattn.bench.implementations import Implementation, Prepared, Unavailable, differentiable
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.measure import Calls, Samples, measure, time_on_cpu, time_on_device
from flexattn.bench.record import Ceilings, Record, Row
from flexattn.bench.shapes import DIRECTIONS, MODS, PRESETS, WORKLOADS, Workload, dense, log_normal_lengths, select, sweep
from flexattn.bench.tables import compare, figure, pairs, standings, tables, verdict
from flexattn.dispatch.spec import Band, make_band
from tests.conftest import FreshPython

CEILINGS = Ceilings(800.0, 8192, "bfloat16", 4000.0, 2**30)
MILLISECONDS = [3.0, 1.0, 2.0, 5.0, 4.0]  # the fake timer's measurements: the quartiles are 2, 3 and 4
HOST_MILLISECONDS = [0.03, 0.01, 0.02, 0.05, 0.04]


class FakeTimer:
    """Measures MILLISECONDS for everything, and remembers each request."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def __call__(self, calls: Calls) -> dict[str, Samples]:
        self.timed += calls
        return dict.fromkeys(calls, Samples(MILLISECONDS, HOST_MILLISECONDS))


class CallingTimer(FakeTimer):
    """Makes the calls too."""

    def __call__(self, calls: Calls) -> dict[str, Samples]:
        for call in calls.values():
            call()
        return super().__call__(calls)


# Counts


def test_work_of_a_square_by_hand() -> None:
    full = sweep(128, "full", 1024)
    assert (full.batch, full.num_heads) == (16, 16)
    assert work(full, "forward") == Work(
        2**37, 4 * 2**26
    )  # 4 * 16 * 16 * 1024 * 1024 * 128; 16 * 1024 * 16 * 128 elements of 2 bytes
    causal = sweep(128, "causal", 1024)
    assert work(causal, "forward") == Work(2**36, 4 * 2**26)
    assert work(causal, "backward") == Work(2.5 * 2**36, 8 * 2**26)
    assert work(causal, "both") == Work(3.5 * 2**36, 12 * 2**26)
    assert counts.kernel_work(full, "forward") == work(full, "forward")
    # q k^T, dout v^T and ds k; then the first two again, p^T dout and ds^T q
    assert counts.kernel_work(full, "dq").flops + counts.kernel_work(full, "dkdv").flops == (3 + 4) * 2**36


@pytest.mark.parametrize(
    ("len_q", "len_kv", "mask", "window", "pairs"),
    [
        (4, 4, "no_mask", (-1, -1), 16),
        (4, 4, "causal", (-1, -1), 8),  # 1 + 2 + 3 + 4, less half of the diagonal
        (2, 6, "causal", (-1, -1), 2),  # top-left: 1 + 2, less 1
        (2, 6, "causal_bottom_right", (-1, -1), 10),  # 5 + 6, less 1
        (6, 2, "causal", (-1, -1), 10),  # 1 + 2 + 2 + 2 + 2 + 2, less half of the 2 rows that have a diagonal
        (6, 2, "causal_bottom_right", (-1, -1), 2),  # the first 4 rows see nothing
        (6, 6, "causal", (2, 0), 15),  # 1 + 2 + 3 + 3 + 3 + 3, exact
        (6, 6, "no_mask", (1, 1), 16),  # 2 + 3 + 3 + 3 + 3 + 2
        (2, 6, "causal_bottom_right", (2, 0), 6),
        (1, 8, "no_mask", (-1, -1), 8),
    ],
)
def test_visible_pairs_by_hand(len_q: int, len_kv: int, mask: str, window: tuple[int, int], pairs: float) -> None:
    assert visible_pairs(len_q, len_kv, make_band(mask, window, None)) == pairs


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(0, 20), st.none() | st.integers(0, 20), st.booleans())
def test_visible_pairs_are_those_of_the_mask(
    len_q: int, len_kv: int, left: int | None, right: int | None, bottom_right: bool
) -> None:
    i, j = torch.arange(len_q)[:, None], torch.arange(len_kv)
    distance = j - i - (len_kv - len_q if bottom_right else 0)
    seen = torch.ones(len_q, len_kv, dtype=torch.bool)
    seen &= distance >= -left if left is not None else seen
    seen &= distance <= right if right is not None else seen
    half_diagonal = 0.5 * int((distance == 0).sum()) if left is None and right == 0 else 0.0
    assert visible_pairs(len_q, len_kv, Band(left, right, bottom_right)) == int(seen.sum()) - half_diagonal


def test_work_with_grouped_heads_uneven_dims_and_ragged_lengths_by_hand() -> None:
    shape = Workload("x", "x", (3, 5), (3, 5), 8, 2, 192, 128, attn_mask_type="padding_causal", qkv_format="thd")
    pairs = 3 * 3 / 2 + 5 * 5 / 2
    assert work(shape, "forward").flops == 2 * 8 * (192 + 128) * pairs
    tensors = 2 * (8 * 8 * 192 + 8 * 2 * 192 + 8 * 2 * 128 + 8 * 8 * 128)  # 8 tokens: q, k, v, out in bf16
    assert work(shape, "forward").bytes == tensors
    assert work(shape, "backward") == Work(2.5 * 2 * 8 * 320 * pairs, 2 * tensors)
    decode = Workload("y", "y", (1,) * 4, (100,) * 4, 8, 2, 64, 64)
    assert decode.directions == ("forward",)
    assert shape.directions == DIRECTIONS
    assert work(decode, "forward") == Work(2 * 8 * 128 * 400, 2 * (2 * 4 * 8 * 64 + 2 * 400 * 2 * 64))
    assert counts.kernel_work(shape, "dkdv").flops == 2 * 8 * (2 * 192 + 2 * 128) * pairs


def test_roofline_by_hand() -> None:
    found = counts.roofline(Work(1e12, 1e9), matmul_tflops=800.0, copy_gb_s=4000.0)
    assert (found.intensity, found.ridge, found.attainable_tflops, found.bound) == (1000.0, 200.0, 800.0, "matrix products")
    found = counts.roofline(Work(1e11, 1e9), matmul_tflops=800.0, copy_gb_s=4000.0)
    assert (found.attainable_tflops, found.bound) == (400.0, "memory")


# Workloads


def test_the_sweep_keeps_tokens_and_width() -> None:
    shapes = select(["sweep"])
    assert len(shapes) == 36
    for w in shapes:
        assert (w.batch * w.seqlen_q, w.num_heads * w.head_dim_qk) == (16384, 2048)
        # so the operations double with the length, at every head dim
        assert work(w, "forward").flops == 2**35 * (w.seqlen_q / 512) * (1 if w.is_causal else 2)


def test_every_workload_is_one() -> None:
    for name, w in WORKLOADS.items():
        assert w.name == name
        assert len(w.lengths_q) == len(w.lengths_kv) == w.batch
        assert w.num_heads % w.num_heads_kv == 0
        assert w.is_ragged or len(set(w.lengths_q)) == len(set(w.lengths_kv)) == 1
        small = w.shortened(40)
        assert small.seqlen_q <= 40
        assert (small.head_dim_qk, small.attn_mask_type, small.score) == (w.head_dim_qk, w.attn_mask_type, w.score)
    assert {"sweep", "models", "long", "ragged", "decode", "small", "score_mods", "odd", "older", "published"} == {
        w.group for w in WORKLOADS.values()
    }


def test_log_normal_lengths_are_the_same_everywhere() -> None:
    lengths = log_normal_lengths()
    assert (sum(lengths), len(lengths), max(lengths)) == (32768, 29, 8192)
    assert lengths == WORKLOADS["ragged-log-normal"].lengths_q == log_normal_lengths()
    for name in ("ragged-log-normal", "ragged-documents"):
        packed, even = WORKLOADS[name], WORKLOADS[f"{name}-evened"]
        assert abs(sum(even.lengths_q) / sum(packed.lengths_q) - 1) < 0.1
        assert abs(work(even, "forward").flops / work(packed, "forward").flops - 1) < 0.1
    assert sorted(lengths)[len(lengths) // 2] < sum(lengths) / len(lengths)  # skewed, like documents


def test_shapes_are_chosen_by_name_pattern_and_preset() -> None:
    assert [w.name for w in select(["long-128k", "small-*"])] == ["long-128k", "small-s128", "small-s256", "small-s512"]
    assert {w.name for w in select(["standard"])} == {
        w.name for w in WORKLOADS.values() if w.group not in ("odd", "older", "published")
    }
    assert all(select([preset]) for preset in PRESETS)
    with pytest.raises(ValueError, match=r"no workload is called 'llama'; accepted: .*presets tiny, quick"):
        select(["llama"])


# Check, then time


@pytest.fixture
def small() -> tuple[Workload, Tensors]:
    """2 sequences of 32 tokens, causal, 4 heads over 2 of 16."""
    shape = dense("small", "small", 2, 32, (4, 2), (16, 16), attn_mask_type="causal")
    return shape, make_tensors(shape, "cpu")


def sdpa(spoil: str = "", change: Callable[[Tensor], None] = lambda t: None) -> Callable[[Workload, Tensors, str], Prepared]:
    """Plain SDPA on bhsd, with a change to one of its results."""
    sound = differentiable(functools.partial(peers._sdpa, "MATH"), peers.contiguous_bhsd, peers.bhsd_view)

    def prepare(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        prepared = sound(workload, tensors, direction)

        def results() -> Mapping[str, Tensor]:
            found = {name: t.clone() for name, t in prepared.results().items()}
            if spoil in found:
                change(found[spoil])
            return found

        return prepared._replace(results=results)

    return prepare


def nudge_last(t: Tensor) -> None:
    t[-1, -1, -1, -1] += 0.5


def nan_elsewhere(t: Tensor) -> None:
    t[0, 0, 0, 0] = float("nan")


def refuses(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    warnings.warn("head dims above 4 are not for us", stacklevel=1)
    raise RuntimeError("No available kernel.\nAborting execution.")


def refuses_as_sdpa_does(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    noise = " (Triggered internally at sdp_utils.cpp:986.)"
    texts = ("Memory efficient kernel not used because:", "Memory Efficient attention has been runtime disabled.")
    for text in (*texts, "head dims differ, says /usr/lib/python3/torch/sdp.py"):
        warnings.warn(text + noise, stacklevel=1)
    raise RuntimeError("No available kernel.")


def missing(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    raise Unavailable("flash-attn-9 is not installed")


@pytest.mark.parametrize(
    ("direction", "spoil"), [("forward", "out"), ("backward", "dq"), ("backward", "dk"), ("both", "dv"), ("both", "out")]
)
def test_what_is_wrong_is_never_timed(direction: str, spoil: str, small: tuple[Workload, Tensors]) -> None:
    shape, tensors = small
    candidates = [
        Implementation("right", "1", sdpa()),
        Implementation("wrong", "2", sdpa(spoil, nudge_last)),
        Implementation("nan", "3", sdpa(spoil, nan_elsewhere)),
        Implementation("refuses", "4", refuses),
        Implementation("missing", "5", missing),
        Implementation("sdpa", "6", refuses_as_sdpa_does),
    ]
    timer, counted = FakeTimer(), work(shape, direction)
    right, *others = measure(shape, direction, candidates, tensors, Checker(shape, tensors), counted, CEILINGS, timer)
    assert timer.timed == ["right"]
    assert [row.status for row in others] == ["wrong", "wrong", "refused", "refused", "refused"]
    assert all(figure is None for row in others for figure in row[Row._fields.index("calls") :])
    assert "max error" in (others[0].reason or "")
    assert "not finite" in (others[1].reason or "")
    assert others[2].reason == "RuntimeError: No available kernel. Aborting execution.; head dims above 4 are not for us"
    assert others[3].reason == "flash-attn-9 is not installed"
    assert others[4].reason == "RuntimeError: No available kernel.; head dims differ, says sdp.py"
    assert (right.status, right.calls, right.us_q1, right.us, right.us_q3) == ("measured", 5, 2000.0, 3000.0, 4000.0)
    assert right.tflops == pytest.approx(counted.flops / 3e-3 / 1e12)
    assert right.gb_s == pytest.approx(counted.bytes / 3e-3 / 1e9)
    assert right.share == pytest.approx((right.tflops or 0.0) / 800.0)
    attainable = min(800.0, 4.0 * counted.flops / counted.bytes)
    assert right.roofline_share == pytest.approx((right.tflops or 0.0) / attainable)
    assert (right.host_us, right.host_us_p99) == (pytest.approx(30.0), pytest.approx(49.6))  # p50, p99 of 10, 20, 30, 40 and 50


def test_nothing_right_is_no_timing_at_all(small: tuple[Workload, Tensors]) -> None:
    shape, tensors = small
    wrong = [Implementation("wrong", "1", sdpa("out", nudge_last))]
    never = functools.partial(pytest.fail, "timed")
    [row] = measure(shape, "forward", wrong, tensors, Checker(shape, tensors), Work(1.0, 1.0), CEILINGS, lambda _: never())
    assert "wrong: out" in run.line(row)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-oss-window-s8192", "score-relative-bias", "ragged-log-normal", "decode-kv2048", "sweep-d64-full-s512"),
        *("models-gpt-oss-window", "models-modernbert-window", "models-alphafold3-triangle-two", "models-qwen-image"),
    ],
)
def test_the_reference_in_blocks_is_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = WORKLOADS[name].shortened(60, 3, 4)._replace(dtype="float32")
    tensors = make_tensors(shape, "cpu")
    whole = Checker(shape, tensors)
    expected = [whole._forward[0], whole._backward[0]]
    monkeypatch.setattr(check, "REFERENCE_SCORES", 1500)
    blocks = Checker(shape, tensors)
    for found, ref in zip([blocks._forward[0], blocks._backward[0]], expected, strict=True):
        for result, t in found.items():
            torch.testing.assert_close(t, ref[result], rtol=1e-12, atol=1e-13)


# Shapes that between them have every feature, cut to sizes that a CPU computes in a moment.
FEATURES = [
    "gpt-oss-window-s8192",
    "score-softcap",
    "score-alibi",
    "score-relative-bias",
    "score-document-mask",
    "decode-kv2048",
    "deepseek-v3-s4096",
]


@pytest.mark.parametrize("name", FEATURES)
def test_flexattn_and_peers_agree_with_the_reference(name: str) -> None:
    """Each workload's arguments, masks and score_mods mean the same to all; if SDPA cannot express one, it refuses."""
    shape = WORKLOADS[name].shortened(40, 2, 4)
    tensors = make_tensors(shape, "cpu")
    everyone = {i.name: i for i in (*implementations.ours("cpu"), *peers.peers())}
    candidates = [everyone["flexattn eager"], everyone["SDPA math"]]
    for direction in shape.directions:
        ours, theirs = measure(shape, direction, candidates, tensors, Checker(shape, tensors), work(shape, direction), None, None)
        assert ours.status == "checked", ours
        can = not shape.is_ragged and shape.softmax_type == "vanilla" and shape.score != "softcap"
        assert theirs.status == ("checked" if can else "refused"), theirs


@pytest.mark.parametrize("name", FEATURES)
def test_flex_attention_gets_the_same_masks_and_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f)  # the meaning is the same, and a CPU does not compile all of it
    shape = WORKLOADS[name].shortened(40, 2, 4)
    tensors = make_tensors(shape, "cpu")
    [flex] = [i for i in peers.peers() if i.name == peers.FLEX]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is not compiled
        [row] = measure(shape, "forward", [flex], tensors, Checker(shape, tensors), work(shape, "forward"), None, None)
    assert row.status == "checked", row


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.group == MODS])
def test_scores_and_masks_as_functions(name: str) -> None:
    shape = WORKLOADS[name].shortened(40, 2, 4)
    tensors = make_tensors(shape, "cpu")
    prepare = implementations.differentiable(implementations._attention_with_mods)
    for direction in shape.directions:
        Checker(shape, tensors).check(direction, prepare(shape, tensors, direction).results())


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
@pytest.mark.parametrize("name", ["gpt-oss-window-s8192", "score-relative-bias", "ragged-documents"])
def test_our_launchers_and_each_kernel_alone(name: str) -> None:
    """The Triton path of a GPU, in the interpreter: through attention(), by the launchers, and one kernel by itself."""
    shape = WORKLOADS[name].shortened(24, 2 if name.startswith("ragged") else 1, 2)
    tensors = make_tensors(shape, "cpu")
    [triton] = [i for i in implementations.ours("cuda") if i.name == implementations.TRITON]
    checker = Checker(shape, tensors)
    for kernel, (direction, _) in implementations.KERNELS.items():
        launchers = implementations.committed_launchers({kernel: implementations.committed_tile(kernel, shape, 0)})
        alone = Implementation("alone", "1", functools.partial(implementations.one_kernel, kernel, launchers))
        whole = Implementation("whole", "1", functools.partial(implementations.with_launchers, launchers))
        timer = CallingTimer()
        rows = measure(shape, direction, [alone, whole, triton], tensors, checker, work(shape, direction), CEILINGS, timer)
        assert [row.status for row in rows] == ["measured"] * 3, rows
        assert timer.timed == ["alone", "whole", triton.name]


def test_a_backend_that_cannot_says_so_in_its_cell(small: tuple[Workload, Tensors]) -> None:
    shape, tensors = small
    broken = shape._replace(head_dim_qk=12, head_dim_v=12)  # no multiple of 8
    [triton] = [i for i in implementations.ours("cuda") if i.name == implementations.TRITON]
    tensors = make_tensors(broken, "cpu")
    [row] = measure(broken, "forward", [triton], tensors, Checker(broken, tensors), work(broken, "forward"), None, None)
    assert row.status == "refused"
    assert row.reason is not None
    assert row.reason.startswith("triton: the head dim of q and k is 12; the kernels support multiples of 8")
    assert "eager:" not in row.reason  # the reasons of untried backends


class SlowHost:
    """A device with a queue, and a host that takes longer to fill it than the device to empty it; times in seconds."""

    FLUSH, ENQUEUE = 250e-6, 5e-6

    def __init__(self) -> None:
        self.host = self.device = 0.0  # the current time, and the time until which the device is busy
        self.flushes = 0
        cuda = SimpleNamespace(Event=lambda enable_timing: FakeEvent(self), synchronize=self.synchronize)
        self.torch = SimpleNamespace(cuda=cuda, empty=lambda *_, **__: SimpleNamespace(zero_=self.flush), int8=torch.int8)
        self.time = SimpleNamespace(perf_counter=lambda: self.host)

    def work(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def flush(self) -> None:
        self.flushes += 1
        self.work(self.ENQUEUE, self.FLUSH)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)


class FakeEvent:
    def __init__(self, machine: SlowHost) -> None:
        self.machine, self.at = machine, 0.0

    def record(self) -> None:
        self.machine.work(self.machine.ENQUEUE, 0.0)
        self.at = self.machine.device

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at - self.at) * 1e3


def test_a_slow_host_is_not_in_the_devices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SlowHost()
    monkeypatch.setattr(bench_measure, "torch", machine.torch)
    monkeypatch.setattr(bench_measure, "time", machine.time)
    calls = {"slow host": lambda: machine.work(1e-3, 50e-6), "slow device": lambda: machine.work(20e-6, 3e-3)}
    found = time_on_device(calls, 30.0)
    assert found["slow host"].ms == pytest.approx([0.05] * len(found["slow host"].ms))
    assert found["slow device"].ms == pytest.approx([3.0] * len(found["slow device"].ms))
    assert found["slow host"].host_ms == pytest.approx([1.0] * len(found["slow host"].host_ms))
    assert found["slow device"].host_ms == pytest.approx([0.02] * len(found["slow device"].host_ms))
    assert machine.flushes == 3 + (8 + 1) * (1 + len(found["slow host"].ms))  # 2 ms of a head start; one is enough for the other


def test_time_on_a_cpu_is_the_calls_own() -> None:
    samples = time_on_cpu({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.02)}, 40.0)
    assert len(samples["short"].ms) == len(samples["long"].ms) >= 3
    assert min(samples["long"].ms) >= 20.0  # sleep lasts at least so long
    assert samples["short"].host_ms == []  # it is the host's own time


# Runs and records


def plan(out: Path | None, **more: Any) -> run.Plan:
    shapes = [dense(f"s{s}", "small", 1, s, (2, 2), (16, 16), attn_mask_type="causal") for s in (16, 32)]
    candidates = [Implementation("flexattn eager", "1", sdpa()), Implementation("wrong", "2", sdpa("out", nudge_last))]
    settings = {"budget_ms": 1.0, "budget_s": 60.0, "out": out} | more
    return run.Plan("python -m flexattn bench", shapes, ("forward", "backward"), candidates, "cpu", **settings)


@pytest.mark.slow
def test_a_run_writes_every_cell_as_it_comes(tmp_path: Path) -> None:
    out, seen = tmp_path / "results" / "run.json", []

    def show(line: str) -> None:
        if out.exists():
            seen.append(len(record.read(out).rows))

    done = run.run(plan(out), show=show, timer=FakeTimer())
    assert sorted(set(seen)) == [2, 4, 6]  # 8 rows, two a cell; each cell is written before the next is shown
    assert record.read(out) == done._replace(left_out=[])
    assert (done.complete, len(done.rows), done.cells()[0]) == (True, 8, ("s16", "forward"))
    assert done.ceilings is not None
    assert done.ceilings["matmul_size"] == 1024
    assert {"check", "flops", "bytes", "time", "peers", "inputs"} <= done.method.keys()
    assert {"flexattn", "python", "torch", "triton", "cudnn"} <= done.versions.keys()
    assert done.device["type"] == "cpu"
    assert not list(out.parent.glob("*.partial"))


def test_mods_are_asked_only_for_what_is_written_with_them() -> None:
    plain, scored = plan(None).workloads[0], plan(None).workloads[1]._replace(group=MODS)
    both = plan(None)._replace(workloads=[plain, scored], directions=["forward"])
    mod = Implementation("mod", "1", missing, serves=lambda workload, direction: workload.group == MODS)
    candidates = [Implementation("flexattn eager", "1", sdpa()), mod]
    done = run.run(both._replace(implementations=candidates), show=lambda _: None, timer=FakeTimer())
    assert [(r.workload, r.implementation) for r in done.rows] == [
        ("s16", "flexattn eager"),
        ("s32", "flexattn eager"),
        ("s32", "mod"),
    ]


def test_rivals_are_measured_where_a_result_has_them_near_the_fastest_peer() -> None:
    earlier = run.run(plan(None), show=lambda _: None, timer=FakeTimer())
    times = {"near": 12.0, "fast": 10.0, "far": 13.0, "flexattn eager": 1.0}
    row = next(row for row in earlier.rows if row.us is not None)._replace(workload="s16", direction="forward")
    earlier = earlier._replace(rows=[row._replace(implementation=peer, us=us) for peer, us in times.items()])
    cells = {("s16", "forward"), ("s16", "backward"), ("s32", "forward")}  # the record has the first one alone
    workloads = {w.name: w for w in plan(None).workloads}
    for name, left_out in (("fast", set()), ("near", set()), ("far", {("s16", "forward")}), ("no row", set())):
        rival = command._as_rival(Implementation(name, "1", missing), [earlier])
        assert {cell for cell in cells if rival.serves(workloads[cell[0]], cell[1])} == cells - left_out, name


def test_a_spent_budget_leaves_out_and_says_what(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = run.run(plan(out, budget_s=-1.0), show=lambda _: None, timer=FakeTimer())
    assert not done.rows
    assert not done.complete
    assert [(x["workload"], x["direction"]) for x in done.left_out] == [
        *(("s16", d) for d in ("forward", "backward")),
        *(("s32", d) for d in ("forward", "backward")),
    ]
    assert "budget" in done.left_out[0]["reason"]
    assert record.read(out).left_out == list(done.left_out)


def test_only_checking_times_nothing() -> None:
    done = run.run(plan(None, only_check=True), show=lambda _: None, timer=lambda _: pytest.fail("timed"))
    assert {row.status for row in done.rows} == {"checked", "wrong"}
    assert done.ceilings is None


def test_compiling_beforehand_runs_what_compiles_and_records_nothing(tmp_path: Path) -> None:
    ran: list[tuple[str, str, str]] = []

    def compiles(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        ran.append(("compiles", workload.name, direction))
        raise RuntimeError("what keeps it from running is for the run itself to say")

    def has_no_kernels(*_: Any) -> Prepared:
        return pytest.fail("prepared")

    candidates = [Implementation("a", "1", compiles, compiles=True), Implementation("b", "1", has_no_kernels)]
    run.compile_only(plan(tmp_path / "x.json")._replace(implementations=candidates))
    assert ran == [("compiles", shape, d) for shape in ("s16", "s32") for d in ("forward", "backward")]
    assert not list(tmp_path.iterdir())


def test_compiling_in_processes_shares_the_workloads_out(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    killed: list[int] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)
            self.n = len(started)

        def poll(self) -> int | None:
            return None if self.n == 2 else 0  # the second one hangs

        def kill(self) -> None:
            killed.append(self.n)

        def wait(self) -> None: ...

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    run.compile_in_processes(["--peers", "SDPA*"], ["a", "b", "c"], 2, 0.3)
    assert [command[command.index("bench") :] for command in started] == [
        ["bench", "--peers", "SDPA*", "--compile-only", "--shapes", "a", "c"],
        ["bench", "--peers", "SDPA*", "--compile-only", "--shapes", "b"],
    ]
    assert killed == [1, 2]


def test_compiling_alone_in_processes_measures_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[list[str], list[str], int, float]] = []

    def compile_in_processes(*given: Any) -> float:
        asked.append(given)
        return 3.0

    monkeypatch.setattr(command, "compile_in_processes", compile_in_processes)
    for name in ("run", "compile_only"):
        monkeypatch.setattr(command, name, lambda *_, **__: pytest.fail("ran in this process"))
    arguments = ["--shapes", "small-*", "--directions", "forward", "--peers", "SDPA flash", "--compile-only"]
    assert command.main([*arguments, "--compile-processes", "2", "--budget-s", "9"]) == 0
    same = ["--directions", "forward", "--backends", "eager", "--peers", "SDPA flash", "--flex-mode", "default"]
    assert asked == [(same, ["small-s128", "small-s256", "small-s512"], 2, 9.0)]
    assert "compiled in 2 processes: 3 s" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_is_readable(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    arguments = ["--shapes", "small-*", "--peers", "SDPA flash", "--budget-ms", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-m", "flexattn", "bench", *arguments], env=environment, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not out.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    found = record.read(out)
    assert found.rows
    assert all(row.workload in found.workloads for row in found.rows)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": []}'])
def test_what_is_no_result_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is no result file"):
        record.read(tmp_path / "x.json")
    (tmp_path / "y.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="has schema 99; this version reads schema 1"):
        record.read(tmp_path / "y.json")


def row(name: str, us: float | None, seqlen: int = 1024, **more: Any) -> Row:
    shape = sweep(128, "causal", seqlen)
    if us is None:
        return Row(name, "1", shape.name, "forward", **({"status": "refused", "reason": "too wide"} | more))
    figures = {"us": us, "us_q1": us - 5, "us_q3": us + 5, "tflops": 4e5 / us, "share": 500 / us, "gb_s": 1.0, "host_us": 9.0}
    return Row(name, "1", shape.name, "forward", "measured", **(figures | {"host_us_p99": 12.0, "calls": 9} | more))


def recorded(rows: list[Row], **more: Any) -> Record:
    shapes = {w.name: w for w in (sweep(128, "causal", s) for s in (1024, 2048, 4096))}
    facts = {"versions": {"torch": "2.11.0"}, "device": {"name": "NVIDIA H200", "type": "cuda", "capability": [9, 0]}} | more
    return Record(
        command="x", started=None, ceilings=CEILINGS._asdict(), method={"flops": counts.FLOPS}, workloads=shapes, rows=rows, **facts
    )


ROWS = [
    row("flexattn triton", 1000.0),
    row("SDPA cuDNN", None),
    row("FlexAttention", 2000.0),
    row("flexattn triton", 1000.0, 2048),
    row("FlexAttention", 800.0, 2048),
    row("FlexAttention", 800.0, 4096),
]


def test_tables() -> None:
    [table] = tables(recorded(ROWS))
    assert table.text().splitlines() == [
        "forward, head dim 128, causal",
        "                      1024       2048       4096",
        "flexattn triton  400 (50%)  400 (50%)          -",
        "FlexAttention    200 (25%)  500 (62%)  500 (62%)",
    ]
    assert table.markdown("TFLOP/s").splitlines()[2:4] == ["| TFLOP/s | 1024 | 2048 | 4096 |", "|---|---:|---:|---:|"]
    assert [figure(None), figure(ROWS[1]), figure(row("x", 4e5 / 0.0123))] == ["-", "refused", "0.012"]


def test_the_verdict_names_every_cell_that_is_lost() -> None:
    beside, slower = verdict(recorded(ROWS))
    assert beside.rows == [("FlexAttention", ["2", "1", "0", "1", "1.265", "0.800", "2.000"])]
    assert slower.title == "slower in 1 of 2 cells"
    assert slower.rows == [("sweep-d128-causal-s2048, forward", ["0.800", "FlexAttention"])]
    assert verdict(recorded(ROWS[:1])) == []
    assert standings(recorded(ROWS), "SDPA cuDNN") == []


def test_memory_and_host_times_have_tables_where_they_matter() -> None:
    shapes = [w._replace(group="memory") for w in select(["small-s256", "small-s512"])] + select(["small-s128"])
    peaks = {"flexattn triton": (64.0, 64.0), "SDPA math": (128.0, None)}
    rows = [
        row(name, 1.0, peak_mib=peak)._replace(workload=w.name)
        for name, both in peaks.items()
        for w, peak in zip(shapes, (*both, 1.0), strict=True)
    ]
    found = {t.title: t for t in tables(recorded(rows)._replace(workloads={w.name: w for w in shapes}))}
    assert set(found) == {
        *("forward, memory: peak MiB of a call", "forward, small"),
        "forward, small: host us to enqueue a call, median (99th percentile)",
    }
    memory, host = found["forward, memory: peak MiB of a call"], list(found.values())[-1]
    assert memory.columns == ["256", "512"]
    assert memory.rows == [("flexattn triton", ["64", "64"]), ("SDPA math", ["128", "measured"])]
    assert (host.columns, host.rows[0]) == (["small-s128"], ("flexattn triton", ["9 (12)"]))


def test_csv_has_how_it_was_made(tmp_path: Path) -> None:
    record.write_csv(tmp_path / "x.csv", recorded(ROWS))
    lines = (tmp_path / "x.csv").read_text().splitlines()
    about = [line for line in lines if line.startswith("#")]
    assert json.loads(next(line for line in about if line.startswith("# versions: "))[len("# versions: ") :]) == {"torch": "2.11.0"}
    found = list(csv.DictReader(lines[len(about) :]))
    assert [(r["implementation"], r["us"]) for r in found] == [(r.implementation, "" if r.us is None else str(r.us)) for r in ROWS]
    assert found[0]["shape"] == "b16 s1024 h16 d128 causal"


def test_compare_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = recorded(ROWS)
    b = recorded([row("flexattn triton", 500.0), row("FlexAttention", 2004.0), row("FlexAttention", 800.0, 2048)])
    assert [(p.a.implementation, round(p.ratio, 3), p.is_apart) for p in pairs(a, b)] == [
        ("flexattn triton", 0.5, True),
        ("FlexAttention", 1.002, False),
        ("FlexAttention", 1.0, False),
    ]
    for name, one in (("a.json", a), ("b.json", b)):
        record.write(tmp_path / name, one)
    assert command.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "sweep-d128-causal-s1024 forward flexattn triton  1000.0   500.0  0.500  *" in said
    assert "flexattn triton: B / A 0.500 (geometric mean of 1 cells)" in said
    assert "FlexAttention: B / A 1.001 (geometric mean of 2 cells)" in said
    assert "2 rows were measured in A alone" in said
    assert "devices differ" not in said


def test_rows_that_became_slower_beside_others_are_named() -> None:
    """The machine of b is 10 % faster, and flexattn's time is the same on both."""
    a = recorded([row("flexattn triton", 100.0), row("FlexAttention", 200.0), row("SDPA cuDNN", 300.0)])
    b = recorded([row("flexattn triton", 100.0), row("FlexAttention", 180.0), row("SDPA cuDNN", 270.0)])
    lines = [line for line in compare(a, b).splitlines() if line.startswith("slower")]
    assert lines == ["slower beside the others: sweep-d128-causal-s1024 forward flexattn triton 1.111"]
    assert "slower" not in compare(a, b._replace(rows=[r._replace(us=0.9 * (r.us or 0.0)) if r.us == 100.0 else r for r in b.rows]))


def test_only_the_same_workload_is_compared() -> None:
    a = recorded(ROWS)
    other = dict(a.workloads) | {name: w._replace(num_heads=8) for name, w in a.workloads.items()}
    with pytest.raises(ValueError, match="no implementation measured in the same workload"):
        compare(a, a._replace(workloads=other))
    assert "The devices differ" in compare(a, a._replace(device={"name": "another"}))


# The command


@pytest.mark.slow
def test_the_command_checks_measures_and_says_what_a_cpu_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "x.json"
    arguments = ["--shapes", "small-s128", "--directions", "forward", "--peers", "SDPA flash", "varlen*", "--budget-ms", "1"]
    assert command.main([*arguments, "--out", str(out), "--csv", str(tmp_path / "x.csv")]) == 0
    said = capsys.readouterr().out
    assert "No GPU here" in said
    assert re.search(r"SDPA flash +1( +[01]){3} +\d", said)
    found = record.read(out)
    assert [(r.implementation, r.status) for r in found.rows] == [
        ("flexattn eager", "measured"),
        ("SDPA flash", "measured"),
        ("varlen_attn", "refused"),
    ]
    assert found.command.startswith("python -m flexattn bench --shapes small-s128")
    assert f"--out bench/results/x.json --csv {tmp_path / 'x.csv'}" in found.command
    assert (tmp_path / "x.csv").exists()
    assert command.main([*arguments, "--check"]) == 0
    assert "Not timed: checked alone." in capsys.readouterr().out
    assert command.main(["--from", str(out)]) == 0
    assert "x.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "llama"], "no workload is called 'llama'"),
        (["--peers", "FA5"], "nothing to measure on .* is called 'FA5'; accepted: SDPA flash"),
        (["--backends", "magic"], "called 'magic'; accepted: "),
        (["--shapes", "small-*", "--seqlens", "7"], "longest sequence of 7"),
        (["--from", "no_such_file.json"], "no_such_file.json"),
        (["--emit-rows", "bench/results/eager_memory.json"], "supports no row"),
    ],
)
def test_errors_name_the_argument(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_list_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*WORKLOADS, *PRESETS, "flash-attn 4", "cuDNN frontend", "flexattn cudnn"))


def test_bench_needs_neither_matplotlib_nor_tqdm_nor_rich(forked_python: FreshPython, tmp_path: Path) -> None:
    blocked = dict.fromkeys(("matplotlib", "tqdm", "rich", "cudnn"))
    code = f"import sys; sys.modules.update({blocked!r}); from flexattn.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["bench", "--shapes", "small-s128", "--directions", "forward", "--peers", "SDPA flash", "--budget-ms", "1"]
    ran = forked_python("-c", code, *arguments, "--out", str(tmp_path / "x.json"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"small-s128 +forward +flexattn eager", ran.stdout)
    asked = forked_python("-c", code, "bench", "--from", str(tmp_path / "x.json"), "--plots", str(tmp_path))
    assert asked.returncode == 0
