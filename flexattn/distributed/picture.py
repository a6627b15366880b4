"""Pictures of a plan: the scores that each rank computes, and the keys that each rank holds under each strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flexattn.distributed.layout import Run, Runs, cut, union
from flexattn.distributed.plans import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 512  # points on a side of the picture of scores
HIDDEN = 1.0, 1.0, 1.0
EMPTY = 0.91, 0.92, 0.93  # scores that the mask hides
NARROWEST = 0.04  # A run with a smaller fraction of the keys is too narrow for the number of its step.
COMES = 0.35  # opacity of keys from other ranks


def plot_plan(plan: Plan, *, heads: int = 8) -> Figure:
    """Draws a plan: the scores that each rank computes, and the keys that it holds under each strategy. Nothing is sent.

    On the left, a row is a query and a column is a key, in the order of the full sequence. The colour shows the rank that has the
    query. Under "ulysses" each rank computes all scores, for its heads. On the right, a row is a rank and a column is a key. Keys
    that the rank has from the start are in full colour, and fetched keys are pale. In a ring they come from one rank at a time, and
    a number shows the step. Under "ulysses" a rank holds all tokens of some heads, and the height of its bar shows these heads.
    Needs matplotlib: `pip install "flexattn[bench]"`.

    Args:
        plan: with or without a process group.
        heads: number of heads that "ulysses" splits.

    Returns:
        A figure of matplotlib. `figure.savefig("plan.png")` writes it.

    Raises:
        ImportError: matplotlib is not installed. ValueError: the plan has no query or no key.
    """
    from matplotlib import colormaps, pyplot

    if not plan.length or not plan.length_kv:
        raise ValueError(f"plan has {plan.length} queries and {plan.length_kv} keys; accepted: at least one of both")
    colours = [colormaps["tab10"](rank % 10)[:3] for rank in range(plan.ranks)]
    figure: Figure
    figure, axes = pyplot.subplot_mosaic(
        [["scores", "gather", "halo"], ["scores", "ring", "ulysses"]], figsize=(10.5, 4.2), width_ratios=[1.25, 1, 1]
    )
    _draw_scores(axes["scores"], plan, colours)
    for name in ("gather", "halo", "ring", "ulysses"):
        _draw_keys(axes[name], plan, name, (colours, heads))
    figure.tight_layout()
    return figure


def _draw_scores(ax: Axes, plan: Plan, colours: list[Any]) -> None:
    rows, columns = (torch.arange(0, n, -(-n // MOST_POINTS), device="cpu") for n in (plan.length, plan.length_kv))
    image = torch.tensor(EMPTY, device="cpu").repeat(len(rows), len(columns), 1)
    seen = torch.zeros(len(rows), len(columns), dtype=torch.bool, device="cpu")
    for place, query in enumerate(rows.tolist()):
        for keys in plan.mask.needs(Run(query, query + 1)):  # a partly visible block in full, because all of it is computed
            seen[place] |= (columns >= keys.start) & (columns < keys.stop)
    for rank, runs in enumerate(plan.q_runs):
        own = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        for run in runs:
            own |= (rows >= run.start) & (rows < run.stop)
        image[own[:, None] & seen] = torch.tensor(colours[rank], dtype=image.dtype, device="cpu")
    ax.imshow(image.numpy(), extent=(0, plan.length_kv, plan.length, 0), aspect="auto", interpolation="nearest")
    ax.set_title(f"scores, by the rank of the query: {plan.layout}", fontsize=10)
    ax.set(xlabel="key", ylabel="query")


def _draw_keys(ax: Axes, plan: Plan, strategy: str, look: tuple[list[Any], int]) -> None:
    colours, heads = look
    for rank in range(plan.ranks):
        own = union(plan.kv_runs[rank])
        if strategy == "ulysses":
            part = cut(heads, plan.ranks)[rank]
            _bars(ax, own, (rank, 0.8), (*colours[rank], 1.0))
            place = rank - 0.4 + 0.8 * part.start / heads, 0.8 * part.size / heads
            ax.broken_barh([(0, plan.length_kv)], place, facecolors=[(*colours[rank], COMES)], edgecolor="black", lw=0.5)
            continue
        comes = plan.fetched(strategy, rank) if strategy != "ring" else union(run for runs in plan.kv_runs for run in runs)
        _bars(ax, comes, (rank, 0.8), (*colours[rank], COMES))
        _bars(ax, own, (rank, 0.8), (*colours[rank], 1.0))
        if strategy == "ring":
            for step in range(plan.ranks):
                for run in plan.kv_runs[(rank - step) % plan.ranks]:
                    if run.size < NARROWEST * plan.length_kv:
                        continue
                    ax.text((run.start + run.stop) / 2, rank, str(step), ha="center", va="center", fontsize=7)
    titles = {"gather": "all keys come", "halo": "keys that are seen come", "ring": "keys by step", "ulysses": "heads for tokens"}
    ax.set_title(f"{strategy}: {titles[strategy]}", fontsize=10)
    ax.set(xlim=(0, plan.length_kv), ylim=(plan.ranks - 0.5, -0.5), xlabel="key")
    ax.set_yticks(range(plan.ranks), [f"rank {rank}" for rank in range(plan.ranks)])


def _bars(ax: Axes, runs: Runs, place: tuple[int, float], colour: tuple[float, ...]) -> None:
    rank, height = place
    ax.broken_barh([(run.start, run.size) for run in runs], (rank - height / 2, height), facecolors=[HIDDEN])
    ax.broken_barh([(run.start, run.size) for run in runs], (rank - height / 2, height), facecolors=[colour])
