"""``Training``: the part of a Fabric that turns losses into updates, batch by batch or over accumulation windows."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core.accumulation import AccumulationSchedule
from ..core.precision import Precision
from ..window.passes import weighted
from .clipping import Clipping
from .collectives import Collectives
from .gradient_window import GradientWindow, check_weight
from .objects import Engine
from .prepared import Prepared
from .window_rules import check_part, check_single_pass


class Training(Clipping):
    """Backward passes and accumulation windows, and what follows them up to the update.

    Attributes:
        windows: The accumulation window of each set of modules, by the sorted indices of their engines.
        parts: The number of ranks that share a sequence.
    """

    def __init__(
        self, ranks: Collectives, prepared: Prepared, precision: Precision, accumulation: AccumulationSchedule
    ) -> None:
        super().__init__(prepared)
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
