"""``NodeRendezvous``: torch's elastic rendezvous, by which the launchers of several nodes find one another.

It is that of ``torchrun``: its state is a value in torch's ``TCPStore``, which launchers change as they join, and into
which each writes the time every few seconds. A launcher whose time is old is removed by the others. A round is complete
once enough nodes have joined; each node then has its rank, and a part of the store for this round alone.

torch gives the places of a round to those that come first. So that no node is driven out after the loss of another one,
no more launchers join than there are places: those of the first nodes, before the first round is complete. Others are
spares, which wait until node 0 offers them the places of lost nodes:

came/n       above 0 once a launcher of node n has connected, or a round is complete: later launchers are spares
waiting      the number of spares
offered      the number of places that were offered to spares
taken        the number of these that spares have taken
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from ..system.environment import keep_rendezvous_store_apart
from . import node_records
from .launch_context import NodeName

JOIN_SECONDS = 900.0
"""Seconds for which a launcher waits for the others."""
LAST_CALL_SECONDS = 30.0
"""Seconds for which more nodes are waited for, once there are enough."""
# The same after the loss of a node: those that are left come at once.
_JOIN_AGAIN_SECONDS = 30.0
_LAST_CALL_AGAIN_SECONDS = 3.0
_CALL_SECONDS = 60.0
LOOK_SECONDS = 1.0
"""Seconds between two looks of a spare."""
_RUN = "phalanx"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Round:
    """A round of the rendezvous in which this node takes part."""

    store: Any
    """A store with keys of its own, for the nodes of the round."""
    rank: int
    """The rank of this node."""
    addresses: Mapping[int, str]
    """The addresses of all nodes, by rank."""

    @property
    def names(self) -> dict[int, NodeName]:
        return {rank: NodeName.read(address) for rank, address in self.addresses.items()}


class NodeRendezvous:
    """The rendezvous of a run, as the launcher of one of its nodes sees it. Its methods ask the store, and may block.

    Args:
        store: the store, which the launcher of node 0 serves.
        number: the number of this node.
        least: the number of nodes without which there is no round.
        most: the number of places in a round.
    """

    def __init__(self, store: Any, number: int, least: int, most: int) -> None:
        store.set_timeout(timedelta(seconds=_CALL_SECONDS))
        # A launcher whose store is gone ends with a sentence of its own.
        logging.getLogger(DynamicRendezvousHandler.__module__).setLevel(logging.ERROR)
        keep_rendezvous_store_apart()
        self.store = store
        self.address = NodeName(number, socket.gethostname()).address
        self.is_spare = self.was_spare = False
        """Whether this launcher waits until it is offered a place, and whether it has."""
        self._num_waiting = 0
        self.num_spares = self._known_spares = 0
        """The number of launchers that do, as last read by node 0."""
        self.spares_come = 0
        """The number of launchers that have waited so far, as last read by node 0."""
        self.has_joined = False
        """Whether this launcher has had a place in a round."""
        self._number, self._most = number, most
        self._backend = _Backend(store, _RUN)
        self._limits = _Limits()
        self._handler = DynamicRendezvousHandler.from_backend(
            _RUN,
            store,
            self._backend,
            least,
            most,
            self.address,
            self._limits,
            node_records.KEEP_ALIVE_SECONDS,
            node_records.KEEP_ALIVE_ATTEMPTS,
        )

    @property
    def answered(self) -> float:
        """The time of the last answer of the store, -inf before the first one."""
        return self._backend.answered

    @property
    def present(self) -> set[str]:
        """The addresses of the nodes that are alive and in the round, or joining the next one. As last read."""
        # Private, as torch has no other way to learn which nodes are there. It has removed those that are lost.
        state = self._handler._state_holder.state
        # Copied first: a thread of torch's may remove nodes meanwhile.
        return {node.addr for node in list(state.participants) + list(state.wait_list)}

    @property
    def has_new_spares(self) -> bool:
        """Whether nodes have come since the round began, as last read by node 0. One that is lost is counted, too."""
        return self.num_spares > self._known_spares or self._num_waiting > 0

    def join(self) -> Round:
        """Leave the round that this node takes part in, if any, and wait for a place in the next one.

        Raises:
            RendezvousError: the rendezvous is closed, the store does not answer, or too few nodes have come.
        """
        if self.has_joined:
            self._offer(self._most - len(self.present))
        info = self._handler.next_rendezvous()
        self._offer(0)
        self._known_spares = self.num_spares
        self.has_joined = self._limits.are_short = True
        participants = dict(self._handler._state_holder.state.participants)
        return Round(info.store, info.rank, {rank: node.addr for node, rank in participants.items()})

    def await_place(self, is_over: Callable[[], bool]) -> None:
        """Return once there is a place for this launcher, or it is over; at once unless it is a spare."""
        store = self.store
        if self._number < self._most and store.add(f"came/{self._number}", 1) == 1:
            return
        self.is_spare = self.was_spare = True
        store.add("come", 1)
        store.add("waiting", 1)
        while not is_over():
            if store.add("taken", 0) < store.add("offered", 0):
                if store.add("taken", 1) <= store.add("offered", 0):
                    break
                # Another spare was faster.
                store.add("taken", -1)
            self._backend.answered = time.monotonic()
            time.sleep(LOOK_SECONDS)
        store.add("waiting", -1)
        self.is_spare = False

    def update(self) -> None:
        """Read which nodes are there, unless it was done within a second.

        Raises:
            RendezvousError: the store does not answer.
        """
        # A launcher that came as the round was completed, and is no spare.
        self._num_waiting = self._handler.num_nodes_waiting()
        if self._number == 0:
            self.num_spares = self.store.add("waiting", 0)
            self.spares_come = self.store.add("come", 0)

    def is_closed(self) -> bool:
        """Whether no further round follows."""
        closed: bool = self._handler.is_closed()
        return closed

    def close(self) -> None:
        """Let no further round follow: nodes that join get ``RendezvousClosedError``. Give no more signs of life."""
        self._backend.gives_up = False
        self._handler.shutdown()

    def give_up(self) -> None:
        """Make ``join`` in another thread raise ``RendezvousClosedError`` soon. Does not block."""
        self._backend.gives_up = True

    def _offer(self, places: int) -> None:
        """Offer spares a number of places, and no others. Called on all nodes, has an effect on node 0."""
        if self._number == 0:
            store = self.store
            store.add("offered", store.add("taken", 0) + places - store.add("offered", 0))
            for node in range(self._most):
                store.add(f"came/{node}", 1)
            self.num_spares = store.add("waiting", 0)


class _Backend(C10dRendezvousBackend):
    """The state of the rendezvous in the store, which notes when the store has answered."""

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(store, run_id)
        self.answered = -math.inf
        self.gives_up = False

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._noted(super().get_state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        return self._noted(super().set_state, state, token)

    def _noted(self, call: Callable[..., Answer], *given: Any) -> Answer:
        if self.gives_up:
            raise RendezvousClosedError
        found = call(*given)
        self.answered = time.monotonic()
        return found


class _Limits(RendezvousTimeout):
    """The limits on time of a rendezvous, which are shorter after the first round."""

    are_short = False

    @property
    def join(self) -> timedelta:
        """How long enough nodes are waited for."""
        return timedelta(seconds=_JOIN_AGAIN_SECONDS if self.are_short else JOIN_SECONDS)

    @property
    def last_call(self) -> timedelta:
        """How long more nodes are waited for, once there are enough."""
        return timedelta(seconds=_LAST_CALL_AGAIN_SECONDS if self.are_short else LAST_CALL_SECONDS)
