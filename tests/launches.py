"""A command that is started, disturbed and watched to its end, with every process that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ranks import warm_python

from phalanx.framework.launch.fork_server_main import NAME
from phalanx.framework.system.launcher_env import ATTEMPT, ERROR_DIR, RESTARTS

# A loaded machine may take its time; on a quiet one all goes at once.
GONE_SECONDS = 8.0


class Killed(Exception):
    """A run that did what it must not do."""


class Attempts:
    """The environment of one rank of a launch in this process, attempt by attempt."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.number = folder, patch, -1
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
            patch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
            patch.setenv(name, "1")

    def begin(self) -> None:
        """Begin the next attempt."""
        self.number += 1
        directory = self.folder / f"attempt_{self.number}"
        directory.mkdir(parents=True)
        self.patch.setenv(ERROR_DIR, str(directory))
        self.patch.setenv(ATTEMPT, str(self.number))
        self.patch.setenv(RESTARTS, "1")


class Launch:
    """One start of a script, in a session of its own; it and every process that it starts run in the folder ``root``.

    It is forked from a process that has torch and phalanx imported.
    """

    def __init__(self, root: Path, script: Path, arguments: Sequence[str]) -> None:
        self.root = root = root.resolve()
        (root / "tmp").mkdir(parents=True, exist_ok=True)
        # What a killed launcher leaves in the temporary directory is to be seen.
        variables = {**os.environ, "TMPDIR": str(root / "tmp"), "OMP_NUM_THREADS": "1"}
        with (root / "output.txt").open("wb") as output:
            self.process = warm_python().start(script, [str(root), *arguments], root, variables, output.fileno())
        self.began = time.monotonic()

    def wait_until(self, seconds: float, is_over: Callable[[], bool]) -> bool:
        """Wait; return whether it is over, False where the run ended before."""
        until = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < until:
            if is_over():
                return True
            time.sleep(min(0.005, max(0.0, until - time.monotonic())))
        return False

    def wait(self, seconds: float) -> bool:
        """Wait; return whether the run is still under way."""
        return self.wait_until(seconds, lambda: False) or self.process.poll() is None

    def send(self, signum: int, pids: Sequence[int]) -> None:
        """Send a signal to some of its processes."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def ranks(self) -> list[int]:
        """Return its ranks, or itself where it is the only one."""
        return children(self.process.pid)

    def end(self, seconds: float) -> None:
        """Wait for the process and for everything it started.

        Raises:
            Killed: it takes too long, or something outlives it; that is ended.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        late = self.process.poll() is None
        until = time.monotonic() + (0.0 if late else GONE_SECONDS)
        while (left := processes_in(self.root)) and time.monotonic() < until:
            time.sleep(0.02)
        self.send(signal.SIGKILL, left)
        self.process.wait()
        if late or left:
            what = f"did not end within {seconds:g} s" if late else f"left the processes {left} behind"
            raise Killed(f"the run {what}; it printed:\n{self.printed()}")

    def abandon(self) -> None:
        """End all of it, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError, Killed):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.end(10.0)

    def printed(self) -> str:
        """Return the end of what it printed."""
        return (self.root / "output.txt").read_text(errors="replace")[-4000:]


def children(pid: int) -> list[int]:
    """Return the direct children of a process: of a launcher, its ranks, without what they are forked from."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if not _forks_ranks(Path(f"/proc/{child}")):
                    found.append(int(child))
    return found


def _forks_ranks(process: Path) -> bool:
    """Whether a process is what ranks are forked from: by its name, or, until it has one, since it takes no SIGTERM."""
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    return status["Name"] == NAME.decode() or bool(int(status["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1)


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is a folder, which those that they start inherit."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == str(folder):
                    found.append(int(entry))
    return found
