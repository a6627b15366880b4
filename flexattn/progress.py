"""A bar on stderr for what takes seconds, where tqdm is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, what: str, unit: str, wanted: bool = True) -> Iterator[Callable[[], object]]:
    """Yields a function to be called after each of `total` steps; there is a bar for more than one."""
    if not wanted or total < 2 or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit=unit) as bar:
        yield lambda: bar.update()
