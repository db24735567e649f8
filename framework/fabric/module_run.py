"""``FabricRun``: takes the place of a run for a ``TrainModule`` that a Fabric has set up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigurationError
from ..core.progress import Progress
from .engine import Engine


class FabricRun:
    """The ranks, loggers, optimizers and counters that the steps of a ``TrainModule`` read.

    Args:
        fabric: the Fabric that has set the module up.
        prepared: the objects that it has set up.
        engine: the engine of the module.
    """

    def __init__(self, fabric: Any, prepared: Any, engine: Engine) -> None:
        self.fabric = fabric
        self._prepared = prepared
        self.trainer = NoTrainer(fabric)
        self.manual_optimizers = ()
        self._engine = engine

    @property
    def world(self) -> Any:
        """The ranks."""
        return self.fabric.world

    @property
    def progress(self) -> Progress:
        """The epoch of the loader that is being read, and the number of updates."""
        loader = self._prepared.reading.current
        return Progress(epoch=0 if loader is None else loader.epoch, global_step=self._prepared.updates)

    @property
    def optimizers(self) -> list[Any]:
        """The module's optimizers as ``setup`` returned them."""
        return list(self._engine.optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers that are set up, of any module."""
        return [SimpleNamespace(scheduler=scheduler) for scheduler in self._prepared.schedulers]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients through the Fabric."""
        self.fabric.backward(loss, self._engine.module, *args, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> Tensor | None:
        """Clip gradients through the Fabric."""
        if not value:
            return None
        name = "clip_val" if algorithm == "value" else "max_norm"
        norm: Tensor | None = self.fabric.clip_gradients(self._engine.module, optimizer, **{name: value})
        return norm

    def trainability_changed(self) -> None:
        """Report frozen parameters to the strategy."""
        strategy = self._engine.strategy
        if strategy.traits.reduces_in_backward:
            strategy.trainability_changed(self._engine.module)


class NoTrainer:
    """Takes the place of ``module.trainer`` in a Fabric: it has the ranks and loggers of the Fabric."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the Fabric."""
        return list(self._fabric.loggers)

    def __getattr__(self, name: str) -> Any:
        if name in ("global_rank", "local_rank", "node_rank", "world_size", "is_global_zero", "strategy"):
            return getattr(self._fabric, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigurationError(
            f"self.trainer.{name} is not available: the module was set up by a Fabric, which has no Trainer. Pass the "
            "value to the module, or train it with Trainer.fit."
        )


class FabricLog:
    """The destination of ``self.log`` of a module that a Fabric has set up: the loggers of the Fabric."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool = True, *args: Any) -> None:
        """Send a value to the loggers at once; arguments about steps, epochs and reductions have no effect."""
        if logger:
            self._fabric.log(name, value if isinstance(value, Tensor | int | float) else value.compute())


def join_fabric(module: nn.Module, fabric: Any, prepared: Any, engine: Engine) -> None:
    """Make the steps of a ``TrainModule`` read from a Fabric; do nothing for any other module."""
    join = getattr(module, "join_fabric", None)
    if join is not None:
        join(FabricRun(fabric, prepared, engine), FabricLog(fabric))


def leave_fabric(module: nn.Module) -> None:
    """Undo ``join_fabric``."""
    join = getattr(module, "join_fabric", None)
    if join is not None:
        join(None, None)
