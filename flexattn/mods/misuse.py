"""Errors of a mod's own making that keep their type through a trace, and are told the mod's line by it."""

from __future__ import annotations


class Misuse(Exception):  # a base beside TypeError and KeyError, which have the names that users catch
    """Base of the errors; `place` is ' at file:line, text' once the line of the mod is known."""

    place = ""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text + self.place


class MisusedType(Misuse, TypeError):
    """Raised for arguments that a node of a graph does not take."""


class MisusedName(Misuse, KeyError, ValueError):
    """Raised for a name that was not given."""


class MisusedNode(Misuse, AttributeError, ValueError):
    """Raised for a node that a graph does not have."""
