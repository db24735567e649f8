"""The common verdict of several nodes on an attempt, and launchers that give no more sign of life."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.framework.launch import liveness
from phalanx.framework.launch.liveness import SILENT_SECONDS, SignsOfLife
from phalanx.framework.launch.node_store import NodeStore, StoreLost
from phalanx.framework.launch.node_verdict import NodeEnd, cause, common_verdict, lost_verdict
from phalanx.framework.launch.verdict import Verdict

SUCCESS = Verdict(0, "", failed=False)


def end(node: int, code: int, order: int = 0, is_consequence: bool = False, step: int | None = None) -> NodeEnd:
    is_fault = code not in (0, 75, 130, 143)
    return NodeEnd(node, code, f"node {node} ended", step, order, is_consequence, is_fault)


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
def test_the_first_cause_counts(ends: Sequence[NodeEnd], first: int) -> None:
    assert cause(ends, silent=None).node == first


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
    cut = NodeEnd.of(0, lost, 1, False)
    planted = f"{head.format(1)}:\n{trace}ValueError: planted"
    own = NodeEnd.of(1, Verdict(1, planted, failed=True, step=3, rank=1), 2, False)
    first = cause([cut, own], silent=None)
    assert first == own
    assert NodeEnd.read(first.text) == first
    # The other nodes show the error in one line.
    assert common_verdict(lost, first, 0).message == f"node 1: {head.format(1)}: ValueError: planted"


def test_all_nodes_have_the_code_and_the_step_of_the_cause() -> None:
    first = end(1, 137, step=5)
    own = Verdict(1, "connection lost", failed=True, step=4, rank=0, traceback="...")
    assert common_verdict(own, first, 0) == Verdict(137, "node 1: node 1 ended", failed=True, step=5)
    assert common_verdict(own, first, 1) is own
    assert common_verdict(SUCCESS, end(0, 0), 1) == SUCCESS


def test_a_silent_node_is_the_cause_unless_ranks_have_failed_by_themselves() -> None:
    ended = Verdict(143, "ended by SIGTERM", failed=True, step=7)
    silent = "phalanx: node 1 does not answer: its launcher or its host has ended, or cannot be reached"
    consequence = cause([end(0, 143, is_consequence=True)], silent=1)
    assert common_verdict(ended, consequence, 0) == Verdict(1, silent, failed=True, step=7)
    assert common_verdict(SUCCESS, cause([end(0, 0)], silent=1), 0) == Verdict(1, silent, failed=True)
    own = Verdict(137, "rank 0 was killed", failed=True)
    found = common_verdict(own, cause([end(0, 137, order=1)], silent=1), 0)
    assert (found.exit_code, found.message) == (137, f"rank 0 was killed\n{silent}")
    assert lost_verdict(SUCCESS, 0, " at a:1").message.startswith("phalanx: node 0 at a:1 does not answer")


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_is_silent_once_its_counter_has_not_changed_for_long() -> None:
    clock, counts = Clock(), {1: "0", 2: "0"}
    signs = SignsOfLife([1, 2], counts.get, clock)
    assert signs.silent() is None
    for second in range(1, round(SILENT_SECONDS) + 1):
        clock.now, counts[1] = float(second), str(second)
        assert signs.silent() is None
    clock.now += 1.0
    counts[1] = "-"
    assert signs.silent() == 2


def test_a_node_is_not_silent_before_it_has_a_counter_and_a_suspended_observer_is_patient() -> None:
    clock, counts = Clock(), dict[int, str]()
    signs = SignsOfLife([1], counts.get, clock)
    for second in range(900):
        clock.now = float(second)
        assert signs.silent() is None
    counts[1] = "0"
    assert signs.silent() is None
    clock.now += 1000.0
    # This process was suspended, and the counters with it.
    assert signs.silent() is None
    looks = 0
    while signs.silent() is None:
        clock.now, looks = clock.now + 1.0, looks + 1
    assert SILENT_SECONDS - 5 < looks < SILENT_SECONDS + 2


class Store:
    """A store whose connection is cut by a test."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_cut = threading.Event()
        self.healed = threading.Event()
        self.calls = 0

    def _answer(self, value: Callable[[], Any]) -> Any:
        self.calls += 1
        if self.is_cut.is_set():
            self.healed.wait(30.0)
        return value()

    def set(self, key: str, value: str) -> None:
        self._answer(lambda: self.values.update({key: value.encode()}))

    def get(self, key: str) -> bytes:
        found: bytes = self._answer(lambda: self.values[key])
        return found


def test_a_store_that_does_not_answer_is_lost_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Store()
    with contextlib.closing(NodeStore(inner)) as store:
        store.set("a", "1")
        assert store.get("a") == "1"
        monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.2)
        inner.is_cut.set()
        with pytest.raises(StoreLost):
            store.get("a")
        inner.is_cut.clear()
        inner.healed.set()
        before = inner.calls
        with pytest.raises(StoreLost):
            store.get("a")
        assert inner.calls == before
