"""The walk through the code in docs/architecture.md: a call makes these stops, in this order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from flexattn import attention, call_cache
from flexattn.dispatch.select import forget_rejections
from tests.conftest import ROOT

STOPS = re.findall(r"^\| \d+ +\| `(\S+)` +\| `(\w+)` +\|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)


def functions_called(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of each call of this checkout's functions."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            found.append((re.sub(r"^flexattn/(?=dispatch|kernels_)", "", path), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_call_makes_the_stops_of_the_walk(device: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            attention(q, k, v, attn_mask_type="causal", backend="triton").sum().backward()

    run()  # imports, and Triton's own first time
    call_cache.clear_cache()
    forget_rejections()
    made = iter(functions_called(run))
    assert 8 <= len(STOPS) <= 12
    for stop in STOPS:
        assert stop in made, f"{stop} is not called behind the stops before it"
