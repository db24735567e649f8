"""``GradientNormMonitor``: logs the gradient norm, under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError
from ..framework.core.optimizer_config import parameters_of

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class GradientNormMonitor(Callback):
    """Log the norm of the full gradient of each optimizer before clipping, at the steps that are logged.

    The metric is named ``grad_norm``, and ``grad_norm-1`` for a second optimizer. If gradients are sharded, it takes
    one reduction over the ranks.

    Args:
        norm_type: Order of the norm, such as 2.0 or ``float("inf")``.

    Raises:
        ConfigurationError: The order is not a positive number.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)) or not norm_type > 0:
            raise ConfigurationError(
                f"GradientNormMonitor(norm_type={norm_type!r}): give a positive number, or float('inf')."
            )
        self.norm_type = float(norm_type)
        self._every = 1
        self._named: Sequence[tuple[Optimizer, str]] = ()

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._every = trainer.log_every_n_steps
        self._named = [
            (optimizer, f"grad_norm-{number}" if number else "grad_norm")
            for number, optimizer in enumerate(trainer.optimizers)
        ]

    def on_before_optimizer_step(self, trainer: TrainerView, module: TrainModule, optimizer: Optimizer) -> None:
        # Whether a step is due follows from the value that global_step has after its update.
        if (trainer.global_step + 1) % self._every:
            return
        for own, name in self._named:
            if own is optimizer:
                gradients = trainer.strategy.gradients
                # Looked up in each step, since parameters may be added to an optimizer.
                norm = gradients.norm(parameters_of(optimizer), self.norm_type)
                module.log(name, norm, on_step=True, on_epoch=False)
