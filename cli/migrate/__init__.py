"""``phalanx migrate``: scripts and configurations of other frameworks are rewritten for phalanx.

A file is read with libcst, which keeps positions, comments and scopes; what changes is a list of edits of its text, so
that everything else stays as it is, byte by byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .script import migrate_script as migrate_script

# libcst is an extra, and is imported after the command has checked that it is installed.
__getattr__ = on_call(__name__, {".script": "migrate_script"})
