"""The calls for which one kernel was measured to be faster than another: one table, and the functions that read it.

`CROSSOVERS` has a rule in each row. Its first columns say which calls the rule is for, and the columns that end in `_from` say what
such a call needs. The first rule for a call decides: `use` is faster than the families after it if the call has all that the rule
asks for. A call without a rule was not measured, or was measured to be slower. A rule with a `tile` says which tile is fastest.

This file has no other import, so a choice among backends does not wait for Triton. `facts_of` makes the facts of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import Any

Facts = Mapping[str, Any]
"""The columns of a call by name, such as {"head_dim": 128, "tokens": 4096}; `window_left` is UNLIMITED without a window."""

UNLIMITED = 2**31
"""Longer than any sequence."""

NEVER = 2**62
"""The minimum of a rule for calls in which `use` was measured to be slower."""

Range = tuple[int | None, int | None]
"""The smallest and the largest value, both included; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table. A column that is None holds for every call, and a column with a tuple of words for each of them."""

    use: str  # the kernel family, the backend or the form of a split that is faster
    tile: str = ""  # the fastest tile of `use`, by its name in `tiles.py`; "": the rule says that `use` is faster than others
    # The calls that the rule is for
    head_dim: int | tuple[int, ...] | None = None  # the widest of q, k and v; 192: at most 192 and 128; 512: above 256
    mask: str | tuple[str, ...] | None = None  # see `facts.mask_class`
    softcap: bool | None = None  # softcap is all that changes the scores
    dropout: bool | None = None
    bias: bool | None = None
    by_distance: bool | None = None  # a mod reads values of the distance alone, as a relative bias does
    listed: bool | None = None  # a block mask is all that changes the scores, and its blocks are multiples of 128
    paged: bool | None = None
    packed: bool | None = None  # sequences have their own lengths
    grouped: bool | None = None  # several query heads share a key head
    gpu: str | None = None  # the measured GPU whose L2 cache is like the device's: "H100" or "H200"
    decode: str | None = None  # few queries: "shared" if heads share a tile or keys are in pages, otherwise "alone"; "no": many
    tokens: Range | None = None  # the longest sequence, in queries or in keys
    mean_tokens: Range | None = None  # the mean of a packed batch, otherwise the same
    queries: Range | None = None  # the longest sequence of queries
    keys: Range | None = None  # the longest sequence of keys
    query_rows: Range | None = None  # rows of a tile for all queries of the heads that share a key head
    rows: Range | None = None  # rows of a tile for all queries of the heads that can share a tile
    width: Range | None = None  # the larger head dim
    window: Range | None = None  # keys that a query sees
    bytes: Range | None = None  # size of k and v
    block: Range | None = None  # keys of an entry of `kv_indices`
    blocks_per_sm: Range | None = None  # blocks of 64 queries and of 64 keys of all heads, for each multiprocessor
    partial: bool | None = None  # a sequence may have a last block of less than 64 queries or keys
    rows_of_one_wave: int | tuple[int, ...] | None = None  # 128, 192 or 256: the fewest queries of tiles that all run at once
    has_left: bool | None = None  # the band has a left side
    is_full_width: bool | None = None  # q's head dim is `head_dim`
    batch_invariant: bool | None = None
    element_size: int | None = None  # bytes of an element of q and k
    capability: int | tuple[int, ...] | None = None  # the device's compute capability: 90 for 9.0
    # Columns of a choice among backends, see `dispatch/heuristics.py`
    direction: str | None = None
    dtype: str | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None
    layout: str | None = None
    kind: str | None = None
    # The minimum for `use` to be faster
    tokens_from: int | None = None
    keys_from: int | None = None  # the longest sequence of keys
    window_left_from: int | None = None  # keys to the left of the diagonal that a query sees
    flops_from: int | None = None  # a forward's, approximately: with less work, large tiles leave much of the device idle
    bytes_from: int | None = None
    # Keys of all key heads, each counted for each part that its query heads can be divided into: fewer mean too few programs
    keys_per_sm_from: int | None = None
    # The measurement
    gain: float | None = None  # the time of the next choice divided by the time of `use`, the geometric mean
    source: str | tuple[str, ...] = ()  # files in bench/results; (): the run was not kept

    @cached_property
    def _calls(self) -> tuple[tuple[str, Any], ...]:
        given = ((name, getattr(self, name)) for name in _CALL_COLUMNS)
        return tuple((name, wanted) for name, wanted in given if wanted is not None)

    @cached_property
    def words(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The columns of the rule's calls that are no ranges, with the values that are accepted."""
        words = ((name, wanted) for name, wanted in self._calls if name not in _RANGES)
        return tuple((name, wanted if isinstance(wanted, tuple) else (wanted,)) for name, wanted in words)

    @cached_property
    def ranges(self) -> tuple[tuple[str, float, float], ...]:
        """The columns of the rule's calls that are ranges, with the smallest and the largest value."""
        ranges = ((name, *wanted) for name, wanted in self._calls if name in _RANGES)
        return tuple((name, -inf if first is None else first, inf if last is None else last) for name, first, last in ranges)

    @cached_property
    def _minimums(self) -> tuple[tuple[str, int], ...]:
        given = ((name, getattr(self, f"{name}_from")) for name in _MINIMUM_COLUMNS)
        return tuple((name, least) for name, least in given if least is not None)

    def differences(self, facts: Facts) -> tuple[str, ...]:
        """Returns the columns in which a call differs from the rule's calls."""
        words = (name for name, words in self.words if facts[name] not in words)
        return (*words, *(name for name, first, last in self.ranges if not first <= facts[name] <= last))

    def shortfall(self, facts: Facts) -> str | None:
        """Returns the first minimum that a call does not reach, in words; None: it reaches all of them."""
        for name, least in self._minimums:
            if facts[name] < least:
                if least == NEVER:
                    return "it was measured to be slower"
                return f"it is faster from {_text(least)} {UNITS[name]} on, and this call has {_text(facts[name])}"
        return None

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the measurement."""
        return (self.source,) if isinstance(self.source, str) else self.source

    def __str__(self) -> str:
        columns = [_column(name, wanted) for name, wanted in self._calls]
        columns += [f"{name} >= {_text(least)}" for name, least in self._minimums if least < NEVER]
        return "; ".join(filter(None, (", ".join(columns), ", ".join(self.files))))


UNITS = {
    "window_left": "keys left of the diagonal",
    "keys_per_sm": "keys of all heads for each multiprocessor",
    "tokens": "tokens of the longest sequence",
    "keys": "keys of the longest sequence",
    "flops": "FLOPs",
    "bytes": "bytes of k and v",
}
"""The minimums of a rule, in the order in which they are checked."""

_MINIMUM_COLUMNS = tuple(UNITS)
_NOT_CALLS = {"use", "tile", "gain", "source", *(f"{name}_from" for name in UNITS)}
_CALL_COLUMNS = tuple(field.name for field in fields(Rule) if field.name not in _NOT_CALLS)
_RANGES = {field.name for field in fields(Rule) if str(field.type).startswith("Range")}


def _column(name: str, wanted: Any) -> str:
    """Returns a column and its value in words: "mask open or causal", "tokens 256 or more"."""
    if name not in _RANGES:
        return f"{name} {' or '.join(map(_text, wanted)) if isinstance(wanted, tuple) else _text(wanted)}"
    smallest, largest = wanted
    if smallest is None:
        return f"{name} up to {_text(largest)}"
    return f"{name} {_text(smallest)} " + ("or more" if largest is None else f"to {_text(largest)}")


def _text(value: Any) -> str:
    """Returns a value in words: 2**36 for a large power of two, and 3 * 2**28 for three times one."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and value >= 2**20:
        for factor in (1, 3):
            power, rest = divmod(value, factor)
            if rest == 0 and not power & (power - 1):
                return f"{f'{factor} * ' if factor > 1 else ''}2**{power.bit_length() - 1}"
    return str(value)


def slower(use: str, facts: Facts) -> str | None:
    """Returns why later families are faster for a call than `use`, with the rule that it misses; None: `use` is faster."""
    rule = deciding(use, facts)
    if rule is not None:
        missing = rule.shortfall(facts)
        return None if missing is None else f"{missing} (rule: {rule})"
    unmeasured = "no benchmark shows it to be faster for such a call"
    nearest = min(RULES.get(use, ()), key=lambda rule: _distance(rule, facts), default=None)
    if nearest is None:
        return unmeasured
    first = nearest.differences(facts)[0]
    return (
        f"{unmeasured}; the nearest rule is for {_column(first, getattr(nearest, first))}, and this call has {_text(facts[first])}"
    )


def _distance(rule: Rule, facts: Facts) -> float:
    """Returns how far a call is from a rule's calls: another number is nearest, then another mask."""
    differing = rule.differences(facts)
    words = sum(2 if name == "mask" else 3 for name in differing if name not in _RANGES)
    return words + sum(_gap(getattr(rule, name), facts[name]) for name in differing if name in _RANGES)


def _gap(wanted: Range, value: float) -> float:
    """Returns 1 for a value that is nearly in the range, up to 2 for one that is far from it."""
    smallest, largest = wanted
    bound = largest if largest is not None and value > largest else smallest
    return 2 - min(value, bound or 0) / max(value, bound or 0, 1)


def deciding(use: str, facts: Facts) -> Rule | None:
    """Returns the first rule for a call that says whether `use` is faster; None: there is none."""
    return _first(RULES.get(use, ()), facts)


def _first(rules: Iterable[Rule], facts: Facts) -> Rule | None:
    for rule in rules:  # the choice reads a hundred rules, so this calls nothing for most of them
        for name, words in rule.words:
            if facts[name] not in words:
                break
        else:
            if all(first <= facts[name] <= last for name, first, last in rule.ranges):
                return rule
    return None


def fastest_tile(use: str, facts: Facts) -> str:
    """Returns the name of the fastest tile of `use` for a call, or "" if no rule names one."""
    rule = _first(TILES[use], facts)
    return "" if rule is None else rule.tile


# Programs of a backward of sm_90 for each multiprocessor, approximately, if the query heads of a key head are divided
# (`most_head_parts`). 71 heads over one at 8 x 2048 causal tokens take 1.65 ms in 2 or 4 parts instead of 2.78 ms in one.
# 8 heads over one at 4 x 4096 take 617 us in 2, 636 us in 4 and 1030 us in one (bench/results/head_parts_h200.json).
PART_WAVES = 2
UNEQUAL_PART_WAVES = 4
"""The same for packed batches and block masks, whose programs have unequal work; not measured."""
# Programs for each multiprocessor in the last section of heads of a backward with a block mask. Trees take 8 % less time than with
# sections of one size, and documents 3 % less to 1 % more. A causal mask as a block mask takes 2 to 4 % more
# (bench/results/block_masks_backward_h200.json).
LAST_WAVES = 2
# Parts of a window of at least WIDE_WINDOW keys, with at most WINDOW_WAVES programs for each multiprocessor. They take 4 to 17 %
# less time at head dim 128, and 1 % less at 64. With twice as many programs, or a window of 1024 keys, they take 10 to 18 % more.
WINDOW_PARTS, WINDOW_WAVES, WIDE_WINDOW = 4, 4, 2048
"""For head dims up to 128 (bench/results/head_parts_windows_h200.json)."""

