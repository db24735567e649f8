"""``Trainer``: settings in, a ``Run`` assembled, a loop called. No training logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, is_count
from ..core.precision import Precision
from ..core.progress import Progress
from ..fabric.fabric import Fabric
from ..launch.exit_hooks import install_exit_codes
from ..launch.script_launcher import launch_script
from ..launch.signals import SIGNALS, check_signals
from ..loop.fit_loop import FitLoop
from ..memory.memory_plan import MemoryPlan
from ..parallel.strategy import Strategy
from ..resume.checkpoint_saver import SaveOrder
from ..resume.export import check_export, export_module, export_run
from ..resume.resume_point import checked_checkpoint_path
from ..run.run import Run
from ..system.atomic_files import absolute
from ..system.entry_script import can_rerun_script
from ..system.run_directory import RunDirectory
from ..watchdog.heartbeat import Heartbeat, StallTimeout, resolve_stall_timeout
from .argument_hints import check_flags, refuse_unknown
from .assembly import FitRequest
from .auto_strategy import plan_memory
from .checks import check_evaluation, check_fit, check_plan, split_datamodule
from .notebook import run_in_function
from .plugins import resolve_callbacks, resolve_loggers
from .run_report import say
from .settings import Settings, check_count, resolve_duration, resolve_settings
from .stages import run_stage
from .trainer_view import METRIC_KINDS, TrainerState, TrainerView

_DEFAULT_NAME = "phalanx_logs"


class Trainer(TrainerView):
    """Trains, validates, tests and predicts.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``.
        strategy: how work is spread, a name or a ``Strategy``; ``"auto"`` takes the first that fits into memory of
            ``single`` (one rank) or ``ddp``, ``fsdp``, ``zero3-offload`` and ``zero3-nvme`` when a fit starts.
        devices: ranks on each node: a number, a list of CUDA indices, or ``"auto"``.
        num_nodes: nodes; more than one needs a launcher such as torchrun.
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``; for
            short ``32``, ``64``, ``"bf16"``, ``16`` and ``"fp16"``; a registered name, or a ``Precision``.
        logger: a ``Logger``, a name, a list of these; True is TensorBoard, False none.
        callbacks: a ``Callback``, a name, or a list of these.
        fast_dev_run: run this many batches of each loop, without loggers and checkpoints, to see that all works.
        max_epochs, min_epochs, max_steps, min_steps, max_time: when to end; -1 means no limit. With no limit given
            1000 epochs. Steps are optimizer steps that were applied.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number of batches (int) or
            a fraction (float). In evaluation they are counted as in one process, whatever the number of ranks.
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
        nonfinite: what a loss or gradient that is NaN or infinite does: ``"raise"`` on all ranks before its update,
            ``"skip"`` the update, at most 10 in a row, or ``"ignore"``.
        debug: ``"collectives"`` compares what ranks do before each collective and names the first difference; slow.
        preemption_signals: at which signals to finish the step, save and end: SIGTERM, SIGUSR1, SIGUSR2 with exit code
            75, SIGINT with 130; a second SIGINT stops at once.
        requeue: after SIGUSR1 or SIGUSR2 in a SLURM job, as ``sbatch --signal`` sends them, put it back into the queue.
        time_limit_margin: how long before a SLURM job's time is up to save and end with exit code 75.
        max_restarts: how often ranks that phalanx started are started again after a failure, from the newest good
            checkpoint. It ends when a step fails twice in a row, and for whatever starting again would not change.
        stall_timeout: after how many seconds (or which timedelta) without a sign of life a run ends with exit code 76,
            all ranks' stacks shown; also a dict by section. None learns the limits, False sets none.

    Raises:
        ConfigurationError: an argument is not known, breaks a rule or contradicts another one.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: bool | int = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int | None = -1,
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
        debug: str | None = None,
        preemption_signals: Sequence[str] = SIGNALS,
        requeue: bool = True,
        time_limit_margin: Any = timedelta(minutes=2),
        max_restarts: int = 0,
        stall_timeout: StallTimeout = None,
        **unknown_arguments: Any,
    ) -> None:
        install_exit_codes()
        refuse_unknown(unknown_arguments, type(self).__init__)
        if profiler is not None or plugins is not None:
            given = "profiler" if profiler is not None else "plugins"
            raise ConfigurationError(
                f"{given} takes nothing but None: wrap fit in torch.profiler, and give strategies by object or name."
            )
        check_flags(
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            benchmark=benchmark,
            inference_mode=inference_mode,
            use_distributed_sampler=use_distributed_sampler,
            detect_anomaly=detect_anomaly,
            barebones=barebones,
            requeue=requeue,
            sync_batchnorm=sync_batchnorm,
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
            debug=debug,
            fast_dev_run=fast_dev_run,
            barebones=barebones,
            detect_anomaly=detect_anomaly,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
            default_root_dir=default_root_dir,
        )
        self.fabric = Fabric(accelerator, strategy, devices, num_nodes, precision)
        self.loggers = resolve_loggers(logger, self.settings)
        self.callbacks = resolve_callbacks(
            callbacks, self.settings, enable_checkpointing, enable_progress_bar, enable_model_summary
        )
        self.preemption_signals = check_signals(preemption_signals)
        self.requeue = requeue
        self.time_limit_margin = resolve_duration("time_limit_margin", time_limit_margin)
        check_count("max_restarts", max_restarts, 0)
        self.max_restarts = max_restarts
        self.stall_limits = resolve_stall_timeout(stall_timeout)
        self.heartbeat = Heartbeat()
        self.inference_mode = inference_mode
        self.sync_batchnorm = sync_batchnorm
        self.use_distributed_sampler = use_distributed_sampler
        self.state = TrainerState()
        self.accumulation = self.settings.accumulation
        self.seed = 0
        self.run = self.loop = self.datamodule = self.last_module = None
        self.last_progress = Progress()
        self.last_metrics = {kind: {} for kind in METRIC_KINDS}
        name = next((logger.name for logger in self.loggers if logger.name), _DEFAULT_NAME)
        self.directory = RunDirectory(self.settings.root, name, 0)
        _set_backends(deterministic, benchmark)

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
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        check_fit(model, given, datamodule, self.settings, self.fabric.resources, self.use_distributed_sampler)
        for callback in self.callbacks:
            callback.check(self, "fit")
        self._launched_or_here("fit", FitRequest(model, given, datamodule, checked_checkpoint_path(ckpt_path)))

    def plan(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        *,
        activation_bytes: int | None = None,
        datamodule: DataModule | None = None,
    ) -> MemoryPlan:
        """Return what each strategy would hold on every rank beside the memory that is there; printed, a table.

        Nothing is trained and no rank is started. A micro-batch runs on a copy of the module in this process, on its
        device, to see what its forward keeps for backward, unless ``activation_bytes`` says it. The module, generators
        and loaders stay as they are.

        Raises:
            ConfigurationError: the module or the data could not be used by ``fit``.
        """
        if activation_bytes is not None and not is_count(activation_bytes, 0):
            raise ConfigurationError(f"activation_bytes={activation_bytes!r} must be a number of bytes, 0 or more.")
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders}
        check_plan(model, given, datamodule, self.fabric.resources, self.use_distributed_sampler, activation_bytes)
        return plan_memory(self, FitRequest(model, given, datamodule), activation_bytes)

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate; return each loader's metrics. Collective. ``ckpt_path`` puts a checkpoint's weights in first."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Test; return each loader's metrics. Collective. ``ckpt_path`` puts a checkpoint's weights in first."""
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

        With several loaders a list for each. ``return_predictions=False`` returns None, for callbacks that write.
        """
        if return_predictions is not None:
            check_flags(return_predictions=return_predictions)
        request = self._evaluation_request("predict", model, dataloaders, ckpt_path, datamodule)
        request.keep_predictions = return_predictions is not False
        results: list[Any] = self._launched_or_here("predict", request)
        if return_predictions is False:
            return None
        return results[0] if len(results) == 1 else results

    def _evaluate(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        check_flags(verbose=verbose)
        request = self._evaluation_request(stage, model, dataloaders, ckpt_path, datamodule)
        results: list[dict[str, float]] = self._launched_or_here(stage, request)
        if verbose and not self.settings.barebones:
            for metrics in results:
                shown = ", ".join(f"{name} = {value:.5g}" for name, value in sorted(metrics.items()))
                self.note(f"{stage}: {shown or 'nothing was logged'}")
        return results

    def _evaluation_request(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, datamodule: Any
    ) -> FitRequest:
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        module = model if model is not None else self.last_module
        if module is None:
            raise ConfigurationError(f"Trainer.{stage} was given no model, and none was fitted before: pass model=...")
        if datamodule is None and model is None:
            datamodule = self.datamodule
        given = {stage: dataloaders}
        check_evaluation(stage, module, given, datamodule, self.fabric.resources, self.use_distributed_sampler)
        return FitRequest(module, given, datamodule, checked_checkpoint_path(ckpt_path))

    def _launched_or_here(self, stage: str, request: FitRequest) -> Any:
        """Run a stage in this rank; where ranks are still to be started, start them."""
        resources = self.fabric.resources
        place = resources.place
        # One rank that is to be started again needs somebody to do so too.
        restarts = bool(self.max_restarts) and place.launcher is None and place.size == 1
        if (resources.must_launch or restarts) and can_rerun_script():
            # This process only watches from here on; the ranks come to this line by running the script.
            launch_script(resources.world_size, self.max_restarts, self.writes, resources.strategy.libraries)
        if self.max_restarts and place.launcher != "phalanx":
            started = "there is no script to run again" if place.launcher is None else f"{place.launcher} started it"
            self.note(f"max_restarts={self.max_restarts} has no effect on this run, since {started}.")
        return run_in_function(self, stage, request) if resources.must_launch else run_stage(self, stage, request)

    # ---- the run under way ----------------------------------------------------------------------------------------

    def attach_run(self, run: Run) -> None:
        """Make a run the current one; an evaluation goes on counting where the last fit ended."""
        self.run = run
        if run.stage != "fit":
            run.progress = self.last_progress

    def attach_loop(self, loop: FitLoop) -> None:
        """Make a loop the current one."""
        self.loop = loop

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

    # ---- what callbacks and users do ------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for and agreed on; set it on any rank and all stop after the same step."""
        return super().should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.request_stop("")
        elif self.run is not None:
            self.run.triggers.raised.pop("stop", None)
            self.raise_trigger("go_on")

    def request_stop(self, reason: str) -> None:
        """Stop all ranks after the same step; the first reason is shown at the end."""
        self.raise_trigger("stop", reason)

    def raise_trigger(self, name: str, payload: Any = None) -> None:
        """Raise a trigger on this rank: all ranks see it at the next boundary. ``payload``: JSON values."""
        if self.run is not None:
            self.run.triggers.set(name, payload)

    def set_accumulation(self, schedule: AccumulationSchedule) -> None:
        """Replace the accumulation schedule, before training starts."""
        self.accumulation = schedule

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send figures to all loggers at the current step; ``callback_metrics`` has them too."""
        if self.run is not None:
            self.run.loggers.log_metrics(dict(metrics), self.run.log_step)
            self.run.metrics["callback"].update(metrics)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, asynchronous: bool = False) -> None:
        """Save the run as it stands after the last optimizer step. Collective.

        Args:
            filepath: the checkpoint's directory.
            weights_only: save the model alone; no run can be resumed from that.
            asynchronous: return once the state is copied, and write it behind the training. One save is under way at a
                time: the next one waits, and so does the end of the fit. A failure is told of at the step after it is
                known, and training goes on; the third in a row ends the run.

        Raises:
            NonFiniteError: a weight is NaN or infinite; nothing was written.
            StorageError: it could not be written; what was there is untouched.
        """
        run = self.run
        if run is None:
            raise ConfigurationError("save_checkpoint works while a run is under way: call it in a hook or a callback.")
        path = absolute(filepath)
        run.saver.save(SaveOrder(path, weights_only, asynchronous, tolerant=asynchronous))

    def export(
        self,
        path: str | Path,
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str | None = None,
    ) -> Path:
        """Write the weights alone, as plain safetensors; return the path. Collective while a run is under way.

        In a hook they are those after the last optimizer step, under any strategy, in the dtype of its updates. After a
        fit they are what the module holds, and rank 0 alone writes.

        Args:
            path: a file that does not exist yet, or a directory, which gets ``model.safetensors``.
            dtype: write floating point tensors in it, such as ``"bf16"``.
            max_shard_size: make ``path`` a directory of files of at most so much (``"5GB"``) and an index.

        Raises:
            ConfigurationError: there is no module, ``path`` exists, or a number does not fit into ``dtype``.
            StorageError: it cannot be written.
        """
        target = Path(path)
        if self.run is not None:
            self.run.check_together("export")
            return export_run(self.run, target, dtype, max_shard_size)
        if self.last_module is None:
            raise ConfigurationError("export writes the weights of a module that was fitted or evaluated: fit first.")
        check_export(dtype, max_shard_size)
        return export_module(self.last_module, target, dtype, max_shard_size) if self.is_global_zero else target

    def note(self, text: str) -> None:
        """Show a person one line, on rank 0."""
        if not self.is_global_zero:
            return
        shown = next((show for callback in self.callbacks if (show := getattr(callback, "show", None))), say)
        shown(text)

    def print(self, *args: Any) -> None:
        """Print on rank 0."""
        self.note(" ".join(map(str, args)))


def _set_backends(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's switches for determinism and for cuDNN's search of algorithms, where they were given."""
    if deterministic is not None:
        if deterministic not in (True, False, "warn"):
            raise ConfigurationError(f"deterministic={deterministic!r} must be True, False or 'warn'.")
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
