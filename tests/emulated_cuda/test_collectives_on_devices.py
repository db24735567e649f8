"""``debug="collectives"`` on devices, where backward passes run on threads that Python did not start."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_fits import Classifier, batches, emulated_trainer, rank_of
from ranks import run_on_ranks
from torch import Tensor

from phalanx.framework.diagnostics import collective_trace


class MeanOfGradients(torch.autograd.Function):
    """The identity; its gradient is averaged over the ranks, in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Return the mean of the ranks' gradients."""
        mean = gradients[0].clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class Averaged(Classifier):
    """A collective of the user's in each backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return MeanOfGradients.apply(super().training_step(batch, batch_idx))  # type: ignore[no-untyped-call]


def traced(strategy: str) -> int:
    before = collective_trace.LIMIT_SECONDS
    collective_trace.CollectiveTrace.__init__.__defaults__ = (5.0,)
    try:
        # Names of threads that Python did not start are numbered together with all others.
        for _ in range(rank_of()):
            threading.Thread()
        trainer = emulated_trainer(2, strategy=strategy, max_steps=3, debug="collectives")
        trainer.fit(Averaged(), batches(8))
    finally:
        collective_trace.CollectiveTrace.__init__.__defaults__ = (before,)
    return int(trainer.global_step)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_collectives_of_backward_passes_are_compared_with_one_another(strategy: str) -> None:
    assert run_on_ranks(2, traced, strategy, device="cuda") == [3, 3]
