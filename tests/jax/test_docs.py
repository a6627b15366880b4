"""The examples of docs/jax.md run, and print the page's output."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from tests.conftest import ROOT

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")

PAGE = (ROOT / "docs" / "jax.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)


def test_every_example_says_what_it_prints() -> None:
    assert len(EXAMPLES) == PAGE.count("```py\n") > 0


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(code: str, printed: str, request: pytest.FixtureRequest) -> None:
    if "mesh" in code:
        request.getfixturevalue("four_devices")
    if "flax" in code:
        pytest.importorskip("flax", reason="flax is not installed: pip install flax")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "docs/jax.md", "exec"), {})
    assert out.getvalue() == printed
