"""``Nodes``: the nodes of a run, as the launcher of one of them sees them; here, of a run on one node."""

from __future__ import annotations

from .launch_context import NodePlace
from .restart_policy import RestartPolicy
from .supervisor import Supervisor
from .verdict import Verdict


class Nodes:
    """A run on one node: there are no others to wait for."""

    place: NodePlace | None = None
    may_change = False
    """Whether the run may go on with other nodes after one is lost."""

    def meet(self, restarts: RestartPolicy, num_ranks: int, supervisor: Supervisor) -> Verdict | None:
        """Wait until all nodes are ready for an attempt; return a verdict if it does not take place.

        ``restarts`` gets what node 0 knows of earlier attempts.
        """
        return None

    def others_ended(self) -> int | None:
        """Return the exit code for which ranks of other nodes have ended in this attempt, or None."""
        return None

    def report_failure(self) -> None:
        """Report to the other nodes that a rank of this one has failed, so that they end theirs."""

    def agree(self, verdict: Verdict, supervisor: Supervisor) -> Verdict:
        """Return the verdict on the attempt on all nodes; ``verdict`` is that of this node.

        After a second Ctrl-C the other nodes are not waited for.
        """
        return verdict

    @property
    def has_lost(self) -> bool:
        """Whether a node of the last attempt is lost, so that the same nodes cannot take part in another one."""
        return False

    def makes_room(self) -> bool:
        """Return whether the ranks are to save and end, so that further nodes take part in the next attempt."""
        return False

    def regroup(self, message: str) -> bool:
        """Let the nodes that are left, and spares, meet for the next attempt; return whether they may be enough.

        ``message`` says why they have to.
        """
        return False

    def close(self, verdict: Verdict | None, supervisor: Supervisor) -> None:
        """Leave the other nodes, for good; ``verdict`` is the last one, None after an error of this launcher."""