# Fewest scores of a call, and fewest for each entry, with which values of distances are tabulated (`diagonals.py`). Capacities
# count, so decoded sequences with short lengths in long slots must not fill tables. At head dim 64, a forward of 2**19 scores takes
# 15 us with a table instead of 49, and of 2**22 scores 21 instead of 30 (bench/results/distance_tables_h200.json, script not kept).
TABLE_SCORES, TABLE_SCORES_OF_ENTRY = 2**17, 16

# Limits of the form of a KV split (`split_kv.py`; bench/results/splits_h200.json).
SPLIT_KEYS = 128
"""Minimum keys of each split. For one sequence of 1024 keys, 8 splits take 16 us, 4 splits 17 us and no split 21 us."""
SPLIT_COST, SPLIT_ROW_COST = 800, 0.25
"""Time to combine the parts of a call, in keys that a program passes in this time: for the call, and for each row of out.

512 queries of 2048 keys and 8 heads of 128 take 38 us with four splits instead of 30. 4096 keys take 44 instead of 51, and 32768
keys 129 instead of 350 (bench/results/splits_more_h200.json, script not kept).
"""
SPLIT_MOST = 128
"""Maximum splits of a tile. The kernel that combines them loads the lse values of so many splits at once."""
SPLIT_FEW_ROWS = 8
"""Most rows of out for each multiprocessor with which a program combines the parts of one row.

With more, a program has eight rows: a batch-invariant call of 4096 tokens takes 328 us instead of 714, and 512 queries of 32768
keys take 115 instead of 128 (bench/results/combine_h200.json, script not kept).
"""
SPLIT_PIECE = 2048
"""Minimum keys of a split of a batch-invariant call: a multiple of every tile's keys."""
SPLIT_PROGRAMS = 2
"""Programs of the portable kernel for each multiprocessor; the kernels of sm_90 have one."""

_STANDARD = ("standard_h200.json", "lengths_h200.json")
_FEW = "small_calls_few_h200.json"
_FEW_ALONE = "small_calls_few_alone_h200.json"
_UNEQUAL = "small_calls_unequal_h200.json"
_SPLITS = ("splits_h200.json", "splits_more_h200.json")
_64_TOKENS = "small_calls_64_h200.json"
_DROPOUT = "dropout_h200.json"
_SHORT_CAUSAL = ("short_causal_h200.json", "short_causal_h100.json")
_FUSED_192 = ("fused_192_h200.json", "fused_192_h100.json")
_FUSED_TILES = ("fused_programs_h100.json", "fused_variants_h100.json")
_FITTED = "fitted_h200.json"
_SMALL = "small_calls_h200.json"
_DRAWN = "small_calls_drawn_h200.json"
_MODIFIED = ("small_calls_modified_h200.json", "small_calls_modified_more_h200.json")
_FITTED_BACKWARD = "fitted_backward_h200.json"
_FEW_KEYS = "few_keys_parts_h200.json"
_FITTED_80 = ("fitted_80_h200.json", _FITTED)
_WINDOWS = "windows_and_short_h200.json"
_SHORT_OPEN: dict[str, Any] = {"mask": "open", "dropout": False, "packed": False, "gpu": "H200", "source": _WINDOWS}
"""Columns of rules for backwards of short dense sequences without a mask."""
_PARTIAL: dict[str, Any] = {"partial": True, "packed": False, "grouped": False, "dropout": False, "gpu": "H200"}
"""Columns of rules for backwards of sequences whose last blocks are not full."""
_WIDE: dict[str, Any] = {"head_dim": 256, "dropout": False, "packed": False, "source": _UNEQUAL}
_TO_160 = _WIDE | {"width": (129, 160)}
_FROM_193 = _WIDE | {"width": (193, 256), "mask": "open"}
"""Columns of rules for backwards of dense sequences at head dims of 129 to 160 and of 193 to 256."""
_PLAIN: dict[str, Any] = {"dropout": False, "paged": False, "packed": False, "batch_invariant": False}
"""Columns of rules for head dims of two parts and for few keys."""
_MODS: dict[str, Any] = _PLAIN | {"mask": "modified", "softcap": False, "source": _MODIFIED}
"""Columns of rules for ALiBi and mods."""
_LISTED: dict[str, Any] = _PLAIN | {"mask": "loaded", "listed": True, "source": _MODIFIED}
"""Columns of rules for block masks."""
_DROPPED: dict[str, Any] = _PLAIN | {"dropout": True, "source": _MODIFIED}
"""Columns of rules for dropout."""
_OPEN_QUERIES: dict[str, Any] = _PLAIN | {"mask": "open", "grouped": False, "queries": (512, None), "source": _FEW_KEYS}
_PACKED: dict[str, Any] = _PLAIN | {"packed": True, "tokens": (300, None), "source": "fitted_packed_h200.json"}
"""The same for packed batches."""

_OLDER: dict[str, Any] = {"dtype": "bfloat16", "layout": "dense", "kind": "plain", "tokens": (1024, 4096)}
"""Columns of rules beside the portable kernels: an H200 ran the code of sm_80."""

_SDPA_GAINS: dict[tuple[Any, str, str], dict[int, float]] = {
    (80, "forward", "causal"): {64: 1.08, 96: 1.12, 128: 1.14, 192: 1.11, 256: 1.65},
    (80, "forward", "open"): {64: 1.08, 96: 1.08, 128: 1.11, 192: 1.17, 256: 1.82},
    (80, "backward", "causal"): {96: 1.05, 128: 1.09, 192: 1.28, 256: 1.53},
    (80, "backward", "open"): {96: 1.23, 128: 1.22, 192: 1.35, 256: 1.78},
    ((86, 89, 120), "forward", "causal"): {64: 1.08, 96: 1.12, 128: 1.17, 192: 1.26, 256: 2.41},
    ((86, 89, 120), "forward", "open"): {64: 1.08, 96: 1.08, 128: 1.20, 192: 1.36, 256: 2.45},
    ((86, 89, 120), "backward", "causal"): {96: 1.05, 128: 1.32, 192: 1.69, 256: 2.07},
    ((86, 89, 120), "backward", "open"): {96: 1.23, 128: 1.41, 192: 1.72, 256: 2.39},
}
"""Speed of PyTorch's FlashAttention-2 beside the portable kernels by head dim; by capability, direction and mask."""

_MMA_GAINS: dict[tuple[str, Any, str], tuple[tuple[int, Any, bool, Range, int | None, float], ...]] = {
    ("mma.sync", 80, "mma_sm_80_h200.json"): (
        (128, ("causal", "open"), False, (256, None), None, 1.17),
        (64, ("causal", "open"), False, (256, None), None, 1.21),
        (256, ("causal", "open"), False, (512, None), None, 1.61),
        (128, "causal", True, (4096, None), None, 1.1),
        (128, ("modified", "loaded", "windowed"), False, (4096, None), None, 1.25),
        (64, "windowed", False, (4096, None), None, 1.32),
        (256, "windowed", False, (4096, None), None, 1.12),
    ),
    ("mma.sync fused", 80, "mma_sm_80_h200.json"): (
        (128, "causal", False, (512, None), None, 1.3),
        (128, "open", False, (256, None), None, 1.27),
        (64, ("causal", "open"), False, (256, None), None, 1.13),
        (128, "causal", True, (4096, None), None, 1.34),
        (128, ("modified", "loaded", "windowed"), False, (4096, None), None, 1.37),
        (64, "windowed", False, (4096, None), None, 1.21),
        (256, "windowed", False, (4096, None), None, 1.66),
    ),
    ("mma.sync two-kernel", 80, "mma_sm_80_h200.json"): (
        (128, "causal", False, (1024, None), None, 1.08),
        (128, "open", False, (16384, None), None, 1.07),
        (128, "causal", True, (4096, None), None, 1.06),
        (128, ("loaded", "windowed"), False, (4096, None), None, 1.06),
        (64, "windowed", False, (4096, None), None, 0.99),
    ),
    ("mma.sync fused", 80, "mma_sm_80_tiles_h200.json"): ((256, ("open", "causal"), False, (512, None), None, 1.82),),
    ("mma.sync two-kernel", 80, "mma_sm_80_tiles_h200.json"): ((256, ("open", "causal"), False, (512, None), None, 1.35),),
    ("mma.sync", 80, "mma_sm_80_192_h200.json"): ((192, ("causal", "open"), False, (1024, None), None, 2.48),),
    ("mma.sync fused", 80, "mma_sm_80_192_h200.json"): ((192, ("causal", "open"), False, (1024, None), None, 2.96),),
    ("mma.sync two-kernel", 80, "mma_sm_80_192_h200.json"): ((192, ("causal", "open"), False, (1024, None), None, 2.21),),
    ("mma.sync", (86, 89, 120), "mma_sm_89_h200.json"): (
        (128, "causal", True, (4096, None), None, 1.17),
        (128, ("modified", "loaded"), False, (4096, None), None, 1.42),
    ),
    ("mma.sync fused", (86, 89, 120), "mma_sm_89_h200.json"): (
        (128, "causal", True, (4096, None), None, 1.48),
        (128, ("modified", "loaded"), False, (4096, None), None, 1.76),
    ),
    ("mma.sync two-kernel", (86, 89, 120), "mma_sm_89_h200.json"): (
        (128, "causal", True, (4096, None), None, 1.15),
        (128, ("modified", "loaded"), False, (4096, None), None, 1.28),
    ),
    ("mma.sync", (86, 89, 120), "mma_sm_89_more_h200.json"): (
        (256, ("open", "causal"), False, (512, None), None, 2.35),
        (128, ("causal", "open"), False, (256, None), None, 1.2),
        (64, ("causal", "open"), False, (256, None), None, 1.24),
        (64, "windowed", False, (4096, None), None, 1.31),
        (128, "windowed", False, (4096, None), None, 1.23),
        (256, "windowed", False, (4096, None), None, 1.51),
        (192, ("causal", "open"), False, (1024, None), None, 2.99),
    ),
    ("mma.sync fused", (86, 89, 120), "mma_sm_89_more_h200.json"): (
        (64, ("causal", "open"), False, (256, None), None, 1.05),
        (64, "windowed", False, (4096, None), None, 1.2),
        (128, "windowed", False, (4096, None), None, 1.29),
        (256, "windowed", False, (4096, None), None, 1.94),
        (192, ("causal", "open"), False, (1024, None), None, 4.34),
    ),
    ("mma.sync two-kernel", (86, 89, 120), "mma_sm_89_more_h200.json"): (
        (64, "windowed", False, (4096, None), None, 0.99),
        (128, "windowed", False, (4096, None), None, 1.05),
        (256, "windowed", False, (4096, None), None, 1.5),
        (192, ("causal", "open"), False, (1024, None), None, 3.05),
    ),
    ("mma.sync fused", (86, 89, 120), "mma_sm_89_tiles_h200.json"): (
        (128, ("open", "causal"), False, (256, None), None, 1.39),
        (256, ("open", "causal"), False, (512, None), None, 2.13),
    ),
    ("mma.sync two-kernel", (86, 89, 120), "mma_sm_89_tiles_h200.json"): (
        (128, "causal", False, (256, None), None, 1.11),
        (256, ("open", "causal"), False, (512, None), None, 1.51),
    ),
    ("mma.sync FP8", (89, 120), "mma_fp8_sm_89_h200.json"): (
        (64, ("causal", "open"), False, (1024, None), None, 1.11),
        (128, ("causal", "open"), False, (1024, None), None, 1.26),
        (256, ("causal", "open"), False, (1024, None), None, 1.71),
    ),
}
"""Speed of the kernels for mma.sync beside the portable ones, by family, capability and file. A row has the head dim, masks, if
sequences are packed, queries, the fewest keys, and the speed. `python -m flexattn bench --emit-rows` prints the rules."""

