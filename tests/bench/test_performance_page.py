"""docs/performance.md and the README's section say what the recorded runs measured; the report and the plots show it."""

from __future__ import annotations

import itertools
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flexattn.bench import command, page, picture, plots, record, report, tables
from flexattn.bench.record import Record
from flexattn.bench.shapes import sweep
from tests.conftest import ROOT

RESULTS = ROOT / "bench" / "results"
SVG = "{http://www.w3.org/2000/svg}"
PAGE_FILES = ("standard_again_h200.json", "eager_memory.json")  # what docs/performance.md and the README are made of, in this order


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    return {name: record.read(RESULTS / name) for name in PAGE_FILES}


@pytest.fixture(scope="module")
def main(records: dict[str, Record]) -> Record:
    return records[PAGE_FILES[0]]


@pytest.fixture
def matplotlib() -> None:
    """Skips without matplotlib, which the extra `test` installs; where it is missing the report has no plots, and says so."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")


def test_the_page_is_what_the_command_makes_of_the_files(records: dict[str, Record]) -> None:
    assert (ROOT / "docs" / "performance.md").read_text("utf-8") == page.performance(records)


def test_the_readme_is_what_the_command_makes_of_the_files(records: dict[str, Record]) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text == page.with_readme_section(text, records)


def test_the_picture_is_what_the_command_makes_of_the_file(main: Record, tmp_path: Path) -> None:
    assert command.main(["--from", str(RESULTS / PAGE_FILES[0]), "--picture", str(tmp_path / "speed.svg")]) == 0
    assert (tmp_path / "speed.svg").read_text("utf-8") == (ROOT / "docs" / "speed.svg").read_text("utf-8")


def alike(run: Record, newer: Record) -> dict[str, tables.Standing]:
    """Where a run's cells stand: those of a newer one, beside the peers of that."""
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
    """notes/bounds.md, "Since that run": how many cells stand where, and each that it names, then and now beside the same peers."""
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
    """Where its cells stand, those that are no more than 2 % ahead, and its backwards beside flash-attn 4's by length."""
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


def test_the_last_whole_run_is_what_its_file_says(main: Record) -> None:
    """notes/bounds.md, "The last whole run", whose cells are held to the one before it, and of that one where its cells stand."""
    section, before = (section_of_bounds(title) for title in ("The last whole run", "On an NVIDIA H100"))
    older = record.read(RESULTS / "standard_h100.json")
    lines = lines_of_the_whole_run(main, older)
    table, _, profiles = section.partition("What binds those that are behind")
    assert profiles
    assert lines == lines_of_cells(table)
    assert lines_of_the_whole_run(older, older)[:6] == lines_of_cells(before.partition("\nShort forwards")[0])
    speeds = [s.speed for s in tables.standings(main)]
    ahead, behind = sum(x >= 1.02 for x in speeds), sum(x < 0.99 for x in speeds)
    text = f"{ahead} of {len(speeds)} cells are ahead by 2 % or more, and {behind} behind by more than 1 %"
    assert text in " ".join(section.split())


def test_every_lost_cell_stands_left_of_the_pictures_line(main: Record) -> None:
    root = ElementTree.fromstring(picture.svg(main))
    [line] = [e for e in root.iter(f"{SVG}line") if e.get("stroke") == "#555555"]
    dots = [float(e.get("cx", "")) for e in root.iter(f"{SVG}circle") if float(e.get("cy", "")) > picture.TOP]  # not the legend's
    assert len(dots) == len(tables.standings(main))
    assert sum(x <= float(line.get("x1", "")) for x in dots) == len(lost_cells(main))


def test_a_picture_of_nothing_is_refused(main: Record) -> None:
    with pytest.raises(ValueError, match="no cell in which both"):
        picture.svg(main._replace(rows=[]))


def test_a_readme_without_a_place_for_it_is_refused(records: dict[str, Record]) -> None:
    with pytest.raises(ValueError, match="has no part to make"):
        page.with_readme_section("# nothing here\n", records)


def lost_cells(record: Record) -> set[tuple[str, str]]:
    """Computed here from the rows alone: the page's own code is not asked."""
    fastest: dict[tuple[str, str], dict[bool, float]] = {}
    for r in record.rows:
        if r.us is not None:
            cell = fastest.setdefault((r.workload, r.direction), {})
            mine = r.implementation.startswith("flexattn ")
            cell[mine] = min(cell.get(mine, r.us), r.us)
    return {cell for cell, best in fastest.items() if len(best) == 2 and best[True] >= best[False]}


def test_every_cell_that_is_lost_is_listed(main: Record) -> None:
    listed = (ROOT / "docs" / "performance.md").read_text("utf-8").partition("## Lost cells")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([\w.-]+) (\w+) \|", listed, re.M)) == lost_cells(main)
    assert lost_cells(main)


