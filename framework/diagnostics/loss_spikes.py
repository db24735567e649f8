"""Loss spikes: losses far above a running mean, unless the same batch gave such a loss in the epoch before."""

from __future__ import annotations

import math
from array import array

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

    __slots__ = ("_before", "_notes", "_resting", "deviation", "mean", "seen")

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.seen = 0
        self._notes = 0
        self._resting = 0
        # The loss of the previous epoch by the batch's position in the epoch.
        self._before = array("d", [math.nan]) * _POSITIONS

    def __call__(self, loss: float, position: int) -> bool:
        """Record a finite loss; return whether to report it as a spike.

        Args:
            loss: a finite loss.
            position: the index of its batch in the epoch.
        """
        distance = loss - self.mean
        off = abs(distance)
        before = math.nan
        if position < _POSITIONS:
            before = self._before[position]
            self._before[position] = loss
        self.seen = seen = self.seen + 1
        if seen <= _EVEN_MEAN:
            self.mean += distance / seen
            self.deviation += (off - self.deviation) / seen if seen > 1 else 0.0
            return False
        self._resting -= 1
        limit = _CLIPPED * self.deviation
        if off <= limit:
            self.mean += _RATE * distance
            self.deviation += _RATE * (off - self.deviation)
            return False
        is_far = distance > _DEVIATIONS * self.deviation and distance > _LEAST_SHARE * abs(self.mean)
        if is_far:
            # Compared with the mean and the deviation before they include this loss.
            is_far = self._is_news(distance, loss - before)
        self.mean += _RATE * (limit if distance > 0 else -limit)
        self.deviation += _RATE * (limit - self.deviation)
        return is_far

    def _is_news(self, distance: float, rise: float) -> bool:
        """Whether to report an outlier, given its distance from the mean and its rise over the previous epoch."""
        # A batch with a high loss in the previous epoch has one again, which does not count as a spike. NaN: no
        # previous epoch.
        if rise <= 0.5 * distance:
            return False
        rests = self._resting > 0
        self._resting = REST << self._notes
        if rests or self.seen <= WARM_UP or self._notes == MAX_NOTES:
            return False
        self._notes += 1
        return True
