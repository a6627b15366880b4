"""The table of crossovers: its sources, its names, and the text of a rule that a call misses."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from flexattn.dispatch.spec import BACKENDS
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.crossovers import CROSSOVERS, RULES, TILES, UNLIMITED, Rule
from flexattn.kernels_triton.common.facts import COLUMNS
from flexattn.kernels_triton.common.tiles import HOPPER_FORWARD, HOPPER_FUSED
from flexattn.kernels_triton.hopper.fp8_backward_fused import FP8_FUSED
from tests.conftest import ROOT
from tests.support.rules import covers, is_repeated

ORDERS = (*families.FORWARDS.values(), *families.BACKWARDS.values())
FAMILIES = [*(family for order in ORDERS for family in order), *families.SPARSE_FORWARDS]
OTHERS = {*BACKENDS, "sdpa", "sdpa beside mma.sync"}  # not kernel families; explain reads the rules for sdpa
FORMS = {"split keys", "split plan", "sm_90 fitted", "sm_90 fused fitted"}  # of a family's kernels
CALL = {
    "head_dim": 64,
    "mask": "causal",
    "softcap": False,
    "by_distance": False,
    "listed": False,
    "dropout": False,
    "tokens": 2048,
    "mean_tokens": 2048,
    "flops": 2.0**37,
    "paged": False,
    "packed": False,
    "grouped": False,
    "batch_invariant": False,
    "width": 64,
    "keys": 2048,
    "decode": "no",
    "bytes": 2**20,
    "window_left": UNLIMITED,
    "keys_per_sm": 1000,
    "blocks_per_sm": 100,
    "rows_of_one_wave": 0,
    "queries": 2048,
    "query_rows": 2048,
}


@pytest.mark.parametrize("rule", CROSSOVERS, ids=str)
def test_a_rule_names_what_exists(rule: Rule) -> None:
    assert all((ROOT / "bench" / "results" / name).is_file() for name in rule.files)
    names = {family.rules or family.name for family in FAMILIES}
    if rule.tile:
        tiles = {"sm_90": HOPPER_FORWARD, "sm_90 fused": HOPPER_FUSED, "sm_90 FP8 fused": FP8_FUSED}
        forms = {"sm_90 fitted": {"lazy"}, "sm_90 fused fitted": {"long", "modified", "short"}, "portable": {"one_grid"}}
        assert rule.tile in (tiles | forms)[rule.use]
    else:
        assert rule.use in {*names, *OTHERS, *FORMS}


def test_every_tile_has_a_rule_and_the_last_rule_holds_for_all_calls() -> None:
    for use, tiles in (("sm_90", HOPPER_FORWARD), ("sm_90 fused", HOPPER_FUSED), ("sm_90 FP8 fused", FP8_FUSED)):
        assert {rule.tile for rule in TILES[use]} == tiles.keys()
        for head_dim in {rule.head_dim for rule in TILES[use]}:
            *_, last = (rule for rule in TILES[use] if rule.head_dim == head_dim)
            assert last == Rule(use=use, tile=last.tile, head_dim=head_dim, source=last.source)


def test_no_rule_says_what_others_say() -> None:
    """An earlier rule would leave it no call, and later ones with the same answer would make it unnecessary."""
    for use, rules in [*RULES.items(), *TILES.items()]:
        for n, rule in enumerate(rules):
            assert not any(covers(other, rule) for other in rules[:n]), f"{use}: {rule}"
            assert not is_repeated(rule, rules[n + 1 :]), f"{use}: {rule}"


@pytest.mark.parametrize("rule", CROSSOVERS, ids=str)
def test_no_minimum_repeats_a_range(rule: Rule) -> None:
    ranges = {name: first for name, first, _ in rule.ranges}
    for name, least in rule._minimums:
        parts = ("tokens", "queries", "keys") if name == "tokens" else (name,)
        assert all(ranges.get(part, 0) < least for part in parts)


def test_every_column_of_a_rule_for_kernels_is_known() -> None:
    known = COLUMNS.keys() | {"rows", "mean_tokens", "decode"}
    for rule in CROSSOVERS:
        if rule.use not in OTHERS:
            assert {name for name, *_ in (*rule.words, *rule.ranges)} <= known, rule


def test_every_family_that_another_follows_has_rules() -> None:
    measured = {family.rules or family.name for family in FAMILIES if family.has_run} - {"portable", "sparse"}
    names = {family.rules or family.name for family in FAMILIES} - {"portable", "sparse"}
    assert measured <= RULES.keys() - {*OTHERS, *FORMS} <= names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (
            {"keys_per_sm": 50},
            "it is faster from 100 keys of all heads for each multiprocessor on, and this call has 50 (rule: head_dim 64, ",
        ),
        ({"mask": "open", "flops": 2.0**34}, "it is faster from 2**35 FLOPs on, and this call has 1.72e+10 (rule: "),
        ({"mean_tokens": 100}, "such a call; the nearest rule is for mean_tokens 512 or more, and this call has 100"),
        ({"mask": "modified"}, "such a call; the nearest rule is for blocks_per_sm up to 12, and this call has 100"),
        ({"decode": "shared", "keys": 900}, "it is faster from 1024 keys of the longest sequence on, and this call has 900"),
        (
            {"decode": "alone", "keys": 2048, "query_rows": 1},
            "it was measured to be slower (rule: decode alone, keys 1024 or more; small_calls_few",
        ),
    ],
    ids=str,
)
def test_a_miss_is_in_words(change: dict[str, Any], reason: str | None) -> None:
    found = crossovers.slower("sm_90", CALL | change)
    assert found is None if reason is None else reason in str(found)


def test_the_table_waits_for_no_library() -> None:
    """Backends are chosen with it, and Triton is imported only if it runs the call."""
    tree = ast.parse((ROOT / "kernels_triton" / "common" / "crossovers.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "collections.abc", "dataclasses", "functools", "math", "typing"}
