"""Layers of torch with running statistics of their inputs. The classes that torch derives them from are private."""

from __future__ import annotations

from torch import nn

BatchNorm = (
    nn.BatchNorm1d
    | nn.BatchNorm2d
    | nn.BatchNorm3d
    | nn.SyncBatchNorm
    # These are of no class above until they have seen a batch.
    | nn.LazyBatchNorm1d
    | nn.LazyBatchNorm2d
    | nn.LazyBatchNorm3d
)
"""Layers that normalize over a batch."""
InstanceNorm = (
    nn.InstanceNorm1d
    | nn.InstanceNorm2d
    | nn.InstanceNorm3d
    | nn.LazyInstanceNorm1d
    | nn.LazyInstanceNorm2d
    | nn.LazyInstanceNorm3d
)
"""Layers that normalize over each sample, with running statistics on request."""
