"""Two devices of type "other" on the memory and the kernels of the host: the type that torch keeps for the backends of
others, PrivateUse1, under a name of its own. They show what a run does on a device that is neither a CPU nor CUDA."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from pathlib import Path
from typing import Any

import emulation_build
import torch
from torch import Tensor
from torch.utils import backend_registration

NAME = "other"


def enable() -> None:
    """Have torch find two devices of type "other" in this process, which must have imported torch already."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    file: Path = emulation_build.libraries((emulation_build.OTHER,))[emulation_build.OTHER]
    backend_registration.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    library.emulated_state_size.restype = ctypes.c_size_t
    library.emulated_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.emulated_get_state.argtypes = library.emulated_set_state.argtypes = [ctypes.c_int, ctypes.c_void_p]
    torch._register_device_module(NAME, Module(library))
    backend_registration.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])


class Module:
    """``torch.other``: what torch asks of the module of a device type, and no more."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return int(self._library.emulated_device_count())

    def current_device(self) -> int:
        return int(self._library.emulated_device())

    def set_device(self, device: Any) -> None:
        self._library.emulated_set_device(torch.device(device).index or 0)

    @contextlib.contextmanager
    def device(self, device: Any) -> Generator[None, None, None]:
        before = self.current_device()
        self.set_device(device)
        yield
        self._library.emulated_set_device(before)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        self._library.emulated_seed(self.current_device(), seed % 2**64)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._library.emulated_seed(index, seed % 2**64)

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        state = torch.empty(self._library.emulated_state_size(), dtype=torch.uint8)
        self._library.emulated_get_state(self._index(device), state.data_ptr())
        return state

    def set_rng_state(self, new_state: Tensor, device: Any = NAME) -> None:
        self._library.emulated_set_state(self._index(device), new_state.contiguous().data_ptr())

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return self.current_device() if index is None else index
