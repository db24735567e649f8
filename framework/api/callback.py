"""``Callback``: the base class of callbacks, and the look-up of the hooks that a class overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.arguments import NamesArguments
from ..metrics.torchmetrics_state import logged_items
from .overriding import is_overridden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer
    from torchmetrics import MetricCollection

    from ..core.intervals import Interval
    from .contracts import CallbackContract, SavedCheckpoints
    from .train_module import TrainModule


class Callback(NamesArguments):
    """Base class of callbacks; override the hooks you need.

    The ``trainer`` that hooks receive is a ``phalanx.TrainerView``; annotate it so, or as ``Trainer``.

    A hook that is not overridden costs nothing. Callbacks run in the order of the user's list, before the module's own
    hook of the same name; those with ``monitors`` run after it in ``on_train_epoch_end`` and ``on_validation_end``,
    when metrics are reduced; those with ``runs_last`` run after all others and after the module's own hook.

    Callbacks run on every rank. On a rank without data in an optimizer step, ``on_train_batch_end`` is called too,
    with a loss of 0 and the rank's last batch (None before the first), so that all ranks can save together.
    """

    monitors: bool = False
    runs_last: bool = False
    collective: bool = False
    """Whether all ranks must have this callback: its hooks call collectives, or change the training."""
    counted_intervals: Sequence[Interval] = ()
    """The intervals at which this callback acts, so that the run counts their tokens or samples."""
    _module: TrainModule | None = None

    def log_through(self, module: TrainModule | None) -> None:
        """Make ``self.log`` write to the log of ``module``; None for no log. Called by the Trainer around a run."""
        self._module = module

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """Log a value as ``TrainModule.log`` does in the module's hook of the same name, with the same arguments.

        Values logged in ``on_train_batch_start`` and the other hooks of a training step belong to the step by default,
        those logged in other hooks to the epoch. Outside of a run it does nothing.

        Raises:
            MetricError: the value has a type that cannot be logged, or nothing is gathered in this hook.
        """
        if self._module is not None:
            self._module.log(name, value, *arguments, **options)

    def log_dict(self, dictionary: Mapping[str, Any] | MetricCollection, **arguments: Any) -> None:
        """Log each item of a mapping, or of a torchmetrics ``MetricCollection``, with the arguments of ``log``."""
        for name, value in logged_items(dictionary):
            self.log(name, value, **arguments)

    @property
    def common_key(self) -> str:
        """The settings that must be equal on all ranks if ``collective`` is True."""
        return self.state_key

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; unique among the callbacks of a run."""
        return type(self).__qualname__

    @property
    def needed_metrics(self) -> Sequence[str]:
        """The names of the metrics that this callback reads, for a report of misspelled ones before training."""
        return ()

    @property
    def ranked_metric(self) -> tuple[str, str, float | None] | None:
        """The metric that this callback compares epochs by, its mode ``"min"`` or ``"max"``, and its best value so far.

        None for a callback that compares nothing; the value before there is one is ``None``.
        """
        return None

    @property
    def saved_checkpoints(self) -> SavedCheckpoints | None:
        """The records of the checkpoints that this callback saves; None for a callback that saves none."""
        return None

    def show(self, text: str) -> bool:
        """Print a line without disturbing a live display of this callback; return whether it was printed."""
        return False

    def wants(self, hook: str) -> bool:
        """Whether to call ``hook``; evaluated once per run. Default: whether the class or this object overrides it."""
        return is_overridden(hook, self, Callback)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: JSON values, tensors, and lists or dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""

    def check(self, trainer: Any, stage: str) -> None:
        """Raise if this callback does not support the Trainer. Called before any process starts.

        Raises:
            ConfigurationError: a requirement is missing; the message names it and the next step.
        """

    def setup(self, trainer: Any, module: TrainModule, stage: str) -> None: ...
    def teardown(self, trainer: Any, module: TrainModule, stage: str) -> None: ...
    def on_fit_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_fit_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_sanity_check_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_sanity_check_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_train_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_train_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_train_epoch_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_train_epoch_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...
    def on_validation_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_validation_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_validation_epoch_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_validation_epoch_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_validation_batch_start(
        self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_test_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_test_epoch_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_test_epoch_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_test_batch_start(
        self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_predict_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_predict_epoch_start(self, trainer: Any, module: TrainModule) -> None: ...
    def on_predict_epoch_end(self, trainer: Any, module: TrainModule) -> None: ...
    def on_predict_batch_start(
        self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_before_backward(self, trainer: Any, module: TrainModule, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Any, module: TrainModule) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, module: TrainModule, optimizer: Optimizer) -> None: ...
    def on_before_zero_grad(self, trainer: Any, module: TrainModule, optimizer: Optimizer) -> None: ...
    def on_exception(self, trainer: Any, module: TrainModule, exception: BaseException) -> None: ...
    def on_save_checkpoint(self, trainer: Any, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Any, module: TrainModule, checkpoint: dict[str, Any]) -> None: ...


def in_call_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks in the user's order, with those that have ``runs_last`` at the end."""
    return sorted(callbacks, key=lambda callback: callback.runs_last)


def wanted(callbacks: Sequence[Callback], hook: str) -> tuple[Callable[..., Any], ...]:
    """Return the bound hooks of the callbacks that want ``hook``, in call order."""
    return tuple(getattr(callback, hook) for callback in callbacks if callback.wants(hook))


def save_while_training(callbacks: Iterable[CallbackContract]) -> bool:
    """Whether one of the callbacks saves checkpoints while training goes well."""
    records = [callback.saved_checkpoints for callback in callbacks if callback.runs_last]
    return any(saved is None or not saved.only_after_errors for saved in records)


def saved_by(callbacks: Iterable[CallbackContract]) -> list[SavedCheckpoints]:
    """Return the records of the callbacks that save checkpoints, in their order."""
    return [saved for callback in callbacks if (saved := callback.saved_checkpoints) is not None]
