"""``RecoveringStep``: an optimizer step that is repeated in smaller micro-batches where a rank runs out of memory.

A rank that runs out of memory must leave no other rank waiting. Where strategies can, passes contain no collective:
gradients accumulate locally in every backward pass, and are averaged after the last one, once all ranks have agreed
that none ran out of memory. Otherwise that rank calls the rest of the collectives, see ``Recovery.join``:

    every rank runs the passes of its window; one that runs out of memory leaves the rest of them out, or only joins
    all ranks agree on the flags of the step, and on whether any rank ran out of memory
    if so: undo what the window has changed, halve the micro-batches, repeat the window from its start
    else: average the gradients, update

An update that runs out of memory is repeated on its rank; see ``update_or_repeat``. Its signal halves the
micro-batches of all ranks after the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, LoopError, add_hint
from ..core.optimizer_config import parameters_of
from ..core.wording import counted
from ..data.accumulation_window import MicroBatches, RepeatableWindows, Window
from ..diagnostics.out_of_memory import is_out_of_memory
from ..distributed.control import Signal
from ..distributed.devices import empty_caches
from ..distributed.world import World
from ..parallel.step_flags import LocalFlags
from ..parallel.strategy import Strategy
from ..parallel.sync_batch_norm import is_collective
from ..run.run import Run
from ..watchdog.heartbeat import LAST_BACKWARD
from .automatic_step import AutomaticStep
from .filler_batches import FILLER
from .window_state import WindowState, update_or_repeat

_AUTO, _ADVICE = "micro_batch_size='auto'", "give micro_batch_size as a number"
_ONE_SAMPLE = "shorten the samples, or save memory, as with memory='blocks', a lower precision or strategy='fsdp'"
_RULE = "which a rank that has run out of memory cannot join"


class LateFlags(LocalFlags):
    """The flags of a step, exchanged after its last backward pass together with a third: no memory was left."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def exchange(self, has_loss: bool, nonfinite: bool, exhausted: bool) -> int:
        """Exchange this rank's flags; return the number of ranks that ran out of memory. Collective."""
        with_loss, bad, out_of_memory = self._world.control_reduce((has_loss, nonfinite, exhausted)).wait()
        self.send(with_loss > 0, bad > 0)
        return int(out_of_memory)


