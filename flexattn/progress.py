"""A progress bar on stderr for work that takes seconds, if tqdm is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, title: str, unit: str, wanted: bool = True) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each of `total` steps. A bar appears if there is more than one."""
    if not wanted or total < 2 or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=unit) as bar:
        yield lambda: bar.update()
