"""``LastStep``: saves the state after the last optimizer step when a fit ends with an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..framework.core.errors import PhalanxError, Preempted
from ..framework.system.console import print_line

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.resume.step_record import StepRecord


class LastStep:
    """The record of the last optimizer step of a fit, for the callbacks that save after an error."""

    def __init__(self) -> None:
        self._record: StepRecord | None = None
        self._first_step = self._updates_from = -1

    def begin(self, trainer: TrainerView) -> None:
        """Start a fit.

        Raises:
            ConfigurationError: Ranks hold parts of the state, which none of them could save alone, or a value of the
                state has a type that cannot be saved.
        """
        trainer.record_step().check()
        self._record, self._updates_from = None, -1
        self._first_step = trainer.global_step

    def update_begins(self, trainer: TrainerView) -> None:
        """Note that weights change from now on."""
        self._updates_from = trainer.global_step

    def batch_ends(self, trainer: TrainerView) -> None:
        """Record the state if an optimizer step was made."""
        step = trainer.global_step
        if step != self._first_step and (self._record is None or self._record.step != step):
            self._record = trainer.record_step()
        # Also after an update that was skipped.
        self._updates_from = -1

    def end(self) -> None:
        """Release the state."""
        self._record = None

    def save(self, trainer: TrainerView, path: Path, error: BaseException) -> bool:
        """Save after an error, and print where, or why nothing was saved; return whether this rank has saved."""
        record, self._record = self._record, None
        if isinstance(error, Preempted):
            # A preempted run has saved its state.
            return False
        if record is None:
            self._say(trainer, "Nothing was saved after the error: it came before the first optimizer step.")
            return False
        if self._updates_from >= record.step:
            self._say(
                trainer,
                f"Nothing was saved after the error: it came while optimizer step {record.step} was applied or its "
                "hooks ran, so the weights do not match the counters.",
            )
            return False
        try:
            is_writer = record.save(path)
        except (PhalanxError, OSError) as problem:
            self._say(trainer, f"Nothing was saved after the error: {problem}")
            return False
        if is_writer:
            self._say(trainer, f"Saved {path} after optimizer step {record.step}; resume with ckpt_path={str(path)!r}.")
        return is_writer

    @staticmethod
    def _say(trainer: TrainerView, text: str) -> None:
        # Another rank than 0 prints into its own file.
        (trainer.note if trainer.is_global_zero else print_line)(text)
