"""The actions of ``Trainer`` that hooks and callbacks call during a run: stop, log, save, export, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.save_request import SaveRequest
from ..core.absent_names import must_be_none
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..distributed.control import Signal
from ..pretrained import folder_order
from ..resume import check_export, export_module, export_run, make_ready
from ..system.atomic_files import absolute
from ..system.console import print_line
from . import open_report, write_pretrained
from .late_save import save_ended_fit
from .properties import TrainerProperties

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from ..core.accumulation import AccumulationSchedule
    from ..resume.step_record import StepRecord
    from ..run.run import Run
    from ..state.average_settings import AverageSettings
    from ..state.weight_average import Average
    from .run_view import RunReport


class TrainerActions(TrainerProperties):
    """The side of ``Trainer`` that hooks and callbacks act on."""

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed on a stop; set it on any rank to stop all ranks after the same step."""
        return super().should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.request_stop("")
        elif self.run is not None:
            self.run.triggers.withdraw(Signal.STOP)
            self.raise_trigger(Signal.CONTINUE)

    @names_arguments
    def request_stop(self, reason: str) -> None:
        """Stop all ranks after the same step; the first reason is printed at the end."""
        self.raise_trigger(Signal.STOP, reason)

    def raise_trigger(self, name: str, payload: Any = None) -> None:
        """Raise a signal on this rank that all ranks receive at the next boundary. ``payload``: JSON values."""
        if self.run is not None:
            self.run.triggers.set(name, payload)

    @names_arguments
    def set_accumulation(self, schedule: AccumulationSchedule) -> None:
        """Replace the accumulation schedule, before training starts.

        Raises:
            ConfigurationError: ``global_batch_size`` sets the number of micro-batches.
        """
        if (whole := self._session.settings.global_batch) is not None:
            raise ConfigurationError(
                f"an accumulation schedule and {whole} both set how many micro-batches an optimizer step has: leave "
                "one of them out."
            )
        self._session.use_accumulation(schedule)

    @names_arguments
    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to all loggers at the current step, and add them to ``callback_metrics``."""
        if self.run is not None:
            step = max(0, self.run.progress.global_step - 1)
            self.run.loggers.log_metrics(dict(metrics), step)
            self.run.metrics.values["callback"].update(metrics)

    @names_arguments
    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        asynchronous: bool = False,
        *,
        storage_options: None = None,
    ) -> None:
        """Save the state of the run after the last optimizer step. Collective.

        After a fit, save its state at the end, until the next fit begins. Where every rank has the full state, the
        weights are those that the module holds now; otherwise they are those of the end of the fit.

        Args:
            filepath: the checkpoint's directory.
            weights_only: save only the model; no run can be resumed from such a checkpoint.
            asynchronous: return once the state is copied, and write it in the background. At most one save is pending:
                the next save and the end of the fit wait for it. A failure is reported at the step after it is known,
                and training continues; the third failure in a row ends the run.
            storage_options: must be None; Lightning has the argument.

        Raises:
            ConfigurationError: there is no state to save: no fit has ended, or it has ended with an error, or in ranks
                that were forked, or an evaluation has loaded other weights since then.
            NonFiniteError: a weight is NaN or infinite; no checkpoint was written.
            StorageError: the checkpoint could not be written; an existing one is unchanged.
        """
        must_be_none("save_checkpoint(storage_options=...)", storage_options, "checkpoints are written to directories")
        if self.run is None:
            save_ended_fit(self._session, absolute(filepath), weights_only)
            return
        self.request_save(SaveRequest(absolute(filepath), weights_only, asynchronous, tolerant=asynchronous))

    @names_arguments
    def export(
        self,
        path: str | Path,
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str | None = None,
    ) -> Path:
        """Write only the weights, as plain safetensors; return the path. Collective during a run.

        In a hook, the weights are those after the last optimizer step, under any strategy, in the dtype of its updates.
        After a fit they are the weights that the module holds, and only rank 0 writes.

        Args:
            path: a file, or a directory in which ``model.safetensors`` is created. A file of an earlier export, as of a
                run that is resumed, is replaced.
            dtype: the dtype in which floating-point tensors are written, such as ``"bf16"``.
            max_shard_size: make ``path`` a directory of files of at most this size (``"5GB"``) and an index.

        Raises:
            ConfigurationError: there is no module, ``path`` exists and is of no earlier export, or a number does not
                fit into ``dtype``.
            StorageError: the files cannot be written.
        """
        target = Path(path)
        if self.run is not None:
            self.run.check_together("export")
            return export_run(self.run, target, dtype, max_shard_size)
        if self._session.module is None:
            raise ConfigurationError("export writes the weights of a module that was fitted or evaluated: fit first.")
        check_export(dtype, max_shard_size)
        return export_module(self._session.module, target, dtype, max_shard_size) if self.is_global_zero else target

    @names_arguments
    def save_pretrained(
        self,
        directory: str | Path,
        model: nn.Module | None = None,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: str | torch.dtype | None = None,
        average: str | None = None,
    ) -> Path:
        """Write the model as a folder that ``from_pretrained`` of transformers opens; return the folder. Collective.

        The folder holds the config, the generation config, the tokenizer and safetensors files. It appears when it is
        complete; in an existing folder the files are replaced once all of them are written. After a fit the weights
        are those of its end, as for ``save_checkpoint``.

        Args:
            directory: the folder.
            model: the model, a part of the module. Default: the only model of transformers in it. Of other modules the
                weights alone are written.
            tokenizer: a tokenizer or processor to add.
            max_shard_size: the largest size of a file, in bytes or as ``"5GB"``.
            dtype: the dtype in which floating-point tensors are written, such as ``"bf16"``. Default: that in which
                updates are applied.
            average: write this average of the weights, such as ``"ema"``, instead of the trained weights.

        Raises:
            ConfigurationError: an argument is invalid, there is no such model, it has adapters of peft, or a number
                does not fit into ``dtype``.
            StorageError: the folder cannot be written.
        """
        order = folder_order(directory, model, tokenizer, max_shard_size, dtype, average)
        return write_pretrained(self._session, order)

    def report(self) -> RunReport:
        """Return the report of the last fit, or of the fit in progress; a notebook shows it as a page.

        It is made from the run's files as they are now. Its ``path`` is that of ``report.html``.

        Raises:
            ConfigurationError: no fit has begun, or it writes no files.
        """
        return open_report(self._session)

    def note(self, text: str) -> None:
        """Show a line on the console of rank 0."""
        if not self.is_global_zero:
            return
        if not any(callback.show(text) for callback in self.callbacks):
            print_line(text)

    def print(self, *args: Any) -> None:
        """Print on rank 0."""
        self.note(" ".join(map(str, args)))

    # ---- actions of callbacks that take part in the engine --------------------------------------------------------

    @names_arguments
    def add_average(self, settings: AverageSettings) -> Average:
        """Maintain an average of the weights from now on; for callbacks, in ``setup``."""
        return self._running("add_average").add_average(settings)

    def pause_lr_schedulers(self) -> None:
        """Stop advancing schedulers for the rest of the fit; a callback sets the learning rates."""
        self._running("pause_lr_schedulers").pause_lr_schedulers()

    def prepare_saves(
        self, directory: Path, gives: Callable[[str], bool], weights_only: bool, asynchronous: bool
    ) -> None:
        """Prepare a directory for checkpoints whose names ``gives`` accepts; see ``make_ready``. Collective."""
        make_ready(self._running("prepare_saves"), directory, gives, weights_only, asynchronous)

    def request_save(self, request: SaveRequest) -> None:
        """Save according to a ``SaveRequest``; errors as for ``save_checkpoint``. Collective."""
        self._running("save_checkpoint").saver.save(request)

    def finish_saves(self) -> None:
        """Wait for a pending asynchronous save, and handle its result. Collective."""
        if self.run is not None:
            self.run.saver.finish()

    def record_step(self) -> StepRecord:
        """Return a record of the state after the last optimizer step, which this rank can save after an error.

        Raises:
            ConfigurationError: ranks hold parts of the state.
        """
        record: StepRecord = self._running("record_step").saver.record()
        return record

    def _running(self, what: str) -> Run:
        if self.run is None:
            raise ConfigurationError(f"{what} works only during a run: call it in a hook or a callback.")
        return self.run
