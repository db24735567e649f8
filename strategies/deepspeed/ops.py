"""DeepSpeed's C++ ops: which ones a run needs, and what DeepSpeed does not report about building them.

DeepSpeed builds an op where it is first used: on the first rank of each node, before the ranks connect. The others load
it. A lock file that a killed builder has left makes DeepSpeed wait for ever, without a word: here the file is named.

Run as a program (``python -m phalanx.strategies.deepspeed.ops``) it builds all ops that a CPU needs, those named on
the command line, or after ``--without`` all others.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from ...framework.core.errors import ConfigurationError, unknown
from ...framework.system.environment import build_tools
from .arguments import ZeroOptions
from .library import ops_environment, ops_root, query_processor_once, quiet_import, require_deepspeed

OPS = {"cpu_adam": "CPUAdamBuilder", "pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder"}
"""The ops and DeepSpeed's classes that build them."""
# No build takes as long.
_STALE_SECONDS = 1800.0
# Loading an op that is built holds the lock for about a second.
_LOADING_SECONDS = 30.0


def needed_ops(options: ZeroOptions) -> list[str]:
    """Return the ops that a run with these options loads, in the order of loading."""
    ops = [] if options.offload_optimizer is None else ["cpu_adam"]
    return [*ops, "pin_memory", "async_io"] if options.uses_nvme else ops


# ---- requirements --------------------------------------------------------------------------------------------------


def check_build(ops: Collection[str], device_type: str = "cpu") -> None:
    """Refuse to continue if DeepSpeed cannot build an op that is missing. Called before any process starts.

    Raises:
        ConfigurationError: there is no C++ compiler, or a builder that was killed has left a lock file.
    """
    compiler, _ = build_tools()
    missing = missing_ops(ops, device_type)
    if missing and shutil.which(compiler) is None:
        raise ConfigurationError(
            f"DeepSpeed builds {', '.join(missing)} on this machine, once, and there is no {compiler!r} on PATH: "
            "install a C++ compiler (Debian: g++, and python3-dev for Python's headers)."
        )
    for name in ops:
        lock = op_folder(name, device_type) / "lock"
        if lock.exists() and time.time() - lock.stat().st_mtime > _STALE_SECONDS:
            raise ConfigurationError(
                f"a process that was killed while it built DeepSpeed's {name} has left {str(lock)!r}, and DeepSpeed "
                "would wait for its end: remove that file."
            )


# ---- builds --------------------------------------------------------------------------------------------------------


def op_folder(name: str, device_type: str = "cpu") -> Path:
    """Return the folder of an op. ``TORCH_EXTENSIONS_DIR`` moves it."""
    return ops_root(device_type) / name


def missing_ops(names: Iterable[str], device_type: str = "cpu") -> list[str]:
    """Return the ops that are not built yet for this torch, this DeepSpeed, and this processor."""
    return [name for name in names if not (op_folder(name, device_type) / f"{name}.so").exists()]


def build_ops(names: Iterable[str], device_type: str = "cpu") -> None:
    """Let DeepSpeed build the ops that are missing, one after the other. Several processes may call this at once.

    Raises:
        UnknownNameError: DeepSpeed has no such op, or phalanx does not use it.
        RuntimeError: a build failed; DeepSpeed's message has the output of the compiler.
    """
    for name in names:
        if name not in OPS:
            raise unknown("op", name, OPS)
    missing = missing_ops(names, device_type)
    for name in names:
        lock = op_folder(name, device_type) / "lock"
        if name not in missing:
            _await_release(name, lock)
            continue
        print_note(f"DeepSpeed builds {name}, once: this may take two minutes ...")
        if lock.exists():
            print_note(f"Another process is building it, or was killed and has left {str(lock)!r}: then remove that.")
        query_processor_once()
        with ops_environment(device_type):
            with quiet_import():
                from deepspeed.accelerator import get_accelerator

            get_accelerator().create_op_builder(OPS[name]).load()


def _await_release(name: str, lock: Path) -> None:
    """Wait until no other process loads a built op; remove the lock file of one that was killed meanwhile.

    DeepSpeed would wait for ever, also in ranks that are started again after such a kill.
    """
    until = time.monotonic() + _LOADING_SECONDS
    while lock.exists():
        if time.monotonic() > until:
            print_note(f"A process that was killed while it loaded DeepSpeed's {name} has left {str(lock)!r}: removed.")
            lock.unlink(missing_ok=True)
            return
        time.sleep(0.1)


def print_note(line: str) -> None:
    """Print a line about a start that takes minutes, which must not look like a hang."""
    print(line, file=sys.stderr, flush=True)


def main(names: list[str]) -> int:
    """Build ops for a CPU from the command line; return the exit code."""
    try:
        require_deepspeed("zero2")
        left_out = names[1:] if names[:1] == ["--without"] else []
        wanted = [name for name in OPS if name not in left_out] if left_out or not names else names
        check_build(wanted)
        build_ops(wanted)
    except ConfigurationError as error:
        print_note(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
