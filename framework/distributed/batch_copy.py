"""Copies of batches to a GPU, on a stream of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BatchCopy:
    """Copies the tensors of batches to a GPU.

    The host runs ahead of the device, so a copy on the stream of the computations would begin only after all that is
    queued there. On a separate stream it begins at once, and computations that are queued later wait for it. From
    memory that is not pinned, the host waits for the copy, and no longer for the computations before it.
    """

    def __init__(self, device: torch.device) -> None:
        from lightning_utilities.core.apply_func import apply_to_collection

        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._apply = apply_to_collection

    def __call__(self, batch: Any) -> Any:
        """Return a collection with its tensors on the device; they may be used on the current stream."""
        compute = torch.cuda.current_stream(self._device)

        def copy(tensor: Tensor) -> Tensor:
            # The memory of other tensors, such as sparse ones, cannot be assigned to a second stream, and a tensor
            # that is on a device may still be computed there.
            if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                return tensor.to(self._device, non_blocking=True)
            with torch.cuda.stream(self._stream):
                copied = tensor.to(self._device, non_blocking=True)
            # Its memory is reused only after the computations that read it.
            copied.record_stream(compute)
            return copied

        copied = self._apply(batch, Tensor, copy)
        compute.wait_stream(self._stream)
        return copied
