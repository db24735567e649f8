"""``Prepared``: the registry of objects that a Fabric has set up."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..core.optimizer_config import parameters_of
from ..core.precision import LossScaler
from ..core.wording import a_type
from ..parallel.strategy import Strategy
from .engine import Engine, FabricOptimizer, FabricScheduler
from .loaders import FabricLoader, Reading
from .module import engine_of, unwrap
from .module_run import leave_fabric

Chosen = tuple[FabricOptimizer, list[Tensor]]
"""An optimizer, and some of the parameters that it updates."""


class Prepared:
    """The state that the parts of a Fabric share.

    Attributes:
        strategy: The prototype: each module is set up by a clone of it.
        scaler: The loss scaler of all modules; None if losses are not scaled, or if the strategy scales them.
        strategy_scales_losses: Whether the strategy scales losses itself, with one scale for each module.
        engines: One for each module that is set up.
        schedulers: All schedulers that are set up.
        loaders: All loaders that are set up.
        reading: The loaders that the user's loop is iterating over.
        seed: The seed of the order of loaders, the same on all ranks. None until it is given or agreed on.
    """

    def __init__(self, strategy: Strategy, scaler: LossScaler | None, strategy_scales_losses: bool) -> None:
        self.strategy = strategy
        self.scaler = scaler
        self.strategy_scales_losses = strategy_scales_losses
        self.engines: list[Engine] = []
        self.schedulers: list[FabricScheduler] = []
        self.loaders: list[FabricLoader] = []
        self.reading = Reading()
        self.seed: int | None = None

    def take_seed(self, seed: int) -> int:
        """Set the seed of loaders that are set up later, and return it."""
        self.seed = seed
        return seed

    def clear(self) -> None:
        """Release everything that was set up."""
        for engine in self.engines:
            engine.release()
            leave_fabric(engine.module)
        self.engines.clear()
        self.schedulers.clear()
        self.loaders.clear()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that are set up, in order: the user's own objects."""
        return [engine.module for engine in self.engines]

    @property
    def optimizers(self) -> list[FabricOptimizer]:
        """All optimizers that are set up."""
        return [optimizer for engine in self.engines for optimizer in engine.optimizers]

    @property
    def updates(self) -> int:
        """The largest number of updates that an optimizer has applied."""
        return max((one.applied for one in self.optimizers), default=0)

    def chosen_by(self, parameters: Any) -> list[Chosen]:
        """Return the optimizers that update any of these parameters, or of a module's, with those that each updates.

        Raises:
            ConfigurationError: no optimizer that is set up updates one of them, which has a gradient.
        """
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        given = {id(each): each for each in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        found: list[Chosen] = []
        for one in self.optimizers:
            mine = [each for each in parameters_of(one.optimizer) if given.pop(id(each), None) is not None]
            if mine:
                found.append((one, mine))
        left = next((each for each in given.values() if each.grad is not None), None)
        if left is not None or not found:
            which = "these parameters do" if left is None else f"a parameter of shape {tuple(left.shape)} does"
            raise ConfigurationError(
                f"{which} not belong to an optimizer that is set up; call setup with it, and take parameters from the "
                "module after that."
            )
        return found

    def engine_for(self, module: nn.Module, verb: str) -> Engine:
        """Return the engine of a module that was given to ``verb``."""
        engine = engine_of(module)
        if engine is None:
            engine = next((each for each in self.engines if each.module is module), None)
        if engine is None or engine not in self.engines:
            raise ConfigurationError(
                f"{verb} was given {a_type(module)} that is not set up; call setup with it and use what that returns."
            )
        return engine

    def holder_of(self, model: nn.Module) -> tuple[nn.Module, nn.Module, Strategy]:
        """Return the module that was set up and contains ``model``, ``model`` without its wrapper, and the strategy."""
        part = unwrap(model)
        for engine in self.engines:
            if any(each is part for each in engine.module.modules()):
                return engine.module, part, engine.strategy
        return part, part, self.strategy

    def engine_for_backward(self, model: nn.Module | None) -> Engine | None:
        """Return the engine that a loss belongs to, None if it may be of several."""
        if model is not None:
            return self.engine_for(model, "backward")
        # Modules without an optimizer, such as a teacher, have no gradients of their own.
        trained = [engine for engine in self.engines if engine.is_trained] or self.engines
        if len(trained) == 1:
            return trained[0]
        if len(trained) > 1 and self.strategy_scales_losses:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} with several modules: call backward(loss, model=...) to say which."
            )
        return None
