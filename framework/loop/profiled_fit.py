"""The sections of a fit, measured by a profiler."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ..core.patches import patch
from ..profiling.profiler import Profiler
from .automatic_step import AutomaticStep
from .fit_loop import FitLoop
from .manual_step import ManualStep

# The hooks that a step has resolved.
_HOOKS = ("batch_start", "batch_end", "callbacks_batch_end", "before_backward", "after_backward", "before_update")


@contextmanager
def profiled(loop: FitLoop, profiler: Profiler) -> Generator[None, None, None]:
    """Measure the sections of a fit within the context.

    The functions of the sections are replaced within the context, so a fit without a profiler has no cost.
    """
    with ExitStack() as patches:
        _Sections(loop, profiler, patches).install()
        yield


class _Sections:
    """The functions of a fit that are sections."""

    def __init__(self, loop: FitLoop, profiler: Profiler, patches: ExitStack) -> None:
        self._loop = loop
        self._run = loop.run
        self._profiler = profiler
        self._patches = patches

    def install(self) -> None:
        run, loop = self._run, self._loop
        self._measure("data", loop.windows, "take")
        # Micro-batches that are fetched within a window.
        self._measure("data", loop.windows, "fetch")
        self._measure("logging", run.metrics, "publish_step")
        self._measure("logging", run.metrics, "publish_epoch")
        self._measure("validation", loop.validation, "validate")
        self._measure("validation", loop.validation, "sanity_check")
        self._measure("checkpoints", run.saver, "save")
        self._measure("checkpoints", run.saver, "finish")
        for name in ("agreement", "exchange", "agree"):
            self._measure("communication", run.triggers, name)
        self._measure("communication", run.strategy, "reduce_gradients")
        self._measure("communication", run.strategy, "zero_backward")
        self._measure_hooks(loop.step)
        if isinstance(loop.step, ManualStep):
            self._measure_manual(loop.step)
        else:
            self._measure_automatic(loop.step)
        end_step = run.meter.end_step

        def end(began: float, fetched: float) -> None:
            end_step(began, fetched)
            self._profiler.step()

        patch(self._patches, run.meter, "end_step", end)

    def _measure(self, section: str, home: Any, name: str) -> None:
        patch(self._patches, home, name, self._profiler.around(section, getattr(home, name)))

    def _measure_automatic(self, step: AutomaticStep) -> None:
        self._measure_forward(step)
        self._measure("backward", step.passes, "run_backward")
        for name in ("before", "after"):
            patch(self._patches, step.passes, name, self._measured(getattr(step.passes, name)))
        self._measure("optimizer", step, "apply")

    def _measure_manual(self, step: ManualStep) -> None:
        self._measure_forward(step)
        self._measure("backward", self._run.strategy, "backward")
        self._measure("backward", step, "own_backward")
        for optimizer in step.manual_optimizers:
            self._measure("optimizer", optimizer, "step")

    def _measure_forward(self, step: AutomaticStep | ManualStep) -> None:
        """Measure the step of the user, which is routed through the strategy more than once in a fit."""
        routed = step.routed

        def measured(*args: Any, **kwargs: Any) -> Any:
            return self._profiler.around("forward", routed(*args, **kwargs))

        patch(self._patches, step, "routed", measured)
        self._measure("forward", step, "forward")

    def _measure_hooks(self, step: AutomaticStep | ManualStep) -> None:
        """Measure hooks: those that the step has resolved, and those that are resolved when they are called."""
        for name in _HOOKS:
            patch(self._patches, step, name, self._measured(getattr(step, name)))
        run = self._run
        hooks, callback_hooks, around = run.hooks, run.callback_hooks, run.hooks_around
        patch(self._patches, run, "hooks", lambda name: self._measured(hooks(name)))
        patch(self._patches, run, "callback_hooks", lambda name: self._measured(callback_hooks(name)))
        patch(self._patches, run, "hooks_around", lambda name: tuple(map(self._measured, around(name))))

    def _measured(self, hooks: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
        return tuple(map(partial(self._profiler.around, "callbacks"), hooks))
