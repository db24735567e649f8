"""``TrainModule``: an ``nn.Module`` with training and evaluation steps, hooks and logging."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..checkpoint import open_checkpoint
from ..core.errors import ConfigurationError
from ..core.hyperparameters import HyperparametersMixin
from ..metrics.metric_log import MetricLog
from ..metrics.no_log import NoLog
from ..metrics.torchmetrics_state import logged_items
from ..state import rebuild_module

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer
    from torchmetrics import MetricCollection
    from typing_extensions import Self

    from ..fabric.fabric import Fabric
    from ..metrics.logger import Logger
    from .contracts import AttachedRun, CallbackContract, TrainerView

_LIVE = ("_run", "_metric_log")


class TrainModule(HyperparametersMixin, nn.Module):
    """Base class of models with their training. Override ``training_step``, ``configure_optimizers`` and other hooks.

    ``training_step`` computes the loss; then the framework runs backward, clips gradients, and steps the optimizer
    and the schedulers, unless ``automatic_optimization`` is False.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    """Whether a checkpoint must match exactly. If False, matching tensors are loaded and mismatches are reported."""
    checkpoint_renames: ClassVar[Mapping[str, str]] = {}
    """Renamed prefixes of parameter names, from those in checkpoints to the current ones: ``{"net": "body.net"}``."""
    example_input_array: Any = None
    _metric_log: MetricLog | NoLog | None
    _run: AttachedRun | None = None

    def __init__(self) -> None:
        super().__init__()
        self._run = None
        self._metric_log = None
        # The parameters that are toggled off, and whether they required gradients before.
        self._toggled: dict[nn.Parameter, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module does not belong to the run.
        state = {**self.__dict__, **dict.fromkeys(_LIVE)}
        if self._logs_directly:
            del state["log"]
        return state

    def attach(self, run: AttachedRun) -> None:
        """Make this module part of a run. Called by the Trainer."""
        self._run = run

    def detach(self) -> None:
        """Make this module independent of its run: optimizers are untoggled, and ``self.log`` does nothing."""
        self.untoggle_optimizer()
        self.log_to(None)
        self._run = None

    def log_to(self, log: MetricLog | NoLog | None) -> MetricLog | NoLog | None:
        """Make ``self.log`` write to another log, or to none; return the previous log. Called by loops."""
        before, self._metric_log = self._metric_log, log
        if self._logs_directly:
            del self.log
        # ``self.log`` becomes the log's own method, which saves a call and two look-ups per value, a third of its cost,
        # unless a subclass or a test has its own ``log``.
        if log is not None and type(self).log is TrainModule.log and "log" not in self.__dict__:
            self.log = log.log  # type: ignore[method-assign]
        return before

    @property
    def _logs_directly(self) -> bool:
        return isinstance(getattr(self.__dict__.get("log"), "__self__", None), MetricLog | NoLog)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the loss of a micro-batch, a 0-d tensor with the mean over its items, or a mapping with ``"loss"``.

        Returning None skips this micro-batch; its weight stays in the mean. Any subset of ranks may return None.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch; with several loaders also takes ``dataloader_idx=0``."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return predictions for one batch; the default calls the module on it."""
        return self(batch)

    def batch_weight(self, batch: Any) -> int | float | Tensor:
        """Return the number of items over which the batch's loss is averaged, such as its tokens without padding.

        The gradient of an optimizer step is that of the weighted mean over all micro-batches of its window, on all
        ranks.
        """
        return 1

    # ---- configuration --------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list of them, ``(optimizers, schedulers)``, or a dict.

        The dict has ``optimizer`` and ``lr_scheduler``: a scheduler, or a dict with ``scheduler``, ``interval``
        (``"epoch"`` or ``"step"``), ``frequency`` and ``monitor``.
        """
        return None

    def configure_model(self) -> None:
        """Build large layers here, under the strategy's context. May be called twice: build only what is missing."""

    def configure_tensor_parallel(self, mesh: Any) -> Mapping[str, Any] | None:
        """Define how layers are split for tensor parallelism. Called when the strategy shards the weights.

        Return a plan for ``torch.distributed.tensor.parallel.parallelize_module``, such as
        ``{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}``, or call ``parallelize_module``
        yourself and return None. Parameters have no data yet. Layers outside of the plan are computed
        identically by all ranks of a group, which see the same batches. Attributes that are changed here stay changed
        after the run.

        Args:
            mesh: the ``DeviceMesh`` of this rank's group, with one axis, ``"tensor"``.
        """
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[CallbackContract] | CallbackContract:
        """Return callbacks of this module; they replace the Trainer's callbacks of the same class."""
        return []

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before an update; override to clip differently, with ``clip_gradients``."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # ---- data -----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or write data; called on one rank of each node, before ``setup``."""

    def train_dataloader(self) -> Any:
        """Return the training loader, if none is passed to ``fit``."""

    def val_dataloader(self) -> Any:
        """Return one validation loader or several."""

    def test_dataloader(self) -> Any:
        """Return one test loader or several."""

    def predict_dataloader(self) -> Any:
        """Return one prediction loader or several."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for batches that are not collections of tensors."""
        return self.fabric.to_device(batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to transfer."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to pass to the step."""
        return batch

    # ---- hooks, in the order of a fit -----------------------------------------------------------------------------

    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_model_eval(self) -> None: ...
    def on_validation_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None: ...
    def on_test_model_train(self) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Apply an update. Backward has already run; ``optimizer_closure`` returns its loss."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the last update."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Advance a scheduler."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # ---- logging --------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        sync_dist: bool = True,
        batch_size: int | float | Tensor | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
        enable_graph: bool = False,
        sync_dist_group: Any = None,
        metric_attribute: str | None = None,
    ) -> None:
        """Log a number, a tensor with one element, or a torchmetrics ``Metric``. It does not synchronize.

        A step's value is this rank's. An epoch's value is the exact mean over all ranks, weighted by ``batch_size``
        (default: the first dimension of the batch's first tensor), or reduced by ``reduce_fx``: ``"mean"``, ``"sum"``,
        ``"min"``, ``"max"``. Defaults: in ``training_step`` the step, elsewhere the epoch. With both, the names get the
        suffixes ``_step`` and ``_epoch``. With ``rank_zero_only`` only rank 0 logs the name, and its value is used
        for all ranks. ``sync_dist``, ``enable_graph``, ``sync_dist_group`` and ``metric_attribute`` are accepted for
        modules written for Lightning, and change nothing.

        Raises:
            MetricError: the value has a type that cannot be logged.
        """
        sink = self._metric_log
        if sink is not None:
            sink.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, batch_size,
                add_dataloader_idx, rank_zero_only,
            )  # fmt: skip

    def log_dict(self, dictionary: Mapping[str, Any] | MetricCollection, **arguments: Any) -> None:
        """Log each item of a mapping, or of a torchmetrics ``MetricCollection``, with the arguments of ``log``."""
        for name, value in logged_items(dictionary):
            self.log(name, value, **arguments)

    # ---- manual optimization --------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several optimizers."""
        optimizers = self._live.manual_optimizers or self._live.optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several schedulers, or None."""
        schedulers = [config.scheduler for config in self._live.schedulers]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, with the precision's loss scale and the strategy's reduction before the next update."""
        self._live.manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Make only the parameters of this optimizer require gradients, until ``untoggle_optimizer``."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        kept = dict(self._toggled)
        for other in self._live.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in mine and parameter not in kept:
                        kept[parameter] = parameter.requires_grad
                        parameter.requires_grad = False
        self._toggled = kept
        self._live.trainability_changed()

    def untoggle_optimizer(self, optimizer: Optimizer | None = None) -> None:
        """Undo ``toggle_optimizer``."""
        toggled, self._toggled = self._toggled, {}
        for parameter, requires_grad in toggled.items():
            parameter.requires_grad = requires_grad
        if toggled:
            self._live.trainability_changed()

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Context of ``toggle_optimizer`` and ``untoggle_optimizer``."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters by ``"norm"`` (default) or by ``"value"``. Collective.

        Returns the norm before clipping, a 0-d tensor, when clipping by norm.
        """
        return self._live.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # ---- the run --------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> AttachedRun:
        if self._run is None:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no run: pass it to Trainer.fit, validate, test or predict."
            )
        return self._run

    @property
    def trainer(self) -> TrainerView:
        """The Trainer that runs this module."""
        return self._live.trainer

    @property
    def fabric(self) -> Fabric:
        """The Fabric of the Trainer."""
        return self._live.fabric

    @property
    def device(self) -> torch.device:
        """The device of the parameters, or of the run without parameters."""
        parameter = next(self.parameters(), None)
        if parameter is not None:
            return parameter.device
        return self._live.world.device if self._run is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self._run.progress.epoch if self._run is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return self._run.progress.global_step if self._run is not None else 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self._run.world.rank if self._run is not None else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._run.world.local_rank if self._run is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._live.trainer.loggers

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        self.fabric.print(*args, **kwargs)

    def all_gather(self, data: Any) -> Any:
        """Return tensors of all ranks, stacked in a new first dimension. Collective."""
        return self.fabric.all_gather(data)

    def freeze(self) -> None:
        """Set ``requires_grad`` of all parameters to False, and switch to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Set ``requires_grad`` of all parameters to True, and switch to training mode."""
        self.requires_grad_(True)
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        strict: bool = True,
        *,
        average: str | None = None,
        **overrides: Any,
    ) -> Self:
        """Rebuild a module from a checkpoint: ``__init__`` with the saved hyperparameters, then the saved weights.

        Args:
            checkpoint_path: the checkpoint's directory.
            map_location: the device that the module's tensors are on afterwards (default: the CPU).
            strict: whether names and shapes of weights must match exactly. If False, matching tensors are loaded, and a
                warning lists the mismatches on both sides.
            average: load this average of the weights, such as ``"ema"``, instead of the trained weights.
            overrides: arguments of ``__init__`` that replace or complete the saved ones.

        The state of all random generators is unchanged. If the checkpoint holds more than weights,
        ``on_load_checkpoint`` is called before the weights are loaded.

        Raises:
            CheckpointError: the checkpoint is damaged, or its weights do not match this module.
            ConfigurationError: the device does not exist, or an override is not an argument of ``__init__``.
            UnknownNameError: the checkpoint has no such average.
        """
        module: Self = rebuild_module(cls, open_checkpoint(checkpoint_path), map_location, strict, overrides, average)
        return module
