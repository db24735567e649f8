"""Processes: child processes and their exit codes, death with the parent, orphans, and the limit of open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Process(Protocol):
    """A child process: ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


class ForkedProcess:
    """A child that was forked by this process, or for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, as ``subprocess.Popen.poll`` does; None while the child runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Other code has waited for it. Its exit code is lost, so it does not count as a success.
                self._code = 1
                return 1
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def is_running(pid: int) -> bool:
    """Return whether a process with this id runs. One that has ended does not, also before its parent waits for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return _state_of(pid)[:1] not in (["Z"], ["X"])


def start_of(pid: int) -> int | None:
    """Return the time at which a process started, in clock ticks since boot; None if it has ended, or if unknown.

    A process that has ended but was not waited for has ended.
    """
    fields = _state_of(pid)
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


def _state_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` behind the name of the program; empty if they cannot be read."""
    try:
        # The name, in parentheses, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def process_space() -> str | None:
    """Return what is the same for processes that see one another by their pids, and differs between machines.

    None if it is unknown.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def peak_resident_bytes() -> int:
    """Return the most bytes of memory that this process has occupied so far."""
    # In kilobytes on Linux, and in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes() -> int | None:
    """Return the memory that this process holds now; None if the system does not say so."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return None


def die_with_parent() -> Callable[[], None]:
    """Return a function for a new child to call, after which the kernel kills it when this process ends.

    Linux only; elsewhere the function does nothing. The library is loaded here, because between fork and exec a child
    can do little safely.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended before the request was in place.
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of processes that its descendants leave running. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def allow_open_files(count: int) -> None:
    """Raise the limit of open files of this process to ``count``, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def children() -> set[int]:
    """Return the pids of this process's children; empty if the system does not list them."""
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in path.read_text().split())
    return pids
