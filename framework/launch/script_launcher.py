"""``launch_script``: the running script once for each rank of this machine; this process becomes the supervisor."""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..core.errors import ConfigurationError, PhalanxError
from ..system.atomic_files import write_text
from ..system.entry_script import Script, can_rerun_script
from ..system.environment import hiding_secrets
from ..system.processes import Process, die_with_parent
from ..system.run_directory import REPORT
from .exit_hooks import write_error
from .fork_server import ForkServer, ServerGone
from .launch_context import Meeting, meeting, private_directory
from .rank_output import RankOutput
from .restart_policy import Restarts, run_directory
from .supervisor import Supervisor
from .verdict import Verdict

# Of what a rank printed that ended without a traceback.
_LAST_LINES = 10


def launch_script(
    num_ranks: int, max_restarts: int = 0, keeps_files: bool = False, libraries: Sequence[str] = ()
) -> NoReturn:
    """Run this script once for each rank, watch them, and end with their exit code; what follows it is for the ranks.

    Ranks that fail are started again up to ``max_restarts`` times, unless that would not change their end. What others
    than rank 0 print is shown where they keep no files that it could go to. ``libraries`` are modules that every rank
    will import.

    Raises:
        SystemExit: always, once all ranks have ended.
        ConfigurationError: there is no script to run again.
    """
    if not can_rerun_script():
        raise ConfigurationError(
            "There is no script that could be run again for each rank; in a notebook or an interpreter, fork them."
        )
    restarts = Restarts(max_restarts)
    with private_directory() as directory:
        supervisor = Supervisor(directory, adopts_orphans=True)
        launch = contextlib.closing(_Launch(Script.running(), supervisor, libraries, shows_all=not keeps_files))
        in_main_thread = threading.current_thread() is threading.main_thread()
        with supervisor.handling_signals() if in_main_thread else contextlib.nullcontext(), launch as ranks:
            while True:
                with meeting(directory, num_ranks, restarts.done) as met:
                    verdict = ranks.attempt(met, is_last=restarts.done >= max_restarts)
                wait = None if supervisor.was_told_to_end else restarts.after(verdict.exit_code, verdict.step)
                if wait is None:
                    break
                write_error(
                    f"{verdict.message}\nphalanx: the ranks are started again in {wait:g} s, from the newest good "
                    f"checkpoint if there is one (restart {restarts.done} of {max_restarts})"
                )
                if (told := supervisor.pause(wait)) is not None:
                    verdict = told
                    break
    if restarts.refusal:
        write_error(f"phalanx: {restarts.refusal}")
    if verdict.message:
        write_error(verdict.message)
    # Else the interpreter looks through all that torch has made for garbage once more as it ends: up to a second.
    gc.freeze()
    raise SystemExit(verdict.exit_code)


class _Launch:
    """The ranks of a script: started, watched to their end, and perhaps started again."""

    def __init__(self, script: Script, supervisor: Supervisor, libraries: Sequence[str], shows_all: bool) -> None:
        self._script = script
        self._supervisor = supervisor
        self._libraries = libraries
        self._shows_all = shows_all
        self._server: ForkServer | None = None
        self._forks_no_more = False

    def close(self) -> None:
        """End the process that ranks are forked from."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def attempt(self, meeting: Meeting, is_last: bool) -> Verdict:
        """Start the ranks once and watch them to their end; the last time, nothing is kept for another."""
        self._supervisor.begin_attempt(meeting.directory)
        head = f"attempt {meeting.attempt + 1}, begun {time.strftime('%Y-%m-%d %H:%M:%S')}"
        if (told := self._prepare(meeting)) is not None:
            return told
        with RankOutput(partial(run_directory, meeting.directory), head, self._shows_all, hiding_secrets()) as output:
            try:
                for rank in range(meeting.num_ranks):
                    self._supervisor.add(self._start(meeting, rank, output))
                meeting.listener.close()
                if is_last:
                    self.close()
                verdict = self._supervisor.watch(output.is_blocked)
            except BaseException:
                self._supervisor.stop()
                raise
            output.settle()
            _amend_report(verdict, run_directory(meeting.directory))
            _show_circumstances(verdict, output, self._shows_all)
            output.close()
        return verdict

    def _prepare(self, meeting: Meeting) -> Verdict | None:
        """Have a process ready that ranks can be forked from; return how all ends if told to end meanwhile."""
        if sys.platform != "linux" or self._forks_no_more or self._script.is_compiled:
            return None
        if self._server is None or not self._server.is_alive():
            self.close()
            self._server = ForkServer(self._script, meeting.environment(0), self._libraries)
            self._supervisor.spare(self._server.pid)
        return self._supervisor.pause(until=self._server.has_settled)

    def _start(self, meeting: Meeting, rank: int, output: RankOutput) -> Process:
        environment, inherited = meeting.environment(rank), meeting.inherited(rank)
        with output.streams(rank) as (stdout, stderr):
            if self._server is not None and self._server.is_alive():
                try:
                    return self._server.fork(environment, stdout, stderr, inherited)
                except ServerGone:
                    # It may have forked one that nobody knows of.
                    self._forks_no_more = True
                    self.close()
                    self._supervisor.kill_strays()
            return subprocess.Popen(
                self._script.command,
                env=environment,
                pass_fds=[*inherited.values()],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=die_with_parent(),
            )


def _amend_report(verdict: Verdict, directory: Path | None) -> None:
    """Have the report in the run's directory say what ended the run, which rank 0 may know as something else."""
    if not verdict.failed or directory is None:
        return
    path = directory / REPORT
    with contextlib.suppress(OSError, ValueError, PhalanxError):
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        document = known | {"stopped": verdict.message, "exit_code": verdict.exit_code}
        write_text(path, json.dumps(document, indent=2) + "\n")


def _show_circumstances(verdict: Verdict, output: RankOutput, shown: bool) -> None:
    """Before the cause of a failure: what the rank at fault printed last, where the screen lacks it, and the files."""
    if verdict.rank is None:
        return
    if verdict.traceback:
        output.add(verdict.rank, verdict.traceback)
    elif verdict.rank != 0 and not shown:
        for line in output.tail(verdict.rank, _LAST_LINES):
            write_error(f"[rank {verdict.rank}] {line}")
    if output.folder is not None:
        write_error(f"phalanx: what the ranks printed is in {output.folder}")
