"""``RunReport``: the report of a Trainer's last fit, as a notebook shows it."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError
from ..report.document import build_report
from ..report.page import render_page
from ..report.run_files import PAGE, RunFiles, is_run

if TYPE_CHECKING:
    from .session import Session

_HEIGHT = 900


def open_report(session: Session) -> RunReport:
    """Return the report of a Trainer's last fit, or of the one in progress.

    Raises:
        ConfigurationError: the Trainer has no fit whose files it could be made from.
    """
    if session.recorder is not None:
        session.recorder.flush()
    if not session.writes or not session.directory.claimed or not is_run(session.directory.path):
        raise ConfigurationError(
            "Trainer.report: there is no run with files: call fit first, with a logger or with checkpoints."
        )
    return RunReport(session.directory.path)


class RunReport:
    """The report of a run, made from its files as they are now. In a notebook it is shown as a page."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.data: dict[str, Any] = build_report(RunFiles(directory))
        """The content of ``report.json``; docs/report.md has the schema."""

    @property
    def path(self) -> Path:
        """The page, ``report.html`` in the run's directory; it is there once a fit has ended."""
        return self._directory / PAGE

    @property
    def html(self) -> str:
        """The page as text."""
        return render_page(self.data)

    def _repr_html_(self) -> str:
        # In a frame of its own, so that the styles of the page and the notebook do not mix.
        page = escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:{_HEIGHT}px;border:0;border-radius:12px"></iframe>'

    def __str__(self) -> str:
        return f"{self.data['run']} {self.data['why']['sentence']}"

    def __repr__(self) -> str:
        return f"<report of {self}>"
