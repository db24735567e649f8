"""``ScriptOverrides``: arguments of the Trainer that a command line overrides in a script, as text for the environment.

Pure functions; ``environment.py`` has the variable.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ScriptOverrides:
    """Arguments of the Trainer of one script. Other programs that the script starts are not changed."""

    script: str
    """The absolute path of the script."""
    trainer: dict[str, Any]
    """JSON values by the name of the argument."""
    command: list[str]
    """The command that has started the script."""

    def text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | None, file: str | None) -> ScriptOverrides | None:
        """Return the overrides for the script ``file``; None if there are none, or for another one."""
        if not text or file is None:
            return None
        found = cls(**json.loads(text))
        return found if os.path.abspath(file) == found.script else None
