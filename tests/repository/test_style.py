"""User pages keep the rules for prose of CONTRIBUTING.md, and the site its size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import style
from tests.conftest import ROOT

NAVIGATION = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
FOR_DEVELOPERS = "  - Developers:\n"  # the section of the navigation with pages for developers
MOST_WORDS = 55_000  # words on all pages, with their code and tables

A_BREACH_OF_EACH_RULE = {
    style.LONG_SENTENCE: "The kernel " + "reads keys and " * 10 + "writes.",
    style.LONG_PARAGRAPH: "The kernel reads all of the keys. " * 13,
    style.LATE_SUBJECT: "Of the keys a query sees half.",
    style.MISPLACED_FIGURE: "The forward is 20 % faster.",
    style.MANY_NUMBERS: "The head dims are 64, 128 and 256. " * 2 + "The kernel reads all of the keys.\n\n" * 14,
    style.FILE_LINK: "The rules are in [semantics.md](semantics.md).",
    "a private word": "The kernel is asked first.",
    "a word for a standard term": "Both runs give the same bits.",
    "a pronoun for a noun": "The page is for who trains models.",
    "history": "The kernel no longer waits.",
    "a state of measurement (docs/status.md has it)": "The kernel was not run on a GPU.",
}


def pages(*, of_developers: bool) -> list[Path]:
    """Returns the written pages of the navigation, with or without its Developers section."""
    before, _, rest = NAVIGATION.partition(FOR_DEVELOPERS)
    after = re.split(r"^  - ", rest, maxsplit=1, flags=re.MULTILINE)[1:]  # from the next section on
    text = NAVIGATION if of_developers else "\n".join((before, *(f"  - {part}" for part in after)))
    names = [name for name in re.findall(r"^ +- .*?: (\S+\.md)$", text, re.MULTILINE) if not name.startswith("reference/")]
    found = [ROOT / name for name in names]
    written = [page if page.is_file() else page.with_suffix(".ipynb") for page in found]
    return [page for page in written if page.is_file()]  # test_site.py names the missing ones


def user_pages() -> list[str]:
    every = [page.relative_to(ROOT).as_posix() for page in pages(of_developers=False)]
    return [page for page in every if page != "CHANGELOG.md"]


@pytest.mark.parametrize("page", user_pages())
def test_page_keeps_the_rules(page: str) -> None:
    found = style.breaches(style.text_of(ROOT / page))
    assert not found, "\n".join(f"{breach.rule}: {breach.text}" for breach in found)


def test_the_site_is_not_too_long() -> None:
    assert sum(style.words(style.text_of(page)) for page in pages(of_developers=True)) <= MOST_WORDS


def test_navigation_without_developers_lacks_their_pages() -> None:
    every, users = pages(of_developers=True), user_pages()
    assert "README.md" in users
    assert "docs/first_steps.ipynb" in users
    assert "CHANGELOG.md" not in users
    assert "docs/architecture.md" not in users
    assert ROOT / "docs" / "architecture.md" in every


def test_there_is_a_breach_of_each_rule() -> None:
    sentence_rules = {style.LONG_SENTENCE, style.LATE_SUBJECT, style.MISPLACED_FIGURE, *style.BANNED}
    assert A_BREACH_OF_EACH_RULE.keys() == {style.LONG_PARAGRAPH, style.MANY_NUMBERS, style.FILE_LINK, *sentence_rules}


@pytest.mark.parametrize("rule", A_BREACH_OF_EACH_RULE)
def test_a_breach_is_found(rule: str) -> None:
    assert {breach.rule for breach in style.breaches(A_BREACH_OF_EACH_RULE[rule])} == {rule}


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1  # 20 % of what is asked, to the bit\n```",
        "  ```sh\n  ls  # what is told\n  ```",
        "| kernel | what it is |\n|---|---|\n| forward | 20 % faster |",
        "<!-- made by `a command`: begin -->\n\nThe forward is 20 % faster.\n\n<!-- end -->",
        "## What is asked",
        "The image has 3 x 3 pixels.",
        "The argument is `what_is_asked`.",
        "![The keys that are 20 % faster](picture.png)",
    ],
)
def test_text_that_no_rule_is_for(text: str) -> None:
    assert style.breaches(text) == []
