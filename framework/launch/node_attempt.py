"""``NodeAttempt``: an attempt on several nodes, as the launcher of one of them sees it."""

from __future__ import annotations

import threading

from ..core.errors import Preempted
from ..system.failure_records import INTERRUPTED
from .node_store import NodeStore

STOPPED = frozenset({Preempted.exit_code, INTERRUPTED})
"""Exit codes of ranks that have ended since they were asked to."""


class NodeAttempt:
    """An attempt, which the thread that watches the ranks shares with the one that is in touch with the other nodes.

    Each attempt is an object of its own, so that what is found out about one never counts for the next. For the keys
    of the store see several_nodes.py.

    Args:
        number: the number of the attempt, from 0.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.order = 0
        """1 if the ranks of this node were the first to fail, 2 for the second node; 0 before they fail."""
        self.others: int | None = None
        """The exit code for which ranks of other nodes have ended, or None."""
        self.has_failed = threading.Event()
        """Set once a rank of this node has failed by itself."""
        self.signal_of_others: int | None = None
        """A signal to the launcher of another node that its ranks could not report, or None."""
        self._announcing = threading.Lock()

    def key(self, name: str) -> str:
        """Return a key of the store for this attempt."""
        return f"{self.number}/{name}"

    @property
    def is_consequence(self) -> bool:
        """Whether the ranks of this node are ended because those of others have failed."""
        # Preempted ones end by themselves.
        return self.others not in (None, *STOPPED) and not self.has_failed.is_set()

    def announce_failure(self, store: NodeStore) -> None:
        """Report to the other nodes that the ranks of this one have failed; once, by either thread."""
        with self._announcing:
            if not self.order:
                self.order = store.add(self.key("order"), 1)
                store.set(self.key("failed"), "1")

    def lose_others(self) -> None:
        """Record that the other nodes cannot be reached any more."""
        self.others = self.others or 1

    def exchange(self, store: NodeStore) -> None:
        """Report a failure on this node to the others, and find out about their ends and signals."""
        if store.has(self.key("signal")):
            self.signal_of_others = int(store.get(self.key("signal")))
        if self.has_failed.is_set():
            self.announce_failure(store)
        elif store.has(self.key("failed")):
            self.others = 1
        elif self.others is None and store.has(self.key("preempted")):
            self.others = int(store.get(self.key("preempted")))
