"""Stacks of other processes: the Python calls in all threads of a rank, requested by a signal.

The signal handler is C code. So it also writes the stacks of a rank that sleeps in the kernel, or in which a thread
never releases the interpreter's lock. A stopped rank cannot answer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.package_paths import folder_of
from .heartbeat import HeartbeatRecord

# The time ranks have to answer; an answer is complete once its file has not grown for _QUIET_SECONDS.
ANSWER_SECONDS = 0.6
_QUIET_SECONDS = 0.05
_FRAMES = 24
_FRAMES_OF_OTHERS = 4
_OTHER_THREADS = 6
_STATES = {
    "T": "stopped by a signal, so it has no stack to show",
    "t": "held by a debugger, so it has no stack to show",
    "D": "waiting for a disk or a device",
    "Z": "gone",
}
# The innermost frames of a rank that waits for another one: collectives, the store, the shared-memory reduction.
WAITING = ("/torch/distributed/", "/deepspeed/comm/", folder_of("distributed"))
# A rank on a GPU only queues its collectives. It waits where it reads a result: at an event, in a backward pass, or
# where phalanx reads a number that other ranks have a part in.
_WAITING_INNERMOST = (
    "/torch/autograd/graph.py",
    "/torch/cuda/streams.py",
    "/torch/cuda/__init__.py",
    f"{folder_of('parallel')}step_flags.py",
    f"{folder_of('diagnostics')}nonfinite_guard.py",
    f"{folder_of('checkpoint')}finite_check.py",
    "/strategies/fsdp/gradients.py",
    "/strategies/deepspeed/update.py",
)
# Frames of the code that runs a rank's script, below the user's frames, are omitted.
_RUNNER = folder_of("launch")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")


@dataclass(frozen=True)
class Stacks:
    """The stacks of one process, the innermost call first."""

    frames: tuple[str, ...] = ()
    """The frames of the main thread."""
    others: tuple[tuple[str, ...], ...] = ()
    state: str = ""
    """The letter of the process's state, see ``process_state``."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the process."""
        return self.state == "T"

    @property
    def waits(self) -> bool:
        """Whether the process waits for another rank, judged by its innermost calls."""
        return _any_in(self.frames[:3], WAITING) or _any_in(self.frames[:1], _WAITING_INNERMOST)

    @property
    def collects_garbage(self) -> bool:
        """Whether Python is collecting garbage, which takes up to a second on a shared core, but always ends."""
        return "Garbage-collecting" in "".join(self.frames[:1])

    @property
    def is_debugged(self) -> bool:
        """Whether a debugger holds the process."""
        return self.state == "t" or _any_in(self.frames, _DEBUGGERS)

    def __str__(self) -> str:
        lines = list(self.frames[:_FRAMES])
        if len(self.frames) > _FRAMES:
            lines.append(f"  ... and {len(self.frames) - _FRAMES} more")
        return "\n".join(lines) if lines else f"  {_STATES.get(self.state, 'it did not answer')}"

    def threads(self) -> str:
        """Return the innermost calls of each thread except the main one."""
        shown = [frames[:_FRAMES_OF_OTHERS] for frames in self.others[:_OTHER_THREADS]]
        return "\n".join("\n".join(("  another thread:", *(f"  {frame}" for frame in frames))) for frames in shown)


def read_stacks(
    pids: Mapping[int, int], records: Mapping[int, HeartbeatRecord | None], files: Mapping[int, Path]
) -> dict[int, Stacks]:
    """Return the stacks of each rank; for a rank that does not answer in time only its state."""
    states = {rank: process_state(pid) for rank, pid in pids.items()}
    asked: dict[int, tuple[HeartbeatRecord, int]] = {}
    for rank in pids:
        record = records.get(rank)
        if record is not None and record.stack_signal and states[rank] not in "TtZ":
            # Earlier answers stay in the file: the new answer begins at its current end.
            asked[rank] = record, _size(files[rank])
            with contextlib.suppress(OSError):
                os.kill(record.pid, record.stack_signal)
    _wait_for_answers({files[rank]: before for rank, (_, before) in asked.items()})
    found = {rank: Stacks(state=state) for rank, state in states.items()}
    for rank, (record, before) in asked.items():
        with contextlib.suppress(OSError):
            text = files[rank].read_bytes()[before:].decode(errors="replace")
            found[rank] = parse_stacks(text, record.main_thread, states[rank])
    return found


def _wait_for_answers(before: Mapping[Path, int]) -> None:
    until = time.monotonic() + ANSWER_SECONDS
    sizes = dict(before)
    while sizes and time.monotonic() < until:
        time.sleep(_QUIET_SECONDS)
        now = {path: _size(path) for path in before}
        if now == sizes and all(now[path] > size for path, size in before.items()):
            return
        sizes = now


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def parse_stacks(text: str, main_thread: int, state: str = "") -> Stacks:
    """Parse the output of Python's ``faulthandler`` for all threads."""
    main: tuple[str, ...] = ()
    others = []
    for block in text.split("hread 0x")[1:]:
        head, *lines = block.splitlines()
        frames = tuple(line for line in lines if line.startswith("  ") and _RUNNER not in line)
        if int(head.split()[0], 16) == main_thread:
            main = frames
        else:
            others.append(frames)
    return Stacks(main, tuple(others), state)


def process_state(pid: int) -> str:
    """Return the letter of a process's state, such as R, S, D or T; empty if the system does not report it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def work_seconds(pid: int) -> float:
    """Return the seconds that a process's main thread has computed or waited for a core; 0 if unknown."""
    try:
        computed, waited = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0
    return (int(computed) + int(waited)) / 1e9


def _any_in(frames: Iterable[str], parts: Iterable[str]) -> bool:
    return any(part in frame for frame in frames for part in parts)
