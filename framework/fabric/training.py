"""``Training``: the part of a Fabric that turns losses into updates, batch by batch or over accumulation windows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, NonFiniteError
from ..core.optimizer_config import parameters_of
from ..core.precision import Precision
from .collectives import Collectives
from .gradient_window import GradientWindow, check_weight
from .loaders import FabricLoader
from .objects import FabricOptimizer
from .prepared import Prepared


class Training:
    """Backward passes, accumulation windows and gradient clipping.

    Attributes:
        windows: The accumulation window of each set of modules, by the sorted indices of their engines.
    """

    def __init__(
        self, ranks: Collectives, prepared: Prepared, precision: Precision, accumulation: AccumulationSchedule
    ) -> None:
        self.windows: dict[tuple[int, ...], GradientWindow] = {}
        self._ranks = ranks
        self._prepared = prepared
        self._scaler = prepared.scaler
        self._precision = precision
        self._accumulation = accumulation
        self._parts = ranks.resources.layout.cp
        self._window: GradientWindow | None = None

    def clear(self) -> None:
        """Forget all windows."""
        self.windows.clear()
        self._window = None

    def set_accumulation(self, accumulation: AccumulationSchedule) -> None:
        """Set the number of micro-batches per window, of the windows in progress too."""
        self._accumulation = accumulation
        for window in self.windows.values():
            window.set_schedule(accumulation)

    # `self` is positional-only in methods with arbitrary keywords, which may include one named `self`.
    def backward(
        self, /, loss: Tensor, model: nn.Module | None = None, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Compute gradients. Never steps an optimizer.

        Collective. Only inside ``accumulate`` and under ``ddp`` a rank without a loss may leave the call out: its
        ``step`` joins the reduction.

        Args:
            loss: a scalar tensor.
            model: the set-up module of the loss; needed only by strategies that hold one loss scale for each module.
            weight: the number of items that the micro-batch's mean loss is over, such as non-padding tokens. The update
                is then that of the mean over all items of the window and of all ranks. Pass it on all ranks or on none.
                By default all micro-batches weigh the same. Where ranks share sequences (``cp``) it is required: the
                number of targets in this rank's part.
            options: those of ``Tensor.backward``, such as ``retain_graph``.
        """
        if self._parts > 1:
            self._check_part(weight)
        engine = self._prepared.engine_for_backward(model)
        loader = self._prepared.reading.current
        filler = loader is not None and loader.filler
        given = None if weight is None else float(weight)
        if self._window is not None and self._window.inside:
            factor = self._window.factor(0.0 if filler else 1.0 if given is None else given)
        else:
            factor = self._factor_alone(given, loader)
            for each in self._prepared.engines if engine is None else [engine]:
                each.leave_closed_window()
        if self._scaler is not None:
            factor *= self._scaler.scale
        strategy = self._prepared.strategy if engine is None else engine.strategy
        strategy.backward(loss if factor == 1.0 else loss * factor, **options)

    def _check_part(self, weight: float | Tensor | None) -> None:
        given = f"Fabric(parallel={{'cp': {self._parts}}})"
        if weight is None:
            raise ConfigurationError(
                f"{given} needs backward(loss, weight=...), the number of targets over which the loss of a part is "
                "averaged, as parts may have different numbers of them: pass it, or leave cp out."
            )
        if not self._prepared.strategy.part.was_used:
            raise ConfigurationError(
                f"{given} was given a loss, and no tensor was cut: pass every tensor that has a sequence dim through "
                "fabric.part, such as `tokens = fabric.part(tokens)`, or leave cp out."
            )

    def _factor_alone(self, weight: float | None, loader: FabricLoader | None) -> float:
        """Return the factor of a loss outside ``accumulate``: its weight in the mean over ranks.

        Collective if a weight is given.
        """
        if weight is None:
            return 1.0 if loader is None else loader.share
        check_weight(weight)
        own, world = 0.0 if loader is not None and loader.filler else weight, self._ranks.world
        total = torch.tensor([own], dtype=torch.float64)
        world.control_reduce(total).wait()
        mean = total.item() / world.size
        return own / mean if mean else 0.0

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None, None, None]:
        """Mark a micro-batch. Inside, optimizers and schedulers act only at the end of a window of micro-batches.

        The window has as many micro-batches as ``Fabric(accumulate=...)`` says, fewer at the end of the loader. Its
        update is that of the weighted mean over all its micro-batches, of all ranks.

        Args:
            models: the modules that take part, by default all that are set up. Each set of models has its own windows.
        """
        prepared = self._prepared
        engines = [prepared.engine_for(model, "accumulate") for model in models] or prepared.engines
        key = tuple(sorted(prepared.engines.index(engine) for engine in engines))
        window, loader = self.window_of(key), prepared.reading.current
        window.enter(0 if loader is None else loader.epoch, loader is not None and loader.end)
        for engine in engines:
            engine.begin_micro_batch(window)
        self._window = window
        try:
            yield
        finally:
            window.leave()
            for engine in engines:
                engine.end_micro_batch()

    def window_of(self, key: tuple[int, ...]) -> GradientWindow:
        """Return the window of the engines with these indices."""
        if key not in self.windows:
            self.windows[key] = GradientWindow(self._ranks.world, self._accumulation, self._scaler is not None)
        return self.windows[key]

    @property
    def inside(self) -> bool:
        """Whether a micro-batch of a window is in progress."""
        return self._window is not None and self._window.inside

    @property
    def ends_window(self) -> bool:
        """Whether the current micro-batch ends its window."""
        return self._window is None or self._window.sync

    @property
    def window_size(self) -> int:
        """The number of micro-batches in the current window."""
        steps = 0 if self._window is None else self._window.steps
        loader = self._prepared.reading.current
        return self._accumulation(0 if loader is None else loader.epoch, steps)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's forward context, for computations outside a set-up module."""
        return self.forward_context() or nullcontext()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the precision's context for forward passes on this rank's device, or None if they need none."""
        return self._precision.forward_context(self._ranks.world.device.type)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Do not reduce gradients over ranks in the passes inside, not at the end of a window of ``accumulate`` either.

        Meant for loops that accumulate without ``accumulate``.
        """
        engine = self._prepared.engine_for(module, "no_backward_sync")
        return engine.without_sync() if enabled else nullcontext()

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
        return self._clip(mine[0], clip_val, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, optimizer: FabricOptimizer, value: float | None, max_norm: float | None, norm_type: float, strict: bool
    ) -> Tensor | None:
        if optimizer.waits:
            return None
        optimizer.prepare()
        engine, parameters = optimizer.engine, parameters_of(optimizer.optimizer)
        gradients = engine.strategy.gradients
        engine.updater.unscale(optimizer.optimizer)
        if value is not None and self._scaler is None:
            gradients.clip_by_value(parameters, value)
            return None
        norm = gradients.norm(parameters, norm_type)
        # Clamping would hide an infinity from the loss scaler, which must skip this update.
        finite = bool(norm.isfinite()) if strict or self._scaler is not None else True
        if not finite and self._scaler is None:
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}. Lower the learning rate, or clip with "
                "error_if_nonfinite=False to continue."
            )
        if value is not None:
            if finite:
                gradients.clip_by_value(parameters, value)
            return None
        if finite:
            gradients.clip_by_norm(parameters, float(max_norm or 0.0), norm)
        return norm

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip gradients by norm, given the parameters of an optimizer or of a module. Collective.

        Returns:
            The norm before clipping, a 0-d tensor; None where the window does not end.
        """
        norms = [self._clip(one, None, max_norm, norm_type, False) for one in self._prepared.optimizers_of(parameters)]
        found = [norm for norm in norms if norm is not None]
        return None if not found else found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of an optimizer's or module's parameters to ``[-clip_value, clip_value]``. Collective."""
        for one in self._prepared.optimizers_of(parameters):
            self._clip(one, clip_value, None, 2.0, False)

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
