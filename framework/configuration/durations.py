"""Durations in configurations: ``DD:HH:MM:SS``, as a Trainer takes them, or as ``timedelta`` is printed."""

from __future__ import annotations

import re
from datetime import timedelta

_TIME = r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)"
_FORMS = (re.compile(rf"(?:(?P<days>\d+) days?, )?{_TIME}"), re.compile(rf"(?P<days>\d+):{_TIME}"))


def duration_of(text: str) -> timedelta:
    """Return the duration that a text describes.

    Raises:
        ValueError: the text is of neither form.
    """
    for form in _FORMS:
        if match := form.fullmatch(text):
            return timedelta(**{unit: float(number) for unit, number in match.groupdict(default="0").items()})
    raise ValueError(f"a duration must be of the form DD:HH:MM:SS, not {text!r}")
