"""A model that runs out of memory where it is told to: what the tests and trials of found micro-batches train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import network
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.strategies import FSDPStrategy

PLACES = ("forward", "backward", "update")
LAYERS = 4
EVERY = -2
"""In place of a rank: all ranks run out of memory, each at another layer."""

FSDP_RECOVERS = pytest.mark.skipif(
    FSDPStrategy().recovery is None, reason="this version of torch has no FSDPModule.reset_iter_state"
)
FSDP = pytest.param("fsdp", marks=FSDP_RECOVERS)


def strategy_of(name: str) -> Any:
    """Return a strategy whose ranks all hold the weights after a fit, and whose passes contain several collectives."""
    if name not in ("fsdp", "hsdp"):
        return name
    return FSDPStrategy(replicas=2 if name == "hsdp" else 1, units=nn.Linear, gather_weights="all")


class Exhausted(TrainModule):
    """A network that logs its losses and the rows that it sees.

    Args:
        place: where rank ``rank`` runs out of memory: in ``PLACES``.
        rank: the rank, or ``EVERY``.
        largest: the most samples of a micro-batch that fit into the memory of the rank, in its passes.
        at: the number of training steps after which memory is short; the update fails after this one.
        dropout: the probability of dropout.
        norm: whether there is a batch norm.
        layer: the layer of the network at whose output memory is short.
    """

    def __init__(
        self,
        place: str,
        rank: int,
        largest: int,
        at: int = 0,
        dropout: float = 0.0,
        norm: bool = False,
        layer: int = 1,
    ) -> None:
        super().__init__()
        self.net = network(dropout=dropout)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.place, self.rank, self.largest, self.at, self.layer = place, rank, largest, at, layer
        self.raised = 0
        self.calls = 0
        self.updates = 0

    @property
    def _is_meant(self) -> bool:
        return self.rank in (self.global_rank, EVERY)

    def _is_short(self, samples: int) -> bool:
        return self._is_meant and self.calls > self.at and samples > self.largest

    def raise_error(self, *_: Any) -> None:
        """Raise the error of torch's allocator."""
        self.raised += 1
        raise torch.OutOfMemoryError("injected")

    def _run_out(self, hidden: Tensor) -> None:
        if self.place == "forward":
            self.raise_error()
        if self.place == "backward":
            hidden.register_hook(self.raise_error)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        x, y = batch
        hidden, layer = x, self.layer
        if self.rank == EVERY:
            layer = (layer + self.global_rank) % LAYERS
        for number, part in enumerate(self.net):
            hidden = part(hidden)
            if number == 1:
                hidden = self.norm(hidden)
            if number == layer and self._is_short(len(x)):
                self._run_out(hidden)
        loss = nn.functional.mse_loss(hidden, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", len(x), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        # DeepSpeed steps torch's own object, with its hooks, where its fused form lacks an option.
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)
        optimizer.register_step_pre_hook(self._before_update)
        return optimizer

    def _before_update(self, *_: Any) -> None:
        self.updates += 1
        if self.place == "update" and self.updates == self.at + 1 and self._is_meant:
            self.raise_error()
