"""``NodeEnd``: the end of an attempt on one node, and the common verdict on those of all nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..report.verdicts import headline
from ..system.failure_records import INTERRUPTED
from .verdict import Verdict

# In the errors of ranks that lost the connection to another one: gloo's, which have no class of their own, and NCCL's.
_LOST_PEER = ("gloo/transport", "DistBackendError", "DistNetworkError")


@dataclass(frozen=True)
class NodeEnd:
    """The end of an attempt on one node."""

    node: int
    exit_code: int
    message: str
    step: int | None
    order: int
    """1 for the first node on which ranks failed, 2 for the second; 0 for a node without a failure."""
    is_consequence: bool
    """Whether the ranks were ended because those of another node had failed."""
    is_fault: bool = False
    """Whether a rank of the node is at fault: none is if the ranks were preempted or interrupted."""
    lost_peer: bool = False
    """Whether the error is that of a broken connection, which may have been the end of a rank on another node."""
    silent: int | None = None
    """A node that did not answer; only in the end that ``cause`` returns."""

    @classmethod
    def of(cls, node: int, verdict: Verdict, order: int, is_consequence: bool) -> NodeEnd:
        """Return the end of a node with this verdict; see the attributes for the other arguments."""
        message = headline(verdict.message)
        lost_peer = any(text in verdict.message for text in _LOST_PEER)
        is_fault = verdict.rank is not None
        return cls(node, verdict.exit_code, message, verdict.step, order, is_consequence, is_fault, lost_peer)

    @classmethod
    def read(cls, text: str) -> NodeEnd:
        """Read the result of ``text``."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """The end as JSON."""
        return json.dumps(asdict(self))


def cause(ends: Sequence[NodeEnd], silent: int | None) -> NodeEnd:
    """Return the end that caused the others; ``silent`` is a node whose end is missing."""
    failed = [end for end in ends if end.exit_code] or list(ends)
    return replace(min(failed, key=_place_among_causes), silent=silent)


def _place_among_causes(end: NodeEnd) -> tuple[int, ...]:
    """Return the sort key of an end, in the order of ``judge``: Ctrl-C, then failures, then ranks that were preempted.

    A connection that breaks as a rank of another node fails ends with 1, often before that node has noticed.
    """
    is_late = end.is_consequence, end.lost_peer
    return *is_late, end.exit_code != INTERRUPTED, not end.is_fault, end.exit_code == 1, end.order, end.node


def common_verdict(own: Verdict, first: NodeEnd, node: int) -> Verdict:
    """Return the verdict of a node on an attempt that ``first`` has ended: code and step are the same on all nodes."""
    if first.silent is not None and (first.is_consequence or not first.exit_code):
        return lost_verdict(replace(own, failed=False), first.silent)
    if first.node == node:
        verdict = own
    else:
        message = f"node {first.node}: {first.message}" if first.exit_code else ""
        verdict = Verdict(first.exit_code, message, bool(first.exit_code), first.step)
    return verdict if first.silent is None else lost_verdict(verdict, first.silent)


def lost_verdict(own: Verdict, silent: int, where: str = "") -> Verdict:
    """Return the verdict of a node on an attempt in which the launcher of node ``silent`` gave no more answer.

    ``own`` has not failed if its ranks were ended for that reason, or were successful.
    """
    text = f"phalanx: node {silent}{where} does not answer: its launcher or its host has ended, or cannot be reached"
    if not own.failed:
        return Verdict(1, text, failed=True, step=own.step)
    return replace(own, message=f"{own.message}\n{text}".lstrip())
