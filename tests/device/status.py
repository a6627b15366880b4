"""Makes the tables of docs/status.md from the result files of device runs: `python -m tests.device.status`."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.device.steps import has_run
from tests.fuzz.check import ON_GPU
from tests.fuzz.config import draw_config, features, varied

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "status.md"
BEGIN, END = "<!-- made by `python -m tests.device.status`: begin -->", "<!-- end -->"
NOT_RUN = "not run"
ENOUGH = 2000  # each feature is among so many configurations


def result_files(folder: Path = ROOT / "bench" / "results") -> list[dict[str, Any]]:
    """Returns the contents of the device runs' result files, by their names."""
    return [json.loads(path.read_text("utf-8")) | {"name": path.name} for path in sorted(folder.glob("device_*.json"))]


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Returns the text between the page's marks."""
    devices = list(dict.fromkeys(run["device"]["name"] for run in runs))
    own = [[run for run in runs if run["device"]["name"] == device] for device in devices] or [[]]
    heads = devices or ["any GPU"]
    links = [
        f"- {run['device']['name']}: [{run['name']}](../bench/results/{run['name']}), {run['started'][:10]}, "
        f"torch {run['versions']['torch']}, Triton {run['versions']['triton']}" + ", ended before its time" * (not run["complete"])
        for run in runs
    ]
    return "\n\n".join(
        [
            "\n".join(links) or "No device run is on file.",
            _table(["step", *heads], ([step, *(_of_step(step, runs) for runs in own)] for step in STEPS)),
            _table(
                ["file of tests", *heads],
                ([name, *(_of_file(name, runs) for runs in own)] for name in sorted(_files(runs)) or ["any"]),
            ),
            _table(["kernel family", *heads], ([name, *(_of_family(name, runs) for runs in own)] for name in families())),
            _table(
                ["feature", *heads],
                (
                    [name, *(_of_feature("fuzz", name, runs) for runs in own)]
                    for name in sorted(known_features() | _drawn("fuzz", runs))
                ),
            ),
            _table(
                ["feature in JAX", *heads],
                ([name, *(_of_feature("jax", name, runs) for runs in own)] for name in sorted(_drawn("jax", runs)) or ["any"]),
            ),
        ]
    )


def _of_tests(found: Counter[str]) -> str:
    skipped = f", {found['skipped']:,} skipped" * bool(found["skipped"])
    crashed = f", {found['crashed']:,} processes crashed" * bool(found["crashed"])
    return f"{found['passed']:,} passed, {found['failed']:,} failed{skipped}, {found['not run']:,} not run{crashed}"


def _of_memcheck(found: Counter[str]) -> str:
    unknown = found["processes"] - found["processes with a summary"]
    ended = f"; {unknown:,} of {found['processes']:,} processes ended without a summary" * bool(unknown)
    return f"{found['calls of attention']:,} calls, {found['errors']:,} errors, {found['wrong']:,} wrong{ended}"


STEPS: dict[str, Callable[[Counter[str]], str]] = {
    "tests": _of_tests,
    "fuzz": lambda found: (
        f"{found['compositions']:,} compositions of {found['configurations']:,} configurations, {found['wrong']:,} wrong"
    ),
    "jax": lambda found: f"{found['compositions']:,} compositions, {found['wrong']:,} wrong",
    "memcheck": _of_memcheck,
}


def _found(step: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what a step of the runs found, without those in which it made no call: these show nothing."""
    every = [run["steps"][step] for run in runs if step in run["steps"]]
    return [found for found in every if has_run(step, found)]


def _files(runs: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Returns the outcomes of tests by their file."""
    sums: dict[str, Counter[str]] = {}
    for found in (run["steps"].get("tests", {}) for run in runs):
        for name, outcomes in found.get("files", {}).items():
            sums.setdefault(name, Counter()).update(outcomes)
    return sums


def _of_file(name: str, runs: Sequence[dict[str, Any]]) -> str:
    outcomes = _files(runs).get(name, Counter[str]())
    if not (outcomes["passed"] or outcomes["failed"]):
        return "skipped" if outcomes["skipped"] and not outcomes["not run"] else NOT_RUN
    return ", ".join(f"{outcomes[kind]:,} {kind}" for kind in ("passed", "failed", "skipped", "not run") if outcomes[kind])


def _of_step(step: str, runs: Sequence[dict[str, Any]]) -> str:
    every = _found(step, runs)
    sums = Counter[str]()
    for found in every:
        sums.update({name: value for name, value in found.items() if isinstance(value, int)})
    return STEPS[step](sums) if every else NOT_RUN


def families() -> list[str]:
    """Returns the names of all kernel families, with their directions."""
    from flexattn.kernels_triton.families import BACKWARDS, FORWARDS

    every = [family for order in (FORWARDS, BACKWARDS) for of_operands in order.values() for family in of_operands]
    return list(dict.fromkeys(f"{family.name} {family.direction}" for family in every))


def _of_family(name: str, runs: Sequence[dict[str, Any]]) -> str:
    return "reached" if any(name in run["families"]["reached"] for run in runs) else NOT_RUN


@functools.cache
def known_features() -> set[str]:
    """Returns every feature that the fuzz draws on a GPU."""
    drawn = (varied(draw_config(seed, ON_GPU), seed) for seed in range(ENOUGH))
    return {f"{group}: {feature}" for config in drawn for group, feature in features(config).items()}


def _drawn(step: str, runs: Iterable[dict[str, Any]]) -> set[str]:
    return {name for run in runs for name in run["steps"].get(step, {}).get("features", ())}


def _of_feature(step: str, name: str, runs: Sequence[dict[str, Any]]) -> str:
    counts = [found["features"][name] for found in _found(step, runs) if name in found["features"]]
    calls, wrong = (sum(count[n] for count in counts) for n in (0, 1))
    if not calls:
        return NOT_RUN
    return f"{wrong:,} of {calls:,} wrong" if wrong else f"{calls:,} right"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def page(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """Returns the page with its tables made anew."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    assert len(marked.findall(text)) == 1
    return marked.sub(lambda _: f"{BEGIN}\n\n{tables(runs)}\n\n{END}", text)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text("utf-8"), result_files()), "utf-8")


if __name__ == "__main__":
    main()
