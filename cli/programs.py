"""``Program``: a program of the user that a command runs again and again, each time as a run with other values."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..framework.configuration.script_overrides import parse_overrides
from ..framework.core.errors import INTERRUPTED, ConfigurationError, Preempted
from ..framework.metrics.monitor import doubtful_mode
from ..framework.report.document import build_report
from ..framework.report.recorder import STATUS
from ..framework.report.run_files import RunFiles
from ..framework.system.environment import AssignedRun, variables_of_assigned
from ..framework.system.file_lock import is_held
from ..framework.system.processes import die_with_parent
from ..framework.system.run_directory import LOCK, versions
from .user_program import require_file

_OF_TRAINER = "trainer."
# After SIGTERM a run ends its step and saves.
_GRACE_SECONDS = 60.0
# The processes of a run end within moments of the one that has started them.
_LOCK_SECONDS = 30.0
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Program:
    """A script or a configuration file with its arguments, and the number of its ranks.

    Args:
        target: the path of the script or of the configuration.
        arguments: those of the command line.
        ranks: ranks on this machine; None for those of the program.
    """

    target: str
    arguments: tuple[str, ...]
    ranks: int | None

    def check(self, names: Sequence[str] = ()) -> None:
        """Refuse a program that does not exist, and names of values that cannot be given to it.

        Raises:
            ConfigurationError: there is no such file, a number is none, or a name is not known or given twice.
        """
        require_file(self.target, "script" if self.is_script else "file")
        if self.ranks is not None and self.ranks < 1:
            raise ConfigurationError(f"--ranks {self.ranks} must be a whole number of at least 1.")
        for name in names:
            if name.startswith(_OF_TRAINER):
                parse_overrides([f"--{name}=null"])
            if any(each == f"--{name}" or each.startswith(f"--{name}=") for each in self.arguments):
                raise ConfigurationError(f"--{name} is an argument of {self.target} and is searched: leave one out.")

    @property
    def is_script(self) -> bool:
        """Whether the target is a Python script."""
        return self.target.endswith(".py")

    @property
    def stem(self) -> str:
        """The name of the file without its ending."""
        return Path(self.target).stem

    def command(self, values: Mapping[str, Any]) -> list[str]:
        """Return the arguments of ``phalanx`` that run the program once.

        Args:
            values: JSON values. Those of names such as ``trainer.precision`` are arguments of the Trainer, and the
                others are options of the program.
        """
        given = {name: f"--{name}={as_text(value)}" for name, value in values.items()}
        trainer = [text for name, text in given.items() if name.startswith(_OF_TRAINER)]
        own = [text for name, text in given.items() if not name.startswith(_OF_TRAINER)]
        if self.ranks is not None:
            trainer.insert(0, f"--trainer.devices={self.ranks}")
        program = [*self.arguments, *own]
        separator = ["--"] if self.is_script and program else []
        return ["fit", self.target, *trainer, *separator, *program]

    def shown_command(self, values: Mapping[str, Any]) -> str:
        """Return the command that runs the program once, as a shell reads it."""
        return shlex.join(["phalanx", *self.command(values)])

    def run(self, values: Mapping[str, Any], assigned: AssignedRun, output: Path, seconds: float | None = None) -> int:
        """Run the program once; return its exit code. If this process is asked to end, the run is, too.

        Args:
            values: see ``command``.
            assigned: the place of the run.
            output: the file to which the program's output is appended.
            seconds: the time after which the run is asked to end; None for any time.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", *self.command(values)],
                env=variables_of_assigned(assigned),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(seconds)
            return _end(process)
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def as_text(value: Any) -> str:
    """Return a JSON value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def given_mode(metric: str, mode: str | None) -> str:
    """Return the mode of a command that compares values of a metric, ``"min"`` by default.

    Raises:
        ConfigurationError: none was given for a metric that is better when it is higher, by its name.
    """
    if doubtful_mode("", metric, mode) is not None:
        raise ConfigurationError(
            f"--metric {metric}: by its name higher values are better, and by default lower ones are: give --mode max, "
            "or --mode min."
        )
    return mode or "min"


def runs_of(assigned: AssignedRun) -> list[Path]:
    """Return the directories of the fits that a program has left in its place, ascending."""
    return [path for path in _directories(assigned) if (path / STATUS).exists()]


def wait_until_free(assigned: AssignedRun) -> None:
    """Wait until no process writes there: the ranks of a launcher that was killed end moments after it."""
    until = time.monotonic() + _LOCK_SECONDS
    for path in _directories(assigned):
        while is_held(path / LOCK) and time.monotonic() < until:
            time.sleep(0.05)


def _directories(assigned: AssignedRun) -> list[Path]:
    root = Path(assigned.root)
    return [root / assigned.name / f"version_{version}" for version in versions(root, assigned.name)]


def reason_of_failure(directory: Path | None, output: Path, exit_code: int) -> str:
    """Return a sentence about a program that has failed: that of ``phalanx why``, or its last line of output."""
    if directory is not None:
        files = RunFiles(directory)
        if files.state in ("failed", "stalled", "killed"):
            sentence: str = build_report(files)["why"]["sentence"]
            return sentence
    with contextlib.suppress(OSError), output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].removeprefix("phalanx: ")
    return f"it ended with exit code {exit_code} and printed nothing"


@contextlib.contextmanager
def ending_on_request(what: str) -> Iterator[None]:
    """Let SIGTERM raise ``Preempted`` within the context, so that the run in progress is asked to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise Preempted(f"{what} was asked to end.")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def raise_if_asked_to_end(exit_code: int, what: str) -> None:
    """Raise the exception of this process for a run that was asked to end.

    Raises:
        Preempted: the run has saved its state.
        KeyboardInterrupt: it was interrupted.
    """
    if exit_code == Preempted.exit_code:
        raise Preempted(f"{what} was asked to end.")
    if exit_code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
