"""``Run``: the live state of one fit, validation, test or prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..api.callback import Callback, in_call_order, wanted
from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, MetricError, NonFiniteError
from ..core.progress import Progress
from ..distributed.control import Sent, Signal, Triggers
from ..metrics.metric_log import MetricLog
from ..profiling.meter import Meter
from ..state.weight_averages import Average, Averages, AverageSettings
from .overrides import is_overridden, unit_of
from .repeated_section import RepeatedSection
from .run_metrics import RunMetrics

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from ..api.train_module import TrainModule
    from ..core.optimizer_config import SchedulerConfig
    from ..fabric.fabric import Fabric
    from ..metrics.logger_fanout import LoggerFanout
    from .context import ManualOptimizer, RunContext, RunSaver

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint or snapshot from which a run was resumed."""

    checkpoint: Path
    batches: int
    """The number of global batches seen at that time."""
    is_snapshot: bool
    """Whether it is a snapshot in memory, which does not outlive the launch."""

    @property
    def name(self) -> str:
        """The path, or the words for a snapshot."""
        return "a snapshot in memory" if self.is_snapshot else str(self.checkpoint)


class Run:
    """The state of one stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    Args:
        context: the parts of the Trainer that the run uses.
        fabric: the Fabric of the Trainer.
        module: the module of the stage.
        callbacks: those of the Trainer and of the module.
        loggers: the loggers of this rank.
        stage: the name of the stage.
        saver_of: returns what saves the checkpoints of the run that it is given.
    """

    schedulers_paused = False
    seed = 0
    """The seed of the data order and of the generators, once the ranks have agreed on it."""
    in_window = False
    """Whether gradients are partly accumulated; checkpoints are refused then."""
    _may_stop: Callable[[], bool] | None = None
    is_stopped = False
    """Whether the fit has stopped before a step for which it had taken a batch."""

    def __init__(
        self,
        context: RunContext,
        fabric: Fabric,
        module: TrainModule,
        callbacks: Sequence[Callback],
        loggers: LoggerFanout,
        stage: str,
        saver_of: Callable[[Run], RunSaver],
    ) -> None:
        self.context = context
        self.directory = context.directory
        self.trainer = context.view
        self.note = context.note
        self.fabric = fabric
        self.module = module
        self._use_parts(fabric)
        self.callbacks = in_call_order(callbacks)
        self.loggers = loggers
        self.stage = stage
        self.progress = Progress()
        self.heartbeat = context.heartbeat
        self.triggers = Triggers(self.world)
        self.accumulation = AccumulationSchedule(1)
        self.optimizers: list[Optimizer] = []
        self.manual_optimizers: list[ManualOptimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.used_rates: list[float] = []
        """The learning rates of the newest update, where a scheduler has changed them since; else empty."""
        self.averages = Averages()
        self.train_log = MetricLog("train", self.world, module)
        self.triggers.compare_names(self.train_log)
        self.latest_loss: Any = None
        """The loss of the newest micro-batch, for the progress bar and optimizer closures."""
        self.evaluated_batches: dict[int, int] = {}
        """Batches of each validation loader that this rank has seen in the entire fit."""
        self.repeated = RepeatedSection(self.train_log, self.evaluated_batches, loggers)
        self.batch_indices: list[list[Any] | None] = []
        self.metrics = RunMetrics(self.train_log, loggers)
        self.sanity_checking = self.evaluating = self.stop_requested = False
        self.stop_reason: str | None = None
        self.preempted_by: tuple[int, str] | None = None
        """The rank that received a preemption signal, and the signal's name."""
        self.resumed: Resumed | None = None
        """The checkpoint or snapshot from which this run was resumed; None if it was not."""
        self.manual_backward: Callable[..., None] = _no_loop
        # Functions that are called when the run has ended, also after an error, such as those that revert layers.
        self.at_end = ExitStack()
        self.saver = saver_of(self)
        self._register_handlers()

    def _use_parts(self, fabric: Fabric) -> None:
        """Hold the parts of the Fabric, so that loops need not reach through it."""
        self.world = fabric.world
        self.strategy, self.traits = fabric.strategy, fabric.strategy.traits
        self.precision, self.scaler, self.updater = fabric.precision, fabric.scaler, fabric.updater
        self.device_type = self.world.device.type
        self.meter = Meter(self.world, unit_of(self.module))

    # ---- state of the loops ---------------------------------------------------------------------------------------

    def check_together(self, what: str) -> None:
        """Raise for a collective call after an error, when other ranks may not take part.

        Raises:
            ConfigurationError: an error is ending this run, and other ranks may never reach the call.
        """
        if self.world.size > 1 and self.context.has_failed():
            raise ConfigurationError(
                f"{what} was called after an error, in on_exception or later, where it would wait for ranks that may "
                "never reach it: resume from the newest checkpoint, with ckpt_path='auto'."
            )

    def resume_from(self, checkpoint: Path, is_snapshot: bool) -> None:
        """Record the checkpoint that this run was restored from."""
        self.resumed = Resumed(checkpoint, self.progress.global_batch, is_snapshot)

    def use_manual(self, optimizers: Sequence[ManualOptimizer], backward: Callable[..., None]) -> None:
        """Use manual optimization: the module's training step runs backward passes and updates."""
        self.manual_optimizers, self.manual_backward = list(optimizers), backward

    def use_optimizers(self, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> None:
        """Train with these optimizers and schedulers."""
        self.optimizers, self.schedulers = optimizers, schedulers

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def hooks(self, name: str) -> tuple[Hook, ...]:
        """Return the functions to call for a hook, bound to its leading arguments: callbacks, then the module's own.

        Callbacks that run last follow the module's hook, so that a checkpoint contains the complete step.
        """
        return self._around_module(name, self.callbacks)

    def _around_module(self, name: str, callbacks: Sequence[Callback]) -> tuple[Hook, ...]:
        first = self._callback_hooks(name, [callback for callback in callbacks if not callback.runs_last])
        last = self._callback_hooks(name, [callback for callback in callbacks if callback.runs_last])
        return (*first, *self.module_hook(name), *last)

    def hooks_around(self, name: str) -> tuple[tuple[Hook, ...], tuple[Hook, ...]]:
        """Return the hooks before and after the reduction of an epoch's metrics; hooks with ``monitors`` are after."""
        watching = [callback for callback in self.callbacks if callback.monitors]
        others = [callback for callback in self.callbacks if not callback.monitors]
        return self._around_module(name, others), self._callback_hooks(name, watching)

    def module_hook(self, name: str) -> tuple[Hook, ...]:
        """Return a tuple with the module's hook, empty if it is not overridden."""
        return (getattr(self.module, name),) if is_overridden(name, self.module) else ()

    def callback_hooks(self, name: str) -> tuple[Hook, ...]:
        """Return a hook of the callbacks only, bound to its leading arguments."""
        return self._callback_hooks(name, self.callbacks)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook that is not on the hot path."""
        for hook in self.hooks(name):
            hook(*args)

    def _callback_hooks(self, name: str, callbacks: Sequence[Callback]) -> tuple[Hook, ...]:
        return tuple(partial(hook, self.trainer, self.module) for hook in wanted(callbacks, name))

    # ---- signals --------------------------------------------------------------------------------------------------

    def _register_handlers(self) -> None:
        """Register a handler for each signal; they run in the order of ``Signal``, the same on every rank."""
        on = self.triggers.on
        on(Signal.NONFINITE, self._raise_nonfinite)
        on(Signal.NOTE, self._show_notes)
        on(Signal.LOSS_SPIKE, self._report_spikes)
        on(Signal.SAVE_DONE, lambda sent: self.saver.finish(next(iter(sent.values()))))
        on(Signal.END_EPOCH, self._cut_epoch)
        on(Signal.CONTINUE, self._withdraw_stop)
        on(Signal.PREEMPT, self._preempt)
        on(Signal.STOP, self._stop)

    def _raise_nonfinite(self, sent: Sent) -> None:
        raise NonFiniteError(next(iter(sent.values())))

    def _show_notes(self, sent: Sent) -> None:
        # Cleared, as the handlers run again if the window is repeated, and would show the notes twice.
        self.triggers.fired.pop(Signal.NOTE, None)
        for text in sent.values():
            self.note(text)

    def _report_spikes(self, sent: Sent) -> None:
        # Cleared for the same reason.
        self.triggers.fired.pop(Signal.LOSS_SPIKE, None)
        for step, text in sent.values():
            self.note(text)
            self.context.notify("loss_spike", text, step, f"loss_spike_{step}")

    def _cut_epoch(self, sent: Sent) -> None:
        self.progress.epoch_cut = True

    def _withdraw_stop(self, sent: Sent) -> None:
        self.stop_requested, self.stop_reason = self.preempted_by is not None, None

    def _preempt(self, sent: Sent) -> None:
        self.stop_requested = True
        self.preempted_by = min(sent.items())

    def _stop(self, sent: Sent) -> None:
        self.stop_requested = True
        self.stop_reason = self.stop_reason or next(filter(None, sent.values()), None)

    def allow_stops(self, may_stop: Callable[[], bool]) -> None:
        """Stop before a step if a stop is requested and this function returns True; the same on all ranks."""
        self._may_stop = may_stop

    def stops_before_step(self) -> bool:
        """Return whether the fit stops before the step for which a batch was taken, and record it."""
        self.is_stopped = self.stop_requested and self._may_stop is not None and self._may_stop()
        return self.is_stopped

    def restore_module(self) -> None:
        """Take the module from its strategy, which may gather its weights. Collective."""
        module, device = self.module, self.world.device
        was_here = any(each.device == device for each in module.parameters())
        self.strategy.restore(module)
        if was_here and device.type != "cpu" and all(each.device.type == "cpu" for each in module.parameters()):
            self.note(f"The full weights are on the CPU, as they do not fit into the free memory of {device}.")

    # ---- updates --------------------------------------------------------------------------------------------------

    def trainability_changed(self) -> None:
        """Report frozen parameters to a strategy whose forward passes use other tensors than its optimizers."""
        if self.traits.reduces_in_backward:
            self.strategy.trainability_changed(self.module)

    def add_average(self, settings: AverageSettings) -> Average:
        """Maintain an average of the weights from now on.

        Raises:
            ConfigurationError: it conflicts with another average of this run.
        """
        return self.averages.add(Average(settings, self.module, self.strategy, self.world, self._toggled))

    def _toggled(self) -> Sequence[Optimizer]:
        """Return the optimizers whose parameters a step may freeze temporarily."""
        return () if self.module.automatic_optimization else self.optimizers

    def clip_gradients(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> Tensor | None:
        """Clip an optimizer's gradients if a value is given; return the norm before clipping. Collective."""
        if not value:
            return None
        for manual in self.manual_optimizers:
            if id(optimizer) in (id(manual), id(manual.optimizer)):
                optimizer = manual.optimizer
                manual.reduce()
        return self.updater.clip(optimizer, value, algorithm or "norm")

    # ---- learning rates ----------------------------------------------------------------------------------------------

    def pause_lr_schedulers(self) -> None:
        """Stop advancing schedulers: a callback sets the learning rates from now on."""
        self.schedulers_paused = True
        self.used_rates.clear()

    def keep_rates(self) -> None:
        """Keep the learning rates that an update has used, before schedulers change them."""
        self.used_rates[:] = rates_of(self.optimizers)

    @property
    def has_step_plateaus(self) -> bool:
        """Whether a scheduler with interval "step" reads a metric, which the validation of the step may log."""
        return self._advances and any(each.interval == "step" and each.needs_metric for each in self.schedulers)

    @property
    def _advances(self) -> bool:
        # Under manual optimization the user advances them.
        return self.module.automatic_optimization and not self.schedulers_paused

    def update_learning_rates(self, interval: str) -> None:
        """Advance the due schedulers of an interval, except those of steps that read a metric."""
        if not self._advances:
            return
        if interval == "step":
            self.keep_rates()
        count = self.progress.global_step if interval == "step" else self.progress.epoch + 1
        for config in self.schedulers:
            later = interval == "step" and config.needs_metric
            if config.interval == interval and count % config.frequency == 0 and not later:
                self._advance(config)

    def update_plateaus(self) -> None:
        """Advance the due schedulers with interval "step" that read a metric, once for each step. Collective then.

        Called when the validation after the step, if there is one, has ended.
        """
        progress = self.progress
        if progress.judged_at == progress.global_step:
            return
        progress.judged_at = progress.global_step
        if self._advances:
            for config in self.schedulers:
                if config.interval == "step" and config.needs_metric and progress.global_step % config.frequency == 0:
                    self._advance(config)

    def _advance(self, config: SchedulerConfig) -> None:
        if not config.needs_metric:
            self.module.lr_scheduler_step(config.scheduler, None)
            return
        known = self.metrics.view("callback")
        mine = known.get(str(config.monitor)) if not config.strict else self.metrics.monitored(
            str(config.monitor), type(config.scheduler).__name__
        )  # fmt: skip
        # A step's value differs between ranks; the learning rates must be the same on all ranks.
        metric = self.world.broadcast_object(mine)
        if metric is not None:
            self.module.lr_scheduler_step(config.scheduler, metric)


def _no_loop(*args: Any, **kwargs: Any) -> None:
    raise MetricError("manual_backward belongs in training_step, while fit runs.")


def rates_of(optimizers: Iterable[Optimizer]) -> list[float]:
    """Return the learning rate of each optimizer's first group; NaN for one on a device, which would be waited for."""
    rates: list[Any] = [optimizer.param_groups[0].get("lr") for optimizer in optimizers]
    for index, rate in enumerate(rates):
        if rate.__class__ is not float:
            is_readable = isinstance(rate, float) or (isinstance(rate, Tensor) and rate.is_cpu)
            rates[index] = float(rate) if is_readable else math.nan
    return rates
