"""The command ``phalanx``: a thin command-line interface to functions of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .checkpoint import (
        consolidate_checkpoint as consolidate_checkpoint,
        convert_checkpoint as convert_checkpoint,
        diff_checkpoints as diff_checkpoints,
        inspect_checkpoint as inspect_checkpoint,
        list_checkpoints as list_checkpoints,
        verify_checkpoints as verify_checkpoints,
    )
    from .compare import compare_runs as compare_runs
    from .completion import print_completion as print_completion
    from .data import show_data as show_data
    from .demo import run_demo as run_demo
    from .doctor import examine as examine
    from .export import export_model as export_model
    from .launch import run_or_write as run_or_write
    from .migrate.command import migrate_files as migrate_files
    from .new_project import create_project as create_project
    from .plan import show_plan as show_plan
    from .rank_launch import launch_ranks as launch_ranks
    from .rewind import rewind_run as rewind_run
    from .run_program import run_stage as run_stage
    from .run_report import show_report as show_report
    from .runs import list_runs as list_runs
    from .selftest import compare_strategies as compare_strategies
    from .top import watch_run as watch_run
    from .why import explain_run as explain_run

# The parser of all commands is built for each of them, and must not import what only one needs.
__getattr__ = on_call(
    __name__,
    {
        ".checkpoint": "consolidate_checkpoint convert_checkpoint diff_checkpoints inspect_checkpoint list_checkpoints "
        "verify_checkpoints",
        ".compare": "compare_runs",
        ".completion": "print_completion",
        ".data": "show_data",
        ".demo": "run_demo",
        ".doctor": "examine",
        ".export": "export_model",
        ".launch": "run_or_write",
        ".rank_launch": "launch_ranks",
        ".rewind": "rewind_run",
        ".run_program": "run_stage",
        ".new_project": "create_project",
        ".plan": "show_plan",
        ".migrate.command": "migrate_files",
        ".run_report": "show_report",
        ".runs": "list_runs",
        ".selftest": "compare_strategies",
        ".top": "watch_run",
        ".why": "explain_run",
    },
)
