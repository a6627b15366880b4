"""The benchmark of decoding: its cells match their names, and all implementations of a cell compute the same attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.bench import decode, decode_cells, decode_peers, harness, page
from flexattn.bench.implementations import Unavailable
from flexattn.bench.measure import Samples
from tests.conftest import ROOT

SMALL = {
    "page 4": decode_cells.decodes(3, 16, page=4, heads=4, heads_kv=2, head_dim=32),
    "rows not in use": decode_cells.Cell((1, 2, 1), (5, 23, 8), heads=4, heads_kv=2, head_dim=32, page=8),
    "sinks, window": decode_cells.decodes(2, 160, heads=4, heads_kv=2, head_dim=32, more="sinks, window"),
    "softcap": decode_cells.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, more="softcap"),
    "tree": decode_cells.decodes(2, 32, 4, heads=4, heads_kv=2, head_dim=32, more="tree"),
    "FP8": decode_cells.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, is_fp8=True),
    "prefix": decode_cells.decodes(3, 48, heads=4, heads_kv=2, head_dim=32, prefix=32),
    "latent": decode_cells.decodes(2, 32, heads=4, heads_kv=1, head_dim=576, is_latent=True),
}


@pytest.mark.parametrize("cell", SMALL.values(), ids=SMALL.keys())
def test_pages_and_dense_keys_are_the_same_attention(cell: decode_cells.Cell) -> None:
    paged, dense = decode_cells.make_steps(cell, "cpu")
    got, same = (attention(step.q, step.k, step.v, **step.where, backend="eager") for step in (paged, dense))
    wanted = decode_cells.exact(dense, cell)
    assert torch.equal(got, same)
    assert float((got.double() - wanted).norm() / wanted.norm()) < harness.WORST


@pytest.mark.parametrize("cell", SMALL.values(), ids=SMALL.keys())
def test_the_exact_result_is_the_same_sequence_by_sequence(cell: decode_cells.Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = decode_cells.make_steps(cell, "cpu")[1]
    together = decode_cells.exact(dense, cell)
    monkeypatch.setattr(decode_cells, "EXACT_BYTES", 1)
    torch.testing.assert_close(decode_cells.exact(dense, cell), together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "cell", [cell for name, cell in SMALL.items() if name != "FP8"], ids=[name for name in SMALL if name != "FP8"]
)
def test_flex_attention_is_asked_for_the_cell(cell: decode_cells.Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # FlexAttention itself, which compiles for minutes on a CPU
    steps = decode_cells.make_steps(cell, "cpu")
    wanted = decode_cells.exact(steps[1], cell)
    flex = next(peer for peer in decode_peers.peers() if peer.name.startswith("FlexAttention"))
    if len(set(cell.queries)) > 1:
        with pytest.raises(Unavailable, match="different numbers of queries"):
            flex.prepare(cell, *steps)
        return
    got = flex.prepare(cell, *steps)()
    assert float((got.double() - wanted).norm() / wanted.norm()) < harness.WORST


def test_peers_that_are_missing_or_cannot_say_so() -> None:
    steps = decode_cells.make_steps(SMALL["FP8"], "cpu")
    for peer in decode_peers.peers():
        with pytest.raises(Unavailable, match=r"not installed|FP8|takes"):
            peer.prepare(SMALL["FP8"], *steps)


def test_peers_get_tables_and_caches_without_poison() -> None:
    paged, _ = decode_cells.make_steps(SMALL["rows not in use"], "cpu")
    k, v, table = decode_peers._pages(SMALL["rows not in use"], paged)
    assert not torch.stack([k, v]).isnan().any()
    assert int(table.max()) < len(k)


def test_unused_entries_and_rows_are_poisoned() -> None:
    paged, _ = decode_cells.make_steps(SMALL["rows not in use"], "cpu")
    table = paged.where["page_table"]
    assert (table == decode_cells.GARBAGE).sum() == 2 + 0 + 2
    assert paged.k[table[0, 0], 5:].isnan().all()
    assert not paged.k[table[0, 0], :5].isnan().any()


def test_a_prefix_is_stored_once_and_counted_once() -> None:
    cell = SMALL["prefix"]
    paged, _ = decode_cells.make_steps(cell, "cpu")
    table = paged.where["page_table"]
    assert (table[:, :2] == table[0, :2]).all()
    assert len(paged.k) == 2 + 3
    assert decode_cells.bytes_of(cell) == 2 * (3 * 4 * 64 + (32 + 3 * 16) * 2 * 64)


def test_bytes_and_operations() -> None:
    assert decode_cells.bytes_of(SMALL["latent"]) == 2 * (2 * 4 * (576 + 512) + 64 * 576)
    assert decode_cells.flops_of(SMALL["tree"]) == 2 * 2 * (4 * 32 - 6) * 4 * 64


def test_without_a_device_it_lists_cells_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.PROGRAM.run(["--list", "--only", "MLA*"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in decode_cells.CELLS if name.startswith("MLA")]
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            decode.PROGRAM.run([])


@pytest.mark.parametrize(
    ("block", "files", "libraries", "steps"),
    [
        ("decode", page.DECODE, page.DECODE_PEERS, tuple(decode_cells.CELLS)),
        ("decode, serving engines", (page.SERVING,), page.SERVING_PEERS, page.SERVING_STEPS),
    ],
)
def test_the_page_has_the_files_times_of_the_peers(
    block: str, files: tuple[str, ...], libraries: dict[str, tuple[str, ...]], steps: tuple[str, ...]
) -> None:
    """docs/performance.md: flexattn's time, and the others' divided by it; the lowest if a library has several."""
    rows = [row for name in files for row in json.loads((ROOT / "bench" / "results" / name).read_text("utf-8"))["rows"]]
    times = {(row["cell"], row["implementation"]): row["us"] for row in rows if row["status"] == "measured"}
    wanted = []
    for name in decode_cells.CELLS:
        here = times.get((name, "flexattn"), 0.0)
        found = [[times[name, one] for one in ones if (name, one) in times] for ones in libraries.values()]
        if here and any(found) and name in steps:
            us = f"{here:,.0f}" if here >= 100 else f"{here:.1f}"
            wanted.append((name, us, *(f"{min(us) / here:.2f}" if us else "-" for us in found)))
    text = (ROOT / "docs" / "performance.md").read_text("utf-8").partition(f"({block}): begin -->")[2].partition("<!-- end -->")[0]
    table = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines() if line.startswith("| ")]
    assert table[1:] == wanted
    assert {row["status"] for row in rows} == {"measured", "refused"}


class Replays:
    """Stands for a CUDA graph: a replay makes the call again, and writes the `changed` result."""

    def __init__(self, call: Callable[[], Tensor], changed: Callable[[Tensor], Tensor | None]) -> None:
        self.call, self.changed, self.out = call, changed, call()

    def replay(self) -> None:
        written = self.changed(self.call())
        if written is not None:
            self.out.copy_(written)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    functions: dict[str, Callable[[], Any]],
    changed: Callable[[Tensor], Tensor | None] = lambda t: t,
) -> dict[str, dict[str, Any]]:
    """Returns the rows of a small cell, of `functions` in place of the real ones, and of replays that `changed` alters."""

    def captured(call: Callable[[], Tensor]) -> decode.Captured:
        graph: Any = Replays(call, changed)
        return decode.Captured(graph, call, graph.out)

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(decode, "captured", captured)
    monkeypatch.setattr(decode, "poison_free_memory", lambda: None)
    monkeypatch.setattr(harness, "time_on_device", lambda calls, budget_ms: dict.fromkeys(calls, Samples([0.01] * 3, [])))
    monkeypatch.setattr(decode, "make_steps", lambda cell: decode_cells.make_steps(cell, "cpu"))
    monkeypatch.setattr(decode, "implementations", lambda cell, paged, dense: functions)
    return {row["implementation"]: row for row in decode.measure(SMALL["page 4"])}


def right() -> Callable[[], Tensor]:
    paged, _ = decode_cells.make_steps(SMALL["page 4"], "cpu")
    return lambda: attention(paged.q, paged.k, paged.v, **paged.where, backend="eager")


def test_what_is_right_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(monkeypatch, {"right": right})["right"]
    assert (row["status"], row["us"]) == ("measured", 10.0)
    assert row["host_us"] > 0


@pytest.mark.parametrize("written", [lambda t: None, lambda t: t * 1.1, lambda t: t * torch.nan], ids=["nothing", "wrong", "NaN"])
def test_a_wrong_replay_is_a_row_and_has_no_time(
    written: Callable[[Tensor], Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = measured(monkeypatch, {"right": right}, written)["right"]
    assert row["status"] == "wrong"
    assert row["error"] < harness.WORST
    assert not row["error_of_replay"] < harness.WORST
    assert "us" not in row


def test_a_replay_that_goes_wrong_while_it_is_timed_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter((True, False))
    row = measured(monkeypatch, {"right": right}, lambda t: t if next(turns) else None)["right"]
    assert row["status"] == "wrong"
    assert "us" not in row


@pytest.mark.slow
def test_what_fails_is_a_row_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> Callable[[], Any]:
        def prepare() -> Any:
            raise error

        return prepare

    rows = measured(
        monkeypatch,
        {
            "out of memory": raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")),
            "without words": raising(AssertionError()),
            "wrong": lambda: lambda: right()() * 1.1,
            "right": right,
        },
    )
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {"out of memory": "refused", "without words": "refused", "wrong": "wrong", "right": "measured"}
    assert rows["out of memory"]["reason"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB."
    assert rows["without words"]["reason"] == "AssertionError"


def test_a_cell_whose_tensors_do_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(cell: decode_cells.Cell) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(decode, "make_steps", too_large)
    rows = decode.measure(SMALL["page 4"])
    assert [(row["implementation"], row["status"]) for row in rows] == [("all", "refused")]


def test_a_fault_on_the_device_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty() -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        measured(monkeypatch, {"faulty": faulty})


def test_a_reason_has_the_class_and_no_advice() -> None:
    said = "LoweringException: NoValidChoicesError: No choices to select."
    advised = f"{said}\n  target: flex_attention\n  args[0]: x\n\nSet TORCHDYNAMO_VERBOSE=1"
    assert decode.reason_of(RuntimeError(advised)) == f"RuntimeError: {said}"
    assert decode.reason_of(RuntimeError("\n\nout of resource: shared memory")) == "RuntimeError: out of resource: shared memory"
    assert decode.reason_of(Unavailable("it takes one query")) == "it takes one query"


def test_cells_are_chosen_in_the_order_of_the_patterns(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.PROGRAM.run(["--list", "--only", "MLA 16*", "1 x *", "*"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert names[:3] == ["MLA 16 heads, 32 x 8192, page 64", "MLA 16 heads, 1 x 65536, page 64", "1 x 1024, page 16"]
    assert sorted(names) == sorted(decode_cells.CELLS)
