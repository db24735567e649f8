"""One update of the weights: unscale, clip, agree on finite, step. The one home of what happens to gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, unknown
from ..core.loss_scaler import LossScaler
from .strategy import Strategy, gradients_of, parameters_of

CLIP_ALGORITHMS = ("norm", "value")
# Below it a loss is made smaller than it is, and its gradients overflow by themselves.
_LEAST_SCALE = 1.0


class Updater:
    """Applies updates for one strategy and one loss scaler.

    ``skip_nonfinite`` leaves out an update whose gradients are not finite; with a scaler that is always so. Whether
    they are is the same on all ranks under every strategy.
    """

    def __init__(self, strategy: Strategy, scaler: LossScaler | None, skip_nonfinite: bool = False) -> None:
        self.strategy = strategy
        self.scaler = scaler
        self.guarded = skip_nonfinite or scaler is not None
        self.unexplained: Callable[[Optimizer], None] | None = None
        """Told of gradients that are not finite, and that no loss scale explains: alike on all ranks. May raise."""
        self.settles_later = False
        """Several optimizers share one loss scale: it may change only when none of them holds scaled gradients."""
        self._unscaled: set[int] = set()
        self._outcomes: list[bool] = []

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, once for each update."""
        if self.scaler is not None and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(gradients_of(parameters_of(optimizer)))
            self._unscaled.add(id(optimizer))

    def forget(self, optimizer: Optimizer) -> None:
        """Take note that the gradients of an optimizer were dropped."""
        self._unscaled.discard(id(optimizer))

    def settle(self) -> None:
        """Adapt the scale to all updates since the last call, where ``settles_later`` puts that off."""
        if self.scaler is not None and self._outcomes:
            self.scaler.update(all(self._outcomes))
        self._outcomes.clear()

    def holds_scaled(self, optimizer: Optimizer) -> bool:
        """Whether gradients of an optimizer, if it has any, still carry the loss scale."""
        return self.scaler is not None and id(optimizer) not in self._unscaled

    def clip(
        self, optimizer: Optimizer, value: float, algorithm: str = "norm", norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip an optimizer's gradients; return their norm before, a 0-d tensor, when clipping by norm. Collective."""
        parameters = parameters_of(optimizer)
        self.unscale(optimizer)
        if algorithm == "value":
            self.strategy.clip_by_value(parameters, value)
            return None
        norm = self.strategy.gradient_norm(parameters, norm_type)
        self.strategy.clip_by_norm(parameters, value, norm)
        return norm

    def __call__(
        self,
        optimizer: Optimizer,
        before: Callable[[], None] | None = None,
        step: Callable[[], bool] | None = None,
        blind: bool = False,
    ) -> bool:
        """Update the weights; return whether that was applied. Collective.

        ``before`` runs on unscaled gradients (hooks, clipping); ``step`` replaces the strategy's. With ``blind`` there
        are no gradients to look at before it.
        """
        if not self.guarded and (blind or self.unexplained is None):
            if before is not None:
                before()
            return step() if step is not None else self.strategy.step(optimizer)
        self.unscale(optimizer)
        # Before clipping: that would hide an infinity by clamping it.
        finite = self.strategy.gradients_are_finite(parameters_of(optimizer))
        if not finite and self.unexplained is not None and not self._scale_explains():
            self.unexplained(optimizer)
        if finite:
            if before is not None:
                before()
            applied = step() if step is not None else self.strategy.step(optimizer)
        self._unscaled.discard(id(optimizer))
        self._outcomes.append(finite)
        if not self.settles_later:
            self.settle()
        return finite and applied

    def _scale_explains(self) -> bool:
        """Whether smaller losses could have finite gradients."""
        return self.scaler is not None and self.scaler.scale > _LEAST_SCALE


def check_clipping(value: float | None, algorithm: str | None) -> tuple[float | None, str]:
    """Check a clip value and the name of an algorithm; 0 and None mean no clipping.

    Raises:
        UnknownNameError: the algorithm is not known.
        ConfigurationError: the value is no number from 0.
    """
    name = algorithm or "norm"
    if name not in CLIP_ALGORITHMS:
        raise unknown("gradient_clip_algorithm", str(name), CLIP_ALGORITHMS)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise ConfigurationError(
            f"gradient_clip_val={value!r} must be a number of at least 0; None or 0 does not clip."
        )
    return (float(value) if value else None), name
