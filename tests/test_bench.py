"""The benchmarks without a GPU: what is counted, that nothing wrong is timed, what is written, and the driver of all steps."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.rates import Cell, Implementation, Prepared, Row, Tensors, measure
from torch import Tensor

from bench import gpu_check, rates
from flexattn.kernels_triton import launch
from flexattn.kernels_triton.configs import Tile

MATMUL_TFLOPS = 800.0
MILLISECONDS = [3.0, 1.0, 2.0, 5.0, 4.0]  # what the fake timer measures: the quartiles are 2, 3 and 4


class FakeTimer:
    """Says MILLISECONDS of everything, and remembers what it was asked to time."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    def __call__(self, timed: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        self.timed += timed
        return dict.fromkeys(timed, MILLISECONDS)


def test_work_by_hand() -> None:
    full = Cell("forward", 128, False, 1024)
    assert (full.batch, full.heads) == (16, 16)
    assert full.work.flops == 2**37  # 4 * 16 * 16 * 1024 * 1024 * 128
    assert full.work.bytes == 4 * 2**26  # q, k, v, out of 16 * 1024 * 16 * 128 elements of 2 bytes
    assert full._replace(causal=True).work == (2**36, 4 * 2**26)
    assert full._replace(direction="backward").work == (2.5 * 2**37, 8 * 2**26)
    assert full._replace(direction="backward", causal=True).work == (2.5 * 2**36, 8 * 2**26)
    assert full.kernel_work("forward") == full.work
    # q k^T, dout v^T and ds k; then the first two again, p^T dout and ds^T q
    assert full.kernel_work("dq").flops + full.kernel_work("dkdv").flops == (3 + 4) * 2**36


@pytest.mark.parametrize("head_dim", rates.HEAD_DIMS)
@pytest.mark.parametrize("seqlen", rates.SEQLENS)
def test_the_sweep_keeps_tokens_and_width(head_dim: int, seqlen: int) -> None:
    cell = Cell("forward", head_dim, True, seqlen)
    assert (cell.batch * cell.seqlen, cell.heads * cell.head_dim) == (16384, 2048)
    # so the operations double with the length, at every head dim
    assert cell.work.flops == 2**35 * (seqlen / 512)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Cell, Tensors]]:
    """small(direction): a causal cell of 2 sequences of 32 tokens and 2 heads of 16, and its inputs."""
    monkeypatch.setattr(rates, "TOKENS", 64)
    monkeypatch.setattr(rates, "MODEL_DIM", 32)

    def make(direction: str) -> tuple[Cell, Tensors]:
        cell = Cell(direction, 16, True, 32)
        return cell, rates.make_tensors(cell, "cpu")

    return make


def sdpa(spoil: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[[Cell, Tensors], Prepared]:
    """Plain SDPA on bhsd, with something done to the last of its results."""
    prepare = rates.differentiable(
        lambda cell: lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal), "bhsd"
    )

    def prepare_and_spoil(cell: Cell, tensors: Tensors) -> Prepared:
        prepared = prepare(cell, tensors)

        def results() -> Sequence[Tensor]:
            *others, last = prepared.results()
            return [*others, spoil(last.clone())]

        return prepared._replace(results=results)

    return prepare_and_spoil


def nudged(t: Tensor) -> Tensor:
    t[-1, -1, -1, -1] += 0.5
    return t


def nan_elsewhere(t: Tensor) -> Tensor:
    t[0, 0, 0, 0] = float("nan")
    return t


def refuses(cell: Cell, tensors: Tensors) -> Prepared:
    warnings.warn("head dims above 4 are not for us", stacklevel=1)
    raise RuntimeError("No available kernel.\nAborting execution.")


@pytest.mark.parametrize("direction", rates.DIRECTIONS)
def test_what_is_wrong_is_never_timed(direction: str, small: Callable[[str], tuple[Cell, Tensors]]) -> None:
    cell, tensors = small(direction)
    candidates = [
        Implementation("right", "1", sdpa()),
        Implementation("wrong", "2", sdpa(nudged)),
        Implementation("nan", "3", sdpa(nan_elsewhere)),
        Implementation("refuses", "4", refuses),
    ]
    timer = FakeTimer()
    right, *others = measure(cell, candidates, tensors, rates.checker(cell, tensors), timer, MATMUL_TFLOPS)
    assert timer.timed == ["right"]
    assert [row.status for row in others] == ["wrong", "wrong", "refused"]
    assert all(figure is None for row in others for figure in row[Row._fields.index("calls") :])
    assert "max error" in (others[0].reason or "")
    assert "not finite" in (others[1].reason or "")
    assert others[2].reason == "RuntimeError: No available kernel. Aborting execution.; head dims above 4 are not for us"
    assert (right.calls, right.us_q1, right.us, right.us_q3) == (5, 2000.0, 3000.0, 4000.0)
    assert right.tflops == pytest.approx(cell.work.flops / 3e-3 / 1e12)
    assert right.gb_s == pytest.approx(cell.work.bytes / 3e-3 / 1e9)
    assert right.share == pytest.approx((right.tflops or 0.0) / MATMUL_TFLOPS)


