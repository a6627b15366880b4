"""Times of each kernel and tile of sm_90 in calls of few tokens or little work, and in long ones, beside the portable kernels.

    python -m tests.device.small_calls --out small_calls.json [--minutes 4] [--only PATTERN ...] [--calls few | --drawn COUNT]

A row is a direction of a call: the microseconds of each candidate, whose results are compared with the portable kernel's, and the
candidate that `auto` takes. `crossovers` has the rules that follow from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench import harness
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common import tiles
from flexattn.kernels_triton.common.facts import facts_of
from flexattn.kernels_triton.common.problem import Backward, Forward, Problem
from flexattn.kernels_triton.runtime.device import Tile, pretended_device
from tests.device import modified_calls

WORST = 0.03  # of the largest element
BUDGET_MS = 8.0  # device time of each candidate

MASKS: dict[str, dict[str, Any]] = {
    "open": {},
    "causal": {"window_right": 0},
    "softcap": {"window_right": 0, "softcap": 20.0},
    "window": {"window_left": 255, "window_right": 0},
    "last": {"window_right": 0, "bottom_right": True},
    "last 128": {"window_left": 127, "window_right": 0, "bottom_right": True},
    "last 1024": {"window_left": 1023, "window_right": 0, "bottom_right": True},
}
MANY_MASKS = ("open", "causal", "softcap", "window")
"""Masks of calls with many queries. The others are bands of the last keys."""
EVEN_LENGTHS = (256, 512, 1024, 2048, 4096)
LENGTHS = (64, 77, 96, 128, 160, 197, 256, 320, 384, 512, 577, 768, 1024, 1500, 2048, 4096)
UNEQUAL_LENGTHS = (
    *((128, 512), (128, 2048), (128, 4096), (256, 1024), (256, 4096), (512, 2048), (512, 4096), (1024, 4096)),
    *((1024, 256), (2048, 256), (2048, 512), (4096, 1024)),
)
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
DRAWN_HEAD_DIMS = ((32, 32), (48, 48), (64, 64), (112, 112), (128, 128), (160, 160))

# Few queries
FEW_HEADS = {(32, 32): (64, 8), (64, 64): (64, 8), (96, 96): (32, 8), (128, 128): (32, 8), (192, 128): (32, 8), (256, 256): (16, 8)}
CACHES = ((1, 256), (1, 1024), (1, 4096), (1, 32768), (4, 512), (8, 4096), (16, 256), (16, 1024), (64, 512), (64, 2048), (64, 8192))
FEW_TILES = (Tile(16, 64, 4, 3), Tile(16, 128, 4, 2))
"""Tiles of the portable kernel beside its own, for at most 16 rows."""
HALF_TILES = (Tile(32, 64, 4, 3), Tile(64, 64, 4, 3))
"""The same for at most 64 rows."""


class Shape(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    mask: str
    page: int = 0  # keys of a page; 0: no pages

    def __str__(self) -> str:
        dims = f"{self.head_dim_qk}" if self.head_dim_qk == self.head_dim_v else f"{self.head_dim_qk}/{self.head_dim_v}"
        tokens = f"{self.queries}" if self.queries == self.keys else f"{self.queries} of {self.keys} keys"
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        pages = f" in pages of {self.page}" if self.page else ""
        return f"{dims} {self.mask} {self.batch} x {tokens} x {heads}{pages}"

    @property
    def is_few(self) -> bool:
        """True for the calls of `few_shapes`, whose keys are in a cache."""
        return self.page > 0 or self.mask.startswith("last")


class Calls(NamedTuple):
    forward: Forward
    backward: Backward


def few_shapes() -> Iterator[Shape]:
    """Yields calls of a few queries over a cache of keys, as in decoding."""
    for dims, heads in FEW_HEADS.items():
        for page in (0, 1, 16):
            for batch, keys in CACHES:
                yield Shape(batch, 1, keys, *heads, *dims, "last", page)
            for batch, keys in CACHES[1::3]:
                yield Shape(batch, 1, keys, 32, 32, *dims, "last", page)
            for mask in ("last 128", "last 1024"):
                for batch in (4, 64):
                    yield Shape(batch, 1, 8192, *heads, *dims, mask, page)
            for queries in (4, 16):
                for batch, keys in ((1, 4096), (16, 1024), (64, 2048)):
                    yield Shape(batch, queries, keys, 32, 8, *dims, "last", page)
        for queries in (32, 64):
            for batch, keys in ((1, 4096), (16, 1024), (8, 4964), (64, 2048)):
                yield Shape(batch, queries, keys, 16, 16, *dims, "last")


def shapes() -> Iterator[Shape]:
    """Yields calls of 2**13 to 2**17 tokens of all heads, grouped heads, and few keys of many queries."""
    for dims in HEAD_DIMS:
        is_wide = dims[0] > 128
        for mask in MANY_MASKS:
            is_plain = mask in ("open", "causal")
            for tokens in EVEN_LENGTHS if is_wide or not is_plain else LENGTHS:
                yield from _works(tokens, dims, mask)
        for tokens in (512, 1024, 2048, 4096):
            for batch in (1, 2):
                yield Shape(batch, tokens, tokens, 32, 8, *dims, "causal")
        for queries, keys in (
            (4096, 77),
            (4096, 128),
            (4096, 200),
            (4096, 300),
            (4096, 512),
            (4096, 1024),
            (1024, 300),
            (256, 4096),
        ):
            for batch in (1, 4):
                yield Shape(batch, queries, keys, 16, 16, *dims, "open")


def unequal_shapes() -> Iterator[Shape]:
    """Yields calls with more keys than queries or fewer, and all masks at head dim 160."""
    for dims in ((64, 64), (96, 96), (128, 128), (160, 160), (256, 256)):
        for queries, keys in UNEQUAL_LENGTHS:
            for batch, heads in ((1, 1), (1, 8), (4, 16)):
                yield Shape(batch, queries, keys, heads, heads, *dims, "open")
            yield Shape(1, queries, keys, 32, 8, *dims, "open")
    for mask in MANY_MASKS:
        for tokens in (128, 200, *EVEN_LENGTHS):
            yield from _works(tokens, (160, 160), mask)


def _works(tokens: int, dims: tuple[int, int], mask: str) -> Iterator[Shape]:
    """Yields calls of 2**13, 2**15 and 2**17 tokens of all heads."""
    for work in (13, 15, 17):
        sequences = max(1, 2**work // tokens)
        heads = min(16, sequences)
        yield Shape(sequences // heads, tokens, tokens, heads, heads, *dims, mask)


def modified_shapes() -> Iterator[Shape]:
    """Yields calls with modified scores, dropout and packed batches."""
    for mask in modified_calls.MASKS:
        if mask != "dropout open":
            for dims in ((64, 64), (128, 128), (256, 256)):
                for tokens in EVEN_LENGTHS:
                    yield from _works(tokens, dims, mask)
                for tokens in (512, 2048):
                    yield Shape(2, tokens, tokens, 32, 8, *dims, mask)


def more_modified_shapes() -> Iterator[Shape]:
    """Yields such calls at head dims of 96 and of 192 and 128, of 128 tokens, and with dropout and no mask."""
    for mask in modified_calls.MASKS:
        if "packed" in mask:
            continue
        for dims in HEAD_DIMS:
            if dims in ((96, 96), (192, 128)) or (mask == "dropout open" and dims != (80, 80)):
                for tokens in (256, 1024, 4096):
                    yield from _works(tokens, dims, mask)
                for tokens in (512, 2048):
                    yield Shape(2, tokens, tokens, 32, 8, *dims, mask)
            if mask in ("alibi", "dropout", "documents") and dims in ((64, 64), (128, 128), (256, 256)):
                yield from _works(128, dims, mask)


CALLS = {"small": shapes, "few": few_shapes, "unequal": unequal_shapes, "modified": modified_shapes, "more": more_modified_shapes}


def drawn_shapes(count: int) -> Iterator[Shape]:
    """Yields random calls, to judge rules by calls that they do not come from."""
    draw = random.Random(count)
    for _ in range(count):
        dims, mask, group = draw.choice(DRAWN_HEAD_DIMS), draw.choice(MANY_MASKS), draw.choice((1, 1, 4))
        queries = int(2 ** draw.uniform(6, 12.5))
        keys = int(2 ** draw.uniform(6, 12.5)) if mask == "open" and draw.random() < 0.5 else queries
        sequences = max(1, int(2 ** draw.uniform(12, 17.5)) // max(queries, keys))
        heads_kv = min(draw.choice((3, 5, 8, 12, 16, 20)), sequences)
        yield Shape(max(1, sequences // heads_kv), queries, keys, heads_kv * group, heads_kv, *dims, mask)


def calls_of(shape: Shape, device: str = "cuda") -> Calls:
    if shape.mask in modified_calls.MASKS:
        return Calls(*modified_calls.calls_of(shape, device))
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def rows(tokens: int, heads: int, head_dim: int) -> Tensor:
        t = torch.empty(shape.batch, tokens, heads, head_dim, dtype=torch.bfloat16, device=device)
        return t if generator is None else t.normal_(generator=generator)

    q = rows(shape.queries, shape.heads, shape.head_dim_qk)
    k, v = (rows(shape.keys, shape.heads_kv, head_dim) for head_dim in (shape.head_dim_qk, shape.head_dim_v))
    out, dout = (rows(shape.queries, shape.heads, shape.head_dim_v) for _ in range(2))
    cache: dict[str, Any] = {}
    if shape.is_few:
        cache["seqused_kv"] = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
    if shape.page:
        k, v = (t.view(-1, shape.page, *t.shape[2:]) for t in (k, v))
        order = torch.randperm(k.shape[0], device=device, generator=generator, dtype=torch.int32)
        cache |= {"page_table": order.view(shape.batch, -1), "max_seqlen_kv": shape.keys}
    problem = Problem(q, k, v, softmax_scale=shape.head_dim_qk**-0.5, **MASKS[shape.mask], **cache)
    lse = torch.empty(shape.batch, shape.heads, shape.queries, device=device)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    return Calls(Forward(problem, out, lse), Backward(problem, out, lse, dout, None, dq, dk, dv))


def _tiles_of(family: families.Family[Any], call: Any) -> dict[str, Any]:
    """Returns the tiles that a family of sm_90 has for a call's head dims, by name."""
    x = call.problem
    width, is_modified = facts_of(x)["head_dim"], (x.is_modified or x.dropout_p > 0) and not x.is_listed
    named: dict[str, Any] = {}
    if x.seqused_kv is not None:
        return {"": family.tile(call)}
    if family is families.HOPPER_FORWARD:
        columns = {"d48", "d64"} if max(x.q.shape[-1], x.v.shape[-1]) <= 48 else {f"d{width}"}
        named = {n: t for n, t in tiles.HOPPER_FORWARD.items() if n.partition("_")[0] in columns and "paged" not in n}
    elif family is families.HOPPER_FUSED:
        named = {n: t for n, t in tiles.HOPPER_FUSED.items() if t.head_dim == width}
        if width == 64:  # with 128 queries, modified scores lack registers
            named = {n: t for n, t in named.items() if ("modified" in n) == is_modified}
        fitted = family.fitted_tile(call)
        named |= {n: t for n, t in tiles.HOPPER_FUSED_FITTED.items() if fitted and t.head_dim == fitted.head_dim}
        return named
    else:
        named = {"": family.tile(call)}
    if fitted := family.fitted_tile(call):
        named["fitted"] = fitted
    if x.block_mask is not None:  # a tile's queries must divide a block's
        named = {n: t for n, t in named.items() if x.block_mask.block_size_q % getattr(t, "block_m", 1) == 0}
    return named


