"""Shapes of published models: sources, what is unseen, agreement of all implementations, and the tables of a run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flexattn.bench import command, implementations, page, peers, record, tables
from flexattn.bench.check import Checker
from flexattn.bench.counts import work
from flexattn.bench.implementations import Implementation, Prepared, ours
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.measure import measure
from flexattn.bench.model_shapes import SHAPES
from flexattn.bench.model_tables import cells_table, model_tables, own_table, summary
from flexattn.bench.record import Row
from flexattn.bench.run import Plan, run
from flexattn.bench.shapes import WORKLOADS, Workload, is_unseen, scores_of, select

MODELS = select(["models"])
# Each feature once: biases of one, some and all sequences, hidden keys, sinks, cross attention, grouped heads, packed windows.
FEATURES = (
    *("alphafold3-template", "alphafold3-triangle-two", "alphafold3-triangle-384-masked", "sam-h-window", "t5-base-decoder"),
    *("qwen-image", "gpt-oss-window", "sd-unet-64-cross", "idefics2-perceiver", "modernbert-window", "deepseek-v4-window"),
)


def named(name: str) -> Workload:
    return WORKLOADS[f"models-{name}"]


def test_every_shape_has_a_source() -> None:
    assert len(MODELS) == len(SHAPES) >= 60
    for shape in SHAPES:
        assert shape.url.startswith("https://github.com/"), shape
        assert " " not in shape.url
        assert (shape.packed is None) == (shape.batch > 0), shape
        assert shape.batch % max(1, shape.biases) == 0, shape
    assert SHAPES[0].url.endswith("/models/gpt_oss/configuration_gpt_oss.py")


def test_the_shapes_span_models() -> None:
    dims = {w.head_dim_qk for w in MODELS}
    assert {16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 104, 112, 128, 160, 192, 256, 512} <= dims
    lengths = {w.seqlen_q for w in MODELS} | {w.seqlen_kv for w in MODELS}
    assert {49, 77, 197, 257, 577, 729, 1370, 1500, 4608, 17776, 75600, 131072} <= lengths
    assert {71, 64, 8, 7, 12} <= {w.group_size for w in MODELS}
    assert {(127, 0), (511, 0), (1023, 0), (64, 64)} <= {w.window_size for w in MODELS}


def test_a_third_is_unseen_by_its_name_alone() -> None:
    unseen = [w for w in MODELS if is_unseen(w)]
    assert 0.3 < len(unseen) / len(MODELS) < 0.4
    assert is_unseen(named("swin-t-stage1"))
    assert is_unseen(named("swin-t-stage1")._replace(num_heads=5))
    assert not is_unseen(named("swin-t-stage3"))
    assert not any(is_unseen(w) for w in WORKLOADS.values() if w.group != "published")
    assert "(unseen)" in command.listing()


def test_the_slowest_shape_is_last() -> None:
    assert [scores_of(w) for w in MODELS] == sorted(map(scores_of, MODELS))
    assert scores_of(named("alphafold3-template")) == 384**3 * 4 * 32


@pytest.mark.parametrize(
    "name", [pytest.param(w.name, marks=[] if w.name.removeprefix("models-") in FEATURES else pytest.mark.slow) for w in MODELS]
)
def test_auto_and_peers_agree_with_the_reference(name: str) -> None:
    shape = WORKLOADS[name].shortened(40, 4)
    tensors = make_tensors(shape, "cpu")
    everyone = {i.name: i for i in (*ours("cpu"), *peers.peers())}
    candidates = [everyone[tables.AUTO], everyone["SDPA math"]]
    checker = Checker(shape, tensors)
    for direction in shape.directions:
        auto, sdpa = measure(shape, direction, candidates, tensors, checker, work(shape, direction), None, None)
        assert auto.status == "checked", auto
        can = not shape.is_ragged and shape.softmax_type == "vanilla" and shape.score != "softcap"
        assert sdpa.status == ("checked" if can else "refused"), sdpa


@pytest.mark.parametrize("name", ["alphafold3-triangle-two", "alphafold3-triangle-384-masked", "qwen-image", "modernbert-window"])
def test_flex_attention_gets_the_same_biases_and_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f)
    shape = named(name).shortened(40, 4)
    tensors = make_tensors(shape, "cpu")
    [flex] = [i for i in peers.peers() if i.name == peers.FLEX]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is not compiled
        [row] = measure(shape, "forward", [flex], tensors, Checker(shape, tensors), work(shape, "forward"), None, None)
    assert row.status == "checked", row


def test_flex_attention_sums_gradients_of_a_bias_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    biases: list[Tensor | None] = []

    def attend(mode: str, workload: Workload, tensors: Tensors) -> peers.Attend:
        biases.append(tensors.dense_bias)
        return lambda q, k, v: q

    monkeypatch.setattr(peers, "_flex_attention", attend)
    shape = named("swin-t-stage1").shortened(8)
    [flex] = [i for i in peers.peers() if i.name == peers.FLEX]
    for direction in ("forward", "backward"):
        flex.prepare(shape, make_tensors(shape, "cpu"), direction)
    forward, backward = biases
    assert forward is not None
    assert backward is not None
    assert (forward.dtype, forward.requires_grad) == (torch.bfloat16, False)
    assert (backward.dtype, backward.requires_grad) == (torch.float32, True)


def triangle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """The arithmetic of cuEquivariance's documentation on [b, n, h, s, d]."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    return (scores if mask is None else scores.masked_fill(~mask, -1e9)).softmax(-1) @ v


