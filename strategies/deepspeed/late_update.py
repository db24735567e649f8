"""Updates of windows that are repeated when a rank runs out of memory: their backward passes contain no collective.

Every rank adds up the full gradients of a window, and DeepSpeed reduces them once all ranks have agreed to update. So
stage 2 stores full gradients until then, as stage 1 does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.patches import patch
from ...framework.parallel.recovery import Recovery, Repeat
from .access import engine_runs
from .update import EngineUpdate


class LateUpdate(EngineUpdate):
    """Keeps gradients on each rank until ``reduce``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine.enable_backward_allreduce = False
        self._stage.keep_gradients()
        self._set_boundary(False)

    def _set_boundary(self, enabled: bool) -> None:
        self.ends_window = enabled
        self.engine.set_gradient_accumulation_boundary(enabled)

    def sync(self, enabled: bool) -> None:
        """Do nothing: windows end in ``reduce``."""

    def reduce(self) -> None:
        """Average the gradients of the window over all ranks. Collective."""
        self.holds_gradients = True
        self._set_boundary(True)
        with engine_runs:
            self._stage.reduce()

    def _close(self) -> None:
        raise ConfigurationError(
            "parameter.grad was read before the last backward pass of a window that can be repeated when memory is "
            "short, where each rank has gradients of its own: read it in on_before_optimizer_step, or leave "
            "recovery from shortage of memory out."
        )

    def _begin_window(self) -> None:
        super()._begin_window()
        self._set_boundary(False)


class EngineRecovery(Recovery):
    """Repeats the step of the engine's optimizer, before and after which the engine communicates."""

    def __init__(self, update: LateUpdate) -> None:
        self._update = update

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat the hooks and the step of the engine's optimizer if memory is short. Collective."""
        inner, follow = self._update.zero.optimizer, self._update.follow
        step_once = inner.step

        def step_or_repeat(*args: Any, **options: Any) -> Any:
            return repeat(inner, partial(step_once, *args, **options))

        with ExitStack() as patches:
            patch(patches, inner, "step", step_or_repeat)
            patch(patches, follow, "before", partial(repeat, inner, follow.before))
            return step()
