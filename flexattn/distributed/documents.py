"""Documents of a mask, as shares of ranks: their tokens, their scores, and the keys that they need besides their own."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexattn.distributed.layout import Run, Runs, common, cut, size_of, union
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
        self.sizes = [run.size for run in cut(total, ranks)]
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
