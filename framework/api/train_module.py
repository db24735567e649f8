"""``TrainModule``: an ``nn.Module`` with training and evaluation steps, hooks and logging."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..checkpoint import open_checkpoint
from ..core.absent_names import AbsentValue, lacks
from ..core.arguments import names_arguments
from ..core.hyperparameters import HyperparametersMixin
from ..core.optimizer_config import parameters_of
from ..metrics.metric_log import MetricLog
from ..metrics.no_log import NoLog
from ..metrics.torchmetrics_state import logged_items
from ..parallel.blocks import replace_method
from ..state import rebuild_module
from .absent_names import MODULE
from .module_hooks import ModuleHooks
from .outside_run import OutsideRun
from .pretrained_weights import PretrainedWeights
from .run_access import RunAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer
    from torchmetrics import MetricCollection
    from typing_extensions import Self

    from .contracts import AttachedRun

_LIVE = ("_own_run", "_whole", "_metric_log")
_LOGS = ("log", "log_dict")


@lacks(MODULE, AbsentValue)
class TrainModule(RunAccess, PretrainedWeights, ModuleHooks, HyperparametersMixin, nn.Module):
    """Base class of models with their training. Override ``training_step``, ``configure_optimizers`` and other hooks.

    ``training_step`` computes the loss; then the framework runs backward, clips gradients, and steps the optimizer
    and the schedulers, unless ``automatic_optimization`` is False.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    """Whether a checkpoint must match exactly. If False, matching tensors are loaded and mismatches are reported."""
    save_frozen: bool = True
    """Whether checkpoints hold frozen parameters. If False, those that have the values with which the fit began are
    left out, with a fingerprint: the module must be built with the same ones to load such a checkpoint."""
    checkpoint_renames: ClassVar[Mapping[str, str]] = {}
    """Renamed prefixes of parameter names, from those in checkpoints to the current ones: ``{"net": "body.net"}``."""
    example_input_array: Any = None
    _routed_steps: ClassVar = ("training_step", "validation_step", "test_step", "predict_step")
    _metric_log: Any

    @names_arguments
    def __init__(self) -> None:
        super().__init__()
        self._own_run = None
        self._metric_log = None
        # The parameters that are toggled off, and whether they required gradients before.
        self._toggled: dict[Tensor, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module does not belong to the run.
        state = {**self.__dict__, **dict.fromkeys(_LIVE)}
        for name in _LOGS:
            if _is_live(state.get(name)):
                del state[name]
        # As nn.Module does: compiled code would be that of this module.
        state.pop("_compiled_call_impl", None)
        return state

    def attach(self, run: AttachedRun) -> None:
        """Make this module and its parts read from a run. Called by the Trainer."""
        self._use_run(run)

    def detach(self) -> None:
        """Leave the run and keep its Trainer: optimizers are untoggled, and ``self.log`` does nothing."""
        for part in (self, *self._parts):
            if isinstance(part, TrainModule):
                part.untoggle_optimizer()
        self.log_to(None)
        if self._own_run is not None:
            self._use_run(OutsideRun(self._own_run.trainer))

    def join_fabric(self, run: AttachedRun | None, log: Any) -> None:
        """Read from a Fabric, and log to it; None leaves it. Called by the Fabric that sets this module up."""
        self._use_run(run)
        self._metric_log = log

    @property
    def forward_methods(self) -> tuple[str, ...]:
        """The methods that a Fabric calls as ``forward``: the steps. A manual step runs backward passes itself."""
        return self._routed_steps if self.automatic_optimization else self._routed_steps[1:]

    def log_to(self, log: MetricLog | NoLog | None) -> MetricLog | NoLog | None:
        """Make ``self.log`` write to another log, or to none; return the previous log. Called by loops."""
        before: MetricLog | NoLog | None = self._metric_log
        self._metric_log = log
        if self._logs_directly:
            del self.log
        # The log's own method saves a call per value, a third of its cost, unless a subclass has its own ``log``.
        if log is not None and type(self).log is TrainModule.log and "log" not in self.__dict__:
            self.log = log.log  # type: ignore[method-assign]
        return before

    @property
    def _logs_directly(self) -> bool:
        return isinstance(getattr(self.__dict__.get("log"), "__self__", None), MetricLog | NoLog)

    def log_outside_graphs(self) -> Callable[[], None]:
        """Make ``torch.compile`` call ``log`` and ``log_dict`` rather than trace them; return a function to revert it.

        They are Python code with tables of metrics.
        """
        if self._logs_directly:
            del self.log
        undos = [
            replace_method(part, name, torch.compiler.disable(getattr(part, name)))
            for part in (self, *self._parts)
            for name in _LOGS
        ]

        def undo() -> None:
            for restore in undos:
                restore()

        return undo

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
        if sink is None and (whole := self._find_whole()) is not None:
            sink = whole._metric_log
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
        mine = {id(parameter) for parameter in parameters_of(optimizer)}
        kept = dict(self._toggled)
        for other in self._live.optimizers:
            for parameter in parameters_of(other):
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

    # ---- weights ----------------------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Set ``requires_grad`` of all parameters to False, and switch to evaluation mode; return this module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad`` of all parameters to True, and switch to training mode; return this module."""
        return self.requires_grad_(True).train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | Mapping[str, Any] | Callable[..., Any] | None = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        average: str | Literal[False] | None = None,
        **overrides: Any,
    ) -> Self:
        """Rebuild a module from a checkpoint: ``__init__`` with the saved hyperparameters, then the saved weights.

        Args:
            checkpoint_path: the checkpoint's directory.
            map_location: the device that the module's tensors are on afterwards (default: the CPU); also a dict or a
                function as for ``torch.load``.
            hparams_file: a YAML or CSV file with hyperparameters, which replace those in the checkpoint.
            strict: whether names and shapes of weights must match exactly (default: ``strict_loading`` of the module).
                If False, matching tensors are loaded, and a warning lists the mismatches on both sides.
            weights_only: accepted for programs written for Lightning: nothing is ever unpickled.
            average: load this average of the weights, such as ``"ema"``, instead of the trained weights. By default
                the trained weights are loaded, with a warning if the run was validated with an average; False for the
                trained weights without a warning.
            overrides: arguments of ``__init__`` that replace or complete the saved ones.

        The state of all random generators is unchanged. If the checkpoint holds more than weights,
        ``on_load_checkpoint`` is called before the weights are loaded.

        Raises:
            CheckpointError: the checkpoint is damaged, or its weights do not match this module.
            ConfigurationError: the device or ``hparams_file`` does not exist, or an override is not an argument of
                ``__init__``.
            UnknownNameError: the checkpoint has no such average.
        """
        checkpoint = open_checkpoint(checkpoint_path)
        module: Self = rebuild_module(cls, checkpoint, map_location, strict, overrides, average, hparams_file)
        return module


def _is_live(log: Any) -> bool:
    """Whether an attribute ``log`` or ``log_dict`` of a module was set by ``log_to`` or ``log_outside_graphs``."""
    return isinstance(getattr(log, "__self__", None), MetricLog | NoLog) or hasattr(log, "_torchdynamo_disable")