_SDPA_BESIDE_MMA: dict[tuple[Any, str], tuple[tuple[str, str, tuple[int, int], Range, float], ...]] = {
    (80, "mma_sm_80_h200.json"): (
        ("forward", "causal", (256, 256), (512, 16384), 1.07),
        ("forward", "open", (256, 256), (512, 16384), 1.08),
    ),
    ((86, 89, 120), "mma_sm_89_h200.json"): (
        ("forward", "open", (128, 128), (1024, 16384), 1.1),
        ("forward", "causal", (256, 256), (1024, 16384), 1.03),
    ),
    ((86, 89, 120), "mma_sm_89_more_h200.json"): (
        ("forward", "open", (256, 256), (512, 16384), 1.07),
        ("forward", "open", (128, 128), (256, 512), 1.09),
        ("forward", "causal", (256, 256), (512, 512), 1.23),
    ),
    (80, "mma_sm_80_tiles_h200.json"): (
        ("backward", "open", (256, 256), (512, 16384), 1.07),
        ("backward", "open", (96, 96), (1024, 4096), 1.04),
    ),
    ((86, 89, 120), "mma_sm_89_tiles_h200.json"): (
        ("backward", "open", (128, 128), (256, 16384), 1.06),
        ("backward", "open", (256, 256), (512, 16384), 1.28),
        ("backward", "causal", (256, 256), (512, 16384), 1.11),
        ("backward", "open", (96, 96), (1024, 4096), 1.12),
    ),
}
"""Speed of FlashAttention-2 beside those kernels, by capability and file. A row has the direction, the mask, the head dims,
tokens, and the speed."""

