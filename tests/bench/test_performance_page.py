"""docs/performance.md, its plots and the README's section match the recorded runs, with `auto` as flexattn's column."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from flexattn.bench import charts, command, page, picture, record, regret, tables
from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import is_unseen, sweep, title_of
from flexattn.kernels_triton.runtime import interpreter
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"
SVG = "{http://www.w3.org/2000/svg}"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


@pytest.fixture(scope="module")
def found() -> Iterator[page.Sources]:
    """The files of the page; picks of `auto` are picks of compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "INTERPRETED", False)
        page.sources.cache_clear()
        yield page.sources()
        page.sources.cache_clear()


class Cell(NamedTuple):
    """One cell, computed here from the rows alone, without the page's own code."""

    ours: Row  # of the backend that `auto` selects
    peer: Row  # the fastest of the others

    @property
    def speed(self) -> float:
        assert self.ours.us
        assert self.peer.us
        return self.peer.us / self.ours.us

    @property
    def is_level(self) -> bool:
        begins, ends = ([row._asdict()[name] for row in self] for name in ("us_q1", "us_q3"))
        return max(begins) <= min(ends)

    @property
    def shown(self) -> str:
        return "level" if self.is_level else f"{self.speed:.3f}"


def computed(name: str) -> dict[tuple[str, str], Cell]:
    """Returns the cells of a result file."""
    run = record.read(RESULTS / name)
    device = regret._device(run)
    cells = {}
    for workload, direction in run.cells():
        rows = run.of(workload, direction)
        refused = [backend for backend, one in regret.BACKENDS.items() if one in rows and rows[one].us is None]
        picked = tables.AUTO if tables.AUTO in rows else regret.pick(run.workloads[workload], direction, device, refused)  # type: ignore[arg-type]
        ours = rows[picked]
        peers = [row for row in rows.values() if row.us and not row.implementation.startswith("flexattn")]
        cells[workload, direction] = Cell(ours, min(peers, key=lambda row: row.us or math.inf))
    return cells


@pytest.fixture(scope="module")
def cells(found: page.Sources) -> dict[tuple[str, str], Cell]:
    return computed(page.MAIN)


def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def rows_of(block: str) -> list[list[str]]:
    """Returns the rows of the table in one of the page's blocks, without its heads."""
    text = text_of("docs/performance.md").partition(f"({block}): begin -->")[2].partition(page.END)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_page_is_what_the_command_makes_of_the_files(found: page.Sources) -> None:
    text = text_of("docs/performance.md")
    assert text == page.performance(text, found)


def test_the_plots_are_what_the_command_makes_of_the_files(found: page.Sources) -> None:
    made = page.plots(found)
    assert {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "plots").iterdir()} == made
    assert set(re.findall(r"\]\(plots/(.+?)\)", text_of("docs/performance.md"))) == made.keys()


def test_the_readme_is_what_the_command_makes_of_the_files(found: page.Sources) -> None:
    text = text_of("README.md")
    assert text == page.with_readme_section(text, found)


def test_the_picture_is_what_the_command_makes_of_the_file(found: page.Sources) -> None:
    assert picture.svg(found.main) == text_of("docs/speed.svg")


@pytest.mark.slow
def test_the_command_writes_page_plots_readme_and_picture(found: page.Sources, tmp_path: Path) -> None:
    old = {"performance.md": "docs/performance.md", "README.md": "README.md"}
    for name, path in old.items():
        (tmp_path / name).write_text(re.sub(r"\d+ of 114 cells", "7 of 114 cells", text_of(path)), "utf-8")
    made = [str(tmp_path / name) for name in (*old, "speed.svg")]
    assert command.main(["--page", made[0], "--readme", made[1], "--picture", made[2]]) == 0
    for name, path in (old | {"speed.svg": "docs/speed.svg", "plots/memory.svg": "docs/plots/memory.svg"}).items():
        assert (tmp_path / name).read_text("utf-8") == text_of(path)


def claim(cells: dict[tuple[str, str], Cell]) -> str:
    speeds = [cell.speed for cell in cells.values()]
    faster, ahead, behind = sum(x > 1 for x in speeds), sum(x >= 1.02 for x in speeds), sum(x < 0.99 for x in speeds)
    level = sum(cell.is_level for cell in cells.values())
    return (
        f"in {faster} of {len(speeds)} cells. It is faster by 2 % or more in {ahead} cells, and slower by more than 1 % in "
        f"{behind}. In {level} cells the quartiles of the two times overlap."
    )


