"""Notifications of a launch: what its ranks cannot report themselves, as they have ended or are being restarted.

A rank 0 whose Trainer has ``notify`` records the addresses of its fit in the directory of the attempt, which only this
user can read. Its supervisor sends from there: a stall, a restart, and the end of every fit that rank 0 has not
reported, such as that of ranks that were killed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import StalledError
from ..report import ending, label_of
from ..report.notifications import Notifier, resolved
from ..report.verdicts import headline
from ..system.environment import error_dir
from ..system.failure_records import write_atomically
from .restart_policy import FitRecord, fits
from .verdict import Verdict


def fit_notifier(addresses: Sequence[str], directory: Path | None, warn: Callable[[str], None]) -> Notifier:
    """Return the notifier of the current fit of rank 0; its supervisor gets the addresses if there is one.

    Args:
        addresses: where to send the events.
        directory: the run's directory; None for a run without files.
        warn: called with a sentence about an event that was not delivered.
    """
    records = error_dir()
    claims = None
    if records is not None:
        number = max(0, len(fits(records)) - 1)
        claims = _claims(records, number)
        with contextlib.suppress(OSError):
            write_atomically(_addresses(records, number), json.dumps(resolved(addresses)))
    return Notifier(addresses, label_of(directory), warn, claims)


class LaunchNotifications:
    """Sends the events of a launch.

    Args:
        warn: called with a sentence about an event that was not delivered.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._notifiers: dict[tuple[int, str], Notifier] = {}
        """By the number and the directory of a fit, which is another one if it begins again without a checkpoint."""

    def stalled(self, directory: str, verdict: Verdict) -> None:
        """Report that the ranks of an attempt were ended as one of them had stalled; no effect for other verdicts."""
        if verdict.exit_code == StalledError.exit_code:
            self._send_newest(directory, "stall", headline(verdict.message), verdict.step)

    def restarted(self, directory: str, message: str, step: int | None, how: str) -> None:
        """Report that the ranks of an attempt have ended, for the reason in a message, and are started again."""
        reason = headline(message).removeprefix("phalanx: ").rstrip(".")
        self._send_newest(directory, "restart", f"{reason}: the ranks are started again ({how})", step)

    def ended(self, directory: str, verdict: Verdict) -> None:
        """Report the end of each fit of the last attempt that rank 0 has not reported."""
        found = fits(directory)
        for number, fit in enumerate(found):
            if (notifier := self._notifier(directory, number, fit)) is None:
                continue
            is_newest = number == len(found) - 1
            known = is_newest and verdict.failed
            # Of a fit without files whose error the script has caught, the exit code alone is not known.
            outcome = {
                "exit_code": verdict.exit_code if known else 1,
                "stopped": verdict.message if known else None,
                "optimizer_steps": verdict.step if known else None,
            }
            end = ending(Path(fit.directory) if fit.directory else None, outcome)
            notifier.send("end", end.sentence, end.step, end.state)

    def close(self) -> None:
        """Wait a few seconds for the events that are on their way."""
        for notifier in self._notifiers.values():
            notifier.close()

    def _send_newest(self, directory: str, event: str, sentence: str, step: int | None) -> None:
        found = fits(directory)
        if found and (notifier := self._notifier(directory, len(found) - 1, found[-1])) is not None:
            notifier.send(event, sentence, step, key=f"{event}_{Path(directory).name}")

    def _notifier(self, directory: str, number: int, fit: FitRecord) -> Notifier | None:
        """Return the notifier of a fit; None if it has no addresses."""
        key = number, fit.directory
        if key not in self._notifiers:
            try:
                addresses = json.loads(_addresses(directory, number).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            label = label_of(Path(fit.directory) if fit.directory else None)
            self._notifiers[key] = Notifier(addresses, label, self._warn, _claims(directory, number))
        return self._notifiers[key]


def _addresses(directory: str, number: int) -> Path:
    return Path(directory) / f"fit_{number}.notify"


def _claims(directory: str, number: int) -> Path:
    """Return the path of the claims of a fit, which the attempts of a launch share."""
    return Path(directory).parent / f"sent_{number}"
