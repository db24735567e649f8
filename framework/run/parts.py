"""``RunParts``: the parts of a run's Fabric under names of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..core.precision import LossScaler, Precision
    from ..distributed.world import World
    from ..fabric.fabric import Fabric
    from ..parallel.optimizer_step import Updater
    from ..parallel.strategy import Strategy, Traits


class RunParts:
    """The parts of a run's Fabric, so that loops need not reach through it."""

    fabric: Fabric
    world: World

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self.fabric.strategy

    @property
    def traits(self) -> Traits:
        """The traits of the strategy."""
        return self.fabric.strategy.traits

    @property
    def precision(self) -> Precision:
        """The precision."""
        return self.fabric.precision

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; None where losses are not scaled, or the strategy scales them itself."""
        return self.fabric.scaler

    @property
    def updater(self) -> Updater:
        """Applies updates: it unscales, clips, and checks that gradients are finite."""
        return self.fabric.updater

    @property
    def device_type(self) -> str:
        """The type of this rank's device, such as ``"cpu"``."""
        return self.world.device.type
