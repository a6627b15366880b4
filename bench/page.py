"""docs/performance.md with its plots and the README's section on speed, made from committed result files; tests compare both.

python -m flexattn bench --page docs/performance.md --readme README.md --picture docs/speed.svg
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from flexattn.bench import charts, mma, record, regret
from flexattn.bench.charts import COLOURS, Bar, Panel
from flexattn.bench.decode_cells import CELLS
from flexattn.bench.model_tables import model_tables, slower_rows, without_times
from flexattn.bench.peers import needs_dense_mask
from flexattn.bench.record import Content, Record
from flexattn.bench.shapes import SWEEP_SEQLENS, title_of
from flexattn.bench.tables import (
    AUTO,
    Standing,
    Table,
    figure,
    microseconds,
    name_of,
    panel,
    peer_table,
    peers_of,
    slower_table,
    standings,
    sweep_panels,
)
from flexattn.bench.transformers_models import LARGE

RESULTS = Path(__file__).parent / "results"
MAIN, SECOND, MEMORY = "standard_whole_h200.json", "standard_h100.json", "eager_memory.json"
OLDER = {  # by the GPUs whose code they time
    "an A100": ["mma_sm_80_h200.json", "mma_sm_80_192_h200.json", "mma_sm_80_tiles_h200.json"],
    "RTX 40, L4 and L40": ["mma_sm_89_h200.json", "mma_sm_89_more_h200.json", "mma_sm_89_tiles_h200.json"],
}
DECODE, STEPS = ("decode_peers_h200.json", "decode_mla_h200.json"), "transformers_h200.json"
SERVING = "decode_peers_h100.json"
PUBLISHED = "models_whole_h200.json"  # a page without this file has no block of it
BEGIN, END = "<!-- made by `python -m flexattn bench --readme`: begin -->", "<!-- end -->"
NOT_SHOWN = ("flexattn", "python", "cuda")  # versions, which the file has
PLOTS = "plots"  # the folder beside the page

DECODE_PEERS = {
    "flash-attn 4": ("flash-attn 4",),
    "SDPA cuDNN": ("SDPA cuDNN, dense",),
    "FlexAttention": ("FlexAttention, dense",),
}
SERVING_PEERS = {"vLLM": ("vLLM, Triton",), "SGLang": ("SGLang, 8 splits", "SGLang, 32 splits")}
SERVING_STEPS = (
    *("64 x 8192, page 16", "128 decodes, page 16", "1 x 131072, page 64", "131072 among 63 x 1024, page 16"),
    *("2 prefills and 128 decodes, page 16", "MLA 128 heads, 128 x 4096, page 64"),
)
"""Steps of `SERVING` on the page: the kernels of some others have had faster tiles since that run."""
DECODE_PLOTTED = (
    *("1 x 1024, page 16", "64 x 8192, page 16", "64 x 8192, page 1", "1 x 131072, page 64", "128 decodes, page 16"),
    *("131072 among 63 x 1024, page 16", "2048 queries over 32768, page 16", "2 prefills and 128 decodes, page 16"),
)
MODELS = {"llama": "Llama", "mistral": "Mistral", "gemma2": "Gemma 2", "gpt_oss": "gpt-oss"}


class Sources(NamedTuple):
    """The contents of the result files. `main` and `second` have no rows of flexattn but those of `auto`."""

    main: Record
    second: Record
    memory: Record
    decode: Content
    serving: Content
    steps: Content
    older: Mapping[str, Sequence[Record]]  # by the GPUs whose code they time
    models: Record | None = None


@functools.cache
def sources() -> Sources:
    """Reads the result files. Raises OSError outside of a checkout, because only a checkout has them."""
    main, second = record.read(RESULTS / MAIN), regret.with_auto(record.read(RESULTS / SECOND))
    *decodes, serving, steps = (json.loads((RESULTS / name).read_text("utf-8")) for name in (*DECODE, SERVING, STEPS))
    decode = decodes[0] | {"rows": [row for run in decodes for row in run["rows"]]}
    older = {gpus: [record.read(RESULTS / name) for name in names] for gpus, names in OLDER.items()}
    models = record.read(RESULTS / PUBLISHED) if (RESULTS / PUBLISHED).is_file() else None
    return Sources(main, second, record.read(RESULTS / MEMORY), decode, serving, steps, older, models)


# ---- texts of the page and the README about a run


def claim(found: Record) -> str:
    """Returns how many cells `auto` wins and loses."""
    every, dtypes = standings(found), " and ".join(dict.fromkeys(w.dtype for w in found.workloads.values()))
    faster, ahead, behind, level = (
        sum(map(test, every))
        for test in (lambda s: s.speed > 1, lambda s: s.speed >= 1.02, lambda s: s.speed < 0.99, lambda s: s.is_level)
    )
    return (
        f"On an {found.device['name']} in {dtypes}, `attention()` is faster than the fastest of {len(peers_of(found))} other "
        f"implementations in {faster} of {len(every)} cells. It is faster by 2 % or more in {ahead} cells, and slower by more than "
        f"1 % in {behind}. In {level} cells the quartiles of the two times overlap."
    )


def llama_step(steps: Content) -> str:
    """Returns the sentence on packed training in transformers."""
    ms = {r["implementation"]: r["ms"] for r in steps["rows"] if (r["model"], r.get("batch")) == ("llama", "packed") and "ms" in r}
    return (
        f"A training step of two Llama layers over {steps['tokens']:,} packed tokens in Hugging Face transformers takes "
        f"{ms['flexattn']:.1f} ms with flexattn and {ms['sdpa']:.1f} ms with SDPA on an {steps['device']['name']} "
        f"(hidden size {LARGE['hidden_size']:,}, MLP {LARGE['intermediate_size']:,})."
    )


def _marked_peers(found: Record) -> Table:
    return peer_table(found, lambda s: " †" if _has_dense_mask(found, s) else "")


def _has_dense_mask(found: Record, s: Standing) -> bool:
    return s.peer.implementation.startswith("SDPA") and needs_dense_mask(found.workloads[s.workload])


def dense_mask_note(found: Record) -> str:
    """Returns the mean of a peer without the cells in which it gets a dense mask."""
    notes = []
    for peer in peers_of(found):
        every = standings(found, peer)
        rest = [s.speed for s in every if not _has_dense_mask(found, s)]
        if len(rest) < len(every):
            notes.append(
                f"† In {len(every) - len(rest)} cells {peer} gets a dense `attn_mask`, because it has no argument for their "
                f"window or bias. The mean speed without these cells is {geometric_mean(rest):.3f}."
            )
    return "\n\n".join(notes)


def readme_section(found: Sources) -> str:
    picture = f"![Speed of flexattn, the fastest other implementation's being 1, on an {found.main.device['name']}](docs/speed.svg)"
    notes = (
        "A cell is one shape in one direction, forward or backward. Speed is the other implementation's time divided by "
        "flexattn's, with the backend that `auto` selects. Level: the quartiles of both times overlap. FlashAttention 3 and "
        "TransformerEngine are not in this run. [Benchmarks](docs/performance.md) has plots, every cell and the method."
    )
    parts = [picture, claim(found.main), llama_step(found.steps), _marked_peers(found.main).markdown("other implementation")]
    return "\n\n".join([*parts, dense_mask_note(found.main), notes])


def with_readme_section(text: str, found: Sources) -> str:
    """Returns the README with a new part between its two marks. Raises ValueError if it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no part to make: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{readme_section(found)}\n\n{END}{after}"


