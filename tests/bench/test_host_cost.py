"""The benchmark of the host's time, with a driver that does nothing: calls are timed in each direction, and by their parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flexattn.bench import host_cost, stub_driver
from tests.conftest import FreshPython


def test_kinds_are_listed_without_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_cost.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [*host_cost.KINDS, host_cost.PARTS]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its times count")
@pytest.mark.skipif(stub_driver.compiler() is None, reason="the driver that stands in for CUDA's needs a C compiler")
def test_calls_and_their_parts_are_timed(forked_python: FreshPython, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    arguments = ["host_cost", "--only", "bshd", "fp8 delayed", "parts*", "--rounds", "2", "--out", str(out)]
    ran = forked_python("-m", "flexattn", *arguments)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(out.read_text("utf-8"))["rows"]
    found = {(row["call"], row.get("direction"), row["implementation"]) for row in rows}
    for direction in ("forward", "recorded", "both", "retained"):
        assert {("bshd", direction, "flexattn triton"), ("bshd", direction, "SDPA")} <= found
        assert ("fp8 delayed", direction, "flexattn triton") in found
    assert (host_cost.PARTS, None, "the whole call") in found
    assert all(row["us"] > 0 for row in rows)
