"""``Clipping``: the part of a Fabric that unscales and clips gradients between a backward pass and the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, NonFiniteError
from ..core.optimizer_config import parameters_of
from ..parallel.gradient_operations import GradientOperations
from .prepared import Chosen, Prepared


class Clipping:
    """Operations on the gradients of modules that are set up."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._scaler = prepared.scaler

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, averaged over ranks; None if no loss depends on it. Collective.

        Call it between the backward that ends a window and the update, with a parameter as the module holds it now.

        Raises:
            ConfigurationError: the parameter belongs to no module that is set up.
        """
        if not self._prepared.engines:
            # In the Fabric of a Trainer the strategy itself holds the single module.
            return self._prepared.strategy.gradients.full(parameter)
        for engine in self._prepared.engines:
            if engine.owns(parameter):
                return engine.strategy.gradients.full(parameter)
        raise ConfigurationError(
            f"full_gradient was given a tensor of shape {tuple(parameter.shape)} that is not a parameter of a module "
            "that is set up: take it from module.parameters() after setup, not before."
        )

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients by norm or by value. Collective.

        Inside ``accumulate`` it acts at the end of a window only. With a loss scale a norm that is not finite is not an
        error: the update is skipped.

        Args:
            module: the module that is set up.
            optimizer: the optimizer whose gradients are clipped.
            clip_val: clamp gradients to ``[-clip_val, clip_val]``.
            max_norm: scale gradients down to this norm.
            norm_type: the order of the norm.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, a 0-d tensor; None when clipping by value, or where the window does not end.

        Raises:
            ConfigurationError: not exactly one of ``clip_val`` and ``max_norm`` is given.
            NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is true.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                f"clip_gradients was given clip_val={clip_val!r} and max_norm={max_norm!r}: give exactly one of them."
            )
        self._prepared.engine_for(module, "clip_gradients")
        mine = [one for one in self._prepared.optimizers if any(optimizer is each for each in (one, one.optimizer))]
        if not mine:
            raise ConfigurationError("clip_gradients was given an optimizer that is not set up; call setup with it.")
        chosen = [(mine[0], parameters_of(mine[0].optimizer))]
        return self._clip(chosen, clip_val, max_norm or 0.0, norm_type, error_if_nonfinite)

    def _clip(
        self, chosen: Sequence[Chosen], value: float | None, max_norm: float, norm_type: float, strict: bool
    ) -> Tensor | None:
        due = [(one, parameters) for one, parameters in chosen if not one.waits]
        if not due:
            return None
        parts = _unscaled(due)
        if not parts:
            # Nothing was reduced, so there is no norm, and no update follows.
            return None if value is not None else torch.zeros((), device=self._prepared.strategy.world.device)
        if value is not None and self._scaler is None:
            return _clip_values(parts, value)
        norm = _joint([gradients.norm(parameters, norm_type) for gradients, parameters in parts], norm_type)
        # Clamping would hide an infinity from the loss scaler, which must skip this update.
        finite = bool(norm.isfinite()) if strict or self._scaler is not None else True
        if not finite and self._scaler is None:
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}. Lower the learning rate, or clip with "
                "error_if_nonfinite=False to continue."
            )
        if value is not None:
            return _clip_values(parts if finite else (), value)
        for gradients, parameters in parts if finite else ():
            gradients.clip_by_norm(parameters, max_norm, norm)
        return norm

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the gradients of these parameters by their joint norm. Collective.

        Args:
            parameters: parameters of modules that are set up, of one optimizer or of several; or such a module.
            max_norm: the norm that they are scaled down to.
            norm_type: the order of the norm.

        Returns:
            The norm before clipping, a 0-d tensor; None where the window does not end.

        Raises:
            ConfigurationError: a parameter has a gradient, and no optimizer that is set up updates it.
        """
        return self._clip(self._prepared.chosen_by(parameters), None, max_norm, norm_type, False)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of these parameters, or of a module's, to ``[-clip_value, clip_value]``. Collective."""
        self._clip(self._prepared.chosen_by(parameters), clip_value, 0.0, 2.0, False)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale and the window's weight, as the update does. Collective.

        Args:
            optimizer: an optimizer or a list of them; by default all that are set up.
        """
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in self._prepared.optimizers:
            wanted = optimizer is None or any(each is one or each is one.optimizer for each in given)
            if wanted and not one.waits:
                one.prepare()
                one.engine.updater.unscale(one.optimizer)


def _unscaled(due: Sequence[Chosen]) -> list[tuple[GradientOperations, list[Tensor]]]:
    """Unscale the gradients of optimizers that update now; return their operations and the chosen parameters."""
    ready = [(one, parameters) for one, parameters in due if one.prepare()]
    for one, _ in ready:
        one.engine.updater.unscale(one.optimizer)
    return [(one.engine.strategy.gradients, parameters) for one, parameters in ready]


def _clip_values(parts: Sequence[tuple[GradientOperations, list[Tensor]]], value: float) -> None:
    for gradients, parameters in parts:
        gradients.clip_by_value(parameters, value)


def _joint(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of tensors of which these are the norms."""
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
