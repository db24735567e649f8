"""Callbacks that read or write weights and gradients, where ranks share layers, sequences or blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from long_sequences import LENGTH, LongModel, loader, rows
from mesh_table import Mesh
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import Callback
from phalanx.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientNormMonitor,
    LambdaCallback,
    StochasticWeightAveraging,
)

CASES = [
    (Mesh("ddp", 2, "tp=2"), "ema"),
    (Mesh("ddp", 2, "cp=2"), "finetuning"),
    (Mesh("fsdp", 2, "tp=2"), "swa"),
    (Mesh("fsdp", 2, "tp=2"), "finetuning"),
    (Mesh("fsdp", 2, "cp=2"), "ema"),
    (Mesh("pipeline", 2, "pp=2"), "swa"),
    (Mesh("pipeline", 2, "pp=2"), "finetuning"),
    (Mesh("pipeline", 4, "pp=2,dp_shard=2"), "ema"),
]
EPOCHS, COUNT, BATCH, DECAY = 2, 32, 8, 0.8


class Tuned(LongModel):
    """Its blocks are the backbone that begins frozen."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def trained(mesh: Mesh, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train with a callback; return the logged norms of gradients, and the weights where the rank has them."""
    callbacks: dict[str, Callable[[], Callback]] = {
        "ema": partial(EMAWeightAveraging, decay=DECAY),
        "swa": partial(StochasticWeightAveraging, 1e-2, swa_epoch_start=1),
        "finetuning": partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1),
    }
    norms: list[float] = []

    def note(trainer: Any, *_: Any) -> None:
        if "grad_norm" in trainer.logged_metrics and len(norms) < trainer.global_step:
            norms.append(float(trainer.logged_metrics["grad_norm"]))

    module = Tuned() if kind == "finetuning" else LongModel()
    window = 2 if mesh.strategy == "pipeline" else 1
    trainer = silent_trainer(
        strategy=mesh.strategy,
        devices=mesh.ranks,
        parallel=mesh.parallel,
        max_epochs=EPOCHS,
        accumulate_grad_batches=window,
        log_every_n_steps=1,
        callbacks=[callbacks[kind](), GradientNormMonitor(), LambdaCallback(on_train_batch_end=note)],
        verbose=False,
    )
    trainer.fit(module, loader(BATCH // window // trainer.fabric.resources.data_size, COUNT), loader(BATCH, 16))
    state = module.state_dict()
    return norms, {name: tensor.clone() for name, tensor in state.items() if not tensor.is_meta}


@cache
def by_hand(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train one process of plain torch, with torch's averages."""
    module = LongModel()
    data = rows(COUNT)
    average: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY) if kind == "ema" else None)
    frozen = set(module.blocks.parameters()) if kind == "finetuning" else set()
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each not in frozen], lr=module.lr)
    norms = []
    for epoch in range(EPOCHS):
        if epoch == 1 and frozen:
            optimizer.add_param_group({"params": list(module.blocks.parameters()), "lr": 0.1 * module.lr})
        for start in range(0, COUNT, BATCH):
            tokens, targets = (torch.stack(each) for each in zip(*data[start : start + BATCH], strict=True))
            module.zero_grad()
            module.loss((tokens, targets, torch.arange(LENGTH))).backward()
            gradients = [each.grad.flatten() for each in module.parameters() if each.grad is not None]
            norms.append(float(torch.cat(gradients).norm()))
            optimizer.step()
            if kind == "ema":
                average.update_parameters(module)
        if kind == "swa":
            average.update_parameters(module)
    kept = average.module if kind in ("ema", "swa") else module
    return norms, {name: tensor.clone() for name, tensor in kept.state_dict().items()}


@pytest.mark.parametrize(("mesh", "kind"), CASES, ids=str)
def test_weights_and_norms_are_those_of_plain_torch(mesh: Mesh, kind: str) -> None:
    norms, weights = run_on_ranks(mesh.ranks, trained, mesh, kind)[0]
    expected_norms, expected = by_hand(kind)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        # Adam turns the rounding of small gradients, which parts add up in another order, into steps of its own.
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=5e-6)
    if kind == "ema":
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=1e-5, atol=0)
