"""Numbers with their nouns, and articles, in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: ``1 rank``, ``1,024 ranks``, ``2 batches``."""
    plural = "" if number == 1 else "es" if noun.endswith("batch") else "s"
    return f"{number:,} {noun}{plural}"


def with_article(noun: str) -> str:
    """Return a noun, such as the name of a type, with its article: ``a float``, ``an int``."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def a_type(value: object) -> str:
    """Return the name of a value's type with its article."""
    return with_article(type(value).__name__)