def test_nothing_right_is_no_timing_at_all(small: Callable[[str], tuple[Cell, Tensors]]) -> None:
    cell, tensors = small("forward")
    check = rates.checker(cell, tensors)
    [row] = measure(
        cell, [Implementation("wrong", "1", sdpa(nudged))], tensors, check, lambda _: pytest.fail("timed"), MATMUL_TFLOPS
    )
    assert "wrong: out" in str(row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's tiles are measured there, not interpreted")
@pytest.mark.parametrize("kernel", rates.KERNELS)
def test_our_kernels_with_other_tiles_and_alone(kernel: str, small: Callable[[str], tuple[Cell, Tensors]]) -> None:
    cell, tensors = small(rates.KERNELS[kernel][0])
    args = rates.parse(["--head-dims", "16", "--seqlens", "32", "--masks", "causal", "--sweep", f"{kernel}=16x16x4x1,32x32x4x1"])
    [(swept, candidates, work)] = rates.groups(args, "cpu")
    assert (swept, work) == (cell, cell.kernel_work(kernel))
    assert [c.name for c in candidates] == [f"{kernel} 32x32x4x1 committed", f"{kernel} 16x16x4x1"]  # the committed one only once
    shape = ["--head-dims", "16", "--seqlens", "32", "--masks", "causal", "--directions", cell.direction]
    args = rates.parse([*shape, "--tiles", f"{kernel}=16x32x4x1"])
    [(_, everyone, _)] = rates.groups(args, "cpu")
    assert [i.name for i in everyone] == ["flexattn", f"{kernel}=16x32x4x1", "SDPA flash", "SDPA cuDNN", "FlexAttention"]

    seen = []

    def timer(timed: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        for name, call in timed.items():
            call()
            seen.append(name)
        return FakeTimer()(timed)

    ours = [*candidates, *everyone[:2]]
    rows = measure(cell, ours, tensors, rates.checker(cell, tensors), timer, MATMUL_TFLOPS)
    assert [row.status for row in rows] == ["measured"] * 4, rows
    assert seen == [i.name for i in ours]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's tiles are measured there, not interpreted")
def test_a_kernel_alone_is_launched_with_its_tile(
    small: Callable[[str], tuple[Cell, Tensors]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Any, ...]] = []
    original = launch.launch
    monkeypatch.setattr(launch, "launch", lambda *arguments: launched.append(arguments) or original(*arguments))
    tile = Tile(16, 64, 4, 1)
    prepared = rates.one_kernel("dkdv", tile, *small("backward"))
    prepared.results()
    launched.clear()
    prepared.timed()
    [(kernel, _, _, its_tile, _)] = launched
    assert (kernel.__name__, its_tile) == ("_attn_bwd_dkdv_kernel", tile)


def test_tiles_are_read() -> None:
    assert rates.parse_tiles("dq=64x64x4x2,128x64x8x1") == ("dq", [Tile(64, 64, 4, 2), Tile(128, 64, 8, 1)])
    for text in ("dq", "dq=", "dq=64x64x4", "dq=64x64x4xtwo", "dv=64x64x4x2"):
        with pytest.raises(argparse.ArgumentTypeError, match="accepted: forward, dq, dkdv"):
            rates.parse_tiles(text)
    with pytest.raises(SystemExit):
        rates.parse(["--tiles", "dq=64x64x4x2,128x64x8x1"])


def row(name: str, us: float | None, seqlen: int = 1024, **more: Any) -> Row:
    cell = Cell("forward", 128, True, seqlen)
    measured = {} if us is None else {"us": us, "tflops": 4e5 / us, "share": 500 / us}
    status = "refused" if us is None else "measured"
    return Row(name, "1", *cell, cell.batch, cell.heads, status, **(measured | more))


ROWS = [
    row("flexattn", 1000.0),
    row("SDPA cuDNN", None, reason="too wide"),
    row("FlexAttention", 2000.0),
    row("flexattn", 1000.0, 2048),
    row("FlexAttention", 800.0, 2048),
    row("FlexAttention", 800.0, 4096),
]


def test_tables() -> None:
    assert rates.tables(ROWS).splitlines() == [
        "forward, head dim 128, causal: TFLOP/s (share of the matrix product)",
        "                      s1024         s2048         s4096",
        "flexattn          400 (50%)     400 (50%)             -",
        "SDPA cuDNN          refused             -             -",
        "FlexAttention     200 (25%)     500 (62%)     500 (62%)",
    ]


def test_the_verdict_names_every_cell_that_is_lost() -> None:
    assert rates.verdict(ROWS).splitlines() == [
        "faster than FlexAttention in 1 of the 2 cells where both were measured",
        "  forward d128 causal s2048: 1.25 times its time",
    ]
    assert rates.verdict(ROWS, "SDPA cuDNN") == "faster than SDPA cuDNN in 0 of the 0 cells where both were measured"


def test_what_is_written_says_how_it_was_made(tmp_path: Path) -> None:
    out = tmp_path / "results" / "rates.json"
    rates.write(out, "python -m bench.rates --quick", 790.5, ROWS, kernels=False)
    result = json.loads(out.read_text())
    assert result["command"] == "python -m bench.rates --quick"
    assert result["flops"] == rates.FLOPS
    assert result["matmul"] == {"shape": [8192, 8192, 8192], "tflops": 790.5}
    assert {"flexattn", "torch", "triton", "cuda", "cudnn", "python"} == result["versions"].keys()
    assert [Row(**found) for found in result["rows"]] == ROWS
    with out.with_suffix(".csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["name"], r["us"]) for r in found] == [(r.name, "" if r.us is None else str(r.us)) for r in ROWS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there to be measured")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert rates.main(["--quick", "--out", str(tmp_path / "rates.json")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def python(name: str, code: str, seconds: float = 30.0, **environment: str) -> gpu_check.Step:
    return gpu_check.Step(name, [sys.executable, "-c", code], seconds, environment)


def test_each_step_runs_whatever_became_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    todo = [
        python("fails", "print('1 failed, 2 passed in 3.21s'); raise SystemExit(3)"),
        python("hangs", "import time; print('still here', flush=True); time.sleep(60)", 1.5),
        gpu_check.Step("missing", ["/no/such/program"], 10.0),
        python("works", "import os; print('ERROR SUMMARY:', os.environ['GIVEN'], 'errors')", GIVEN="0"),
    ]
    outcomes = gpu_check.check(todo, out, 60.0)
    assert [outcome.status for outcome in outcomes] == ["failed (3)", "timed out", "failed (not started)", "ok"]
    assert [o.last_words for o in outcomes[::3]] == ["1 failed, 2 passed in 3.21s", "ERROR SUMMARY: 0 errors"]
    assert outcomes[1].last_words == "still here"
    assert outcomes[1].seconds < 30
    assert (out / "summary.txt").read_text() == gpu_check.table(outcomes) + "\n"
    assert {path.name for path in out.iterdir()} == {"summary.txt", *(f"{step.name}.log" for step in todo)}


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert gpu_check.run(python("parent", parent), tmp_path, 2.0).status == "timed out"
    time.sleep(4)
    assert not alive.exists()


def test_no_step_starts_when_the_time_is_spent(tmp_path: Path) -> None:
    [outcome] = gpu_check.check([python("late", "print('ran')")], tmp_path, 0.0)
    assert (outcome.status, outcome.seconds) == ("not run", 0.0)


def test_the_steps_fit_what_they_are_for(tmp_path: Path) -> None:
    todo = {step.name: step for step in gpu_check.steps(tmp_path)}
    assert list(todo) == ["triton", "gpu", "memcheck", "rates"]
    assert gpu_check.TOTAL_SECONDS < 600
    assert len(todo) + len(["summary.txt", "rates.json", "rates.csv"]) <= 8  # files
    for step in todo.values():
        assert all((gpu_check.ROOT / word).exists() for word in step.command if word.startswith("tests/"))
    assert todo["memcheck"].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    module, *arguments = todo["rates"].command[2:]
    assert module == "bench.rates"
    assert rates.parse(arguments).out == tmp_path / "rates.json"


def test_memcheck_selects_every_kind_of_test_that_it_names(fresh_python: Callable[..., Any]) -> None:
    done = fresh_python("-m", "pytest", "--collect-only", "-q", "tests/test_triton.py", "-k", gpu_check.MEMCHECK_TESTS)
    for name in ("everything_together", "bias_of_ragged", "wrong_cu_seqlens", "head_dims", "dropout", "grouped_heads", "thd"):
        assert name in done.stdout


def test_steps_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(
        gpu_check, "steps", lambda out: [python("a", "print('a')"), python("b", "raise SystemExit(1)"), python("c", "print('c')")]
    )
    assert gpu_check.main(["c", "a"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"c.log", "a.log", "summary.txt"}
    assert gpu_check.main([]) == 1
    assert "b          failed (1)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["d"])
