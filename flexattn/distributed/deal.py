"""The "dealt" layout: uncut packed documents as far as possible, so that few keys are sent, or else chunks."""

from __future__ import annotations

import bisect
import collections
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flexattn.distributed import layout as layouts
from flexattn.distributed.layout import MOST_IMBALANCE, Run, Runs, union, without
from flexattn.distributed.mask import Mask
from flexattn.distributed.trades import CALL_KEYS, GROUP, TILE, Deal, Documents, Share, Totals, density, settle

MOST_PAIRS = 1 << 16  # Documents times ranks. Above it, deals would take longer than a training step.
RESERVES = (0.02, 0.0, 0.05)  # fractions of a rank's scores that stay free next to a part of a cut document
LEAST_DENSE = (0.003, 0.01)  # fractions of a rank's scores above which a document is dense
FEW_PAIRS = 1 << 12  # documents or chunks, times ranks, up to which several deals are tried
ENOUGH_DENSE = 1.01  # largest scores of an uncut document, over a rank's mean scores
MOST_SETTLED = 2  # number of deals that trades complete


def whole_documents(mask: Mask, ranks: int) -> Iterator[tuple[Runs, ...]]:
    """Yields deals of documents under a mask without blocks: each rank's runs, with as many tokens as `cut` gives it.

    Dense documents have many scores per token. They are dealt first, each to the rank that most needs scores for its missing
    tokens. The others are sorted by scores per token. Each rank takes neighbours from them that have both its missing tokens and
    its missing scores. Pairs of ranks then trade the remaining differences.
    """
    if not any(mask.lengths_q) or len(mask.lengths_q) * ranks > MOST_PAIRS:
        return
    documents = Documents(mask, ranks)
    is_small = len(mask.lengths_q) * ranks <= FEW_PAIRS
    ways = itertools.product(RESERVES, (False, True)) if is_small else ((RESERVES[0], True),)
    starts = dict.fromkeys(tuple(_cut_dense(documents, reserve, in_middle)) for reserve, in_middle in ways)
    deals: list[tuple[float, int, Deal]] = []
    for shares, least in itertools.product(starts, LEAST_DENSE if is_small else LEAST_DENSE[:1]):
        deal = _dealt(documents, shares, least)
        deals.append((_badness(documents, deal), len(deals), deal))
    for _, _, deal in heapq.nsmallest(MOST_SETTLED if is_small else 1, deals):
        if settle(documents, deal):
            yield tuple(documents.runs(own) for own in deal)


def _densest_first(share: Share) -> tuple[int, int, Runs]:
    return -share.area, share.document, share.runs


def _cut_dense(documents: Documents, reserve: float, in_middle: bool) -> list[Share]:
    """Returns shares of which each fits on a rank, together with the sparsest tokens that fill it.

    A document with more scores is cut so that a suffix fits. If in_middle, the cut may leave a middle part, and all other tokens
    must fit. The busiest rank then fetches fewer keys: a causal suffix sees all keys before it, and a middle part half as many.
    """
    heap = [(_densest_first(share), share) for share in documents.whole]
    heapq.heapify(heap)
    done: list[Share] = []
    later: collections.Counter[int] = collections.Counter()  # finished parts of each document
    used = 0.0  # sparsest tokens that fill up finished parts
    limit = documents.area * (1 - reserve)

    def filled(area: int, size: int) -> float:
        return area + documents.sparsest(used, used + documents.size - size)

    def fits(size: int, area: int) -> bool:
        return size <= documents.size and filled(area, size) <= limit

    while len(done) < documents.ranks:
        whole = heap[0][1]
        [run] = whole.runs
        if whole.size <= documents.size and filled(whole.area, whole.size) <= ENOUGH_DENSE * documents.area:
            break
        pair = _suffix(documents, whole, fits)
        if pair is None:
            break
        if in_middle and run.start == 0 and later[whole.document] < 2:  # More middle parts would all need the keys of this rank.
            other = _all_but_middle(documents, whole, fits)
            if other is not None and max(share.keys for share in other) < max(share.keys for share in pair):
                pair = other
        heapq.heapreplace(heap, (_densest_first(pair[0]), pair[0]))
        done.append(pair[1])
        later[whole.document] += 1
        used += documents.size - pair[1].size
    return [*done, *(share for _, share in heap)]


