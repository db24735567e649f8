"""``launch_script``: runs the script once for each rank of this machine and supervises the ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import ConfigurationError, PhalanxError, Preempted
from ..core.interception import intercept_loop
from ..core.wording import counted
from ..report import amend_report, how_to_resume, record_end
from ..system.entry_script import Script, can_rerun_script
from ..system.environment import hiding_secrets
from ..system.processes import Process, die_with_parent
from .exit_hooks import quick_exit, write_error
from .fork_server import ForkServer, ServerGone
from .launch_context import LaunchContext, launch_context, private_directory, shared_memory
from .nodes import Nodes
from .rank_output import RankOutput
from .rank_states import RankStates
from .rescue import rescue
from .restart_policy import FINAL, RestartPolicy, memory_link, output_directory, run_directory, smaller_micro_batch
from .run_notifications import LaunchNotifications
from .supervisor import Supervisor
from .verdict import Verdict

# Lines of output to show for a rank that ended without a traceback.
_LAST_LINES = 10


def launch_script(
    num_ranks: int,
    max_restarts: int = 0,
    keeps_files: bool = False,
    libraries: Sequence[str] = (),
    script: Script | None = None,
    nodes: Nodes | None = None,
    snapshots: bool = False,
) -> NoReturn:
    """Run a script once for each rank, watch the ranks, and end with their exit code.

    Args:
        num_ranks: the number of ranks to start on this node.
        max_restarts: how often failed ranks may be restarted. Failures that a restart cannot change are not retried.
        keeps_files: whether the run has files for the ranks' output; if not, all output is shown.
        libraries: modules that every rank will import.
        script: the script to run; by default that of this process.
        nodes: the nodes of the run; by default there is only this one.
        snapshots: whether the ranks get memory for snapshots also if they are not restarted.

    Raises:
        SystemExit: always, once all ranks have ended. The code after this call runs only in the ranks.
        ConfigurationError: there is no script to run again.
    """
    intercept_loop()
    if script is None and not can_rerun_script():
        raise ConfigurationError(
            "There is no script that could be run again for each rank; in a notebook or an interpreter, fork them."
        )
    restarts = RestartPolicy(max_restarts)
    nodes = nodes or Nodes()
    has_memory = snapshots or max_restarts > 0 or nodes.may_change
    with private_directory() as directory, shared_memory(directory) if has_memory else contextlib.nullcontext():
        supervisor = Supervisor(directory, adopts_orphans=True)
        launcher = _ScriptLauncher(script or Script.running(), supervisor, nodes, libraries, not keeps_files)
        with supervisor.handling_signals(), contextlib.closing(launcher):
            verdict = None
            try:
                verdict = _run_attempts(launcher, supervisor, restarts, directory, num_ranks)
            finally:
                nodes.close(verdict, supervisor)
    if restarts.refusal:
        write_error(f"phalanx: {restarts.refusal}")
    if verdict.message:
        write_error(verdict.message)
    if verdict.advice:
        write_error(f"phalanx: {verdict.advice}")
    launcher.notifications.close()
    raise quick_exit(verdict.exit_code)


def _run_attempts(
    launcher: _ScriptLauncher, supervisor: Supervisor, restarts: RestartPolicy, directory: str, num_ranks: int
) -> Verdict:
    """Run the ranks until they succeed or are not restarted; return the verdict on the last attempt."""
    attempt: str | None = None
    while True:
        nodes = launcher.nodes
        if (verdict := nodes.meet(restarts, num_ranks, supervisor)) is not None:
            break
        starts_again = restarts.allowed > 0 or nodes.may_change
        with launch_context(directory, num_ranks, restarts.attempt, starts_again, nodes.place) as context:
            may_follow = restarts.done < restarts.allowed or nodes.may_change or memory_link(directory).is_dir()
            verdict = launcher.run_attempt(context, is_last=not may_follow)
            attempt = context.directory
        launcher.notifications.stalled(attempt, verdict)
        ends = supervisor.is_shutting_down
        if not ends and verdict.failed and (nodes.has_lost or nodes.makes_room()):
            # Neither the loss of a node nor another one that has come counts as a restart.
            has_saved = nodes.makes_room() and verdict.exit_code == Preempted.exit_code
            message = "phalanx: a node has come, and the ranks have saved their step" if has_saved else verdict.message
            if (has_saved or verdict.exit_code not in FINAL) and nodes.regroup(message):
                launcher.notifications.restarted(attempt, message, verdict.step, "with other nodes")
                restarts.attempt += 1
                continue
            ends = nodes.has_lost
        if not ends and verdict.failed and (size := smaller_micro_batch(context.directory)) is not None:
            write_error(
                f"phalanx: a rank ran out of memory at step {verdict.step}: the ranks are started again with "
                f"micro-batches of {counted(size, 'sample')}, from the newest snapshot or checkpoint if there is one"
            )
            restarts.attempt += 1
            continue
        wait = None if ends else restarts.wait_before_restart(verdict.exit_code, verdict.step)
        if wait is None:
            break
        write_error(
            f"{verdict.message}\nphalanx: the ranks are started again {f'in {wait:g} s' if wait else 'now'}, from the "
            f"newest snapshot or good checkpoint if there is one (restart {restarts.done} of {restarts.allowed})"
        )
        count = f"restart {restarts.done} of {restarts.allowed}"
        launcher.notifications.restarted(attempt, verdict.message, verdict.step, count)
        if (ended := supervisor.pause(wait)) is not None:
            verdict = ended
            break
    if verdict.failed and attempt is not None and not supervisor.has_to_leave and (outcome := rescue(directory)):
        write_error(f"phalanx: {outcome}")
        verdict = replace(verdict, advice=_amend_report(verdict, run_directory(attempt)))
    if attempt is not None and not supervisor.has_to_leave:
        launcher.notifications.ended(attempt, verdict)
    return verdict


class _ScriptLauncher:
    """Starts the ranks of a script, supervises them until they end, and may restart them."""

    def __init__(
        self, script: Script, supervisor: Supervisor, nodes: Nodes, libraries: Sequence[str], shows_all: bool
    ) -> None:
        self.nodes = nodes
        self.notifications = LaunchNotifications(write_error)
        self._script = script
        self._supervisor = supervisor
        self._libraries = libraries
        self._shows_all = shows_all
        self._server: ForkServer | None = None
        # The fork server compiles the script's source, which a byte code file does not have.
        self._can_fork = sys.platform == "linux" and not script.is_compiled

    def close(self) -> None:
        """End the fork server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def run_attempt(self, context: LaunchContext, is_last: bool) -> Verdict:
        """Start the ranks once and supervise them until they end. The last attempt ends the fork server."""
        self._supervisor.begin_attempt(context.directory, context.ranks.start)
        head = f"attempt {context.attempt + 1}, begun {time.strftime('%Y-%m-%d %H:%M:%S')}"
        if (ended := self._prepare_server(context)) is not None:
            return self.nodes.agree(ended, self._supervisor)
        with RankOutput(
            partial(output_directory, context.directory), head, self._shows_all, hiding_secrets()
        ) as output:
            try:
                for rank in context.ranks:
                    self._supervisor.add(self._start(context, rank, output))
                context.close_listener()
                if is_last:
                    self.close()
                find = partial(run_directory, context.directory)
                states = RankStates(context.directory, find, lambda: self._supervisor.running)
                with contextlib.closing(states):
                    nodes = self.nodes
                    verdict = self._supervisor.watch(
                        output.is_blocked, nodes.others_ended, nodes.report_failure, nodes.makes_room
                    )
            except BaseException:
                self._supervisor.stop()
                raise
            output.finish()
            verdict = self.nodes.agree(verdict, self._supervisor)
            directory = run_directory(context.directory)
            _record_end(verdict, directory)
            verdict = replace(verdict, advice=_amend_report(verdict, directory))
            _show_output(verdict, output, self._shows_all)
            output.close()
        return verdict

    def _prepare_server(self, context: LaunchContext) -> Verdict | None:
        """Start the fork server; return a verdict if a shutdown signal arrives first."""
        if not self._can_fork:
            return None
        if self._server is None or not self._server.is_alive():
            self.close()
            environment = context.environment(context.ranks.start)
            self._server = ForkServer(self._script, environment, self._libraries)
            self._supervisor.spare(self._server.pid)
        ended = self._supervisor.pause(until=self._server.is_ready_or_ended)
        if ended is None and self._server.is_spoiled and self._libraries:
            self.close()
            self._libraries = ()
            return self._prepare_server(context)
        return ended

    def _start(self, context: LaunchContext, rank: int, output: RankOutput) -> Process:
        environment, inherited = context.environment(rank), context.inherited(rank)
        with _standard_input(rank) as stdin, output.streams(rank) as (stdout, stderr):
            if self._server is not None and self._server.is_alive():
                try:
                    return self._server.fork(environment, (stdin, stdout, stderr), inherited)
                except ServerGone:
                    # The server may have forked a process whose pid never arrived: it is killed as a stray.
                    self._can_fork = False
                    self.close()
                    self._supervisor.kill_strays()
            return subprocess.Popen(
                self._script.command,
                env=environment,
                cwd=self._script.directory,
                pass_fds=[*inherited.values()],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=die_with_parent(),
            )


