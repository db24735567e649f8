"""Checks of a strategy against what a run asks of it."""

from __future__ import annotations

from torch import nn

from ..core.accumulation import AccumulationSchedule
from ..core.errors import ConfigurationError
from ..core.global_batch import GlobalBatch, pieces_of
from .gradient_operations import no_clipping_by_value
from .meta_device import placed_parts
from .strategy import Strategy


def check_algorithm(strategy: Strategy, algorithm: str) -> None:
    """Refuse clipping by value if the strategy does not let it change gradients.

    Raises:
        ConfigurationError: the algorithm is ``"value"``, and ``strategy.gradients.clips_by_value`` is False.
    """
    if algorithm == "value" and not strategy.gradients.clips_by_value:
        raise no_clipping_by_value(strategy.name)


def remark_on_windows(
    strategy: Strategy, accumulation: AccumulationSchedule, batch: GlobalBatch | None, data_size: int
) -> str | None:
    """Return a sentence on windows that leave ranks idle under a strategy that runs their passes together, or None."""
    passes = strategy.window_passes
    if passes is None:
        return None
    if batch is None:
        return passes.remark(accumulation.sizes, f"accumulate_grad_batches={accumulation}")
    if not isinstance(batch.micro_batch_size, int):
        return None
    # Of full windows; the last one of an epoch may be shorter.
    share = batch.samples // data_size
    size = batch.micro_batch_size
    return passes.remark((len(pieces_of(share, size)),), f"{batch} with micro_batch_size={size}")


def check_placed(strategy: Strategy, module: nn.Module, training: bool) -> None:
    """Refuse to train or to shard weights that Accelerate has placed or offloaded.

    Raises:
        ConfigurationError: the module has such weights, and is trained, or the strategy shards state.
    """
    if not (training or strategy.traits.shards_state) or not (placed := placed_parts(module)):
        return
    what = f"{next(iter(placed)) or type(module).__name__} has weights that Accelerate has placed or offloaded"
    if training:
        raise ConfigurationError(
            f"{what}, which cannot be trained: load them without a device map, and choose strategy='fsdp' or "
            "'zero3-offload' for a model that does not fit on a device."
        )
    raise ConfigurationError(
        f"{what}, which strategy={strategy.name!r} cannot shard: use strategy='single' or 'ddp', or load them without "
        "a device map."
    )
