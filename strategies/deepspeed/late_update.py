"""Updates of windows that are repeated when a rank runs out of memory: their backward passes contain no collective.

Every rank adds up the full gradients of a window, and DeepSpeed reduces them once all ranks have agreed to update. So
stage 2 stores full gradients until then, as stage 1 does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError
from ...framework.core.patches import patch
from ...framework.parallel.recovery import Recovery, Repeat
from .access import engine_runs
from .optimizer import Following
from .state import EngineState
from .update import EngineUpdate


class LateUpdate(EngineUpdate):
    """Keeps gradients on each rank until ``reduce``, and can repeat the step of the engine's optimizer."""

    def __init__(self, engine: Any, following: Following, state: EngineState) -> None:
        super().__init__(engine, following, state)
        self._repeat: Repeat | None = None
        engine.enable_backward_allreduce = False
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
            self._stage.reduce(self.engine)

    def _close(self) -> None:
        raise ConfigurationError(
            "parameter.grad was read before the last backward pass of a window that can be repeated when memory is "
            "short, where each rank has gradients of its own: read it in on_before_optimizer_step, or leave "
            "recovery from shortage of memory out."
        )

    def step(self) -> bool:
        """Update the weights; return whether the update was applied. Collective."""
        applied = super().step()
        self._set_boundary(False)
        return applied

    def _call_hooks(self) -> None:
        """Call the hooks on the user's optimizer again if memory is short, as the step."""
        if self._repeat is None:
            super()._call_hooks()
        else:
            self._repeat(self.zero.optimizer, self.follow.before)

    def drop(self) -> None:
        """Drop gradients that no update has used."""
        super().drop()
        self._set_boundary(False)

    @contextmanager
    def repeating(self, repeat: Repeat) -> Generator[None, None, None]:
        """Let ``repeat`` call the steps of the engine's optimizer, before and after which the engine communicates."""
        inner = self.zero.optimizer
        step = inner.step

        def step_or_repeat(*args: Any, **options: Any) -> Any:
            return repeat(inner, partial(step, *args, **options))

        with ExitStack() as patches:
            patch(patches, inner, "step", step_or_repeat)
            patch(patches, self, "_repeat", repeat)
            yield


class EngineRecovery(Recovery):
    """Repeats the step of the engine's optimizer, which contains no collective.

    Args:
        update: the engine's update; None before set-up.
    """

    def __init__(self, update: LateUpdate | None = None) -> None:
        self._update = update

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat the step of the engine's optimizer where memory is short. Collective."""
        assert self._update is not None
        with self._update.repeating(repeat):
            return step()
