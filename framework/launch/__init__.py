"""Starting ranks, supervising them, passing on signals and ending them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .fork_launcher import launch_function as launch_function
    from .script_launcher import launch_script as launch_script

__getattr__ = on_call(__name__, {".fork_launcher": "launch_function", ".script_launcher": "launch_script"})
