"""The style of the pages: `python tests/style.py [PAGE ...]` prints each breach of CONTRIBUTING.md's rules, and how many there are.

The rules are for prose alone. Code, tables, headings and generated blocks (`<!-- made by ...: begin -->` to `<!-- end -->`) do not
count. A notebook counts as its cells of text.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SENTENCE_WORDS = 30
PARAGRAPH_WORDS = 90
DIGITS_PER_100_WORDS = 4

_NOT_PROSE = re.compile(
    r"^ *```.*?^ *```$|^<!-- made by .*?: begin -->.*?^<!-- end -->$|<!--.*?-->|\A---\n.*?\n---\n", re.MULTILINE | re.DOTALL
)
_NOT_PROSE_LINES = re.compile(r"^\s*(\|.*|#.*|\[!\[.*|!\[.*|[!?]{3}\+? .*|===[!+]* .*|:::.*|<[^>]*>)$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?")
_FILE_LINK = re.compile(r"\[`?[\w./-]+\.(?:md|ipynb)`?\]\([^)]*\)")
_CODE = re.compile(r"``.+?``|`[^`]+`|\$[^$\n]+\$")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?<=[.!?:])[\"')*]*\s+(?=[\"'(*]*[A-Z`\d])")
_WORD = re.compile(r"[A-Za-z][\w'./-]*|\d[\d.,]*")

LONG_SENTENCE = f"a sentence of more than {SENTENCE_WORDS} words"
LONG_PARAGRAPH = f"a paragraph of more than {PARAGRAPH_WORDS} words"
LATE_SUBJECT = "an opening that puts the subject late"
MISPLACED_FIGURE = "a figure outside of a table or a generated block"
FILE_LINK = "a link whose text is the name of a page's file"
MANY_NUMBERS = f"more than {DIGITS_PER_100_WORDS} numbers in 100 words"

OPENINGS = re.compile(r"(Of|Over|Beside|Besides|Under|Where|What|Behind|Whose|Those|Whoever|Whichever|Among|Asked|Followed|Held)\b")
BANNED = {
    "a private word": r"\b(doors?|mended|held to|asked|told|regret|kinds? of calls?|whoever)\b"
    r"|\b(stands?|stood) (in|for|where|at)\b",
    "a word for a standard term": r"\b(same bits|equal bits|to the bit|in eight bits|gone by|found again|left out of account)\b",
    "a pronoun for a noun": r"\b(for|by|to|of|with|on) (who|whom|what|whatever)\b|\bthat (of|which|whose)\b"
    r"|\bthose (of|with|which|who|whose|in|on|for|that)\b"
    r"|\bwhat (is|are|it|they|was|were|has|have|does|do|a|an|the|each|you)\b(?![^.?!]*\?)",
    "history": r"\b(had been|since then|by now|used to be|no longer|until now|before that|so far|not yet|was before|were before"
    r"|an earlier (run|version))\b",
    "a state of measurement (docs/status.md has it)": r"\bnot (been )?(yet )?(measured|run) (yet|on a GPU|on GPUs)\b"
    r"|\bunmeasured\b",
}
FIGURE = re.compile(r"(?<![\w.])\d[\d.,]*\s?(%|us\b|µs\b|ms\b|TFLOP|GB/s|TB/s|x\b(?! \d)|times (as|faster|slower))")  # not 3 x 3
NUMBER = re.compile(r"(?<![\w.-])\d[\d.,]*")


@dataclasses.dataclass(frozen=True)
class Breach:
    rule: str
    text: str


def text_of(page: Path) -> str:
    """Returns a page as Markdown, of a notebook the cells of text."""
    text = page.read_text("utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def paragraphs(text: str) -> list[str]:
    """Returns the paragraphs and list items of a page, with links as their texts and `Code` in the place of each piece of code."""
    text = _NOT_PROSE.sub("\n\n", text)
    text = _NOT_PROSE_LINES.sub("\n", text)
    text = _CODE.sub("Code", _LINK.sub(r"\1", text))
    return [" ".join(part.split()) for block in text.split("\n\n") for part in _ITEM.split(block) if part.strip()]


def sentences(paragraph: str) -> list[str]:
    return _SENTENCE_END.split(paragraph)


def words(text: str) -> int:
    return len(_WORD.findall(text))


def breaches(text: str) -> list[Breach]:
    """Returns the breaches of a page."""
    found = [Breach(FILE_LINK, match[0]) for match in _FILE_LINK.finditer(_NOT_PROSE.sub("", text))]
    all_words, numbers = 0, 0
    for paragraph in paragraphs(text):
        all_words += words(paragraph)
        numbers += len(NUMBER.findall(paragraph))
        if words(paragraph) > PARAGRAPH_WORDS:
            found.append(Breach(LONG_PARAGRAPH, f"{words(paragraph)}: {paragraph}"))
        for sentence in sentences(paragraph):
            found += _breaches_of_sentence(sentence)
    if all_words > 100 and 100 * numbers > DIGITS_PER_100_WORDS * all_words:
        found.append(Breach(MANY_NUMBERS, f"{numbers} in {all_words} words"))
    return found


def _breaches_of_sentence(sentence: str) -> Iterator[Breach]:
    if words(sentence) > SENTENCE_WORDS:
        yield Breach(LONG_SENTENCE, f"{words(sentence)}: {sentence}")
    if OPENINGS.match(sentence.lstrip("*_\"'(")):
        yield Breach(LATE_SUBJECT, sentence)
    for rule, pattern in BANNED.items():
        for match in re.finditer(pattern, sentence, re.IGNORECASE):
            yield Breach(rule, f"{match[0]!r}: {sentence}")
    if FIGURE.search(sentence):
        yield Breach(MISPLACED_FIGURE, sentence)


def main(pages: list[str]) -> None:
    total: collections.Counter[str] = collections.Counter()
    all_words = 0
    for page in pages:
        text = text_of(Path(page))
        all_words += sum(map(words, paragraphs(text)))
        for breach in breaches(text):
            total[breach.rule] += 1
            print(f"{page}: {breach.rule}\n    {breach.text}")
    print(f"\n{all_words} words of prose in {len(pages)} pages")
    for rule, count in total.most_common():
        print(f"{count:6}  {rule}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["README.md", *map(str, sorted(Path("docs").glob("*.md")))])
