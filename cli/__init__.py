"""The command ``phalanx``: a thin command-line interface to functions of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .compare import compare_runs as compare_runs
    from .doctor import examine as examine
    from .run_report import show_report as show_report
    from .runs import list_runs as list_runs
    from .top import watch_run as watch_run
    from .why import explain_run as explain_run

# The parser of all commands is built for each of them, and must not import what only one needs.
__getattr__ = on_call(
    __name__,
    {
        ".compare": "compare_runs",
        ".doctor": "examine",
        ".run_report": "show_report",
        ".runs": "list_runs",
        ".top": "watch_run",
        ".why": "explain_run",
    },
)