def candidates(call: Forward | Backward) -> dict[str, tuple[families.Family[Any], Any]]:
    """Returns a family and a tile for each name; the portable kernel with its own tile is the first."""
    forward = isinstance(call, Forward)
    portable: families.Family[Any] = families.PORTABLE_FORWARD if forward else families.PORTABLE_BACKWARD
    others: tuple[families.Family[Any], ...] = (families.HOPPER_FEW_KEYS, families.HOPPER_FORWARD)
    if not forward:
        others = (families.HOPPER_FUSED, families.HOPPER_FUSED_192, families.HOPPER_TWO_KERNELS)
    committed = portable.tile(call)
    found = {"portable": (portable, committed)}
    rows = call.problem.longest_q * tiles.slots_of_heads(call.problem.group_size)
    if forward and rows <= tiles.HALF:
        small = FEW_TILES if rows <= tiles.FEW else HALF_TILES
        found = {f"portable {t.block_m} x {t.block_n}": (portable, t) for t in dict.fromkeys((committed, *small))}
    for family in others:
        if family.unsupported(call) is None:
            found |= {f"{family.name} {name}".strip(): (family, tile) for name, tile in _tiles_of(family, call).items()}
    choice: families.Choice = families.choose(call, families.Policy())  # type: ignore[type-var]
    if not any(family is choice.family and tile == choice.tile for family, tile in found.values()):
        found[f"{choice.family.name} {choice.tile}"] = (choice.family, choice.tile)
    return found


