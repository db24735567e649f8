"""``TrainModule``: an ``nn.Module`` with training and evaluation steps, hooks and logging."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from ..checkpoint import open_checkpoint
from ..core.absent_names import AbsentValue, lacks
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..core.foreign_names import MEMBERS
from ..core.hyperparameters import HyperparametersMixin
from ..core.optimizer_config import parameters_of
from ..metrics.metric_log import MetricLog
from ..metrics.no_log import NoLog
from ..metrics.torchmetrics_state import logged_items
from ..parallel.blocks import replace_method
from ..pretrained import given_at_once, load_alone
from ..pretrained.request import PretrainedRequest, check_copies, forget_waiting, initialize_rest, requested
from ..pretrained.transformers_models import empty_tensors
from ..state import rebuild_module
from .outside_run import OutsideRun

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer
    from torchmetrics import MetricCollection
    from typing_extensions import Self

    from ..fabric.fabric import Fabric
    from ..metrics.logger import Logger
    from ..parallel.sequence_part import SequencePart
    from .contracts import AttachedRun, CallbackContract, TrainerView

# The modules that were passed to a Trainer or a Fabric, while their runs last.
_IN_RUNS: WeakSet[TrainModule] = WeakSet()

_LIVE = ("_own_run", "_whole", "_metric_log")
_LOGS = ("log", "log_dict")


@lacks(MEMBERS["TrainModule"], AbsentValue)
class TrainModule(HyperparametersMixin, nn.Module):
    """Base class of models with their training. Override ``training_step``, ``configure_optimizers`` and other hooks.

    ``training_step`` computes the loss; then the framework runs backward, clips gradients, and steps the optimizer
    and the schedulers, unless ``automatic_optimization`` is False.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True
    """Whether a checkpoint must match exactly. If False, matching tensors are loaded and mismatches are reported."""
    save_frozen: bool = True
    """Whether checkpoints hold frozen parameters. If False, those that have the values with which the fit began are
    left out, with a fingerprint: the module must be built with the same ones to load such a checkpoint. Otherwise an
    error names a parameter that differs."""
    checkpoint_renames: ClassVar[Mapping[str, str]] = {}
    """Renamed prefixes of parameter names, from those in checkpoints to the current ones: ``{"net": "body.net"}``."""
    example_input_array: Any = None
    _routed_steps: ClassVar = ("training_step", "validation_step", "test_step", "predict_step")
    _metric_log: Any
    _pretrained_requests: tuple[PretrainedRequest, ...] = ()
    _pretrained_sources: tuple[dict[str, str], ...] = ()
    _own_run: AttachedRun | None = None
    # A weak reference, so that the whole is not a submodule of its part.
    _whole: ref[TrainModule] | None = None

    @names_arguments
    def __init__(self) -> None:
        super().__init__()
        self._own_run = None
        self._metric_log = None
        # The parameters that are toggled off, and whether they required gradients before.
        self._toggled: dict[Tensor, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module does not belong to the run.
        # Without what `compile` has made of this module.
        state = {**super().__getstate__(), **dict.fromkeys(_LIVE)}  # type: ignore[no-untyped-call]
        for name in _LOGS:
            if _is_live(state.get(name)):
                del state[name]
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
            replace_method(part, name, _outside_graphs(getattr(part, name)))
            for part in (self, *self._parts)
            for name in _LOGS
        ]

        def undo() -> None:
            for restore in undos:
                restore()

        return undo

    # ---- steps ------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the loss of a micro-batch, a 0-d tensor with the mean over its items, or a mapping with ``"loss"``.

        Returning None skips this micro-batch; its weight stays in the mean. Any subset of ranks may return None.
        """
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch; with several loaders also takes ``dataloader_idx=0``."""

    def test_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch."""

    def predict_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return predictions for one batch; the default calls the module on it."""
        return self(batch)

    def batch_weight(self, batch: Any) -> int | float | Tensor:
        """Return the number of items over which the batch's loss is averaged, such as its tokens without padding.

        The gradient of an optimizer step is that of the weighted mean over all micro-batches of its window, on all
        ranks. The progress bar and ``trainer.throughput`` count these items, and call them tokens.
        """
        return 1

    def cut_sequences(self, batch: Any, part: SequencePart) -> Any:
        """Return this rank's part of a batch: for ``parallel={"cp": ...}``, where ranks share the sequences of a batch.

        Called for every batch before anything else sees it, if it is defined: on a single rank too, where the part is
        all, so that steps see batches of the same form for any number of ranks. ``part(tensor, dim=1)`` cuts a tensor,
        and ``part.positions(tensor, dim=1)`` returns the positions of the part, for models that need them:
        ``return part(tokens), part(targets), part.positions(tokens)``. Targets are shifted before they are cut.
        ``batch_weight`` sees the part, and must count its targets.
        """
        raise NotImplementedError

    # ---- configuration ----------------------------------------------------------------------------------------------

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
        yourself and return None. In a name, ``*`` matches one part between dots. A style may also be a name of
        transformers, such as ``"colwise"``. Parameters have no data yet. Layers outside of the plan are computed
        identically by all ranks of a group, which see the same batches. Attributes that are changed here stay changed
        after the run.

        Args:
            mesh: the ``DeviceMesh`` of this rank's group, with one axis, ``"tensor"``.
        """
        raise NotImplementedError

    def configure_expert_parallel(self) -> Sequence[str | nn.Module]:
        """Return the layers of experts for expert parallelism, as names of submodules or modules.

        In a name, ``*`` is a wildcard that matches dots too.
        The parameters of such a layer are all stacked by expert, [experts, ...]. It is called as ``layer(hidden, index,
        weights)``: tokens [tokens, width], the numbers of their experts and the weights of these, both [tokens, top_k];
        and returns the weighted sums, [tokens, width]. The router is outside of the layer. Layers of models of
        transformers that have this form are found without this method.
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

    # ---- data -------------------------------------------------------------------------------------------------------

    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on one rank of each node; if False, on rank 0 alone."""
    allow_zero_length_dataloader_with_multiple_devices: bool = True
    """Accepted for modules written for Lightning: a rank without data always takes part with weight 0."""

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

    # ---- hooks, in the order of a fit -------------------------------------------------------------------------------

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
    def on_validation_model_zero_grad(self) -> None: ...
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

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a weighted and scaled loss; override for your own backward pass.

        The weight is the batch's part of its window. Strategies that compute gradients themselves refuse an override.
        """
        loss.backward(*args, **kwargs)

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

    # ---- logging ----------------------------------------------------------------------------------------------------

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
        for all ranks. Otherwise ranks that have data must log the same names in an epoch. ``sync_dist``,
        ``enable_graph``, ``sync_dist_group`` and ``metric_attribute`` are accepted for modules written for Lightning,
        and change nothing.

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

    # ---- manual optimization ----------------------------------------------------------------------------------------

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

    # ---- pretrained weights -----------------------------------------------------------------------------------------

    @names_arguments
    def load_pretrained(
        self, path: str | os.PathLike[str], into: nn.Module | str | None = None, *, strict: bool | None = None
    ) -> None:
        """Ask for the weights of a Hugging Face folder; call it in ``configure_model``, after the layers are built.

        The weights are read when the strategy has set the module up: each rank reads only its own part of each tensor,
        and casts it to the module's dtype. A tensor that a later line of ``configure_model`` copies, reads or changes
        is read in full at that line, and keeps the changes. Layers that the weights replace are neither initialized
        nor broadcast by strategies that shard parameters. A resumed fit loads its checkpoint instead, unless that
        leaves out frozen weights. A module that has been trained keeps its weights in later stages. A model of
        transformers that generates gets the folder's generation config at once.

        Args:
            path: a folder with ``model.safetensors``, or with its shards and ``model.safetensors.index.json``; a
                ``.safetensors`` file; or a checkpoint.
            into: the submodule that the weights are for, or its name. Default: the only model of transformers in this
                module, or this module.
            strict: whether all names and shapes must match. If False, only matching tensors are loaded. By default a
                model of transformers may have layers that the files lack, such as a new head, which keep their initial
                values, and the files may have others; both are reported. Other modules must match.

        Raises:
            ConfigurationError: an argument is invalid.
            CheckpointError: the generation config cannot be read.
        """
        request = requested(self, path, into, strict)
        # Now, so that later lines of configure_model may change it.
        if request.target is not None and not request.target.is_loaded:
            request.use_generation_config()
        self._pretrained_requests = (*self._pretrained_requests, given_at_once(self, request))

    @property
    def pretrained_sources(self) -> tuple[dict[str, str], ...]:
        """The sources of the pretrained weights: ``path``, ``headers`` (see ``phalanx.checkpoint.fingerprint``) and
        ``into``. Checkpoints hold them."""
        return self._pretrained_sources

    def use_sources(self, sources: Sequence[dict[str, str]]) -> None:
        """Record the sources of the weights. Called by the Trainer."""
        self._pretrained_sources = tuple(sources)

    def settle_pretrained(self) -> None:
        """Record which of the weights later lines of ``configure_model`` have changed. Called after it.

        Raises:
            ConfigurationError: a layer was copied or replaced that had no weights yet.
        """
        self._pretrained_requests = tuple(one.settled(self) for one in self._pretrained_requests)
        check_copies(self, self._pretrained_requests)

    def take_pretrained(self, path: str | None = None) -> list[PretrainedRequest]:
        """Return the requests to execute, and forget them. Called by the Trainer.

        Args:
            path: a further request, which is executed even if the module has weights.
        """
        pending, self._pretrained_requests = self._pretrained_requests, ()
        found = [one for one in pending if not any(target.is_loaded for target in one.targets(self))]
        if path is not None:
            found.append(requested(self, path, None, None))
            found[-1].use_generation_config()
        return found

    def load_requested(self) -> None:
        """Execute all requests in a module that no strategy has set up, in this process alone.

        Called before a checkpoint is loaded that leaves out frozen weights.

        Raises:
            CheckpointError: the weights cannot be read, or do not match the module.
        """
        requests = self.take_pretrained()
        if requests:
            load_alone(self, requests)

    def drop_pretrained(self, empty: set[int] | None = None) -> None:
        """Forget all requests, as the module gets other weights. Called before a checkpoint is loaded.

        Models of transformers without data are initialized.

        Args:
            empty: the ``id`` of each tensor without data. Default: of each one on the meta device.
        """
        requests, self._pretrained_requests = self._pretrained_requests, ()
        forget_waiting(self)
        for request in requests:
            request.targets(self)[0].mark_loaded()
        if requests:
            initialize_rest(self, empty_tensors(self) if empty is None else empty)

    # ---- the Trainer and its run ------------------------------------------------------------------------------------

    def _use_run(self, run: AttachedRun | None) -> None:
        """Read from a run, or from none, with all parts; those that are added later are found when they read."""
        self._own_run, self._whole = run, None
        if self._is_in_run(run):
            _IN_RUNS.add(self)
        else:
            _IN_RUNS.discard(self)
        for part in self._parts:
            part._whole = ref(self)

    @property
    def _parts(self) -> list[TrainModule]:
        return [part for part in self.modules() if isinstance(part, TrainModule) and part is not self]

    @property
    def _run(self) -> AttachedRun | None:
        own = self._own_run
        if self._is_in_run(own):
            return own
        whole = self._find_whole()
        return own if whole is None else whole._own_run

    def _find_whole(self) -> TrainModule | None:
        """Return the module that this one is a part of: one in a run, if there is one."""
        whole = None if self._whole is None else self._whole()
        if _IN_RUNS and whole not in _IN_RUNS and self not in _IN_RUNS:
            found = (other for other in list(_IN_RUNS) if any(part is self for part in other.modules()))
            whole = next(found, whole)
            self._whole = None if whole is None else ref(whole)
        return whole

    @staticmethod
    def _is_in_run(run: AttachedRun | None) -> bool:
        return run is not None and not isinstance(run, OutsideRun)

    @property
    def _live(self) -> AttachedRun:
        run = self._run
        if run is None:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no run: pass it to Trainer.fit, validate, test or predict, or set "
                "module.trainer in a test."
            )
        return run

    @property
    def trainer(self) -> TrainerView:
        """The Trainer of the current or last run. Set it to use steps and hooks without a run, for example in tests."""
        return self._live.trainer

    @trainer.setter
    def trainer(self, trainer: TrainerView | None) -> None:
        self.use_trainer(trainer)

    def use_trainer(self, trainer: TrainerView | None) -> None:
        """Set ``trainer``. Called by the Trainer after a stage whose ranks were forked.

        Raises:
            ConfigurationError: the module is in a run.
        """
        if self._in_run:
            raise ConfigurationError("module.trainer was set during a run: set it before fit, or after it.")
        self._use_run(None if trainer is None else OutsideRun(trainer))

    @property
    def _in_run(self) -> bool:
        return self._is_in_run(self._run)

    def check_free(self, caller: str) -> None:
        """Check that no stage of a Trainer is in progress on this module. Called by the Trainer.

        Raises:
            ConfigurationError: there is one.
        """
        # The run of a Fabric has no stages.
        if (stage := getattr(self._run, "stage", None)) is not None:
            raise ConfigurationError(
                f"{caller} was given {type(self).__name__}, which is in use by Trainer.{stage}: wait until that has "
                "ended, or pass a copy, copy.deepcopy(module)."
            )

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
        return self._live.world.device if self._in_run else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether ``device`` is a CUDA device or another accelerator."""
        return self.device.type not in ("cpu", "meta")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return run.progress.epoch if (run := self._run) is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return run.progress.global_step if (run := self._run) is not None else 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return run.trainer.global_rank if (run := self._run) is not None else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return run.trainer.local_rank if (run := self._run) is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the Trainer; an empty list without a Trainer."""
        return run.trainer.loggers if (run := self._run) is not None else []

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        self.fabric.print(*args, **kwargs)

    @property
    def device_mesh(self) -> None:
        """None: ``configure_tensor_parallel`` is given the mesh of the ranks that split layers."""

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked in a new first dimension; see ``Fabric.all_gather``. Collective."""
        return self.fabric.all_gather(data, group, sync_grads)


def _is_live(log: Any) -> bool:
    """Whether an attribute ``log`` or ``log_dict`` of a module was set by ``log_to`` or ``log_outside_graphs``."""
    return isinstance(getattr(log, "__self__", None), MetricLog | NoLog) or hasattr(log, "is_outside_graphs")


def _outside_graphs(log: Any) -> Any:
    called = torch.compiler.disable(log)
    called.is_outside_graphs = True
    return called
