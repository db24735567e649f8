"""``GradientNormMonitor``: logs the gradient norm, under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError
from ..framework.core.intervals import WITHIN_EPOCHS, Due, Interval
from ..framework.core.optimizer_config import parameters_of

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class GradientNormMonitor(Callback):
    """Log the norm of the full gradient of each optimizer before clipping, at the steps that are logged, or ``every``.

    The metric is named ``grad_norm``, and ``grad_norm-1`` for a second optimizer. If gradients are sharded, it takes
    one reduction over the ranks.

    Args:
        norm_type: Order of the norm, such as 2.0 or ``float("inf")``.
        every: Log at another interval, such as ``"100 steps"``, ``"1e6 tokens"`` or ``"1 min"``. Of tokens, samples and
            times it is the step after the one that has reached them.

    Raises:
        ConfigurationError: The order is not a positive number, or ``every`` is not an interval.
    """

    collective = True

    def __init__(self, norm_type: float = 2.0, every: str | int | None = None) -> None:
        if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
            raise ConfigurationError(
                f"GradientNormMonitor(norm_type={norm_type!r}): give a positive number, or float('inf')."
            )
        self.norm_type = float(norm_type)
        self._given = None if every is None else Interval.parse(every, owner="GradientNormMonitor", units=WITHIN_EPOCHS)
        self.counted_intervals = () if self._given is None else (self._given,)
        self._due: Due | None = None
        self._is_due = False
        self._every = 1.0
        self._step = -1
        self._norms: dict[str, Tensor] = {}
        """The norms of the step in progress, with an interval of its own."""
        self._named: Sequence[tuple[Optimizer, str]] = ()

    def wants(self, hook: str) -> bool:
        return super().wants(hook) and (hook != "on_train_batch_end" or self._given is not None)

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        given = self._given
        self._every = trainer.log_every_n_steps
        self._due, self._is_due, self._norms = None, False, {}
        if given is not None and given.unit == "steps":
            self._every = given.number
        elif given is not None:
            self._due = Due(given, trainer, self.state_key)
        self._named = [
            (optimizer, f"grad_norm-{number}" if number else "grad_norm")
            for number, optimizer in enumerate(trainer.optimizers)
        ]

    def on_before_optimizer_step(self, trainer: TrainerView, module: TrainModule, optimizer: Optimizer) -> None:
        # Whether a step is due follows from the value that global_step has after its update.
        if (trainer.global_step + 1) % self._every if self._due is None else not self._is_due:
            return
        for own, name in self._named:
            if own is optimizer:
                gradients = trainer.strategy.gradients
                # Looked up in each step, since parameters may be added to an optimizer.
                norm = gradients.norm(parameters_of(optimizer), self.norm_type)
                if self._given is None:
                    module.log(name, norm, on_step=True, on_epoch=False)
                else:
                    self._step, self._norms[name] = trainer.global_step, norm

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Only after the last micro-batch of the step, when global_step has grown.
        if self._norms and trainer.global_step > self._step:
            trainer.log_metrics({name: float(norm) for name, norm in self._norms.items()})
            self._norms, self._is_due = {}, False
        if self._due is not None and self._due.reached():
            self._is_due = True
