"""``SeveralNodes``: the launchers of a run on several nodes start attempts together, and agree on how each ended.

The launcher of node 0 serves torch's ``TCPStore`` at an address that all nodes know. The launchers meet in it by
torch's elastic rendezvous (node_rendezvous.py), and so do the ranks, by their own keys. In each attempt every launcher
writes the record of its node (node_records.py) and reads those of all nodes, from which each draws the same
conclusions. If a node is lost, the others meet again in another round, unless they are too few. A thread calls the
store, since a call does not return if the connection is cut.

over         the verdict of the launcher that has ended the run first
bye/a        exists once the launcher with the address a has ended

In the part of the store for a round, for its attempts from 0:

k/n          the record of node n for attempt k
k/order      the number of nodes on which ranks have failed in attempt k
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from ..core.errors import ConfigurationError
from ..distributed.listening import listen, wait_for_host
from ..distributed.rendezvous import connect
from ..report.verdicts import headline
from ..system.failure_records import INTERRUPTED
from . import node_rendezvous
from .exit_hooks import write_error
from .launch_context import NodeName, NodeOptions, NodePlace
from .node_records import STOPPED, AttemptRecords, NodeRecord, lost_verdict, silent_seconds
from .node_rendezvous import NodeRendezvous, Round
from .nodes import Nodes
from .restart_policy import RestartPolicy
from .supervisor import Supervisor
from .verdict import Verdict

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
        num_ranks: the number of ranks on each node.

    Raises:
        ConfigurationError: the host of node 0 is unknown, or node 0 cannot listen on the port.
    """

    def __init__(self, options: NodeOptions, num_ranks: int) -> None:
        self._options = options
        self.may_change = options.may_change
        wait_for_host(options.host, "--rdzv")
        # The launchers connect, and all ranks, which start at the same time.
        connections = (options.most + options.spares) * (num_ranks + 1)
        is_first = options.number == 0
        self._listening = listen(options.host, options.port, connections, False, "--rdzv") if is_first else None
        self._deadline = 0.0
        # Written by the main thread alone.
        self._record: NodeRecord | None = None
        self._lost = ""
        self._farewell: Verdict | None = None
        self._is_over = threading.Event()
        # Written by the thread alone; only the main thread removes the round, so that another one follows.
        self._rendezvous: NodeRendezvous | None = None
        self._round: Round | None = None
        self._read = AttemptRecords(-1, {})
        self._orders: dict[str, int] = {}
        self._over: Verdict | None = None
        self._is_cut = False
        self._thread = threading.Thread(target=self._run, name="phalanx-nodes", daemon=True)

    def meet(self, restarts: RestartPolicy, num_ranks: int, supervisor: Supervisor) -> Verdict | None:
        while True:
            if self._round is None and (ended := self._join(supervisor)) is not None:
                return ended
            assert self._round is not None
            attempt = 0 if self._record is None else self._record.attempt + 1
            token = secrets.token_hex(8)
            self._record = NodeRecord(self._round.rank, attempt, num_ranks, token, restarts.progress)
            ended = supervisor.pause(node_rendezvous.JOIN_SECONDS, until=self._has_met)
            seen = self._seen
            if ended is not None:
                return ended
            if not self._is_unreachable and not seen.lost:
                break
            lost = self._lost_verdict(Verdict(0, "", failed=False), seen)
            if not self.regroup(lost.message):
                return lost
        if self._over is not None:
            return self._over
        if seen.late:
            return _failure(f"{seen.named(seen.late)} did not join within {_join_time()}: see what it printed")
        if seen.refusal:
            return Verdict(ConfigurationError.exit_code, seen.refusal, failed=True)
        first = seen.records[0]
        restarts.adopt(first.progress)
        place = NodePlace(self._round.rank, len(seen.names), self._options.host, self._options.port, first.token)
        self.place = replace(place, may_change=self._options.least < self._options.most)
        return None

    def others_ended(self) -> int | None:
        if self._record is None or self._record.has_failed:
            return None
        if self._is_unreachable:
            return 1
        return self._seen.stopped or (self._over.exit_code or None if self._over is not None else None)

    def report_failure(self) -> None:
        if self._record is not None:
            self._record = replace(self._record, has_failed=True)

    def agree(self, verdict: Verdict, supervisor: Supervisor) -> Verdict:
        assert self._record is not None
        # Preempted ranks end by themselves. A rank that was killed may be why those of the other node have failed: that
        # node may have noticed first.
        is_consequence = self.others_ended() not in (None, *STOPPED) and not supervisor.has_crashed
        self._record = self._record.ended(verdict, is_consequence)
        while self._seen.cause is None and not self._is_unreachable and self._over is None:
            if supervisor.has_to_leave:
                return verdict if verdict.failed else Verdict(INTERRUPTED, "interrupted", failed=True)
            time.sleep(_POLL_SECONDS)
        # Records that were written before the run was over are read before that is known.
        seen = self._seen
        if seen.cause is not None:
            return seen.verdict(verdict, self._record.node)
        if self._over is not None:
            return self._over
        return self._lost_verdict(replace(verdict, failed=verdict.failed and not is_consequence), seen)

    @property
    def has_lost(self) -> bool:
        return self._is_unreachable or bool(self._seen.lost)

    def makes_room(self) -> bool:
        rendezvous, record, seen = self._rendezvous, self._record, self._seen
        if rendezvous is not None and record is not None and record.end is None and rendezvous.has_new_spares:
            # Node 0 decides, and its record says so to all nodes, also once the attempt has ended.
            self._record = replace(record, makes_room=len(seen.names) < self._options.most)
        return 0 in seen.records and seen.records[0].makes_room

    def regroup(self, message: str) -> bool:
        """Let the nodes that are left, and spares, meet for the next attempt; return whether they may be enough.

        ``message`` says why they have to. Node 0 ends the run if they are not enough. Spares that have not come yet are
        waited for.
        """
        rendezvous = self._rendezvous
        if self._is_unreachable or self._over is not None or rendezvous is None:
            return False
        to_come = max(0, self._options.spares - rendezvous.spares_come)
        left = len(rendezvous.present) + rendezvous.num_spares + to_come
        if self._options.number == 0 and left < self._options.least:
            return False
        self._lost = message
        self._record = self._round = None
        return True

    def close(self, verdict: Verdict | None, supervisor: Supervisor) -> None:
        self._farewell = verdict or _failure(f"the launcher of node {self._options.number} failed: see what it printed")
        if self._rendezvous is not None:
            self._rendezvous.give_up()
        until = time.monotonic() + _BYE_SECONDS
        while self._rendezvous is not None and self._thread.is_alive() and time.monotonic() < until:
            if self._is_unreachable or supervisor.has_to_leave:
                break
            time.sleep(_POLL_SECONDS)
        # The interpreter aborts the process if a call of the store returns while it exits.
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)

    def _join(self, supervisor: Supervisor) -> Verdict | None:
        """Wait for a place in a round; return a verdict if there will be none."""
        if self._thread.ident is None:
            self._deadline = time.monotonic() + node_rendezvous.JOIN_SECONDS
            self._thread.start()
        ended = supervisor.pause(until=lambda: self._is_spare or self._has_joined())
        was_spare = ended is None and self._is_spare
        if was_spare:
            when = "if another one is lost" if self.may_change else "once an earlier run of these nodes has ended"
            write_error(f"phalanx: node {self._options.number} waits, and takes part in the run {when}")
            ended = supervisor.pause(until=self._has_joined)
        if ended is not None or self._over is not None:
            return ended or self._over
        if self._rendezvous is None:
            return _failure(f"node 0 did not answer at {self._where} within {_join_time()}: see what it printed")
        if self._round is None:
            return self._lost_verdict(Verdict(0, "", failed=False), AttemptRecords(-1, {}))
        if was_spare or self._lost:
            names = ", ".join(map(str, self._round.names.values()))
            write_error(f"{self._lost}\nphalanx: the ranks are started again on {names}".lstrip())
        self._lost = ""
        return None

    def _has_joined(self) -> bool:
        """Whether this node has a place in a round, or it is known that it gets none."""
        if self._rendezvous is None and time.monotonic() > self._deadline:
            return True
        return self._round is not None or self._over is not None or self._is_unreachable

    def _has_met(self) -> bool:
        """Whether it is known that the attempt begins, or that it does not."""
        seen = self._seen
        return self._is_unreachable or not seen.late or bool(seen.lost) or self._over is not None

    @property
    def _seen(self) -> AttemptRecords:
        """The records of the current attempt, or of the next one once this launcher is ready for it."""
        seen, record, joined = self._read, self._record, self._round
        if record is None or joined is None:
            return AttemptRecords(-1, {})
        is_current = seen.attempt == record.attempt and seen.names == joined.names
        return seen if is_current else AttemptRecords(record.attempt, joined.names)

    @property
    def _where(self) -> str:
        return f"{self._options.host}:{self._options.port}"

    @property
    def _is_spare(self) -> bool:
        return self._rendezvous is not None and self._rendezvous.is_spare

    @property
    def _is_unreachable(self) -> bool:
        """Whether the store on node 0 has answered before, and does not any more."""
        rendezvous = self._rendezvous
        is_silent = rendezvous is not None and time.monotonic() - rendezvous.answered > silent_seconds()
        return self._is_cut or is_silent

    def _lost_verdict(self, own: Verdict, seen: AttemptRecords) -> Verdict:
        """Return the verdict after the loss of nodes: of node 0 with the store, or of those that are seen as lost."""
        is_store = self._is_unreachable or not seen.lost
        return lost_verdict(own, f"node 0 at {self._where}" if is_store else seen.named(seen.lost))

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Take part in rounds until this launcher leaves. Node 0, which serves the store, waits until all have left."""
        try:
            while (rendezvous := self._connect()) is not None:
                try:
                    with contextlib.suppress(RendezvousClosedError):
                        self._take_part(rendezvous)
                except RendezvousTimeoutError:
                    self._over = self._too_few(rendezvous)
                    break
                verdict = self._over or _verdict_of_run(rendezvous.store)
                # A launcher that had to wait as a spare may have met an earlier run that has failed, whose launchers
                # had not ended yet. The store of node 0 is that of this run.
                met_earlier = rendezvous.was_spare and not rendezvous.has_joined and self._options.number > 0
                is_earlier = met_earlier and not self.may_change and verdict is not None and verdict.failed
                if self._farewell is not None or not is_earlier:
                    self._over = verdict
                    break
                self._over = self._rendezvous = None
            while rendezvous is not None and self._farewell is None:
                time.sleep(_POLL_SECONDS)
            if rendezvous is not None:
                self._leave(rendezvous)
        except (RendezvousError, dist.DistError):
            pass
        finally:
            # After any error: the main thread would wait for this one.
            self._is_cut = self._farewell is None

    def _too_few(self, rendezvous: NodeRendezvous) -> Verdict:
        """Return the verdict if too few nodes have come: after a loss, the one on the attempt before."""
        if self._lost:
            return Verdict(1, self._lost, failed=True)
        there = {NodeName.read(address).number for address in rendezvous.present} | {self._options.number}
        late = ", ".join(str(node) for node in range(self._options.most) if node not in there)
        if not late or self._options.least < self._options.most:
            return _failure(f"{len(there)} of at least {self._options.least} nodes joined within {_join_time()}")
        return _failure(f"node {late} did not join within {_join_time()}: see what it printed")

    def _connect(self) -> NodeRendezvous | None:
        """Return the rendezvous; None if this launcher leaves before another process serves it."""
        while self._farewell is None:
            with contextlib.suppress(dist.DistError, RendezvousError):
                store = connect(self._options.host, self._options.port, _TRY_SECONDS, self._listening)
                found = NodeRendezvous(store, self._options.number, self._options.least, self._options.most)
                # A scheduler may start this node again before the launchers of its last start have ended.
                if not found.is_closed():
                    self._rendezvous = found
                    return found
            time.sleep(_POLL_SECONDS)
        return None

    def _take_part(self, rendezvous: NodeRendezvous) -> None:
        pause = min(_LONGEST_POLL_SECONDS, max(_POLL_SECONDS, self._options.most**2 / _RECORDS_PER_SECOND))
        rendezvous.await_place(lambda: self._is_ending(rendezvous))
        while not self._is_ending(rendezvous):
            joined = rendezvous.join()
            self._read, self._round = AttemptRecords(-1, {}), joined
            while self._round is joined and self._farewell is None:
                self._exchange(rendezvous, joined)
                time.sleep(pause)

    def _is_ending(self, rendezvous: NodeRendezvous) -> bool:
        verdict = self._over or _verdict_of_run(rendezvous.store)
        if rendezvous.has_joined:
            self._over = verdict
        # Of a launcher without a place, the caller finds out whether it is the verdict of an earlier run.
        return verdict is not None or self._farewell is not None

    def _exchange(self, rendezvous: NodeRendezvous, joined: Round) -> None:
        """Write the record of this node, and read those of all nodes of a round."""
        # In this order: what is read after the end of the run, or the loss of a node, is the last record.
        over = _verdict_of_run(rendezvous.store)
        rendezvous.update()
        present, record = rendezvous.present, self._record
        if self._options.number and rendezvous.address not in present:
            raise RendezvousConnectionError("the others have taken this node for lost")
        if record is not None:
            self._write(joined.store, record)
            texts = _values(joined.store, str(record.attempt), joined.addresses)
            records = {node: NodeRecord.read(text) for node, text in texts.items()}
            silent = frozenset(node for node, address in joined.addresses.items() if address not in present)
            self._read = AttemptRecords(record.attempt, joined.names, records, silent - {joined.rank})
        self._over = self._over or over

    def _write(self, store: Any, record: NodeRecord) -> None:
        if record.has_failed and record.token not in self._orders:
            self._orders[record.token] = store.add(f"{record.attempt}/order", 1)
        written = replace(record, order=self._orders.get(record.token, 0))
        store.set(f"{record.attempt}/{record.node}", written.text())

    def _leave(self, rendezvous: NodeRendezvous) -> None:
        """End the run, unless this node has had no part in it; on node 0, wait until all others have left."""
        store, joined = rendezvous.store, self._round
        ends_run = rendezvous.has_joined or self._options.number == 0 or not self.may_change
        if self._farewell is not None and ends_run:
            if joined is not None and self._record is not None:
                self._write(joined.store, self._record)
            verdict = replace(self._farewell, message=headline(self._farewell.message), traceback="", advice="")
            store.compare_set("over", "", json.dumps(vars(replace(verdict, rank=None))))
            rendezvous.close()
        store.set(f"bye/{rendezvous.address}", "1")
        # A spare that was lost is counted, too, and not waited for.
        until = time.monotonic() + 3 * node_rendezvous.LOOK_SECONDS
        while self._options.number == 0 and not self._is_over.wait(_POLL_SECONDS):
            rendezvous.update()
            others = [f"bye/{address}" for address in rendezvous.present - {rendezvous.address}]
            are_left = rendezvous.num_spares > 0 and time.monotonic() < until
            if not are_left and (not others or store.check(others)):
                return


def _verdict_of_run(store: Any) -> Verdict | None:
    return Verdict(**json.loads(store.get("over"))) if store.check(["over"]) else None


def _values(store: Any, name: str, nodes: Iterable[int]) -> dict[int, bytes]:
    """Return the value of each node that has written one."""
    keys = {node: f"{name}/{node}" for node in nodes}
    if not store.check([*keys.values()]):
        keys = {node: key for node, key in keys.items() if store.check([key])}
    return dict(zip(keys, store.multi_get([*keys.values()]), strict=True)) if keys else {}


def _failure(text: str) -> Verdict:
    return Verdict(1, f"phalanx: {text}", failed=True)


def _join_time() -> str:
    return f"{node_rendezvous.JOIN_SECONDS:g} s"
