"""DeepSpeed's C++ ops: which ones a run needs, what building them takes, and building and loading them.

DeepSpeed builds an op at its first use, which is inside a rank, while other ranks wait in a collective. Therefore the
first process of a node builds missing ops before the ranks meet, with DeepSpeed's own builder in a child process. Each
rank then only loads them. Two things are added to the builder:

- It waits without end for a lock file that a killed builder has left. Here the kernel's lock on the op's folder decides
  who builds, which ends with its holder, and that file is removed.
- It compares times alone, and would load an op that was built for another torch, processor or type of device, which
  crashes. Here each of these has a folder of its own.

Run as a program (``python -m phalanx.strategies.deepspeed.ops``) it builds all ops that a CPU needs, those named on
the command line, or after ``--without`` all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

from ...framework.core.errors import ConfigurationError, unknown
from ...framework.system.environment import build_tools, cuda_architectures, library_environment
from .arguments import ZeroOptions
from .config import check_settings

# Private names of DeepSpeed are used, so a minor version that was not tested is refused. pyproject.toml has the same
# range.
_OLDEST, _TOO_NEW = (0, 19, 8), (0, 20)
_INSTALL = "pip install 'deepspeed>=0.19.8,<0.20'"
_PYTHON_HEADERS = f"Python's headers (Debian: python{sys.version_info[0]}.{sys.version_info[1]}-dev, or python3-dev)"
_TAIL_LINES = 25
# Run in the op's folder. The file "lock" is of a builder that was killed: any other would hold the kernel's lock.
_TURN = """
import contextlib, fcntl, os, pathlib
with contextlib.suppress(OSError):  # a file system without locks
    fcntl.flock(os.open(".", os.O_RDONLY), fcntl.LOCK_EX)
if not os.path.exists("built"):
    pathlib.Path("lock").unlink(missing_ok=True)
{build}
    if os.path.exists("{name}.so"):
        pathlib.Path("built").touch()
"""


class Op(NamedTuple):
    """One of DeepSpeed's ops: the class that builds it, its purpose, and the seconds of a build on two idle cores."""

    builder: str
    purpose: str
    about_seconds: int


OPS = {
    "cpu_adam": Op("CPUAdamBuilder", "Adam on the CPU", 35),
    "pin_memory": Op("PinMemoryBuilder", "memory that is locked in place", 20),
    "async_io": Op("AsyncIOBuilder", "reading and writing the disk", 110),
}


def needed_ops(options: ZeroOptions) -> list[str]:
    """Return the ops that a run with these options loads, in the order of loading."""
    ops = [] if options.offload_optimizer is None else ["cpu_adam"]
    if options.uses_nvme:
        # The second resolves symbols of the first as it is loaded.
        ops += ["pin_memory", "async_io"]
    return ops


# ---- requirements --------------------------------------------------------------------------------------------------


def check_ops(options: ZeroOptions, device_type: str, strategy: str) -> None:
    """Refuse a machine or settings that DeepSpeed cannot start with. Called before any process starts.

    Raises:
        ConfigurationError: DeepSpeed is not installed, a tool to build a missing op is not installed, or DeepSpeed does
            not know a setting.
    """
    require_deepspeed(strategy)
    check_settings(options, device_type)
    check_toolchain(missing_ops(needed_ops(options), device_type), device_type)


def require_deepspeed(strategy: str) -> None:
    """Refuse to continue without a version of DeepSpeed that phalanx supports. DeepSpeed is not imported.

    Raises:
        ConfigurationError: DeepSpeed is not installed, or in an unsupported version.
    """
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise ConfigurationError(
            f"strategy={strategy!r} needs DeepSpeed, which is not installed: {_INSTALL}."
        ) from None
    parts = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not _OLDEST <= parts < _TOO_NEW:
        raise ConfigurationError(
            f"strategy={strategy!r} needs DeepSpeed 0.19.8 or a later 0.19, and {found} is installed: {_INSTALL}."
        )


def check_toolchain(ops: Iterable[str], device_type: str = "cpu") -> None:
    """Refuse to continue if one of the ops, which are not built yet, cannot be built.

    Raises:
        ConfigurationError: a compiler, ninja, Python's headers, libaio or CUDA's toolkit is missing; one sentence names
            all of them.
    """
    names = list(ops)
    missing = missing_tools(names, device_type) if names else []
    if missing:
        raise ConfigurationError(
            f"DeepSpeed builds {', '.join(names)} on this machine, once, and lacks {' and '.join(missing)}. "
            "Install that and start again."
        )


