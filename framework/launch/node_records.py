"""``AttemptRecords``: what the launchers of several nodes have recorded about an attempt, and what follows from it.

Everything here is computed from the records alone; several_nodes.py exchanges them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import LostRankError, Preempted
from ..report.verdicts import headline
from ..system.failure_records import INTERRUPTED
from .launch_context import NodeName
from .verdict import Verdict

KEEP_ALIVE_SECONDS = 3
"""Seconds between two signs of life of a launcher."""
KEEP_ALIVE_ATTEMPTS = 5
"""A launcher that gives no sign of life for so many of these intervals is lost, or cut off."""
STOPPED = frozenset({Preempted.exit_code, INTERRUPTED})
"""Exit codes of ranks that have ended since they were asked to."""
# In the errors of ranks that lost another one: gloo's, which have no class of their own, NCCL's, and phalanx's own.
_LOST_PEER = ("gloo/transport", "DistBackendError", "DistNetworkError", LostRankError.__name__)


def silent_seconds() -> float:
    """Return after how many seconds without a sign of life a launcher counts as lost."""
    return float(KEEP_ALIVE_SECONDS * KEEP_ALIVE_ATTEMPTS)


def clock_seconds() -> float:
    """Return by how many seconds the clock of a node may differ from that of the host with which all are compared.

    A launcher takes another one for lost if the last sign of life is older than ``silent_seconds`` by its own clock.
    Between two signs it is up to ``KEEP_ALIVE_SECONDS`` old. Half of the rest is for delays, and half for the clocks of
    two nodes, one of which may be ahead and the other behind.
    """
    return (silent_seconds() - KEEP_ALIVE_SECONDS) / 4


@dataclass(frozen=True)
class NodeRecord:
    """An attempt on one node, written by its launcher."""

    node: int
    """The rank of the node in its round."""
    attempt: int
    """The number of earlier attempts of the round."""
    num_ranks: int = 0
    token: str = ""
    """A random value; that of rank 0 tells this start of the ranks from others."""
    progress: list[Any] = field(default_factory=list)
    """The ``progress`` of the launcher's ``RestartPolicy``: one that joins later takes over that of rank 0."""
    makes_room: bool = False
    """Whether the ranks are to save and end, as nodes wait for which there are places. Of rank 0 alone."""
    has_failed: bool = False
    """Whether ranks of the node have failed by themselves."""
    order: int = 0
    """1 if they were the first to fail, 2 for the second node."""
    is_consequence: bool = False
    """Whether the ranks were ended because those of another node had failed."""
    lost_peer: bool = False
    """Whether the error is that of a broken connection, which may have been the end of a rank on another node."""
    end: Verdict | None = None
    """The verdict on the attempt on this node."""

    def ended(self, verdict: Verdict, is_consequence: bool = False) -> NodeRecord:
        """Return the record of this node after the end of its ranks."""
        return replace(
            self,
            has_failed=verdict.failed and verdict.exit_code not in STOPPED,
            is_consequence=is_consequence,
            lost_peer=any(text in verdict.message for text in _LOST_PEER),
            # The other nodes show the error in one line.
            end=replace(verdict, message=headline(verdict.message), traceback="", advice=""),
        )

    def text(self) -> str:
        """Return the record as JSON."""
        return json.dumps(self, default=vars)

    @classmethod
    def read(cls, text: str | bytes) -> NodeRecord:
        """Read the result of ``text``."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "end": fields["end"] and Verdict(**fields["end"])})


@dataclass(frozen=True)
class AttemptRecords:
    """The records of all nodes for an attempt, as far as a launcher has read them."""

    attempt: int
    names: Mapping[int, NodeName]
    """The names of all nodes, by rank."""
    records: Mapping[int, NodeRecord] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    """The nodes whose launchers give no sign of life, or have gone on to another round."""

    def named(self, nodes: Iterable[int]) -> str:
        return " and ".join(str(self.names[node]) for node in nodes)

    @property
    def late(self) -> list[int]:
        """The nodes that are not ready for the attempt."""
        return [node for node in self.names if node not in self.records]

    @property
    def refusal(self) -> str:
        """The reason why the nodes do not fit together, or an empty text."""
        counts = {node: self.records[node].num_ranks for node in sorted(self.records)}
        first = next(iter(counts), 0)
        odd = next((node for node, count in counts.items() if count != counts[first]), None)
        if odd is None:
            return ""
        number, other = self.names[odd].number, self.names[first].number
        each = f"node {number} starts {counts[odd]} ranks and node {other} {counts[first]}"
        return f"{each}: give -n the same number on all nodes"

    @property
    def ends(self) -> dict[int, Verdict]:
        """The verdicts of the nodes on which the attempt has ended."""
        return {node: record.end for node, record in sorted(self.records.items()) if record.end is not None}

    @property
    def stopped(self) -> int | None:
        """The exit code for which ranks of a node have ended, if it is not 0."""
        if self.lost or any(record.has_failed for record in self.records.values()):
            return 1
        return next((end.exit_code for end in self.ends.values() if end.failed), None)

    @property
    def lost(self) -> list[int]:
        """The nodes whose launchers give no sign of life, and whose ends are not known."""
        return sorted(self.silent - self.ends.keys())

    @property
    def cause(self) -> NodeRecord | None:
        """The record of the node whose end caused those of the others, once the ends of all nodes are known or lost."""
        ends = self.ends
        if not ends or not self.silent.issuperset(self.names.keys() - ends.keys()):
            return None
        return self.records[min([node for node in ends if ends[node].exit_code] or ends, key=self._place_among_causes)]

    def _place_among_causes(self, node: int) -> tuple[int, ...]:
        """Return the sort key of an end, in the order of ``judge``: Ctrl-C, failures, and ranks that were preempted."""
        record, end = self.records[node], self.ends[node]
        # A connection that breaks as a rank of another node fails ends with 1, often before that node has noticed.
        late = record.is_consequence, record.lost_peer, end.exit_code != INTERRUPTED, end.rank is None
        return *late, end.exit_code == 1, record.order, node

    def verdict(self, own: Verdict, node: int) -> Verdict:
        """Return the verdict of a node on the attempt, which has a cause: code and step are the same on all nodes.

        ``own``: the verdict on the ranks of the node.
        """
        cause = self.cause
        assert cause is not None
        assert cause.end is not None
        code = cause.end.exit_code
        if self.lost and (cause.is_consequence or cause.lost_peer or not code):
            return lost_verdict(replace(own, failed=False), self.named(self.lost))
        if cause.node != node:
            message = f"node {self.names[cause.node].number}: {cause.end.message}" if code else ""
            own = Verdict(code, message, bool(code), cause.end.step)
        return lost_verdict(own, self.named(self.lost)) if self.lost else own


def lost_verdict(own: Verdict, lost: str) -> Verdict:
    """Return the verdict of a node on an attempt in which the launchers of the nodes ``lost`` gave no more answer.

    ``own`` has not failed if its ranks were ended for that reason, or were successful.
    """
    silent = "does not answer: its launcher or its host has"
    if " and " in lost:
        silent = "do not answer: their launchers or their hosts have"
    text = f"phalanx: {lost} {silent} ended, or cannot be reached"
    if not own.failed:
        return Verdict(1, text, failed=True, step=own.step)
    return replace(own, message=f"{own.message}\n{text}".lstrip())
