"""Arguments of the commands that look at runs. The module of a command is imported when the command runs."""

from __future__ import annotations

from typing import Any

from . import compare_runs, explain_run, list_runs, rewind_run, show_data, show_report, watch_run
from .command_parser import add_command

_RUN = "a run's directory or its name, such as version_3 or 3; by default the newest run below this directory"
_FILES = "Reads files alone, also those of a run that is training."
MOST_RUNS = 20
INTERVAL_SECONDS, LEAST_INTERVAL_SECONDS = 1.0, 0.1


def add_commands(commands: Any) -> None:
    """Add the commands that look at runs, and ``rewind``, to the subparsers of a parser."""
    _runs(commands)
    _top(commands)
    _report(commands)
    _why(commands)
    _data(commands)
    _compare(commands)
    _rewind(commands)


def _runs(commands: Any) -> None:
    text = "list the runs below a directory, the newest first"
    parser = add_command(commands, "runs", list_runs, text, "phalanx runs experiments --limit 5", _FILES)
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where to search (default: here)")
    limit = f"show N runs (default: {MOST_RUNS}; 0: all)"
    parser.add_argument("--limit", type=int, default=MOST_RUNS, metavar="N", help=limit)


def _top(commands: Any) -> None:
    text = "watch a run while it trains; q or Ctrl-C ends the view"
    parser = add_command(commands, "top", watch_run, text, "phalanx top version_3 --interval 5", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    parser.add_argument("--once", action="store_true", help="print one view, and end")
    between = f"time between two views (default: {INTERVAL_SECONDS:g})"
    parser.add_argument("--interval", type=float, default=INTERVAL_SECONDS, metavar="SECONDS", help=between)


def _report(commands: Any) -> None:
    text = "show the report of a run, and write its page"
    parser = add_command(commands, "report", show_report, text, "phalanx report version_3 --out report.html", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    parser.add_argument("--out", metavar="FILE", help="where to write the page (default: report.html of the run)")


def _why(commands: Any) -> None:
    text = "explain why a run ended, what was lost, and what resumes it"
    parser = add_command(commands, "why", explain_run, text, "phalanx why phalanx_logs/version_3", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)


def _data(commands: Any) -> None:
    text = "show which samples each rank has read for a step, or for a batch"
    parser = add_command(commands, "data", show_data, text, "phalanx data version_3 --step 812 --rank 1", _FILES)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    steps = "the optimizer step, counted from 0, as messages and metrics.csv give it"
    parser.add_argument("--step", type=int, metavar="N", help=steps)
    parser.add_argument("--epoch", type=int, metavar="E", help="instead of a step: the epoch, counted from 0")
    parser.add_argument("--batch", type=int, metavar="B", help="and the batch in it, counted from 0")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank (of those with different data)")


def _compare(commands: Any) -> None:
    text = "compare the settings, results and curves of two runs"
    example = "phalanx compare version_3 version_4 --out both.html"
    parser = add_command(commands, "compare", compare_runs, text, example, _FILES)
    parser.add_argument("first", metavar="A", help="a run's directory or its name, such as version_3 or 3")
    parser.add_argument("second", metavar="B", help="another run")
    parser.add_argument("--out", metavar="FILE", help="also write a page with the curves of both in the same charts")


def _rewind(commands: Any) -> None:
    text = "make a run continue from an earlier step, without some of its data"
    details = "Newer checkpoints are set aside. fit(..., ckpt_path='auto') continues the run."
    parser = add_command(commands, "rewind", rewind_run, text, "phalanx rewind version_3 --skip 801:806", details)
    parser.add_argument("given_run", metavar="RUN", nargs="?", help=_RUN)
    to = "go back to the newest checkpoint at or before this step (default: the first of --skip)"
    parser.add_argument("--to", type=int, metavar="N", help=to)
    skip = "leave out the data of the steps from A up to but not including B, or of step A; may be repeated"
    parser.add_argument("--skip", action="append", default=[], metavar="A:B", help=skip)
