"""Edits by syntax: a fragment is found in any layout, only its own text changes, and an ambiguous fragment is an error."""

from __future__ import annotations

import ast

import pytest

from tests.support.syntax import replaced

SOURCE = '''\
import math  # kept


class Scaled:
    def scale(self, x):  # of rows
        """Text of

        several lines.
        """
        y = f(
            x,  # the rows
            mask="all",
        )
        if y > 0:
            y += 1
        return [y, "ü", y > 0]


def scale(x):
    return x * 2
'''


@pytest.mark.parametrize(
    ("old", "new", "where", "gone", "come"),
    [
        ("f(x, mask='all')", "g(x)", "", 'f(\n            x,  # the rows\n            mask="all",\n        )', "g(x)"),
        ("x * 2", "x + 2, x", "", "x * 2", "(x + 2, x)"),
        ("mask='all'", "mask=None", "", 'mask="all"', "mask=None"),
        ("return x * 2", "", "", "return x * 2", "pass"),
        ("y += 1", "y += 1\ny += 1", "Scaled", "y += 1", "y += 1\n            y += 1"),
        ("if y > 0:\n    ...", "...", "Scaled.scale", "if y > 0:\n            y += 1", "y += 1"),
        ("def scale(x):\n    ...", "def scale(x, y):\n    ...", "", "def scale(x):", "def scale(x, y):"),
        ("import math", "import cmath", "", "import math ", "import cmath "),
    ],
)
def test_one_place_changes(old: str, new: str, where: str, gone: str, come: str) -> None:
    assert SOURCE.count(gone) == 1
    assert replaced(SOURCE, old, new, where) == SOURCE.replace(gone, come)


def test_a_body_in_strings_of_several_lines_stays_as_it_is() -> None:
    changed = replaced(SOURCE, "class Scaled:\n    ...", "if True:\n    class Scaled:\n        ...")
    assert "Text of\n\n        several lines.\n" in ast.literal_eval(
        repr(ast.parse(changed).body[1].body[0].body[0].body[0].value.value)
    )


@pytest.mark.parametrize(
    ("old", "where", "message"),
    [
        ("y > 0", "", r"is there 2 times in the file \(lines: 14, 16\); accepted: once"),
        ("x * 3", "", r"is there 0 times in the file \(lines: none\)"),
        ("x * 2", "Scaled", "is there 0 times in Scaled"),
        ("x * 2", "other", "where is 'other'; accepted: the name of a function or class"),
        ("f(x,", "", "is not Python"),
    ],
)
def test_a_place_that_is_not_there_once_is_an_error(old: str, where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replaced(SOURCE, old, "1", where)


def test_the_place_of_a_statement_is_not_an_expression() -> None:
    """A statement of one expression can become another kind of statement."""
    assert replaced("f()\ng(f())\n", "f()", "x = 1") == "x = 1\ng(f())\n"