def missing_tools(ops: list[str], device_type: str = "cpu") -> list[str]:
    """Return the tools that are missing to build these ops, each with the package that has it."""
    from torch.utils import cpp_extension

    missing = []
    compiler, flags = build_tools()
    # ninja of a virtual environment is found even if the environment is not activated.
    with library_environment():
        has_compiler = shutil.which(compiler) is not None
        if not has_compiler:
            missing.append(f"a C++ compiler (no {compiler!r} on PATH; Debian: g++)")
        if shutil.which("ninja") is None:
            missing.append("ninja (pip install ninja)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append(_PYTHON_HEADERS)
    if "async_io" in ops and has_compiler and not _compiles(compiler, flags):
        missing.append("libaio, for NVMe (Debian: libaio-dev)")
    if "async_io" in ops and device_type == "cuda" and cpp_extension.CUDA_HOME is None:
        missing.append("the CUDA toolkit, for NVMe (set CUDA_HOME to its folder)")
    return missing


def _compiles(compiler: str, flags: list[str]) -> bool:
    """Whether a program that uses libaio can be built, which DeepSpeed tests in the same way."""
    command = [compiler, "-x", "c++", "-", "-o", "/dev/null", *flags, "-laio"]
    program = "#include <libaio.h>\nint main() { return io_queue_init(1, nullptr); }\n"
    tried = subprocess.run(command, input=program, capture_output=True, text=True, timeout=60, check=False)
    return tried.returncode == 0


# ---- folders -------------------------------------------------------------------------------------------------------


def op_folder(name: str, device_type: str = "cpu") -> Path:
    """Return the folder of an op; it is created. ``TORCH_EXTENSIONS_DIR`` moves it."""
    # Where torch, too, builds extensions.
    from torch.utils.cpp_extension import _get_build_directory

    built_for = [torch.__version__, version("deepspeed"), sys.version, _processor(), device_type]
    if device_type != "cpu":
        built_for += [str(torch.version.cuda), _gpus()]
    digest = hashlib.sha256("\n".join(built_for).encode()).hexdigest()[:12]
    folder = Path(_get_build_directory(f"phalanx-{digest}", False)) / name
    folder.mkdir(exist_ok=True)
    return folder


@lru_cache(maxsize=1)
def _processor() -> str:
    """Return the features of the processor: DeepSpeed compiles with ``-march=native``.

    A home directory may be shared by machines with different processors, where such code is an illegal instruction.
    """
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {features}"


def _gpus() -> str:
    """Return the targets that DeepSpeed compiles for: architectures that the user lists, else the models of the GPUs.

    The driver's files are read, as a query through torch would start CUDA in this process.
    """
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    models = {line for file in files for line in file.read_text().splitlines() if line.startswith("Model")}
    return cuda_architectures() or ", ".join(sorted(models))


def _is_built(folder: Path) -> bool:
    # Not the library itself, which a builder that was killed leaves incomplete.
    return (folder / "built").is_file()


def missing_ops(names: Iterable[str], device_type: str = "cpu") -> list[str]:
    """Return the ops that are not built yet for this torch, this DeepSpeed, and this processor or these GPUs."""
    return [name for name in names if not _is_built(op_folder(name, device_type))]


# ---- building and loading ------------------------------------------------------------------------------------------


def ensure_ops(names: Iterable[str], note: Callable[[str], None], device_type: str = "cpu") -> None:
    """Build the ops that are missing, one after the other. Several processes may call this at once.

    Args:
        names: the ops.
        note: receives a line before and after each build.
        device_type: the device that they are built for.

    Raises:
        ConfigurationError: a build failed; the message ends with the last lines of its output.
    """
    names = list(names)
    for name in names:
        if name not in OPS:
            raise unknown("op", name, OPS)
    for name in missing_ops(names, device_type):
        op, folder = OPS[name], op_folder(name, device_type)
        note(f"Building DeepSpeed's {name} ({op.purpose}), once: about {op.about_seconds} s on two cores ...")
        begun = time.monotonic()
        # A process of its own, because compiling in this one would load the op, and with it OpenMP's threads, which no
        # forked rank could use.
        program = _TURN.format(name=name, build=textwrap.indent(build_program(name), "    "))
        with library_environment(DS_ACCELERATOR=device_type, TORCH_EXTENSIONS_DIR=str(folder.parent)):
            done = subprocess.run(
                [sys.executable, "-c", program],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        if not _is_built(folder):
            lines = [line for line in done.stdout.splitlines() if line.strip()][-_TAIL_LINES:]
            raise ConfigurationError(
                f"Building DeepSpeed's {name} in {str(folder)!r} failed: see its last lines, and remove the folder to "
                "start from scratch.\n" + "\n".join(f"    {line}" for line in lines)
            )
        note(f"{name} is ready after {time.monotonic() - begun:.0f} s.")


def build_program(name: str) -> str:
    """Return the Python program that builds an op."""
    builder = f"get_accelerator().create_op_builder({OPS[name].builder!r})"
    return f"from deepspeed.accelerator import get_accelerator\n{builder}.load(verbose=True)\n"


def load_ops(names: Iterable[str], device_type: str = "cpu") -> None:
    """Load ops that are built, so that DeepSpeed finds them loaded.

    DeepSpeed's own way queries the processor's features (2 s for each op), runs ninja, and takes the lock file.
    """
    # OpBuilder.load looks into _loaded_ops first, in DeepSpeed 0.19.8; torch 2.13 imports extensions in this way.
    from deepspeed.ops.op_builder import PinMemoryBuilder
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import _import_module_from_library

    for name in names:
        folder = op_folder(name, device_type)
        if name not in OpBuilder._loaded_ops and _is_built(folder):
            OpBuilder._loaded_ops[name] = _import_module_from_library(name, str(folder), True)
            if name == "pin_memory":
                # Makes its symbols global, which async_io needs.
                PinMemoryBuilder().load()


def main(names: list[str]) -> int:
    """Build ops for a CPU from the command line; return the exit code."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        require_deepspeed("zero2")
        left_out = names[1:] if names[:1] == ["--without"] else []
        wanted = [name for name in OPS if name not in left_out] if left_out or not names else names
        check_toolchain(missing_ops(wanted))
        ensure_ops(wanted, note)
    except ConfigurationError as error:
        note(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
