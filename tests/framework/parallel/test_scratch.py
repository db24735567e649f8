"""Memory for values that are not needed while layers are built without data."""

from __future__ import annotations

from typing import Any

import torch
from live_memory import LiveMemory
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.framework.parallel.deferred import Deferred, Scratch

CPU = torch.device("cpu")


class Filled(TorchDispatchMode):
    """Notes the memory that random numbers are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.uniform_.default:
            self.places.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_layers_without_data_are_initialized_in_the_same_memory() -> None:
    kept = []
    with Filled() as filled, Deferred().recording():
        for _ in range(3):
            kept.append(nn.Linear(64, 64, bias=False))
            kept.append(nn.Linear(64, 8, bias=False))
    assert all(layer.weight.is_meta for layer in kept)
    assert len(filled.places) == 1


def test_the_memory_is_freed_when_the_layers_are_built() -> None:
    with LiveMemory() as memory:
        with Deferred().recording():
            layer = nn.Linear(64, 64, bias=False)
            # A reference cycle may keep it.
            mode = _get_current_function_mode()
        memory.stop()
    assert mode is not None
    assert layer.weight.is_meta
    assert memory.peak >= 64 * 64 * 4 > memory.kept


def test_memory_is_reused_for_other_shapes_and_dtypes() -> None:
    scratch = Scratch()
    first = scratch.like(torch.empty(6, 4), CPU)
    second = scratch.like(torch.empty(3, 4, dtype=torch.float64), CPU)
    scalar = scratch.like(torch.empty(()), CPU)
    empty = scratch.like(torch.empty(0, 5), CPU)
    assert (first.shape, second.shape, scalar.shape, empty.shape) == ((6, 4), (3, 4), (), (0, 5))
    assert second.dtype == torch.float64
    assert first.data_ptr() == second.data_ptr() == scalar.data_ptr()
    assert scratch.like(torch.empty(100), CPU).shape == (100,)
