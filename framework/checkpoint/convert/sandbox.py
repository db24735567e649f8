"""Limits of a process that reads untrusted files: memory, time and file sizes; no network and no other programs."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import resource
import struct
import sys
from pathlib import Path

_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 4, 22, 38, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
# Numbers of: socket, connect, bind, execve, execveat, ptrace, fork, vfork, process_vm_writev.
_CALLS = {
    "x86_64": (0xC000003E, (41, 42, 49, 59, 322, 101, 57, 58, 311)),
    "aarch64": (0xC00000B7, (198, 203, 200, 221, 281, 117, 271)),
}


def confine(memory_bytes: int, seconds: int, file_bytes: int) -> None:
    """Bound this process from here on: ``memory_bytes`` more than it has, ``seconds`` more of processor time.

    Where the system offers no filter of calls, network and programs are not barred.
    """
    for kind, limit in (
        (resource.RLIMIT_AS, _mapped_bytes() + memory_bytes),
        (resource.RLIMIT_CPU, int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (bound, bound))
    if sys.platform == "linux":
        _bar_calls()


def _mapped_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 8 << 30


def _bar_calls() -> None:
    """Have the kernel refuse new sockets and programs to this process, all its threads and children, for good."""
    known = _CALLS.get(platform.machine())
    if known is None:
        return
    architecture, calls = known
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    steps += [(_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("HL", len(steps), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(header)), 0, 0)
