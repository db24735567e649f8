"""The rank at fault, from how the ranks ended: ranks here are shells, which start in no time."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.framework.core.errors import ConfigurationError, Preempted, RankError
from phalanx.framework.launch.supervisor import PREEMPT_SECONDS, Supervisor
from phalanx.framework.launch.verdict import Verdict
from phalanx.framework.system.failure_records import Failure, RankRecords, exit_code_of
from phalanx.framework.watchdog.heartbeat import SECTIONS, HeartbeatRecord, resolve_stall_timeout
from phalanx.framework.watchdog.stall_detector import SupervisedRanks

SLEEP = "exec sleep 3600"


def watch(directory: Path, *commands: str) -> Verdict:
    """Watch one shell for each of ``commands``."""
    supervisor = Supervisor(str(directory))
    processes = [subprocess.Popen(["sh", "-c", command]) for command in commands]
    for process in processes:
        supervisor.add(process)
    verdict = supervisor.watch()
    assert all(process.returncode is not None for process in processes)
    return verdict


def in_section(monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    """Have all ranks be in a section."""
    record = HeartbeatRecord(0, 0, 0, resolve_stall_timeout(None), 1, SECTIONS.index(section), 0, 3, 0, 3)
    monkeypatch.setattr(SupervisedRanks, "records", lambda _, pids: dict.fromkeys(pids, record))


def raised(error: BaseException) -> BaseException:
    """Return an error with a traceback."""
    try:
        raise error.with_traceback(None)
    except BaseException as caught:
        return caught


class Records:
    """Records that ranks write before they end, in order of time."""

    def __init__(self, directory: Path) -> None:
        self.records = RankRecords(str(directory))

    def failure(self, rank: int, error: BaseException) -> None:
        """Record the error that ends a rank."""
        self.records.record_failure(Failure.of(rank, raised(error)))
        time.sleep(0.001)

    def pending(self, rank: int, error: BaseException) -> None:
        """Record an error that the program may still catch."""
        self.records.record_pending_error(rank, raised(error))
        time.sleep(0.001)

    def leaving(self, rank: int) -> None:
        """Record that a rank begins to exit."""
        self.records.record_leaving(rank)
        time.sleep(0.001)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def test_ranks_that_succeed_are_waited_for(tmp_path: Path) -> None:
    assert watch(tmp_path, "true", "sleep 0.3") == Verdict(0, "", failed=False)


CAUSE, REFUSAL, RESET = ValueError("the cause"), ConfigurationError("refused"), RuntimeError("connection reset")
NAMES_CAUSE = "ValueError: the cause"
CUDA = RuntimeError("CUDA error: an illegal memory access")

# What ranks record, how they end, and the exit code and the end of the verdict, which is on rank 1.
AT_FAULT: dict[str, tuple[list[tuple[Any, ...]], list[str], int, str]] = {
    "a bad exit code": ([], [SLEEP, "exit 9"], 9, "ended with exit code 9"),
    "a signal without a name": ([], [SLEEP, "kill -40 $$"], 168, "was killed by signal 40"),
    "a crash, though another rank recorded an error": (
        [("failure", 0, RESET)], ["exit 1", "kill -SEGV $$"], 139, "was killed by SIGSEGV",
    ),
    "the earliest failure": (
        [("failure", 1, REFUSAL), ("failure", 0, RESET)], ["exit 1", "exit 78"], 78, "ConfigurationError: refused",
    ),
    "an error of a rank that hangs in an exit handler": ([("failure", 1, CAUSE)], [SLEEP, SLEEP], 1, NAMES_CAUSE),
    "leaving first without an error": (
        [("leaving", 1), ("failure", 0, RESET)], ["exit 1", "sleep 0.1; exit 4"], 4, "ended with exit code 4",
    ),
    "leaving first, and never ending": (
        [("leaving", 1), ("failure", 0, RESET)], ["exit 1", SLEEP], 1, "exited the process group and was killed",
    ),
    "an error, before another rank left": ([("failure", 1, CAUSE), ("leaving", 0)], ["exit 1"] * 2, 1, NAMES_CAUSE),
    # As after an error of CUDA: it is raised, then NCCL's watchdog aborts this process, and the other one, which has
    # recorded nothing.
    "an error, before an abort": (
        [("failure", 1, CUDA)], ["sleep 0.1; kill -ABRT $$", "kill -ABRT $$"], 1, "an illegal memory access",
    ),
    "another crash than an abort, after an error": (
        [("failure", 0, RESET)], ["kill -ABRT $$", "kill -SEGV $$"], 139, "was killed by SIGSEGV",
    ),
    "a pending error, though another rank exited first": (
        [("pending", 1, CAUSE), ("failure", 0, RESET)], ["exit 1", "exit 1"], 1, NAMES_CAUSE,
    ),
    "a pending error of a rank that has to be killed": (
        [("pending", 1, CAUSE), ("failure", 0, RESET)], ["exit 1", SLEEP], 1, NAMES_CAUSE,
    ),
    "an error that was raised first and recorded last": (
        [("pending", 1, CAUSE), ("failure", 0, RESET), ("failure", 1, CAUSE)], ["exit 1"] * 2, 1, NAMES_CAUSE,
    ),
    "an exit code, though another rank has to be killed": (
        [], ["trap '' TERM; while true; do sleep 0.05; done", "sleep 0.2; exit 5"], 5, "ended with exit code 5",
    ),
    "a failure, though a preempted rank ends because of it": (
        [("failure", 1, CAUSE)], ["trap 'exit 75' TERM; while true; do sleep 0.02; done", "sleep 0.3; exit 1"], 1,
        NAMES_CAUSE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_FAULT)
def test_the_rank_at_fault_is_named(tmp_path: Path, records: Records, what: str) -> None:
    recorded, commands, code, end = AT_FAULT[what]
    for kind, *arguments in recorded:
        getattr(records, kind)(*arguments)
    verdict = watch(tmp_path, *commands)
    assert verdict.exit_code == code
    assert verdict.message.startswith("rank 1 (pid ")
    assert verdict.message.endswith(end)
    assert "connection reset" not in verdict.message


def test_what_gloo_means_by_an_abort_is_explained(tmp_path: Path, records: Records) -> None:
    records.failure(0, RESET)
    verdict = watch(tmp_path, "exit 1", "kill -ABRT $$")
    assert verdict.exit_code == 128 + signal.SIGABRT
    crash, explanation = verdict.message.split(";")
    assert crash.endswith("was killed by SIGABRT")
    assert "gloo" in explanation


def test_a_crash_that_follows_another_is_not_at_fault(tmp_path: Path) -> None:
    # Rank 0 crashes as it is ended because of rank 1.
    ready = tmp_path / "ready"
    follows = f"trap 'kill -BUS $$' TERM; touch {ready}; while :; do sleep 0.01; done"
    crashes = f"while [ ! -e {ready} ]; do sleep 0.01; done; kill -SEGV $$"
    verdict = watch(tmp_path, follows, crashes)
    assert verdict.exit_code == 128 + signal.SIGSEGV
    assert verdict.message.startswith("rank 1 (pid ")


def test_a_rank_that_quits_a_fit_is_at_fault_for_the_errors_of_others(tmp_path: Path, records: Records) -> None:
    records.pending(1, SystemExit(0))
    assert watch(tmp_path, "true", "true") == Verdict(0, "", failed=False)
    records.failure(0, RuntimeError("connection closed by peer"))
    verdict = watch(tmp_path, "exit 1", "true")
    assert verdict.exit_code == 1
    assert "rank 1 " in verdict.message.splitlines()[0]
    assert "exited the process group with exit code 0" in verdict.message
    assert verdict.message.endswith("SystemExit: 0")


@pytest.mark.parametrize("section", ["teardown", "outside"])
def test_a_rank_that_hangs_in_teardown_after_an_error_is_ended(
    tmp_path: Path, records: Records, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr("phalanx.framework.launch.attempt.TEARDOWN_SECONDS", 0.3)
    in_section(monkeypatch, section)
    records.pending(1, ValueError("the cause"))
    seconds = 30 if section == "teardown" else 1
    verdict = watch(tmp_path, f"exec sleep {seconds}", f"exec sleep {seconds}")
    # Outside of the fit the error was caught, and the user's code may take its time.
    assert verdict.exit_code == (1 if section == "teardown" else 0)
    assert verdict.message.endswith("ValueError: the cause" if section == "teardown" else "")


def test_a_caught_error_is_not_a_failure(tmp_path: Path, records: Records) -> None:
    records.pending(1, ValueError("caught"))
    assert watch(tmp_path, "true", "sleep 0.1") == Verdict(0, "", failed=False)
    RankRecords(str(tmp_path)).clear_pending_error(1)
    records.failure(0, RuntimeError("another"))
    assert watch(tmp_path, "exit 1", SLEEP).message.endswith("RuntimeError: another")


def test_an_error_of_all_ranks_is_not_the_fault_of_one(tmp_path: Path, records: Records) -> None:
    for rank in range(2):
        records.failure(rank, ValueError("the loss is nan on rank 1"))
    verdict = watch(tmp_path, "exit 1", "exit 1")
    assert verdict.message.startswith("all ranks failed:\nTraceback")


def test_ranks_that_were_interrupted_have_not_failed(tmp_path: Path, records: Records) -> None:
    for rank in range(2):
        records.failure(rank, KeyboardInterrupt("rank 1 got SIGINT"))
    assert watch(tmp_path, "exit 130", "exit 130") == Verdict(130, "rank 1 got SIGINT", failed=True)


def test_a_failure_beside_a_preempted_rank_is_shown(tmp_path: Path, records: Records) -> None:
    RankRecords(str(tmp_path)).record_joined(0)
    records.failure(0, Preempted("saved"))
    verdict = watch(tmp_path, "exit 75", "exit 74")
    assert verdict.exit_code == 74


@pytest.mark.parametrize("other", ["sleep 60", "trap 'exit 75' TERM; while true; do sleep 0.05; done"])
def test_ranks_that_can_no_longer_meet_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    supervisor = Supervisor(str(tmp_path))
    in_section(monkeypatch, "set-up")
    # One rank ignores the signal; the other one has not started its fit, or waits for it.
    for command in ("trap '' TERM; while true; do sleep 0.05; done", other):
        supervisor.add(subprocess.Popen(["sh", "-c", f"exec 2>/dev/null; {command}"]))
    told = threading.Timer(0.3, supervisor._on_signal, (signal.SIGTERM, None))
    told.start()
    began = time.monotonic()
    verdict = supervisor.watch()
    told.join()
    assert verdict.exit_code == 75
    assert time.monotonic() - began < PREEMPT_SECONDS / 2


@pytest.mark.parametrize(("section", "code"), [("evaluation", 75), ("outside", 143)])
def test_preempted_ranks_have_the_limits_of_their_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, code: int
) -> None:
    monkeypatch.setattr("phalanx.framework.launch.supervisor.PREEMPT_SECONDS", 0.3)
    in_section(monkeypatch, section)
    RankRecords(str(tmp_path)).record_joined(0)
    supervisor = Supervisor(str(tmp_path))
    supervisor.add(subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 2; exit 75"]))
    told = threading.Timer(0.3, supervisor._on_signal, (signal.SIGTERM, None))
    told.start()
    verdict = supervisor.watch()
    told.join()
    assert (verdict.exit_code, "had to be killed" in verdict.message) == (code, code == 143)


def test_a_rank_that_fails_because_another_was_preempted_before_they_met_is_not_at_fault(
    tmp_path: Path, records: Records
) -> None:
    records.pending(0, Preempted("SIGTERM came"))
    records.failure(0, Preempted("SIGTERM came"))
    records.failure(1, RankError("the store shut down"))
    assert watch(tmp_path, "exit 75", "exit 1") == Verdict(75, "SIGTERM came", failed=True)


def test_stop_ends_all_ranks() -> None:
    supervisor = Supervisor("/no/such/directory")
    process = subprocess.Popen(["sleep", "3600"])
    supervisor.add(process)
    supervisor.stop()
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (ConfigurationError(), 78),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(4), 4),
        (SystemExit("a sentence"), 1),
    ],
)
def test_the_exit_code_of_an_error(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_failure_is_read_as_it_was_recorded(tmp_path: Path, records: Records) -> None:
    assert RankRecords(str(tmp_path)).failure(3) is None
    records.failure(3, ValueError("broken \udcff name"))
    failure = RankRecords(str(tmp_path)).failure(3)
    assert failure is not None
    assert (failure.rank, failure.kind, failure.exit_code) == (3, "ValueError", 1)
    assert "broken" in failure.traceback
