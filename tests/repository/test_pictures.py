"""The cookbook's pictures match its examples, and the notebook's outputs match its cells."""

from __future__ import annotations

import base64
import io
import json

import pytest

from tests.conftest import ROOT, FreshPython
from tests.repository.test_docs import printed_as_shown

pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need matplotlib")

from tests import pictures  # noqa: E402  # once matplotlib is known to be here

EXAMPLES = list(pictures.examples())
LARGEST = 60_000  # bytes of a picture
MOST_CHANGED = 0.005  # share of the pixels: fonts differ between versions of matplotlib; a diagonal of a mask is twice as much
OUTPUTS = "import json; from tests import pictures; print(json.dumps(list(pictures.run(pictures.cells()))))"


def changed(one: bytes, other: bytes) -> float:
    """Returns the share of the pixels of two PNGs that differ visibly; 1 if their sizes differ."""
    a, b = (pyplot.imread(io.BytesIO(png)) for png in (one, other))
    return float((abs(a - b) > 0.2).any(-1).mean()) if a.shape == b.shape else 1.0


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.picture.stem for example in EXAMPLES])
@pytest.mark.slow
def test_picture_is_drawn_by_its_example(example: pictures.Example) -> None:
    png = example.picture.read_bytes()
    assert len(png) < LARGEST
    assert changed(pictures.draw(example.code), png) < MOST_CHANGED


@pytest.mark.slow
def test_a_picture_of_another_mask_is_noticed() -> None:
    example = next(example for example in EXAMPLES if example.picture.stem == "causal_window")
    assert "(12, 0)" in example.code
    assert changed(pictures.draw(example.code.replace("(12, 0)", "(11, 0)")), example.picture.read_bytes()) > MOST_CHANGED


def test_every_example_has_a_picture_and_every_picture_an_example() -> None:
    cookbook = pictures.COOKBOOK.read_text("utf-8")
    assert len([*pictures.EXAMPLE.finditer(cookbook)]) == cookbook.count("```python\n")
    assert sorted(example.picture for example in EXAMPLES) == sorted((ROOT / "docs" / "pictures").iterdir())


@pytest.mark.slow
def test_notebook_gives_its_outputs(forked_python: FreshPython) -> None:
    ran = forked_python("-c", OUTPUTS, env={"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"})
    assert ran.returncode == 0, ran.stderr
    given = [cell["outputs"] for cell in pictures.cells() if cell["cell_type"] == "code"]
    for cell, shown in zip(json.loads(ran.stdout), given, strict=True):
        assert [output["output_type"] for output in cell] == [output["output_type"] for output in shown]
        for new, old in zip(cell, shown, strict=True):
            if new["output_type"] == "stream":
                assert printed_as_shown("".join(new["text"]), "".join(old["text"]))
            elif new["output_type"] == "execute_result":
                assert new["data"] == old["data"]
            else:
                assert changed(*(base64.b64decode(x["data"]["image/png"]) for x in (new, old))) < MOST_CHANGED
