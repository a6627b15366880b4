"""The benchmark of attention over ranks: its cells match their names, it measures over gloo too, and never times wrong results."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexattn.bench import context_parallel, harness
from tests.conftest import FreshPython

MODULE = "flexattn.bench.context_parallel"


def test_cells_are_what_their_names_say() -> None:
    for name, cell in context_parallel.CELLS.items():
        assert cell.length == 1024 * int(name.partition("k")[0])
        assert cell.window == (4096 if "window" in name else 0)
        assert sum(cell.documents) == (cell.length if "documents" in name else 0)
        tiny = context_parallel.small(cell)
        assert tiny.length <= cell.length // 512
        assert (tiny.window > 0, len(tiny.documents)) == (cell.window > 0, len(cell.documents))
    longest = sorted(context_parallel.CELLS["128k, documents"].documents)
    assert len(longest) > 50
    assert 8000 < longest[-1] < 20000


@pytest.mark.slow
def test_two_ranks_over_gloo_check_and_measure_each_strategy(forked_python: FreshPython, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    out = tmp_path / "found.json"

    def run(rank: int) -> str:
        settings = group | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = ["--only", "32k", "128k, window 4096", "--out", str(out), "--timed-seconds", "0.01"]
        found = forked_python("-m", MODULE, *arguments, env=settings)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    assert "flexattn, auto" in first
    assert not second  # rank 0 alone prints
    content = json.loads(out.read_text())
    assert content["ranks"] == 2
    assert content["device"]["type"] == "cpu"
    assert content["command"].startswith(f"torchrun --standalone --nproc-per-node 2 -m {MODULE} --only")
    rows = {(row["cell"], row["implementation"]): row for row in content["rows"]}
    for cell in content["cells"]:
        one = rows[cell, "one GPU"]
        for strategy in ("auto", *context_parallel.STRATEGIES):
            row = rows[cell, f"flexattn, {strategy}"]
            assert row["status"] == "measured"
            assert max(row["errors"].values()) < harness.WORST
            assert row["both_efficiency"] == pytest.approx(one["both_ms"] / (2 * row["both_ms"]))
            assert "out" in row["equal_bits"] or strategy == "ring"
        for peer in context_parallel.PEERS:
            assert rows[cell, peer]["status"] == "refused"
            assert rows[cell, peer]["reason"]
    assert rows["128k, window 4096", "flexattn, auto"]["takes"] == "halo"


WRONG = """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import torch.distributed as dist
from flexattn.bench import context_parallel as bench
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = bench.Ranks()
cell = bench.small(bench.CELLS["32k"])
comparison = bench.Comparison(cell, ranks)
way = bench.ours(cell, comparison.whole, ranks.group)["flexattn, gather"]
print(comparison.measured(way)["status"], comparison.measured(way._replace(call=lambda *qkv: way.call(*qkv) * 1.05))["status"])
def refuses(*qkv):
    raise ValueError("not on Mondays")
print(comparison.measured(way._replace(call=refuses)))
os._exit(0)
"""


def test_what_is_wrong_is_not_timed_and_what_raises_is_a_row(forked_python: FreshPython) -> None:
    found = forked_python("-c", WRONG, env={"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"})
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("measured wrong\n")
    assert "'status': 'refused'" in found.stdout
    assert "ValueError: not on Mondays" in found.stdout


def test_without_ranks_it_says_what_runs_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        context_parallel.main([])
    assert "torchrun --standalone" in capsys.readouterr().err
