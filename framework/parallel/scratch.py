"""``Scratch``: memory for values that are not needed, which is reused."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One piece of memory, as large as the largest tensor so far.

    With a piece of memory for each tensor, the process would keep most of them after they are freed: the allocator of
    the C library returns memory to the system only where no small object lies behind it.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a contiguous tensor of another's shape and dtype, whose values are undefined.

        It shares its memory with those that were returned before.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        memory = self._memory
        if memory is None or memory.numel() < num_bytes or memory.device != device:
            # The old memory is freed first.
            memory = self._memory = None
            memory = self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return memory[:num_bytes].view(tensor.dtype).view(tensor.shape)

    def free(self) -> None:
        """Free the memory, also if something still refers to this object."""
        self._memory = None