def _suffix(documents: Documents, whole: Share, fits: Callable[[int, int], bool]) -> tuple[Share, Share] | None:
    """Returns the tokens of a share before its longest suffix that fits, and that suffix. None if one of them is empty."""
    document, [run] = whole.document, whole.runs

    def fits_from(start: int) -> bool:
        return fits(run.stop - start, documents.mask.scores(document, Run(start, run.stop)))

    start = _on_grid(bisect.bisect_left(range(run.stop), True, lo=run.start, key=fits_from), run.stop)
    if not run.start < start < run.stop:
        return None
    return documents.share(document, Run(run.start, start)), documents.share(document, Run(start, run.stop))


def _all_but_middle(documents: Documents, whole: Share, fits: Callable[[int, int], bool]) -> tuple[Share, Share] | None:
    """Returns a middle part as long as the tokens before it, and all other tokens, if those fit. Else returns None.

    If the mask is causal, the middle part fetches all keys before it, and the other tokens fetch its keys. The larger of these
    two numbers is smallest if both are equal.
    """
    document, [run] = whole.document, whole.runs
    half = run.size // 2

    def fits_without(first: int) -> bool:
        return fits(run.size - first, whole.area - documents.mask.scores(document, Run(first, 2 * first)))

    first = _on_grid(bisect.bisect_left(range(half), True, lo=1, key=fits_without), half)
    if first >= half:
        return None
    middle = Run(first, 2 * first)
    return documents.share(document, middle), documents.share(document, Run(0, first), Run(middle.stop, run.stop))


