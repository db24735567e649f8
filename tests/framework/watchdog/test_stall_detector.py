"""A run without progress is ended, and the rank that all others wait for is named, with all stacks."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from simulated_ranks import AT_WORK, WAITING, SimulatedRanks, record

import phalanx
from phalanx import Trainer
from phalanx.framework.core.errors import ConfigurationError, StalledError
from phalanx.framework.launch.supervisor import Supervisor
from phalanx.framework.launch.verdict import Verdict
from phalanx.framework.system.failure_records import RankRecords
from phalanx.framework.watchdog import stall_detector
from phalanx.framework.watchdog.heartbeat import (
    LAST_BACKWARD,
    SECTIONS,
    Heartbeat,
    HeartbeatReader,
    HeartbeatRecord,
    resolve_stall_timeout,
)
from phalanx.framework.watchdog.silence import FIRST_SECONDS, LEAST_SECONDS, SilenceTracker
from phalanx.framework.watchdog.stack_dump import Stacks, parse_stacks
from phalanx.framework.watchdog.stall_detector import StallDetector

ELSEWHERE = Stacks(('  File "train.py", line 4 in training_step',))
STOPPED = Stacks(state="T")
COLLECTING = Stacks(("  Garbage-collecting", *AT_WORK.frames))
STARVED = Stacks(state="R")
DEBUGGED = Stacks(('  File "/lib/python3.11/pdb.py", line 9 in user_line',))


class TrackedRanks:
    """A tracker of simulated ranks, on a simulated clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tracker = SilenceTracker(lambda: self.now)

    def pass_seconds(self, seconds: float, *records: HeartbeatRecord | None) -> None:
        """Have ranks be at ``records`` for ``seconds``."""
        for _ in range(math.ceil(seconds / 0.5)):
            self.now += 0.5
            self.tracker.update(dict(enumerate(records)))

    def late(self, *records: HeartbeatRecord | None) -> list[int]:
        found = self.tracker.update(dict(enumerate(records)))
        return [rank for rank, silent in found.items() if silent.is_late]

    def limit(self, *records: HeartbeatRecord | None) -> float:
        return max(silent.limit for silent in self.tracker.update(dict(enumerate(records))).values())


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_learned_limit_starts_high_and_shrinks_with_the_signs_of_life() -> None:
    tracked = TrackedRanks()
    assert tracked.limit(record(1)) == FIRST_SECONDS
    limits = []
    for number in range(2, 200):
        tracked.pass_seconds(0.5, record(number))
        limits.append(tracked.limit(record(number)))
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] == LEAST_SECONDS >= 10
    # Each section learns on its own.
    assert tracked.limit(record(300, "save")) == FIRST_SECONDS


def test_a_long_silence_that_ends_raises_the_limit() -> None:
    tracked = TrackedRanks()
    for number in range(1, 200):
        tracked.pass_seconds(0.5, record(number))
    tracked.pass_seconds(40.0, record(200))
    assert tracked.late(record(200)) == []
    assert tracked.limit(record(201)) == pytest.approx(400.0, abs=10)


def test_a_limit_from_the_user_holds_from_the_start() -> None:
    tracked = TrackedRanks()
    tracked.pass_seconds(9.0, record(1, limit=10))
    assert tracked.late(record(1, limit=10)) == []
    tracked.pass_seconds(2.0, record(1, limit=10))
    assert tracked.late(record(1, limit=10)) == [0]
    tracked.pass_seconds(5000.0, record(2, limit=False))
    assert tracked.late(record(2, limit=False)) == []


def test_time_during_which_the_watchdog_was_suspended_does_not_count() -> None:
    tracked = TrackedRanks()
    tracked.pass_seconds(1.0, record(1, limit=10))
    tracked.now += 3600.0
    assert tracked.late(record(1, limit=10)) == []


