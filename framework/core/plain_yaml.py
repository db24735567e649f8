"""Whether text may stand in YAML without quotes. Without torch: commands that start no training write YAML too."""

from __future__ import annotations

import re

# Words that YAML 1.1 reads as a boolean or as null when unquoted.
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"})


def is_plain_yaml(text: str) -> bool:
    """Whether no reader of YAML takes a text for a number, a boolean, a date or syntax if it is not quoted."""
    return re.fullmatch(r"[A-Za-z_][\w./-]*", text) is not None and text.lower() not in _RESERVED
