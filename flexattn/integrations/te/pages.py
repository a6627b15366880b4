"""Pages of a cache and whose they are: kept on the host, under the names of TransformerEngine's `PagedKVCacheManager`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping


class Pages:
    """Pages that sequences have taken of a pool, and those that are free.

    total: pages in the pool. size: tokens of a page. columns: pages that one sequence may have.
    """

    def __init__(self, total: int, size: int, columns: int) -> None:
        self.total, self.size, self.columns = total, size, columns
        self.reset()

    def reset(self) -> None:
        """Frees all pages."""
        self._free = list(range(self.total))
        self._taken: dict[Hashable, list[int]] = {}

    def take(self, tokens: Mapping[Hashable, int]) -> None:
        """Gives each sequence pages for so many tokens, those that it has and more; sequences that are not named lose theirs.

        Raises ValueError where there are too few pages; nothing has changed then.
        """
        needed = {name: -(-count // self.size) for name, count in tokens.items()}
        if sum(needed.values()) > self.total:
            raise ValueError(
                f"step_dict's sequences would need {sum(needed.values())} pages of {self.size} tokens; accepted: up to "
                f"total_num_pages, {self.total}; finish a sequence, by leaving it out, or give more pages"
            )
        for name in [name for name in self._taken if name not in needed]:
            self._free += self._taken.pop(name)
        for name, count in needed.items():
            pages = self._taken.setdefault(name, [])
            more = count - len(pages)
            pages += self._free[:more]
            del self._free[:more]

    def of(self, names: Iterable[Hashable]) -> list[list[int]]:
        """Returns the pages of each of these sequences."""
        return [self._taken[name] for name in names]