@pytest.mark.parametrize(
    ("given", "section", "seconds"),
    [
        (None, "step", 0.0),
        (12, "save", 12.0),
        (timedelta(minutes=2), "set-up", 120.0),
        (False, "step", math.inf),
        ({"step": 20, "save": timedelta(hours=1)}, "save", 3600.0),
        ({"step": 20}, "evaluation", 0.0),
        (5, "outside", 0.0),
    ],
)
def test_values_of_stall_timeout(given: Any, section: str, seconds: float) -> None:
    assert resolve_stall_timeout(given)[SECTIONS.index(section)] == seconds


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (0, "stall_timeout=0"),
        (True, "stall_timeout=True"),
        ("10", "stall_timeout='10'"),
        ({"steps": 5}, "'step'"),
        ({"step": -5}, "stall_timeout=-5"),
    ],
)
def test_invalid_stall_timeouts_are_refused(given: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        Trainer(stall_timeout=given)


# ---- which rank -----------------------------------------------------------------------------------------------------


def test_only_the_rank_with_the_least_progress_is_late() -> None:
    tracked = TrackedRanks()
    behind, ahead = record(5, phase=1, limit=10), record(5, phase=LAST_BACKWARD, limit=10)
    tracked.pass_seconds(20.0, ahead, behind)
    assert tracked.late(ahead, behind) == [1]
    # The other one was silent for longer; but what it waits for has moved.
    tracked.pass_seconds(1.0, ahead, record(5, phase=2, limit=10))
    assert tracked.late(ahead, record(5, phase=2, limit=10)) == []


def test_a_rank_outside_of_fit_has_25_minutes_once_another_waits_for_it() -> None:
    tracked = TrackedRanks()
    outside = dataclasses.replace(record(3), section=0)
    tracked.pass_seconds(4000.0, outside, None)
    assert tracked.late(outside, None) == []
    inside = record(4, "set-up", limit=10)
    tracked.pass_seconds(60.0, inside, None)
    assert tracked.late(inside, None) == []
    tracked.pass_seconds(FIRST_SECONDS, inside, None)
    assert tracked.late(inside, None) == [1]


def message_of(
    monkeypatch: pytest.MonkeyPatch, ranks: SimulatedRanks, computing: set[int], seconds: float = 20.0, size: int = 2
) -> str:
    """Return the message of a stall within ``seconds``, or nothing; the ranks in ``computing`` use a core."""
    now = [0.0]
    monkeypatch.setattr(stall_detector, "work_seconds", lambda pid: now[0] if pid in computing else 0.0)
    monkeypatch.setattr(stall_detector, "process_state", lambda pid: "S")
    detector = StallDetector(ranks, clock=lambda: now[0])
    while now[0] < seconds:
        now[0] += 0.1
        if stall := detector.check({rank: rank for rank in range(size)}):
            return stall.message
    return ""


@pytest.mark.parametrize(
    ("stacks", "computing", "stalled"),
    [
        # Neither is behind: the rank that does not wait is at fault, a stopped one first.
        ([[WAITING], [AT_WORK]], set(), "rank 1 (pid 1) stalled"),
        ([[AT_WORK], [STOPPED]], set(), "rank 1 (pid 1) stalled (stopped by a signal)"),
        ([[WAITING], [WAITING]], set(), "ranks 0, 1 stalled (waiting for another rank)"),
        # It computes at one line: an endless loop.
        ([[WAITING], [AT_WORK]], {1}, "rank 1 (pid 1) stalled"),
        # It computes, and its stack changes: it is slow, and the rank that waits for it is not at fault either.
        ([[WAITING], [AT_WORK, ELSEWHERE]], {1}, ""),
        # It wants to run, and was given no core to answer on.
        ([[WAITING], [STARVED]], {1}, ""),
        ([[WAITING], [COLLECTING]], {1}, ""),
        ([[WAITING], [DEBUGGED]], set(), ""),
    ],
)
def test_the_rank_at_fault_among_ranks_with_equal_progress(
    monkeypatch: pytest.MonkeyPatch, stacks: list[list[Stacks]], computing: set[int], stalled: str
) -> None:
    here = record(7, limit=10)
    ranks = SimulatedRanks({0: here, 1: here}, dict(enumerate(stacks)))
    message = message_of(monkeypatch, ranks, computing)
    assert message.splitlines()[-1].startswith(stalled) if stalled else message == ""
    # A rank that sleeps is asked for its stack only for the verdict: a signal could wake it.
    assert not stalled or all(asked <= computing for asked in ranks.asked[:-1])


class Arrives(SimulatedRanks):
    """Rank 1 makes its last step a moment after rank 0, and shorter than the time by which deadlines are extended."""

    def records(self, pids: Mapping[int, int]) -> dict[int, HeartbeatRecord | None]:
        self.checks = getattr(self, "checks", 0) + 1
        return super().records(pids) | ({1: record(6, limit=3)} if self.checks < 2 else {})


def test_ranks_that_wait_for_one_another_since_different_moments_have_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    here = record(7, limit=3)
    ranks = Arrives({0: here, 1: here}, {0: [WAITING], 1: [WAITING]})
    assert "ranks 0, 1 stalled" in message_of(monkeypatch, ranks, set())


def test_the_deadline_of_a_slow_rank_is_extended_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimulatedRanks({0: record(7, limit=10)}, {0: [AT_WORK, ELSEWHERE]})
    assert message_of(monkeypatch, ranks, {0}, seconds=290.0, size=1) == ""
    ranks = SimulatedRanks({0: record(7, limit=10)}, {0: [AT_WORK, ELSEWHERE]})
    assert "for 300." in message_of(monkeypatch, ranks, {0}, seconds=310.0, size=1)
    # Once it hangs, its limit holds again.
    ranks = SimulatedRanks({0: record(7, limit=10)}, {0: [AT_WORK, ELSEWHERE, *[ELSEWHERE] * 99]})
    assert "for 20." in message_of(monkeypatch, ranks, {0}, seconds=310.0, size=1)


@pytest.mark.parametrize("stack", [WAITING, AT_WORK])
def test_a_rank_that_knows_of_a_peer_further_behind_has_not_stalled(
    monkeypatch: pytest.MonkeyPatch, stack: Stacks
) -> None:
    ranks = SimulatedRanks({0: record(7, limit=10)}, {0: [stack]})
    ranks.peer_is_behind = True
    assert message_of(monkeypatch, ranks, set(), seconds=900.0, size=1) == ""
    ranks.peer_is_behind = False
    assert "for 10." in message_of(monkeypatch, ranks, set(), size=1)


def test_ranks_with_the_same_stack_are_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = {rank: record(8, limit=10) for rank in range(7)}
    message = message_of(
        monkeypatch,
        SimulatedRanks({**ahead, 7: record(7, limit=10)}, {**{rank: [WAITING] for rank in range(7)}, 7: [AT_WORK]}),
        set(),
        size=8,
    )
    *lines, sentence = message.splitlines()
    assert lines == [
        "the run has stalled. What each rank was doing, the innermost call first:",
        "ranks 0, 1, 2, 3, 4, 5, 6 (waiting for others):",
        *WAITING.frames,
        "rank 7 (pid 7):",
        *AT_WORK.frames,
    ]
    assert sentence.startswith("rank 7 (pid 7) stalled: no heartbeat for 10.")


# ---- heartbeats ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_read_by_another_process(tmp_path: Path) -> None:
    reader = HeartbeatReader(str(tmp_path), 3)
    assert reader.read() is None
    heartbeat = Heartbeat()
    assert heartbeat.share(str(tmp_path), 3)
    assert reader.read() is None
    heartbeat.begin(resolve_stall_timeout({"save": 40}))
    first = reader.read()
    assert first is not None
    assert (str(first), first.step) == ("in the section 'set-up'", -1)
    assert (first.pid, SECTIONS[first.section], first.limits[SECTIONS.index("save")]) == (os.getpid(), "set-up", 40.0)
    assert reader.read() is first
    heartbeat.set_position(12, 1, 4)
    heartbeat.step()
    heartbeat.phase[0] += 2
    with heartbeat.section("save"):
        assert str(reader.read()) == "in the section 'save' at step 12 (epoch 1, batch 4)"
    after = reader.read()
    assert after is not None
    assert (SECTIONS[after.section], after.step, after.epoch, after.batch) == ("step", 12, 1, 4)
    assert after.progress > first.progress
    # A second Trainer of the same rank continues the count.
    second = Heartbeat()
    assert second.share(str(tmp_path), 3)
    second.begin(resolve_stall_timeout(None))
    later = reader.read()
    assert later is not None
    assert later.progress > after.progress


def test_a_heartbeat_works_without_shared_memory(tmp_path: Path) -> None:
    heartbeat = Heartbeat()
    assert not heartbeat.share(str(tmp_path / "gone"), 0)
    heartbeat.begin(resolve_stall_timeout(None))
    heartbeat.set_position(1, 0, 1)
    assert heartbeat.read().step == 1


def test_stacks_are_parsed_by_thread() -> None:
    text = (
        'Thread 0x00007f1 (most recent call first):\n  File "a.py", line 1 in wait\n\n'
        'Current thread 0x00007f2 (most recent call first):\n  File "b.py", line 2 in f\n  File "b.py", line 9 in g\n'
    )
    stacks = parse_stacks(text, 0x7F2)
    assert stacks.frames == ('  File "b.py", line 2 in f', '  File "b.py", line 9 in g')
    assert stacks.others == (('  File "a.py", line 1 in wait',),)


@pytest.mark.parametrize(
    ("innermost", "waits"),
    [
        ("torch/cuda/streams.py", True),
        ("torch/cuda/__init__.py", True),
        ("phalanx/strategies/fsdp/gradients.py", True),
        ("train.py", False),
    ],
)
def test_a_rank_that_reads_a_result_from_its_gpu_waits_for_others(innermost: str, waits: bool) -> None:
    frames = (f'  File "/a/{innermost}", line 1 in f', '  File "/a/train.py", line 2 in g')
    assert Stacks(frames).waits == waits
    assert not Stacks(frames[::-1]).waits


# ---- real ranks -----------------------------------------------------------------------------------------------------

RANK = """
import ctypes, os, re, signal, sys, time
from phalanx.framework.watchdog.heartbeat import Heartbeat, resolve_stall_timeout
directory, rank, how = sys.argv[1:]
heartbeat = Heartbeat()
heartbeat.share(directory, int(rank))
heartbeat.begin(resolve_stall_timeout({"step": 1.0}))
heartbeat.set_position(5, 0, 5)
heartbeat.step()

def wait_for_others(): time.sleep(60)
def sleep(): time.sleep(60)
def stop(): os.kill(os.getpid(), signal.SIGSTOP)
def die(): os.kill(os.getpid(), signal.SIGKILL)
def sleep_with_lock(): ctypes.PyDLL(None).sleep(60)
def compute_with_lock(): re.match("(a+)+$", "a" * 60 + "b")
def make_progress():
    for _ in range(20):
        time.sleep(0.1)
        heartbeat.mark_sync_point()

if how == "wait":
    heartbeat.mark_sync_point()
    wait_for_others()
globals()[how]()
"""


def watch_ranks(supervisor: Supervisor, directory: Path, *hows: str) -> tuple[Verdict, float]:
    """Supervise a small process for each of ``hows``; return how they ended, and after how many seconds."""
    root = str(Path(phalanx.__file__).parent.parent)
    for rank, how in enumerate(hows):
        command = [sys.executable, "-c", RANK, str(directory), str(rank), how]
        supervisor.add(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}))
    until = time.monotonic() + 30
    readers = [HeartbeatReader(str(directory), rank) for rank in range(len(hows))]
    while not all(reader.read() for reader in readers):
        assert time.monotonic() < until
        time.sleep(0.01)
    began = time.monotonic()
    return supervisor.watch(), time.monotonic() - began


