"""Documents of a mask as shares of ranks, and trades that give each rank its tokens and even scores: shares, or parts of one."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flexattn.distributed import layout as layouts
from flexattn.distributed.layout import Run, Runs, common, size_of, union
from flexattn.distributed.mask import Mask

CALL_KEYS = 2048  # number of keys that take as long to receive as one more call takes to run
# a call costs at most this fraction of all tokens during the search, because few tokens would otherwise stay uneven
CALL_SHARE = 32

EVEN, PAST_EVEN = 1.015, 9  # Above EVEN times the mean, scores cost PAST_EVEN times more. Above MOST_IMBALANCE a deal is refused.


class Share(NamedTuple):
    """A document or a part of it, in positions of the document.

    keys: keys that its queries see besides their own, plus the equivalent of one more call for each run after the first.
    """

    document: int
    runs: Runs
    size: int
    area: int
    keys: int


class Totals(NamedTuple):
    """Sums over a rank's shares."""

    size: int
    area: int
    keys: int

    @classmethod
    def of(cls, shares: Iterable[Share]) -> Totals:
        size = area = keys = 0
        for share in shares:
            size, area, keys = size + share.size, area + share.area, keys + share.keys
        return cls(size, area, keys)

    def changed(self, gone: Share | None, come: Share | None) -> Totals:
        size, area, keys = self
        if gone is not None:
            size, area, keys = size - gone.size, area - gone.area, keys - gone.keys
        if come is not None:
            size, area, keys = size + come.size, area + come.area, keys + come.keys
        return Totals(size, area, keys)


