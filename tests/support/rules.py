"""Rules of `crossovers.py` compared with one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flexattn.kernels_triton.common.crossovers import Rule


def is_repeated(rule: Rule, later: Sequence[Rule]) -> bool:
    """Returns whether the rule could be left out, because later rules give the same answer for each of its calls."""
    return all(_next_says_the_same(part, later) for part in _parts(rule))


def covers(wide: Rule, narrow: Rule) -> bool:
    """Returns whether a rule is for all calls of another one."""
    words, ranges = dict(narrow.words), {name: limits for name, *limits in narrow.ranges}
    return all({*wanted} >= {*words.get(name, (None,))} for name, wanted in wide.words) and all(
        name in ranges and first <= ranges[name][0] and ranges[name][1] <= last for name, first, last in wide.ranges
    )


def _next_says_the_same(rule: Rule, later: Sequence[Rule]) -> bool:
    following = next((other for other in later if other.use == rule.use and _meets(rule, other)), None)
    return following is not None and covers(following, rule) and _answer(following) == _answer(rule)


def _parts(rule: Rule) -> Iterator[Rule]:
    """Yields a rule for each combination of words in the rule's columns."""
    names = [name for name, words in rule.words if len(words) > 1]
    for words in itertools.product(*(dict(rule.words)[name] for name in names)):
        yield replace(rule, **dict(zip(names, words, strict=True)))


def _meets(rule: Rule, other: Rule) -> bool:
    """Returns whether some call may be one of both rules."""
    words, ranges = dict(other.words), {name: limits for name, *limits in other.ranges}
    return all({*wanted} & {*words.get(name, wanted)} for name, wanted in rule.words) and all(
        first <= ranges.get(name, (first, last))[1] and ranges.get(name, (first, last))[0] <= last
        for name, first, last in rule.ranges
    )


def _answer(rule: Rule) -> tuple[Any, ...]:
    return (rule.tile, rule._minimums)