@pytest.mark.slow
def test_claims_are_those_of_the_backend_that_auto_selects(cells: dict[tuple[str, str], Cell]) -> None:
    assert claim(cells) in text_of("README.md")
    assert claim(cells) in text_of("docs/performance.md")
    assert claim(computed(page.SECOND)) in text_of("docs/performance.md")
    other_peers = {row.implementation for row in record.read(RESULTS / page.MAIN).rows if not tables.is_ours(row.implementation)}
    assert f"the fastest of {len(other_peers)} other" in text_of("README.md")


def test_the_training_step_is_the_files() -> None:
    rows = json.loads((RESULTS / page.STEPS).read_text("utf-8"))["rows"]
    ms = {row["implementation"]: row["ms"] for row in rows if row["model"] == "llama" and row.get("batch") == "packed"}
    said = f"takes {ms['flexattn']:.1f} ms with flexattn and {ms['sdpa']:.1f} ms with SDPA"
    assert said in text_of("README.md")
    assert said in text_of("docs/performance.md")
    assert {row["status"] for row in rows if (row["model"], row["implementation"]) == ("gemma2", "sdpa")} == {"wrong"}
    assert {row["status"] for row in rows if (row["model"], row["implementation"]) == ("gpt_oss", "sdpa")} == {"refused"}


@pytest.mark.slow
def test_each_row_of_implementations_is_computed(found: page.Sources, cells: dict[tuple[str, str], Cell]) -> None:
    run = record.read(RESULTS / page.MAIN)
    table = {row[0]: row[1:] for row in rows_of("implementations")}
    for peer in found.main.implementations()[1:]:
        peer_cells = {cell: Cell(both.ours, run.of(*cell)[peer]) for cell, both in cells.items() if peer in run.of(*cell)}
        peer_cells = {cell: both for cell, both in peer_cells.items() if both.peer.us}
        level = sum(both.is_level for both in peer_cells.values())
        faster = sum(both.speed > 1 and not both.is_level for both in peer_cells.values())
        speeds = [both.speed for both in peer_cells.values()]
        figures = [f"{x:.3f}" for x in (statistics.geometric_mean(speeds), min(speeds), max(speeds))]
        wanted = [*map(str, (len(speeds), faster, level, len(speeds) - faster - level)), *figures]
        has_dense_mask = peer in ("SDPA cuDNN", "SDPA efficient")
        assert table.pop(f"{peer} †" if has_dense_mask else peer) == wanted
        if has_dense_mask:
            dense = {f"score-{name}" for name in ("alibi", "relative-bias", "sliding-window")}
            rest = [both.speed for (workload, _), both in peer_cells.items() if workload not in dense]
            assert f"In {len(speeds) - len(rest)} cells {peer} gets a dense" in text_of("README.md")
            assert f"without these cells is {statistics.geometric_mean(rest):.3f}." in text_of("README.md")
    assert not table


@pytest.mark.parametrize("block", ["sweep", "rates"])
def test_each_figure_of_the_sweep_is_the_recorded_one(cells: dict[tuple[str, str], Cell], block: str) -> None:
    shown = {tuple(row[0].split(", ")): row[1:] for row in rows_of(block)}
    assert len(shown) == 12
    for (direction, dim, mask), figures in shown.items():
        names = [sweep(int(dim), "causal" if mask == "causal" else "full", length).name for length in LENGTHS]
        found = [cells[name, direction] for name in names]
        assert figures == [cell.shown if block == "sweep" else f"{cell.ours.tflops:.0f}" for cell in found]


def test_each_other_workload_is_shown(cells: dict[tuple[str, str], Cell]) -> None:
    run = record.read(RESULTS / page.MAIN)
    shown = {row[0]: (row[2], row[4]) for row in rows_of("workloads")}
    names = {title_of(w): w.name for w in run.workloads.values() if w.group != "sweep"}
    assert shown.keys() == names.keys()
    for title, speeds in shown.items():
        both = [cells.get((names[title], direction)) for direction in ("forward", "backward")]
        assert speeds == tuple("-" if cell is None else cell.shown for cell in both)


def test_every_slower_cell_is_listed(cells: dict[tuple[str, str], Cell]) -> None:
    run = record.read(RESULTS / page.MAIN)
    slower = {name: cell for name, cell in cells.items() if cell.speed <= 1 and not cell.is_level}
    wanted = [
        [f"{title_of(run.workloads[workload])}, {direction}", f"{cell.speed:.3f}", cell.peer.implementation]
        for (workload, direction), cell in sorted(slower.items(), key=lambda item: item[1].speed)
    ]
    assert rows_of("slower") == wanted


