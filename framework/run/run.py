"""``Run``: the live state of one fit or evaluation. Loops write it, callbacks read it through the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..api.callback import Callback, in_call_order, wanted
from ..api.train_module import TrainModule
from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, MetricError, NonFiniteError, did_you_mean
from ..core.progress import Progress
from ..distributed.control import NOTE, Triggers
from ..launch.signals import TRIGGER as LEAVE
from ..metrics.metric_log import MetricLog
from ..state.weight_averages import Averages

if TYPE_CHECKING:
    from ..core.optimizer_config import SchedulerConfig
    from ..distributed.world import World
    from ..fabric.fabric import Fabric
    from ..loop.manual_step import ManualOptimizer
    from ..metrics.logger_threads import LoggerFanout
    from ..metrics.metric_entry import Entry
    from ..resume.checkpoint_saver import Saver
    from ..trainer.trainer import Trainer

Hook = Callable[..., Any]
SAVED = "saved"
"""The trigger of a save behind the training that is over; its payload is the save's number."""
# Which entries of a log are for whom.
_WANTED = {"progress_bar": "prog_bar", "logged": "logger"}


class Run:
    """One stage of a module's life: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def __init__(
        self,
        trainer: Trainer,
        fabric: Fabric,
        module: TrainModule,
        callbacks: Sequence[Callback],
        loggers: LoggerFanout,
        stage: str,
    ) -> None:
        self.trainer = trainer
        self.fabric = fabric
        self.world: World = fabric.world
        self.module = module
        self.callbacks = in_call_order(callbacks)
        self.loggers = loggers
        self.stage = stage
        self.progress = Progress()
        self.heartbeat = trainer.heartbeat
        self.triggers = Triggers(self.world)
        self.accumulation = AccumulationSchedule(1)
        self.optimizers: list[Optimizer] = []
        self.manual_optimizers: list[ManualOptimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.schedulers_rest = False
        """Whether learning rates are somebody else's to set for now."""
        self.averages = Averages()
        self.train_log = MetricLog("train", self.world, module)
        self.triggers.table = self.train_log
        self.logs: list[MetricLog] = [self.train_log]
        self.latest_loss: Any = None
        self.redone_from: dict[str, Any] | None = None
        """While something is under way that a run resumed here does anew: this rank's state when that began."""
        self.marks: list[tuple[str, dict[str, Any]]] | None = None
        """And where the loggers stood."""
        self.evaluated_batches: dict[int, int] = {}
        """Of each validation loader, the batches that this rank has seen in the whole fit."""
        self.metrics: dict[str, dict[str, Any]] = {"callback": {}, "logged": {}, "progress_bar": {}}
        self.sanity_checking = False
        self.evaluating = False
        self.stop_reason: str | None = None
        self.stop_requested = False
        self.told_to_leave: tuple[int, str] | None = None
        """The rank that was told from outside to end, and the signal."""
        self.resumed: tuple[Path, int] | None = None
        """The checkpoint that this run goes on from, and how many batches it had seen by then."""
        self.in_window = False
        self.manual_backward: Callable[..., None] = _no_loop
        self.restore_layers: Callable[[], None] | None = None
        self.saver: Saver
        """Set as the run is made."""

    def check_together(self, what: str) -> None:
        """Refuse what all ranks must do where an error has parted them.

        Raises:
            ConfigurationError: an error ends this run, and other ranks may never come.
        """
        if self.world.size > 1 and self.trainer.state.status == "interrupted":
            raise ConfigurationError(
                f"{what} was called after an error, in on_exception or later, where it would wait for ranks that may "
                "never come: the newest checkpoint is what to go on from, with ckpt_path='auto'."
            )

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def hooks(self, name: str) -> tuple[Hook, ...]:
        """Return everything to call for a hook, bound to its leading arguments: callbacks, then the module's own.

        Callbacks that run last come after the module's: what a checkpoint holds is then all of the step.
        """
        return self._around_module(name, self.callbacks)

    def _around_module(self, name: str, callbacks: Sequence[Callback]) -> tuple[Hook, ...]:
        first = self._callback_hooks(name, [callback for callback in callbacks if not callback.runs_last])
        last = self._callback_hooks(name, [callback for callback in callbacks if callback.runs_last])
        return (*first, *self.module_hook(name), *last)

    def hooks_around(self, name: str) -> tuple[tuple[Hook, ...], tuple[Hook, ...]]:
        """Return the hooks before and after an epoch's metrics are reduced: those that monitor metrics come after."""
        watching = [callback for callback in self.callbacks if callback.monitors]
        others = [callback for callback in self.callbacks if not callback.monitors]
        return self._around_module(name, others), self._callback_hooks(name, watching)

    def module_hook(self, name: str) -> tuple[Hook, ...]:
        """Return the module's hook where it overrides it."""
        own = getattr(type(self.module), name, None)
        return (getattr(self.module, name),) if own is not getattr(TrainModule, name, None) else ()

    def callback_hooks(self, name: str) -> tuple[Hook, ...]:
        """Return a hook of the callbacks alone, bound to its leading arguments."""
        return self._callback_hooks(name, self.callbacks)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of rare occasions."""
        for hook in self.hooks(name):
            hook(*args)

    def _callback_hooks(self, name: str, callbacks: Sequence[Callback]) -> tuple[Hook, ...]:
        return tuple(partial(hook, self.trainer, self.module) for hook in wanted(callbacks, name))

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def log_step(self) -> int:
        """The step that figures are logged at: the index of the newest optimizer step."""
        return max(0, self.progress.global_step - 1)

    def publish_step(self) -> None:
        """Hand the newest step values to the loggers."""
        values = self.train_log.step_values("logger")
        if values:
            numbers = as_numbers(values)
            self.metrics["logged"].update(numbers)
            self.loggers.log_metrics({**numbers, "epoch": float(self.progress.epoch)}, self.log_step)

    def publish_epoch(self, log: MetricLog, hooks: Sequence[Hook] = ()) -> dict[Entry, float]:
        """Reduce an epoch's values over the ranks, call hooks, reduce what they logged, and hand all on. Collective.

        The hooks see the values of the steps, as in Lightning; a second exchange follows only where there are hooks.
        """
        self.metrics["callback"].update(log.current())
        for kind, flag in _WANTED.items():
            self.metrics[kind].update(log.step_values(flag))
        reduced, more = log.reduce(more=bool(hooks))
        self._keep(reduced)
        if more:
            for hook in hooks:
                hook()
            later, _ = log.reduce()
            self._keep(later)
            reduced |= later
        log.finish()
        logged = {entry.epoch_name: value.item() for entry, value in reduced.items() if entry.logger}
        if logged and not self.sanity_checking:
            self.loggers.log_metrics({**logged, "epoch": float(self.progress.epoch)}, self.log_step)
        return {entry: value.item() for entry, value in reduced.items()}

    def _keep(self, reduced: dict[Entry, Tensor]) -> None:
        for entry, value in reduced.items():
            name = entry.epoch_name
            self.metrics["callback"][name] = value
            self.metrics["callback"][entry.plain_name] = value
            if entry.prog_bar:
                self.metrics["progress_bar"][name] = value
            if entry.logger:
                self.metrics["logged"][name] = value

    def metric_view(self, which: str) -> dict[str, Tensor]:
        """Return the metrics for ``"callback"``, ``"logged"`` or ``"progress_bar"`` as 0-d tensors."""
        values = dict(self.metrics[which])
        for log in self.logs:
            values.update(log.current() if which == "callback" else log.step_values(_WANTED[which]))
        return {name: torch.as_tensor(value) for name, value in values.items()}

    def metric(self, name: str, who: str) -> Tensor:
        """Return a logged metric.

        Raises:
            MetricError: nothing of that name was logged; the message names what was.
        """
        known = self.metric_view("callback")
        if name not in known:
            raise MetricError(
                f"{who} needs the metric {name!r}, which was not logged.{did_you_mean(name, known)} "
                f"Logged: {', '.join(sorted(known)) or 'nothing'}."
            )
        return known[name]

    # ---- stopping -------------------------------------------------------------------------------------------------

    def heed_triggers(self) -> None:
        """Act on what has fired; the same on every rank.

        Raises:
            NonFiniteError: a rank met a loss that is NaN or infinite.
            StorageError: saves behind the training failed again and again.
        """
        fired = self.triggers.fired
        if "nonfinite" in fired:
            raise NonFiniteError(next(iter(fired["nonfinite"].values())))
        for text in fired.pop(NOTE, {}).values():
            self.trainer.note(text)
        if SAVED in fired:
            self.saver.settle(next(iter(fired[SAVED].values())))
        if "end_epoch" in fired:
            self.progress.epoch_cut = True
        if "go_on" in fired:
            self.stop_requested = self.told_to_leave is not None
        if LEAVE in fired:
            self.stop_requested = True
            self.told_to_leave = min(fired[LEAVE].items())
        if "stop" in fired:
            self.stop_requested = True
            self.stop_reason = next((reason for reason in fired["stop"].values() if reason), self.stop_reason)

    def update_learning_rates(self, interval: str) -> None:
        """Advance the schedulers of an interval that are due; under manual optimization the user advances them."""
        if not self.module.automatic_optimization or self.schedulers_rest:
            return
        progress = self.progress
        count = progress.global_step if interval == "step" else progress.epoch + 1
        for config in self.schedulers:
            if config.interval == interval and count % config.frequency == 0:
                self._advance(config)

    def _advance(self, config: SchedulerConfig) -> None:
        if not config.needs_metric:
            self.module.lr_scheduler_step(config.scheduler, None)
            return
        known = self.metric_view("callback")
        mine = known.get(str(config.monitor)) if not config.strict else self.metric(
            str(config.monitor), type(config.scheduler).__name__
        )  # fmt: skip
        # A step's value differs between ranks; their learning rates must not.
        metric = self.world.broadcast_object(mine)
        if metric is not None:
            self.module.lr_scheduler_step(config.scheduler, metric)

    def clip_gradients(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> Tensor | None:
        """Clip an optimizer's gradients, where a value is given; return their norm before. Collective."""
        if not value:
            return None
        for manual in self.manual_optimizers:
            if id(optimizer) in (id(manual), id(manual.optimizer)):
                optimizer = manual.optimizer
                manual.reduce()
        return self.fabric.updater.clip(optimizer, value, algorithm or "norm")


def as_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return values as floats; tensors on a device are read in one synchronisation for each device."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = (
        dict(zip(tensors, torch.stack([t.double() for t in tensors.values()]).tolist(), strict=True)) if tensors else {}
    )
    return {name: numbers[name] if name in numbers else float(value) for name, value in values.items()}


def _no_loop(*args: Any, **kwargs: Any) -> None:
    raise MetricError("manual_backward belongs in training_step, while fit runs.")
