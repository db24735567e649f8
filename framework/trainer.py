"""``Trainer``: settings in, a ``Run`` assembled, a loop called. No training logic."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .accumulation import AccumulationSchedule
from .assembly import FitRequest, assemble_evaluation, assemble_fit
from .callback import Callback
from .checkpoint import save
from .checks import check_clipping_choice, check_module
from .datamodule import DataModule
from .errors import ConfigurationError
from .evaluation import evaluate, predict
from .fabric import Fabric
from .launch import can_rerun_script, install_rank_hooks, launch_script
from .logger import Logger
from .module import TrainModule
from .notebook import run_in_function
from .optimization import SchedulerConfig
from .plugins import resolve_callbacks, resolve_loggers
from .progress import Progress
from .report import box, end_lines, report, say, start_lines
from .resume import check_checkpoint_path
from .run import Run
from .rundir import RunDirectory
from .settings import Settings, resolve_settings
from .state import capture_run
from .strategy import Strategy
from .training import FitLoop
from .world import World

_DEFAULT_NAME = "phalanx_logs"


@dataclass
class TrainerState:
    """What a Trainer is doing, and how its last run ended: ``"running"``, ``"finished"`` or ``"interrupted"``."""

    stage: str = "fit"
    status: str = "initializing"

    @property
    def finished(self) -> bool:
        """Whether the last run came to its end."""
        return self.status == "finished"


class Trainer:
    """Trains, validates, tests and predicts.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``.
        strategy: how work is spread, a name or a ``Strategy``; ``"auto"`` is ``single`` for one rank and ``ddp`` for more.
        devices: ranks on each node: a number, a list of CUDA indices, or ``"auto"``.
        num_nodes: nodes; more than one needs a launcher such as torchrun.
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"`` or short.
        logger: a ``Logger``, a name, a list of these; True is TensorBoard, False none.
        callbacks: a ``Callback``, a name, or a list of these.
        fast_dev_run: run this many batches of each loop, without loggers and checkpoints, to see that all works.
        max_epochs, min_epochs, max_steps, min_steps, max_time: when to end; -1 means no limit. With no limit given 1000
            epochs. Steps are optimizer steps that were applied.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number of batches (int) or a
            fraction (float). In evaluation they are counted as in one process, whatever the number of ranks.
        overfit_batches: use so many batches, unshuffled, for training and validation.
        val_check_interval: validate within an epoch, by a fraction of it, a number of batches, or a time.
        check_val_every_n_epoch: validate in every n-th epoch; None counts ``val_check_interval`` over epochs.
        num_sanity_val_steps: validation batches to try before training; -1 for all.
        log_every_n_steps: how often step values go to the loggers.
        accumulate_grad_batches: micro-batches for each optimizer step: a number, ``{epoch: number}``, or a schedule.
        gradient_clip_val, gradient_clip_algorithm: clip gradients by ``"norm"`` or ``"value"``.
        deterministic: use deterministic algorithms; ``"warn"`` only warns where there is none.
        benchmark: let cuDNN choose its fastest algorithms.
        inference_mode: evaluate under ``torch.inference_mode`` rather than ``torch.no_grad``.
        use_distributed_sampler: share loaders out over ranks; False leaves them as they are.
        profiler: None; time a run with ``torch.profiler`` around ``fit``.
        detect_anomaly: find the operation whose gradient is NaN; slow.
        barebones: no logger, no callbacks, no sanity check: for measuring.
        sync_batchnorm: compute batch statistics over all ranks.
        reload_dataloaders_every_n_epochs: ask for new loaders every n epochs.
        default_root_dir: where ``<name>/version_<n>`` goes (default: the working directory).
        plugins: None; strategies, loggers and callbacks are registered by name instead.
        nonfinite: what a loss that is NaN or infinite does: ``"raise"``, ``"skip"`` its update, or ``"ignore"``.

    Raises:
        ConfigurationError: an argument breaks a rule or contradicts another one.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | Mapping[int, int] | AccumulationSchedule = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        plugins: None = None,
        nonfinite: str = "raise",
    ) -> None:
        if profiler is not None or plugins is not None:
            given = "profiler" if profiler is not None else "plugins"
            raise ConfigurationError(
                f"{given} takes nothing but None here: wrap fit in torch.profiler, and give strategies by object or name."
            )
        self.settings: Settings = resolve_settings(
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            min_steps=min_steps,
            max_time=max_time,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches,
            val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            nonfinite=nonfinite,
            fast_dev_run=fast_dev_run,
            barebones=barebones,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
            default_root_dir=default_root_dir,
        )
        self.fabric = Fabric(accelerator, strategy, devices, num_nodes, precision)
        self.fabric.updater.guarded |= nonfinite == "skip"
        self._loggers: list[Logger] = resolve_loggers(logger, self.settings)
        self.callbacks: list[Callback] = resolve_callbacks(
            callbacks, self.settings, enable_checkpointing, enable_progress_bar, enable_model_summary
        )
        self.inference_mode = inference_mode
        self.sync_batchnorm = sync_batchnorm
        self.use_distributed_sampler = use_distributed_sampler
        self.detect_anomaly = detect_anomaly
        self.state = TrainerState()
        self.accumulation = self.settings.accumulation
        self.sanity_checking = False
        self._quiet = barebones
        self._run: Run | None = None
        self._loop: FitLoop | None = None
        self._module: TrainModule | None = None
        self._datamodule: DataModule | None = None
        self.seed = 0
        self._last_progress = Progress()
        self._last_metrics: dict[str, dict[str, Tensor]] = {"callback": {}, "logged": {}, "progress_bar": {}}
        self.directory = RunDirectory(self.settings.root, self._experiment_name(), 0)
        set_backends(deterministic, benchmark)

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
            train_dataloaders: a loader, or a list or dict of loaders whose batches come together.
            val_dataloaders: a loader or several.
            datamodule: gives loaders instead.
            ckpt_path: resume from a path, ``"last"``, ``"best"``, or ``"auto"``: the newest checkpoint of this run that
                verifies, or a fresh start.

        Raises:
            ConfigurationError: something cannot work; before any process starts.
            CheckpointError: the checkpoint is refused.
            NonFiniteError: a loss is NaN or infinite.
        """
        train_dataloaders, datamodule = _split_datamodule(train_dataloaders, datamodule)
        check_module(model, "fit")
        check_clipping_choice(model, self.settings.clipping, self.fabric.strategy.traits.clips_by_value)
        check_checkpoint_path(ckpt_path)
        request = FitRequest(model, {"train": train_dataloaders, "validate": val_dataloaders}, datamodule, ckpt_path)
        if self._launches():
            run_in_function(self, "fit", request)
        else:
            self._fit(request)

    def _fit(self, request: FitRequest) -> None:
        with self._running("fit", request):
            loop = assemble_fit(self, request)
            self._start(loop)
            with torch.autograd.set_detect_anomaly(self.detect_anomaly):
                loop()
            self._end(loop)

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate; return the metrics of each loader. Collective. ``ckpt_path`` puts a checkpoint's weights in first."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Test; return the metrics of each loader. Collective. ``ckpt_path`` puts a checkpoint's weights in first."""
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

        With several loaders a list for each. ``return_predictions=False`` returns None, for writers among the callbacks.
        """
        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        request = self._evaluation_request("predict", model, dataloaders, ckpt_path, datamodule)
        results: list[Any] = self._launched_or_here("predict", request)
        if return_predictions is False:
            return None
        return results[0] if len(results) == 1 else results

    def _evaluate(
        self,
        stage: str,
        model: TrainModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: DataModule | None,
    ) -> list[dict[str, float]]:
        dataloaders, datamodule = _split_datamodule(dataloaders, datamodule)
        request = self._evaluation_request(stage, model, dataloaders, ckpt_path, datamodule)
        results: list[dict[str, float]] = self._launched_or_here(stage, request)
        if verbose and not self._quiet:
            for metrics in results:
                self.note(f"{stage}: " + ", ".join(f"{name} = {value:.5g}" for name, value in sorted(metrics.items())))
        return results

    def _launched_or_here(self, stage: str, request: FitRequest) -> Any:
        return run_in_function(self, stage, request) if self._launches() else self.run_stage(stage, request)

    def run_stage(self, stage: str, request: FitRequest) -> Any:
        """Run a stage in this process, whose rank has been started. Collective."""
        if stage == "fit":
            return self._fit(request)
        with self._running(stage, request):
            run, plan = assemble_evaluation(self, request, stage)
            results = predict(run, plan) if stage == "predict" else evaluate(run, plan)
            run.loggers.finalize("success")
        return results

    def _evaluation_request(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, datamodule: DataModule | None
    ) -> FitRequest:
        module = model if model is not None else self._module
        if module is None:
            raise ConfigurationError(f"Trainer.{stage} was given no model, and none was fitted before: pass model=...")
        check_module(module, stage)
        check_checkpoint_path(ckpt_path)
        return FitRequest(module, {stage: dataloaders}, datamodule or self._datamodule, ckpt_path)

    # ---- around a run ---------------------------------------------------------------------------------------------

    def _launches(self) -> bool:
        """Start the other ranks where that is to be done; return whether a function has to be launched."""
        resources = self.fabric.resources
        if not resources.must_launch:
            return False
        if can_rerun_script():
            launch_script(resources.world_size)
        return True

    @contextmanager
    def _running(self, stage: str, request: FitRequest) -> Generator[None, None, None]:
        """Hold a run: what is set up is taken down, whatever happens in between."""
        module, datamodule = request.module, request.datamodule
        install_rank_hooks(self.fabric.resources.place)
        self.state = TrainerState(stage, "running")
        self._module, self._datamodule = module, datamodule
        if datamodule is not None:
            datamodule.trainer = self
        try:
            yield
        except BaseException as error:
            self.state.status = "interrupted"
            self._fail(error)
            raise
        else:
            self.state.status = "finished"
            self._teardown(stage)
        finally:
            self._let_go(module)

    def attach_run(self, run: Run) -> None:
        """Make a run the current one."""
        self._run = run

    def attach_loop(self, loop: FitLoop) -> None:
        """Make a loop the current one."""
        self._loop = loop

    def outcome(self) -> dict[str, Any]:
        """Return what the last run came to, for the process that started its ranks."""
        states = {callback.state_key: callback.state_dict() for callback in self.callbacks}
        return {
            "progress": self._last_progress,
            "metrics": self._last_metrics,
            "callbacks": states,
            "state": self.state,
        }

    def adopt(self, module: TrainModule, outcome: dict[str, Any]) -> None:
        """Take over what ``outcome`` returned in a rank."""
        self._module = module
        self._last_progress, self._last_metrics = outcome["progress"], outcome["metrics"]
        self.state = outcome["state"]
        for callback in self.callbacks:
            callback.load_state_dict(outcome["callbacks"][callback.state_key])

    def _fail(self, error: BaseException) -> None:
        """Tell callbacks and loggers. No collective: other ranks may never come."""
        run = self._run
        if run is None:
            return
        for callback in run.callbacks:
            if callback.wants("on_exception"):
                callback.on_exception(self, run.module, error)
        run.loggers.finalize("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _teardown(self, stage: str) -> None:
        run = self._run
        if run is None:
            return
        for callback in run.callbacks:
            callback.teardown(self, run.module, stage)
        run.module.teardown(stage)
        if self._datamodule is not None:
            self._datamodule.teardown(stage)

    def _let_go(self, module: TrainModule) -> None:
        run = self._run
        if run is not None:
            self._last_progress = run.progress
            self._last_metrics = {which: run.metric_view(which) for which in self._last_metrics}
            run.fabric.strategy.teardown()
            run.world.close()
        for name in ("_run", "_metric_log"):
            module.__dict__[name] = None
        self.directory.release()
        self._run = None
        self._loop = None

    def _start(self, loop: FitLoop) -> None:
        run = loop.run
        hyperparameters = {**run.module.hparams_to_log}
        if hyperparameters:
            run.loggers.log_hyperparams(hyperparameters)
        if self._quiet or not run.world.is_global_zero:
            return
        saves = self.checkpoint_dir if self.checkpoint_callback is not None else None
        logs = self.run_dir if self._loggers else None
        resumed = loop.resumed_from
        self.note(box("phalanx", start_lines(run, loop.plan, loop.windows, logs, saves, resumed)))
        if self.writes:
            self.directory.write_json("config.json", self.configuration())

    def _end(self, loop: FitLoop) -> None:
        run = loop.run
        run.loggers.finalize("success")
        if self._quiet or not run.world.is_global_zero:
            return
        if self.writes:
            self.directory.write_json("report.json", report(run, self.callbacks))
        self.note(box("done", end_lines(run, self.callbacks, self.log_dir)))

    def configuration(self) -> dict[str, Any]:
        """Return the resolved settings, as they are written into the run's directory."""
        resources = self.fabric.resources
        return {
            "strategy": resources.strategy.name,
            "world_size": self.world_size,
            "precision": resources.precision.name,
            "seed": self.seed,
            **{name: value for name, value in vars(self.settings).items() if name != "accumulation"},
            "accumulation": str(self.accumulation),
        }

    def _experiment_name(self) -> str:
        return next((logger.name for logger in self._loggers if logger.name), _DEFAULT_NAME)

    # ---- what callbacks and users read ----------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self.fabric.world

    @property
    def strategy(self) -> Strategy:
        """How work is spread."""
        return self.fabric.strategy

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.fabric.resources.place.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.fabric.resources.place.local_rank

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.fabric.resources.world_size

    @property
    def num_devices(self) -> int:
        """Ranks on each node."""
        return self.fabric.resources.devices

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self._run.progress if self._run is not None else self._last_progress

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0; after a fit the number of epochs done."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return self.progress.global_step

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs; None or -1 where there is none."""
        return self.settings.max_epochs

    @property
    def min_epochs(self) -> int | None:
        """The least number of epochs."""
        return self.settings.min_epochs

    @property
    def max_steps(self) -> int:
        """The limit of optimizer steps; -1 where there is none."""
        return self.settings.max_steps

    @property
    def fast_dev_run(self) -> bool:
        """Whether this is a trial run."""
        return bool(self.settings.fast_dev_run)

    @property
    def default_root_dir(self) -> str:
        """The directory below which runs are kept."""
        return str(self.settings.root)

    @property
    def run_dir(self) -> Path:
        """This run's directory."""
        return self.directory.path

    @property
    def checkpoint_dir(self) -> Path:
        """Where this run's checkpoints go by default."""
        return self.directory.checkpoints

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger that has one, or the run's."""
        return next((d for logger in self._loggers if (d := logger.log_dir)), None)

    @property
    def writes(self) -> bool:
        """Whether this run keeps files."""
        return bool(self._loggers) or self.checkpoint_callback is not None

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self._loggers[0] if self._loggers else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    @property
    def module(self) -> TrainModule:
        """The module of the current or last run."""
        if self._module is None:
            raise ConfigurationError("this Trainer has no module yet: call fit, validate, test or predict.")
        return self._module

    lightning_module = module
    model = module

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last run."""
        return self._datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the running fit."""
        return self._run.optimizers if self._run is not None else []

    @property
    def lr_schedulers(self) -> list[SchedulerConfig]:
        """The schedulers of the running fit, with when they step."""
        return self._run.schedulers if self._run is not None else []

    lr_scheduler_configs = lr_schedulers

    @property
    def latest_loss(self) -> Any:
        """The loss of the last micro-batch on this rank: a number, or a tensor on its device."""
        return self._run.latest_loss if self._run is not None else None

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged, for callbacks."""
        return self._metrics("callback")

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What was last sent to the loggers."""
        return self._metrics("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """What was logged with ``prog_bar=True``."""
        return self._metrics("progress_bar")

    def _metrics(self, which: str) -> dict[str, Tensor]:
        return self._run.metric_view(which) if self._run is not None else self._last_metrics[which]

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of each rank in an epoch; infinite where unknown."""
        end = self._loop.windows.end if self._loop is not None else None
        return float("inf") if end is None else end

    @property
    def num_val_batches(self) -> list[int | float]:
        """This rank's batches of each validation loader."""
        validation = self._loop.plan.validation if self._loop is not None else None
        if validation is None:
            return []
        lengths = [s.len_local(limit) for s, limit in zip(validation.sources, validation.limits, strict=True)]
        return [float("inf") if length is None else length for length in lengths]

    @property
    def val_enabled(self) -> bool:
        """Whether the running fit validates."""
        return self._loop is not None and self._loop.plan.validation is not None

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Every how many epochs the fit validates."""
        return self.settings.check_val_every_n_epoch

    @property
    def val_check_interval(self) -> Any:
        """How often the fit validates within an epoch."""
        return self.settings.val_check_interval

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit; infinite where unknown."""
        if self._loop is not None:
            return self._loop.estimated_steps()
        raise ConfigurationError("estimated_stepping_batches is known while fit runs, from configure_optimizers on.")

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that saves checkpoints."""
        return next((callback for callback in self.callbacks if callback.runs_last), None)

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """All callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if callback.runs_last]

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first callback that stops early."""
        return next((c for c in self.callbacks if c.monitors and not c.runs_last), None)

    # ---- what callbacks and users do ------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for; set it on any rank and all stop after the same step."""
        return self._run is not None and self._run.stop_requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.request_stop("")
        elif self._run is not None:
            self._run.stop_requested = False

    def request_stop(self, reason: str) -> None:
        """Stop all ranks after the same step; the first reason is shown at the end."""
        self.raise_trigger("stop", reason)

    def raise_trigger(self, name: str, payload: Any = None) -> None:
        """Raise a trigger on this rank: all ranks see it at the next boundary. ``payload``: JSON values."""
        if self._run is not None:
            self._run.triggers.set(name, payload)

    @property
    def fired_triggers(self) -> set[str]:
        """The names of the triggers that fired at the last boundary, the same on every rank."""
        return set(self._run.triggers.fired) if self._run is not None and self._run.triggers.fired else set()

    def set_accumulation(self, schedule: AccumulationSchedule) -> None:
        """Replace the accumulation schedule, before training starts."""
        self.accumulation = schedule

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send figures to all loggers at the current step."""
        if self._run is not None:
            self._run.loggers.log_metrics(dict(metrics), self._run.log_step)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Save the run as it stands after the last optimizer step. Collective.

        Raises:
            NonFiniteError: a weight is NaN or infinite; nothing was written.
            StorageError: it could not be written; what was there is untouched.
        """
        run = self._run
        if run is None:
            raise ConfigurationError("save_checkpoint works while a run is under way: call it in a hook or a callback.")
        windows = self._loop.windows if self._loop is not None else None
        snapshot = capture_run(run, windows, self.seed, weights_only)
        save(Path(filepath), snapshot, run.world, sharded=not self.strategy.traits.replicates)

    def note(self, text: str) -> None:
        """Show a person one line, on rank 0."""
        if not self.is_global_zero:
            return
        shown = next((show for callback in self.callbacks if (show := getattr(callback, "show", None))), say)
        shown(text)

    def print(self, *args: Any) -> None:
        """Print on rank 0."""
        self.note(" ".join(map(str, args)))


def set_backends(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's switches for determinism and for cuDNN's search of algorithms, where they were given."""
    if deterministic is not None:
        if deterministic not in (True, False, "warn"):
            raise ConfigurationError(f"deterministic={deterministic!r} must be True, False or 'warn'.")
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark


def _split_datamodule(loaders: Any, datamodule: DataModule | None) -> tuple[Any, DataModule | None]:
    """A DataModule may come in the place of the loaders."""
    if isinstance(loaders, DataModule):
        return None, loaders
    if loaders is not None and datamodule is not None:
        raise ConfigurationError("both loaders and a datamodule were given: leave one of them out.")
    return loaders, datamodule
