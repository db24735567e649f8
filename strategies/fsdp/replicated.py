"""``ddp`` with layers that are split over ranks: replicas of a model whose layers tensor parallelism splits."""

from __future__ import annotations

from .strategy import FSDPStrategy


class SplitReplicas(FSDPStrategy):
    """Replicates a model over groups of ranks that split its layers.

    Torch's ``fully_shard`` with one rank in each group of shards does it: parameters that are split over a group and
    those that are not become tensors of one kind, which optimizers and checkpoints take, and gradients are averaged
    over replicas while the backward pass runs. Compared with ``DistributedDataParallel``, parameters are copied once
    in each pass, and there are no buckets.
    """

    name = "ddp"
    axes = ("dp_replicate", "cp", "tp")
    rest = "dp_replicate"

    def __init__(self) -> None:
        # Every rank has full weights after a fit, as with ``ddp`` alone.
        super().__init__(gather_weights="all")