@contextlib.contextmanager
def _standard_input(rank: int) -> Iterator[int]:
    """Yield the descriptor of a rank's standard input: rank 0 has that of this process, others an empty one."""
    descriptor = -1
    if rank == 0:
        # This process may have no standard input.
        with contextlib.suppress(OSError):
            descriptor = os.dup(0)
    if descriptor < 0:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _record_end(verdict: Verdict, directory: Path | None) -> None:
    """Add the verdict to the history of the run: ranks that were killed have not recorded how far they came."""
    if verdict.failed and directory is not None:
        with contextlib.suppress(OSError):
            record_end(directory, verdict.step, verdict.exit_code, verdict.message)


def _amend_report(verdict: Verdict, directory: Path | None) -> str:
    """Write the verdict into the run's report: rank 0, its author, may have seen only the end of another rank.

    Returns:
        How to resume the run; empty if it cannot be, or if its message says it.
    """
    if not verdict.failed or directory is None:
        return ""
    changes: dict[str, Any] = {"stopped": verdict.message, "exit_code": verdict.exit_code}
    if verdict.traceback:
        changes["traceback"] = verdict.traceback
    with contextlib.suppress(OSError, ValueError, PhalanxError):
        # A rank 0 that was killed has recorded its last step up to a second before.
        report = amend_report(directory, changes, {} if verdict.step is None else {"optimizer_steps": verdict.step})
        return "" if verdict.exit_code in FINAL else how_to_resume(report, was_launched=True) or ""
    return ""


def _show_output(verdict: Verdict, output: RankOutput, shown: bool) -> None:
    """Show the last output of the rank at fault if it was not on the screen, and the location of the files."""
    if verdict.rank is None:
        return
    if verdict.traceback:
        output.add(verdict.rank, verdict.traceback)
    elif verdict.rank != 0 and not shown:
        for line in output.tail(verdict.rank, _LAST_LINES):
            write_error(f"[rank {verdict.rank}] {line}")
    if output.folder is not None:
        write_error(f"phalanx: the output of all ranks is in {output.folder}")
