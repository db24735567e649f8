"""The common part of the operations on gradients that differ between the three optimizers of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Protocol

from torch import Tensor

from ...framework.core.errors import ConfigurationError
from .state import EngineState


def arrived_twice(name: str, stage: int) -> ConfigurationError:
    """Return the error for a gradient that was reduced before the backward pass has computed all of it."""
    return ConfigurationError(
        f"'{name}' got a gradient twice in one backward pass, as a layer that runs twice does under torch's "
        f"checkpoint(use_reentrant=True), and ZeRO stage {stage} reduces the first one at once: pass "
        "use_reentrant=False, or use strategy='zero1'."
    )


class Scaling(Protocol):
    """The part of ``EngineUpdate`` that a stage uses."""

    engine: Any
    zero: Any
    state: EngineState

    def arrives(self) -> None:
        """Note that a gradient arrives."""

    def norm(self) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor; infinite if it is not finite. Collective."""

    def known_norm(self) -> Tensor | None:
        """Return the norm including the loss scale if it was computed since the last backward pass, else None."""

    def scale_by_loss_scale(self, factor: float) -> None:
        """Multiply gradients through the loss scale that the next step divides by."""

    def scale_norm(self, factor: float | Tensor) -> None:
        """Scale the cached norm with gradients that were multiplied."""


class UseOfParameters:
    """A record of the parameters that have a gradient in this window, on this rank.

    Args:
        parameters: the parameters that the engine trains.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._trained = {id(one) for one in parameters}
        self._used: set[int] = set()

    def mark(self, parameter: Tensor, used: bool) -> None:
        """Record whether a parameter has a gradient."""
        (self._used.add if used else self._used.discard)(id(parameter))

    def unused(self) -> Set[int]:
        """Return the ``id`` of each parameter that has none."""
        return frozenset() if len(self._used) == len(self._trained) else self._trained - self._used

    def forget_use(self) -> None:
        """Begin another window."""
        self._used.clear()
