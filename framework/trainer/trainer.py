"""``Trainer``: checks settings, assembles a ``Run`` and calls a loop. It contains no training logic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..checkpoint.save_request import SaveRequest
from ..core.absent_names import lacks, must_be_none
from ..core.arguments import names_arguments, takes
from ..core.errors import ConfigurationError, is_count
from ..core.foreign_names import MEMBERS
from ..core.interception import current_interceptor
from ..core.precision import LossScaler
from ..core.registry import CALLBACKS
from ..distributed.control import Signal
from ..distributed.world import World
from ..fabric.fabric import Fabric
from ..loop.fit_plan import estimate_steps
from ..loop.recovering_step import check_strategy
from ..metrics.hparams_text import hyperparameters_to_log
from ..parallel.compilation import compilation_of
from ..parallel.resources import RankProperties, Resources
from ..parallel.strategy import Strategy
from ..pretrained import folder_order
from ..resume import check_export, export_module, export_run, make_ready
from ..resume.resume_point import checked_checkpoint_path
from ..run.run_metrics import as_numbers
from ..storage.cached_url import local_place
from ..system.atomic_files import absolute
from ..system.console import folded, print_line, terminal_columns
from ..system.entry_script import return_to_directory
from ..system.environment import assigned_run, fix_cublas_workspace, script_overrides
from ..system.run_directory import RunDirectory

# Imported when they are called: see __init__.py.
from . import (
    BatchSizeTest,
    LearningRateTest,
    open_report,
    plan_memory,
    run_batch_size_search,
    run_range_test,
    save_ended_fit,
    start_of_search,
    write_pretrained,
)
from .checks import check_evaluation, check_fit, check_plan, check_units, split_datamodule
from .plan_target import PlanTarget
from .plugins import resolve_callbacks, resolve_loggers
from .resolved_settings import Setting, Settings, resolve_settings
from .rules import flag
from .script_ranks import start_script_ranks
from .session import Session, StageRequest
from .settings import TrainerSettings
from .stage_records import rank_batches
from .stage_start import start_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..api.callback import Callback
    from ..core.accumulation import AccumulationSchedule
    from ..core.optimizer_config import SchedulerConfig
    from ..core.progress import Progress
    from ..loop.fit_loop import FitLoop
    from ..memory.memory_plan import MemoryPlan
    from ..metrics.logger import Logger
    from ..parallel.compilation import Compilation
    from ..profiling.throughput import Throughput
    from ..resume.step_record import StepRecord
    from ..run.run import Run
    from ..state.weight_averages import Average, AverageSettings
    from ..watchdog.heartbeat import Heartbeat
    from .batch_sizes import BatchSizes
    from .learning_rates import LearningRates
    from .run_report import RunReport
    from .session import TrainerState

_DEFAULT_NAME = "phalanx_logs"


class TrainerFabric(Fabric):
    """The Fabric of a Trainer: with one device, rank 0 of several may use it alone."""

    _may_be_alone = True


@lacks(MEMBERS["Trainer"])
class Trainer(RankProperties):
    """Trains, validates, tests and predicts.

    The arguments are keyword arguments; ``help(Trainer.__init__)`` lists them.

    Raises:
        ConfigurationError: an argument is unknown, invalid or contradicts another one.

    Example:
        >>> trainer = Trainer(max_epochs=3, devices=2, strategy="fsdp", precision="bf16-mixed")
        >>> trainer.fit(module, train_loader, val_loader, ckpt_path="auto")
    """

    max_epochs = Setting(lambda settings: settings.max_epochs)
    min_epochs = Setting(lambda settings: settings.min_epochs)
    max_steps = Setting(lambda settings: settings.max_steps)
    min_steps = Setting(lambda settings: settings.min_steps)
    fast_dev_run = Setting(
        lambda settings: settings.fast_dev_run if settings.fast_dev_run > 1 else bool(settings.fast_dev_run)
    )
    limit_train_batches = Setting(lambda settings: settings.limits["train"])
    limit_val_batches = Setting(lambda settings: settings.limits["validate"])
    limit_test_batches = Setting(lambda settings: settings.limits["test"])
    limit_predict_batches = Setting(lambda settings: settings.limits["predict"])
    overfit_batches = Setting(lambda settings: settings.overfit_batches)
    check_val_every_n_epoch = Setting(lambda settings: settings.check_val_every_n_epoch)
    val_check_interval = Setting(lambda settings: settings.val_check_interval)
    num_sanity_val_steps = Setting(lambda settings: settings.num_sanity_val_steps)
    log_every_n_steps = Setting(lambda settings: settings.log_every_n_steps)
    gradient_clip_val = Setting(lambda settings: settings.clipping[0])
    gradient_clip_algorithm = Setting(lambda settings: settings.clipping[1])
    enable_autolog_hparams = Setting(lambda settings: bool(settings.given.enable_autolog_hparams))
    barebones = Setting(lambda settings: settings.barebones)
    profiler = Setting(lambda settings: settings.profiler)
    verbose = Setting(lambda settings: settings.verbose)
    reload_dataloaders_every_n_epochs = Setting(lambda settings: settings.given.reload_dataloaders_every_n_epochs)
    default_root_dir = Setting(lambda settings: str(settings.root))

    @takes(TrainerSettings)
    def __init__(self, given: TrainerSettings) -> None:
        """Check and resolve all arguments. No process or file is created before a stage is called."""
        return_to_directory()
        overrides = script_overrides()
        requested = given if overrides is None else replace(given, **overrides.trainer)
        # Under `phalanx plan` the Trainers of a script have settings for one rank of this machine.
        interceptor = current_interceptor()
        given = requested if interceptor is None else interceptor.settings(requested)
        settings = resolve_settings(given)
        resources = (given.accelerator, given.strategy, given.devices, given.num_nodes, given.precision)
        fabric = TrainerFabric(*resources, compile=given.compile, parallel=given.parallel)
        loggers = resolve_loggers(given.logger, settings)
        name = next((logger.name for logger in loggers if logger.name), _DEFAULT_NAME)
        self._session = Session(
            view=self,
            requested=requested,
            settings=settings,
            fabric=fabric,
            loggers=loggers,
            callbacks=resolve_callbacks(settings),
            directory=_directory(loggers, settings, name),
            accumulation=settings.accumulation,
        )
        self._session.use_loggers(loggers)
        _set_backends(given.deterministic, given.benchmark)
        if crowding := fabric.resources.crowding:
            self.note(crowding)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups, writers and loaders belong to one Trainer: a copy has its arguments, its last outcome, and the
        # attributes that a subclass or a program has added.
        session, requested = self._session, self._session.requested
        given = {each.name: getattr(requested, each.name) for each in fields(requested)}
        if isinstance(given["strategy"], Strategy):
            given["strategy"] = given["strategy"].clone()
        return {
            "given": given,
            "attributes": {name: value for name, value in vars(self).items() if name != "_session"},
            "outcome": None if session.module is None else session.outcome(),
            "module": session.module,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Trainer.__init__(self, **state["given"])
        for name, value in state["attributes"].items():
            setattr(self, name, value)
        if state["outcome"] is not None:
            self._session.take_outcome(state["outcome"])
            self._session.use_module(state["module"])

    # ---- entry points -----------------------------------------------------------------------------------------------

    @names_arguments
    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        pretrained: str | Path | None = None,
    ) -> None:
        """Train a module. Collective.

        Args:
            model: the module. The result of ``torch.compile`` is compiled like ``Trainer(compile=True)`` does, with
                the options of that call.
            train_dataloaders: a loader, or a list or dict of loaders whose batches are combined.
            val_dataloaders: a loader or several.
            datamodule: provides the loaders instead.
            ckpt_path: resume from a path, ``"last"``, ``"best"``, or ``"auto"``: the newest checkpoint of this run that
                verifies, or a fresh start. ``"auto"`` continues the directory of the run, with its loggers; the others
                start a new version of it.
            weights_only: accepted for programs written for Lightning, by all stages: nothing is ever unpickled, and a
                resumed fit restores its entire state.
            pretrained: a folder or file of weights to start from, see ``TrainModule.load_pretrained``. A resumed fit
                loads its checkpoint instead.

        Raises:
            ConfigurationError: an argument is invalid. Raised before any process starts.
            CheckpointError: the checkpoint or the weights are missing, damaged or do not match.
            NonFiniteError: on all ranks, with ``nonfinite="raise"``. On a CPU: a loss or gradient is NaN or infinite,
                and its update was not made. On CUDA losses alone are checked, and the error is raised later, usually
                by one or two steps and at most by 16 micro-batches, when updates with it have been made.
        """
        flag("weights_only", weights_only)
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        model, compilation = self._compilation_of(model)
        request = StageRequest(model, given, datamodule, compilation=compilation)
        check_fit(self._session, request)
        if self.loggers:
            hyperparameters_to_log(model, datamodule)
        for callback in self.callbacks:
            callback.check(self, "fit")
        check_units(model, self.settings, self.callbacks)
        if (assigned := assigned_run()) is not None and assigned.continues:
            ckpt_path = "auto"
        request.ckpt_path = checked_checkpoint_path(ckpt_path)
        request.start_from(pretrained)
        start_stage(self._session, "fit", request)

    @names_arguments
    def plan(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        *,
        activation_bytes: int | None = None,
        datamodule: DataModule | None = None,
        ranks: int | None = None,
        ranks_per_node: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        parallel: Mapping[str, int] | str | None = None,
        rehearse: str | Strategy | None = None,
    ) -> MemoryPlan:
        """Return the memory that each strategy needs per rank, and that available; printed, it is a table.

        It does not train or start ranks. Unless ``activation_bytes`` is given, it runs a micro-batch on a copy of the
        module in this process, on its device, to measure the tensors saved for backward. The module, generators and
        loaders are unchanged.

        Args:
            activation_bytes: the bytes that the forward pass of a micro-batch saves for backward; needed if
                ``training_step`` uses ``self.trainer``.
            ranks: plan for this number of ranks, and not for those of the Trainer.
            ranks_per_node: how many of them share a node; by default all, but at most 8.
            device_memory: plan for GPUs of this memory, in bytes or as ``"80GB"``, and not for this machine.
            host_memory: plan for nodes of this memory.
            parallel: plan with these degrees, and not with those of the Trainer.
            rehearse: a strategy whose row is measured by a rehearsal, in a process of its own, and not by formulas;
                ``"auto"`` for those by which a fit chooses. Values that the step reads from floating-point data or
                parameters, such as by ``.item()``, are 1 in a rehearsal.

        Raises:
            ConfigurationError: the module or the data could not be used by ``fit``, or a number is not one.
        """
        target = PlanTarget(ranks, ranks_per_node, device_memory, host_memory, parallel, rehearse)
        target.check(self.fabric.resources)
        if activation_bytes is not None and not is_count(activation_bytes, 0):
            raise ConfigurationError(f"activation_bytes={activation_bytes!r} must be a number of bytes, 0 or more.")
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        model, _ = compilation_of(model)
        request = StageRequest(model, {"train": train_dataloaders}, datamodule)
        check_plan(self._session, request, activation_bytes)
        return plan_memory(self._session, request, activation_bytes, target)

    @names_arguments
    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Validate, with the weights of ``ckpt_path`` if given; return the metrics of each loader. Collective."""
        flag("weights_only", weights_only)
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    @names_arguments
    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Test, with the weights of ``ckpt_path`` if given; return the metrics of each loader. Collective."""
        flag("weights_only", weights_only)
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    @names_arguments
    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Predict; return the outputs of all batches on every rank, in the dataset's order. Collective.

        With several loaders, return one list per loader. With ``return_predictions=False`` return None, for callbacks
        that write predictions.
        """
        flag("weights_only", weights_only)
        if return_predictions is not None:
            flag("return_predictions", return_predictions)
        request = self._evaluation_request("predict", model, dataloaders, ckpt_path, datamodule)
        request.keep_predictions = return_predictions is not False
        results: list[Any] = start_stage(self._session, "predict", request)
        if return_predictions is False:
            return None
        return results[0] if len(results) == 1 else results

    def _evaluate(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        flag("verbose", verbose)
        request = self._evaluation_request(stage, model, dataloaders, ckpt_path, datamodule)
        results: list[dict[str, float]] = start_stage(self._session, stage, request)
        if verbose and self.settings.verbose:
            for metrics in results:
                shown = ", ".join(f"{name} = {value:.5g}" for name, value in sorted(metrics.items()))
                line = f"{stage}: {shown or 'nothing was logged'}"
                self.note("\n".join(folded(line, terminal_columns(), "  ")))
        return results

    def _evaluation_request(
        self, stage: str, model: TrainModule | None, dataloaders: Any, ckpt_path: Any, datamodule: Any
    ) -> StageRequest:
        dataloaders, datamodule = split_datamodule(dataloaders, datamodule)
        module, compilation = self._session.module, self._session.compilation
        if model is not None:
            module, compilation = self._compilation_of(model)
        if module is None:
            raise ConfigurationError(f"Trainer.{stage} was given no model, and none was fitted before: pass model=...")
        if datamodule is None and model is None:
            datamodule = self.datamodule
        request = StageRequest(module, {stage: dataloaders}, datamodule, compilation=compilation)
        check_evaluation(self._session, stage, request)
        request.ckpt_path = checked_checkpoint_path(ckpt_path)
        return request

    def _compilation_of(self, model: Any) -> tuple[Any, Compilation | None]:
        """Return the module in the result of ``torch.compile`` with its compilation; another one with None."""
        module, compilation = compilation_of(model)
        if compilation is not None:
            compilation.check(self.strategy)
        return module, compilation

    # ---- searches ---------------------------------------------------------------------------------------------------

    @names_arguments
    def find_lr(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> LearningRates:
        """Train a copy of a module with growing learning rates; return the losses, averaged over ranks. Collective.

        The module, generators, callbacks, loggers and files are unchanged. Callbacks and schedulers take no part.

        Args:
            model: the module, with automatic optimization.
            train_dataloaders: a loader, or a list or dict of loaders whose batches are combined.
            datamodule: provides the loaders instead.
            min_lr: the first learning rate.
            max_lr: the last one.
            num_training: optimizer steps.
            mode: ``"exponential"`` for a constant ratio of consecutive rates, ``"linear"`` for a constant difference.
            early_stop_threshold: end when the smoothed loss exceeds its minimum by this factor; None: do not.

        Raises:
            ConfigurationError: an argument is invalid, the strategy is a pipeline, or several ranks would have to be
                started without a script.
        """
        test = LearningRateTest(min_lr, max_lr, num_training, mode, early_stop_threshold)
        test.check()
        strategy = self.fabric.resources.strategy
        if strategy.window_passes is not None:
            raise ConfigurationError(
                f"find_lr reads the loss of each micro-batch before its backward pass, and strategy={strategy.name!r} "
                "runs the passes of a window together: search with strategy='fsdp' or 'ddp' and the same global batch."
            )
        request = self._start_search("find_lr", model, train_dataloaders, datamodule)
        return run_range_test(self._session, request, test)

    @names_arguments
    def find_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        mode: str = "binsearch",
        steps_per_trial: int = 3,
        init_val: int | None = None,
        max_trials: int = 25,
        max_val: int | None = None,
    ) -> BatchSizes:
        """Return the largest micro-batch with which a step fits into the memory of all ranks. Collective.

        Each trial trains a copy of the module; a rank that runs out of memory in the forward pass, the backward pass or
        the update makes the size too large for all ranks. The module, generators, callbacks, loggers and files are
        unchanged. Callbacks and schedulers take no part.

        Args:
            model: the module, with automatic optimization.
            train_dataloaders: a ``DataLoader`` over a map-style dataset. Its batch size is not used.
            datamodule: provides the loader instead.
            mode: ``"binsearch"`` for the largest size; ``"power"`` for the largest of those that doubling or halving
                gives, in fewer trials.
            steps_per_trial: optimizer steps of a trial, at least 2.
            init_val: the first size; None: the one that ``plan`` estimates, or 2.
            max_trials: the most sizes to try.
            max_val: the largest size to try; None: the samples of an epoch of one rank.

        Raises:
            ConfigurationError: an argument is invalid, no size that was tried fits, or the data, the strategy or a
                layer does not allow ranks to continue after one has run out of memory.
            OutOfMemoryError: torch's, on a rank for which one sample is too large; other ranks raise ``LoopError``.
        """
        test = BatchSizeTest(mode, steps_per_trial, init_val, max_trials, max_val)
        test.check()
        resources = self.fabric.resources
        check_strategy(resources.strategy, "find_batch_size", "compare short fits")
        request = self._start_search("find_batch_size", model, train_dataloaders, datamodule)
        plan = plan_memory(self._session, request, None, PlanTarget())
        ranks, name = resources.data_size, plan.chosen if resources.auto else resources.strategy.name
        samples, guess = start_of_search(plan, name, resources.precision, ranks, init_val)
        return run_batch_size_search(self._session, request, test, self._least(guess), samples, ranks)

    def _least(self, guess: int) -> int:
        """Return the smallest guess of the ranks, since the memory that is free differs between them. Collective."""
        resources = self.fabric.resources
        if resources.world_size == 1 or resources.must_launch:
            return guess
        world = self.fabric.world
        try:
            return min(world.all_gather_object(guess))
        finally:
            world.close()

    def _start_search(
        self, name: str, model: TrainModule, train_dataloaders: Any, datamodule: DataModule | None
    ) -> StageRequest:
        """Check the arguments of a search, and start the ranks."""
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        resources = self.fabric.resources
        request = StageRequest(model, {"train": train_dataloaders}, datamodule)
        check_fit(self._session, request)
        if not model.automatic_optimization:
            raise ConfigurationError(
                f"{name} tries optimizer steps, and with automatic_optimization = False training_step decides when to "
                "step: compare short fits."
            )
        if hasattr(train_dataloaders, "__next__"):
            raise ConfigurationError(
                f"{name} got an iterator, which can be read only once, so that nothing would be left for the fit: give "
                "a DataLoader or a list."
            )
        if current_interceptor() is None and resources.launched is None:
            start_script_ranks(self._session, self.writes)
            if resources.must_launch:
                raise ConfigurationError(
                    f"{name} starts {resources.world_size} ranks by running the script again, and there is none here: "
                    "use devices=1, or a script."
                )
        return request

    # ---- actions ----------------------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed on a stop; set it on any rank to stop all ranks after the same step."""
        return self.run is not None and self.run.stop_requested

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
        self._session.accumulation = schedule

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
                and training continues; the third failure in a row ends the run. A save after a fit is written before
                the method returns.
            storage_options: must be None; Lightning has the argument.

        Raises:
            ConfigurationError: the call is within an optimizer step, or there is no state to save: no fit has ended, or
                it has ended with an error, or in ranks that were forked, or an evaluation has loaded other weights
                since then.
            NonFiniteError: a weight is NaN or infinite; no checkpoint was written.
            StorageError: the checkpoint could not be written; an existing one is unchanged.
        """
        must_be_none("save_checkpoint(storage_options=...)", storage_options, "checkpoints are written to directories")
        path = absolute(local_place(filepath))
        if self.run is None:
            save_ended_fit(self._session, path, weights_only)
            return
        self.request_save(SaveRequest(path, weights_only, asynchronous, tolerant=asynchronous))

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

    # ---- actions of callbacks that take part in the engine ----------------------------------------------------------

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

    # ---- the session ------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings, resolved."""
        return self._session.settings

    @property
    def fabric(self) -> Fabric:
        """The Fabric beneath this Trainer."""
        return self._session.fabric

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks in the order of their calls, except those that run last."""
        return self._session.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._session.use_callbacks(callbacks)

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._session.loggers

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger]) -> None:
        self._session.use_loggers(loggers)

    @property
    def state(self) -> TrainerState:
        """The method in progress, the stage that it executes, and how the last method ended."""
        return replace(self._session.state, stage=self._session.stage)

    @property
    def seed(self) -> int:
        """The seed of the data order and the generators of the current or last run."""
        return self._session.seed

    @property
    def run(self) -> Run | None:
        """The run in progress; None between runs."""
        return self._session.run

    @property
    def loop(self) -> FitLoop | None:
        """The loop of the fit in progress."""
        return self._session.loop

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last stage."""
        return self._session.datamodule

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run."""
        return self._session.directory

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this rank, which the watchdog reads."""
        return self._session.heartbeat

    # ---- progress ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The counters of the current or last fit."""
        fit = self._fit
        return self._session.last_progress if fit is None else fit.progress

    @property
    def _fit(self) -> Run | None:
        """The run in progress if it is a fit."""
        return self.run if self.run is not None and self.run.stage == "fit" else None

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0; after a fit the number of completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return self.progress.global_step

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check of the validation loop is running."""
        return self._session.stage == "sanity_check"

    @property
    def training(self) -> bool:
        """Whether ``fit`` is training, not validating."""
        return self._session.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation is running, in ``validate`` or in ``fit``; excludes the sanity check."""
        return self._session.stage == "validate"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is running, including the sanity check."""
        return self._session.stage in ("validate", "test", "sanity_check")

    @property
    def testing(self) -> bool:
        """Whether ``test`` runs."""
        return self._session.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` runs."""
        return self._session.stage == "predict"

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended early."""
        return self.state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether any rank has received a preemption signal, and the run is about to save and end."""
        return self.run is not None and self.run.preempted_by is not None

    @property
    def fired_triggers(self) -> set[str]:
        """The names of the signals that were handled at the last boundary, the same on every rank."""
        return set(self.run.triggers.fired) if self.run is not None else set()

    @property
    def latest_loss(self) -> Any:
        """The loss of the last micro-batch on this rank: a number, or a tensor on its device."""
        return self.run.latest_loss if self.run is not None else None

    # ---- the parts of the run ---------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainModule:
        """The module of the current or last run."""
        if self._session.module is None:
            raise ConfigurationError("this Trainer has no module yet: call fit, validate, test or predict.")
        return self._session.module

    @property
    def lightning_module(self) -> TrainModule | None:
        """The module of the current or last run; None before the first."""
        return self._session.module

    model = lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the current or last fit; after a fit that shards its state, an empty list."""
        fit = self._fit
        return self._session.records.optimizers if fit is None else fit.optimizers

    @property
    def lr_schedulers(self) -> list[SchedulerConfig]:
        """The schedulers of the current or last fit, with their intervals, as long as there are ``optimizers``."""
        fit = self._fit
        return self._session.records.schedulers if fit is None else fit.schedulers

    lr_scheduler_configs = lr_schedulers

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """All callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if callback.runs_last]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that saves checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Callback]:
        """All callbacks that stop early."""
        kind = CALLBACKS.load("early_stopping")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first callback that stops early."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The first callback that shows a progress bar."""
        kind = CALLBACKS.load("progress_bar")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self._session.use_loggers([] if logger is None else [logger])

    # ---- files ------------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """This run's directory."""
        return self.directory.path

    @property
    def checkpoint_dir(self) -> Path:
        """The default directory of this run's checkpoints."""
        return self.directory.checkpoints

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger that has one; without loggers ``default_root_dir``."""
        if not self.loggers:
            return self.default_root_dir
        return next((directory for logger in self.loggers if (directory := logger.log_dir)), None)

    @property
    def writes(self) -> bool:
        """Whether this run writes files."""
        return self._session.writes

    # ---- metrics ----------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values, for callbacks."""
        return self._metrics("callback")

    @property
    def outdated_metrics(self) -> frozenset[str]:
        """The names of ``callback_metrics`` that a validation measured at earlier weights."""
        return self.run.metrics.outdated(self.progress.global_batch) if self.run is not None else frozenset()

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values that were last sent to the loggers."""
        return self._metrics("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that were logged with ``prog_bar=True``, as numbers. On a GPU, reading them waits for it."""
        return as_numbers(self._metrics("progress_bar"))

    def _metrics(self, kind: str) -> dict[str, Tensor]:
        return self.run.metrics.view(kind) if self.run is not None else self._session.last_metrics[kind]

    # ---- speed ------------------------------------------------------------------------------------------------------

    @property
    def throughput(self) -> Throughput | None:
        """The speed of the current or last fit, over all ranks; None before its first step has ended."""
        loop = self._session.loop
        return self._session.records.throughput if loop is None else loop.run.meter.throughput()

    # ---- loaders ----------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loaders of the current or last fit, as they were passed to it or returned by a hook, or None.

        A loop iterates over copies of these objects, which yield this rank's part.
        """
        return self._session.records.loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the current or last ``fit`` or ``validate``, or None."""
        return self._session.records.loaders.get("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The loaders of the current or last ``test``, or None."""
        return self._session.records.loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loaders of the current or last ``predict``, or None."""
        return self._session.records.loaders.get("predict")

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint that the current or last stage has loaded, or None."""
        return self._session.records.ckpt_path

    @property
    def named_checkpoint(self) -> str | None:
        """``ckpt_path`` if the user chose the checkpoint; None if ``"auto"`` or a restart did."""
        return self._session.records.named_checkpoint

    # ---- numbers of batches -----------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of each rank in an epoch of the current or last fit; infinite if unknown."""
        loop = self._session.loop
        if loop is None:
            return self._session.records.training_batches
        return math.inf if loop.windows.end is None else loop.windows.end

    @property
    def num_val_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last validation."""
        return self._batches("validate")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the sanity check of the current or last fit."""
        steps = self._session.settings.num_sanity_val_steps
        return [batches if steps == -1 else min(steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last ``test``."""
        return self._batches("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last ``predict``."""
        return self._batches("predict")

    def _batches(self, stage: str) -> list[int | float]:
        plan = self._session.plan_of(stage)
        return list(self._session.records.batches.get(stage, [])) if plan is None else rank_batches(plan)

    @property
    def val_enabled(self) -> bool:
        """Whether the running fit validates."""
        return self._session.loop is not None and self._session.loop.plan.validation is not None

    enable_validation = val_enabled

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of the current optimizer step."""
        return self._session.accumulation(self.progress.epoch, self.progress.global_step)

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a full micro-batch of a rank in the current or last fit; None if unknown."""
        loop = self._session.loop
        return self._session.records.micro_batch_size if loop is None else loop.windows.source.micro_batch_size

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch in progress is the last of its epoch, as far as the length is known."""
        return self.progress.batch_in_epoch >= self.num_training_batches - 1

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the entire current or last fit; infinite if unknown."""
        if self._session.loop is not None:
            return self._session.loop.estimated_steps()
        if self._session.records.length is None:
            raise ConfigurationError(
                "estimated_stepping_batches is known from configure_optimizers of the first fit on: read it there."
            )
        return estimate_steps(*self._session.records.length)

    # ---- the ranks --------------------------------------------------------------------------------------------------

    @property
    def _resources(self) -> Resources:
        return self._session.resources

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self._session.fabric.world

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._session.fabric.strategy

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return self._session.fabric.precision.name

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of the precision; None for a precision without a loss scale."""
        return self._session.fabric.scaler

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices."""
        resources = self._session.resources
        return list(range(resources.devices)) if resources.indices is None else list(resources.indices)

    @property
    def num_devices(self) -> int:
        """The number of ranks on each node."""
        return self._session.resources.devices

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._session.resources.num_nodes


def _directory(loggers: list[Logger], settings: Settings, name: str) -> RunDirectory:
    """Return the directory of the runs: that of a sweep, if this process runs one of its trials.

    Its root is that of the first logger, if the user gave it one.
    """
    if (assigned := assigned_run()) is not None:
        return RunDirectory(Path(assigned.root), assigned.name, 0)
    given = loggers[0].given_save_dir if loggers else None
    return RunDirectory(settings.root if given is None else absolute(given), name, 0)


def _set_backends(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's flags for determinism and cuDNN's benchmark mode, if given."""
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic and torch.backends.cuda.is_built():
            fix_cublas_workspace()
    if benchmark is not None:
        torch.backends.cudnn.set_flags(_benchmark=benchmark)
