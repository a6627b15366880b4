"""docs/serve.py: continuous batching makes the tokens of eager attention, and its check can fail."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch

from flexattn import PagedKVCache
from tests.conftest import ROOT


@pytest.fixture
def serve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve", ROOT / "docs" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def same_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sample
@pytest.mark.parametrize("options", [[], ["--cascade"]], ids=["one call", "cascade"])
def test_every_token_is_right(options: list[str], serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--device", DEVICE, *options]) == 0
    printed = capsys.readouterr().out
    assert "all tokens are those of eager attention" in printed
    assert "evictions: 0" not in printed
    assert "decoding alone: 0" not in printed
    if not options and DEVICE == "cpu":
        page = (ROOT / "docs" / "paged.md").read_text("utf-8")
        shown = page.partition("$ python docs/serve.py --device cpu\n")[2].partition("```")[0]
        assert untimed(shown) - {"..."} <= untimed(printed)


def untimed(text: str) -> set[str]:
    """Returns the lines, without the seconds that follow a semicolon."""
    return {line.partition(";")[0] for line in text.splitlines()}


@pytest.mark.slow
def test_a_cache_that_loses_a_row_is_found(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = PagedKVCache.step

    def late(self: PagedKVCache, new: dict[int, int]) -> None:
        step(self, new)
        self.seqused_before.sub_(1).clamp_(min=0)

    monkeypatch.setattr(PagedKVCache, "step", late)
    assert serve.main(["--device", DEVICE, "--requests", "3"]) == 1
    assert "of 3 differ from eager attention" in capsys.readouterr().out
