"""``Trainer``: checks settings, assembles a ``Run`` and calls a loop. It contains no training logic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..api.absent_names import TRAINER
from ..api.data_module import DataModule
from ..api.train_module import TrainModule
from ..core.absent_names import lacks
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, is_count
from ..metrics.hparams_text import hyperparameters_to_log
from ..parallel.compilation import compilation_of
from ..resume.resume_point import checked_checkpoint_path
from ..system.atomic_files import absolute
from ..system.console import folded, terminal_columns
from ..system.environment import fix_cublas_workspace
from ..system.run_directory import RunDirectory
from . import plan_memory
from .argument_hints import takes
from .checks import check_evaluation, check_fit, check_plan, split_datamodule
from .copied_trainer import restore_copy, state_of_copy
from .interception import requested_settings, settings_in_use
from .lone_stage import TrainerFabric
from .plan_target import PlanTarget
from .plugins import resolve_callbacks, resolve_loggers
from .resolved_settings import resolve_settings
from .rules import flag
from .searches import TrainerSearches
from .session import Session, StageRequest
from .settings import TrainerSettings
from .stage_start import start_stage

if TYPE_CHECKING:
    from ..memory.memory_plan import MemoryPlan
    from ..metrics.logger import Logger
    from ..parallel.compilation import Compilation
    from ..parallel.strategy import Strategy
    from .resolved_settings import Settings

_DEFAULT_NAME = "phalanx_logs"


@lacks(TRAINER)
class Trainer(TrainerSearches):
    """Trains, validates, tests and predicts.

    The arguments are keyword arguments; ``help(Trainer.__init__)`` lists them.

    Raises:
        ConfigurationError: an argument is unknown, invalid or contradicts another one.
    """

    @takes(TrainerSettings)
    def __init__(self, given: TrainerSettings) -> None:
        """Check and resolve all arguments. No process or file is created before a stage is called."""
        requested = requested_settings(given)
        given = settings_in_use(requested)
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
            directory=RunDirectory(_root(loggers, settings), name, 0),
            accumulation=settings.accumulation,
        )
        self._session.use_loggers(loggers)
        _set_backends(given.deterministic, given.benchmark)
        if crowding := fabric.resources.crowding:
            self.note(crowding)

    def __getstate__(self) -> dict[str, Any]:
        others = {name: value for name, value in vars(self).items() if name != "_session"}
        return state_of_copy(self._session, others)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Trainer.__init__(self, **state["given"])
        for name, value in state["attributes"].items():
            setattr(self, name, value)
        restore_copy(self._session, state)

    # ---- entry points ---------------------------------------------------------------------------------------------

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
                verifies, or a fresh start.
            weights_only: accepted for programs written for Lightning, by all stages: nothing is ever unpickled, and a
                resumed fit restores its entire state.
            pretrained: a folder or file of weights to start from, see ``TrainModule.load_pretrained``. A resumed fit
                loads its checkpoint instead.

        Raises:
            ConfigurationError: an argument is invalid. Raised before any process starts.
            CheckpointError: the checkpoint or the weights are missing, damaged or do not match.
            NonFiniteError: a loss or gradient is NaN or infinite.
        """
        flag("weights_only", weights_only)
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        model, compilation = self._compilation_of(model)
        check_fit(model, given, datamodule, self.settings, self.fabric.resources)
        if self.loggers:
            hyperparameters_to_log(model, datamodule)
        for callback in self.callbacks:
            callback.check(self, "fit")
        request = StageRequest(model, given, datamodule, checked_checkpoint_path(ckpt_path), compilation=compilation)
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
            ranks: plan for this number of ranks, and not for those of the Trainer.
            ranks_per_node: how many of them share a node; by default all, but at most 8.
            device_memory: plan for GPUs of this memory, in bytes or as ``"80GB"``, and not for this machine.
            host_memory: plan for nodes of this memory.
            parallel: plan with these degrees, and not with those of the Trainer.
            rehearse: a strategy whose row is measured by a rehearsal, in a process of its own, and not by formulas;
                ``"auto"`` for those by which a fit chooses.

        Raises:
            ConfigurationError: the module or the data could not be used by ``fit``, or a number is not one.
        """
        target = PlanTarget(ranks, ranks_per_node, device_memory, host_memory, parallel, rehearse)
        target.check(self.fabric.resources)
        if activation_bytes is not None and not is_count(activation_bytes, 0):
            raise ConfigurationError(f"activation_bytes={activation_bytes!r} must be a number of bytes, 0 or more.")
        train_dataloaders, datamodule = split_datamodule(train_dataloaders, datamodule)
        given = {"train": train_dataloaders}
        model, _ = compilation_of(model)
        check_plan(
            model,
            given,
            datamodule,
            self.fabric.resources,
            self.settings.shards_data,
            activation_bytes,
        )
        return plan_memory(self._session, StageRequest(model, given, datamodule), activation_bytes, target)

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
        given = {stage: dataloaders}
        check_evaluation(stage, module, given, datamodule, self.fabric.resources, self.settings.shards_data)
        return StageRequest(module, given, datamodule, checked_checkpoint_path(ckpt_path), compilation=compilation)

    def _compilation_of(self, model: Any) -> tuple[Any, Compilation | None]:
        """Return the module in the result of ``torch.compile`` with its compilation; another one with None."""
        module, compilation = compilation_of(model)
        if compilation is not None:
            compilation.check(self.strategy)
        return module, compilation


def _root(loggers: list[Logger], settings: Settings) -> Path:
    """Return the root of the run's directory: that of the first logger, if the user gave it one."""
    given = loggers[0].given_save_dir if loggers else None
    return settings.root if given is None else absolute(given)


def _set_backends(deterministic: bool | str | None, benchmark: bool | None) -> None:
    """Set torch's flags for determinism and cuDNN's benchmark mode, if given."""
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic and torch.backends.cuda.is_built():
            fix_cublas_workspace()
    if benchmark is not None:
        torch.backends.cudnn.set_flags(_benchmark=benchmark)
