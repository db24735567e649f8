"""Class names of Lightning in configuration files: ``class_path`` of LightningCLI, and ``_target_`` of Hydra."""

from __future__ import annotations

import re

from .edits import Outcome
from .names import Missing, Target, counterpart, other_framework_of

_CLASS = re.compile(rb"""^[^#\n]*?(?<![\w.])(?:class_path|_target_)[ \t]*:[ \t]*["']?(?P<path>[A-Za-z_][\w.]*)""", re.M)


def migrate_yaml(text: bytes) -> Outcome:
    """Return the edits of a YAML file: the class names alone, so that comments and layout stay."""
    outcome = Outcome()
    for match in _CLASS.finditer(text):
        path = match["path"].decode()
        if (framework := other_framework_of(path)) is None:
            continue
        target, line = counterpart(path), text.count(b"\n", 0, match.start("path")) + 1
        if isinstance(target, Target) and not target.is_module:
            outcome.replace(match.span("path"), target.dotted, line)
        elif isinstance(target, Missing):
            outcome.leave(line, target.reason, framework.page)
    return outcome
