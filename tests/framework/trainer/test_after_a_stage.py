"""Attributes of module and Trainer after a stage and before the first one, and the objects they release."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer, TrainModule
from phalanx.framework.core.errors import ConfigurationError


class Evaluated(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_a_trainer_before_its_first_stage() -> None:
    trainer = silent_trainer(devices=1, max_epochs=1)
    assert trainer.model is trainer.lightning_module is None
    assert trainer.train_dataloader is trainer.val_dataloaders is trainer.test_dataloaders is None
    assert trainer.predict_dataloaders is trainer.ckpt_path is None
    assert trainer.num_training_batches == math.inf
    assert trainer.num_val_batches == trainer.num_sanity_val_batches == trainer.num_test_batches == []
    assert trainer.num_predict_batches == []
    assert (trainer.optimizers, trainer.lr_scheduler_configs) == ([], [])
    assert not trainer.evaluating
    with refuses(ConfigurationError, "estimated_stepping_batches", "configure_optimizers"):
        _ = trainer.estimated_stepping_batches


def test_a_module_before_its_first_stage() -> None:
    module = Evaluated()
    assert (module.logger, module.loggers, module.local_rank) == (None, [], 0)
    with refuses(ConfigurationError, "Evaluated", "module.trainer"):
        _ = module.trainer


def test_module_and_trainer_after_a_fit(tmp_path: Path) -> None:
    trainer = silent_trainer(
        devices=1, max_epochs=2, accumulate_grad_batches=2, default_root_dir=tmp_path, logger="csv",
        num_sanity_val_steps=1,
    )  # fmt: skip
    module, train = Evaluated(), loader(16)
    val: list[Any] = [loader(8), loader(16)]
    trainer.fit(module, train, val[0])
    assert module.trainer is trainer
    assert module.logger is trainer.logger is not None
    assert module.optimizers() is trainer.optimizers[0]
    assert module.lr_schedulers() is trainer.lr_scheduler_configs[0].scheduler
    assert (module.global_step, module.current_epoch, module.global_rank) == (4, 2, 0)
    assert trainer.model is module
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val[0]
    assert (trainer.num_training_batches, trainer.num_val_batches) == (4, [2])
    assert (trainer.num_sanity_val_batches, trainer.estimated_stepping_batches) == ([1], 4)
    trainer.validate(module, val, verbose=False)
    assert trainer.val_dataloaders == val
    assert trainer.num_val_batches == [2, 4]
    trainer.test(module, val[0], verbose=False)
    assert trainer.test_dataloaders is val[0]
    assert trainer.num_test_batches == [2]
    # The evaluations leave those of the fit.
    assert trainer.train_dataloader is train
    assert module.optimizers() is trainer.optimizers[0]


def test_numbers_of_batches_within_an_evaluation() -> None:
    seen = []

    class Reading(Callback):
        def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append((trainer.num_val_batches, trainer.evaluating))

    silent_trainer(devices=1, callbacks=[Reading()]).validate(Evaluated(), loader(16), verbose=False)
    assert seen == [([4], True)]


def test_the_path_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")

    trainer = silent_trainer(devices=1, max_epochs=1, callbacks=[Saving()], default_root_dir=tmp_path)
    trainer.fit(Evaluated(), loader(8))
    assert trainer.ckpt_path is None
    trainer.test(Evaluated(), loader(8), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert trainer.ckpt_path == str(tmp_path / "end.ckpt")
    trainer.test(Evaluated(), loader(8), verbose=False)
    assert trainer.ckpt_path is None


def test_the_run_ends_with_the_stage(tmp_path: Path) -> None:
    """The run and its sources, which hold iterators and workers, are free although module and Trainer are in use."""
    refs: list[weakref.ref[Any]] = []

    class Watching(Callback):
        def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
            refs[:] = map(weakref.ref, (trainer.run, trainer.loop, trainer.loop.windows.source))

    data = DataLoader(regression_data(8), 4, num_workers=1, persistent_workers=True)
    trainer = silent_trainer(devices=1, max_epochs=1, callbacks=[Watching()], default_root_dir=tmp_path)
    module = Evaluated()
    trainer.fit(module, data, loader(8))
    assert module.trainer.train_dataloader is data
    # At once, since torch stops the workers of an iterator only if its last reference frees it.
    assert refs.pop()() is None
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_copies_do_not_hold_the_trainer() -> None:
    module = Evaluated()
    silent_trainer(devices=1, max_epochs=1).fit(module, loader(8))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with refuses(ConfigurationError, "Evaluated", "module.trainer"):
            _ = other.trainer


def test_a_trainer_set_in_a_test() -> None:
    module, trainer = Evaluated(), silent_trainer(devices=1, max_epochs=1)
    module.trainer = trainer
    assert module.trainer is trainer
    assert (module.global_step, module.optimizers(), module.lr_schedulers()) == (0, [], None)
    loss = module.training_step(next(iter(loader(8))), 0)
    assert isinstance(loss, Tensor)
    module.manual_backward(loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norm = module.clip_gradients(optimizer, 1e-3)
    assert norm is not None
    assert norm > 1e-3
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) <= 1e-3
    module.clip_gradients(optimizer, 1e-5, "value")
    assert all(gradient.abs().max() <= 1e-5 for gradient in gradients)
    module.trainer = None
    with refuses(ConfigurationError, "Evaluated", "module.trainer"):
        _ = module.trainer
    module.trainer = trainer
    trainer.fit(module, loader(8))
    assert module.trainer is trainer


def test_a_trainer_is_not_replaced_during_a_run() -> None:
    class Replacing(Evaluated):
        def on_train_start(self) -> None:
            self.trainer = silent_trainer(devices=1)

    with refuses(ConfigurationError, "module.trainer"):
        silent_trainer(devices=1, max_epochs=1).fit(Replacing(), loader(8))


def ended(strategy: str) -> tuple[int, int, list[int | float], int]:
    trainer = silent_trainer(devices=2, max_epochs=1, strategy=strategy)
    module = Evaluated()
    trainer.fit(module, loader(16), loader(16))
    return module.global_step, module.global_rank, trainer.num_val_batches, len(trainer.optimizers)


@pytest.mark.parametrize(("strategy", "optimizers"), [("ddp", 1), ("fsdp", 0)])
def test_after_a_fit_on_several_ranks(strategy: str, optimizers: int) -> None:
    assert run_on_ranks(2, ended, strategy) == [(2, rank, [2], optimizers) for rank in range(2)]
