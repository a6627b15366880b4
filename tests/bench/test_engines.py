"""The benchmark of serving engines' layers: all implementations of a cell write the same cache and compute the same attention."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn import attention
from flexattn.bench import decode, decode_cells, engines, harness
from flexattn.bench.implementations import Unavailable

SMALL = {
    "decode": decode_cells.Cell((1, 1), (33, 160), heads=4, heads_kv=2, head_dim=32),
    "sinks, window": decode_cells.decodes(2, 160, heads=4, heads_kv=2, head_dim=32, more="sinks, window"),
    "FP8": decode_cells.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, is_fp8=True),
    "mixed": decode_cells.Cell((21, 1, 5), (21, 40, 30), heads=4, heads_kv=2, head_dim=32),
    "latent": decode_cells.decodes(2, 32, heads=4, heads_kv=1, head_dim=576, page=64, is_latent=True),
}


@pytest.mark.parametrize("name", SMALL)
def test_all_implementations_append_and_attend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MODEL_LEN", 256)
    cell = SMALL[name]
    paged, dense = decode_cells.make_steps(cell, "cpu")
    wanted = decode_cells.exact(dense, cell)
    for implementation, prepare in engines.implementations(engines.Work(cell, paged)).items():
        try:
            call = prepare()
        except Unavailable:
            assert implementation.startswith((engines.VLLM, engines.SGLANG))
            continue
        call.spoil()
        assert harness.distance(call(), wanted) < harness.WORST, implementation


def test_a_replay_that_appends_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cell = SMALL["decode"]
    paged, dense = decode_cells.make_steps(cell, "cpu")
    work, wanted = engines.Work(cell, paged), decode_cells.exact(dense, cell)
    call = work.ours()
    out = call()

    def attend() -> None:
        out.copy_(attention(work.q, paged.k, paged.v, **paged.where))

    for replay, is_right in ((lambda: out.copy_(call()), True), (attend, False)):
        graph: Any = SimpleNamespace(replay=replay)
        error = decode.error_of_replay(decode.Captured(graph, call, out, call.spoil), wanted)
        assert (error < harness.WORST) == is_right


def test_times_are_beside_flexattns_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(cell: decode_cells.Cell, is_timed: bool, functions_of: decode.Functions) -> list[harness.Row]:
        functions_of(cell, *decode_cells.make_steps(cell, "cpu"))[engines.OURS]()
        return [{"implementation": name, "status": "measured", "us": us} for name, us in (("flexattn", 2.0), ("vLLM", 3.0))]

    monkeypatch.setattr(decode, "measure", measured)
    assert [row["time"] for row in engines.measure(SMALL["decode"])] == [1.0, 1.5]


@pytest.mark.parametrize("engine", [engines.VLLM, engines.SGLANG])
def test_a_missing_package_has_a_reason(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"flexattn.integrations.{engine.lower()}"
    monkeypatch.setitem(sys.modules, module, None)
    paged, _ = decode_cells.make_steps(SMALL["decode"], "cpu")
    with pytest.raises(Unavailable, match=module):
        engines.implementations(engines.Work(SMALL["decode"], paged))[engine]()
