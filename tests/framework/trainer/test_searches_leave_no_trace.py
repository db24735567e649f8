"""Searches for a learning rate and a batch size: module, generators and fits stay bit-identical under each strategy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from exhausted import Exhausted, strategy_of
from messages import refuses
from models import Regressor, equal, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import Callback
from phalanx.framework.core.errors import ConfigurationError


class Drawing(Exhausted):
    """Draws from each generator in a step, and keeps a running mean in a buffer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
        return super().training_step(batch, batch_idx) * (1 + noise)


def generators(own: torch.Generator) -> list[Any]:
    kind, keys, *rest = numpy.random.get_state()
    return [random.getstate(), kind, list(keys), rest, torch.get_rng_state().tolist(), own.get_state().tolist()]


def state_of(module: Drawing) -> list[Any]:
    tensors = [(name, tensor.clone()) for name, tensor in module.state_dict().items()]
    modes = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()]
    held = [(one.requires_grad, one.grad is None, type(one)) for one in module.parameters()]
    return [tensors, modes, held, module.calls, module.updates, sorted(vars(module))]


class Absent(Callback):
    """Takes no part in searches."""

    searching = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        assert not self.searching


def fitted(ranks: int, strategy: str, root: str, searches: bool) -> tuple[Tensor, list[Any], bool, int]:
    """Search, if asked to, and fit; return weights, generators, whether the searches left no trace, and a size."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(5)
    own = torch.Generator().manual_seed(8)
    module, size, unchanged = Drawing("forward", 0, 6, dropout=0.5, norm=True), 0, True
    callback = Absent()
    files: dict[str, Any] = {"logger": "csv", "enable_checkpointing": True, "default_root_dir": root}
    trainer = silent_trainer(max_epochs=1, devices=ranks, strategy=strategy_of(strategy), callbacks=callback, **files)
    data = DataLoader(regression_data(60), batch_size=4, shuffle=True, generator=own)
    if searches:
        before = [state_of(module), generators(own)]
        callback.searching = True
        size = trainer.find_batch_size(module, data, init_val=4).size
        rates = trainer.find_lr(module, data, num_training=6)
        assert len(rates.results["lr"]) == 6
        unchanged = equal([state_of(module), generators(own)], before) and trainer.global_step == 0
        callback.searching = False
        # Rank 0 alone writes.
        assert not trainer.is_global_zero or not [*Path(root).iterdir()]
    trainer.fit(module, data)
    return weights_of(module), generators(own), unchanged, size


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 3), ("fsdp", 2), ("zero2", 2)])
def test_a_fit_after_searches_is_that_of_a_fresh_program(strategy: str, ranks: int, tmp_path: Path) -> None:
    found = run_on_ranks(ranks, fitted, ranks, strategy, str(tmp_path), True, timeout=120)
    fresh = run_on_ranks(ranks, fitted, ranks, strategy, str(tmp_path), False, timeout=120)

    for (weights, numbers, unchanged, size), (expected, drawn, *_) in zip(found, fresh, strict=True):
        assert unchanged
        assert size == 6
        assert torch.equal(weights, expected)
        assert equal(numbers, drawn)


class Manual(Regressor):
    automatic_optimization = False


@pytest.mark.parametrize("name", ["find_lr", "find_batch_size"])
def test_an_iterator_and_manual_optimization_are_refused(name: str) -> None:
    search = getattr(silent_trainer(max_epochs=1, devices=1), name)
    data = regression_data(24)
    with refuses(ConfigurationError, name, "iterator"):
        search(Regressor(), iter([data.tensors]))
    with refuses(ConfigurationError, name, "automatic_optimization"):
        search(Manual(), DataLoader(data))
