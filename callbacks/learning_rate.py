"""``LearningRateMonitor``: logs learning rates."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class LearningRateMonitor(Callback):
    """Log the learning rate of every optimizer, and optionally its momentum and weight decay.

    Names of the metrics:

    - ``lr-AdamW``, and ``lr-AdamW-1`` for a second optimizer of the same class;
    - ``lr-AdamW/pg1`` if there are several parameter groups; the ``name`` of a group, if it has one, replaces ``pg1``;
    - the ``name`` of a scheduler, if it has one, replaces ``lr-AdamW``;
    - ``-momentum`` and ``-weight_decay`` are appended for these values.

    Args:
        logging_interval: ``"step"`` or ``"epoch"``. None: the interval of the scheduler, or both intervals for an
            optimizer without a scheduler.
        log_momentum: Also log the momentum: the first beta if the optimizer has betas, 0 if it has no momentum.
        log_weight_decay: Also log the weight decay.

    Attributes:
        lrs: The learning rates read so far in this fit, by name.
        last_momentum_values: The last momentum by name, with ``log_momentum``.
        last_weight_decay_values: The last weight decay by name, with ``log_weight_decay``.

    Raises:
        ConfigurationError: The interval is unknown.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): give 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        """The learning rates that were logged in the current or last fit, by name."""
        self.last_momentum_values: dict[str, float | None] = {}
        """The momenta that were logged last, by name; None before the first."""
        self.last_weight_decay_values: dict[str, float | None] = {}
        """The weight decays that were logged last, by name; None before the first."""
        self._sources: list[tuple[Optimizer, str, set[str]]] = []
        self._every = 1
        self._taken_step = -1
        self._taken: dict[str, float] = {}

    def wants(self, hook: str) -> bool:
        if hook in ("on_train_batch_start", "on_train_batch_end"):
            return self.logging_interval != "epoch"
        return super().wants(hook)

    def check(self, trainer: TrainerView, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigurationError(
                "LearningRateMonitor requires a logger: pass one to the Trainer, or remove the callback."
            )

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._every = trainer.log_every_n_steps
        self._taken_step = -1
        self._sources = self._name_optimizers(trainer)
        names = [full for optimizer, name, _ in self._sources for full, _ in _named_groups(optimizer, name)]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names if self.log_momentum}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names if self.log_weight_decay}

    def on_train_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        if self.logging_interval != "step" and (values := self._values("epoch")):
            trainer.log_metrics(values)

    def on_train_batch_start(self, trainer: TrainerView, module: TrainModule, batch: Any, batch_idx: int) -> None:
        # Read the rate before the step: by on_train_batch_end, where it is logged, schedulers have already advanced.
        step = trainer.global_step
        if (step + 1) % self._every == 0 and step != self._taken_step:
            self._taken_step, self._taken = step, self._values("step")

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._taken and trainer.global_step > self._taken_step:
            trainer.log_metrics(self._taken)
            self._taken = {}

    def _name_optimizers(self, trainer: TrainerView) -> list[tuple[Optimizer, str, set[str]]]:
        """Return each optimizer with its name and the intervals at which its learning rate changes."""
        seen: Counter[type] = Counter()
        sources: list[tuple[Optimizer, str, set[str]]] = []
        for optimizer in trainer.optimizers:
            _check_group_names(optimizer)
        named: set[int] = set()
        for config in trainer.lr_scheduler_configs:
            optimizer = config.scheduler.optimizer
            named.add(id(optimizer))
            sources.append((optimizer, config.name or _numbered(optimizer, seen), {config.interval}))
        for optimizer in trainer.optimizers:
            if id(optimizer) not in named:
                sources.append((optimizer, _numbered(optimizer, seen), {"step", "epoch"}))
        return sources

    def _values(self, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for optimizer, name, intervals in self._sources:
            if self.logging_interval is not None or interval in intervals:
                values.update(self._values_of(optimizer, name))
        return values

    def _values_of(self, optimizer: Optimizer, name: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for full, group in _named_groups(optimizer, name):
            values[full] = float(group["lr"])
            # Callbacks may add a group while the fit runs.
            self.lrs.setdefault(full, []).append(values[full])
            if self.log_momentum:
                momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0))
                values[f"{full}-momentum"] = self.last_momentum_values[f"{full}-momentum"] = momentum
            if self.log_weight_decay:
                decay = float(group.get("weight_decay", 0))
                values[f"{full}-weight_decay"] = self.last_weight_decay_values[f"{full}-weight_decay"] = decay
        return values


def _named_groups(optimizer: Optimizer, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the parameter groups of an optimizer, each with the name under which its values are logged."""
    groups = optimizer.param_groups
    labels = [group.get("name") or (f"pg{number}" if len(groups) > 1 else "") for number, group in enumerate(groups, 1)]
    return [(f"{name}/{label}" if label else name, group) for label, group in zip(labels, groups, strict=True)]


def _numbered(optimizer: Optimizer, seen: Counter[type]) -> str:
    number = seen[type(optimizer)]
    seen[type(optimizer)] += 1
    return f"lr-{type(optimizer).__name__}" + (f"-{number}" if number else "")


def _check_group_names(optimizer: Optimizer) -> None:
    names = [group.get("name") or f"pg{number}" for number, group in enumerate(optimizer.param_groups, 1)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"LearningRateMonitor: {type(optimizer).__name__} has several parameter groups named {twice[0]!r}; "
            "give each group a unique name."
        )
