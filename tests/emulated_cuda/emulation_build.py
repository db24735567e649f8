"""Builds the libraries of the emulation: once for each version of torch, of Python and of the sources, on first use.

torch is not imported here: its libraries have to be loaded after those of the emulation are known.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phalanx.framework.system.file_lock import lock

SOURCES = Path(__file__).parent
DEVICE = "libemulated_cuda"
OTHER = "libemulated_other"
COLLECTIVES = "emulated_collectives"
_LIMIT_SECONDS = 600.0
_OPTIONS = ("-shared", "-fPIC", "-O1", "-std=c++20")


@dataclass(frozen=True)
class Library:
    """The sources of a library, and the options that only it needs."""

    sources: tuple[str, ...]
    options: tuple[str, ...] = ()


_LIBRARIES = {
    DEVICE: Library(("device.cpp", "operators.cpp")),
    OTHER: Library(("device.cpp", "operators.cpp"), ("-DEMULATED_OTHER",)),
    COLLECTIVES: Library(
        ("collectives.cpp",), ("-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={COLLECTIVES}", "-ltorch_python")
    ),
}


def torch_folder() -> Path:
    """Return the folder of the torch that this interpreter would import."""
    # Not through all finders: the emulation's own calls this function.
    spec = importlib.machinery.PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed: the emulated devices are built against it.")
    return Path(spec.origin).parent


def libraries(names: Sequence[str] = (DEVICE, COLLECTIVES)) -> dict[str, Path]:
    """Return the files of libraries by name; build those that are missing. Several processes may call this."""
    files = {name: _folder(_LIBRARIES[name]) / f"{name}.so" for name in names}
    if all(file.exists() for file in files.values()):
        return files
    with contextlib.ExitStack() as locks:
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
            _lock(locks.enter_context((file.parent / "lock").open("w")))
        # A process that was waited for has built them, as a rule.
        _build({name: file for name, file in files.items() if not file.exists()})
    return files


def _cache() -> Path:
    """Return where torch, too, keeps what it compiles."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def _folder(library: Library) -> Path:
    """Return the folder of a library; its name says what the library was built for and from."""
    version = re.search(r"__version__ = '([^']+)'", (torch_folder() / "version.py").read_text())
    digest = hashlib.sha256(" ".join([*_OPTIONS, *library.options]).encode())
    for name in ("emulated.h", *library.sources):
        digest.update((SOURCES / name).read_bytes())
    name = f"phalanx_{library.sources[0].partition('.')[0]}_torch{version.group(1) if version else ''}"
    return _cache() / f"{name}_py{sys.version_info.major}{sys.version_info.minor}_{digest.hexdigest()[:12]}"


def _lock(guard: IO[str]) -> None:
    """Wait for the lock of a file; it ends with the process that holds it."""
    until = time.monotonic() + _LIMIT_SECONDS
    while lock(guard.fileno()) is False:
        if time.monotonic() > until:
            raise TimeoutError(f"Waited {_LIMIT_SECONDS:.0f} s for another process to build {guard.name}.")
        time.sleep(0.1)


def _build(files: Mapping[str, Path]) -> None:
    """Compile libraries, all at once. A file is moved to its name when it is complete.

    Raises:
        RuntimeError: the compiler failed; the message ends with what it printed.
    """
    torch = torch_folder()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"]
    compilers = {}
    for name, file in files.items():
        library = _LIBRARIES[name]
        # No path of torch's libraries is recorded: those of the process are used, whichever environment they are from.
        command = [compiler, *_OPTIONS, *include, *(str(SOURCES / source) for source in library.sources)]
        command += [f"-L{torch}/lib", *library.options, "-ltorch_cpu", "-lc10", "-o", f"{file}.{os.getpid()}"]
        compilers[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    failures = []
    for name, process in compilers.items():
        said, _ = process.communicate()
        if process.returncode:
            failures.append(f"{name}: exit code {process.returncode}\n{said[-6000:]}")
        else:
            Path(f"{files[name]}.{os.getpid()}").replace(files[name])
    if failures:
        raise RuntimeError("The emulated devices could not be compiled.\n" + "\n".join(failures))


if __name__ == "__main__":
    began = time.monotonic()
    print(libraries(), f"{time.monotonic() - began:.1f} s")
