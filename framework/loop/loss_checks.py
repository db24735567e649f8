"""``LossChecks``: looks at every loss of this rank: whether it is finite, and whether it is far above the others."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import NonFiniteError
from ..diagnostics.loss_spikes import DeviceLossWatch, LossSpikes
from ..diagnostics.nonfinite_guard import NonFiniteGuard
from ..distributed.control import Signal
from ..run.run import Run


class LossChecks:
    """The checks of the losses of one fit.

    On the CPU a loss is read at once. On a GPU the host would wait for the device, which costs the overlap between
    them, so losses are copied in the background.

    Args:
        run: the fit.
        nonfinite: the policy for losses that are not finite.
        guard: applies it.
    """

    def __init__(self, run: Run, nonfinite: str, guard: NonFiniteGuard) -> None:
        self._run = run
        self._guard = guard
        self.index = 0
        """The index in the epoch of the batch that was started last."""
        self.spikes = LossSpikes()
        self._reads = run.device_type == "cpu"
        watches = nonfinite == "raise" and run.device_type == "cuda"
        self._watch = DeviceLossWatch(self._stop, self._judge) if watches else None

    def note(self, loss: Tensor) -> None:
        """Record a loss for the progress bar and hooks, and check it."""
        run = self._run
        if not self._reads:
            run.latest_loss = loss.detach()
            if self._watch is not None:
                self._watch(loss, run.progress.global_step, self.index)
            return
        # The only read of the loss in a step.
        number = loss.item()
        if number - number != 0.0:
            if self._guard.sees_losses:
                self._guard.see(number, run.train_log.batch, self.index)
        elif self.spikes(number, self.index):
            self._report_spike(number, run.progress.global_step)
        run.latest_loss = number

    def go_back(self, spikes: LossSpikes) -> None:
        """Forget the losses of a window that is repeated; ``spikes``: those before it."""
        self.spikes = spikes
        self._guard.bad = None

    def flush(self) -> None:
        """Wait for losses that are still being checked."""
        if self._watch is not None:
            self._watch.flush()

    def _stop(self, number: float, step: int, position: int) -> None:
        """Stop all ranks because a loss copied from a device in the background is not finite.

        One process stops immediately. Several ranks stop through a signal at the next step boundary: a rank that raised
        alone would leave the others waiting in a collective.
        """
        message = (
            f"the loss is {number} at optimizer step {step} (epoch {self._run.progress.epoch}, "
            f"batch {position}){self._where}. Lower the learning rate or clip gradients; "
            "Trainer(nonfinite='skip') leaves such updates out, 'ignore' continues."
        )
        if self._run.world.size == 1:
            raise NonFiniteError(message)
        self._run.triggers.set(Signal.NONFINITE, message)

    def _judge(self, number: float, step: int, position: int) -> None:
        """Check a finite loss that was copied from a device in the background."""
        if self.spikes(number, position):
            self._report_spike(number, step)

    def _report_spike(self, number: float, step: int) -> None:
        """Send rank 0 a message about a loss of this rank that is far above the previous ones."""
        self._run.triggers.set(
            Signal.NOTE,
            f"The loss rose to {number:.4g} at optimizer step {step} (epoch {self._run.progress.epoch}){self._where}; "
            f"it had been about {self.spikes.mean:.4g}, give or take {self.spikes.deviation:.2g}.",
        )

    @property
    def _where(self) -> str:
        world = self._run.world
        return f" on rank {world.rank}" if world.size > 1 else ""
