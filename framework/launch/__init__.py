"""Starting ranks, supervising them, passing on signals and ending them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from types import TracebackType

    from .exit_hooks import end_script as end_script
    from .fork_launcher import (
        forked_ranks_can_use_cuda as forked_ranks_can_use_cuda,
        launch_function as launch_function,
    )
    from .launch_memory import open_memory as open_memory
    from .script_launcher import launch_script as launch_script

__getattr__ = on_call(
    __name__,
    {
        ".exit_hooks": "end_script",
        ".fork_launcher": "launch_function forked_ranks_can_use_cuda",
        ".launch_memory": "open_memory",
        ".script_launcher": "launch_script",
    },
)


def exception_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Call ``end_script``, unless no part of phalanx has been used before an interrupt."""
    # Imports in this place would make Python forget that an interrupt ends the process, and exit with 1.
    if issubclass(kind, KeyboardInterrupt) and f"{__name__}.exit_hooks" not in sys.modules:
        sys.__excepthook__(kind, error, trace)
    else:
        __getattr__("end_script")(kind, error, trace)
