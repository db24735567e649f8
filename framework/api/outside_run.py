"""The Trainer of a module that is not in a run: its last one, or one that the user has set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ..core.optimizer_config import parameters_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from ..core.optimizer_config import SchedulerConfig
    from ..core.progress import Progress
    from ..distributed.world import World
    from ..fabric.fabric import Fabric
    from .contracts import TrainerView


@dataclass(frozen=True)
class OutsideRun:
    """Takes the place of a module's run before and after its runs.

    It refers to the Trainer only. A reference to the run would keep its loaders, and so their workers, alive.
    """

    trainer: TrainerView

    @property
    def fabric(self) -> Fabric:
        """The Fabric of the Trainer."""
        return self.trainer.fabric

    @property
    def world(self) -> World:
        """The ranks of the Trainer."""
        return self.trainer.world

    @property
    def progress(self) -> Progress:
        """The counters of the last fit."""
        return self.trainer.progress

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the last fit."""
        return self.trainer.optimizers

    @property
    def manual_optimizers(self) -> Sequence[Any]:
        """An empty sequence: optimizers are not wrapped outside of a run."""
        return ()

    @property
    def schedulers(self) -> Sequence[SchedulerConfig]:
        """The schedulers of the last fit."""
        return self.trainer.lr_schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute this process's gradients, without loss scale or reduction, for example in a test of a step."""
        loss.backward(*args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> Tensor | None:
        """Clip this process's gradients; return the norm before clipping, when clipping by norm."""
        parameters = parameters_of(optimizer)
        if value and algorithm == "value":
            clip_grad_value_(parameters, value)
            return None
        return clip_grad_norm_(parameters, value) if value else None

    def trainability_changed(self) -> None:
        """Do nothing: no strategy has wrapped the module."""