@pytest.mark.parametrize("name", ["alphafold3-triangle-two", "alphafold3-triangle-384-masked", "sam-h-window", "swin-t-stage1"])
def test_cuequivariance_gets_biases_of_entries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "import_peer", lambda *_: SimpleNamespace(triangle_attention=triangle))
    shape = named(name).shortened(24, 4)
    tensors = make_tensors(shape, "cpu")
    [peer] = [i for i in peers.peers() if i.name == peers.CUEQUIVARIANCE]
    for direction in shape.directions:
        [row] = measure(shape, direction, [peer], tensors, Checker(shape, tensors), work(shape, direction), None, None)
        assert row.status == "checked", row
    causal = named("t5-base-decoder").shortened(24)
    [row] = measure(
        causal, "forward", [peer], make_tensors(causal, "cpu"), Checker(causal, tensors), work(causal, "forward"), None, None
    )
    assert row.status == "refused"


def spoiled(found: Implementation) -> Implementation:
    """Returns an implementation whose gradient of a bias lacks one sequence's share in one element."""

    def prepare(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        prepared = found.prepare(workload, tensors, direction)

        def results() -> Mapping[str, Tensor]:
            wrong = {name: t.clone() for name, t in prepared.results().items()}
            wrong["dbias"][-1, -1, -1, -1] += 0.3
            return wrong

        return prepared._replace(results=results)

    return found._replace(prepare=prepare)


@pytest.mark.parametrize("name", ["alphafold3-triangle-two", "swin-t-stage1"])
def test_a_wrong_gradient_of_a_bias_is_never_timed(name: str) -> None:
    shape = named(name).shortened(24, 4)
    tensors = make_tensors(shape, "cpu")
    [auto] = [i for i in ours("cpu") if i.name == tables.AUTO]
    [row] = measure(shape, "backward", [spoiled(auto)], tensors, Checker(shape, tensors), work(shape, "backward"), None, None)
    assert row.status == "wrong"
    assert "dbias" in (row.reason or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen-image", "alphafold3-triangle-two", "modernbert-window"])
def test_launchers_get_the_masks_and_biases_of_a_shape(name: str) -> None:
    shape = named(name).shortened(24, 4)
    tensors = make_tensors(shape, "cpu")
    prepared = implementations.with_launchers(implementations.committed_launchers({}), shape, tensors, "forward")
    Checker(shape, tensors).check("forward", prepared.results())


def test_bytes_of_a_bias_count() -> None:
    shape, bare = (named("swin-t-stage1")._replace(score=score) for score in ("dense_bias", ""))
    assert work(shape, "forward").bytes - work(bare, "forward").bytes == 2 * 3 * 49 * 49
    assert work(shape, "forward").flops == work(bare, "forward").flops


def test_auto_is_the_column_of_the_preset() -> None:
    def chosen(*arguments: str) -> list[str]:
        args: argparse.Namespace = command.make_parser().parse_args([*arguments, "--peers"])
        return [i.name for i in command._plan(args, arguments).implementations]

    assert chosen("--preset", "models") == [tables.AUTO]
    assert tables.AUTO not in chosen("--preset", "small")
    assert chosen("--preset", "small", "--backends", "auto") == [tables.AUTO]
    assert implementations.HOPPER not in chosen("--preset", "small", "--backends", "*")


@pytest.fixture
def found() -> record.Record:
    """A run of four shapes, two of them unseen, with a refused cell."""
    speeds = {"swin-t-stage1": (1.5, 0.8), "swin-t-stage3": (1.03, 1.0), "t5-base": (0.995, 2.0), "flux": (1.2, None)}
    rows = []
    for name, both in speeds.items():
        for direction, speed in zip(("forward", "backward"), both, strict=True):
            cell = (f"models-{name}", direction)
            if speed is None:
                rows.append(Row(tables.AUTO, "1", *cell, status="refused", reason="too large"))
            else:
                rows.append(Row(tables.AUTO, "1", *cell, status="measured", us=100.0, tflops=1.0))
            rows.append(Row("SDPA efficient", "2", *cell, status="measured", us=100 * (speed or 1.0), tflops=1.0))
            rows.append(Row("FlexAttention", "2", *cell, status="measured", us=1000.0, tflops=1.0))
    facts = record.facts("python -m flexattn bench --preset models", None, {}, [named(name) for name in speeds])
    return record.Record(**facts, rows=rows)


def test_counts_of_a_run_by_hand(found: record.Record) -> None:
    table = summary(found)
    mean = "1.167"  # the seventh root of 1.5 * 0.8 * 1.03 * 1.0 * 0.995 * 2.0 * 1.2
    assert table.rows == [
        ("all", ["7", "4 (57%)", "4 (57%)", "1 (14%)", mean, "0.800"]),
        ("unseen", ["4", "2 (50%)", "2 (50%)", "1 (25%)", "1.243", "0.800"]),
        ("others", ["3", "2 (67%)", "2 (67%)", "0 (0%)", "1.073", "1.000"]),
    ]
    unseen, others = (dict(cells_table(found, "", which).rows) for which in (True, False))
    assert unseen["swin-t-stage1"] == ["100", "1.500", "SDPA efficient", "100", "0.800", "SDPA efficient"]
    assert others["flux"][3:] == ["refused", "-", "-"]
    assert list(unseen) == ["swin-t-stage1", "t5-base"]
    assert len(model_tables(found)) == 3
    assert not model_tables(found._replace(rows=[], workloads={}))


def test_what_auto_leaves_is_named_but_not_of_unseen_shapes(found: record.Record) -> None:
    assert own_table(found) == []
    times = {"swin-t-stage1": 50.0, "swin-t-stage3": 80.0, "flux": 99.0}
    own = [Row(implementations.PORTABLE, "1", f"models-{name}", "forward", "measured", us=us) for name, us in times.items()]
    [table] = own_table(found._replace(rows=[*found.rows, *own]))
    assert table.rows == [("models-swin-t-stage3, forward", ["1.250", "flexattn portable"])]
    assert summary(found._replace(rows=[*found.rows, *own])).rows == summary(found).rows


@pytest.mark.slow
def test_the_page_has_the_run_if_there_is_one(found: record.Record) -> None:
    sources = page.sources()._replace(models=None)
    text = "\n".join(f"{page._begin(name)}\n{page.END}" for name in page.needed_blocks(sources))
    page.performance(text, sources)
    with pytest.raises(ValueError, match=r"needed, each once: .*models"):
        page.performance(text, sources._replace(models=found))
    mark = page._begin("models")
    made = page.performance(f"{text}\n{mark}\n{page.END}\n", sources._replace(models=found)).partition(mark)[2]
    assert "| all | 7 | 4 (57%) |" in made
    assert "#### Unseen shapes\n\n| shape, speed | forward | backward |" in made
    assert "| swin-t-stage1 | 1.500 | 0.800 |" in made


@pytest.mark.slow
def test_a_run_is_written_cell_by_cell_and_ends_in_time(tmp_path: Path) -> None:
    """The preset's shapes, shortened, through `run` with a CPU's timer; the last shapes do not fit."""
    everyone = {i.name: i for i in (*ours("cpu"), *peers.peers())}
    workloads = [named(name).shortened(16) for name in ("clip-l-text", "alphafold3-triangle-two", "qwen-image")]
    out = tmp_path / "models.json"
    plan = Plan("x", workloads, ["forward", "backward"], [everyone[tables.AUTO], everyone["SDPA math"]], "cpu", 1.0, 60.0, out=out)
    assert run(plan, show=lambda _: None).complete
    read = record.read(out)
    assert len(read.cells()) == 6
    assert {row.status for row in read.rows} == {"measured"}
    assert read.workloads[workloads[1].name].biases == 2
    cut = run(plan._replace(budget_s=-1.0), show=lambda _: None)
    assert [len(cut.left_out), cut.rows] == [6, []]
