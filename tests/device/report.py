"""A plugin for pytest that writes each test's outcome and the selected kernel families as lines of JSON while tests run.

The environment variable FLEXATTN_DEVICE_LOG names the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from tests.fuzz.run import collected_families

_stack = contextlib.ExitStack()
_families: set[str] = set()


def _causes(longrepr: Any) -> str:
    """Returns the messages of the exceptions that led to the last one, the first of them last."""
    messages = [crash.message for _, crash, _ in getattr(longrepr, "chain", [])[:-1] if crash is not None]
    return "".join(f"\ncaused by {message[-300:]}" for message in reversed(messages))


def pytest_sessionstart() -> None:
    with contextlib.suppress(ImportError):
        _families.clear()
        _stack.enter_context(collected_families(_families))


def pytest_sessionfinish() -> None:
    _stack.close()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else report.longrepr
        text = "" if report.passed else str(why)[-1500:] + _causes(report.longrepr)
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1), "text": text}
        with open(os.environ["FLEXATTN_DEVICE_LOG"], "a") as file:
            file.write(json.dumps(line | {"families": sorted(_families)}) + "\n")
        _families.clear()
