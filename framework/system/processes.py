"""Processes: how children are watched, die with their parent and are told apart; how many files one may open."""

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
    """A child that was forked, in this process or for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, as ``subprocess.Popen.poll`` does; None as long as it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Somebody else has waited for it. How it ended is not known, so it is not taken for a success.
                self._code = 1
                return 1
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def is_running(pid: int) -> bool:
    """Return whether there is a process of this number; one that has ended and is not waited for yet counts."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def die_with_parent() -> Callable[[], None]:
    """Return a function that a new child calls: from then on the system kills it when this process ends.

    Linux only; elsewhere the function does nothing. The library is loaded here, because hardly anything is safe to do
    in a child between fork and exec.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            # The parent was gone before the request was in place.
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def end_with_parent() -> None:
    """Have the system kill this process when the thread that forked it ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """Have what descendants of this process leave running become its children. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def allow_open_files(count: int) -> None:
    """Let this process open ``count`` files at once where it may open fewer, as far as the system lets it say so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def children() -> set[int]:
    """Return the pids of this process's children, where the system tells."""
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(int(pid) for pid in path.read_text().split())
    return pids
