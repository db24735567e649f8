"""Builds DeepSpeed's C++ ops: one builder at a time, within a time limit, with the compiler's errors shown.

DeepSpeed's own ``op_builder.load()`` compiles, in a child process. What it lacks is added around it:

- It waits without end for a lock file that a killed builder left. Here the kernel's lock on another file decides who
  builds, which ends with its holder, and torch's lock file is removed once no process has it open.
- It rebuilds neither for another torch or DeepSpeed, which would crash when loaded, nor for another processor or GPU.
  Here a stamp beside each op says what it was built for.
- Its builds for CPU and CUDA have the same names and share a folder. Here a build of torch that supports CUDA keeps
  those for the CPU in a folder of their own.
- It has no time limit, and its compilers outlive it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from ...framework.core.errors import ConfigurationError, unknown
from ...framework.system.environment import cuda_architectures, library_environment
from .toolchain import advice

Note = Callable[[str], None]

_STAMP = "phalanx.json"
_TAIL_LINES = 25
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Op:
    """One of DeepSpeed's ops: the class that builds it, its purpose, and the seconds of a build on two idle cores."""

    builder: str
    purpose: str
    about_seconds: int


OPS = {
    "cpu_adam": Op("CPUAdamBuilder", "Adam on the CPU", 35),
    "pin_memory": Op("PinMemoryBuilder", "memory that is locked in place", 20),
    "async_io": Op("AsyncIOBuilder", "reading and writing the disk", 110),
}
# The builder's standard input is a pipe that the waiting process holds open: it is closed when that process stops the
# build, and by the kernel when it dies. ninja has to be terminated, not killed: it then ends its compilers, which run
# in process groups of their own.
_END_WITH_INPUT = """
import os, signal, threading

def follow():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=follow, daemon=True).start()
"""


def op_folder(name: str, device_type: str = "cpu") -> Path:
    """Return the folder that torch builds an extension in; it is created. ``TORCH_EXTENSIONS_DIR`` moves it."""
    # The same folder as DeepSpeed's own, so that an op is compiled once for both.
    from torch.utils.cpp_extension import _get_build_directory

    folder = Path(_get_build_directory(name, False))
    if device_type == "cpu" and torch.version.cuda is not None:
        folder = folder.parent / "cpu" / name
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def missing_ops(names: Iterable[str], device_type: str = "cpu") -> list[str]:
    """Return the ops that are not built yet for this torch, this DeepSpeed, and this processor or these GPUs."""
    return [name for name in names if not is_built(op_folder(name, device_type), name, device_type)]


def ensure_ops(names: Iterable[str], note: Note, device_type: str = "cpu", limit_seconds: float | None = None) -> None:
    """Build the ops that are missing, one after the other. Several processes may call this at once.

    Args:
        note: receives a line about each build, and about each wait for another process.
        limit_seconds: the limit for each op, including the wait for other builders. Default: five minutes plus ten
            times the usual duration.

    Raises:
        ConfigurationError: a build failed or took too long; the message ends with the last lines of its output.
    """
    for name in names:
        if name not in OPS:
            raise unknown("op", name, OPS)
        folder = op_folder(name, device_type)
        if is_built(folder, name, device_type):
            continue
        limit = _Limit(limit_seconds or 300 + 10 * OPS[name].about_seconds, note)
        with open(folder / "phalanx.lock", "w") as guard:
            limit.wait(lambda guard=guard: _is_locked(guard), f"another process to build {name}")  # type: ignore[misc]
            # The process that was waited for has built it, as a rule.
            if not is_built(folder, name, device_type):
                _remove_torch_lock(folder, name, limit)
                _build(folder, name, device_type, limit)


# ---- stamps of built ops -------------------------------------------------------------------------------------------


