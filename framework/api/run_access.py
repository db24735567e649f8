"""The Trainer of a module, and the values of its current or last run that steps and hooks read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.errors import ConfigurationError
from .outside_run import OutsideRun

if TYPE_CHECKING:
    from ..fabric.fabric import Fabric
    from ..metrics.logger import Logger
    from .contracts import AttachedRun, TrainerView


class RunAccess(nn.Module):
    """The side of ``TrainModule`` that reads its Trainer."""

    _run: AttachedRun | None = None

    @property
    def _live(self) -> AttachedRun:
        if self._run is None:
            raise ConfigurationError(
                f"{type(self).__name__} belongs to no run: pass it to Trainer.fit, validate, test or predict, or set "
                "module.trainer in a test."
            )
        return self._run

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
        self._run = None if trainer is None else OutsideRun(trainer)

    @property
    def _in_run(self) -> bool:
        return self._run is not None and not isinstance(self._run, OutsideRun)

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
        """Whether ``device`` is a CUDA device."""
        return self.device.type == "cuda"

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
        return self._run.trainer.global_rank if self._run is not None else 0

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._run.trainer.local_rank if self._run is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def loggers(self) -> list[Logger]:
        """All loggers of the Trainer; an empty list without a Trainer."""
        return self._run.trainer.loggers if self._run is not None else []

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        self.fabric.print(*args, **kwargs)

    @property
    def device_mesh(self) -> None:
        """None: no strategy splits single layers over a mesh of devices."""

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked in a new first dimension; see ``Fabric.all_gather``. Collective."""
        return self.fabric.all_gather(data, group, sync_grads)
