"""The rank at fault, from how the ranks ended: ranks here are shells, which start in no time."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from phalanx.framework.core.errors import ConfigurationError, Preempted, RankError
from phalanx.framework.launch.supervisor import PREEMPT_SECONDS, Supervisor
from phalanx.framework.launch.verdict import Verdict
from phalanx.framework.system.failure_records import Failure, RankRecords, exit_code_of
from phalanx.framework.watchdog.heartbeat import SECTIONS, HeartbeatRecord, resolve_stall_timeout
from phalanx.framework.watchdog.stall_detector import SupervisedRanks

SLEEP = "sleep 3600"


def watch(directory: Path, *commands: str) -> Verdict:
    """Watch one shell for each of ``commands``, which may use $FAIL to record a failure with the code after it."""
    supervisor = Supervisor(str(directory))
    processes = [subprocess.Popen(["sh", "-c", f"exec {command}"]) for command in commands]
    for process in processes:
        supervisor.add(process)
    verdict = supervisor.watch()
    assert all(process.returncode is not None for process in processes)
    return verdict


def in_section(monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    """Have all ranks be in a section."""
    record = HeartbeatRecord(0, 0, 0, resolve_stall_timeout(None), 1, SECTIONS.index(section), 0, 3, 0, 3)
    monkeypatch.setattr(SupervisedRanks, "records", lambda _, pids: dict.fromkeys(pids, record))


def recorded(directory: Path, rank: int, error: BaseException) -> None:
    try:
        raise error
    except BaseException as raised:
        RankRecords(str(directory)).record_failure(Failure.of(rank, raised))


def test_ranks_that_succeed_are_waited_for(tmp_path: Path) -> None:
    assert watch(tmp_path, "true", "sleep 0.3") == Verdict(0, "", failed=False)


def test_a_rank_with_a_bad_exit_code_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    verdict = watch(tmp_path, SLEEP, "sh -c 'exit 9'")
    assert verdict.exit_code == 9
    assert verdict.message.startswith("rank 1 (pid ")
    assert verdict.message.endswith("ended with exit code 9")


@pytest.mark.parametrize("crash", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_takes_precedence_over_tracebacks_of_other_ranks(crash: signal.Signals, tmp_path: Path) -> None:
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", f"sh -c 'kill -{crash.value} $$'")
    assert verdict.exit_code == 128 + crash
    # Of an abort it is said what gloo means by it.
    assert verdict.message.partition(";")[0].endswith(f"was killed by {crash.name}")


def test_a_crash_that_follows_another_is_not_at_fault(tmp_path: Path) -> None:
    # Rank 0 crashes as it is ended because of rank 1.
    ready = tmp_path / "ready"
    follows = f"sh -c \"trap 'kill -BUS \\$\\$' TERM; touch {ready}; while :; do sleep 0.01; done\""
    crashes = f"sh -c 'while [ ! -e {ready} ]; do sleep 0.01; done; kill -SEGV $$'"
    verdict = watch(tmp_path, follows, crashes)
    assert verdict.exit_code == 128 + signal.SIGSEGV
    assert verdict.message.startswith("rank 1 (pid ")


def test_a_signal_without_a_name_is_shown_by_number(tmp_path: Path) -> None:
    verdict = watch(tmp_path, "sh -c 'kill -40 $$'", SLEEP)
    assert verdict.exit_code == 168
    assert verdict.message.endswith("was killed by signal 40")


def test_the_earliest_failure_is_the_one_at_fault(tmp_path: Path) -> None:
    recorded(tmp_path, 1, ConfigurationError("the cause"))
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", "sh -c 'exit 78'")
    assert verdict.exit_code == 78
    assert verdict.message.startswith("rank 1 (pid ")
    assert verdict.message.endswith("ConfigurationError: the cause")
    assert "connection reset" not in verdict.message


def test_a_recorded_error_ends_all_even_if_its_rank_hangs_in_an_exit_handler(tmp_path: Path) -> None:
    recorded(tmp_path, 1, ValueError("the cause"))
    verdict = watch(tmp_path, SLEEP, SLEEP)
    assert verdict.exit_code == 1
    assert verdict.message.endswith("ValueError: the cause")


def test_a_rank_that_left_first_is_at_fault_though_another_recorded_an_error(tmp_path: Path) -> None:
    RankRecords(str(tmp_path)).record_leaving(1)
    time.sleep(0.001)
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", "sh -c 'sleep 0.1; exit 4'")
    assert verdict.exit_code == 4
    assert verdict.message.endswith("ended with exit code 4")


def test_an_abort_after_a_recorded_error_is_reported_as_the_error(tmp_path: Path) -> None:
    # As after an error of CUDA: it is raised, then NCCL's watchdog aborts this process, and the other one, which has
    # recorded nothing.
    recorded(tmp_path, 1, RuntimeError("CUDA error: an illegal memory access"))
    verdict = watch(tmp_path, "sh -c 'sleep 0.1; kill -ABRT $$'", "sh -c 'kill -ABRT $$'")
    assert verdict.exit_code == 1
    assert verdict.message.startswith("rank 1 (pid ")
    assert verdict.message.endswith("RuntimeError: CUDA error: an illegal memory access")


def test_another_crash_counts_more_than_an_abort_after_an_error(tmp_path: Path) -> None:
    recorded(tmp_path, 1, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'kill -SEGV $$'", "sh -c 'kill -ABRT $$'")
    assert verdict.exit_code == 128 + signal.SIGSEGV


def test_a_rank_that_left_first_and_never_ends_is_still_at_fault(tmp_path: Path) -> None:
    RankRecords(str(tmp_path)).record_leaving(1)
    time.sleep(0.001)
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", SLEEP)
    assert verdict.exit_code == 1
    assert verdict.message.startswith("rank 1 ")


def test_a_rank_that_left_because_of_a_failure_is_not_at_fault(tmp_path: Path) -> None:
    recorded(tmp_path, 0, ValueError("the cause"))
    time.sleep(0.001)
    RankRecords(str(tmp_path)).record_leaving(1)
    verdict = watch(tmp_path, "sh -c 'exit 1'", "sh -c 'exit 1'")
    assert verdict.message.endswith("ValueError: the cause")


def with_pending_error(directory: Path, rank: int, error: BaseException) -> None:
    try:
        raise error
    except BaseException as raised:
        RankRecords(str(directory)).record_pending_error(rank, raised)
    time.sleep(0.001)


@pytest.mark.parametrize("ending", ["sh -c 'exit 1'", SLEEP], ids=["ends", "has to be killed"])
def test_a_rank_with_a_pending_error_is_at_fault_though_another_exited_first(tmp_path: Path, ending: str) -> None:
    with_pending_error(tmp_path, 1, ValueError("the cause"))
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", ending)
    assert verdict.exit_code == 1
    assert verdict.message.endswith("ValueError: the cause")


def test_an_error_counts_from_when_it_was_raised(tmp_path: Path) -> None:
    with_pending_error(tmp_path, 1, ValueError("the cause"))
    recorded(tmp_path, 0, RuntimeError("connection reset"))
    time.sleep(0.001)
    recorded(tmp_path, 1, ValueError("the cause"))
    assert watch(tmp_path, "sh -c 'exit 1'", "sh -c 'exit 1'").message.endswith("ValueError: the cause")


def test_a_rank_that_quits_a_fit_is_at_fault_for_the_errors_of_others(tmp_path: Path) -> None:
    with_pending_error(tmp_path, 1, SystemExit(0))
    assert watch(tmp_path, "true", "true") == Verdict(0, "", failed=False)
    recorded(tmp_path, 0, RuntimeError("connection closed by peer"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", "true")
    assert verdict.exit_code == 1
    assert "rank 1 " in verdict.message.splitlines()[0]
    assert "exited the process group with exit code 0" in verdict.message
    assert verdict.message.endswith("SystemExit: 0")


@pytest.mark.parametrize("section", ["teardown", "outside"])
def test_a_rank_that_hangs_in_teardown_after_an_error_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr("phalanx.framework.launch.attempt.TEARDOWN_SECONDS", 0.3)
    in_section(monkeypatch, section)
    with_pending_error(tmp_path, 1, ValueError("the cause"))
    seconds = 30 if section == "teardown" else 1
    verdict = watch(tmp_path, f"sleep {seconds}", f"sleep {seconds}")
    # Outside of the fit the error was caught, and the user's code may take its time.
    assert verdict.exit_code == (1 if section == "teardown" else 0)
    assert verdict.message.endswith("ValueError: the cause" if section == "teardown" else "")


def test_a_caught_error_is_not_a_failure(tmp_path: Path) -> None:
    with_pending_error(tmp_path, 1, ValueError("caught"))
    assert watch(tmp_path, "true", "sleep 0.1") == Verdict(0, "", failed=False)
    RankRecords(str(tmp_path)).clear_pending_error(1)
    recorded(tmp_path, 0, RuntimeError("another"))
    assert watch(tmp_path, "sh -c 'exit 1'", SLEEP).message.endswith("RuntimeError: another")


def test_an_error_of_all_ranks_is_not_the_fault_of_one(tmp_path: Path) -> None:
    for rank in range(2):
        recorded(tmp_path, rank, ValueError("the loss is nan on rank 1"))
    verdict = watch(tmp_path, "sh -c 'exit 1'", "sh -c 'exit 1'")
    assert verdict.message.startswith("all ranks failed:\nTraceback")


def test_ranks_that_were_interrupted_have_not_failed(tmp_path: Path) -> None:
    for rank in range(2):
        recorded(tmp_path, rank, KeyboardInterrupt("rank 1 got SIGINT"))
    assert watch(tmp_path, "sh -c 'exit 130'", "sh -c 'exit 130'") == Verdict(130, "rank 1 got SIGINT", failed=True)


def test_preempted_ranks_are_waited_for(tmp_path: Path) -> None:
    for rank in range(2):
        RankRecords(str(tmp_path)).record_joined(rank)
        recorded(tmp_path, rank, Preempted("saved"))
    verdict = watch(tmp_path, "sh -c 'exit 75'", "sh -c 'sleep 1; exit 75'")
    assert verdict == Verdict(75, "saved", failed=True)


def test_a_failure_beside_a_preempted_rank_is_shown(tmp_path: Path) -> None:
    RankRecords(str(tmp_path)).record_joined(0)
    recorded(tmp_path, 0, Preempted("saved"))
    verdict = watch(tmp_path, "sh -c 'exit 75'", "sh -c 'exit 74'")
    assert verdict.exit_code == 74


def test_a_rank_that_ignores_sigterm_is_killed_and_not_blamed(tmp_path: Path) -> None:
    verdict = watch(tmp_path, "sh -c 'trap \"\" TERM; while true; do sleep 0.05; done'", "sh -c 'sleep 0.2; exit 5'")
    assert verdict.exit_code == 5
    assert verdict.message.startswith("rank 1 ")


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


def test_a_rank_that_fails_because_another_was_preempted_before_they_met_is_not_at_fault(tmp_path: Path) -> None:
    with_pending_error(tmp_path, 0, Preempted("SIGTERM came"))
    recorded(tmp_path, 0, Preempted("SIGTERM came"))
    recorded(tmp_path, 1, RankError("the store shut down"))
    assert watch(tmp_path, "sh -c 'exit 75'", "sh -c 'exit 1'") == Verdict(75, "SIGTERM came", failed=True)


def test_a_failure_is_shown_though_a_preempted_rank_ends_because_of_it(tmp_path: Path) -> None:
    recorded(tmp_path, 1, ValueError("the cause"))
    verdict = watch(
        tmp_path, "sh -c 'trap \"exit 75\" TERM; while true; do sleep 0.02; done'", "sh -c 'sleep 0.3; exit 1'"
    )
    assert verdict.exit_code == 1
    assert verdict.message.endswith("ValueError: the cause")


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


def test_a_failure_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    assert RankRecords(str(tmp_path)).failure(3) is None
    recorded(tmp_path, 3, ValueError("broken \udcff name"))
    failure = RankRecords(str(tmp_path)).failure(3)
    assert failure is not None
    assert (failure.rank, failure.kind, failure.exit_code) == (3, "ValueError", 1)
    assert "broken" in failure.traceback
