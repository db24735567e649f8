"""``SeveralNodes`` on two nodes of this process, whose ranks are left out."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from free_ports import free_port
from ranks import wait_until

from phalanx.framework.launch import liveness, script_launcher, several_nodes
from phalanx.framework.launch.launch_context import LaunchContext, NodePlace
from phalanx.framework.launch.node_attempt import NodeAttempt
from phalanx.framework.launch.node_store import NodeStore, connect
from phalanx.framework.launch.several_nodes import SeveralNodes
from phalanx.framework.launch.supervisor import Supervisor
from phalanx.framework.launch.verdict import Verdict
from phalanx.framework.system.entry_script import Script

Result = TypeVar("Result")

SUCCESS = Verdict(0, "", failed=False)


class Launcher:
    """The launcher of one of two nodes."""

    def __init__(self, node: int, port: int, directory: Path) -> None:
        self.nodes = SeveralNodes(node, 2, "127.0.0.1", port, 1)
        self.supervisor = Supervisor(str(directory))

    def meet(self, attempt: int) -> Verdict | None:
        return self.nodes.meet(attempt, 1, self.supervisor)

    def agree(self, verdict: Verdict) -> Verdict:
        return self.nodes.agree(verdict, self.supervisor)

    def receive(self, *signals: signal.Signals) -> None:
        with self.supervisor.handling_signals(signals):
            for signum in signals:
                signal.raise_signal(signum)

    def close(self) -> None:
        self.nodes.close(SUCCESS, self.supervisor)


class Pair:
    """The launchers of two nodes, each in a thread of its own where both are called."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.launchers = [Launcher(node, port, directory) for node in range(2)]
        self.pool = ThreadPoolExecutor(2)

    def both(self, call: Callable[[Launcher], Result]) -> list[Result]:
        return list(self.pool.map(call, self.launchers, timeout=60.0))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    with found.pool:
        assert found.both(lambda launcher: launcher.meet(0)) == [None, None]
        try:
            yield found
        finally:
            found.both(Launcher.close)


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher counts as gone after 0.1 s, and the nodes wait 1 s for each other."""
    monkeypatch.setattr(several_nodes, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(several_nodes, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.1)


@pytest.mark.usefixtures("is_quick")
def test_a_node_that_is_not_there_yet_is_not_silent(tmp_path: Path) -> None:
    launcher = Launcher(0, free_port(), tmp_path)
    ended = launcher.meet(0)
    assert ended is not None
    assert ended.message == "phalanx: node 1 did not join within 1 s: see what it printed"
    began = time.monotonic()
    launcher.close()
    # Nobody needs the store.
    assert time.monotonic() - began < several_nodes._BYE_SECONDS


@pytest.mark.usefixtures("is_quick")
def test_a_node_that_was_there_and_is_gone_is_silent(tmp_path: Path) -> None:
    port = free_port()
    launcher = Launcher(0, port, tmp_path)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(launcher.meet, 0)
        place, store = NodePlace(1, 2, "127.0.0.1", port), None
        while store is None:
            store = connect(place, None)
        with contextlib.closing(store):
            store.set("alive/1", "0")
            verdict = ended.result(60.0)
            assert verdict is not None
            assert "node 1 does not answer" in verdict.message
            assert launcher.nodes.is_lost
            launcher.close()


def test_a_failure_does_not_leak_into_the_next_attempt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, other = pair.launchers
    begun, done = threading.Event(), threading.Event()
    may_go_on = threading.Event()
    announce = NodeAttempt.announce_failure

    def delayed(attempt: NodeAttempt, store: NodeStore) -> None:
        """The thread is suspended from the end of an attempt to the begin of the next one."""
        in_thread = threading.current_thread().name == "phalanx-nodes"
        if in_thread:
            begun.set()
            may_go_on.wait(60.0)
        announce(attempt, store)
        if in_thread:
            done.set()

    monkeypatch.setattr(NodeAttempt, "announce_failure", delayed)
    failing.nodes.report_failure()
    assert begun.wait(60.0)
    failed = Verdict(1, "boom", failed=True, rank=0)
    verdicts = pair.both(lambda launcher: launcher.agree(failed if launcher is failing else SUCCESS))
    assert [verdict.exit_code for verdict in verdicts] == [1, 1]
    assert pair.both(lambda launcher: launcher.meet(1)) == [None, None]
    may_go_on.set()
    assert done.wait(60.0)
    time.sleep(3 * several_nodes._POLL_SECONDS)
    assert [launcher.nodes.others_ended() for launcher in pair.launchers] == [None, None]
    other.nodes.report_failure()
    wait_until(lambda: failing.nodes.others_ended() == 1)


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_a_launcher_whose_ranks_have_ended_is_passed_on(pair: Pair, node: int) -> None:
    done, other = pair.launchers[node], pair.launchers[1 - node]
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(done.agree, SUCCESS)
        done.receive(signal.SIGTERM)
        wait_until(lambda: other.nodes.signal_of_others() == signal.SIGTERM)
        assert not verdict.done()
        done.receive(signal.SIGINT)
        wait_until(lambda: other.nodes.signal_of_others() == signal.SIGINT)
        assert other.agree(Verdict(130, "interrupted", failed=True)).exit_code == 130
        assert verdict.result(60.0).exit_code == 130


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("own", [SUCCESS, Verdict(76, "stalled", failed=True, rank=0)])
def test_after_a_second_interrupt_the_other_nodes_are_not_waited_for(pair: Pair, node: int, own: Verdict) -> None:
    leaving = pair.launchers[node]
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(leaving.agree, own)
        leaving.receive(signal.SIGINT, signal.SIGINT)
        assert verdict.result(60.0) == (own if own.failed else Verdict(130, "interrupted", failed=True))


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
def prepared(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[Verdict]]:
    """Return the verdict of an attempt for which node 1 prepares two ranks."""
    monkeypatch.setattr(SlowServer, "environments", [])
    monkeypatch.setattr(script_launcher, "ForkServer", SlowServer)
    this = pair.launchers[1]
    context = LaunchContext(str(tmp_path), None, 2, 0, NodePlace(1, 2, "127.0.0.1", 1))
    launcher = script_launcher._ScriptLauncher(
        Script([sys.executable], "train.py", False, []), this.supervisor, this.nodes, (), False
    )
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(launcher.run_attempt, context, is_last=True)
        wait_until(lambda: SlowServer.environments)
        yield verdict
        this.receive(signal.SIGINT, signal.SIGINT)


@pytest.mark.usefixtures("prepared")
def test_the_server_of_a_node_is_started_with_the_environment_of_its_first_rank() -> None:
    (environment,) = SlowServer.environments
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")] == ["2", "0", "1"]


def test_a_signal_before_the_ranks_are_started_preempts_the_others(pair: Pair, prepared: Future[Verdict]) -> None:
    other, this = pair.launchers
    this.receive(signal.SIGTERM)
    wait_until(lambda: other.nodes.signal_of_others() == signal.SIGTERM)
    wait_until(lambda: other.nodes.others_ended() == 75)
    stopped = Verdict(143, "ended by SIGTERM", failed=True)
    assert [other.agree(stopped).exit_code, prepared.result(60.0).exit_code] == [75, 75]


@pytest.mark.parametrize(("code", "is_consequence"), [(None, False), (1, True), (75, False), (130, False)])
def test_preempted_ranks_end_by_themselves(code: int | None, is_consequence: bool) -> None:
    attempt = NodeAttempt(0)
    attempt.others = code
    assert attempt.is_consequence is is_consequence
    attempt.has_failed.set()
    assert not attempt.is_consequence


def test_the_ranks_of_all_nodes_can_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(several_nodes, "listen", lambda host, port, size, *_: sizes.append(size))
    SeveralNodes(0, 16, "127.0.0.1", 1, 8)
    assert sizes[0] >= 16 * 8 + 16
