"""Buffers between memory and a disk that fit a model whose size is not known before it is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def growing_buffers() -> Iterator[None]:
    """Have the buffers for parameters on a disk grow to the largest one that is built inside.

    DeepSpeed allocates them, locked in memory, before it sees a parameter. While a model is built one parameter is
    split at a time, so that all buffers are free when the next one comes.
    """
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    fixed = Swapper.get_buffer

    def get_buffer(swapper: Any, parameter: Any, elements: int) -> Tensor:
        if elements > swapper.elements_per_buffer and not swapper.param_id_to_buffer_id:
            _grow(swapper, elements)
        buffer: Tensor = fixed(swapper, parameter, elements)
        return buffer

    Swapper.get_buffer = get_buffer
    try:
        yield
    finally:
        Swapper.get_buffer = fixed


def _grow(swapper: Any, elements: int) -> None:
    """Replace a swapper's buffers by larger ones."""
    swapper.synchronize_writes()
    swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)
    swapper.elements_per_buffer = elements
    swapper.aligned_elements_per_buffer = swapper._io_aligned_numel(elements)
    count = swapper.aligned_elements_per_buffer * swapper.param_buffer_count
    swapper.buffers = swapper.aio_read_handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=swapper.dtype))