def test_the_step_is_known_of_a_rank_that_was_killed_before_anything_was_read(tmp_path: Path) -> None:
    supervisor = Supervisor(str(tmp_path))
    root = str(Path(phalanx.__file__).parent.parent)
    command = [sys.executable, "-c", RANK, str(tmp_path), "0", "die"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root})
    supervisor.add(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    verdict = supervisor.watch()
    assert (verdict.exit_code, verdict.step) == (137, 5)


def test_restarted_ranks_are_watched_from_the_start(tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    supervisor = Supervisor(str(tmp_path))
    verdict, _ = watch_ranks(supervisor, tmp_path, "sleep")
    assert verdict.exit_code == 76
    supervisor.begin_attempt(str(again))
    assert watch_ranks(supervisor, again, "make_progress")[0] == Verdict(0, "", failed=False)


@pytest.mark.parametrize("how", ["stop", "sleep_with_lock", "compute_with_lock"])
def test_a_rank_that_hangs_is_named_and_all_are_ended(tmp_path: Path, how: str) -> None:
    verdict, seconds = watch_ranks(Supervisor(str(tmp_path)), tmp_path, "wait", how)
    assert verdict.exit_code == StalledError.exit_code == 76
    # Within its limit of a second, and two more; the rest is for a machine under load.
    assert seconds < 3.0 * 3
    assert (verdict.rank, verdict.step) == (1, 5)
    *stacks, sentence = verdict.message.splitlines()
    assert sentence.startswith("rank 1 (pid ")
    assert "in the section 'step' at step 5 (epoch 0, batch 5); the limit is 1 s" in sentence
    assert any("in wait_for_others" in line for line in stacks)
    shown = "stopped by a signal, so it has no stack" if how == "stop" else f"in {how}"
    assert any(shown in line for line in stacks)


def test_a_rank_that_failed_and_hangs_as_it_exits_is_reported_with_its_error(tmp_path: Path) -> None:
    RankRecords(str(tmp_path)).record_pending_error(1, ValueError("the cause"))
    verdict, _ = watch_ranks(Supervisor(str(tmp_path)), tmp_path, "wait", "sleep")
    assert (verdict.exit_code, verdict.rank) == (1, 1)
    assert verdict.message.endswith("ValueError: the cause")


def test_without_a_script_a_stall_is_reported_and_training_continues(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                time.sleep(2.5)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    trainer = silent_trainer(max_steps=3, stall_timeout={"step": 0.5})
    trainer.fit(Slow(), loader())
    assert trainer.global_step == 3
    reported = capfd.readouterr().err
    assert reported.count("stalled: no heartbeat") == 1
    assert "in training_step" in reported


def reported_while_one_is_late(how: str, strategy: str) -> str:
    """Train on ranks that watch themselves, of which the last is late in one step; return this rank's report."""

    class Late(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
                until = time.monotonic() + 5.0
                while time.monotonic() < until:
                    compute() if how == "computes" else time.sleep(5.0)
            return super().training_step(batch, batch_idx)

    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "__stderr__", written)
        trainer = silent_trainer(devices=2, strategy=strategy, max_steps=4, stall_timeout={"step": 2.0})
        trainer.fit(Late(), loader())
    assert trainer.global_step == 4
    return written.getvalue()


def compute(depth: int = 100) -> None:
    """Compute with a stack that changes all the time: two samples of it are seldom the same."""
    math.factorial(500)
    if depth > 0:
        compute(depth - 1)


def test_a_rank_that_waits_for_a_slow_one_has_not_stalled() -> None:
    assert run_on_ranks(2, reported_while_one_is_late, "computes", "fsdp") == ["", ""]


# Under fsdp the other waits before its forward pass, as far as the one that is late; under ddp after its backward pass.
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_among_ranks_that_watch_themselves_the_one_behind_is_reported(strategy: str) -> None:
    waiting, sleeping = run_on_ranks(2, reported_while_one_is_late, "sleeps", strategy)
    assert waiting == ""
    assert "rank 1 (pid " in sleeping.splitlines()[-1]
    assert "stalled: no heartbeat for 2." in sleeping


def test_sections_of_a_run(tmp_path: Path) -> None:
    seen: list[str] = []

    class Noting(Regressor):
        def note(self) -> None:
            seen.append(SECTIONS[cast(Trainer, self.trainer).heartbeat.read().section])

        def setup(self, stage: str) -> None:
            self.note()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note()

        def on_train_epoch_end(self) -> None:
            self.note()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.note()

        def teardown(self, stage: str) -> None:
            self.note()

    trainer = silent_trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(Noting(), loader(), loader())
    trainer.fit(Noting(), loader(4), None)
    assert seen == [
        *("set-up", "step", "step", "evaluation", "epoch", "teardown"),
        *("set-up", "step", "epoch", "teardown"),
    ]
    assert SECTIONS[trainer.heartbeat.read().section] == "outside"
