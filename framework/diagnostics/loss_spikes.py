"""Losses that jump: noticed against a running mean and mean deviation, of numbers that are on the host anyway."""

from __future__ import annotations

WARM_UP = 50
"""Losses of a fit before any is judged, and after one that was told before the next is."""
_RATE = 0.02
# Of a normal loss 10 mean deviations are 8 standard deviations; of one with an exponential tail they come once in
# fifty thousand.
_DEVIATIONS = 10.0
_LEAST_SHARE = 0.1
# What counts into the mean and the deviation of one that is far off, so that one spike does not hide the next.
_CLIPPED = 3.0


class LossSpikes:
    """Judges one rank's losses, one after another. A fraction of a microsecond each."""

    __slots__ = ("deviation", "mean", "resting", "seen")

    def __init__(self) -> None:
        self.mean = 0.0
        self.deviation = 0.0
        self.seen = 0
        self.resting = 0

    def __call__(self, loss: float) -> bool:
        """Take a finite loss in; return whether it is a spike, judged by ``mean`` and ``deviation`` as they stay."""
        distance = loss - self.mean
        off = abs(distance)
        self.seen = seen = self.seen + 1
        if seen <= WARM_UP:
            self.mean += distance / seen
            self.deviation += (off - self.deviation) / seen if seen > 1 else 0.0
            return False
        self.resting -= 1
        limit = _CLIPPED * self.deviation
        if off <= limit:
            self.mean += _RATE * distance
            self.deviation += _RATE * (off - self.deviation)
            return False
        if distance > _DEVIATIONS * self.deviation and distance > _LEAST_SHARE * abs(self.mean):
            told, self.resting = self.resting <= 0, WARM_UP
            self.mean += _RATE * limit
            self.deviation += _RATE * (limit - self.deviation)
            return told
        self.mean += _RATE * (limit if distance > 0 else -limit)
        self.deviation += _RATE * (limit - self.deviation)
        return False
