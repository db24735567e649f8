"""Launchers of several nodes: the verdict that follows from their records, and two of them in this process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from free_ports import free_port
from messages import refuses
from ranks import wait_until

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed import listening
from phalanx.framework.launch import node_records, node_rendezvous, script_launcher, several_nodes
from phalanx.framework.launch.launch_context import LaunchContext, NodeName, NodeOptions, NodePlace
from phalanx.framework.launch.node_records import AttemptRecords, NodeRecord, lost_verdict
from phalanx.framework.launch.restart_policy import RestartPolicy
from phalanx.framework.launch.several_nodes import SeveralNodes
from phalanx.framework.launch.supervisor import Supervisor
from phalanx.framework.launch.verdict import Verdict
from phalanx.framework.system.entry_script import Script

Result = TypeVar("Result")

SUCCESS = Verdict(0, "", failed=False)


# ---- records


def end(node: int, code: int, order: int = 0, is_consequence: bool = False, step: int | None = None) -> NodeRecord:
    rank = None if code in (0, 75, 130, 143) else node
    verdict = Verdict(code, f"node {node} ended", bool(code), step, rank)
    return NodeRecord(node, 0, order=order).ended(verdict, is_consequence)


def records(*ends: NodeRecord, num_nodes: int = 2, silent: Sequence[int] = ()) -> AttemptRecords:
    names = {node: NodeName(node, f"host-{node}") for node in range(num_nodes)}
    return AttemptRecords(0, names, {each.node: each for each in ends}, frozenset(silent))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # The broken connection of node 0 was noticed before the death of node 1.
        ([end(0, 1, order=1), end(1, 137, order=2)], 1),
        ([end(0, 1, order=2), end(1, 1, order=1)], 1),
        ([end(0, 143, is_consequence=True), end(1, 1, order=1)], 1),
        ([end(0, 0), end(1, 75)], 1),
        # A run that has failed on one node is not a preempted one, which would be started again.
        ([end(0, 75), end(1, 1, order=1)], 1),
        ([end(0, 75), end(1, 137, order=1)], 1),
        # Ranks of node 0 had left the fit as SIGTERM came, those of node 1 have saved.
        ([end(0, 143, order=1), end(1, 75)], 1),
        ([end(0, 1, order=1), end(1, 130)], 1),
        ([end(0, 0), end(1, 0)], 0),
    ],
)
def test_the_first_cause_counts(ends: Sequence[NodeRecord], first: int) -> None:
    cause = records(*ends).cause
    assert cause is not None
    assert cause.node == first
    assert records(ends[0]).cause is None


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_broken_connection_is_not_the_cause_of_an_error_that_was_noticed_later(error: str) -> None:
    head = "rank {} (pid 7) failed at step 3 (epoch 0, batch 3)"
    trace = "Traceback (most recent call last):\n  File train.py, line 1\n"
    lost = Verdict(1, f"{head.format(0)}:\n{trace}{error}", failed=True, rank=0)
    cut = NodeRecord(0, 0, order=1).ended(lost)
    planted = Verdict(1, f"{head.format(1)}:\n{trace}ValueError: planted", failed=True, step=3, rank=1)
    own = NodeRecord(1, 0, order=2).ended(planted)
    seen = records(cut, NodeRecord.read(own.text()))
    assert seen.cause == own
    # The other nodes show the error in one line.
    assert seen.verdict(lost, 0).message == f"node 1: {head.format(1)}: ValueError: planted"


def test_all_nodes_have_the_code_and_the_step_of_the_cause() -> None:
    seen = records(end(0, 1, order=2), end(1, 137, order=1, step=5))
    own = Verdict(1, "connection lost", failed=True, step=4, rank=0, traceback="...")
    assert seen.verdict(own, 0) == Verdict(137, "node 1: node 1 ended", failed=True, step=5)
    assert seen.verdict(own, 1) is own
    assert records(end(0, 0), end(1, 0)).verdict(SUCCESS, 1) == SUCCESS


def test_a_silent_node_is_the_cause_unless_ranks_have_failed_by_themselves() -> None:
    ended = Verdict(143, "ended by SIGTERM", failed=True, step=7)
    silent = "phalanx: node 1 (host-1) does not answer: its launcher or its host has ended, or cannot be reached"
    lost = Verdict(1, silent, failed=True)
    assert records(end(0, 143, is_consequence=True), silent=[1]).verdict(ended, 0) == Verdict(1, silent, True, step=7)
    assert records(end(0, 0), silent=[1]).verdict(SUCCESS, 0) == lost
    own = Verdict(137, "rank 0 was killed", failed=True)
    found = records(end(0, 137, order=1), silent=[1]).verdict(own, 0)
    assert (found.exit_code, found.message) == (137, f"rank 0 was killed\n{silent}")
    # One that has ended before it was silent is not lost, and of three nodes the others are waited for.
    assert records(end(0, 0), end(1, 0), silent=[1]).verdict(SUCCESS, 0) == SUCCESS
    assert records(end(0, 0), num_nodes=3, silent=[1]).cause is None
    # A connection that breaks as a node is lost is a consequence.
    cut = replace(end(0, 1, order=1), lost_peer=True)
    assert records(cut, silent=[1]).verdict(own, 0) == lost
    assert lost_verdict(SUCCESS, "node 0 at a:1").message.startswith("phalanx: node 0 at a:1 does not answer")


@pytest.mark.parametrize(
    ("seen", "stopped"),
    [
        (records(NodeRecord(0, 0), NodeRecord(1, 0)), None),
        (records(NodeRecord(0, 0, has_failed=True), NodeRecord(1, 0)), 1),
        (records(NodeRecord(0, 0), end(1, 78)), 1),
        (records(NodeRecord(0, 0), NodeRecord(1, 0), silent=[1]), 1),
        # Preempted ranks of other nodes end by themselves.
        (records(NodeRecord(0, 0), end(1, 75)), 75),
        (records(NodeRecord(0, 0), end(1, 0)), None),
    ],
)
def test_the_end_of_ranks_on_one_node_is_known_on_the_others(seen: AttemptRecords, stopped: int | None) -> None:
    assert seen.stopped == stopped


# ---- two launchers, whose ranks are left out


class Launcher:
    """The launcher of one of several nodes."""

    def __init__(self, node: int, port: int, directory: Path, num_ranks: int = 1) -> None:
        self.nodes = SeveralNodes(NodeOptions(node, 2, 2, 0, "127.0.0.1", port), num_ranks)
        self.restarts = RestartPolicy(9)
        self.supervisor = Supervisor(str(directory))
        self.num_ranks = num_ranks

    def meet(self) -> Verdict | None:
        return self.nodes.meet(self.restarts, self.num_ranks, self.supervisor)

    def agree(self, verdict: Verdict) -> Verdict:
        return self.nodes.agree(verdict, self.supervisor)

    def receive(self, *signals: signal.Signals) -> None:
        with self.supervisor.handling_signals(signals):
            for signum in signals:
                signal.raise_signal(signum)

    def close(self, verdict: Verdict | None = SUCCESS) -> None:
        self.nodes.close(verdict, self.supervisor)
        self.nodes._thread.join(0.0 if self.nodes._thread.ident is None or self.nodes.has_lost else 60.0)


class Several:
    """The launchers of some nodes, each in a thread of its own where all are called."""

    def __init__(self, launchers: Sequence[Launcher]) -> None:
        self.launchers = launchers
        self.pool = ThreadPoolExecutor(len(launchers))

    def all(self, call: Callable[[Launcher], Result]) -> list[Result]:
        return list(self.pool.map(call, self.launchers, timeout=60.0))


@pytest.fixture(autouse=True)
def _puts_variables_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # A launcher sets it for its process.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Several]:
    """Two launchers before they meet."""
    port = free_port()
    found = Several([Launcher(node, port, tmp_path) for node in range(2)])
    with found.pool:
        try:
            yield found
        finally:
            found.all(Launcher.close)


@pytest.fixture
def pair(apart: Several) -> Several:
    assert apart.all(Launcher.meet) == [None, None]
    return apart


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes wait 1 s for each other."""
    monkeypatch.setattr(node_rendezvous, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(several_nodes, "_TRY_SECONDS", 0.2)


@pytest.mark.usefixtures("is_quick")
def test_a_node_that_is_not_there_yet_is_not_lost(tmp_path: Path) -> None:
    launcher = Launcher(0, free_port(), tmp_path)
    ended = launcher.meet()
    assert ended is not None
    assert ended.message == "phalanx: node 1 did not join within 1 s: see what it printed"
    began = time.monotonic()
    launcher.close()
    # Nobody needs the store.
    assert time.monotonic() - began < several_nodes._BYE_SECONDS


@pytest.mark.usefixtures("is_quick")
def test_node_0_that_is_not_there_is_named_with_its_address(tmp_path: Path) -> None:
    port = free_port()
    launcher = Launcher(1, port, tmp_path)
    ended = launcher.meet()
    launcher.close()
    assert ended is not None
    assert ended.message == f"phalanx: node 0 did not answer at 127.0.0.1:{port} within 1 s: see what it printed"


def test_a_failure_ends_the_ranks_of_the_other_node_in_its_attempt_alone(pair: Several) -> None:
    failing, other = pair.launchers
    failing.nodes.report_failure()
    wait_until(lambda: other.nodes.others_ended() == 1)
    assert failing.nodes.others_ended() is None
    failed = Verdict(1, "boom", failed=True, rank=0)
    ended = Verdict(143, "ended by SIGTERM", failed=True)
    verdicts = pair.all(lambda launcher: launcher.agree(failed if launcher is failing else ended))
    assert [(verdict.exit_code, verdict.message) for verdict in verdicts] == [(1, "boom"), (1, "node 0: boom")]
    first = failing.nodes.place
    assert pair.all(Launcher.meet) == [None, None]
    tokens = {launcher.nodes.place and launcher.nodes.place.token for launcher in pair.launchers}
    assert len(tokens) == 1
    assert first is not None
    assert first.token not in tokens
    time.sleep(3 * several_nodes._POLL_SECONDS)
    assert [launcher.nodes.others_ended() for launcher in pair.launchers] == [None, None]
    other.nodes.report_failure()
    wait_until(lambda: failing.nodes.others_ended() == 1)


def test_a_killed_rank_is_the_cause_though_the_broken_connection_was_noticed_first(
    pair: Several, tmp_path: Path
) -> None:
    noticing, killed = pair.launchers
    noticing.nodes.report_failure()
    wait_until(lambda: killed.nodes.others_ended() == 1)
    rank = subprocess.Popen(["sleep", "60"])

    def kill_and_look() -> int | None:
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        return killed.nodes.others_ended()

    killed.supervisor.begin_attempt(str(tmp_path), 1)
    killed.supervisor.add(rank)
    by_signal = killed.supervisor.watch(others_ended=kill_and_look)
    assert by_signal.exit_code == 137
    broken = Verdict(1, "RuntimeError: gloo/transport/tcp/pair.cc:534: closed by peer", failed=True, rank=0)
    first, second = pair.all(lambda launcher: launcher.agree(broken if launcher is noticing else by_signal))
    assert (first.exit_code, second.exit_code) == (137, 137)
    assert first.message.startswith(f"node 1: rank 1 (pid {rank.pid}) was killed by SIGKILL")


def test_a_node_decides_on_restarts_as_node_0_does(apart: Several) -> None:
    for step in (3, 5):
        apart.launchers[0].restarts.wait_before_restart(1, step)
    assert apart.all(Launcher.meet) == [None, None]
    assert [launcher.restarts.attempt for launcher in apart.launchers] == [2, 2]
    assert apart.launchers[1].restarts.wait_before_restart(1, 5) is None


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_leaves_between_two_attempts_ends_the_others(pair: Several, node: int) -> None:
    leaving = pair.launchers[node]
    pair.all(lambda launcher: launcher.agree(Verdict(1, "boom", failed=True, rank=0)))
    ended = Verdict(75, "ended by SIGTERM before the ranks were started; run the same command again", failed=True)

    def leave_or_wait(launcher: Launcher) -> Verdict | None:
        verdict = ended if launcher is leaving else launcher.meet()
        launcher.close(verdict)
        return verdict

    assert pair.all(leave_or_wait) == [ended, ended]


def test_a_launcher_that_fails_itself_ends_the_others(pair: Several) -> None:
    failing, other = pair.launchers
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(failing.close, None)
        wait_until(lambda: other.nodes.others_ended() == 1)
        verdict = other.agree(Verdict(143, "ended by SIGTERM", failed=True))
        assert verdict.message == "phalanx: the launcher of node 0 failed: see what it printed"
        other.close()
        closing.result(60.0)


@pytest.mark.parametrize(("node", "own"), [(0, SUCCESS), (1, Verdict(76, "stalled", failed=True, rank=0))])
def test_after_a_second_interrupt_the_other_nodes_are_not_waited_for(pair: Several, node: int, own: Verdict) -> None:
    leaving = pair.launchers[node]
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(leaving.agree, own)
        leaving.receive(signal.SIGINT, signal.SIGINT)
        assert verdict.result(60.0) == (own if own.failed else Verdict(130, "interrupted", failed=True))


def test_nodes_with_different_numbers_of_ranks_are_refused(tmp_path: Path) -> None:
    port = free_port()
    apart = Several([Launcher(node, port, tmp_path, num_ranks=node + 1) for node in range(2)])
    with apart.pool:
        verdicts = apart.all(Launcher.meet)
        text = "node 1 starts 2 ranks and node 0 1: give -n the same number on all nodes"
        assert verdicts == [Verdict(78, text, failed=True)] * 2
        apart.all(lambda launcher: launcher.close(verdicts[0]))


class SlowServer:
    """A fork server that does not get ready."""

    environments: ClassVar[list[Mapping[str, str]]] = []
    pid = 0
    is_spoiled = False

    def __init__(self, script: Script, environment: Mapping[str, str], libraries: Iterable[str]) -> None:
        self.environments.append(environment)

    def is_ready_or_ended(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture
def prepared(pair: Several, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[Verdict]]:
    """Return the verdict of an attempt for which node 1 prepares two ranks."""
    monkeypatch.setattr(SlowServer, "environments", [])
    monkeypatch.setattr(script_launcher, "ForkServer", SlowServer)
    this = pair.launchers[1]
    context = LaunchContext(str(tmp_path), None, 2, 0, node=NodePlace(1, 2, "127.0.0.1", 1))
    launcher = script_launcher._ScriptLauncher(
        Script([sys.executable], "train.py", False, []), this.supervisor, this.nodes, (), False
    )
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(launcher.run_attempt, context, is_last=True)
        wait_until(lambda: SlowServer.environments)
        yield verdict
        this.receive(signal.SIGINT, signal.SIGINT)


def test_a_signal_before_the_ranks_are_started_preempts_the_others(pair: Several, prepared: Future[Verdict]) -> None:
    # The server of a node is started with the environment of its first rank.
    (environment,) = SlowServer.environments
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == ["2", "0", "1"]
    other, this = pair.launchers
    this.receive(signal.SIGTERM)
    wait_until(lambda: other.nodes.others_ended() == 75)
    stopped = Verdict(143, "ended by SIGTERM", failed=True)
    assert [other.agree(stopped).exit_code, prepared.result(60.0).exit_code] == [75, 75]


def test_a_port_that_is_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with refuses(ConfigurationError, f"--rdzv={port}", varies=rf"\b{port}\b"):
            SeveralNodes(NodeOptions(0, 2, 2, 0, "127.0.0.1", port), 1)


def test_a_host_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(listening, "_RESOLVE_SECONDS", 0.0)
    with refuses(ConfigurationError, "--rdzv 'host-b'"):
        SeveralNodes(NodeOptions(1, 2, 2, 0, "host-b", 1), 1)


def test_the_ranks_of_all_nodes_can_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(several_nodes, "listen", lambda host, port, size, *_: sizes.append(size))
    SeveralNodes(NodeOptions(0, 16, 16, 2, "127.0.0.1", 1), 8)
    assert sizes[0] >= 18 * 8 + 18


class Cable:
    """A port that forwards connections to another one, until a test cuts it: nothing arrives, and nobody is told."""

    def __init__(self, port: int) -> None:
        self.is_cut = threading.Event()
        self._to = port
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in (self._server, *self._ends):
            # Closing alone does not wake the threads.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if not self.is_cut.is_set():
                    other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.mark.timeout(90)
def test_a_store_that_does_not_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_records, "KEEP_ALIVE_SECONDS", 1)
    monkeypatch.setattr(node_records, "KEEP_ALIVE_ATTEMPTS", 4)
    port = free_port()
    cable = Cable(port)
    pair = Several([Launcher(0, port, tmp_path), Launcher(1, cable.port, tmp_path)])
    with pair.pool, contextlib.closing(cable):
        assert pair.all(Launcher.meet) == [None, None]
        cable.is_cut.set()
        for launcher in pair.launchers:
            wait_until(lambda launcher=launcher: launcher.nodes.others_ended() == 1)  # type: ignore[misc]
        first, second = pair.all(lambda launcher: launcher.agree(Verdict(143, "ended by SIGTERM", failed=True)))
        assert re.match(r"phalanx: node 1 \(\S+\) does not answer", first.message)
        assert second.message.startswith(f"phalanx: node 0 at 127.0.0.1:{cable.port} does not answer")
        assert (first.exit_code, second.exit_code) == (1, 1)
        assert [launcher.nodes.has_lost for launcher in pair.launchers] == [True, True]
        assert [launcher.nodes.regroup("") for launcher in pair.launchers] == [False, False]
        pair.all(Launcher.close)
    for launcher in pair.launchers:
        # Ends a thread of torch's, which a process that ends leaves behind.
        assert launcher.nodes._rendezvous is not None
        launcher.nodes._rendezvous.close()
