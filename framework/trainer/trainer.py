"""``Trainer``: checks settings, assembles a ``Run`` and calls a loop. It contains no training logic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..checkpoint.save_request import SaveRequest
from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, is_count
from ..distributed.control import Signal
from ..fabric.fabric import Fabric
from ..launch import launch_script
from ..launch.exit_hooks import install_exit_codes
from ..resume import check_export, export_module, export_run, make_ready
from ..resume.resume_point import checked_checkpoint_path
from ..run.run import Run
from ..system.atomic_files import absolute
from ..system.entry_script import can_rerun_script
from ..system.run_directory import RunDirectory
from . import plan_memory
from .argument_hints import takes
from .checks import check_evaluation, check_fit, check_plan, split_datamodule
from .plugins import resolve_callbacks, resolve_loggers
from .properties import TrainerProperties
from .resolved_settings import resolve_settings
from .rules import flag
from .run_report import say
from .session import Session, StageRequest
from .settings import TrainerSettings
from .stages import run_in_function, run_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..api.data_module import DataModule
    from ..api.train_module import TrainModule
    from ..core.accumulation import AccumulationSchedule
    from ..memory.memory_plan import MemoryPlan
    from ..run.run import Run
    from ..state.average_settings import AverageSettings
    from ..state.weight_average import Average

_DEFAULT_NAME = "phalanx_logs"


class Trainer(TrainerProperties):
    """Trains, validates, tests and predicts.

    The arguments are keyword arguments; ``help(Trainer.__init__)`` lists them.

    Raises:
        ConfigurationError: an argument is unknown, invalid or contradicts another one.
    """

    @takes(TrainerSettings)
    def __init__(self, given: TrainerSettings) -> None:
        """Check and resolve all arguments. No process or file is created before a stage is called."""
        install_exit_codes()
        settings = resolve_settings(given)
        fabric = Fabric(given.accelerator, given.strategy, given.devices, given.num_nodes, given.precision)
        loggers = resolve_loggers(given.logger, settings)
        name = next((logger.name for logger in loggers if logger.name), _DEFAULT_NAME)
        self._session = Session(
            view=self,
            settings=settings,
            fabric=fabric,
            loggers=loggers,
            callbacks=resolve_callbacks(settings),
            directory=RunDirectory(settings.root, name, 0),
            accumulation=settings.accumulation,
        )
        _set_backends(given.deterministic, given.benchmark)

    # ---- entry points ---------------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train a module. Collective.

        Args:
            model: the module.
            train_dataloaders: a loader, or a list or dict of loaders whose batches are combined.
            val_dataloaders: a loader or several.
            datamodule: provides the loaders instead.
            ckpt_path: resume from a path, ``"last"``, ``"best"``, or ``"auto"``: the newest checkpoint of this run that
                verifies, or a fresh start.

        Raises:
            ConfigurationError: an argument is invalid. Raised before any process starts.
            CheckpointError: the checkpoint is missing, damaged or does not match.
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        check_fit(model, given, datamodule, self.settings, self.fabric.resources)
        for callback in self.callbacks:
            callback.check(self, "fit")
        self._launched_or_here("fit", StageRequest(model, given, datamodule, checked_checkpoint_path(ckpt_path)))

    def plan(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        *,
        activation_bytes: int | None = None,
        datamodule: DataModule | None = None,
    ) -> MemoryPlan:
        """Return the memory that each strategy needs per rank, and that available; printed, it is a table.

        It does not train or start ranks. Unless ``activation_bytes`` is given, it runs a micro-batch on a copy of the
        module in this process, on its device, to measure the tensors saved for backward. The module, generators and
        loaders are unchanged.

        Raises:
            ConfigurationError: the module or the data could not be used by ``fit``.
        """
        if activation_bytes is not None and not is_count(activation_bytes, 0):
            raise ConfigurationError(f"activation_bytes={activation_bytes!r} must be a number of bytes, 0 or more.")
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders}
        check_plan(
            model,
            given,
            datamodule,
            self.fabric.resources,
            self.settings.shards_data,
            activation_bytes,
        )
        return plan_memory(self._session, StageRequest(model, given, datamodule), activation_bytes)

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate, with the weights of ``ckpt_path`` if given; return the metrics of each loader. Collective."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Test, with the weights of ``ckpt_path`` if given; return the metrics of each loader. Collective."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """Predict; return the outputs of all batches on every rank, in the dataset's order. Collective.

        With several loaders, return one list per loader. With ``return_predictions=False`` return None, for callbacks
        that write predictions.
        """
        if return_predictions is not None:
            flag("return_predictions", return_predictions)
        request = self._evaluation_request("predict", model, dataloaders, ckpt_path, datamodule)
        request.keep_predictions = return_predictions is not False
        results: list[Any] = self._launched_or_here("predict", request)
        if return_predictions is False:
            return None
        return results[0] if len(results) == 1 else results

    def _evaluate(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        flag("verbose", verbose)
        request = self._evaluation_request(stage, model, dataloaders, ckpt_path, datamodule)
        results: list[dict[str, float]] = self._launched_or_here(stage, request)
        if verbose and not self.settings.barebones:
            for metrics in results:
                shown = ", ".join(f"{name} = {value:.5g}" for name, value in sorted(metrics.items()))
                self.note(f"{stage}: {shown or 'nothing was logged'}")
        return results

    def _evaluation_request(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, datamodule: Any
    ) -> StageRequest:
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        module = model if model is not None else self._session.module
        if module is None:
            raise ConfigurationError(f"Trainer.{stage} was given no model, and none was fitted before: pass model=...")
        if datamodule is None and model is None:
            datamodule = self.datamodule
        given = {stage: dataloaders}
        check_evaluation(stage, module, given, datamodule, self.fabric.resources, self.settings.shards_data)
        return StageRequest(module, given, datamodule, checked_checkpoint_path(ckpt_path))

    def _launched_or_here(self, stage: str, request: StageRequest) -> Any:
        """Run a stage in this rank; start the ranks first if they are not running."""
        resources, max_restarts = self.fabric.resources, self.settings.given.max_restarts
        place = resources.place
        # Restarts of a single rank need a supervisor process too.
        restarts = bool(max_restarts) and place.launcher is None and place.size == 1
        if (resources.must_launch or restarts) and can_rerun_script():
            # This process only supervises from this point on; the ranks reach this line by running the script.
            launch_script(resources.world_size, max_restarts, self.writes, resources.strategy.libraries)
        if max_restarts and place.launcher != "phalanx":
            started = "there is no script to run again" if place.launcher is None else f"{place.launcher} started it"
            self.note(f"max_restarts={max_restarts} has no effect on this run, since {started}.")
        run = run_in_function if resources.must_launch else run_stage
        return run(self._session, stage, request)

    # ---- actions ------------------------------------------------------------------------------

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

    def request_stop(self, reason: str) -> None:
        """Stop all ranks after the same step; the first reason is printed at the end."""
        self.raise_trigger(Signal.STOP, reason)

    def raise_trigger(self, name: str, payload: Any = None) -> None:
        """Raise a signal on this rank that all ranks receive at the next boundary. ``payload``: JSON values."""
        if self.run is not None:
            self.run.triggers.set(name, payload)

    def set_accumulation(self, schedule: AccumulationSchedule) -> None:
        """Replace the accumulation schedule, before training starts."""
        self._session.use_accumulation(schedule)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send metrics to all loggers at the current step, and add them to ``callback_metrics``."""
        if self.run is not None:
            step = max(0, self.run.progress.global_step - 1)
            self.run.loggers.log_metrics(dict(metrics), step)
            self.run.metrics.values["callback"].update(metrics)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, asynchronous: bool = False) -> None:
        """Save the state of the run after the last optimizer step. Collective.

        Args:
            filepath: the checkpoint's directory.
            weights_only: save only the model; no run can be resumed from such a checkpoint.
            asynchronous: return once the state is copied, and write it in the background. At most one save is pending:
                the next save and the end of the fit wait for it. A failure is reported at the step after it is known,
                and training continues; the third failure in a row ends the run.

        Raises:
            NonFiniteError: a weight is NaN or infinite; no checkpoint was written.
            StorageError: the checkpoint could not be written; an existing one is unchanged.
        """
        self.request_save(SaveRequest(absolute(filepath), weights_only, asynchronous, tolerant=asynchronous))

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
            path: a file that does not exist yet, or a directory in which ``model.safetensors`` is created.
            dtype: the dtype in which floating-point tensors are written, such as ``"bf16"``.
            max_shard_size: make ``path`` a directory of files of at most this size (``"5GB"``) and an index.

        Raises:
            ConfigurationError: there is no module, ``path`` exists, or a number does not fit into ``dtype``.
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

    def note(self, text: str) -> None:
        """Show a line on the console of rank 0."""
        if not self.is_global_zero:
            return
        if not any(callback.show(text) for callback in self.callbacks):
            say(text)

    def print(self, *args: Any) -> None:
        """Print on rank 0."""
        self.note(" ".join(map(str, args)))

    # ---- actions of callbacks that take part in the engine --------------------------------------------------------

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

    def _running(self, what: str) -> Run:
        if self.run is None:
            raise ConfigurationError(f"{what} works only during a run: call it in a hook or a callback.")
        return self.run


def _set_backends(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's flags for determinism and cuDNN's benchmark mode, if given."""
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.set_flags(_benchmark=benchmark)
