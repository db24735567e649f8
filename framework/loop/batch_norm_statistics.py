"""Batch norm statistics for averaged weights, recomputed in a pass over the training data.

The module has never run with averaged weights, so its running statistics do not fit them. During the pass batch norm
layers weigh all batches equally (momentum None); every other layer is in evaluation mode. Statistics are averaged over
ranks, weighted by the number of batches, which gives the same result as one process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..core.norms import BatchNorm
from ..data.dataloader import is_map_style
from ..data.evaluation_source import EvaluationSource
from ..diagnostics.isolated_step import isolated
from ..parallel.parameter_names import canonical_names
from ..parallel.sync_batch_norm import is_collective
from ..run.overrides import in_context, with_arity
from ..run.run import Run
from ..state.weight_averages import Average


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the layers that maintain running statistics of their inputs, by name."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) and part.running_mean is not None
    }


@dataclass
class StatisticsPass:
    """A pass over the training data that computes an average's batch statistics."""

    run: Run
    source: EvaluationSource
    transfer: Callable[[Any, int], Any] | None
    limit: int | None
    """The number of training batches in an epoch, summed over ranks."""

    def __call__(self, average: Average) -> None:
        """Compute the statistics and store them in the average. Collective."""
        module = self.run.module
        layers = batch_norms(module)
        wanted = average.settings.statistics_batches
        limit = min((n for n in (wanted, self.limit) if n is not None), default=None)
        with average.in_module(share_buffers=False):
            with isolated(module, keep_buffers=False), torch.no_grad(), _gathering(module, layers):
                count = self._feed(limit, layers)
                statistics = self._agreed(layers, count)
            if statistics:
                average.keep_buffers(statistics)

    def _feed(self, limit: int | None, layers: dict[str, BatchNorm]) -> int:
        """Run this rank's batches and return their number. Collective if forward passes contain collectives."""
        run = self.run
        context = run.fabric.forward_context()
        step = with_arity(run.module.training_step, ("batch", "batch_idx"))
        step = run.strategy.route(in_context(step, context), training=False)
        together = run.traits.forward_has_collectives or any(map(is_collective, layers.values()))
        batches: Iterator[Any] = (batch for _, batch in self.source.start(limit=limit))
        count = 0
        while True:
            batch = next(batches, None)
            if not (self._all_have(batch) if together and run.world.size > 1 else batch is not None):
                return count
            step(batch if self.transfer is None else self.transfer(batch, 0), count)
            count += 1

    def _all_have(self, batch: Any) -> bool:
        """Whether every rank has a batch; batches that only some ranks have are left out. Collective."""
        (have,) = self.run.world.control_reduce([batch is not None]).wait()
        return have == self.run.world.size

    def _agreed(self, layers: dict[str, BatchNorm], count: int) -> dict[str, Tensor]:
        """Return the statistics over all ranks by buffer name; an empty dict if no rank had a batch. Collective."""
        total = self.run.world.all_reduce(torch.tensor(float(count), device=self.run.world.device))
        if not total.item():
            return {}
        canonical, found = canonical_names(self.run.module), dict[str, Tensor]()
        for name, layer in layers.items():
            for key in ("running_mean", "running_var"):
                own: Tensor = getattr(layer, key)
                mean = self.run.world.all_reduce(own.double() * (count / total.item()))
                found[canonical(f"{name}.{key}" if name else key)] = mean.to(own.dtype)
        return found


def statistics_pass(
    run: Run,
    loaders: Callable[[], Any],
    source: Callable[[], EvaluationSource],
    transfer: Callable[[Any, int], Any] | None,
    batches: int | None,
) -> StatisticsPass | None:
    """Return the pass that a run's averages need, or None if the module has no batch statistics.

    Args:
        run: the fit.
        loaders: returns the training loaders as the user gave them.
        source: returns a source that reads the training data independently of training.
        transfer: moves a batch of loader 0 to the device; None if batches are not moved.
        batches: micro-batches of each rank in an epoch; None if unknown.

    Raises:
        ConfigurationError: the training data cannot be read independently of training.
    """
    asked = any(average.settings.statistics_batches != 0 for average in run.averages)
    if not asked or not batch_norms(run.module):
        return None
    given = loaders()
    if not is_map_style(given):
        raise ConfigurationError(
            "StochasticWeightAveraging computes batch norm's statistics in a pass over the training data, which "
            f"train_dataloaders ({type(given).__name__}) does not support without changing the position of training "
            "in it: give one DataLoader over a dataset with indices, or statistics_batches=0 to use the module's own."
        )
    limit = None if batches is None else batches * run.world.data_size
    return StatisticsPass(run, source(), transfer, limit)


@contextmanager
def _gathering(module: nn.Module, layers: dict[str, BatchNorm]) -> Generator[None, None, None]:
    """Let layers compute statistics from scratch; on exit restore their momentum, mode and statistics."""
    modes = {part: part.training for part in module.modules()}
    momenta = {layer: layer.momentum for layer in layers.values()}
    kept = [
        (buffer, buffer.clone())
        for layer in layers.values()
        for buffer in layer._buffers.values()
        if buffer is not None
    ]
    module.eval()
    try:
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None
            layer.train()
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for part, mode in modes.items():
            part.training = mode
