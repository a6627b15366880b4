"""The benchmark of calls from JAX, on a CPU: results are checked, and rows are written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")

from flexattn.bench import jax_calls, record
from flexattn.bench.run import Plan, run
from flexattn.bench.shapes import dense


def test_calls_from_jax_are_checked_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOST_CALLS": 3, "TURNS": 2, "CALLS": (2, 2)}.items():
        monkeypatch.setattr(jax_calls, name, value)
    out = tmp_path / "jax.json"
    small = dense("tiny", "small", 1, 40, (2, 2), (32, 32), attn_mask_type="causal")
    chosen = [i for i in jax_calls.calls_from_jax() if i.name in ("flexattn jax", "jax.nn, xla")]
    plan = Plan("x", [small], jax_calls.DIRECTIONS, chosen, "cpu", 0.0, float("inf"), out=out, time=jax_calls.METHOD)
    run(plan, lambda text: None, jax_calls.time_calls)
    found = record.read(out)
    assert [(row.implementation, row.direction, row.status) for row in found.rows] == [
        (i.name, direction, "measured") for direction in ("forward", "both") for i in chosen
    ]
    assert all(row.host_us and row.us for row in found.rows)
    assert found.method["time"] == jax_calls.METHOD
