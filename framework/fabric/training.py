"""``TrainingVerbs``: the way from a loss to an update, one batch after the other or in windows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, NonFiniteError
from ..parallel.strategy import parameters_of
from .gradient_window import GradientWindow, check_weight
from .loaders import FabricLoader
from .objects import Engine, FabricOptimizer
from .setup import SetupVerbs


class TrainingVerbs(SetupVerbs):
    """From losses to updates of the weights."""

    def backward(
        self, loss: Tensor, model: nn.Module | None = None, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Compute gradients; never steps.

        ``weight`` is how many items the micro-batch's mean loss is over (non-padding tokens, say): the update then is
        that of the mean over all items of the window and of all ranks. Give it on all ranks or on none.

        Args:
            loss: a scalar tensor.
            model: the set-up module it comes from; needed only by strategies that hold one loss scale for each module.
            weight: see above; by default all micro-batches weigh the same.
            options: those of ``Tensor.backward``, such as ``retain_graph``.
        """
        engine = self._engine_for_backward(model)
        loader = self._reading.current
        filler = loader is not None and loader.filler
        given = None if weight is None else float(weight)
        if self._window is not None and self._window.inside:
            factor = self._window.factor(0.0 if filler else 1.0 if given is None else given)
        else:
            factor = self._factor_alone(given, loader)
            self._forget_windows(engine)
        if self.scaler is not None:
            factor *= self.scaler.scale
        strategy = self.strategy if engine is None else engine.strategy
        strategy.backward(loss if factor == 1.0 else loss * factor, **options)

    def _factor_alone(self, weight: float | None, loader: FabricLoader | None) -> float:
        """Return what a loss outside ``accumulate`` is multiplied by: its part in the mean over ranks."""
        if weight is None:
            return 1.0 if loader is None else loader.share
        check_weight(weight)
        own = 0.0 if loader is not None and loader.filler else weight
        total = torch.tensor([own], dtype=torch.float64)
        self.world.control_reduce(total).wait()
        mean = total.item() / self.world.size
        return own / mean if mean else 0.0

    def _forget_windows(self, engine: Engine | None) -> None:
        for each in self._engines if engine is None else [engine]:
            if each.window is not None and each.window.is_closed:
                each.window = None

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None, None, None]:
        """Mark a micro-batch. Inside, optimizers and schedulers act only at the end of a window of micro-batches.

        The window has as many as ``Fabric(accumulate=...)`` says, fewer at the end of the loader that is being read.
        Its update is that of the weighted mean over all its micro-batches, of all ranks. Without ``models``, all
        modules that are set up take part; each set of models has windows of its own.
        """
        engines = [self._engine(model, "accumulate") for model in models] or self._engines
        key = tuple(sorted(self._engines.index(engine) for engine in engines))
        window, loader = self._window_of(key), self._reading.current
        window.enter(0 if loader is None else loader.epoch, loader is not None and loader.end)
        for engine in engines:
            engine.window = window
            engine.strategy.sync_gradients(window.sync)
        self._window = window
        try:
            yield
        finally:
            window.leave()
            for engine in engines:
                engine.strategy.sync_gradients(True)

    def _window_of(self, key: tuple[int, ...]) -> GradientWindow:
        if key not in self._windows:
            self._windows[key] = GradientWindow(self.world, self.accumulation, self.scaler is not None)
        return self._windows[key]

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window: gradients are reduced and optimizers act."""
        return self._window is None or self._window.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of a window."""
        steps = 0 if self._window is None else self._window.steps
        loader = self._reading.current
        return self.accumulation(0 if loader is None else loader.epoch, steps)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Generator[None, None, None]:
        """Keep gradients on this rank in the passes inside, for loops that accumulate by themselves."""
        strategy = self._engine(module, "no_backward_sync").strategy
        strategy.sync_gradients(not enabled)
        try:
            yield
        finally:
            strategy.sync_gradients(True)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter, averaged over ranks; None where no loss fed it. Collective.

        Ask between the backward that ends a window and the update, with a parameter as the module holds it now.

        Raises:
            ConfigurationError: the parameter belongs to no module that is set up.
        """
        if not self._engines:
            # A Trainer's Fabric: its strategy holds the one module.
            return self.strategy.full_gradient(parameter)
        for engine in self._engines:
            if engine.owns(parameter):
                return engine.strategy.full_gradient(parameter)
        raise ConfigurationError(
            f"full_gradient was given a tensor of shape {tuple(parameter.shape)} that is no parameter of a module that "
            "is set up: take it from module.parameters() after setup, not before."
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
        """Clip gradients to a norm, whose value before is returned, or to a value. Collective.

        Inside ``accumulate`` it acts at the end of a window only. With a loss scale a norm that is not finite is no
        error: the update is left out.

        Raises:
            ConfigurationError: not exactly one of ``clip_val`` and ``max_norm`` is given.
            NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is true.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                f"clip_gradients was given clip_val={clip_val!r} and max_norm={max_norm!r}: give exactly one of them."
            )
        self._engine(module, "clip_gradients")
        mine = [one for one in self._optimizers() if any(optimizer is each for each in (one, one.optimizer))]
        if not mine:
            raise ConfigurationError("clip_gradients was given an optimizer that is not set up; call setup with it.")
        return self._clip(mine[0], clip_val, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, optimizer: FabricOptimizer, value: float | None, max_norm: float | None, norm_type: float, strict: bool
    ) -> Tensor | None:
        if optimizer.waits:
            return None
        optimizer.prepare()
        engine, parameters = optimizer.engine, parameters_of(optimizer.optimizer)
        engine.updater.unscale(optimizer.optimizer)
        if value is not None and self.scaler is None:
            engine.strategy.clip_by_value(parameters, value)
            return None
        norm = engine.strategy.gradient_norm(parameters, norm_type)
        # Clamping would hide an infinity from the update, which is to be left out for it.
        finite = bool(norm.isfinite()) if strict or self.scaler is not None else True
        if not finite and self.scaler is None:
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}. Lower the learning rate, or clip with "
                "error_if_nonfinite=False to go on."
            )
        if value is not None:
            if finite:
                engine.strategy.clip_by_value(parameters, value)
            return None
        if finite:
            engine.strategy.clip_by_norm(parameters, float(max_norm or 0.0), norm)
        return norm

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters, or of a module's, to a norm; returns it. Collective."""
        norms = [self._clip(one, None, max_norm, norm_type, False) for one in self._optimizers_of(parameters)]
        found = [norm for norm in norms if norm is not None]
        return None if not found else found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of an optimizer's or module's parameters to ``[-clip_value, clip_value]``. Collective."""
        for one in self._optimizers_of(parameters):
            self._clip(one, clip_value, None, 2.0, False)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make gradients what the update will see: divided by the loss scale and the window's weight. Collective."""
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in self._optimizers():
            wanted = optimizer is None or any(each is one or each is one.optimizer for each in given)
            if wanted and not one.waits:
                one.prepare()
                one.engine.updater.unscale(one.optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update of any optimizer was left out."""
        return any(one.step_was_skipped for one in self._optimizers())
