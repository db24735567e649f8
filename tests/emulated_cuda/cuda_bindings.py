"""The functions of ``torch._C`` that only builds with CUDA have, for emulated devices. ``torch.cuda`` is unchanged."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

NAME = "Emulated GPU"
_KINDS = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
_COUNTS = ("allocation", "segment", "active", "inactive_split")


def fill(core: Any, library: ctypes.CDLL) -> None:
    """Add the bindings to the module ``torch._C``. Each is hashable, as torch's compiler keeps them in a table."""
    for name in ("total", "allocated", "peak"):
        getattr(library, f"emulated_{name}").restype = ctypes.c_size_t
    for name in ("stream", "new_stream"):
        getattr(library, f"emulated_{name}").restype = ctypes.c_long
    library.emulated_set_stream.argtypes = [ctypes.c_int, ctypes.c_long]
    library.emulated_set_total.argtypes = [ctypes.c_size_t]
    library.emulated_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.emulated_unpin.argtypes = [ctypes.c_void_p]
    core._has_cuda = True
    core._CudaDeviceProperties = DeviceProperties
    core._cudart = _Runtime(library)
    core._nvtx = SimpleNamespace(
        rangePushA=lambda text: 0,
        rangePop=lambda: 0,
        rangeStartA=lambda text: 0,
        rangeEnd=lambda number: None,
        markA=lambda text: None,
        deviceRangeStart=lambda *given: None,
        deviceRangeEnd=lambda *given: None,
    )
    for bindings in (_devices(library), _streams(core, library), _memory(library), _absent()):
        for name, value in bindings.items():
            setattr(core, name, value)


class DeviceProperties:
    """The properties of an emulated device, which are those of no real one."""

    name = NAME
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472
    L2_cache_size = 50 << 20
    is_integrated = is_multi_gpu_board = 0
    gcnArchName = ""

    def __init__(self, index: int, total_memory: int) -> None:
        self.uuid = f"{index}0000000-0000-0000-0000-000000000000"
        self.total_memory = total_memory


class _Fork:
    """Whether this process was forked from one that had asked the driver for its devices."""

    def __init__(self) -> None:
        self.is_bad = False
        self._is_watched = False

    def watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            os.register_at_fork(after_in_child=self._spoil)

    def _spoil(self) -> None:
        self.is_bad = True


def _devices(library: ctypes.CDLL) -> dict[str, Any]:
    fork = _Fork()

    def count() -> int:
        fork.watch()
        return 0 if fork.is_bad else int(library.emulated_device_count())

    def start() -> None:
        import torch

        fork.watch()
        cuda: Any = torch.cuda
        cuda.default_generators = _default_generators(library)
        cuda._get_device_properties = properties

    def initialize() -> None:
        import torch

        torch.cuda.init()

    def current() -> int:
        initialize()
        return int(library.emulated_device())

    def set_device(index: int) -> None:
        initialize()
        if not 0 <= index < library.emulated_device_count():
            raise RuntimeError("CUDA error: invalid device ordinal")
        library.emulated_set_device(index)

    def exchange(index: int) -> int:
        return int(library.emulated_exchange_device(index)) if index >= 0 else -1

    def restore(index: int) -> int:
        return int(library.emulated_restore_device(index)) if index >= 0 else -1

    def properties(index: int) -> DeviceProperties:
        return DeviceProperties(index, library.emulated_total())

    return {
        "_cuda_init": start,
        "_cuda_isInBadFork": lambda: fork.is_bad,
        "_cuda_getDeviceCount": count,
        "_cuda_getDevice": current,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": restore,
        "_cuda_hasPrimaryContext": lambda index: bool(library.emulated_has_context(index)),
        "_cuda_synchronize": lambda: library.emulated_synchronize(),
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: None,
    }


def _default_generators(library: ctypes.CDLL) -> tuple[Any, ...]:
    import cuda_emulation

    return tuple(cuda_emulation.collectives().default_generator(i) for i in range(library.emulated_device_count()))


def _streams(core: Any, library: ctypes.CDLL) -> dict[str, Any]:
    cuda_type = 1

    class StreamBase(core.Stream):  # type: ignore[misc]
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
        ) -> Any:
            if not device_type:
                stream_id, device_index = library.emulated_new_stream(), library.emulated_device()
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=cuda_type)

        def __init__(self, *given: object, **options: object) -> None:
            pass

        priority = 0

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

    class EventBase(core.Event):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def __init__(self, *given: object, **options: object) -> None:
            pass

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

    def current(index: int) -> tuple[int, int, int]:
        return library.emulated_stream(index), index, cuda_type

    def select(stream_id: int, device_index: int, device_type: int) -> None:
        library.emulated_set_stream(device_index, stream_id)

    return {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda index: (0, index, cuda_type),
        "_cuda_getCurrentRawStream": lambda index: int(library.emulated_stream(index)),
        "_cuda_setStream": select,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def _memory(library: ctypes.CDLL) -> dict[str, Any]:
    def statistics(index: int) -> dict[str, Any]:
        used = {
            "current": library.emulated_allocated(index),
            "peak": library.emulated_peak(index),
            "allocated": library.emulated_peak(index),
            "freed": library.emulated_peak(index) - library.emulated_allocated(index),
        }
        groups: dict[str, Any] = {kind: {pool: dict(used) for pool in ("all",)} for kind in _KINDS}
        groups |= {kind: {"all": dict.fromkeys(used, 0)} for kind in _COUNTS}
        return groups | {"num_alloc_retries": 0, "num_ooms": 0, "max_split_size": -1}

    return {
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": lambda index: library.emulated_reset_peak(index),
        "_cuda_resetAccumulatedMemoryStats": lambda index: None,
        "_cuda_hostMemoryStats": lambda: {},
        "_cuda_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": lambda fraction, index: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": lambda: None,
    }


class _Runtime:
    """The functions of CUDA's runtime that torch.cuda offers."""

    class cudaError(int):
        success = 0

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:
        total = int(self._library.emulated_total())
        return total - int(self._library.emulated_allocated(index)), total

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        self._library.emulated_pin(start, num_bytes)
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        self._library.emulated_unpin(start)
        return 0

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


def _absent() -> dict[str, Any]:
    """Return placeholders for classes that torch only derives from as it is imported."""
    from torch._utils import _dummy_type

    names = (
        *("_CUDAGraph", "_graph_pool_handle", "_cuda_CUDAAllocator", "_MemPool", "_cuda_beginAllocateToPool"),
        *("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"),
    )
    return {name: _dummy_type(name) for name in names}
