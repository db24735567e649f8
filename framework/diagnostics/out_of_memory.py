"""Errors that mean that a device or the host has no memory left."""

from __future__ import annotations

import torch

# Of torch's allocators on the CPU, and of libraries that allocate on a device without them.
_MESSAGES = ("CUDA out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the host has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
