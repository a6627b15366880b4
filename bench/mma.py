"""The kernels for mma.sync in `python -m flexattn bench --as sm_80 --preset older`: implementations, tiles, a table, and rules.

A run times, in each cell, these kernels, the portable ones, SDPA flash and FlexAttention, which is compiled for the same target.
`--mma-tiles` adds the tiles of `CANDIDATES` in cells of the sweep. `tiles.py` has the committed ones.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

import flexattn
from flexattn.bench.counts import band_of
from flexattn.bench.implementations import (
    MMA_CAPABILITIES,
    PORTABLE,
    Implementation,
    Launchers,
    Prepared,
    Unavailable,
    attention_of,
    capability_of,
    differentiable,
    with_launchers,
    with_wish,
)
from flexattn.bench.inputs import Tensors, arguments_of
from flexattn.bench.record import Record
from flexattn.bench.shapes import MODS, OLDER, Workload, title_of
from flexattn.bench.tables import Table, standings

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.crossovers import Rule

MMA, REPEATABLE, TILES = "flexattn mma", "flexattn mma deterministic", "flexattn mma tile"
FLASH, FLEX = "SDPA flash", "FlexAttention"
SWEPT_SEQLENS = (1024, 4096)  # tiles are timed at these lengths
TIE = 0.02  # share of a time by which runs differ

# Tiles by direction and head dim, as `MmaTile`, `MmaBackwardTile` and `MmaDqTile` write them
CANDIDATES: dict[str, dict[int, tuple[str, ...]]] = {
    "forward": {
        64: ("128x64x4x2 q", "128x64x4x1", "128x64x4x2", "64x64x4x2 q"),
        96: ("128x64x4x1", "128x32x4x2", "128x32x4x1", "64x64x4x1"),
        128: ("128x64x4x1", "128x32x4x2", "128x32x4x1", "64x64x4x1"),
        256: ("128x32x8x2 q", "128x64x8x1", "64x64x4x1", "128x32x8x1", "64x32x4x2 q"),
    },
    "backward": {
        64: ("32x128x4x2 4-4-2 v", "32x128x4x2 4-4-1 v", "64x128x8x2 4-4-2", "64x64x4x2 4-4-2 v"),
        96: ("64x64x4x2 2-2-1 v", "64x64x4x1 4-4-1 v", "64x128x8x2 4-2-2", "32x64x4x2 4-1-1 v"),
        128: ("64x128x8x2 4-2-2", "64x128x8x2 4-2-1", "32x64x4x2 4-1-1 v", "32x64x4x2 4-2-1 v", "64x64x8x2 4-2-2"),
        256: ("64x64x8x1 4-1-1", "64x64x8x1 2-1-1", "32x64x8x1 4-1-1 v", "32x64x8x1 4-2-1 v"),
    },
    "dq": {
        64: ("128x32x4x2", "64x64x4x2", "128x64x4x1"),
        96: ("128x32x4x1", "64x32x4x2", "64x64x4x1"),
        128: ("128x32x4x1", "64x32x4x1", "64x64x4x1", "64x32x4x2"),
        256: ("128x32x8x1", "64x32x4x1", "64x64x4x1"),
    },
}


def tile_of(kind: str, head_dim: int, text: str) -> Any:
    """Returns a tile of `CANDIDATES`."""
    from flexattn.kernels_triton.mma.tiles import MmaBackwardTile, MmaDqTile, MmaTile

    numbers, *rest = text.split()
    block_m, block_n, warps, stages = map(int, numbers.split("x"))
    sizes: dict[str, int] = {"block_m": block_m, "block_n": block_n, "warps": warps}
    if kind == "forward":
        return MmaTile(head_dim_qk=head_dim, head_dim_v=head_dim, **sizes, num_stages=stages, holds_q="q" in rest)
    if kind == "dq":
        return MmaDqTile(head_dim=head_dim, **sizes, num_stages=stages)
    score, key, query = map(int, rest[0].split("-"))
    own = {"score_warps": score, "key_warps": key, "query_warps": query, "q_stages": stages}
    return MmaBackwardTile(head_dim=head_dim, **sizes, **own, holds_v="v" in rest)


def implementations(device: str) -> list[Implementation]:
    """Returns the kernels for mma.sync by `attention`, also with deterministic=True in a backward; none if a GPU has none."""
    if capability_of(device) not in MMA_CAPABILITIES:
        return []
    version = flexattn.__version__
    return [
        Implementation(MMA, version, with_wish("always", functools.partial(_prepare, {})), compiles=True),
        Implementation(
            REPEATABLE,
            version,
            with_wish("always", functools.partial(_prepare, {"deterministic": True})),
            compiles=True,
            serves=lambda workload, direction: direction == "backward",
        ),
    ]


def _prepare(more: Mapping[str, Any], workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    """Prepares a call. Raises Unavailable with the reason if other kernels would run it."""
    q, k, v = (t.detach().requires_grad_(direction != "forward") for t in tensors[:3])
    explanation = flexattn.explain(q, k, v, **arguments_of(workload, tensors), **more, backend="triton")
    choices = {"forward": explanation.forward_kernels, "backward": explanation.backward_kernels}
    for name, choice in choices.items():
        if direction in (name, "both") and choice is not None and not choice.family.name.startswith("mma.sync"):
            raise Unavailable(
                "; ".join(f"{family}: {reason}" for family, reason in choice.rejected if family.startswith("mma.sync"))
            )

    def attend(workload: Workload, tensors: Tensors) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return attention_of("triton", workload, tensors, **more)

    return differentiable(attend)(workload, tensors, direction)


def tile_implementations(version: str) -> list[Implementation]:
    """Returns each tile of `CANDIDATES` as an implementation of the cells that it is for."""
    found: dict[str, Implementation] = {}
    for kind, tiles in CANDIDATES.items():
        for text in dict.fromkeys(itertools.chain.from_iterable(tiles.values())):
            name = f"{TILES} {kind} {text}"
            prepare = functools.partial(_prepare_tile, kind, text)
            found[name] = Implementation(name, version, prepare, compiles=True, serves=functools.partial(_serves, kind, text))
    return list(found.values())


def is_beside_flex(workload: Workload, direction: str) -> bool:
    """Returns whether a cell of the preset `older` has a row of FlexAttention, whose compilation takes most of the time."""
    return workload.group == MODS or (workload.group in ("sweep", OLDER) and workload.seqlen_q == max(SWEPT_SEQLENS))


def _serves(kind: str, text: str, workload: Workload, direction: str) -> bool:
    own = direction == ("forward" if kind == "forward" else "backward")
    is_plain = workload.group in ("sweep", OLDER) and workload.window_size == (-1, -1)
    return own and is_plain and workload.seqlen_q in SWEPT_SEQLENS and text in CANDIDATES[kind].get(workload.head_dim_qk, ())


def _prepare_tile(kind: str, text: str, workload: Workload, tensors: Tensors, direction: str) -> Prepared:
    from flexattn.kernels_triton.mma.backward import mma_backward
    from flexattn.kernels_triton.mma.backward_dq import mma_two_kernel_backward
    from flexattn.kernels_triton.mma.forward import mma_forward
    from flexattn.kernels_triton.mma.tiles import backward_tile

    own = tile_of(kind, workload.head_dim_qk, text)

    def forward(problem: Any, out: Tensor, lse: Tensor, tile: Any) -> None:
        mma_forward(problem, out, lse, tile=own if kind == "forward" else None)

    def backward(call: Any, tile_dq: Any, tile_dkdv: Any) -> None:
        if kind == "dq":
            mma_two_kernel_backward(call, (own, backward_tile(call.problem)))
        else:
            mma_backward(call, own)

    return with_launchers(Launchers(forward, backward, {}), workload, tensors, direction)


# ---- what a result file says


def speeds(other: str, *found: Record) -> dict[tuple[Workload, str], float]:
    """Returns the speed beside another implementation, by workload and direction. A later run counts."""
    return {(run.workloads[s.workload], s.direction): s.speed for run in found for s in standings(run, other, MMA)}


def table(*found: Record) -> Table:
    """Returns the speed of the kernels for mma.sync beside other libraries. Lengths of a workload share a row."""
    others = (FLASH, FLEX)
    columns = [(direction, other) for direction in ("forward", "backward") for other in others]
    titles = [_row_title(run.workloads[name]) for run in found for name, _ in run.cells()]
    rows: dict[str, dict[tuple[str, str], list[float]]] = {title: {} for title in titles}
    for other in others:
        for (workload, direction), speed in speeds(other, *found).items():
            rows[_row_title(workload)].setdefault((direction, other), []).append(speed)
    lines = [(title, [_mean(own.get(column)) for column in columns]) for title, own in rows.items() if own]
    return Table("", [f"{direction}: {other}" for direction, other in columns], lines)


def _row_title(workload: Workload) -> str:
    return re.sub(r", [\d,]+ tokens$", "", title_of(workload))


def _mean(found: list[float] | None) -> str:
    return f"{geometric_mean(found):.2f}" if found else "-"


def claim(*found: Record) -> str:
    """Returns the sentence above the table."""
    by_other = {other: speeds(other, *found).values() for other in (FLASH, FLEX, PORTABLE)}
    names = {FLASH: "PyTorch's FlashAttention-2", PORTABLE: "the portable kernels"}
    *first, last = (
        f"than {names.get(other, other)} in {sum(s > 1 for s in own)} of {len(own)}" for other, own in by_other.items() if own
    )
    return f"As {found[0].device['name']}, the kernels for mma.sync are faster {', '.join(first)} and {last} cells."


def tile_lines(found: Record) -> list[str]:
    """Returns a line for each cell whose candidates were timed: the fastest tile, and the gain over the committed one."""
    lines = []
    for workload, direction in found.cells():
        us = {name: row.us for name, row in found.of(workload, direction).items() if row.us is not None}
        for kind, own in (("forward", MMA), ("backward", MMA), ("dq", REPEATABLE)):
            prefix = f"{TILES} {kind} "
            times = {name.removeprefix(prefix): time for name, time in us.items() if name.startswith(prefix)}
            if times and own in us:
                best = min(times, key=lambda name: times[name])
                ranked = ", ".join(f"{name} {times[name]:.0f}" for name in sorted(times, key=lambda name: times[name]))
                gain = us[own] / times[best]
                lines.append(f"{workload} {kind}: {best}, {gain:.3f} of the committed tile's speed ({ranked})")
    return lines


FAMILIES = {("forward", MMA): "mma.sync", ("backward", MMA): "mma.sync fused", ("backward", REPEATABLE): "mma.sync two-kernel"}


class Calls(NamedTuple):
    """A class of calls that a rule may be for."""

    family: str
    head_dim: int
    packed: bool
    is_decode: bool
    mask: str


def rules(name: str, found: Record) -> list[Rule]:
    """Returns the rules of `crossovers.py` for calls that these kernels run faster than the portable ones.

    A class of calls has a rule if no cell is slower by more than TIE from some number of queries on. Masks of one such number share
    a rule. A class whose own head dim was not timed has none.
    """
    from flexattn.kernels_triton.common.crossovers import Rule

    timed = {found.workloads[name].head_dim_qk for name, _ in found.cells()}
    classes: dict[Calls, dict[int, list[float]]] = {}
    for (direction, own), family in FAMILIES.items():
        for s in standings(found, PORTABLE, own):
            w = found.workloads[s.workload]
            if s.direction == direction and _head_dim(w) in timed:
                calls = Calls(family, _head_dim(w), w.is_ragged, w.seqlen_q == 1, _mask(w))
                classes.setdefault(calls, {}).setdefault(w.seqlen_kv if calls.is_decode else w.seqlen_q, []).append(s.speed)
    together: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for calls, by_length in classes.items():
        lengths = sorted(by_length)
        first = next((s for s in lengths if all(min(by_length[n]) >= 1 - TIE for n in lengths if n >= s)), None)
        if first is not None:
            own_lengths = [x for n in lengths if n >= first for x in by_length[n]]
            together.setdefault((*calls[:-1], first), {})[calls.mask] = own_lengths
    made = []
    for (family, head_dim, packed, is_decode, first), masks in together.items():
        columns: dict[str, Any] = {"capability": targets(found), "head_dim": head_dim, "mask": tuple(masks), "packed": packed}
        columns |= {"queries": (None, 1), "keys_from": first} if is_decode else {"queries": (first, None)}
        gain = round(geometric_mean(itertools.chain.from_iterable(masks.values())), 2)
        made.append(Rule(use=family, **columns, dropout=False, paged=False, gain=gain, source=name))
    return made


def sdpa_rules(name: str, found: Record, own: str = MMA, use: str = "sdpa beside mma.sync") -> list[Rule]:
    """Returns the rules for `explain` about plain calls that SDPA flash runs faster than `own`, these or the portable kernels."""
    from flexattn.kernels_triton.common.crossovers import Rule

    ratios: dict[tuple[str, tuple[int, int], str], dict[int, float]] = {}
    for s in standings(found, FLASH, own):
        w = found.workloads[s.workload]
        is_plain = not w.is_ragged and w.softmax_type == "vanilla" and _mask(w) in ("open", "causal") and w.seqlen_q > 1
        if is_plain:
            ratios.setdefault((s.direction, (w.head_dim_qk, w.head_dim_v), _mask(w)), {})[w.seqlen_kv] = 1 / s.speed
    made = []
    for (direction, (dim_qk, dim_v), mask), lengths in ratios.items():
        gain = round(geometric_mean(lengths.values()), 2)
        if gain > 1 + TIE:
            call: dict[str, Any] = {"direction": direction, "head_dim_qk": dim_qk, "head_dim_v": dim_v, "mask": mask}
            plain: dict[str, Any] = {"dtype": "bfloat16", "layout": "dense", "kind": "plain"}
            tokens = min(lengths), max(lengths)
            made.append(Rule(use=use, capability=targets(found), **call, **plain, tokens=tokens, gain=gain, source=name))
    return made


def targets(found: Record) -> int | tuple[int, ...]:
    """Returns the capabilities that a run's rules are for: 8.0, or 8.6, 8.9 and 12.0, whose programs have less shared memory."""
    return 80 if capability_in(found) == 80 else (86, 89, 120)


def capability_in(found: Record) -> int:
    """Returns the capability whose code a run had: its device's, or that of the name "sm_80 code on an NVIDIA H200"."""
    text, (major, minor) = str(found.device.get("name", "")), found.device.get("capability", (0, 0))
    if " with tiles of sm_120" in text:
        return 120
    return next((sm for sm in MMA_CAPABILITIES if text.startswith(f"sm_{sm} code")), 10 * major + minor)


def _head_dim(workload: Workload) -> int:
    return next(width for width in (64, 128, 192, 256, 512) if workload.head_dim_qk <= width)


def _mask(workload: Workload) -> str:
    if workload.score == "relative_bias":
        return "loaded"
    if workload.score:
        return "modified"
    band = band_of(workload)
    return "windowed" if band.left is not None else "causal" if band.right is not None else "open"
