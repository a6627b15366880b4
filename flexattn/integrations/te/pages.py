"""Pages of a cache and their owners, on the host, under the names of TransformerEngine's `PagedKVCacheManager`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping


class Pages:
    """Pool of pages: pages that sequences own, and free pages.

    total: pages in the pool. size: tokens of a page. columns: maximum number of pages of a sequence.
    """

    def __init__(self, total: int, size: int, columns: int) -> None:
        self.total, self.size, self.columns = total, size, columns
        self.reset()

    def reset(self) -> None:
        """Frees all pages."""
        self._free = list(range(self.total))
        self._taken: dict[Hashable, list[int]] = {}

    def take(self, tokens: Mapping[Hashable, int]) -> None:
        """Assigns each sequence enough pages for its number of tokens. Sequences that are left out lose their pages.

        Raises ValueError if there are too few pages. The state is then unchanged.
        """
        needed = {name: -(-count // self.size) for name, count in tokens.items()}
        if sum(needed.values()) > self.total:
            raise ValueError(
                f"step_dict's sequences need {sum(needed.values())} pages of {self.size} tokens; accepted: up to "
                f"total_num_pages, {self.total}; leave out a finished sequence, or pass a larger total_num_pages"
            )
        for name in [name for name in self._taken if name not in needed]:
            self._free += self._taken.pop(name)
        for name, count in needed.items():
            pages = self._taken.setdefault(name, [])
            missing = count - len(pages)
            pages += self._free[:missing]
            del self._free[:missing]

    def of(self, names: Iterable[Hashable]) -> list[list[int]]:
        """Returns the pages of each named sequence."""
        return [self._taken[name] for name in names]
