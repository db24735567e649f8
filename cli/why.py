"""``phalanx why``: the reason why a run ended, the step, what was lost, and the command that resumes it."""

from __future__ import annotations

import argparse

from ..framework.report.document import build_report
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles
from .terminal_text import say_json, say_wrapped

_KEYS = (
    "run", "path", "state", "exit_code", "stopped", "began", "ended", "duration_seconds", "why", "resume_from",
    "restarts", "total_seconds", "went_on", "rewinds",
)  # fmt: skip
_MOST_LINES = 3


def explain_run(given: argparse.Namespace) -> int:
    """Print why a run ended; return the exit code."""
    directory = find_run(given.given_run)
    report = build_report(RunFiles(directory))
    if given.json:
        say_json({"schema": report["schema"], **{name: report[name] for name in _KEYS}, "problems": report["problems"]})
        return 0
    why = report["why"]
    say_wrapped(f"{shown_path(directory)} {why['sentence']}")
    for number, sentence in list(enumerate(report["went_on"], 1))[-_MOST_LINES:]:
        say_wrapped(f"attempt {number}: {sentence}")
    for rewind in report["rewinds"][-_MOST_LINES:]:
        say_wrapped(rewind["sentence"])
    if why["lost"]:
        say_wrapped(why["lost"])
    if why["resume"]:
        say_wrapped(f"resume: {why['resume']}")
    for problem in report["problems"]:
        say_wrapped(f"note: {problem}")
    return 0
