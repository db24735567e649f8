"""``SignsOfLife``: finds the node whose launcher no longer increases its counter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

# A launcher that gives no sign of life for this long is gone, or cut off.
SILENT_SECONDS = 30.0
_LONGEST_LOOK_SECONDS = 3.0


class SignsOfLife:
    """The counters of the launchers of other nodes, which change once a second while a launcher runs.

    Args:
        nodes: the nodes to watch.
        count: returns the counter of a node, or None before it has one.
        clock: returns seconds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        count: Callable[[int], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._clock = count, clock
        self._seen: dict[int, str | None] = dict.fromkeys(nodes)
        self._silence = dict.fromkeys(nodes, 0.0)
        self._looked = clock()

    def silent(self) -> int | None:
        """Look at the counters; return a node that has been silent for too long, or None."""
        now = self._clock()
        # While this process was suspended it served no counters, which does not make the others silent.
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_SECONDS), now
        for node, before in self._seen.items():
            count = self._count(node)
            # A node without a counter has not connected yet, for which it has longer: see ``JOIN_SECONDS``.
            is_still = count is not None and count == before
            self._silence[node] = self._silence[node] + passed if is_still else 0.0
            self._seen[node] = count
        return next((node for node, silence in self._silence.items() if silence > SILENT_SECONDS), None)
