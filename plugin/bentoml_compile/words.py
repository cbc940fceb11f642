"""Others' texts as a log line, a report or a reason can take them."""

from __future__ import annotations


def one_line(text: object, most: int | None = None) -> str:
    """Each run of white space as one space; cut off after `most` characters."""
    return " ".join(str(text).split())[:most]


def first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [""])[0]