def choice_of(call: Forward | Backward) -> str:
    """Returns the candidate that `auto` takes."""
    choice: families.Choice = families.choose(call, families.Policy())  # type: ignore[type-var]
    if choice.family is families.PORTABLE_BACKWARD:
        return "portable"
    names = (name for name, (family, tile) in candidates(call).items() if family is choice.family and tile == choice.tile)
    return next(names)


def measure(shape: Shape, run: harness.Run) -> None:
    calls = calls_of(shape)
    families.PORTABLE_FORWARD.run(calls.forward, families.PORTABLE_FORWARD.tile(calls.forward))  # out and lse of the backward
    for direction in ("forward",) if shape.is_few else ("forward", "backward"):
        call = getattr(calls, direction)
        results = [call.out] if direction == "forward" else [call.dq, call.dk, call.dv]
        kernels: dict[str, Any] = {"": lambda: torch.empty(2**20, device="cuda").zero_()}  # the first of a turn waits for the host
        wanted: list[Tensor] = []
        for name, (family, tile) in candidates(call).items():
            for t in results:
                t.fill_(math.nan)
            try:
                family.run(call, tile)
            except Exception as e:  # a tile that does not fit must not end the run
                failed = {"shape": shape, "direction": direction, "candidate": name, "status": "failed", "error": str(e)[:200]}
                run.add(failed, f"{shape} {name}: {str(e)[:200]}")
                continue
            wanted = wanted or [t.float() for t in results]
            worst = max(float((t - w).abs().max() / w.abs().max()) for t, w in zip(results, wanted, strict=True))
            if not worst <= WORST:
                run.add({"shape": shape, "direction": direction, "candidate": name, "status": "wrong"}, f"{shape} {name}: {worst}")
                continue
            kernels[name] = functools.partial(family.run, call, tile)
        us = {name: round(taken["us"], 1) for name, taken in harness.times(kernels, BUDGET_MS).items() if name}
        chosen, best = choice_of(call), min(us, key=us.__getitem__)
        row = {"shape": shape, "direction": direction, "status": "measured", "us": us, "auto": chosen}
        ratio = us[chosen] / us[best] if chosen in us else math.nan
        run.add(row, f"{shape!s:36} {direction:8} {us[best]:8.1f} us {best:28} auto {ratio:.2f} {chosen}")