def _stamp(device_type: str) -> dict[str, str]:
    """Return the versions that a built op depends on. The name of torch's folder has only that of Python."""
    is_for_gpus = device_type != "cpu" and torch.version.cuda is not None
    gpu = {"cuda": str(torch.version.cuda), "gpus": _gpus()} if is_for_gpus else {}
    return {
        **gpu,
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "python": sys.version.split()[0],
        "processor": _processor(),
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return a digest of the processor's features: DeepSpeed compiles with ``-march=native``.

    A home directory may be shared by machines with different processors, where such code is an illegal instruction.
    """
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _gpus() -> str:
    """Return the targets that DeepSpeed compiles for: architectures that the user lists, else the models of the GPUs.

    The driver's files are read, as a query through torch would start CUDA in this process.
    """
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    models = {line for file in files for line in file.read_text().splitlines() if line.startswith("Model")}
    return cuda_architectures() or ", ".join(sorted(models))


def is_built(folder: Path, name: str, device_type: str = "cpu") -> bool:
    """Whether an op exists that was built for this process's torch, DeepSpeed, Python, and processor or GPUs."""
    return (folder / f"{name}.so").is_file() and _read_stamp(folder) == _stamp(device_type)


def _read_stamp(folder: Path) -> Any:
    try:
        return json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return None


# ---- one builder at a time -----------------------------------------------------------------------------------------


class _Limit:
    """The time that one op may take, waiting and building."""

    def __init__(self, seconds: float, note: Note) -> None:
        self.seconds = seconds
        self.note = note
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until ``done`` returns True; ``what`` completes "Waiting for".

        Raises:
            ConfigurationError: the time is up.
        """
        if done():
            return
        self.note(f"Waiting for {what} (at most {self.seconds:.0f} s) ...")
        while not done():
            if not self.left:
                raise ConfigurationError(f"Waited {self.seconds:.0f} s for {what}: end that process and start again.")
            time.sleep(_POLL_SECONDS)


def _is_locked(guard: IO[str]) -> bool:
    """Try to lock a file for this process. The kernel releases the lock when its holder dies."""
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_torch_lock(folder: Path, name: str, limit: _Limit) -> None:
    """Wait for a builder that phalanx did not start, and remove the lock file of one that was killed."""
    lock = folder / "lock"
    if not lock.exists():
        return
    holder = _holder(lock)
    if holder is None:
        limit.note(f"Removed the lock {str(lock)!r}: the process that was building {name} is gone.")
    else:
        limit.wait(lambda: _holder(lock) is None, f"process {holder} to build {name}")
    lock.unlink(missing_ok=True)


def _holder(lock: Path) -> int | None:
    """Return the process that holds torch's lock file, or None: it keeps the file open as long as it builds."""
    with contextlib.suppress(OSError):
        wanted = lock.stat()
        for handle in Path("/proc").glob("[0-9]*/fd/*"):
            # Processes end, and close files, while this looks.
            with contextlib.suppress(OSError):
                if os.path.samestat(handle.stat(), wanted):
                    return int(handle.parts[2])
    return None


# ---- building ------------------------------------------------------------------------------------------------------


def _build(folder: Path, name: str, device_type: str, limit: _Limit) -> None:
    op = OPS[name]
    if _read_stamp(folder) not in (None, _stamp(device_type)):
        # ninja only compares times, and would keep objects that were compiled against another torch.
        for file in folder.iterdir():
            if file.suffix in (".o", ".so", ".ninja", ".json") or file.name.startswith(".ninja"):
                file.unlink(missing_ok=True)
    if (folder / f"{name}.so").is_file():
        # Without a stamp it is DeepSpeed's own build: ninja decides whether it is up to date.
        limit.note(f"Checking DeepSpeed's {name} ({op.purpose}), which was built here before ...")
    else:
        limit.note(f"Building DeepSpeed's {name} ({op.purpose}), once: about {op.about_seconds} s on two cores ...")
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        exit_code = _run(build_program(name), folder, output, device_type, limit.left)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if exit_code != 0 or not (folder / f"{name}.so").is_file():
        # The builder that left torch's lock has just ended.
        (folder / "lock").unlink(missing_ok=True)
        raise ConfigurationError(_failure(name, folder, exit_code, said, limit.seconds))
    # Written last, and in one step: a build that was killed before leaves no stamp, and is taken up again by ninja.
    temporary = folder / f"{_STAMP}.{os.getpid()}"
    temporary.write_text(json.dumps(_stamp(device_type), indent=1) + "\n")
    temporary.replace(folder / _STAMP)
    limit.note(f"{name} is ready after {time.monotonic() - begun:.0f} s.")


def build_program(name: str) -> str:
    """Return the Python program that builds an op."""
    builder = f"get_accelerator().create_op_builder({OPS[name].builder!r})"
    return f"from deepspeed.accelerator import get_accelerator\n{builder}.load(verbose=True)\n"


def _run(program: str, folder: Path, output: IO[bytes], device_type: str, seconds: float) -> int | None:
    """Run a build; return its exit code, or None if the time was up. It leaves no process behind."""
    # A process of its own, because compiling in this one would load the op, and with it OpenMP's threads, which no
    # forked rank could use.
    with library_environment(DS_ACCELERATOR=device_type, TORCH_EXTENSIONS_DIR=str(folder.parent)):
        process = subprocess.Popen(
            [sys.executable, "-c", _END_WITH_INPUT + program],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Leaving the context closes the builder's input, which ends it, and waits.
    with process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _failure(name: str, folder: Path, exit_code: int | None, said: str, seconds: float) -> str:
    lines = [line for line in said.splitlines() if line.strip()][-_TAIL_LINES:]
    if exit_code is None:
        what = f"was not done after {seconds:.0f} s and was stopped; start again to continue with what is built"
    else:
        what = f"failed: {advice(said) or 'see its last lines, and remove the folder to start from scratch'}"
    return "\n".join([f"Building DeepSpeed's {name} in {str(folder)!r} {what}.", *(f"    {line}" for line in lines)])
