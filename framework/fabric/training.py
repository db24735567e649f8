"""``Training``: the part of a Fabric that turns losses into updates, batch by batch or over accumulation windows."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError, NonFiniteError
from ..core.optimizer_config import parameters_of
from ..core.precision import Precision
from ..parallel.gradient_operations import GradientOperations
from ..window.passes import weighted
from .collectives import Collectives
from .gradient_window import GradientWindow, check_weight
from .objects import Engine
from .prepared import Chosen, Prepared
from .window_rules import check_part, check_single_pass


class Training:
    """Backward passes and accumulation windows, and what follows them up to the update.

    Attributes:
        windows: The accumulation window of each set of modules, by the sorted indices of their engines.
        parts: The number of ranks that share a sequence.
    """

    def __init__(
        self, ranks: Collectives, prepared: Prepared, precision: Precision, accumulation: AccumulationSchedule
    ) -> None:
        self._prepared = prepared
        self._scaler = prepared.scaler
        self.windows: dict[tuple[int, ...], GradientWindow] = {}
        self._ranks = ranks
        self._precision = precision
        self._accumulation = accumulation
        self.parts = ranks.resources.layout.cp
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
        prepared = self._prepared
        check_single_pass(prepared.strategy, self._window, "backward")
        if self.parts > 1:
            check_part(self.parts, prepared.strategy.part, weight, "backward(loss, weight=...)")
        engine = prepared.engine_for_backward(model)
        given = None if weight is None else float(weight)
        if self._window is not None and self._window.inside:
            factor = self._window.factor(0.0 if prepared.reading.filler else 1.0 if given is None else given)
        else:
            factor = self._factor_alone(given)
            for each in prepared.engines if engine is None else [engine]:
                each.leave_closed_window()
        strategy = prepared.strategy if engine is None else engine.strategy
        strategy.backward(weighted(loss, factor, self._scaler), **options)

    def _factor_alone(self, weight: float | None) -> float:
        """Return the factor of a loss outside ``accumulate``: its weight in the mean over ranks.

        Collective if a weight is given.
        """
        reading = self._prepared.reading
        if weight is None:
            return reading.share
        check_weight(weight)
        own, world = 0.0 if reading.filler else weight, self._ranks.world
        (total,) = world.control_reduce([own]).wait()
        mean = total / world.size
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
        check_single_pass(prepared.strategy, self._window, "accumulate")
        engines, window = self.together(models, "accumulate")
        loader = prepared.reading.current
        window.enter(0 if loader is None else loader.epoch, prepared.reading.end)
        with self.micro_batch(engines, window):
            yield

    @contextmanager
    def micro_batch(self, engines: Sequence[Engine], window: GradientWindow) -> Generator[None, None, None]:
        """Run a micro-batch that the window has begun."""
        for engine in engines:
            engine.begin_micro_batch(window)
        self._window = window
        try:
            yield
        finally:
            window.leave()
            for engine in engines:
                engine.end_micro_batch()

    def together(self, models: Iterable[nn.Module], verb: str) -> tuple[list[Engine], GradientWindow]:
        """Return the engines of the modules given to ``verb``, of all that are set up if none are; and their window."""
        prepared = self._prepared
        engines = [prepared.engine_for(model, verb) for model in models] or prepared.engines
        return engines, self.window_of(tuple(sorted(prepared.engines.index(engine) for engine in engines)))

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
        return self._size_after(0 if self._window is None else self._window.steps)

    @property
    def coming_size(self) -> int:
        """The number of micro-batches in a window that begins now."""
        return self._size_after(0 if self._window is None else self._window.coming)

    def _size_after(self, steps: int) -> int:
        loader = self._prepared.reading.current
        return self._accumulation(0 if loader is None else loader.epoch, steps)

    @property
    def current(self) -> GradientWindow | None:
        """The last window that was entered."""
        return self._window

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
        check_single_pass(engine.strategy, self._window, "no_backward_sync")
        return engine.without_sync() if enabled else nullcontext()

    # ---- gradients ---------------------------------------------------------------------------------------------------

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
            _clip_values(parts, value)
            return None
        norm = _joint([gradients.norm(parameters, norm_type) for gradients, parameters in parts], norm_type)
        # Clamping would hide an infinity from the loss scaler, which must skip this update.
        finite = bool(norm.isfinite()) if strict or self._scaler is not None else True
        if not finite and self._scaler is None:
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}. Lower the learning rate, or clip with "
                "error_if_nonfinite=False to continue."
            )
        if value is not None:
            _clip_values(parts if finite else (), value)
            return None
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
    joint: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return joint
