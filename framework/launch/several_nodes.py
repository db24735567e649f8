"""``SeveralNodes``: the launchers of a run on several nodes start attempts together, and agree on how each ended.

The launcher of node 0 serves a store at an address that all nodes know, as torchrun does with its static rendezvous.
The ranks of all nodes meet in the same store. Its keys, where ``k`` is the number of the attempt:

k/come/n     the number of ranks that node n starts
k/token      the value that tells this attempt from others; written by node 0 once all nodes have come
k/failed     the ranks of a node have failed: the others are ended
k/preempted  the ranks of a node were preempted: the others have seen the same signal, and end by themselves
k/signal     a signal to a launcher whose ranks could not report it to the others, as they had ended, for example
k/end/n      the verdict of node n
k/verdict    the common verdict, by node 0
came/n       the number of launchers of node n that have connected
alive/n      a counter that node n increases while its launcher runs, from the time it has connected
left         the verdict of a launcher that ended between two attempts
bye          the number of launchers, besides that of node 0, that need the store no longer
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from ..core.errors import ConfigurationError
from ..distributed.listening import listen
from ..system.failure_records import INTERRUPTED
from .launch_context import NodePlace
from .liveness import SignsOfLife
from .node_attempt import STOPPED, NodeAttempt
from .node_store import NodeStore, StoreLost, connect
from .node_verdict import NodeEnd, cause, common_verdict, lost_verdict
from .nodes import Nodes
from .supervisor import Supervisor
from .verdict import Verdict

JOIN_SECONDS = 900.0
_POLL_SECONDS = 0.1
_POLLS_PER_COUNT = 10
_RETRY_SECONDS = 0.25
_BYE_SECONDS = 10.0
# A scheduler may publish the names of its hosts a moment after it has started them.
_RESOLVE_SECONDS = 10.0


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
        self.place = NodePlace(node_rank, num_nodes, host, port)
        _check_host(host)
        # The launchers connect, and all ranks, which start at the same time.
        connections = num_nodes * (num_ranks + 1)
        self._listening = listen(host, port, connections, False, "--rdzv") if node_rank == 0 else None
        self._store: NodeStore | None = None
        self._attempt = NodeAttempt(0)
        self._silent: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-nodes", daemon=True)

    def meet(self, attempt: int, num_ranks: int, supervisor: Supervisor) -> Verdict | None:
        """Wait until all nodes are ready for an attempt; return a verdict if it does not take place."""
        self._attempt = NodeAttempt(attempt)
        try:
            if self._store is None and (ended := self._connect(supervisor)) is not None:
                return ended
            return self._meet(self._connected, self._attempt, num_ranks, supervisor)
        except StoreLost:
            return self._lost_verdict(Verdict(0, "", failed=False))

    def others_ended(self) -> int | None:
        """Return the exit code for which ranks of other nodes have ended in this attempt, or None."""
        return self._attempt.others

    def report_failure(self) -> None:
        """Report to the other nodes that a rank of this one has failed, so that they end theirs."""
        # By the thread, as a connection that is cut would delay the end of the ranks.
        self._attempt.has_failed.set()

    def signal_of_others(self) -> int | None:
        """Return a signal to the launcher of another node that its ranks could not report, or None."""
        return self._attempt.signal_of_others

    def agree(self, verdict: Verdict, supervisor: Supervisor) -> Verdict:
        """Return the verdict on the attempt on all nodes; ``verdict`` is that of this node."""
        place, attempt = self._place, self._attempt
        is_consequence = attempt.is_consequence
        try:
            store = self._connected
            if verdict.failed and verdict.exit_code not in STOPPED:
                attempt.announce_failure(store)
            elif verdict.failed:
                store.set(attempt.key("preempted"), str(verdict.exit_code))
            end = NodeEnd.of(place.rank, verdict, attempt.order, is_consequence)
            store.set(attempt.key(f"end/{place.rank}"), end.text)
            first = self._first_end(store, attempt, supervisor)
        except StoreLost:
            return self._lost_verdict(replace(verdict, failed=verdict.failed and not is_consequence))
        if first is None:
            return verdict if verdict.failed else Verdict(INTERRUPTED, "interrupted", failed=True)
        self.is_lost = first.silent is not None
        return common_verdict(verdict, first, place.rank)

    def close(self, verdict: Verdict | None, supervisor: Supervisor) -> None:
        """Leave the other nodes, for good; ``verdict`` is the last one, None after an error of this launcher."""
        self._closing.set()
        if self._store is None:
            return
        with contextlib.suppress(StoreLost), contextlib.closing(self._store):
            self._leave(self._store, verdict, supervisor)
            # Its calls would have no answer once the store is closed.
            self._thread.join(_RETRY_SECONDS)

    # ---- the store ----------------------------------------------------------------------------------------------

    @property
    def _place(self) -> NodePlace:
        assert self.place is not None
        return self.place

    @property
    def _connected(self) -> NodeStore:
        assert self._store is not None
        return self._store

    def _connect(self, supervisor: Supervisor) -> Verdict | None:
        """Connect to the store; return a verdict if a signal comes first, or if node 0 does not answer in time."""
        place, next_try = self._place, 0.0

        def is_connected() -> bool:
            nonlocal next_try
            if time.monotonic() >= next_try:
                self._store = connect(place, self._listening)
                next_try = time.monotonic() + _RETRY_SECONDS
            return self._store is not None

        if (ended := _waited(supervisor, is_connected)) is not None:
            return ended
        if self._store is None:
            where = f"{place.host}:{place.port}"
            return _refusal(f"node 0 did not answer at {where} within {JOIN_SECONDS:g} s: see what it printed")
        # Before this node comes: from then on the others rely on the counter.
        self._store.set(f"alive/{place.rank}", "-")
        self._thread.start()
        return None

    def _meet(self, store: NodeStore, attempt: NodeAttempt, num_ranks: int, supervisor: Supervisor) -> Verdict | None:
        place = self._place
        store.set(attempt.key(f"come/{place.rank}"), str(num_ranks))
        all_came = [attempt.key(f"come/{node}") for node in range(place.count)]
        needed = all_came if place.rank == 0 else [attempt.key("token")]
        ended = _waited(supervisor, lambda: self._silent is not None or store.has("left") or store.has(*needed))
        if ended is not None:
            return ended
        if store.has("left"):
            return Verdict(**json.loads(store.get("left")))
        if not store.has(*needed):
            if self._silent is not None:
                self.is_lost = True
                return lost_verdict(Verdict(0, "", failed=False), self._silent)
            late = [str(node) for node, key in enumerate(all_came) if not store.has(key)]
            return _refusal(f"node {', '.join(late)} did not join within {JOIN_SECONDS:g} s: see what it printed")
        if place.rank == 0:
            store.set(attempt.key("token"), _checked_token(store.get_all(all_came)))
        word = store.get(attempt.key("token"))
        if word.startswith("!"):
            return Verdict(ConfigurationError.exit_code, word[1:], failed=True)
        self.place = replace(place, token=word)
        return None

    def _leave(self, store: NodeStore, verdict: Verdict | None, supervisor: Supervisor) -> None:
        place = self._place
        if verdict is None:
            verdict = _refusal(f"the launcher of node {place.rank} failed: see what it printed")
            self._attempt.announce_failure(store)
        store.set("left", json.dumps(asdict(verdict)))
        if place.rank != 0:
            store.add("bye", 1)
            return
        # The others read the verdict from the store of this process, except those that have never connected.
        needing = sum(store.has(f"alive/{node}") for node in range(1, place.count))
        until = time.monotonic() + _BYE_SECONDS
        while store.add("bye", 0) < needing and time.monotonic() < until:
            if self.is_lost or supervisor.has_to_leave:
                return
            time.sleep(_POLL_SECONDS)

    def _first_end(self, store: NodeStore, attempt: NodeAttempt, supervisor: Supervisor) -> NodeEnd | None:
        """Return the end that is the cause of those of all nodes, once node 0 knows it; None if Ctrl-C comes twice."""
        verdict, ends = attempt.key("verdict"), [attempt.key(f"end/{node}") for node in range(self._place.count)]
        passed_on = None
        while not store.has(verdict):
            if self._place.rank == 0 and (self._silent is not None or store.has(*ends)):
                store.set(verdict, self._decide(store, ends).text)
                break
            if supervisor.has_to_leave:
                return None
            received = supervisor.signal_to_pass_on
            if received is not None and received is not passed_on:
                store.set(attempt.key("signal"), str(int(received)))
                passed_on = received
            time.sleep(_POLL_SECONDS)
        return NodeEnd.read(store.get(verdict))

    def _decide(self, store: NodeStore, keys: Sequence[str]) -> NodeEnd:
        """Return the end that is the cause of those that are known: of all nodes, unless one is silent."""
        known = [key for key in keys if store.has(key)]
        silent = self._silent if len(known) < len(keys) else None
        return cause([NodeEnd.read(text) for text in store.get_all(known)], silent)

    def _lost_verdict(self, verdict: Verdict) -> Verdict:
        """Return the verdict of this node after node 0, with the store, gave no more answer."""
        self.is_lost = True
        return lost_verdict(verdict, 0, f" at {self._place.host}:{self._place.port}")

    def _run(self) -> None:
        """Count, and pass on failures between the supervisor and the store, until this launcher leaves."""
        try:
            self._keep_in_touch(self._connected)
        except StoreLost:
            if not self._closing.is_set():
                self.is_lost = True
                self._attempt.lose_others()

    def _keep_in_touch(self, store: NodeStore) -> None:
        place = self._place
        others = range(1, place.count) if place.rank == 0 else ()
        signs = SignsOfLife(others, lambda node: store.get(f"alive/{node}") if store.has(f"alive/{node}") else None)
        for turn in itertools.count():
            if self._closing.wait(_POLL_SECONDS):
                return
            attempt = self._attempt
            attempt.exchange(store)
            if turn % _POLLS_PER_COUNT:
                continue
            store.set(f"alive/{place.rank}", str(turn))
            if self._silent is None:
                self._silent = signs.silent()
            if self._silent is not None:
                # Also for an attempt that has begun in between.
                store.set(attempt.key("failed"), "1")


def _check_host(host: str) -> None:
    until = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigurationError(f"--rdzv {host!r} is not a host that is known here: {error}.") from None
        time.sleep(_RETRY_SECONDS)


def _checked_token(came: Sequence[str]) -> str:
    """Return a new token; if the nodes have different numbers of ranks, an error after an exclamation mark."""
    odd = next((node for node, count in enumerate(came) if count != came[0]), None)
    if odd is None:
        return secrets.token_hex(8)
    return f"!node {odd} starts {came[odd]} ranks and node 0 {came[0]}: give -n the same number on all nodes"


def _waited(supervisor: Supervisor, is_over: Callable[[], bool]) -> Verdict | None:
    return supervisor.pause(JOIN_SECONDS, until=is_over)


def _refusal(text: str) -> Verdict:
    return Verdict(1, f"phalanx: {text}", failed=True)
