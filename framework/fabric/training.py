"""``Training``: the part of a Fabric that turns losses into updates, batch by batch or over accumulation windows."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.accumulation import AccumulationSchedule
from ..core.errors import NonFiniteError
from ..parallel.gradient_operations import GradientOperations
from ..window.passes import weighted
from .collectives import Ranks
from .engine import Engine
from .gradient_window import GradientWindow, check_weight
from .prepared import Chosen, Prepared
from .window_rules import check_part, check_single_pass


class Training:
    """Backward passes and accumulation windows, and what follows them up to the update.

    Attributes:
        windows: The accumulation window of each set of modules, by the sorted indices of their engines.
        parts: The number of ranks that share a sequence.
    """

    def __init__(self, ranks: Ranks, prepared: Prepared, accumulation: AccumulationSchedule) -> None:
        self._prepared = prepared
        self._scaler = prepared.scaler
        self.windows: dict[tuple[int, ...], GradientWindow] = {}
        self._ranks = ranks
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

    def backward(
        self, loss: Tensor, model: nn.Module | None, weight: float | Tensor | None, options: Mapping[str, Any]
    ) -> None:
        """Compute gradients; ``Fabric.backward`` has the arguments."""
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
    def accumulate(self, models: Sequence[nn.Module]) -> Generator[None, None, None]:
        """Mark a micro-batch; see ``Fabric.accumulate``."""
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

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def clip(
        self, chosen: Sequence[Chosen], value: float | None, max_norm: float, norm_type: float, strict: bool
    ) -> Tensor | None:
        """Clip the chosen gradients where a window ends: by ``value``, or by their joint norm. Collective.

        Returns:
            The norm before clipping, a 0-d tensor; None when clipping by value, or where no window ends.

        Raises:
            NonFiniteError: the norm is not finite, and ``strict`` is true.
        """
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