class Documents:
    """Documents of a mask without blocks, and the target of each rank: `sizes` tokens and about `area` scores."""

    def __init__(self, mask: Mask, ranks: int) -> None:
        self.mask, self.ranks, self.starts = mask, ranks, mask.q.starts
        total = sum(mask.lengths_q)
        self.sizes = [run.size for run in layouts.cut(total, ranks)]
        self.size, self.tokens = total / ranks, max(1, total)
        self.call_keys = min(CALL_KEYS, total // CALL_SHARE)
        self.area: float = max(1.0, mask.ends[-1] / ranks)
        self.whole = [
            Share(document, (Run(0, length),), length, last - first, self._keys(document, Run(0, length)))
            for document, (length, (first, last)) in enumerate(zip(mask.lengths_q, itertools.pairwise(mask.ends), strict=True))
            if length
        ]
        self._sparse = sorted(self.whole, key=density)
        self._sizes = list(itertools.accumulate((share.size for share in self._sparse), initial=0))
        self._areas = list(itertools.accumulate((share.area for share in self._sparse), initial=0))

    def share(self, document: int, *runs: Run) -> Share:
        """Returns the share with some runs of a document. Runs must not overlap."""
        joint = union(runs)
        if len(joint) == 1:
            return Share(document, joint, joint[0].size, self.mask.scores(document, joint[0]), self._keys(document, joint[0]))
        seen = union(self.mask.in_band(document, run) for run in joint)
        keys = size_of(seen) - size_of(common(seen, joint)) + self.call_keys * (len(joint) - 1)
        return Share(document, joint, size_of(joint), sum(self.mask.scores(document, run) for run in joint), keys)

    def _keys(self, document: int, run: Run) -> int:
        seen = self.mask.in_band(document, run)
        return seen.size - max(0, min(seen.stop, run.stop) - max(seen.start, run.start))

    def sparsest(self, first: float, last: float) -> float:
        """Returns the scores of the tokens in [first, last), if tokens are sorted from the sparsest document to the densest."""
        return self._sparsest(max(last, first)) - self._sparsest(first)

    def _sparsest(self, tokens: float) -> float:
        i = min(bisect.bisect_right(self._sizes, tokens) - 1, len(self._sparse) - 1)
        return self._areas[i] + self._sparse[i].area * min(1.0, (tokens - self._sizes[i]) / self._sparse[i].size)

    def merged(self, shares: Sequence[Share]) -> list[Share]:
        """Returns the shares with all shares of a document joined to one."""
        by_document: dict[int, Share] = {}
        for share in shares:
            same = by_document.get(share.document)
            by_document[share.document] = share if same is None else self.share(share.document, *same.runs, *share.runs)
        return list(by_document.values())

    def worth(self, keys: float, area: float) -> float:
        """Returns the cost of keys and scores: their shares of all keys and of the mean. Scores above EVEN count tenfold."""
        scores = max(1.0, area / self.area)
        return keys / self.tokens + scores + PAST_EVEN * max(0.0, scores - EVEN)

    def runs(self, shares: Iterable[Share]) -> Runs:
        """Returns a rank's runs of the full sequence."""
        return union(
            Run(self.starts[share.document] + a, self.starts[share.document] + b) for share in shares for a, b in share.runs
        )


def density(share: Share) -> tuple[float, int, Runs]:
    """Returns the key that sorts shares by scores per token."""
    return share.area / share.size, share.document, share.runs


Deal = list[list[Share]]  # shares of each rank, at most one of each document
MOST_EXCHANGED = 12  # most shares of a rank for which exchanges are searched
MOST_CUT = 4  # most exchanges for which cuts are searched
MOST_EVENINGS, MOST_PARTNERS = 8, 3  # Most trades that even scores. Most partners with few scores that a rank with too many tries.
TILE, GROUP = 128, 8  # cuts at multiples of these are best: tiles of kernels, and groups of dropout
OFF_TILE, OFF_GROUP = 2e-4, 5e-4  # Extra fetched keys, as a fraction of all keys, that a cut at a multiple is worth.
LEAST_GAIN = 5e-4  # least gain of a trade that evens scores, as a fraction of the mean scores or of all keys


class Cut(NamedTuple):
    """A cut share: the part that its rank keeps, and the part that it gives."""

    share: Share
    kept: Share
    given: Share
    off: float  # penalty if its ends are not at multiples of tiles and groups


class Trade(NamedTuple):
    """An exchange of shares between two ranks. One of them may also cut a share for the other. cost: of both, after the trade."""

    cost: float
    given: Share | None
    taken: Share | None
    cut: Cut | None
    cuts_first: bool  # whether the first rank cuts


def settle(documents: Documents, deal: Deal) -> bool:
    """Trades until each rank has its number of tokens and scores stop improving. Returns whether all numbers are right."""
    totals = [Totals.of(own) for own in deal]
    over = [total.size - size for total, size in zip(totals, documents.sizes, strict=True)]
    ranks = range(documents.ranks)

    def trade(giver: int, taker: int, tokens: int, below: float = math.inf) -> bool:
        pair = deal[giver], deal[taker]
        best = _best(documents, pair, (totals[giver], totals[taker]), tokens)
        if best is None or best.cost >= below:
            return False
        deal[giver], deal[taker] = _traded(pair, best)
        totals[giver], totals[taker] = Totals.of(deal[giver]), Totals.of(deal[taker])
        return True

    while any(over):
        giver, taker = max(ranks, key=over.__getitem__), min(ranks, key=over.__getitem__)
        tokens = min(over[giver], -over[taker])
        if not trade(giver, taker, tokens):
            return False
        over[giver], over[taker] = over[giver] - tokens, over[taker] + tokens
    for _ in range(MOST_EVENINGS):
        *others, most = sorted(ranks, key=lambda rank: totals[rank].area)
        tried = others[: MOST_PARTNERS if totals[most].area > EVEN * documents.area else 1]
        pairs = ((other, _cost(documents, totals[most], totals[other]) - LEAST_GAIN) for other in tried)
        if not any(trade(most, other, 0, below) for other, below in pairs):
            break
    return True


def _cost(documents: Documents, one: Totals, other: Totals) -> float:
    return documents.worth(max(one.keys, other.keys) + (one.keys + other.keys) / 10, max(one.area, other.area))


def _traded(pair: tuple[list[Share], list[Share]], trade: Trade) -> list[list[Share]]:
    deals = []
    for own, gone, come, cuts in (
        (pair[0], trade.given, trade.taken, trade.cuts_first),
        (pair[1], trade.taken, trade.given, not trade.cuts_first),
    ):
        shares = [share for share in own if share is not gone] + ([] if come is None else [come])
        if trade.cut is not None and cuts:
            shares = [trade.cut.kept if share is trade.cut.share else share for share in shares]
        elif trade.cut is not None:
            shares.append(trade.cut.given)
        deals.append(shares)
    return deals


def _best(documents: Documents, pair: tuple[list[Share], list[Share]], totals: tuple[Totals, Totals], tokens: int) -> Trade | None:
    """Returns the best trade in which the first rank gives `tokens` more tokens than it takes. None if none is found."""
    tried = []
    for number, (given, taken) in enumerate(_exchanges(pair, tokens, (totals[0].area - totals[1].area) / 2)):
        after = totals[0].changed(given, taken), totals[1].changed(taken, given)
        rest = tokens - totals[0].size + after[0].size
        off = 0.0 if rest % GROUP == 0 else OFF_GROUP
        cost = _cost(documents, *after) + abs(rest) / documents.tokens + off
        tried.append((cost, number, given, taken, after, rest))
    best: Trade | None = None
    chosen = heapq.nsmallest(MOST_CUT, tried)
    if not tokens:  # to trade scores for tokens: a part of a dense share for a sparse one
        chosen += [one for one in tried if one[2] is None and one[5] > 0 and one not in chosen]
    for _, _, given, taken, after, rest in chosen:
        if not rest:
            cost = _cost(documents, *after)
            if best is None or cost < best.cost:
                best = Trade(cost, given, taken, None, False)
            continue
        first = rest > 0
        own, gone, come = (pair[0], given, taken) if first else (pair[1], taken, given)
        able = [share for share in own if share is not gone] + ([] if come is None else [come])
        held = {share.document for share in (pair[1] if first else pair[0])} | ({gone.document} if gone is not None else set())
        mine, other = after if first else after[::-1]
        able = [share for share in able if share.document not in held or share is come]
        for cut in _cuts(documents, able, abs(rest), (mine.area - other.area) / 2):
            cost = _cost(documents, mine.changed(cut.share, cut.kept), other.changed(None, cut.given)) + cut.off
            if best is None or cost < best.cost:
                best = Trade(cost, given, taken, cut, first)
    return best


def _exchanges(pair: tuple[list[Share], list[Share]], tokens: int, scores: float) -> Iterator[tuple[Share | None, Share | None]]:
    """Yields shares that one rank may exchange for a share of the other, or for none.

    The difference of their tokens is near `tokens`, or the difference of their scores near `scores`.
    """
    document_sets = [{share.document for share in own} for own in pair]
    ours, theirs = (
        sorted((share for share in own if share.document not in other), key=lambda share: (share.size, share.document))
        for own, other in zip(pair, document_sets[::-1], strict=True)
    )
    by_area = sorted(ours, key=lambda share: (share.area, share.document))
    for taken in (None, *theirs[:: max(1, len(theirs) // MOST_EXCHANGED)]):
        yield None, taken
        size, area = (taken.size, taken.area) if taken else (0, 0)
        at = bisect.bisect_left(ours, size + tokens, key=lambda share: share.size)
        near = bisect.bisect_left(by_area, area + scores, key=lambda share: share.area)
        for given in dict.fromkeys((*ours[max(0, at - 1) : at + 2], *by_area[max(0, near - 1) : near + 1])):
            yield given, taken


def _cuts(documents: Documents, shares: Sequence[Share], count: int, scores: float) -> Iterator[Cut]:
    """Yields cuts of `count` tokens from the shortest and the longest share: the first, the last, or with these scores."""
    able = [share for share in shares if share.size > count and len(share.runs) == 1]
    if not able:
        return
    longest = max(able, key=lambda share: (share.size, share.document))
    for share in dict.fromkeys((min(able, key=lambda share: (share.size, share.document)), longest)):
        [run] = share.runs
        ends = [documents.share(share.document, Run(at, at + count)) for at in (run.start, run.stop - count)]
        for given in ends:
            yield _cut(documents, share, given)
        first, last = (given.area for given in ends)
        if share is longest and first < scores < last:
            at = run.start + round((scores - first) / (last - first) * (share.size - count))
            at -= (at - run.start) % TILE
            if run.start < at:
                yield _cut(documents, share, documents.share(share.document, Run(at, at + count)))


def _cut(documents: Documents, share: Share, given: Share) -> Cut:
    [run], [part] = share.runs, given.runs
    kept = documents.share(share.document, Run(run.start, part.start), Run(part.stop, run.stop))
    inner = [at for at in (part.start, part.stop) if run.start < at < run.stop]
    off = max(0.0 if at % TILE == 0 else OFF_TILE if at % GROUP == 0 else OFF_TILE + OFF_GROUP for at in inner)
    return Cut(share, kept, given, off)
