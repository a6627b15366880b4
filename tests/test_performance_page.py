"""docs/performance.md says what the recorded run measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = json.loads((ROOT / "bench/results/rates_h200.json").read_text())["rows"]
PAGE = (ROOT / "docs/performance.md").read_text()


def test_every_figure_is_the_recorded_one() -> None:
    recorded = {(r["direction"], r["head_dim"], r["causal"], r["name"], r["seqlen"]): r["tflops"] for r in RESULTS}
    seen = {}
    for section in PAGE.split("### ")[1:]:
        title, *lines = section.splitlines()
        direction, head_dim, mask = re.fullmatch(r"(\w+), head dim (\d+), (causal|full)", title).groups()
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
        for name, *cells in rows:
            for seqlen, cell in zip(header[1:], cells, strict=True):
                seen[direction, int(head_dim), mask == "causal", name, int(seqlen)] = cell
    assert seen == {key: f"{tflops:.0f}" for key, tflops in recorded.items()}


def test_the_cells_where_flexattention_is_faster_are_counted() -> None:
    times = {(r["name"], r["direction"], r["head_dim"], r["causal"], r["seqlen"]): r["us"] for r in RESULTS}
    cells = [key[1:] for key in times if key[0] == "flexattn"]
    slower = [cell for cell in cells if times[("flexattn", *cell)] > times[("FlexAttention", *cell)]]
    assert all((head_dim, causal) == (128, False) for _, head_dim, causal, _ in slower)
    assert f"in {len(cells) - len(slower)} of the {len(cells)} cells" in PAGE
    assert f"It is slower in {len(slower)}, all at head dim 128" in PAGE