def compile_candidates(chosen: list[Shape]) -> None:
    from flexattn.kernels_triton.ahead_of_time.build import build, missing
    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileError
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    for start in range(0, len(chosen), 64):  # recorded launches hold their tensors
        with recorded_launches() as launches:
            for shape in chosen[start : start + 64]:
                for call in calls_of(shape)[: 1 if shape.is_few else 2]:
                    for family, tile in candidates(call).values():
                        family.run(call, tile)
        with contextlib.suppress(CompileError):  # a tile that does not fit has a row without a time
            build(missing(launches, 90), 90)


def main(argv: list[str] | None = None) -> int:
    parser = harness.make_parser(__doc__, only="patterns of calls, such as '96 causal*'")
    parser.add_argument("--drawn", type=int, default=0, metavar="COUNT", help="time so many random calls instead")
    parser.add_argument("--calls", choices=CALLS, default="small", help="few queries over a cache of keys, or unequal lengths")
    parser.add_argument("--minutes", type=float, default=4.0, help="time for the calls, in an order drawn from a seed")
    options = parser.parse_args(argv)
    harness.need_gpu(parser)
    given = drawn_shapes(options.drawn) if options.drawn else CALLS[options.calls]()
    chosen = list(harness.chosen({str(shape): shape for shape in given}, options.only).values())
    random.Random(0).shuffle(chosen)
    compile_candidates(chosen)
    run = harness.Run("tests.device.small_calls", __doc__, options.out)
    end = time.monotonic() + 60.0 * options.minutes
    for shape in chosen:
        if time.monotonic() > end:
            break
        measure(shape, run)
    run.write()
    return run.status()


def regrets(path: Path) -> dict[str, dict[str, float]]:
    """Returns the time of today's choice beside that of the fastest candidate, by direction and call of a result file."""
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    with pretended_device(90, 132), recorded_launches():  # a call with a relative bias launches a kernel before the choice
        for row in json.loads(path.read_text())["rows"]:
            if row["status"] != "measured":
                continue
            shape, us = Shape(*row["shape"]), row["us"]
            choice = choice_of(getattr(calls_of(shape, "meta"), row["direction"]))
            if choice == "sm_90 few keys" and choice not in us:  # a fitted tile of sm_90 before it was a family
                choice = "sm_90 fitted"
            found[row["direction"]][str(shape)] = us[choice] / min(us.values())
    return found


if __name__ == "__main__":
    sys.exit(main())