def test_sentences_without_figures_are_true_of_the_files() -> None:
    run = record.read(RESULTS / page.MAIN)
    assert run.versions["flash-attn-3"] is run.versions["flash-attn"] is None
    assert not {"cuDNN frontend", "SDPA math", "flash-attn 3"} & set(run.implementations())


@pytest.mark.parametrize(("whole", "apart"), [(page.MAIN, "standard"), ("models_h200.json", "models")])
def test_times_of_a_run_apart_are_scaled_by_the_time_of_auto(whole: str, apart: str) -> None:
    run, other = record.read(RESULTS / whole), record.read(RESULTS / f"{apart}_flash_attn_4_h200.json")
    speeds = {}
    for found in (run, other):
        for workload, direction in found.cells():
            rows = found.of(workload, direction)
            ours, theirs = rows[tables.AUTO].us, rows["flash-attn 4"].us
            if ours and theirs:
                speeds.setdefault((workload, direction), []).append(theirs / ours)
    assert len(speeds) > 90
    assert all(first == pytest.approx(second) for first, second in speeds.values())


def alike(run: Record, newer: Record) -> dict[str, tables.Standing]:
    """Standings of a run's cells: only cells of a newer run, and only the newer run's peers."""
    cells, names = set(newer.cells()), newer.implementations()
    rows = [row for row in run.rows if (row.workload, row.direction) in cells and row.implementation in names]
    return {standing.workload: standing for standing in tables.standings(run._replace(rows=rows))}


def counts(found: dict[str, tables.Standing]) -> str:
    speeds = [standing.speed for standing in found.values()]
    faster, ahead, behind = sum(x > 1 for x in speeds), sum(x >= 1.02 for x in speeds), sum(x < 0.99 for x in speeds)
    between = len(speeds) - ahead - behind
    return f"{len(speeds)} | {faster} | {ahead} | {between} | {behind} | {tables.geometric_mean(speeds):.3f} |"


def section_of_bounds(title: str) -> str:
    return (ROOT / "notes" / "bounds.md").read_text("utf-8").split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]


def test_the_newer_runs_are_what_their_files_say() -> None:
    """notes/bounds.md, "Since that run": the numbers of cells, and each named cell, then and now beside the same peers."""
    section = section_of_bounds("Since that run")
    main = record.read(RESULTS / "standard_h200.json")
    newer = record.read(RESULTS / "standard_forward_h200.json")
    then, now = alike(main, newer), alike(newer, newer)
    lines = {f"| forward, then | {counts(then)}", f"| forward, now | {counts(now)}"}
    for name, s in now.items():
        if s.speed < 1.02 or then[name].speed < 0.99:
            lines.add(f"| {name} forward | {then[name].speed:.3f} | {s.speed:.3f} | {s.peer.implementation} |")
    newer = record.read(RESULTS / "standard_backward_h200.json")
    then, now = alike(main, newer), alike(newer, newer)
    flash = {s.workload: s for s in tables.standings(main, "flash-attn 4") if s.direction == "backward"}
    lines |= {f"| backward without flash-attn 4, {when} | {counts(found)}" for when, found in (("then", then), ("now", now))}
    beside = {}
    for name, s in now.items():
        if name in flash:
            beside[name] = tables.Standing(name, "backward", s.ours, flash[name].peer).speed
            if min(s.speed, then[name].speed) < 1.02 or flash[name].speed < 1:
                line = f"| {name} backward | {then[name].speed:.3f} | {s.speed:.3f} | {s.peer.implementation} |"
                lines.add(f"{line} {flash[name].speed:.3f} | {beside[name]:.3f} |")
        else:
            assert min(s.speed, then[name].speed) > 1.02
    assert lines == set(lines_of_cells(section))
    won = sum(speed > 1 for speed in beside.values()), sum(flash[name].speed > 1 for name in beside)
    assert f"by it {won[0]} of the {len(beside)} cells that flash-attn 4 took are ahead, where {won[1]} were" in " ".join(
        section.split()
    )