# fmt: off
CROSSOVERS: tuple[Rule, ...] = (
    # --- sm_90: the forward of a half type, head dims up to 256. First few queries, as in decoding: loading the keys is their work.
    # 17 to 64 rows take 0.55 to 1.01 of the portable kernel's time. At most 16 rows without pages take 0.7 to 1.06 of it. Windows
    # of 128 keys take 0.88 to 1.77, and windows of 1024 keys 0.84 to 1.2 (in pages 0.73 to 1.35).
    Rule(use="sm_90", decode="shared", query_rows=(17, None),
         keys_from=1024, window_left_from=512, bytes_from=2**23, source=_FEW),
    Rule(use="sm_90", decode="shared", paged=False,
         keys_from=1024, window_left_from=512, bytes_from=2**23, source=_FEW),
    # 512 keys of 4 sequences in pages take 38 % less to 1 % more time, and of 64 sequences 3 to 46 % more.
    Rule(use="sm_90", decode="shared", paged=True, keys=(512, 1023), bytes=(None, 2**25 - 1),
         window_left_from=512, source=_FEW),
    Rule(use="sm_90", decode="shared", paged=True, head_dim=64,
         keys_from=1024, window_left_from=512, bytes_from=2**23, source=_FEW),
    Rule(use="sm_90", decode="shared", paged=True, head_dim=128,
         keys_from=1024, window_left_from=2048, bytes_from=2**25, source=_FEW),
    Rule(use="sm_90", decode="shared", paged=True,
         keys_from=1024, window_left_from=2048, bytes_from=2**28, source=_FEW),
    # Query heads with key heads of their own: 17 to 64 rows take 0.67 to 0.84 of the portable kernel's time at head dim 256. If
    # all tiles run at once, they take 0.68 to 1.07 from 4096 keys on. Other calls take 0.83 to 1.67: no number of keys is enough.
    Rule(use="sm_90", decode="alone", query_rows=(17, None), head_dim=256, keys=(1024, None), source=_FEW_ALONE),
    Rule(use="sm_90", decode="alone", query_rows=(17, None), rows_of_one_wave=128, keys=(4096, None), source=_FEW_ALONE),
    Rule(use="sm_90", decode="alone", keys=(1024, None), keys_from=NEVER, source=(_FEW, _FEW_ALONE)),
    # Head dim 64 over pages: calls of 1024 tokens and more take 0.58 to 0.72 of the portable kernel's time. 512 tokens with 31
    # sequences of one query each take 0.27, and windows of 128 keys 0.61 to 0.65.
    Rule(use="sm_90", head_dim=64, paged=True, dropout=True, mask=("open", "causal", "windowed"),
         tokens_from=1024, flops_from=2**29, source="paged_prefill_h100.json"),
    Rule(use="sm_90", head_dim=64, paged=True, mask=("open", "causal", "windowed"),
         tokens_from=256, flops_from=2**29, source="paged_prefill_h100.json"),
    # 6 to 13 % less time from 77 to 128 tokens, and 10 % at 197 and 256 with a causal mask
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask=("open", "causal"), tokens=(65, 128), **_PLAIN, flops_from=2**30,
         source=_SMALL),
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="causal", tokens=(193, 256), **_PLAIN, flops_from=2**31, source=_SMALL),
    # Head dim 64. 77 keys take 84 us instead of 98 at 64, and 87 instead of 99 at 40.
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="open", keys=(65, 128), grouped=False, **_PLAIN,
         tokens_from=2048, flops_from=2**32, source=_FITTED),
    # With dropout, 128 to 256 causal tokens take 4 to 26 % less time, and longer calls 15 to 36 %, unless all tiles run at once.
    # Calls without a mask take 8 to 19 % less from 1024 tokens on, and 13 % less with 256 tokens and many tiles.
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_DROPPED, mask="causal", rows_of_one_wave=(0, 192, 256),
         tokens_from=128, flops_from=2**29),
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_DROPPED, mask="open", tokens=(1024, None), rows_of_one_wave=(0, 192, 256),
         flops_from=2**33),
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_DROPPED, mask="open", blocks_per_sm=(24, None),
         tokens_from=256, flops_from=2**33),
    Rule(use="sm_90", head_dim=64, dropout=True, mask=("open", "causal"), tokens_from=1024, flops_from=2**36, source=_DROPOUT),
    # Causal calls of few tiles take 7 to 36 % less time.
    Rule(use="sm_90", head_dim=64, width=(33, 64), dropout=False, mask="causal", mean_tokens=(1024, None),
         flops_from=2**32, keys_per_sm_from=100, source=_SMALL),
    # A relative bias takes 17 to 83 % less time. ALiBi takes up to 25 % less in few tiles from 1024 tokens on, and 2 to 8 % more in
    # many.
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_MODS, by_distance=True, tokens_from=256, flops_from=2**28),
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_MODS, mean_tokens=(512, 1023), blocks_per_sm=(None, 12), keys_from=NEVER),
    # 10 to 37 % less time with softcap and few tiles
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="modified", mean_tokens=(512, None), blocks_per_sm=(None, 12), **_PLAIN,
         flops_from=2**31, keys_per_sm_from=100, source=(_SMALL, *_MODIFIED)),
    # A block mask takes 5 to 36 % less time from 2048 tokens on, and 14 to 26 % less in many tiles of 128 tokens and more.
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_LISTED, tokens=(2048, None), flops_from=2**32),
    Rule(use="sm_90", head_dim=64, width=(33, 64), **_LISTED, blocks_per_sm=(24, None), tokens_from=128, flops_from=2**32),
    # Tiles that all run at once take 8 to 16 % less time. 4096 queries of 200 to 300 keys take 11 to 13 % less.
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="open", queries=(129, 256), keys=(2048, None),
         rows_of_one_wave=128, **_PLAIN,
         flops_from=2**33, source=_SMALL),
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="open", queries=(1024, 2047), rows_of_one_wave=192, **_PLAIN,
         flops_from=2**33, source=_SMALL),
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="open", queries=(2048, None), keys=(129, 511), **_PLAIN,
         flops_from=3 * 2**32, source=_SMALL),
    Rule(use="sm_90", head_dim=64, dropout=False, mask=("open", "causal"), mean_tokens=(2048, None),
         tokens_from=2048, flops_from=2**35, source=_STANDARD),
    # 5 to 17 % less time from 1024 to 1792 tokens. 160 to 256 tokens of 2**31 FLOPs take 15 % more, and of 2**32 take 6 % less.
    Rule(use="sm_90", head_dim=64, dropout=False, mask="open", mean_tokens=(1024, None),
         tokens_from=1024, flops_from=2**34, source=_WINDOWS),
    Rule(use="sm_90", head_dim=64, mask="open", tokens=(160, 256), **_PLAIN, flops_from=2**32, source=_WINDOWS),
    # 577 tokens of 2**35.3 FLOPs take equal times.
    Rule(use="sm_90", head_dim=64, dropout=False, mask="open", mean_tokens=(256, None),
         tokens_from=256, flops_from=2**36, source=(*_STANDARD, "forward_threshold_64_h200.json")),
    Rule(use="sm_90", head_dim=64, dropout=False, mask="causal", mean_tokens=(512, None),
         tokens_from=512, flops_from=2**35, source=_STANDARD),
    # 13 to 21 % less time
    Rule(use="sm_90", head_dim=64, width=(33, 64), dropout=False, mask="windowed", mean_tokens=(256, 1023), paged=False,
         flops_from=2**33, source=_SMALL),
    Rule(use="sm_90", head_dim=64, dropout=False, mask="windowed", mean_tokens=(1024, None),
         tokens_from=1024, flops_from=2**32, source=(*_STANDARD, _WINDOWS)),
    # 5120 tokens with a bias at head dim 32 take 58 % more time than in the portable kernel (bias_before_h200.json).
    Rule(use="sm_90", head_dim=64, width=(33, 64), mask="loaded", tokens_from=1024, flops_from=2**36,
         source="modified_scores_h200.json"),
    # Head dim 128. With dropout, calls from 128 tokens on take 14 to 49 % less time. If all tiles run at once, they take 2 % less
    # to 11 % more, and at head dim 96 8 % less to 1 % more from 1024 tokens on.
    Rule(use="sm_90", head_dim=128, width=(97, 128), **_DROPPED, mask=("open", "causal"), rows_of_one_wave=128, keys_from=NEVER),
    Rule(use="sm_90", head_dim=128, width=(97, 128), **_DROPPED, mask=("open", "causal"), tokens_from=128, flops_from=2**30),
    Rule(use="sm_90", head_dim=128, width=(65, 96), **_DROPPED, mask=("open", "causal"), rows_of_one_wave=128,
         tokens_from=1024, flops_from=2**30),
    Rule(use="sm_90", head_dim=128, width=(65, 96), **_DROPPED, mask=("open", "causal"), tokens_from=256, flops_from=2**30),
    Rule(use="sm_90", head_dim=128, dropout=True, mask=("open", "causal"), tokens_from=512, flops_from=2**31, source=_DROPOUT),
    # Few tiles of 256 to 512 keys take 13 to 33 % less time.
    Rule(use="sm_90", head_dim=(128, 256), mask="open", queries=(65, None), keys=(256, 1023), blocks_per_sm=(None, 1), **_PLAIN,
         source=_UNEQUAL),
    # 64 tokens take 17 % less to 3 % more time with 2**31 FLOPs or more, and 3 to 25 % more with fewer.
    Rule(use="sm_90", head_dim=128, mask=("open", "causal"), tokens=(None, 64), **_PLAIN, flops_from=2**31, source=_64_TOKENS),
    # Head dims of 72 to 96 take 4 to 35 % less time than in the portable kernel.
    Rule(use="sm_90", head_dim=128, width=(65, 96), mask=("open", "causal"), **_PLAIN,
         tokens_from=64, flops_from=2**27, source=_SMALL),
    # 5 to 29 % less time at 128. 128 tokens of 2**31 FLOPs take 14 % more.
    Rule(use="sm_90", head_dim=128, mask=("open", "causal"), tokens=(128, 128), **_PLAIN, flops_from=3 * 2**30, source=_SMALL),
    Rule(use="sm_90", head_dim=128, mask="open", **_PLAIN, tokens_from=64, flops_from=3 * 2**28, source=(_WINDOWS, _SMALL)),
    Rule(use="sm_90", head_dim=128, mask="causal", **_PLAIN, tokens_from=64, flops_from=3 * 2**27, source=_SMALL),
    Rule(use="sm_90", head_dim=128, mask=("open", "causal"), tokens_from=256, flops_from=2**31, source=_STANDARD),
    # Windows of 256 keys take 7 to 64 % less time.
    Rule(use="sm_90", head_dim=128, mask="windowed", **_PLAIN, tokens_from=64, flops_from=2**29, source=(_SMALL, _DRAWN)),
    Rule(use="sm_90", head_dim=128, mask="windowed", mean_tokens=(1024, None),
         tokens_from=1024, flops_from=2**31, source=(*_STANDARD, _WINDOWS)),
    # Softcap takes 7 to 45 % less time.
    Rule(use="sm_90", head_dim=128, mask="modified", softcap=True, **_PLAIN, tokens_from=150, flops_from=2**28,
         source=(_SMALL, _DRAWN)),
    # From 256 tokens on, ALiBi takes 15 to 54 % less time, and a relative bias 25 to 77 % less. A block mask takes 11 to 43 % less
    # in many tiles. At head dim 96, it takes 9 % more to 5 % less in few tiles of 1024 tokens.
    Rule(use="sm_90", head_dim=128, width=(65, 96), **_MODS, tokens_from=256, flops_from=2**28),
    Rule(use="sm_90", head_dim=128, width=(97, 128), **_MODS, tokens_from=128, flops_from=2**28),
    Rule(use="sm_90", head_dim=128, width=(65, 96), **_LISTED, tokens=(None, 2047), blocks_per_sm=(None, 23), keys_from=NEVER),
    Rule(use="sm_90", head_dim=128, width=(65, 96), **_LISTED, tokens_from=256, flops_from=2**33),
    Rule(use="sm_90", head_dim=128, width=(97, 128), **_LISTED, blocks_per_sm=(24, None), tokens_from=128, flops_from=2**33),
    Rule(use="sm_90", head_dim=128, mask=("modified", "loaded"), mean_tokens=(1024, None),
         tokens_from=1024, flops_from=2**31, source="modified_scores_h200.json"),
    # Head dims 192 and 128. The run without a mask was not kept. Dropout takes 6 to 52 % less time from 256 tokens on. Without a
    # mask, tiles that all run at once take 0 to 5 % more. ALiBi takes 15 to 49 % less, and a relative bias 31 to 75 %. A block mask
    # takes 3 % more to 41 % less from 1024 tokens on, and 18 % less with 256 tokens and many tiles.
    Rule(use="sm_90", head_dim=192, **_DROPPED, mask="open", rows_of_one_wave=128, keys_from=NEVER),
    Rule(use="sm_90", head_dim=192, **_DROPPED, mask=("open", "causal"), tokens_from=256, flops_from=2**29),
    Rule(use="sm_90", head_dim=192, **_MODS, tokens_from=256, flops_from=2**29),
    Rule(use="sm_90", head_dim=192, **_LISTED, blocks_per_sm=(24, None), tokens_from=256, flops_from=2**34),
    # Modified scores of packed batches were measured at 128.
    Rule(use="sm_90", head_dim=192, dropout=True, mask=("open", "causal", "modified", "loaded"),
         tokens_from=4096, flops_from=2**31, source=_DROPOUT),
    # 4 to 34 % less time from 256 tokens on, with softcap 6 to 45 %
    Rule(use="sm_90", head_dim=192, mask="open", **_PLAIN, tokens_from=256, flops_from=2**30, source=_SMALL),
    Rule(use="sm_90", head_dim=192, mask="causal", **_PLAIN, tokens_from=256, flops_from=2**29, source=_SMALL),
    Rule(use="sm_90", head_dim=192, mask=("open", "causal"), tokens_from=512, flops_from=2**31),
    Rule(use="sm_90", head_dim=192, mask="modified", softcap=True, **_PLAIN, tokens_from=256, flops_from=2**29, source=_SMALL),
    Rule(use="sm_90", head_dim=192, mask=("modified", "loaded"),
         tokens_from=1024, flops_from=2**31, source="modified_scores_h200.json"),
    # 1.35 to 2.3 times as fast as the portable kernel.
    Rule(use="sm_90", head_dim=192, mask="windowed", dropout=False,
         tokens_from=256, flops_from=2**30, source=(_WINDOWS, _SMALL)),
    # Head dim 256. 6 to 56 % less time at 160, with softcap 13 to 49 %
    Rule(use="sm_90", width=(129, 160), mask=("open", "causal", "windowed"), head_dim=256, **_PLAIN,
         tokens_from=128, flops_from=2**28, source=_UNEQUAL),
    Rule(use="sm_90", width=(129, 160), mask="modified", softcap=True, head_dim=256, **_PLAIN,
         tokens_from=128, flops_from=2**28, source=_UNEQUAL),
    # Windows of 128 keys and more are 1.4 to 2 times as fast.
    Rule(use="sm_90", head_dim=256, mask="windowed", dropout=False,
         tokens_from=192, flops_from=2**31, source=(_WINDOWS, _SMALL, _DRAWN)),
    # 8 to 69 % less time with modified scores, and 21 to 62 % with dropout. A block mask takes 9 to 40 % more time in few tiles.
    Rule(use="sm_90", head_dim=256, width=(193, 256), **_MODS, tokens_from=128, flops_from=2**29),
    Rule(use="sm_90", head_dim=256, width=(193, 256), mask="modified", softcap=True, **_PLAIN, tokens_from=256,
         flops_from=2**30, source=_SMALL),
    Rule(use="sm_90", head_dim=256, width=(193, 256), **_LISTED, tokens=(None, 1535), blocks_per_sm=(None, 16), keys_from=NEVER),
    Rule(use="sm_90", head_dim=256, width=(193, 256), **_DROPPED, mask=("open", "causal"), tokens_from=128, flops_from=2**29),
    Rule(use="sm_90", head_dim=256, dropout=True, mask=("open", "causal", "modified", "loaded"),
         tokens_from=4096, flops_from=2**29, source=_DROPOUT),
    Rule(use="sm_90", head_dim=256, mask=("open", "causal"), tokens_from=192, flops_from=2**29, source=(*_STANDARD, _DRAWN)),
    Rule(use="sm_90", head_dim=256, mask=("modified", "loaded"),
         tokens_from=1024, flops_from=2**29, source="modified_scores_h200.json"),
    # --- sm_90 wide: head dims above 256, beside the portable forward. Its tiles have 512 columns, so narrower heads waste some:
    # with 8192 tokens at 320 it took 1.14 of the time.
    Rule(use="sm_90 wide", width=(321, None), source="wide_heads_h200.json"),
    Rule(use="sm_90 wide", queries=(None, 32), source="wide_heads_h200.json"),
    Rule(use="sm_90 wide", tokens=(None, 4096), source="wide_heads_h200.json"),
    # --- sm_90 FP8 cache: keys are loaded once for each tile of so many rows.
    Rule(use="sm_90 FP8 cache", query_rows=(None, 32)),
    # --- sm_90 FP8: beside bf16; modified scores and windows were not measured.
    Rule(use="sm_90 FP8", mask=("open", "causal"), tokens_from=2048, flops_from=2**36, source="fp8_hopper_h200.json"),
    # --- sm_90 fused: the backward in one kernel, beside two kernels, head dims up to 128. The sums of dq cost time for each token,
    # however few keys it sees, so narrow windows are slower. A bias was not measured. A program has 128 keys.
    # Dropout takes 0 to 64 % less time from 512 tokens on. It takes 5 to 26 % less with 256 tokens and many keys, and 1 % more to
    # 6 % less with few keys at head dim 128.
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(33, 96), **_DROPPED, mask=("open", "causal"), tokens=(None, 511),
         tokens_from=256, flops_from=2**30, window_left_from=255, keys_per_sm_from=100),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(33, 96), **_DROPPED, mask=("open", "causal"),
         tokens_from=512, flops_from=2**29, window_left_from=255, keys_per_sm_from=55),
    Rule(use="sm_90 fused", head_dim=128, width=(97, 128), **_DROPPED, mask=("open", "causal"),
         tokens_from=256, flops_from=2**29, window_left_from=255, keys_per_sm_from=55),
    Rule(use="sm_90 fused", head_dim=64, dropout=True, mask=("open", "causal"),
         tokens_from=1024, flops_from=2**36, window_left_from=255, keys_per_sm_from=128, source=_DROPOUT),
    Rule(use="sm_90 fused", head_dim=128, dropout=True, mask=("open", "causal"),
         tokens_from=512, flops_from=2**36, window_left_from=255, keys_per_sm_from=128, source=_DROPOUT),
    # More keys than queries, in one head or in many: 256 queries of 1024 keys take 0 to 31 % less time. 128 to 1024 queries of
    # 2048 and more keys take 22 to 76 % less. The portable kernels have few programs of dq, which pass all keys.
    Rule(use="sm_90 fused", head_dim=(64, 128), queries=(None, 256), keys=(1024, None), mask="open", dropout=False, packed=False,
         source=(_WINDOWS, _UNEQUAL)),
    Rule(use="sm_90 fused", head_dim=(64, 128), queries=(None, 1024), keys=(2048, None), mask="open", dropout=False, packed=False,
         source=_UNEQUAL),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 128), queries=(None, 128), keys=(512, None), mask="open", dropout=False,
         packed=False, source=_UNEQUAL),
    # 22 to 57 % less time for four query heads of a key head with few keys
    Rule(use="sm_90 fused", head_dim=(64, 128), queries=(1024, None), keys=(128, 512), mask="open", grouped=True, dropout=False,
         packed=False, flops_from=2**30, source=_UNEQUAL),
    # The longer calls have 2**36 FLOPs. A half and a quarter of the batch had the same ratios (short_causal_h200.json).
    Rule(use="sm_90 fused", head_dim=64, mask="open", grouped=True, tokens=(None, 1023),
         tokens_from=1024, flops_from=2**35, keys_per_sm_from=128, source="lengths_h200.json"),
    # 77 keys at head dim 40 and 120 keys at 72 take 12 % less time. 77 keys at 64 take 2 to 35 % more.
    Rule(use="sm_90 fused", head_dim=64, width=(33, 48), keys=(65, 128), tokens=(1024, None), mask="open",
         dropout=False, packed=False,
         flops_from=2**32, keys_per_sm_from=64, source=_WINDOWS),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 80), keys=(65, 128), tokens=(1024, None), mask="open",
         dropout=False, packed=False,
         flops_from=2**31, keys_per_sm_from=64, source=_WINDOWS),
    # The portable kernels lose time in the last blocks of 77 to 1500 tokens: 7 to 25 % less time than with them at head dim 64, and
    # 9 to 24 % at 72 to 96. Without a mask, 7 to 16 % less at 128.
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask=("open", "causal"), **_PARTIAL,
         tokens_from=65, flops_from=2**28, window_left_from=255, keys_per_sm_from=55, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=64, width=(32, 64), mask=("open", "causal"), tokens=(65, 128), **_PARTIAL,
         flops_from=2**29, window_left_from=255, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=64, width=(32, 64), mask=("open", "causal"), tokens=(193, 256), **_PARTIAL,
         flops_from=2**30, window_left_from=255, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=64, width=(32, 64), mask="open", tokens=(449, None), **_PARTIAL,
         flops_from=2**30, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=64, width=(32, 64), mask="causal", tokens=(449, 2047), **_PARTIAL,
         flops_from=2**30, window_left_from=255, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=128, mask="open", tokens=(65, 128), **_PARTIAL,
         flops_from=2**30, keys_per_sm_from=55, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=128, mask="open", tokens=(193, None), **_PARTIAL,
         flops_from=2**30, keys_per_sm_from=55, source=_SMALL),
    # 197 tokens take 18 to 22 % less time, 256 take 6 to 10 % less, and 384 take 11 to 13 % less. 257 to 320 take up to 9 % more,
    # and 448 take 2 to 6 % more. With 2**30 FLOPs, 197 and 256 tokens take 4 to 19 % more.
    Rule(use="sm_90 fused", head_dim=64, tokens=(193, 256), **_SHORT_OPEN, flops_from=2**31, keys_per_sm_from=256),
    Rule(use="sm_90 fused", head_dim=64, tokens=(384, 384), **_SHORT_OPEN, flops_from=2**32, keys_per_sm_from=256),
    # 5 to 22 % less time from 201 to 448 tokens; 160 tokens take equal times, and 320 of 2**31.8 FLOPs take 11 % more.
    Rule(use="sm_90 fused", head_dim=128, tokens=(193, 511), **_SHORT_OPEN, flops_from=2**32, keys_per_sm_from=128),
    # 5 to 42 % less time than in the portable kernels. With 2**32 FLOPs at head dim 64, the times are equal.
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="open", tokens=(2048, None), keys=(1024, None),
         flops_from=2**33, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="open", tokens=(1024, None),
         flops_from=2**33, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask="open", tokens=(512, 1023), packed=False, gpu="H200",
         flops_from=2**32, keys_per_sm_from=120, source=_SMALL),
    # Packed batches of 100 to 800 tokens take 14 to 19 % less time.
    Rule(use="sm_90 fused", head_dim=64, width=(49, 64), mask="open", tokens=(512, 1023), packed=True, gpu="H200",
         flops_from=2**33, keys_per_sm_from=120, source="packed_small_backwards_h200.json"),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="open", tokens=(512, 1023), packed=False,
         gpu="H200", flops_from=2**33, keys_per_sm_from=120, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=(64, 128), mask="open",
         tokens_from=512, flops_from=2**35, keys_per_sm_from=128, source="lengths_h200.json"),
    # 9 to 50 % less time from 2048 tokens on, and 16 to 38 % less from 1024.
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="causal", tokens=(2048, None),
         flops_from=2**31, window_left_from=255, keys_per_sm_from=36, source=(_SMALL, _DRAWN)),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="causal", tokens=(1024, 2047),
         flops_from=3 * 2**29, window_left_from=255, keys_per_sm_from=55, source=_SMALL),
    # 11 to 35 % less time at head dims of 72 to 96, and 31 % with four query heads to a key head
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask="causal", tokens=(512, None), grouped=True, gpu="H200",
         flops_from=2**30, window_left_from=255, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask="causal", gpu="H200",
         tokens_from=96, flops_from=2**28, window_left_from=255, keys_per_sm_from=180, source=(_SMALL, _FITTED_BACKWARD)),
    # 1 to 11 % less time at 384 tokens, and 9 to 22 % at 512. Packed batches of up to 384 to 640 tokens take 6 to 29 % less.
    Rule(use="sm_90 fused", head_dim=64, mask="causal", grouped=True, tokens=(None, 1023), gpu="H200",
         tokens_from=384, flops_from=2**33, window_left_from=255, keys_per_sm_from=128, source=("short_causal_h200.json", _SMALL)),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="causal", gpu="H200",
         tokens_from=384, flops_from=2**31, window_left_from=255, keys_per_sm_from=120,
         source=(_SMALL, "short_causal_h200.json", "short_backwards_more_h200.json")),
    Rule(use="sm_90 fused", head_dim=64, mask="causal", tokens=(None, 2047), gpu="H200",
         tokens_from=384, flops_from=2**33, window_left_from=255, keys_per_sm_from=128,
         source=("short_causal_h200.json", "short_backwards_more_h200.json")),
    # 641 tokens take up to 2 % more time, with grouped heads 3 to 6 % less. Packed batches whose longest sequence has 640
    # tokens take 2 to 8 % more time at head dim 128, and 2 to 13 % less at 64.
    Rule(use="sm_90 fused", head_dim=(64, 128), mask="causal", tokens=(None, 1023), packed=False, grouped=True, gpu="H100",
         tokens_from=640, flops_from=2**35, window_left_from=255, keys_per_sm_from=128, source="short_causal_h100.json"),
    Rule(use="sm_90 fused", head_dim=(64, 128), mask="causal", tokens=(None, 1023), gpu="H100",
         tokens_from=704, flops_from=2**35, window_left_from=255, keys_per_sm_from=128,
         source=("short_causal_h100.json", "short_backwards_more_h100.json")),
    Rule(use="sm_90 fused", head_dim=64, mask="causal",
         tokens_from=1024, flops_from=2**35, window_left_from=255, keys_per_sm_from=128, source="lengths_h200.json"),
    # At head dim 64, windows of 65 keys take 7 to 26 % less time, and of 128 to 257 keys 7 to 41 % less. At 128, windows of 128 to
    # 512 keys take 12 to 34 % less, and at 96 14 to 30 % less.
    Rule(use="sm_90 fused", head_dim=64, width=(32, 64), mask="windowed", dropout=False, tokens=(None, 1023),
         tokens_from=384, flops_from=2**30, window_left_from=63, keys_per_sm_from=128, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=64, mask="windowed", dropout=False,
         tokens_from=1024, flops_from=2**31, window_left_from=63, keys_per_sm_from=128, source=(_WINDOWS, _SMALL)),
    Rule(use="sm_90 fused", head_dim=128, mask="windowed", dropout=False,
         tokens_from=160, flops_from=2**31, window_left_from=127, keys_per_sm_from=128, source=(_WINDOWS, _SMALL, _DRAWN)),
    Rule(use="sm_90 fused", head_dim=(64, 128), mask="windowed",
         tokens_from=2048, flops_from=2**36, window_left_from=255, keys_per_sm_from=128, source="lengths_h200.json"),
    # Softcap takes 8 to 54 % less time.
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="modified", softcap=True, dropout=False, tokens=(2048, None),
         flops_from=2**31, window_left_from=255, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask="modified", softcap=True, dropout=False,
         tokens_from=256, flops_from=2**30, window_left_from=255, keys_per_sm_from=200, source=_SMALL),
    Rule(use="sm_90 fused", head_dim=(64, 128), width=(32, 128), mask="modified", softcap=True, dropout=False,
         tokens_from=384, flops_from=2**30, window_left_from=255, keys_per_sm_from=80, source=(_SMALL, _DRAWN)),
    # From 256 tokens on, ALiBi takes 21 to 66 % less time with many keys, and 2 to 10 % less from 1024 on with few. A relative bias
    # takes 22 to 80 % less, and a block mask 1 to 37 % less.
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), **_MODS, by_distance=True,
         tokens_from=256, flops_from=2**28, window_left_from=255),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), **_MODS, tokens=(None, 1023),
         tokens_from=256, flops_from=2**30, window_left_from=255, keys_per_sm_from=100),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), **_MODS,
         tokens_from=1024, flops_from=2**30, window_left_from=255, keys_per_sm_from=55),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), **_LISTED, tokens=(None, 1023),
         tokens_from=256, flops_from=2**31, keys_per_sm_from=100),
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), **_LISTED, tokens_from=1024, flops_from=2**31, keys_per_sm_from=55),
    # ALiBi takes 32 % less time at 1024 tokens, and 36 % less at 4096.
    Rule(use="sm_90 fused", head_dim=128, width=(65, 96), mask="modified", dropout=False,
         tokens_from=1024, flops_from=2**34, window_left_from=255, keys_per_sm_from=200, source=_FITTED_BACKWARD),
    # From 256 tokens on, a relative bias takes 9 to 78 % less time. ALiBi takes up to 48 % less at head dim 64 with many keys, and
    # 3 % more to 56 % less at 128.
    Rule(use="sm_90 fused", head_dim=64, width=(33, 64), **_MODS, by_distance=True,
         tokens_from=256, flops_from=2**28, window_left_from=255),
    Rule(use="sm_90 fused", head_dim=64, width=(33, 64), **_MODS,
         tokens_from=256, flops_from=2**30, window_left_from=255, keys_per_sm_from=100),
    Rule(use="sm_90 fused", head_dim=128, width=(97, 128), **_MODS,
         tokens_from=256, flops_from=2**29, window_left_from=255, keys_per_sm_from=55),
    # A block mask takes 12 to 21 % less time from 4096 tokens on at head dim 64. Shorter calls are faster in other kernels. At 128,
    # it takes 8 to 37 % less from 1024 tokens on, and 7 to 13 % less from 128 on with many keys.
    Rule(use="sm_90 fused", head_dim=64, width=(33, 64), **_LISTED, tokens_from=4096, flops_from=2**33, keys_per_sm_from=55),
    Rule(use="sm_90 fused", head_dim=128, width=(97, 128), **_LISTED, tokens=(None, 1023),
         tokens_from=128, flops_from=2**31, keys_per_sm_from=200),
    Rule(use="sm_90 fused", head_dim=128, width=(97, 128), **_LISTED, tokens_from=1024, flops_from=2**32, keys_per_sm_from=55),
    Rule(use="sm_90 fused", head_dim=(64, 128), mask=("modified", "loaded"), bias=False,
         tokens_from=1024, flops_from=2**36, window_left_from=255, keys_per_sm_from=128, source="one_pass_modified_h200.json"),
    # --- sm_90 fused 192: 7 to 19 % less time than two kernels from 1024 tokens on an H200, and from 2048 on an H100. On an H100,
    # 1024 causal tokens take 2 % more. Calls with less work take 4 to 34 % less time on an H200.
    Rule(use="sm_90 fused 192", head_dim=192, mask="causal", grouped=True, gpu="H200",
         tokens_from=1024, flops_from=2**34, window_left_from=1023, keys_per_sm_from=128, source=(*_FUSED_192, _SMALL)),
    Rule(use="sm_90 fused 192", head_dim=192, mask="causal", tokens=(None, 1023), gpu="H200",
         tokens_from=512, flops_from=2**30, window_left_from=1023, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 fused 192", head_dim=192, mask="open", tokens=(None, 1023), keys=(512, None), gpu="H200",
         flops_from=2**31, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 fused 192", head_dim=192, mask=("open", "causal"), keys=(1024, None), gpu="H200",
         flops_from=2**31, window_left_from=1023, keys_per_sm_from=60, source=(*_FUSED_192, _SMALL)),
    Rule(use="sm_90 fused 192", head_dim=192, mask=("open", "causal"),
         tokens_from=1024, flops_from=2**36, window_left_from=1023, keys_per_sm_from=128, source=_FUSED_192),
    Rule(use="sm_90 fused 192", head_dim=192, mask="windowed",
         tokens_from=8192, flops_from=2**36, window_left_from=1023, keys_per_sm_from=128, source=_FUSED_192),
    # Head dims of 129 to 160: 6 to 82 % less time than in the portable kernels for more keys than queries. Few heads with few keys
    # take 8 to 35 % more than in two kernels. Equal lengths take 4 to 56 % less time from 192 tokens on, and from 128 in a band.
    Rule(use="sm_90 fused 192", **_TO_160, mask="open", queries=(1024, None), keys=(None, 512), keys_per_sm_from=120),
    Rule(use="sm_90 fused 192", **_TO_160, mask="open", queries=(2048, None), keys=(None, 1024), keys_per_sm_from=120),
    Rule(use="sm_90 fused 192", **_TO_160, mask="open", queries=(None, 1024), keys=(512, None)),
    Rule(use="sm_90 fused 192", **_TO_160, mask="open", tokens_from=192, flops_from=2**29, keys_per_sm_from=48),
    Rule(use="sm_90 fused 192", **_TO_160, mask=("causal", "windowed"), tokens_from=128, flops_from=2**28, window_left_from=255,
         keys_per_sm_from=48),
    # 1024 keys take 29 % less time than in two kernels.
    Rule(use="sm_90 fused 192", head_dim=256, width=(None, 160), mask="windowed",
         tokens_from=192, flops_from=2**32, window_left_from=255, keys_per_sm_from=128, source=(_WINDOWS, _DRAWN)),
    # Two kernels pad 160 to 256: 21 % less time at 256 tokens, 34 % at 1024, and 44 to 48 % from 4096 on. Up to 235 tokens take 13
    # to 23 % less time than in the portable kernels.
    Rule(use="sm_90 fused 192", head_dim=256, width=(None, 160), mask=("open", "causal"),
         tokens_from=192, flops_from=2**33, window_left_from=1023, keys_per_sm_from=128, gain=1.65, source=(_FITTED, _DRAWN)),
    # --- sm_90 two-kernel: the backward in two kernels, beside the portable one. A program of dk and dv has all query heads of
    # its 128 keys, 64 at head dim 256. 16384 tokens in short sequences have little work under a causal mask, but many programs. In
    # FP8 they are faster than in 16 bits, even without the time for a dequantisation (fp8_kernels_h200.json).
    Rule(use="sm_90 two-kernel", head_dim=64, dropout=True, mask=("open", "causal"),
         tokens_from=1024, flops_from=2**36, keys_per_sm_from=128, source=_DROPOUT),
    Rule(use="sm_90 two-kernel", head_dim=64, mask=("causal", "modified"),
         tokens_from=2048, flops_from=2**36, keys_per_sm_from=128, source=_STANDARD),
    Rule(use="sm_90 two-kernel", head_dim=128, mask=("open", "causal"),
         tokens_from=512, flops_from=2**36, keys_per_sm_from=128, source=_STANDARD),
    Rule(use="sm_90 two-kernel", head_dim=(64, 128), mask="windowed",
         tokens_from=8192, flops_from=2**36, keys_per_sm_from=128, source=_STANDARD),
    # A block mask takes 1 to 13 % less time at 2048 tokens, and 4 to 7 % less at 1024.
    Rule(use="sm_90 two-kernel", head_dim=64, width=(33, 64), **_LISTED,
         tokens_from=1024, flops_from=2**33, keys_per_sm_from=200),
    Rule(use="sm_90 two-kernel", head_dim=(64, 128), width=(33, 128), mask=("modified", "loaded"),
         tokens_from=1024, flops_from=2**36, keys_per_sm_from=128, source="modified_scores_h200.json"),
    # Dropout takes 32 to 60 % less time than in the portable kernels, modified scores 11 to 72 %, and block masks 2 to 35 %.
    Rule(use="sm_90 two-kernel", head_dim=192, **_DROPPED, mask=("open", "causal"),
         tokens_from=256, flops_from=2**29, keys_per_sm_from=60),
    Rule(use="sm_90 two-kernel", head_dim=192, **_MODS, tokens_from=256, flops_from=2**29, keys_per_sm_from=60),
    Rule(use="sm_90 two-kernel", head_dim=192, **_LISTED, tokens_from=256, flops_from=2**30, keys_per_sm_from=60),
    # 9 to 19 % less time than the portable kernels at 256 to 512 tokens on an H200, 2 to 14 % on an H100.
    Rule(use="sm_90 two-kernel", head_dim=192, dropout=True, mask=("open", "causal", "modified", "loaded"),
         tokens_from=4096, flops_from=2**33, keys_per_sm_from=128, source=_DROPOUT),
    # 7 to 16 % less time with few keys
    Rule(use="sm_90 two-kernel", head_dim=192, mask="open", tokens_from=256,
         flops_from=2**31, keys_per_sm_from=9, source=(*_FUSED_192, _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=192, mask="causal",
         tokens_from=256, flops_from=2**29, keys_per_sm_from=60, source=(*_FUSED_192, _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=192, mask="modified", softcap=True, dropout=False,
         tokens_from=256, flops_from=2**29, keys_per_sm_from=60, source=("modified_scores_h200.json", _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=192, mask=("modified", "loaded"),
         tokens_from=1024, flops_from=2**33, keys_per_sm_from=128, source="modified_scores_h200.json"),
    # Windows of 128 keys take 33 to 46 % less time at head dim 192. At 256, windows of 64 to 4096 keys take 41 to 61 % less.
    Rule(use="sm_90 two-kernel", head_dim=192, mask="windowed", dropout=False,
         tokens_from=256, flops_from=2**30, keys_per_sm_from=48, source=(*_STANDARD, _WINDOWS, _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=192, mask="windowed",
         tokens_from=8192, flops_from=2**33, keys_per_sm_from=128, source=_STANDARD),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), mask="windowed", dropout=False,
         tokens_from=256, flops_from=2**31, keys_per_sm_from=15, source=(_WINDOWS, _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=256, mask="windowed", dropout=False,
         tokens_from=512, flops_from=2**31, keys_per_sm_from=15, source=_WINDOWS),
    # Unequal lengths in one head or in many: 19 to 64 % less time than in the portable kernels at head dim 160, and 17 to 81 % less
    # at 256. At 160, 64 heads take more and have the fused kernel, and softcap takes 1 % more to 25 % less.
    Rule(use="sm_90 two-kernel", **_TO_160, mask="open", queries=(1024, None), keys=(None, 1024)),
    Rule(use="sm_90 two-kernel", **_TO_160, mask="modified", softcap=True, tokens_from=512, flops_from=2**30, keys_per_sm_from=48),
    Rule(use="sm_90 two-kernel", **_FROM_193, queries=(None, 512), keys=(512, None)),
    Rule(use="sm_90 two-kernel", **_FROM_193, queries=(1024, None), keys=(None, 1024)),
    # 20 to 60 % less time than in the portable kernels, and 17 to 72 % less with modified scores, block masks or dropout.
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), **_DROPPED, mask=("open", "causal"),
         tokens_from=128, flops_from=2**29, keys_per_sm_from=60),
    Rule(use="sm_90 two-kernel", head_dim=256, dropout=True, mask=("open", "causal", "modified", "loaded"),
         tokens_from=4096, flops_from=2**34, keys_per_sm_from=64, source=_DROPOUT),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), mask="open", tokens_from=256, flops_from=2**31, keys_per_sm_from=9,
         source=("short_backwards_more_h200.json", "short_backwards_more_h100.json", _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), mask="causal", tokens_from=256,
         flops_from=2**30, keys_per_sm_from=60,
         source=("short_backwards_more_h200.json", "short_backwards_more_h100.json", _SMALL)),
    Rule(use="sm_90 two-kernel", head_dim=256, mask=("open", "causal"),
         tokens_from=256, flops_from=2**34, keys_per_sm_from=64,
         source=("short_backwards_more_h200.json", "short_backwards_more_h100.json")),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), mask="modified", softcap=True, dropout=False,
         tokens_from=256, flops_from=2**30, keys_per_sm_from=60, source=_SMALL),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), **_MODS, tokens_from=128, flops_from=2**29, keys_per_sm_from=60),
    Rule(use="sm_90 two-kernel", head_dim=256, width=(193, 256), **_LISTED, tokens_from=128, flops_from=2**30, keys_per_sm_from=60),
    Rule(use="sm_90 two-kernel", head_dim=256, mask=("modified", "loaded"),
         tokens_from=1024, flops_from=2**34, keys_per_sm_from=64, source="modified_scores_h200.json"),
    # 8192 causal tokens of 8 heads over one key head at 512 take 5.76 ms instead of 29.8. No other call was measured.
    Rule(use="sm_90 wide two-kernel", head_dim=512, width=(512, 512), mask=("open", "causal"), dropout=False,
         packed=False, tokens_from=4096, flops_from=2**36, gain=5.17, source=("wide_backward_h200.json", "models_h200.json")),
    # --- Splits of the keys between programs, beside one program for each tile. With more queries, they were not measured, and with
    # fewer keys, combining the parts costs as much as the split saves (`SPLIT_COST`, `SPLIT_ROW_COST`).
    Rule(use="split keys", queries=(None, 1024), keys_from=1024, source=_SPLITS),
    # A plan by the lengths on the device costs a launch, beside a fixed number of splits.
    Rule(use="split plan", queries=(None, 16), bytes_from=2**23, source="splits_h200.json"),
    # --- Backends, beside the Triton kernels: the output of `python -m flexattn bench --emit-rows`.
    Rule(use="cudnn", mask="causal", tokens=(4096, 4096), capability=90, direction="forward", dtype="bfloat16", head_dim_qk=128,
         head_dim_v=128, layout="dense", kind="bias", gain=1.21, source="standard_forward_h200.json"),
    # --- Tiles of the sm_90 forward. Few rows: 64 sequences of 8192 keys take 252 us instead of 402.
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, batch_invariant=True),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, mask=("open", "causal"), tokens=(65, 128), **_PLAIN,
         source=_SMALL),
    # 7 to 30 % less time with dropout up to 2048 causal tokens
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, **_DROPPED, mask="causal"),
    Rule(use="sm_90", tile="d64_few_rows", head_dim=64, rows=(None, 128), source="few_queries_h200.json"),
    # Without a mask, 9 to 14 % less time with dropout. Block masks take 1 to 7 % less than with the next tile.
    Rule(use="sm_90", tile="d64_short", head_dim=64, **_DROPPED, mask="open"),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, paged=False, dropout=True),
    Rule(use="sm_90", tile="d64_few_rows", head_dim=64, **_LISTED, tokens=(None, 1023)),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, **_LISTED),
    # Up to 31 % less time with a relative bias, and 3 to 16 % less with softcap
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, **_MODS, by_distance=True, tokens=(2048, None)),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, **_MODS, by_distance=True),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, mask="modified", paged=False, blocks_per_sm=(None, 12),
         source=_SMALL),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, mask=("modified", "loaded")),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, paged=True, mask="open", mean_tokens=(2048, None),
         source="paged_prefill_h100.json"),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, paged=True, mask="causal", mean_tokens=(4096, None),
         source="paged_prefill_h100.json"),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, paged=True, mask="windowed",
         mean_tokens=(256, None), window=(None, 256), source="paged_prefill_h100.json"),
    Rule(use="sm_90", tile="d64_paged_short", head_dim=64, paged=True, mean_tokens=(256, None), source="paged_prefill_h100.json"),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, paged=True),
    # 2 to 3 % less time at head dims 40 and 48.
    Rule(use="sm_90", tile="d48_long", head_dim=64, width=(33, 48), mask=("open", "causal"), packed=False,
         mean_tokens=(2048, None), source="narrow_scores_h200.json"),
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, mask="causal", tokens=(193, 256), **_PLAIN, source=_SMALL),
    # Tiles that all run at once take 12 to 24 % less time than those of two waves.
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, mask="open", queries=(129, 256), keys=(2048, None),
         rows_of_one_wave=128, **_PLAIN, source=_SMALL),
    Rule(use="sm_90", tile="d64_long", head_dim=64, mask="open", queries=(1024, 2047), rows_of_one_wave=192, **_PLAIN,
         source=_SMALL),
    Rule(use="sm_90", tile="d64_short", head_dim=64, mask="open", packed=False, rows_of_one_wave=256, source=_SMALL),
    Rule(use="sm_90", tile="d64_short", head_dim=64, mask="open", queries=(2048, None), keys=(129, 511), **_PLAIN, source=_SMALL),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64, mask="causal", packed=False, blocks_per_sm=(None, 12), source=_SMALL),
    Rule(use="sm_90", tile="d64_long", head_dim=64, mask=("open", "causal"), mean_tokens=(2048, None), source=_STANDARD),
    Rule(use="sm_90", tile="d64_long", head_dim=64, mask="open", mean_tokens=(1280, None), source=_WINDOWS),
    Rule(use="sm_90", tile="d64_short", head_dim=64, mask="open", mean_tokens=(160, None), source=(*_STANDARD, _WINDOWS)),
    Rule(use="sm_90", tile="d64_short", head_dim=64, mask="causal", mean_tokens=(512, None), source=_STANDARD),
    # 6 to 11 % less time than the next tile if sequences have their own lengths, and up to 2 % more otherwise.
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, mask="windowed", packed=True, window=(None, 257),
         source=_WINDOWS),
    # 3 to 14 % less time up to 1024 tokens.
    Rule(use="sm_90", tile="d64_narrow_two_consumers", head_dim=64, mask="windowed", mean_tokens=(None, 1024), window=(None, 257),
         source=_SMALL),
    # 4 to 5 % less time with windows of 128 keys, 3 % less with 256.
    Rule(use="sm_90", tile="d64_narrow", head_dim=64, mask="windowed", mean_tokens=(1024, None), window=(None, 256),
         source=("windows_h100.json", _WINDOWS)),
    Rule(use="sm_90", tile="d64_short", head_dim=64, mask="windowed", mean_tokens=(1024, None), source=_STANDARD),
    Rule(use="sm_90", tile="d64_two_consumers", head_dim=64),
    Rule(use="sm_90", tile="d128_long", head_dim=128, batch_invariant=True),
    # Tiles that all run at once take 17 % less time than those of two waves.
    Rule(use="sm_90", tile="d128_three_consumers", head_dim=128, mask="open", rows_of_one_wave=192, **_PLAIN, source=_SMALL),
    # 129 to 192 and 257 to 320 keys fill blocks of 64 keys, and take 5 to 20 % less time.
    Rule(use="sm_90", tile="d128_three_consumers", head_dim=128, mask="open", keys=(129, 192), blocks_per_sm=(20, None), **_PLAIN,
         source=(_WINDOWS, _SMALL)),
    Rule(use="sm_90", tile="d128_three_consumers", head_dim=128, mask="open", keys=(257, 320), blocks_per_sm=(20, None), **_PLAIN,
         source=_SMALL),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="open", keys=(129, 192), **_PLAIN, source=_SMALL),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="open", keys=(257, 320), **_PLAIN, source=_SMALL),
    # 2 to 14 % less time
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, width=(None, 96), mask="open", tokens=(None, 64), **_PLAIN, source=_SMALL),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="causal", tokens=(None, 512), **_PLAIN, source=_SMALL),
    # 5 to 24 % less time with softcap
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="modified", softcap=True, mean_tokens=(None, 4096), **_PLAIN,
         source=_SMALL),
    # 2 % more to 37 % less time with ALiBi, dropout or a block mask. From 1024 tokens on, a relative bias takes up to 19 % more.
    Rule(use="sm_90", tile="d128_long", head_dim=128, width=(97, 128), **_MODS, by_distance=True, tokens=(1024, None)),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, width=(97, 128), **_MODS, tokens=(None, 4096)),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, width=(97, 128), **_DROPPED, mask=("open", "causal"), tokens=(None, 4096)),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, width=(97, 128), **_LISTED),
    Rule(use="sm_90", tile="d128", head_dim=128, mask="open", keys=(None, 1023), source=_SMALL),
    Rule(use="sm_90", tile="d128_long", head_dim=128, mask=("open", "causal"), mean_tokens=(4096, None), source=_STANDARD),
    # 18 to 22 % less time with 128 keys. With 512 and more, three consumers take 5 to 13 % less.
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="windowed", dropout=False, paged=False, window=(None, 256),
         source=_WINDOWS),
    Rule(use="sm_90", tile="d128_narrow", head_dim=128, mask="windowed", dropout=False, paged=False, mean_tokens=(None, 2047),
         source=_WINDOWS),
    Rule(use="sm_90", tile="d128_three_consumers", head_dim=128, mask="windowed", dropout=False, paged=False, source=_WINDOWS),
    Rule(use="sm_90", tile="d128_long", head_dim=128, mask="windowed", mean_tokens=(2048, None), source=_STANDARD),
    Rule(use="sm_90", tile="d128_long", head_dim=128, mask=("modified", "loaded"), mean_tokens=(1024, None), source=_STANDARD),
    Rule(use="sm_90", tile="d128", head_dim=128),
    Rule(use="sm_90", tile="d192", head_dim=192, batch_invariant=True),
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, mask="windowed", dropout=False, paged=False, window=(None, 256),
         source=_WINDOWS),
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, mask="open", keys=(257, 320), **_PLAIN, source=_SMALL),
    # 5 to 34 % less time with softcap, and 5 to 28 % with a causal mask and few tiles
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, mask="modified", softcap=True, **_PLAIN, source=_SMALL),
    # 2 to 38 % less time with ALiBi, dropout or a block mask. From 1024 tokens on, a relative bias takes up to 26 % more.
    Rule(use="sm_90", tile="d192", head_dim=192, **_MODS, by_distance=True, tokens=(1024, None)),
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, **_MODS, tokens=(None, 4096)),
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, **_DROPPED, mask=("open", "causal"), tokens=(None, 4096)),
    Rule(use="sm_90", tile="d192_narrow", head_dim=192, **_LISTED),
    Rule(use="sm_90", tile="d192", head_dim=192, mask="causal", blocks_per_sm=(None, 16), **_PLAIN, source=_SMALL),
    Rule(use="sm_90", tile="d192", head_dim=192, mask="causal", tokens=(None, 2047), **_PLAIN, source=_SMALL),
    # 4096 causal tokens take 9 % less time, and 16384 take 2 % less.
    Rule(use="sm_90", tile="d192_three_consumers", head_dim=192, mask=("causal", "windowed"), dropout=False, paged=False,
         mean_tokens=(1024, None), source=_WINDOWS),
    Rule(use="sm_90", tile="d192", head_dim=192),
    Rule(use="sm_90", tile="d256", head_dim=256),
    # --- Tiles of the fused backward. Persistent programs take 2 to 7 % less time; with heads that share key heads they take less
    # only in short calls at head dim 64, and at 128 without a mask. In longer calls at 128 without a mask, one tile of dq in shared
    # memory is 2 to 5 % faster than they are. If they convert dq, they take 2 to 7 % less time at 128 without a mask. With a
    # mask, and at 64, they take up to 7 % more.
    Rule(use="sm_90 fused", tile="d64_modified", head_dim=64, dropout=True),
    # A block mask needs few more registers than none, and takes 3 to 26 % less time than with the tile of modified scores.
    Rule(use="sm_90 fused", tile="d64", head_dim=64, listed=True, source="block_masks_backward_h200.json"),
    Rule(use="sm_90 fused", tile="d64_modified", head_dim=64, mask=("modified", "loaded")),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, tokens=(None, 511), **_SHORT_OPEN),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="open", queries=(None, 256), keys=(1024, None),
         source=_WINDOWS),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="windowed", window=(None, 513), source=_WINDOWS),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="causal", tokens=(None, 1023),
         source=(*_SHORT_CAUSAL, _SMALL)),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="open", grouped=False, tokens=(512, 4096),
         source=_FUSED_TILES),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="causal", grouped=False, tokens=(1024, 8192),
         source=_FUSED_TILES),
    Rule(use="sm_90 fused", tile="d64_persistent", head_dim=64, mask="windowed", grouped=False, tokens=(2048, 8192),
         source=_FUSED_TILES),
    Rule(use="sm_90 fused", tile="d64", head_dim=64),
    # 2 % more to 23 % less time with dropout and with a relative bias. With ALiBi, persistent programs take 4 % more to 7 % less.
    Rule(use="sm_90 fused", tile="d128_open", head_dim=128, width=(97, 128), **_DROPPED, mask=("open", "causal")),
    Rule(use="sm_90 fused", tile="d128_open", head_dim=128, width=(97, 128), **_MODS, by_distance=True),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, width=(97, 128), **_MODS, tokens=(None, 4096)),
    Rule(use="sm_90 fused", tile="d128", head_dim=128, dropout=True),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, tokens=(None, 511), **_SHORT_OPEN),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="open", queries=(None, 256), keys=(1024, None),
         source=_WINDOWS),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="windowed", window=(None, 512), source=_WINDOWS),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="windowed", window=(2048, None), grouped=True,
         source="head_parts_windows_h200.json"),
    # With fewer blocks, programs wait for the sums that they convert: 2 to 7 % more time.
    Rule(use="sm_90 fused", tile="d128_converting", head_dim=128, mask="open", grouped=False, packed=False, is_full_width=True,
         tokens=(512, 4096), blocks_per_sm=(17, None),
         source=("short_backwards_h100.json", "small_kernels_h100.json", "small_kernels_h200.json", _SMALL)),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, width=(65, 80), mask="open", tokens=(256, 4096),
         source=_FITTED_80),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="open", tokens=(512, 4096),
         source=("small_kernels_h100.json", "small_kernels_h200.json")),
    Rule(use="sm_90 fused", tile="d128_open", head_dim=128, mask="open", source="one_pass_orders_h200.json"),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="causal", grouped=False, tokens=(384, 1023),
         source=_SHORT_CAUSAL),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="causal", grouped=False, tokens=(1024, 8192),
         source=_FUSED_TILES),
    Rule(use="sm_90 fused", tile="d128_persistent", head_dim=128, mask="windowed", grouped=False, tokens=(2048, 8192),
         source=_FUSED_TILES),
    # 1 to 5 % less time with softcap.
    Rule(use="sm_90 fused", tile="d128_open", head_dim=128, mask="modified", softcap=True, tokens=(1024, None), source=_SMALL),
    Rule(use="sm_90 fused", tile="d128", head_dim=128),
    # --- Tiles of the FP8 fused backward. With 128 queries, modified scores would spill, and a block mask may have smaller blocks.
    Rule(use="sm_90 FP8 fused", tile="d64_modified", head_dim=64, mask=("modified", "loaded")),
    Rule(use="sm_90 FP8 fused", tile="d64_persistent", head_dim=64, grouped=False, tokens=(None, 4096),
         source="fp8_passes_h200.json"),
    Rule(use="sm_90 FP8 fused", tile="d64", head_dim=64, source="fp8_one_pass_orders_h200.json"),
    Rule(use="sm_90 FP8 fused", tile="d128", head_dim=128, source="fp8_one_pass_orders_h200.json"),
    # --- The portable backward in one launch instead of two, if all programs run at once. Then no program waits for a previous
    # kernel, and it costs no other program anything that each computes delta itself. Without a mask, 512 tokens take 1.14 of the
    # time of two launches.
    Rule(use="portable", tile="one_grid", capability=90, element_size=2, head_dim=64, mask="open", dropout=False, packed=False,
         grouped=False, tokens=(None, 256), blocks_per_sm=(1, 2), source="short_backwards_h100.json"),
    Rule(use="portable", tile="one_grid", capability=90, element_size=2, head_dim=64, mask="causal", has_left=False, dropout=False,
         packed=False, grouped=False, tokens=(None, 512), blocks_per_sm=(1, 2), source="short_backwards_h100.json"),
    # --- sm_90: tiles for head dims of two parts, beside those for the next power of two. Head dims that are padded to the same
    # width have the same products.
    # Tiles of 192 queries that all run at once take 14 to 18 % less time.
    Rule(use="sm_90 fitted", width=(65, 96), mask="open", **_PLAIN, keys=(129, None), tokens=(192, None),
         rows_of_one_wave=(0, 128, 256), gain=1.05, source=(*_FITTED_80, _WINDOWS, _SMALL)),
    Rule(use="sm_90 fitted", width=(65, 96), mask="causal", **_PLAIN, keys=(129, None), tokens=(384, None),
         gain=1.05, source=(*_FITTED_80, _WINDOWS, _SMALL)),
    Rule(use="sm_90 fitted", width=(65, 96), mask="modified", softcap=True, **_PLAIN, keys=(129, None), tokens=(192, None),
         gain=1.1, source=_SMALL),
    # 2 to 39 % less time with ALiBi, dropout or a block mask, and with a relative bias of few tokens
    Rule(use="sm_90 fitted", width=(65, 96), **_MODS, by_distance=False, keys=(129, None)),
    Rule(use="sm_90 fitted", width=(65, 96), **_MODS, by_distance=True, keys=(129, 1023)),
    Rule(use="sm_90 fitted", width=(65, 96), **_LISTED, keys=(129, None)),
    Rule(use="sm_90 fitted", width=(65, 96), **_DROPPED, mask=("open", "causal"), keys=(129, None)),
    # 5 to 16 % less time with softcap at 160
    Rule(use="sm_90 fitted", head_dim=256, width=(129, 160), mask="modified", softcap=True, **_PLAIN, tokens=(128, None),
         source=_UNEQUAL),
    Rule(use="sm_90 fitted", head_dim=256, width=(None, 160), mask=("open", "causal"), **_PLAIN, tokens=(128, None),
         gain=1.35, source=(_FITTED, _DRAWN)),
    Rule(use="sm_90 fitted", head_dim=256, width=(None, 192), mask=("open", "causal"), **_PLAIN, tokens=(256, None),
         gain=1.1, source=_FITTED),
    Rule(use="sm_90 fitted", width=(65, 80), mask=("open", "causal"), **_PACKED, gain=1.12),
    Rule(use="sm_90 fitted", width=(81, 96), mask=("open", "causal"), **_PACKED, gain=1.08),
    Rule(use="sm_90 fitted", head_dim=256, width=(None, 160), mask=("open", "causal"), **_PACKED, gain=1.37),
    # A causal mask takes 1 to 2 % less time with rows that are rarely rescaled, and no mask 1 to 3 % more.
    Rule(use="sm_90 fitted", tile="lazy", width=(None, 160), head_dim=256, mask="causal", source=_FITTED),
    Rule(use="sm_90 fused fitted", width=(65, 96), gain=1.1, source=_FITTED_BACKWARD),
    # Persistent programs with dp first take 1 to 8 % less time from 2048 tokens on, and 2 to 4 % more up to 512. If scores begin
    # earlier, modified scores take 4 to 6 % less.
    Rule(use="sm_90 fused fitted", tile="short", tokens=(None, 1023), source=_FITTED_BACKWARD),
    Rule(use="sm_90 fused fitted", tile="modified", mask=("modified", "loaded"), source=_FITTED_BACKWARD),
    Rule(use="sm_90 fused fitted", tile="short", mask="windowed", window=(None, 1024), source=_FITTED_BACKWARD),
    Rule(use="sm_90 fused fitted", tile="long", source=_FITTED_BACKWARD),
    # --- sm_90 few keys: one block of keys that stays in shared memory. 64 columns take 7 to 39 % less time.
    # If all heads have 41,000 to 65,000 queries, they take 7 % less to 6 % more. At 72, rows of 144 bytes in two parts are slower.
    Rule(use="sm_90 few keys", width=(49, 64), **_OPEN_QUERIES, keys=(None, 128), blocks_per_sm=(10, None), gain=1.35),
    Rule(use="sm_90 few keys", width=(33, 48), **_OPEN_QUERIES, keys=(None, 80), blocks_per_sm=(10, None), gain=1.18),
    Rule(use="sm_90 few keys", width=(17, 32), **_OPEN_QUERIES, keys=(None, 80), blocks_per_sm=(30, None), gain=1.26),
    Rule(use="sm_90 few keys", width=(73, 80), **_OPEN_QUERIES, keys=(None, 80), gain=1.17),
    Rule(use="sm_90 few keys", width=(81, 128), **_OPEN_QUERIES, keys=(None, 64), gain=1.12),
    Rule(use="sm_90 few keys", width=(81, 96), **_OPEN_QUERIES, tokens=(2048, None), keys=(None, 80), gain=1.06),
    # --- Lists of keys: 2,048 keys of one latent head, for 128 query heads; 64 queries take 79 us instead of 278.
    Rule(use="sm_90 sparse latent", head_dim=512, width=(512, 576), gain=3.3,
         source=("sparse_hopper_h200.json", "sparse_h200.json", "sparse_latent_h200.json")),
    # 16 blocks of 128 keys, 16 query heads for a key head: forwards take 8.36 ms instead of 8.53, backwards 17.9 instead of 29.3.
    Rule(use="sparse by block", head_dim=128, block=(128, 128), grouped=True, capability=90, gain=1.29,
         source=("sparse_blocks_h200.json", "sparse_h200.json")),
    # --- mma.sync beside the portable kernels: code of sm_80 and of sm_89 on an H200, with an H200's occupancy
    *(Rule(use=use, capability=capability, head_dim=head_dim, mask=mask, dropout=False, paged=False, packed=packed,
           queries=queries, keys_from=keys_from, gain=gain, source=source)
      for (use, capability, source), rows in _MMA_GAINS.items() for head_dim, mask, packed, queries, keys_from, gain in rows),
    # --- SDPA's FlashAttention-2 beside these kernels
    *(Rule(use="sdpa beside mma.sync", direction=direction, capability=capability, dtype="bfloat16", layout="dense", kind="plain",
           mask=mask, head_dim_qk=head_dims[0], head_dim_v=head_dims[1],
           tokens=tokens, gain=gain, source=source)
      for (capability, source), rows in _SDPA_BESIDE_MMA.items() for direction, mask, head_dims, tokens, gain in rows),
    # --- GPUs before Hopper and RTX 50: PyTorch's FlashAttention-2 beside the portable kernels, as sm_80 code on an H200.
    *(Rule(use="sdpa", direction=direction, capability=capability, head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask,
           **_OLDER, gain=gain, source="older_tiles_h200.json")
      for (capability, direction, mask), gains in _SDPA_GAINS.items() for head_dim, gain in gains.items()),
)
# fmt: on


def _by_use(rules: Iterable[Rule]) -> dict[str, tuple[Rule, ...]]:
    found: dict[str, tuple[Rule, ...]] = {}
    for rule in rules:
        found[rule.use] = (*found.get(rule.use, ()), rule)
    return found


RULES = _by_use(rule for rule in CROSSOVERS if not rule.tile)
TILES = _by_use(rule for rule in CROSSOVERS if rule.tile)
