"""``SeveralNodes``: the launchers of a run on several nodes start attempts together, and agree on how each ended.

The launcher of node 0 serves torch's ``TCPStore`` at an address that all nodes know, as torchrun does with its static
rendezvous, and the ranks of all nodes meet in it. Each launcher writes the record of its node (node_records.py), and
reads those of all nodes, from which each draws the same conclusions. A thread does both, since a call of the store does
not return if the connection is cut.

came/n       the number of launchers of node n that have connected
alive/n      a counter that the launcher of node n increases while it runs
bye/n        exists once the launcher of node n takes part in no further attempt
k/n          the record of node n for attempt k
k/order      the number of nodes on which ranks have failed in attempt k
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ..core.errors import ConfigurationError
from ..distributed.listening import listen, wait_for_host
from ..distributed.rendezvous import connect
from ..system.failure_records import INTERRUPTED
from . import node_records
from .launch_context import NodePlace
from .node_records import STOPPED, AttemptRecords, NodeRecord, lost_verdict
from .nodes import Nodes
from .supervisor import Supervisor
from .verdict import Verdict

JOIN_SECONDS = 900.0
_TRY_SECONDS = 5.0
_BYE_SECONDS = 10.0
# A call over a connection that is cut does not return.
_END_SECONDS = 1.0
_POLL_SECONDS = 0.1
# Each launcher reads the records of all nodes from one store: with 100 nodes, once a second.
_LONGEST_POLL_SECONDS = 3.0
_RECORDS_PER_SECOND = 10_000


class SeveralNodes(Nodes):
    """A run on several nodes, as the launcher of one of them sees it.

    Args:
        node_rank: the number of this node, from 0.
        num_nodes: the number of nodes.
        host: the name or address of node 0, as all nodes know it.
        port: a free port there.
        num_ranks: the number of ranks on each node.

    Raises:
        ConfigurationError: the host is unknown, or node 0 cannot listen on the port.
    """

    def __init__(self, node_rank: int, num_nodes: int, host: str, port: int, num_ranks: int) -> None:
        self.place = self._place = NodePlace(node_rank, num_nodes, host, port)
        wait_for_host(host, "--rdzv")
        # The launchers connect, and all ranks, which start at the same time.
        connections = num_nodes * (num_ranks + 1)
        self._listening = listen(host, port, connections, False, "--rdzv") if node_rank == 0 else None
        self._token = secrets.token_hex(8)
        # Written by the main thread alone, the other attributes by the thread alone.
        self._record = NodeRecord(node_rank, 0)
        self._farewell: NodeRecord | None = None
        self._read = AttemptRecords(-1, num_nodes)
        self._orders: dict[int, int] = {}
        self._answered = math.inf
        self._is_cut = False
        self._is_over = threading.Event()
        self._store: Any = None
        self._thread = threading.Thread(target=self._run, name="phalanx-nodes", daemon=True)

    def meet(self, attempt: int, num_ranks: int, supervisor: Supervisor) -> Verdict | None:
        """Wait until all nodes are ready for an attempt; return a verdict if it does not take place."""
        self._record = NodeRecord(self._place.rank, attempt, num_ranks, self._token)
        if self._thread.ident is None:
            self._thread.start()
        ended = supervisor.pause(JOIN_SECONDS, until=self._has_met)
        seen = self._seen
        if ended is not None:
            return ended
        if not self._is_connected:
            where = f"{self._place.host}:{self._place.port}"
            return _failure(f"node 0 did not answer at {where} within {JOIN_SECONDS:g} s: see what it printed")
        if self._is_unreachable or seen.lost is not None:
            return self._lost_verdict(Verdict(0, "", failed=False), seen.lost)
        if seen.left is not None:
            return seen.left
        if seen.late:
            late = ", ".join(map(str, seen.late))
            return _failure(f"node {late} did not join within {JOIN_SECONDS:g} s: see what it printed")
        if seen.refusal:
            return Verdict(ConfigurationError.exit_code, seen.refusal, failed=True)
        self.place = replace(self._place, token=f"{seen.records[0].token}-{attempt}")
        return None

    def others_ended(self) -> int | None:
        """Return the exit code for which ranks of other nodes have ended in this attempt, or None."""
        if self._record.has_failed:
            return None
        return 1 if self._is_unreachable else self._seen.stopped

    def report_failure(self) -> None:
        """Report to the other nodes that a rank of this one has failed, so that they end theirs."""
        self._record = replace(self._record, has_failed=True)

    def agree(self, verdict: Verdict, supervisor: Supervisor) -> Verdict:
        """Return the verdict on the attempt on all nodes; ``verdict`` is that of this node."""
        # Preempted ranks end by themselves.
        is_consequence = self.others_ended() not in (None, *STOPPED)
        self._record = self._record.ended(verdict, is_consequence)
        while (seen := self._seen).cause is None and not self._is_unreachable:
            if supervisor.has_to_leave:
                return verdict if verdict.failed else Verdict(INTERRUPTED, "interrupted", failed=True)
            time.sleep(_POLL_SECONDS)
        if seen.cause is None:
            return self._lost_verdict(replace(verdict, failed=verdict.failed and not is_consequence))
        self.is_lost = seen.lost is not None
        return seen.verdict(verdict, self._place.rank)

    def close(self, verdict: Verdict | None, supervisor: Supervisor) -> None:
        """Leave the other nodes, for good; ``verdict`` is the last one, None after an error of this launcher."""
        if verdict is None:
            verdict = _failure(f"the launcher of node {self._place.rank} failed: see what it printed")
        record = self._record if self._record.end is not None else self._record.ended(verdict)
        # Other nodes may be in this attempt, or wait for the next one.
        self._farewell = replace(NodeRecord(record.node, record.attempt + 1).ended(verdict), has_left=True)
        self._record = replace(record, has_left=True)
        until = time.monotonic() + _BYE_SECONDS
        while self._is_connected and self._thread.is_alive() and time.monotonic() < until:
            if self._is_unreachable or self.is_lost or supervisor.has_to_leave:
                break
            time.sleep(_POLL_SECONDS)
        # The interpreter aborts the process if a call of the store returns while it exits.
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    @property
    def _seen(self) -> AttemptRecords:
        seen, attempt = self._read, self._record.attempt
        return seen if seen.attempt == attempt else AttemptRecords(attempt, seen.num_nodes)

    @property
    def _is_connected(self) -> bool:
        return math.isfinite(self._answered)

    @property
    def _is_unreachable(self) -> bool:
        """Whether node 0 has answered before, and does not any more."""
        return self._is_cut or time.monotonic() - self._answered > node_records.SILENT_SECONDS

    def _has_met(self) -> bool:
        """Whether it is known that the attempt begins, or that it does not."""
        seen = self._seen
        return self._is_unreachable or not seen.late or seen.lost is not None or seen.left is not None

    def _lost_verdict(self, own: Verdict, node: int | None = None) -> Verdict:
        """Return the verdict after a node, by default node 0 with the store, gave no more answer."""
        self.is_lost = True
        return lost_verdict(own, node or 0, "" if node else f" at {self._place.host}:{self._place.port}")

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Exchange records until this launcher has left; that of node 0, which serves the store, until all have."""
        self._store = self._connect()
        try:
            if self._store is not None:
                self._exchange(self._store)
        except dist.DistError:
            self._is_cut = True

    def _connect(self) -> Any:
        """Return the store; None if this launcher leaves before another process serves it."""
        place = self._place
        while self._farewell is None:
            with contextlib.suppress(dist.DistError):
                store = connect(place.host, place.port, _TRY_SECONDS, self._listening)
                # A scheduler may start this node again before the launchers of its last start have ended.
                if store.add(f"came/{place.rank}", 1) == 1:
                    return store
            time.sleep(_POLL_SECONDS)
        return None

    def _exchange(self, store: Any) -> None:
        rank, count = self._place.rank, self._place.count
        heard: dict[int, tuple[bytes, float]] = {}
        pause = min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, count**2 / _RECORDS_PER_SECOND))
        while not self._is_over.wait(pause):
            # In this order: the record that is read after a farewell is the last one.
            farewell, record = self._farewell, self._record
            store.add(f"alive/{rank}", 1)
            self._write(store, record)
            if farewell is not None:
                self._write(store, farewell)
                store.set(f"bye/{rank}", "1")
            attempt = record.attempt if farewell is None else farewell.attempt
            records = {node: NodeRecord.read(text) for node, text in _values(store, str(attempt), count).items()}
            counters, now = _values(store, "alive", count), time.monotonic()
            for node, counter in counters.items():
                if node not in heard or heard[node][0] != counter:
                    heard[node] = counter, now
            silent = frozenset(node for node, (_, last) in heard.items() if now - last > node_records.SILENT_SECONDS)
            self._read = AttemptRecords(attempt, count, records, silent)
            self._answered = now
            if farewell is not None and (rank != 0 or counters.keys() - silent <= _values(store, "bye", count).keys()):
                return

    def _write(self, store: Any, record: NodeRecord) -> None:
        attempt = record.attempt
        if record.has_failed and attempt not in self._orders:
            self._orders[attempt] = store.add(f"{attempt}/order", 1)
        store.set(f"{attempt}/{record.node}", replace(record, order=self._orders.get(attempt, 0)).text())


def _values(store: Any, name: str, num_nodes: int) -> dict[int, bytes]:
    """Return the value of each node that has written one."""
    keys = {node: f"{name}/{node}" for node in range(num_nodes)}
    if not store.check([*keys.values()]):
        keys = {node: key for node, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get([*keys.values()]), strict=True)) if keys else {}


def _failure(text: str) -> Verdict:
    return Verdict(1, f"phalanx: {text}", failed=True)
