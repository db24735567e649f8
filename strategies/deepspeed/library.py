"""DeepSpeed itself: its version, its import, and the environment in which it builds and finds its ops."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import logging
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...framework.core.errors import ConfigurationError
from ...framework.system.environment import library_environment, library_variable

# Private names of DeepSpeed are used, so a minor version that was not tested is refused. pyproject.toml has the same
# range.
_OLDEST, _TOO_NEW = (0, 19, 8), (0, 20)
_INSTALL = "pip install 'deepspeed>=0.19.8,<0.20'"


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


class _NoHints(logging.Filter):
    """Drops two needless warnings of DeepSpeed: that there is no GPU, and that the user's step is not a tensor."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("A module has unknown inputs or outputs type", "Setting accelerator to"))


_NO_HINTS = _NoHints()
# The process groups that DeepSpeed's own calls create.
_DEPRECATED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor|_\w+)` is deprecated"


def restore_warnings() -> None:
    """Show the warnings again that ``quiet_import`` suppresses."""
    logging.getLogger("DeepSpeed").removeFilter(_NO_HINTS)
    filters: Any = warnings.filters
    filters[:] = [one for one in filters if one[1] != re.compile(_DEPRECATED, re.IGNORECASE)]


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Import DeepSpeed quickly and without its printed list of ops, and suppress its needless warnings afterwards."""
    logger = logging.getLogger("DeepSpeed")
    if _NO_HINTS not in logger.filters:
        logger.addFilter(_NO_HINTS)
        warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)
    # Its autotuner imports mlflow where that is installed: three quarters of the time that the import takes.
    hidden = {"mlflow": None} if not sys.modules.keys() & {"deepspeed", "mlflow"} else {}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_deepspeed(device_type: str) -> None:
    """Import DeepSpeed and what its engine imports at its start, without initializing a device.

    Every rank would otherwise spend these seconds itself, and have a copy of the modules in its own memory.
    """
    with library_environment(DS_ACCELERATOR=device_type, PYTORCH_NVML_BASED_CUDA_CHECK="1"), quiet_import():
        # The last two import torch's compiler, which takes as long again.
        for name in ("", ".runtime.zero.muon.muon_optimizer", ".module_inject.auto_ep_layer"):
            # A module that a later version has moved costs time at the start of each rank, and nothing else.
            with contextlib.suppress(ImportError):
                importlib.import_module(f"deepspeed{name}")


# ---- ops -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ops_environment(device_type: str) -> Iterator[None]:
    """Let DeepSpeed choose a type of device, at its import, and build and find its ops for it."""
    with library_environment(DS_ACCELERATOR=device_type, TORCH_EXTENSIONS_DIR=str(ops_root(device_type))):
        yield


def ops_root(device_type: str) -> Path:
    """Return the folder that holds the folders of ops for a type of device. ``TORCH_EXTENSIONS_DIR`` moves it.

    DeepSpeed compares times alone, and would load an op that was built for another torch or processor, which crashes.
    So those have other folders. So has an installation of the same versions over an earlier one, as its headers are
    newer than the op: DeepSpeed would build it again after the ranks have connected, which then wait without a word.
    """
    # Where torch, too, builds extensions.
    from torch.utils.cpp_extension import get_default_build_root

    built_for = [torch.__version__, version("deepspeed"), sys.version, sys.prefix, _processor(), device_type]
    built_for += [_installation_time("torch"), _installation_time("deepspeed")]
    digest = hashlib.sha256("\n".join([*built_for, str(torch.version.cuda)]).encode()).hexdigest()[:12]
    return Path(library_variable("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / f"phalanx-{digest}"


def query_processor_once() -> None:
    """Let DeepSpeed query the processor once, which takes a second, and not several times for each op."""
    import cpuinfo

    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


@functools.cache
def _installation_time(package: str) -> str:
    """Return when the files of a package were written, in whole seconds: layers of container images hold no more."""
    spec = importlib.util.find_spec(package)
    return str(int(Path(spec.origin).stat().st_mtime)) if spec and spec.origin else ""


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """Return the features of the processor: DeepSpeed compiles with ``-march=native``.

    A home directory may be shared by machines with different processors, where such code is an illegal instruction.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {features}"
