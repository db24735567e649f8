"""Requirements of DeepSpeed on a machine: its version, and the tools that its C++ ops are built with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...framework.core.errors import ConfigurationError
from ...framework.system.environment import build_tools, library_environment

# The adapter uses private attributes of DeepSpeed (pieces, attributes, engine, update, swap), so a minor version that
# was not tested is refused. pyproject.toml has the same range.
_OLDEST, _TOO_NEW = (0, 19, 8), (0, 20)
_INSTALL = "pip install 'deepspeed>=0.19.8,<0.20'"

_PYTHON_HEADERS = f"Python's headers (Debian: python{sys.version_info[0]}.{sys.version_info[1]}-dev, or python3-dev)"
# Patterns in the output of a failed build, and the remedy. The output contains commands too: only errors may match.
_CAUSES = (
    (r"Python\.h: No such file|'Python\.h' file not found", f"install {_PYTHON_HEADERS}"),
    (r"cannot find -laio|libaio\.h: No such file|requires the dev libaio", "install libaio (Debian: libaio-dev)"),
    (r"(unrecognized|unknown|invalid).*std=", "install a compiler that knows C++20, such as g++ 11 (Debian: g++)"),
    (r"Ninja is required|due to ninja not", "run `pip install ninja`"),
    (r"Killed signal|fatal error: Killed|out of memory", "set MAX_JOBS=1, which needs less memory"),
    (r"No space left on device", "free space there, or set TORCH_EXTENSIONS_DIR to a folder that has some"),
    (r"Permission denied|Read-only file system", "set TORCH_EXTENSIONS_DIR to a folder that can be written"),
    (
        r"CUDA_HOME (does not|environment)|CUDAMismatch",
        "install torch's version of the CUDA toolkit, set CUDA_HOME",
    ),
    (r"(\+\+|gcc|clang): (command )?not found|No such file or directory: '\S*\+\+'", "install g++ (Debian: g++)"),
)


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
    """Refuse to continue if one of the ops cannot be built.

    Args:
        ops: the ops that are not built yet.
        device_type: the device that they are built for.

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
    if "async_io" in ops and device_type == "cuda" and cuda_home() is None:
        missing.append("the CUDA toolkit, for NVMe (set CUDA_HOME to its folder)")
    return missing


def cuda_home() -> str | None:
    """Return the folder of the CUDA toolkit that torch builds extensions with, or None."""
    from torch.utils import cpp_extension

    return cpp_extension.CUDA_HOME


def _compiles(compiler: str, flags: list[str]) -> bool:
    """Whether a program that uses libaio can be built, which DeepSpeed tests in the same way."""
    command = [compiler, "-x", "c++", "-", "-o", "/dev/null", *flags, "-laio"]
    program = "#include <libaio.h>\nint main() { return io_queue_init(1, nullptr); }\n"
    tried = subprocess.run(command, input=program, capture_output=True, text=True, timeout=60, check=False)
    return tried.returncode == 0


def advice(output: str) -> str:
    """Return the remedy for a failed build, or an empty string if its output matches no known cause."""
    return next((help for pattern, help in _CAUSES if re.search(pattern, output)), "")