def _on_grid(position: int, stop: int) -> int:
    """Returns the next multiple of a tile, or else of a group, before stop. If there is none, returns the position."""
    return next((at for grid in (TILE, GROUP) if (at := -(-position // grid) * grid) < stop), position)


def _dealt(documents: Documents, shares: Sequence[Share], least: float) -> Deal:
    """Returns a deal with nearly equal tokens and scores. least: fraction of the mean scores above which a share is dense."""
    deal: Deal = [[] for _ in documents.sizes]
    sizes, areas = list(documents.sizes), [documents.area] * documents.ranks  # missing on each rank
    ordered = sorted(shares, key=_densest_first)
    dense = sum(share.area >= least * documents.area for share in shares)
    left = Totals.of(ordered)
    mean = 0.0
    for share in ordered[:dense]:
        left = left.changed(share, None)
        mean = left.area / left.size if left.size else 0.0  # scores per token of the rest
        able = [rank for rank, size in enumerate(sizes) if size >= share.size] or range(documents.ranks)
        rank = max(able, key=lambda rank: (areas[rank] - mean * sizes[rank], sizes[rank]))
        deal[rank].append(share)
        sizes[rank], areas[rank] = sizes[rank] - share.size, areas[rank] - share.area
    rest = sorted(ordered[dense:], key=density)
    *first, last = sorted(range(documents.ranks), key=lambda rank: areas[rank] - mean * sizes[rank])
    for rank in first:
        if sizes[rank] > 0 and rest:
            taken = _neighbours(documents, rest, (sizes[rank], areas[rank]))
            deal[rank] += rest[taken]
            del rest[taken]
    deal[last] += rest
    return [documents.merged(own) for own in deal]


def _neighbours(documents: Documents, shares: Sequence[Share], lacks: tuple[int, float]) -> slice:
    """Returns the range of neighbouring shares that together come nearest to a rank's missing tokens and scores."""
    size, area = lacks
    sizes = list(itertools.accumulate((share.size for share in shares), initial=0))
    areas = list(itertools.accumulate((share.area for share in shares), initial=0))

    def behind(first: int) -> int:
        end = min(bisect.bisect_left(sizes, sizes[first] + size), len(shares))
        return end - (end > first and sizes[end] + sizes[end - 1] > 2 * (sizes[first] + size))

    def distance(first: int) -> float:
        end = behind(first)
        return abs(areas[end] - areas[first] - area) / documents.area + abs(sizes[end] - sizes[first] - size) / documents.size

    firsts = range(bisect.bisect_right(sizes, max(0, sizes[-1] - size)))
    first = bisect.bisect_left(firsts, True, key=lambda first: areas[behind(first)] - areas[first] >= area)
    first = min((i for i in (first - 1, first) if 0 <= i < len(firsts)), key=distance)
    return slice(first, behind(first))


def _badness(documents: Documents, deal: Deal) -> float:
    totals = [Totals.of(own) for own in deal]
    over = max(abs(total.size - size) for total, size in zip(totals, documents.sizes, strict=True))
    keys = max(total.keys for total in totals) + over / 2  # cuts remove about half of the excess
    return documents.worth(keys, max(total.area for total in totals))


class _DealCost(NamedTuple):
    """Scores and keys of the slowest ranks.

    fetched: keys from other ranks. worth: keys received or sent, plus the equivalent in keys of extra calls and of scores above the
    mean.
    """

    area: int
    fetched: int
    worth: float
    runs: tuple[Runs, ...]


def _deal_cost(mask: Mask, q_runs: tuple[Runs, ...], kv_runs: tuple[Runs, ...] | None, limit: float = math.inf) -> _DealCost | None:
    """Returns the cost for the slowest ranks, or None if their scores exceed the limit."""
    areas = [sum(mask.area(run) for run in own) for own in q_runs]
    area, mean = max(areas), max(1.0, sum(areas) / len(areas))
    if area > limit:
        return None
    held = kv_runs or q_runs
    owners = sorted((*run, rank) for rank, runs in enumerate(held) for run in runs)
    fetched, sent, most_parts = [0] * len(held), [0] * len(held), 1
    for rank, own in enumerate(q_runs):
        parts = collections.Counter(document for run in own for document, _ in mask.q.within(run))
        most_parts = max(most_parts, *parts.values()) if parts else most_parts
        needs = union(keys for run in own for keys in mask.needs(run))
        for first, last in without(needs, held[rank]):
            fetched[rank] += last - first
            for start, stop, owner in itertools.islice(owners, bisect.bisect_right(owners, first, key=lambda one: one[1]), None):
                if start >= last:
                    break
                sent[owner] += min(stop, last) - max(start, first)
    over = (area / mean - 1) * sum(mask.lengths_kv)
    return _DealCost(area, max(fetched), max(*fetched, *sent) + CALL_KEYS * (most_parts - 1) + over, q_runs)


def dealt(mask: Mask, ranks: int, kv_runs: tuple[Runs, ...] | None = None) -> tuple[Runs, ...]:
    """Returns runs of the full sequence for each rank, with equal tokens, nearly equal scores, and few keys from other ranks.

    The candidates are deals of uncut documents, a zigzag, contiguous parts, and chunks (`layout.dealt`). A candidate is dropped if
    a rank fetches more than the busiest rank does with chunks. The cheapest of the others is taken, because all ranks wait for the
    busiest. Its cost is the keys that one rank receives or sends, plus the equivalent of its calls and scores. Block masks are
    always dealt in chunks.

    kv_runs: the keys that each rank holds. None: keys at the positions of its queries.
    """
    length = sum(mask.lengths_q)
    unit = 1 if mask.blocks is None else mask.blocks.size_q
    whole = [] if mask.blocks is not None else [*whole_documents(mask, ranks)]
    most_choices = FEW_PAIRS if whole else layouts.MOST_CHOICES
    in_chunks = layouts.dealt(length, ranks, mask.area, mask.needs, unit, most_choices)
    if mask.blocks is not None:
        return in_chunks
    chunks = _deal_cost(mask, in_chunks, kv_runs)
    assert chunks is not None
    limit = max(MOST_IMBALANCE * mask.area(Run(0, length)) / ranks, chunks.area)
    others = (*whole, layouts.zigzag(length, ranks), layouts.contiguous(length, ranks))
    candidates = (_deal_cost(mask, runs, kv_runs, limit) for runs in others)
    better = [other for other in candidates if other is not None and other.fetched <= chunks.fetched]
    return min((*better, chunks), key=lambda measured: measured.worth).runs
