"""Numbers with their nouns, articles, and the first of many names, in messages."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: ``1 rank``, ``1,024 ranks``, ``2 batches``."""
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"


def first_of(names: Iterable[str], most: int = 10) -> str:
    """Join names in one line; of many the first: ``a, b and 3 more``."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def with_article(noun: str) -> str:
    """Return a noun, such as the name of a type, with its article: ``a float``, ``an int``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def a_type(value: object) -> str:
    """Return the name of a value's type with its article."""
    return with_article(type(value).__name__)
