"""Synchronized batch norm on any device: torch's ``SyncBatchNorm`` only runs on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.norms import BatchNorm

# A list, so that a context can set it: whether the inputs of this rank are those of a filler, which do not count.
_filling = [False]


@contextmanager
def without_rows() -> Generator[None, None, None]:
    """Take part in the exchange of statistics with no rows: this rank runs a filler batch."""
    before, _filling[0] = _filling[0], True
    try:
        yield
    finally:
        _filling[0] = before


class _SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks; its gradient is also summed over ranks. Collective, in forward and in backward."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class CollectiveBatchNorm(nn.BatchNorm1d):
    """Normalizes [batch, channels, *] by mean and variance over the batches of all ranks. Collective in training
    mode.

    It has the attributes of every batch norm. It is no ``nn.SyncBatchNorm``, which DDP refuses on CPUs.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dims [batch, channels, *], got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of the same shape."""
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        self._check_input_dim(input)
        values, fills = input.transpose(0, 1).flatten(1).float(), _filling[0]
        if fills:
            # A part without elements stays in the graph, whose backward pass sums over ranks too.
            values = values[:, :0]
        sums = torch.cat([values.sum(1), values.new_tensor([values.shape[1]])])
        *_, count = total = sum_over_ranks(sums)
        is_empty = fills and count.item() == 0
        if is_empty:
            # All ranks run fillers.
            count = torch.ones_like(count)
        mean = total[:-1] / count
        # In a second exchange: computing the variance from sums of squares would lose precision.
        variance = sum_over_ranks((values - mean[:, None]).square().sum(1)) / count
        if not is_empty:
            self._update_running(mean.detach(), (variance * (count / (count - 1).clamp(min=1))).detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        output: Tensor = (input * scale.view(shape) + shift.view(shape)).to(input.dtype)
        return output

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class FusedBatchNorm(nn.SyncBatchNorm):
    """torch's ``SyncBatchNorm``, to whose statistics a filler batch adds no rows. Collective in training mode."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, of the same shape; a filler is returned as it is."""
        if not (self.training and _filling[0]):
            return super().forward(input)
        mean, variance = self.running_mean, self.running_var
        before = None if mean is None or variance is None else (mean.clone(), variance.clone())
        # torch exchanges the statistics of other ranks in float32, and those of no rows in the dtype of the input.
        empty = super().forward(input.float()[:0])
        if before is not None and mean is not None and variance is not None:
            # Not a number where all ranks run fillers.
            is_known = variance.isfinite()
            for buffer, value in zip((mean, variance), before, strict=True):
                buffer.copy_(torch.where(is_known, buffer, value))
        return input + empty.sum().to(input.dtype) * 0.0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the differentiable sum over ranks. Collective."""
    total: Tensor = _SumOverRanks.apply(tensor)  # type: ignore[no-untyped-call]
    return total


def is_collective(layer: nn.Module) -> bool:
    """Whether a layer exchanges batch statistics in its forward pass."""
    return isinstance(layer, (CollectiveBatchNorm, nn.SyncBatchNorm))


def share_batch_statistics(module: nn.Module, device_type: str) -> Callable[[], None]:
    """Make a module's batch norm layers use the batches of all ranks; return a function that reverts this.

    The layers remain the same objects, with their parameters and hooks: only their computation changes.
    """
    kinds = {
        layer: type(layer) for layer in module.modules() if isinstance(layer, BatchNorm) and not is_collective(layer)
    }
    for layer in kinds:
        if device_type == "cuda":
            # `SyncBatchNorm.forward` reads it; None is the group of all ranks.
            layer.process_group = None
        # No ordinary way: the user may hold references to the layer and hooks on it, so it has to stay the same object;
        # torch's convert_sync_batchnorm returns a module with new layers.
        layer.__class__ = FusedBatchNorm if device_type == "cuda" else CollectiveBatchNorm

    def undo() -> None:
        for layer, kind in kinds.items():
            # No ordinary way: the layer, which is the user's object, gets its own class back.
            layer.__class__ = kind
            if "process_group" in vars(layer):
                del layer.process_group

    return undo
