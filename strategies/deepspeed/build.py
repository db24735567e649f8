"""Building DeepSpeed's C++ ops: one at a time on a machine, within a time, and what went wrong is shown."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ...framework.core.errors import ConfigurationError, unknown
from ...framework.system.environment import library_environment
from .toolchain import advice

Note = Callable[[str], None]

_STAMP = "phalanx.json"
_TAIL_LINES = 25
_POLL_SECONDS = 0.1
_LAST_SECONDS = 2.0


@dataclass(frozen=True)
class Op:
    """One of DeepSpeed's ops: the class that builds it, what it is for, and how long that takes on two idle cores."""

    builder: str
    purpose: str
    about_seconds: int


OPS = {
    "cpu_adam": Op("CPUAdamBuilder", "Adam on the CPU", 35),
    "fused_adam": Op("FusedAdamBuilder", "Adam in one pass", 35),
    "deepspeed_shm_comm": Op("ShareMemCommBuilder", "reductions through shared memory", 20),
    "pin_memory": Op("PinMemoryBuilder", "memory that stays in place", 20),
    "async_io": Op("AsyncIOBuilder", "reading and writing the disk", 110),
}
# A builder ends when the process that waits for it is gone: its input ends then. ninja, told so, ends its compilers,
# which have process groups of their own.
_FOLLOW = """
import os, signal, threading

def follow():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=follow, daemon=True).start()
"""


def op_folder(name: str) -> Path:
    """Return the folder that torch builds an extension in, which ``TORCH_EXTENSIONS_DIR`` moves. It is made."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def missing_ops(names: Iterable[str]) -> list[str]:
    """Return those ops that are not built yet for this torch, this DeepSpeed and this processor."""
    return [name for name in names if not is_built(op_folder(name), name)]


def ensure_ops(names: Iterable[str], note: Note, device_type: str = "cpu", limit_seconds: float | None = None) -> None:
    """Build the ops that are missing, one after the other, telling ``note`` a line about each.

    Two processes may do this at once. ``limit_seconds`` bounds each op, waiting for others included; by default ten
    times what it takes, and five minutes.

    Raises:
        ConfigurationError: a build failed or took too long; the message ends with its last lines.
    """
    for name in names:
        if name not in OPS:
            raise unknown("op", name, OPS)
        folder = op_folder(name)
        if not is_built(folder, name):
            limit = limit_seconds or 300 + 10 * OPS[name].about_seconds
            deadline = time.monotonic() + limit
            with _alone(folder, name, note, deadline, limit):
                if not is_built(folder, name):
                    _build(folder, name, note, device_type, deadline, limit)


# ---- what is there -------------------------------------------------------------------------------------------------


def _stamp() -> dict[str, str]:
    """Return what an op depends on beside its source: torch's own folder name tells Python's version alone."""
    import torch

    return {
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "python": sys.version.split()[0],
        "processor": _processor(),
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return a digest of the processor's features: ops are built for the machine that builds them."""
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


def is_built(folder: Path, name: str) -> bool:
    """Whether an op is there that was built for what this process runs on."""
    return (folder / f"{name}.so").is_file() and _read_stamp(folder) == _stamp()


def _read_stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return None


# ---- one builder at a time -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path, name: str, note: Note, deadline: float, limit: float) -> Iterator[None]:
    """Wait until nobody else builds an op. The system lets go of this lock when its holder dies."""
    with open(folder / "phalanx.lock", "w") as guard:
        _wait(lambda: _locked(guard), f"another process to build {name}", note, deadline, limit)
        yield


def _locked(guard: IO[str]) -> bool:
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_lock(folder: Path, name: str, note: Note, deadline: float, limit: float) -> None:
    """Wait for a builder that is not of phalanx's making, or remove the lock that a dead one left."""
    lock = folder / "lock"
    if not lock.exists():
        return
    holder = _holder(lock)
    if holder is None:
        note(f"Removed the lock {str(lock)!r}: whoever built {name} is gone.")
        lock.unlink(missing_ok=True)
        return
    _wait(lambda: _holder(lock) is None, f"process {holder} to build {name}", note, deadline, limit)
    lock.unlink(missing_ok=True)


def _holder(lock: Path) -> int | None:
    """Return the process that holds torch's lock, or None: it keeps the file open as long as it builds."""
    try:
        wanted = lock.stat()
    except OSError:
        return None
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found = handle.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return int(handle.parts[2])
    return None


def _wait(done: Callable[[], bool], what: str, note: Note, deadline: float, limit: float) -> None:
    if done():
        return
    note(f"Waiting for {what} (at most {limit:.0f} s) ...")
    while not done():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"Waited {limit:.0f} s for {what}: end that process and start again.")
        time.sleep(_POLL_SECONDS)


# ---- building ------------------------------------------------------------------------------------------------------


def _build(folder: Path, name: str, note: Note, device_type: str, deadline: float, limit: float) -> None:
    op = OPS[name]
    _free_lock(folder, name, note, deadline, limit)
    if _read_stamp(folder) not in (None, _stamp()):
        _clear(folder)
    standing = (folder / f"{name}.so").is_file()
    if standing:
        note(f"Checking DeepSpeed's {name} ({op.purpose}), which was built here before ...")
    else:
        note(f"Building DeepSpeed's {name} ({op.purpose}), once: about {op.about_seconds} s on two cores ...")
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        ended = _run(build_program(name), folder, output, device_type, deadline)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if ended != 0 or not (folder / f"{name}.so").is_file():
        (folder / "lock").unlink(missing_ok=True)
        raise ConfigurationError(_failure(name, folder, ended, said, limit))
    _write_stamp(folder)
    note(f"{name} is ready after {time.monotonic() - begun:.0f} s.")


def build_program(name: str) -> str:
    """Return the Python program that builds an op."""
    builder = f"get_accelerator().create_op_builder({OPS[name].builder!r})"
    return f"from deepspeed.accelerator import get_accelerator\n{builder}.load(verbose=True)\n"


def _run(program: str, folder: Path, output: IO[bytes], device_type: str, deadline: float) -> int | None:
    """Run a build; return its exit code, or None where the time was up. Nothing of it is left running."""
    with library_environment(DS_ACCELERATOR=device_type):
        process = subprocess.Popen(
            [sys.executable, "-c", _FOLLOW + program],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a build: ninja gets a moment to end its compilers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _failure(name: str, folder: Path, ended: int | None, said: str, limit: float) -> str:
    lines = [line for line in said.splitlines() if line.strip()][-_TAIL_LINES:]
    help = advice(said)
    if ended is None:
        what = f"was not done after {limit:.0f} s and was stopped; start again to go on with what is built"
    else:
        what = f"failed: {help or 'see its last lines, and remove the folder to begin anew'}"
    return "\n".join([f"Building DeepSpeed's {name} in {str(folder)!r} {what}.", *(f"    {line}" for line in lines)])


def _clear(folder: Path) -> None:
    """Remove what was built for other versions; ninja would keep what looks new enough to it."""
    for file in folder.iterdir():
        if file.suffix in (".o", ".so", ".ninja", ".json") or file.name.startswith(".ninja"):
            file.unlink(missing_ok=True)


def _write_stamp(folder: Path) -> None:
    temporary = folder / f"{_STAMP}.{os.getpid()}"
    temporary.write_text(json.dumps(_stamp(), indent=1) + "\n")
    temporary.replace(folder / _STAMP)
