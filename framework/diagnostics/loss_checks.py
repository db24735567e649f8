"""``LossChecks``: looks at every loss of this rank: whether it is finite, and whether it is far above the others.

A spike is a loss far above a running mean, unless the same batch gave such a loss in the epoch before.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from ..core.errors import NonFiniteError
from ..distributed.control import Signal
from ..run.run import Run
from .nonfinite_guard import NonFiniteGuard

_SLOTS = 16


class DeviceLossWatch:
    """Copies each loss to pinned memory in the background and reports the first one that is non-finite.

    A loss is checked once its copy is complete, usually one or two steps later, and at the latest when the ring buffer
    of copies is full. Losses after a non-finite one are not checked: most of them follow from it.
    """

    def __init__(self, report: Callable[[float, int, int], None], look: Callable[[float, int, int], None]) -> None:
        """Store the callbacks.

        ``report`` receives a non-finite loss, its step and its position, ``look`` the same of each loss before it.
        """
        self._report = report
        self._look = look
        self._ring = torch.zeros(_SLOTS, dtype=torch.float32, pin_memory=True)
        # Waiting for one sleeps; by default it would occupy a core.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(_SLOTS)]
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._next = 0
        self._has_reported = False

    def __call__(self, loss: Tensor, step: int, position: int) -> None:
        """Start the copy of the loss of a step and of the batch at ``position`` in the epoch; check complete copies."""
        if self._has_reported:
            return
        self._collect(wait=len(self._waiting) == _SLOTS)
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        self._ring[slot : slot + 1].copy_(loss.detach().reshape(1), non_blocking=True)
        self._events[slot].record()
        self._waiting.append((slot, step, position))

    def flush(self) -> None:
        """Wait for all pending copies and check them."""
        while self._waiting:
            self._collect(wait=True)

    def _collect(self, wait: bool) -> None:
        while self._waiting:
            slot, step, position = self._waiting[0]
            if wait:
                self._events[slot].synchronize()
                wait = False
            elif not self._events[slot].query():
                return
            self._waiting.popleft()
            number = float(self._ring[slot])
            if number - number != 0.0:
                self._has_reported = True
                self._waiting.clear()
                self._report(number, step, position)
            else:
                self._look(number, step, position)


WARM_UP = 200
"""Number of losses of a fit before the first check, so that tiny runs print no notes."""
REST = 50
"""Losses after the first note before the next note. Doubles with each note."""
MAX_NOTES = 5
"""Notes in a run."""
# The first losses are averaged evenly: a running mean that starts at a single loss would take long to find its level.
_EVEN_MEAN = 50
_RATE = 0.02
# For a normally distributed loss 10 mean deviations are 8 standard deviations; with an exponential tail they occur
# once in fifty thousand losses.
_DEVIATIONS = 10.0
_LEAST_SHARE = 0.1
# An outlier is clamped to this distance in the mean and the deviation, so that one spike does not hide the next.
_CLIPPED = 3.0
# Positions of an epoch whose last losses are stored: 32 KiB. A hard batch that repeats often is among them.
_POSITIONS = 4096


class LossSpikes:
    """Checks the losses of one rank in order; a check costs a fraction of a microsecond."""

    __slots__ = ("_before", "_notes", "_rests_until", "deviation", "mean", "seen")

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.seen = 0
        self._notes = 0
        self._rests_until = 0
        # The loss of the previous epoch by the batch's position in the epoch.
        self._before = array("d", [math.nan]) * _POSITIONS

    def copied(self) -> LossSpikes:
        """Return a copy that later losses do not change."""
        twin = copy(self)
        twin._before = self._before[:]
        return twin

    def __call__(self, loss: float, position: int) -> bool:
        """Record a finite loss; return whether to report it as a spike.

        Args:
            loss: a finite loss.
            position: the index of its batch in the epoch.
        """
        mean, deviation = self.mean, self.deviation
        distance = loss - mean
        off = abs(distance)
        limit = _CLIPPED * deviation
        self.seen = seen = self.seen + 1
        is_news = False
        if seen <= _EVEN_MEAN:
            self.mean = mean + distance / seen
            if seen > 1:
                self.deviation = deviation + (off - deviation) / seen
        elif off <= limit:
            self.mean = mean + _RATE * distance
            self.deviation = deviation + _RATE * (off - deviation)
        else:
            # Compared with the mean and the deviation before they include this loss.
            if distance > _DEVIATIONS * deviation and distance > _LEAST_SHARE * abs(mean):
                before = self._before[position] if position < _POSITIONS else math.nan
                is_news = self._is_news(distance, loss - before)
            self.mean = mean + _RATE * (limit if distance > 0 else -limit)
            self.deviation = deviation + _RATE * (limit - deviation)
        if position < _POSITIONS:
            self._before[position] = loss
        return is_news

    def _is_news(self, distance: float, rise: float) -> bool:
        """Whether to report an outlier, given its distance from the mean and its rise over the previous epoch."""
        # A batch with a high loss in the previous epoch has one again, which does not count as a spike. NaN: no
        # previous epoch.
        if rise <= 0.5 * distance:
            return False
        rests = self.seen < self._rests_until
        self._rests_until = self.seen + (REST << self._notes)
        if rests or self.seen <= WARM_UP or self._notes == MAX_NOTES:
            return False
        self._notes += 1
        return True


class LossChecks:
    """The checks of the losses of one fit.

    On the CPU a loss is read at once. On a GPU the host would wait for the device, which costs the overlap between
    them, so losses are copied in the background.

    Args:
        run: the fit.
        guard: applies the policy for losses that are not finite.
    """

    def __init__(self, run: Run, guard: NonFiniteGuard) -> None:
        self._run = run
        self._guard = guard
        self.index = 0
        """The index in the epoch of the batch that was started last."""
        self.spikes = LossSpikes()
        self._reads = run.device_type == "cpu"
        self._watch = DeviceLossWatch(self._stop, self._judge) if guard.checks.copied_losses else None

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
            if self._guard.checks.losses:
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
        text = (
            f"The loss rose to {number:.4g} at optimizer step {step} (epoch {self._run.progress.epoch}){self._where}; "
            f"it had been about {self.spikes.mean:.4g}, give or take {self.spikes.deviation:.2g}."
        )
        self._run.triggers.set(Signal.LOSS_SPIKE, [step, text])

    @property
    def _where(self) -> str:
        world = self._run.world
        return f" on rank {world.rank}" if world.size > 1 else ""