def test_every_figure_of_the_sweep_is_the_recorded_one(main: Record) -> None:
    by_cell = {(r.workload, r.direction, r.implementation): r for r in main.rows}
    seen = 0
    for section in (ROOT / "docs" / "performance.md").read_text("utf-8").split("### ")[1:]:
        title, *lines = section.partition("\n## ")[0].splitlines()
        found = re.fullmatch(r"(\w+), head dim (\d+), (causal|full)", title)
        if found is None:
            continue
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        for name, *cells in table[2:]:
            for seqlen, cell in zip(table[0][1:], cells, strict=True):
                workload = sweep(int(found[2]), found[3], int(seqlen)).name
                row = by_cell.get((workload, found[1], name))
                figure = None if row is None or row.tflops is None else f"{row.tflops:.{1 if row.tflops < 9.95 else 0}f}"
                assert cell == ("-" if row is None else figure or row.status)
                seen += row is not None and row.tflops is not None
    assert seen == sum(r.tflops is not None and main.workloads[r.workload].group == "sweep" for r in main.rows)


class Page(HTMLParser):
    """Tags that are open, every image, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.sources: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given["src"] or "")
        elif tag not in ("meta", "br"):
            self.open.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_the_report_stands_alone(main: Record) -> None:
    parsed = Page()
    parsed.feed(report.html(main))
    assert not parsed.open
    assert len(parsed.images) == len(list(plots.figures(main))) > 2  # the sweep forward and backward, and a picture of each group
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    text = " ".join(parsed.text)
    for r in main.rows:
        if r.us is not None:
            assert f"{r.us:.1f}" in text
    for fact in (
        main.device["name"],
        "2.11.0+cu130",
        main.command,
        main.method["flops"],
        f"Lost cells: {len(lost_cells(main))} of {len(main.cells())}",
    ):
        assert fact in text


@pytest.mark.slow
def test_the_report_says_what_was_refused_and_left_out(main: Record) -> None:
    spoiled = main.rows[0]._replace(status="wrong", reason="out: max error <b>1</b>\nworst", us=None, tflops=None)
    refused = main.rows[1]._replace(status="refused", reason="it has no argument window", us=None, tflops=None)
    left_out = [{"workload": "long-128k", "direction": "forward", "reason": "the budget of 480 s was spent"}]
    text = report.html(main._replace(rows=[spoiled, refused, *main.rows[2:]], left_out=left_out, complete=False))
    assert "wrong: out: max error &lt;b&gt;1&lt;/b&gt;" in text
    assert "it has no argument window" in text
    assert "the budget of 480 s was spent" in text
    assert "did not measure all" in text


def dimensions(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_a_report_without_matplotlib_says_so(main: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    text = report.html(main)
    assert "There are no plots" in text
    assert "<img" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("matplotlib")
def test_plots_of_a_recorded_run(records: dict[str, Record], tmp_path: Path) -> None:
    for name, shown in records.items():
        assert command.main(["--from", str(RESULTS / name), "--plots", str(tmp_path)]) == 0
        assert plots.write(tmp_path, shown)
    groups = {w.group for w in records[PAGE_FILES[0]].workloads.values()} - {"sweep"}
    names = {"sweep_forward", "sweep_backward", "memory", *groups}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in names}
    for path in tmp_path.iterdir():
        width, height = dimensions(path.read_bytes())
        assert width > 500
        assert height > 300


@pytest.mark.usefixtures("matplotlib")
def test_plots_have_labels_and_the_peers_their_colours(main: Record) -> None:
    drawn = dict(plots.figures(main))
    for name in ("sweep_forward", "sweep_backward"):
        figure = drawn[name]
        assert len(figure.axes) == 6
        for ax in figure.axes:
            assert ax.get_xlabel() == "sequence length, tokens"
            assert ax.get_ylabel() == "TFLOP/s"
            lines = {line.get_label(): line for line in ax.get_lines() if not str(line.get_label()).startswith("_")}
            assert lines.keys() >= {"flexattn triton", "flexattn cudnn", "SDPA flash", "SDPA cuDNN", "FlexAttention"}
            assert all(line.get_color() == plots.COLOURS[name] for name, line in lines.items())
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)
    [ax] = [ax for ax in drawn["sweep_backward"].axes if ax.get_title() == "head dim 128, full"]
    [ours] = [line for line in ax.get_lines() if line.get_label() == "flexattn triton"]
    workloads = [sweep(128, "full", s).name for s in (512, 1024, 2048, 4096, 8192, 16384)]
    assert list(ours.get_ydata()) == [main.of(w, "backward")["flexattn triton"].tflops for w in workloads]


@pytest.mark.usefixtures("matplotlib")
def test_bars_of_other_groups_and_curves_of_scaling(main: Record) -> None:
    from flexattn.bench.shapes import WORKLOADS

    rows, shapes = [], {}
    for name in ("llama3-8b-s2048", "llama3-8b-s8192", "scaling-s512", "scaling-s1024"):
        shapes[name] = WORKLOADS[name]
        for n, implementation in enumerate(("flexattn triton", "SDPA cuDNN")):
            given = {"us": 10.0 * (n + 1), "us_q1": 9.0, "us_q3": 11.0, "tflops": 100.0, "peak_mib": 64.0, "workload": name}
            rows.append(main.rows[0]._replace(implementation=implementation, direction="forward", **given))
    drawn = dict(plots.figures(main._replace(rows=rows, workloads=shapes)))
    assert drawn.keys() == {"models", "scaling"}
    assert len(drawn["models"].axes[0].patches) == 4
    assert [ax.get_ylabel() for ax in drawn["scaling"].axes] == ["time of a call, ms", "peak memory of a call, MiB"]
    assert dimensions(plots.png(drawn["scaling"]))[0] > 500