# ---- plots


def plots(found: Sources) -> dict[str, str]:
    """Returns the SVG files of the page, by their names."""
    files: dict[str, str] = {}
    for name, run in (("h200", found.main), ("h100", found.second)):
        drawn = dict(charts.figures(run))
        files |= {f"{direction}_{name}.svg": drawn[f"sweep_{direction}"] for direction in ("forward", "backward")}
        if name == "h200":
            files |= {f"packed_{direction}_{name}.svg": drawn[f"ragged_{direction}"] for direction in ("forward", "backward")}
    return files | {
        "decode_h200.svg": _decode_plot(found.decode),
        "transformers_h200.svg": _steps_plot(found.steps),
        "memory.svg": dict(charts.figures(found.memory))["memory_both"],
    }


def _decode_times(decode: Content, peers_of_libraries: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Returns microseconds by cell, then by name: of implementations that are one peer the fastest."""
    found: dict[str, dict[str, float]] = {}
    for cell in CELLS:
        us = {row["implementation"]: row["us"] for row in decode["rows"] if row["cell"] == cell and row.get("us")}
        peers = {peer: [us[name] for name in names if name in us] for peer, names in peers_of_libraries.items()}
        if "flexattn" in us:
            found[cell] = {"flexattn": us["flexattn"]} | {peer: min(times) for peer, times in peers.items() if times}
    return found


def _decode_plot(decode: Content) -> str:
    times = _decode_times(decode, DECODE_PEERS)
    panels = [
        Panel(
            cell,
            bars=[
                Bar(name, us, COLOURS.get(AUTO if name == "flexattn" else name, charts.GRAY)) for name, us in times[cell].items()
            ],
        )
        for cell in DECODE_PLOTTED
    ]
    return charts.bar_chart(f"Decode on {decode['device']['name']}: time of a call, shorter is faster", panels, "microseconds")


def _steps_plot(steps: Content) -> str:
    panels = []
    colours = {"flexattn": COLOURS[AUTO], "sdpa": COLOURS["SDPA cuDNN"]}
    for model, title in MODELS.items():
        rows = [r for r in steps["rows"] if r["model"] == model and r.get("batch") == "packed" and "ms" in r]
        rows.sort(key=lambda r: r["implementation"] != "flexattn")
        bars = [Bar(r["implementation"], r["ms"], colours.get(r["implementation"], charts.GRAY)) for r in rows]
        panels.append(Panel(f"{title}, packed batch", bars=bars))
    return charts.bar_chart(f"Training step in transformers, {steps['device']['name']}: shorter is faster", panels, "milliseconds")


# ---- tables


def _speed(cell: Standing | None) -> str:
    return "-" if cell is None else "level" if cell.is_level else f"{cell.speed:.3f}"


def _cells(found: Record) -> dict[tuple[str, str], Standing]:
    return {(s.workload, s.direction): s for s in standings(found)}


def sweep_table(found: Record, show: Callable[[str, str], str] | None = None) -> Table:
    """Returns a text for each cell of the sweep: the speed, or the result of `show`."""
    every, rows = _cells(found), []
    show = show or (lambda *cell: _speed(every.get(cell)))
    for direction, head_dim, mask in sweep_panels(found):
        texts = {w.seqlen_q: show(w.name, direction) for w in panel(found, head_dim, mask)}
        title = f"{direction}, {head_dim}, {'causal' if mask == 'causal' else 'no mask'}"
        rows.append((title, [texts.get(s, "-") for s in SWEEP_SEQLENS]))
    return Table("", [f"{s:,}" for s in SWEEP_SEQLENS], rows)


def others_table(found: Record) -> Table:
    """Returns TFLOP/s and the speed of the workloads outside of the sweep."""
    every, rows = _cells(found), []
    for name in dict.fromkeys(workload for workload, _ in every):
        if found.workloads[name].group != "sweep":
            cells = [every.get((name, direction)) for direction in ("forward", "backward")]
            rates = [figure(None if s is None else s.ours) for s in cells]
            rows.append((title_of(found.workloads[name]), [rates[0], _speed(cells[0]), rates[1], _speed(cells[1])]))
    return Table("", ["forward TFLOP/s", "speed", "backward TFLOP/s", "speed"], rows)


def decode_table(decode: Content, libraries: Mapping[str, Sequence[str]], steps: Collection[str] = tuple(CELLS)) -> Table:
    """Returns flexattn's microseconds in each step, and its speed relative to each library."""
    rows = [
        (cell, [microseconds(ours), *(f"{us[peer] / ours:.2f}" if peer in us else "-" for peer in libraries)])
        for cell, us in _decode_times(decode, libraries).items()
        if len(us) > 1 and cell in steps and (ours := us["flexattn"])
    ]
    return Table("", ["flexattn, us", *libraries], rows)


def host_table(found: Record) -> Table:
    """Returns the median time of the host for calls with a short device time."""
    names = [name for name in found.implementations() if name not in ("SDPA flash", "varlen_attn")]
    rows = []
    for name, direction in found.cells():
        if found.workloads[name].group in ("small", "decode"):
            us = {implementation: row.host_us for implementation, row in found.of(name, direction).items()}
            cells = ["-" if us.get(n) is None else f"{us[n]:.0f}" for n in names]
            rows.append((f"{title_of(found.workloads[name])}, {direction}", cells))
    return Table("", list(map(name_of, names)), rows)


def memory_table(found: Record) -> Table:
    """Returns the peak memory of a call at head dim 128 with a causal mask, the least and the most over the lengths."""
    rows = []
    for name in found.implementations():
        rows_of_direction = []
        for direction in ("forward", "backward"):
            cells = [found.of(w.name, direction).get(name) for w in panel(found, 128, "causal")]
            if mib := [row.peak_mib for row in cells if row is not None and row.peak_mib]:  # 0: its memory was allocated before
                low, high = f"{min(mib):.0f}", f"{max(mib):.0f}"
                rows_of_direction.append(low if low == high else f"{low} to {high}")
        rows += [(name_of(name), rows_of_direction)] if rows_of_direction else []
    return Table("", ["forward, MiB", "backward, MiB"], rows)


# ---- the page


def _sources(found: Sources) -> str:
    lines = []
    published = {} if found.models is None else {PUBLISHED: found.models}
    older = [pair for gpus, runs in found.older.items() for pair in zip(OLDER[gpus], runs, strict=True)]
    alike: dict[str, list[str]] = {}
    for name, run in ((MAIN, found.main), (SECOND, found.second), *older, *published.items()):
        packages = {package: text for package, text in run.versions.items() if text and package not in NOT_SHOWN}
        versions = ", ".join(f"{package} {text}" for package, text in packages.items())
        alike.setdefault(f"{run.device['name']}, {_day(run)[:10]}, {versions}", []).append(name)
    for facts, names in alike.items():
        lines.append(f"- {', '.join(f'[{name}](../bench/results/{name})' for name in names)}: {facts}")
    for name, content in ((DECODE[0], found.decode), (SERVING, found.serving), (STEPS, found.steps)):
        libraries = (SERVING_PEERS if name == SERVING else DECODE_PEERS) if "peers" in content else {}
        versions = f"torch {content['versions']['torch']}" + "".join(
            f", {peer} {content['peers'][names[0]]}" for peer, names in libraries.items()
        )
        versions += f", transformers {content['transformers']}" if "transformers" in content else ""
        device, day = content["device"]["name"], content["started"][:10]
        lines.append(f"- [{name}](../bench/results/{name}): {device}, {day}, {versions}")
    memory = found.memory
    lines.append(f"- [Memory on a CPU](../bench/results/{MEMORY}) (script not kept): torch {memory.versions['torch']}")
    return "\n".join(lines)


def _day(found: Record) -> str:
    return (found.started or "")[:16].replace("T", " ")


def _second(found: Sources) -> str:
    days = f"The H100 run is from {_day(found.second)} UTC, the H200 run from {_day(found.main)} UTC. Kernels changed in between."
    return f"{claim(found.second)} {days}"


def _ceiling(found: Sources) -> str:
    ceilings = found.main.ceilings or {}
    return (
        f"A {ceilings['matmul_dtype']} matrix product of {ceilings['matmul_size']:,}³ ran at {ceilings['matmul_tflops']:.0f} "
        f"TFLOP/s in the run on the {found.main.device['name']}."
    )


def older_gpus(runs: Mapping[str, Sequence[Record]]) -> str:
    """Returns a sentence and a table for the code of each kind of GPU."""
    parts = (
        f"{mma.claim(*found)} This is the code for {gpus}.\n\n{mma.table(*found).markdown('workload')}"
        for gpus, found in runs.items()
    )
    return "\n\n".join(parts)


def _models(found: Sources) -> str:
    assert found.models is not None
    counts, unseen, others = model_tables(found.models)
    tables = [without_times(table).markdown("shape, speed") for table in (unseen, slower_rows(others))]
    return "\n\n".join([f"On an {found.models.device['name']}:", counts._replace(title="").markdown("shapes"), *tables])


SWEEP_CORNER = "direction, head dim, mask"
BLOCKS: dict[str, Callable[[Sources], str]] = {
    "the runs' cells": lambda s: f"{claim(s.main)}\n\n{_second(s)}",
    "training step": lambda s: llama_step(s.steps),
    "decode": lambda s: decode_table(s.decode, DECODE_PEERS).markdown("step"),
    "decode, serving engines": lambda s: decode_table(s.serving, SERVING_PEERS, SERVING_STEPS).markdown("step"),
    "memory": lambda s: memory_table(s.main).markdown("implementation"),
    "implementations": lambda s: f"{_marked_peers(s.main).markdown('implementation')}\n\n{dense_mask_note(s.main)}",
    "sweep": lambda s: sweep_table(s.main).markdown(SWEEP_CORNER),
    "rates": lambda s: sweep_table(s.main, lambda *cell: figure(s.main.of(*cell).get(AUTO))).markdown(SWEEP_CORNER),
    "workloads": lambda s: others_table(s.main).markdown("workload"),
    "slower": lambda s: slower_table(s.main).markdown("cell"),
    "older GPUs": lambda found: older_gpus(found.older),
    "models": _models,
    "host": lambda s: host_table(s.main).markdown("call"),
    "ceiling": _ceiling,
    "sources": _sources,
}


def needed_blocks(found: Sources) -> list[str]:
    """Returns the names of the page's blocks. Runs that have no file yet have none."""
    has_run = {"models": found.models}
    return [name for name in BLOCKS if has_run.get(name, True)]


def performance(text: str, found: Sources) -> str:
    """Returns the page with each of its blocks replaced. Raises ValueError if a block is missing or unknown."""
    names, needed = re.findall(BLOCK, text), needed_blocks(found)
    if sorted(name for name, _ in names) != sorted(needed):
        raise ValueError(f"the page has blocks {', '.join(name for name, _ in names)}; needed, each once: {', '.join(needed)}")
    return re.sub(BLOCK, lambda match: f"{_begin(match[1])}\n\n{BLOCKS[match[1]](found)}\n\n{END}", text)


def _begin(name: str) -> str:
    return f"<!-- made by `python -m flexattn bench --page` ({name}): begin -->"


BLOCK = re.compile(f"^{re.escape(_begin('NAME')).replace('NAME', '(.+?)')}$(.*?)^{re.escape(END)}$", re.MULTILINE | re.DOTALL)


def write(path: Path) -> None:
    """Rewrites the page's blocks, and its plots in the folder next to it."""
    found = sources()
    folder = path.parent / PLOTS
    folder.mkdir(exist_ok=True)
    for name, svg in plots(found).items():
        (folder / name).write_text(svg, "utf-8")
    path.write_text(performance(path.read_text("utf-8"), found), "utf-8")