def lines_of_cells(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\| (\S+ )?(for|back)ward", line)]


def lines_of_the_whole_run(run: Record, older: Record) -> list[str]:
    """Standings of its cells, cells that are no more than 2 % faster, and its backwards beside flash-attn 4's by length."""
    flash, others = ("flash-attn 4",), [name for name in run.implementations() if name != "flash-attn 4"]
    lines = []
    for title, names in ((", all peers", run.implementations()), (", without flash-attn 4", others), (", flash-attn 4", flash)):
        rows = [row for row in run.rows if row.implementation in names or tables.is_ours(row.implementation)]
        found = tables.standings(run._replace(rows=rows))
        cells_of = {d: {s.workload: s for s in found if s.direction == d} for d in ("forward", "backward")}
        lines += [f"| {direction}{title} | {counts(cells)}" for direction, cells in cells_of.items()]
    then = {(s.workload, s.direction): s.speed for s in tables.standings(older)}
    for s in sorted(tables.standings(run), key=lambda s: s.speed):
        if s.speed < 1.02:
            before = then[s.workload, s.direction]
            lines.append(f"| {s.workload} {s.direction} | {s.speed:.3f} | {s.peer.implementation} | {before:.3f} |")
    speeds = {s.workload: s.speed for s in tables.standings(run, "flash-attn 4") if s.direction == "backward"}
    for d, mask in itertools.product((64, 128, 256), ("causal", "full")):
        cells = [f"{speeds[sweep(d, mask, length).name]:.2f}" for length in (512, 1024, 2048, 4096, 8192, 16384)]
        lines.append(f"| backward, head dim {d}, {mask} | {' | '.join(cells)} |")
    return lines


def slower_cells(run: Record, prefix: str = "") -> list[str]:
    """The beginnings of the lines of cells that are behind by more than 1 %."""
    behind = sorted((s for s in tables.standings(run, ours=tables.AUTO) if s.speed < 0.99), key=lambda s: s.speed)
    marks = {s: " (unseen)" if is_unseen(run.workloads[s.workload]) and prefix else "" for s in behind}
    return [
        f"| {s.workload.removeprefix(prefix)} {s.direction}{marks[s]} | {s.speed:.3f} | {s.peer.implementation} |" for s in behind
    ]


def test_the_last_whole_run_is_what_its_file_says() -> None:
    run, section = record.read(RESULTS / "standard_rivals_h200.json"), section_of_bounds("The last whole run")
    every = tables.standings(run)
    lines = [f"| {d} | {counts({s.workload: s for s in every if s.direction == d})}" for d in ("forward", "backward")]
    behind = slower_cells(run)
    lines += behind
    assert [line[: len(wanted)] for line, wanted in zip(lines_of_cells(section), lines, strict=True)] == lines
    before = tables.standings(record.read(RESULTS / page.MAIN))
    ahead, ahead_before = (sum(s.speed >= 1.02 for s in found) for found in (every, before))
    behind_before = sum(s.speed < 0.99 for s in before)
    text = (
        f"97 cells ahead by 2 % ({ahead} are) and 3 behind by more than 1 % ({len(behind)} are; {behind_before} in the run before)"
    )
    assert text in section
    assert f"{ahead_before} cells were ahead by 2 %" in " ".join(section.split())


def test_the_whole_run_of_published_models_is_what_its_file_says() -> None:
    run = record.read(RESULTS / page.PUBLISHED)
    section = (ROOT / "notes" / "bounds.md").read_text("utf-8").split("## Shapes of published models\n")[1].split("\n## ")[0]
    every, behind = tables.standings(run, ours=tables.AUTO), slower_cells(run, "models-")
    table = section.split("|---|---:|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert [line[: len(wanted)] for line, wanted in zip(table, behind, strict=True)] == behind
    ahead = sum(s.speed >= 1.02 for s in every)
    assert f"ahead by 2 % or more in {ahead} of {len(every)} cells" in " ".join(section.split())
    assert f"behind by more than 1 % in {len(behind)} (" in section


def test_the_whole_run_before_it_is_what_its_file_says() -> None:
    """Its cells are compared with the run on an H100, whose standings are checked too."""
    section, before = (section_of_bounds(title) for title in ("The whole run before it", "On an NVIDIA H100"))
    main, older = record.read(RESULTS / "standard_again_h200.json"), record.read(RESULTS / page.SECOND)
    lines = lines_of_the_whole_run(main, older)
    table, _, profiles = section.partition("What binds those that are behind")
    assert profiles
    assert lines == lines_of_cells(table)
    assert lines_of_the_whole_run(older, older)[:6] == lines_of_cells(before.partition("\nShort forwards")[0])
    speeds = [s.speed for s in tables.standings(main)]
    ahead, behind = sum(x >= 1.02 for x in speeds), sum(x < 0.99 for x in speeds)
    text = f"{ahead} of {len(speeds)} cells are ahead by 2 % or more, and {behind} behind by more than 1 %"
    assert text in " ".join(section.split())


def test_every_slower_cell_is_left_of_the_pictures_line(found: page.Sources, cells: dict[tuple[str, str], Cell]) -> None:
    root = ElementTree.fromstring(picture.svg(found.main))
    [line] = [e for e in root.iter(f"{SVG}line") if e.get("stroke") == picture.AXIS]
    dots = [float(e.get("cx", "")) for e in root.iter(f"{SVG}circle") if float(e.get("cy", "")) > picture.TOP]  # not the legend's
    assert len(dots) == len(cells)
    assert sum(x <= float(line.get("x1", "")) for x in dots) == sum(cell.speed <= 1 for cell in cells.values())


def test_a_picture_of_nothing_is_refused(found: page.Sources) -> None:
    with pytest.raises(ValueError, match="no cell in which both"):
        picture.svg(found.main._replace(rows=[]))


def test_a_page_without_a_place_for_it_is_refused(found: page.Sources) -> None:
    with pytest.raises(ValueError, match="has no part to make"):
        page.with_readme_section("# nothing here\n", found)
    with pytest.raises(ValueError, match="needed, each once: the runs' cells"):
        page.performance("# nothing here\n", found)


def texts_of(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_line_charts_have_labels_and_the_recorded_points(found: page.Sources) -> None:
    svg = page.plots(found)["backward_h200.svg"]
    texts = texts_of(svg)
    assert texts[0] == "Backward on NVIDIA H200: TFLOP/s by sequence length, 16,384 tokens in all"
    assert texts.count("sequence length, tokens") == texts.count("TFLOP/s") == 6
    assert {"flexattn", "flash-attn 4", "SDPA cuDNN", "SDPA flash", "FlexAttention", "Head dim 128, no mask"} <= set(texts)
    assert "cuDNN frontend" not in texts
    groups = [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("stroke") == charts.COLOURS[tables.AUTO]]
    drawn = [[tuple(map(float, p.split(","))) for p in g[0].get("points", "").split()] for g in groups[1:]]  # 0: the legend's
    assert [len(points) for points in drawn] == [6] * 6
    heights = [y for _, y in drawn[4]]  # head dim 128, no mask
    rates = [found.main.of(sweep(128, "full", length).name, "backward")[tables.AUTO].tflops or 0.0 for length in LENGTHS]
    scale = (heights[0] - heights[-1]) / (rates[-1] - rates[0])
    assert all(abs(heights[0] - y - scale * (rate - rates[0])) < 0.2 for y, rate in zip(heights, rates, strict=True))


def test_bars_are_as_long_as_their_figures(found: page.Sources) -> None:
    svg = page.plots(found)["transformers_h200.svg"]
    assert texts_of(svg).count("milliseconds") == 4
    bars = [e for e in ElementTree.fromstring(svg).iter(f"{SVG}rect") if e.get("height") == "13"]
    ms = {r["implementation"]: r["ms"] for r in found.steps["rows"] if (r["model"], r.get("batch")) == ("llama", "packed")}
    widths = [float(bar.get("width", "")) for bar in bars[:3]]
    longest = max(ms.values())
    assert widths == [round(86 * ms[name] / longest, 1) for name in ("flexattn", "eager", "sdpa")]


def test_colours_and_markers_tell_implementations_apart() -> None:
    peers = [colour for name, colour in charts.COLOURS.items() if not name.startswith("flexattn")]
    assert len(set(peers)) >= len(peers) - 3  # of other charts
    assert len({charts._marker(0, 0, kind) for kind in charts.MARKERS}) == len(charts.MARKERS)


@pytest.mark.parametrize("name", [page.MEMORY, pytest.param(page.MAIN, marks=pytest.mark.slow)])
def test_plots_of_any_result_are_written(tmp_path: Path, name: str) -> None:
    assert command.main(["--from", str(RESULTS / name), "--plots", str(tmp_path / "plots")]) == 0
    written = {path.stem: ElementTree.parse(path) for path in (tmp_path / "plots").iterdir()}
    groups = {w.group for w in record.read(RESULTS / name).workloads.values()}
    assert {stem.rpartition("_")[0] for stem in written} == groups
    assert command.main(["--from", str(RESULTS / name), "--csv", str(tmp_path / "x.csv")]) == 0
    assert (tmp_path / "x.csv").read_text().startswith("# command: ")
