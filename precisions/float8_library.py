"""Imports torchao's float8 training in the process that ranks are forked from.

Every rank would otherwise spend these seconds itself.
"""

from __future__ import annotations

from .float8 import quiet_import

with quiet_import():
    import torchao.float8  # noqa: F401