class RecoveringStep(AutomaticStep):
    """Runs windows whose micro-batches become smaller when a rank runs out of memory.

    Args:
        run: the fit.
        transfer: moves a batch to the device; None if it is there already.
        nonfinite: the policy for losses that are not finite.
        clipping: the clip value, None for no clipping, and algorithm.
        windows: the global batches.
    """

    reduces_after_window = True

    def __init__(
        self,
        run: Run,
        transfer: Callable[[Any], Any] | None,
        nonfinite: str,
        clipping: tuple[float | None, str],
        windows: RepeatableWindows,
    ) -> None:
        assert run.strategy.recovery is not None  # see check_recovery
        self.recovery = run.strategy.recovery
        self.late_flags = LateFlags(run.world)
        self.windows = windows
        self.around_update = self._update_or_repeat
        super().__init__(run, transfer, nonfinite, clipping, windows)
        # A step without collectives has no shorter form.
        self.takes_single = False
        self.error: BaseException | None = None
        """The error of the pass of this rank that ran out of memory in the window in progress."""
        self.exhausted = 0
        """The number of ranks that ran out of memory in the window in progress."""
        self.triggers.on(Signal.OUT_OF_MEMORY, self._shrink_after_update)

    def meet_calls(self) -> None:
        """Use no fillers, whose passes would contain collectives."""
        self.attendance.was_called = False

    def __call__(self, batches: MicroBatches, size: int, samples: Sequence[float] | None = None) -> bool:
        """Run a window until no rank runs out of memory. Collective. See ``AutomaticStep``.

        Raises:
            LoopError: on ranks that had enough memory, if others run out of it with micro-batches of one sample.
        """
        while True:
            self.error, self.exhausted = None, 0
            state = WindowState(self)
            continues = super().__call__(batches, size, samples)
            if not self.exhausted:
                return continues
            # Released before the window is read again.
            batches = ()
            batches, size, samples = self._smaller_window(state)

    def _smaller_window(self, state: WindowState) -> Window:
        """Undo the window, and return it in micro-batches of half the size. Collective."""
        size, error = self.windows.micro_batch_size, self.error
        ranks = f"{self.exhausted} of {counted(self.run.world.size, 'rank')} ran out of memory"
        if size == 1:
            if error is not None:
                add_hint(error, f"{ranks} with micro-batches of one sample, the smallest: {_ONE_SAMPLE}.")
                raise error
            raise LoopError(f"{ranks} with micro-batches of one sample: see the error of that rank.")
        self.error = None
        state.restore()
        self.strategy.zero_grad(self.optimizer)
        self.updater.forget(self.optimizer)
        self.last_batch = None
        empty_caches()
        self.windows.halve()
        self.run.note(f"{ranks} with micro-batches of {size} samples: training continues with {max(1, size // 2)}.")
        window = self.windows.repeat()
        assert window is not None
        return window

    def _shrink_after_update(self, sent: Any) -> None:
        """Halve the micro-batches after the step in progress, since an update ran out of memory. On all ranks."""
        self.triggers.fired.pop(Signal.OUT_OF_MEMORY, None)
        if self.windows.micro_batch_size > 1:
            self.windows.halve()
            self.run.note(
                f"an update ran out of memory on {counted(len(sent), 'rank')} and was repeated: training continues "
                f"with micro-batches of {self.windows.micro_batch_size} samples."
            )

    # ---- passes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _noting(self) -> Generator[None, None, None]:
        """Note an error that says that there is no memory left, instead of raising it."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The frames of its traceback hold the tensors of the pass.
            self.error = error.with_traceback(None)
            self.error.__context__ = None

    def start_micro_batch(self, batch: Any, index: int) -> Any:
        if self.error is None:
            with self._noting():
                return super().start_micro_batch(batch, index)
        return FILLER

    def forward_pass(self, batch: Any, index: int) -> tuple[Any, Tensor | None]:
        if self.error is None:
            self.recovery.begin_pass()
            with self._noting():
                return super().forward_pass(batch, index)
        return None, None

    def backward_pass(self, loss: Tensor | None, weight: float, is_last: bool) -> None:
        """Run the backward pass of a micro-batch; without memory, only its collectives."""
        if is_last:
            self.phase[0] = LAST_BACKWARD
        if self.error is None:
            with self._noting():
                if loss is not None and weight != 0:
                    self.has_loss = True
                    self.loss_checks.note(loss)
                self.passes.backward(loss, weight, False)
        if self.error is None:
            self.recovery.end_pass()
        else:
            self.recovery.join()

    def end_micro_batch(self, output: Any, batch: Any, index: int) -> None:
        if self.error is None:
            super().end_micro_batch(output, batch, index)

    def _end_window(self, ended: tuple[Any, Any, int] | None, consumed: int, index: int) -> None:
        self.exhausted = self.late_flags.exchange(self.has_loss, self.guard.bad is not None, self.error is not None)
        if self.exhausted:
            return
        self.recovery.end_window()
        if self.is_distributed:
            self.strategy.reduce_gradients(parameters_of(self.optimizer))
        super()._end_window(ended, consumed, index)

    def _update_or_repeat(self, step: Callable[[], bool]) -> bool:
        return self.recovery.update(self.optimizer, step, self._repeat)

    def _repeat(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        return update_or_repeat(optimizer, step, lambda: self.triggers.set(Signal.OUT_OF_MEMORY))

    def refresh(self) -> None:
        """Refresh the values that may change between epochs. Collective."""
        super().refresh()
        self.recovery.refresh()

    # ---- resolved once ----------------------------------------------------------------------------------------------

    def _flags(self) -> LateFlags:
        return self.late_flags


def check_strategy(strategy: Strategy, name: str = _AUTO, advice: str = _ADVICE) -> None:
    """Refuse ``micro_batch_size="auto"`` under a strategy that cannot repeat a window.

    Args:
        strategy: the strategy.
        name: what was asked for, for the message.
        advice: what may be done without it.

    Raises:
        ConfigurationError: the strategy cannot; the message has its reason.
    """
    if strategy.recovery is None:
        raise ConfigurationError(
            f"{name} under strategy={strategy.name!r}, {strategy.prevents_recovery}: {advice}, or use "
            "strategy='ddp', 'fsdp' or 'zero2'."
        )


def can_repeat(run: Run) -> bool:
    """Whether a window of this fit can be repeated."""
    return run.strategy.recovery is not None and not _layers_communicate(run)


def _layers_communicate(run: Run) -> bool:
    return run.world.size > 1 and any(is_collective(part) for part in run.module.modules())


def check_recovery(run: Run) -> None:
    """Refuse ``micro_batch_size="auto"`` where the strategy or a layer communicates in passes.

    Raises:
        ConfigurationError: one does.
    """
    check_strategy(run.strategy)
    if _layers_communicate(run):
        raise ConfigurationError(f"{_AUTO} with layers that communicate in their passes, {_RULE}: {_ADVICE}.")
