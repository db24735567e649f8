"""``single``: one process on one device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..framework.core.errors import ConfigurationError
from ..framework.core.precision import Precision
from ..framework.parallel.strategy import MemoryLayout, Recovery, Routed, StepFunction, Strategy


class SingleDeviceStrategy(Strategy):
    """Trains on one device. The step, backward and update are torch's own, called directly."""

    name = "single"
    memory_layout = MemoryLayout()
    recovery = Recovery()

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse more than one rank."""
        if world_size > 1:
            raise ConfigurationError(
                f"strategy='single' with {world_size} ranks: it runs on one device. Use strategy='ddp', or devices=1."
            )

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Return the optimizers unchanged."""
        return list(optimizers)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return the user's step unchanged."""
        return step

    def zero_backward(self) -> None:
        """Do nothing: one rank has no collectives."""

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Do nothing: the gradients of one rank are the average."""
