"""The report of a fit that has ended: ``report.json`` and, unless it is turned off, ``report.html``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.mirror import after_change
from ..system.atomic_files import write_text
from ..system.run_directory import REPORT
from .document import EVALUATIONS, OUTCOME, build_report, run_name
from .page import render_page
from .run_files import PAGE, RunFiles, ended_state
from .verdicts import sentence_of

# A launcher that writes the report of ranks that have failed ends soon afterwards.
_PATIENCE_SECONDS = 5.0


def finish_report(directory: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    """Write the report of a fit that has ended; return it.

    Args:
        directory: the run's directory.
        outcome: the values of ``OUTCOME`` that are known.

    Raises:
        StorageError: it cannot be written.
    """
    files = RunFiles(directory, ended=outcome)
    document = build_report(files)
    write_text(directory / REPORT, as_text(document))
    if has_page(files.config):
        write_text(directory / PAGE, render_page(document))
        after_change(directory / PAGE, patience=_PATIENCE_SECONDS)
    after_change(directory / REPORT, patience=_PATIENCE_SECONDS)
    return document


def amend_report(directory: Path, changes: dict[str, Any], missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write the report of a fit again, with other values of its outcome, and return it; it may have no report yet.

    Args:
        directory: the run's directory.
        changes: the other values.
        missing: values for a fit that could not record them itself.

    Raises:
        StorageError: it cannot be written.
    """
    files = RunFiles(directory)
    known = (*OUTCOME, *EVALUATIONS)
    outcome = {name: files.outcome[name] for name in known if name in files.outcome}
    return finish_report(directory, (missing or {}) | outcome | changes)


def add_to_report(directory: Path, stage: str, results: list[dict[str, float]]) -> None:
    """Add the results of ``validate`` or ``test`` to the report of the fit before it, if there is one.

    Raises:
        StorageError: it cannot be written.
    """
    if RunFiles(directory).report:
        amend_report(directory, {stage: results})


@dataclass(frozen=True)
class Ending:
    """How a fit ended: one of ``run_files.STATES``, the sentence of ``phalanx why``, and the optimizer step."""

    state: str
    sentence: str
    step: int | None


def ending(directory: Path | None, outcome: dict[str, Any] | None = None) -> Ending:
    """Return how a fit ended, from the files of its run, or for one without files from its outcome.

    Args:
        directory: the run's directory; None for a run without files.
        outcome: the values of ``OUTCOME``; those that are missing are not known.
    """
    if directory is not None:
        report = build_report(RunFiles(directory))
        return Ending(report["state"], report["why"]["sentence"], report["why"]["step"])
    found = {**dict.fromkeys(OUTCOME), "restarts": 0, **(outcome or {})}
    found["state"] = ended_state(found["exit_code"])
    return Ending(found["state"], sentence_of(found), found["optimizer_steps"])


def label_of(directory: Path | None) -> str:
    """Return the name of a run in a notification."""
    return "a run without files" if directory is None else run_name(directory)


def as_text(document: dict[str, Any]) -> str:
    """Return a report as JSON with one line for each key: a list of a thousand numbers is one line, too."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value, default=str)}" for name, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def has_page(config: dict[str, Any]) -> bool:
    """Whether a run with this configuration writes ``report.html``."""
    trainer = config.get("trainer")
    return not (isinstance(trainer, dict) and trainer.get("enable_report") is False)
