"""Two devices of type "cuda" for a torch without CUDA, on the memory and the kernels of the host.

``enable`` has to run before torch is imported. It only notes that torch is to come: loading the emulation takes place
as torch does, so processes that never import it pay nothing.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import emulation_build

_SITE = Path(__file__).parent / "site"
_LOADED: list[ctypes.CDLL] = []


def enable() -> None:
    """Have torch find two CUDA devices in this process, and in those that are forked from it.

    Raises:
        RuntimeError: torch is imported already.
    """
    if is_enabled():
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: enable the emulated devices before.")
    sys.meta_path.insert(0, _Finder())


def is_enabled() -> bool:
    """Whether this process has, or will have, emulated devices."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables with which a new interpreter, and all that it starts, has emulated devices."""
    given = environment.get("PYTHONPATH")
    # Without it DeepSpeed would require CUDA's toolkit, which is not installed.
    return {"PYTHONPATH": f"{_SITE}{os.pathsep}{given}" if given else str(_SITE), "DS_IGNORE_CUDA_DETECTION": "1"}


def library() -> ctypes.CDLL:
    """Return the library with the devices; load it on first use, which must come before torch's."""
    if not _LOADED:
        files = emulation_build.libraries()
        # The dependencies of the library are found by their names once they are loaded.
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(emulation_build.torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        _LOADED.append(ctypes.CDLL(str(files[emulation_build.DEVICE]), mode=ctypes.RTLD_GLOBAL))
    return _LOADED[0]


class _Finder(importlib.abc.MetaPathFinder):
    """Acts just before certain modules of torch are imported; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (act := _BEFORE.get(fullname)) is not None:
            act()
        if (finish := _AFTER.get(fullname)) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, finish)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a module, and then completes it."""

    def __init__(self, name: str, path: str, finish: Callable[[Any], None]) -> None:
        super().__init__(name, path)
        self._finish = finish

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._finish(module)


def _fill_bindings() -> None:
    """Add the bindings of torch.cuda to torch._C, where a build with CUDA has them."""
    import cuda_bindings

    cuda_bindings.fill(sys.modules["torch._C"], library())


def _add_collectives() -> None:
    """Add the process group of NCCL."""
    bindings: Any = sys.modules["torch._C._distributed_c10d"]
    bindings.ProcessGroupNCCL = collectives().ProcessGroupNCCL


def collectives() -> Any:
    """Return the module of C++ with the process group."""
    name = emulation_build.COLLECTIVES
    if name not in sys.modules:
        path = emulation_build.libraries()[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _complete_cuda(cuda: Any) -> None:
    # What the driver's library for management answers, which needs no context.
    cuda._raw_device_count_nvml = lambda: 2
    cuda._raw_device_uuid_nvml = lambda: [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-10000000-0000-0000-0000-000000000000",
    ]


def _complete_torch(torch: Any) -> None:
    """Let storages of a device change their size, for which a build without CUDA has no code."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, num_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, num_bytes)
        holder = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        collectives().resize_storage(holder, num_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_


_BEFORE: dict[str, Callable[[], object]] = {
    "torch": library,
    "torch.cuda": _fill_bindings,
    "torch.distributed.distributed_c10d": _add_collectives,
}
_AFTER: dict[str, Callable[[Any], None]] = {"torch": _complete_torch, "torch.cuda": _complete_cuda}
