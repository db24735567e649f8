"""Modules inside modules, stages inside stages, fits with the same callbacks, and copies of a Trainer."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import loader, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, Timer
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger


class Member(TrainModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net, self.seen = network(seed), set[tuple[int, int]]()

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.net(batch)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("member", loss, on_step=False, on_epoch=True)
        self.seen.add((self.current_epoch, self.global_step))
        assert self.trainer.max_epochs == 2
        return loss * (1.0 + self.current_epoch)


class Middle(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([Member(1), Member(2)])


class Whole(TrainModule):
    """Three deep, in a list and a dict, and with a part that is added at the start of the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"middle": Middle()})

    def configure_model(self) -> None:
        if "late" not in self.parts:
            self.parts["late"] = Member(3)

    @property
    def all_members(self) -> list[Member]:
        return [part for part in self.modules() if isinstance(part, Member)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum((one.training_step(batch, batch_idx) for one in self.all_members), torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def whole_fit() -> tuple[Tensor, float, list[set[tuple[int, int]]]]:
    module, trainer = Whole(), silent_trainer(devices=2, strategy="fsdp", max_epochs=2)
    trainer.fit(module, loader(16, batch_size=2))
    return weights_of(module), float(trainer.callback_metrics["member"]), [one.seen for one in module.all_members]


def by_hand() -> Tensor:
    module, data = Whole(), regression_data(16)
    module.configure_model()
    optimizer = module.configure_optimizers()
    for epoch in range(2):
        for inputs, targets in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            for one in module.all_members:
                ((1 + epoch) * nn.functional.mse_loss(one.net(inputs), targets)).backward()
            optimizer.step()
    return weights_of(module)


def test_parts_read_and_log_as_the_whole() -> None:
    module, trainer = Whole(), silent_trainer(devices=1, max_epochs=2)
    trainer.fit(module, loader(16))
    assert torch.equal(weights_of(module), by_hand())
    assert all(one.seen == {(step // 4, step) for step in range(8)} for one in module.all_members)
    member = module.all_members[0]
    assert member.trainer is trainer
    assert member.global_step == 8
    with refuses(ConfigurationError, "belongs to no run"):
        _ = copy.deepcopy(member).trainer
    alone = silent_trainer(devices=1, max_epochs=1, limit_train_batches=1)
    alone.validate(Validated(member), loader(4))
    assert member.trainer is alone


def test_parts_on_two_ranks() -> None:
    epochs = {(step // 4, step) for step in range(8)}
    results = run_on_ranks(2, whole_fit)
    # Rank 0 alone has the weights after the fit.
    torch.testing.assert_close(results[0][0], by_hand())
    for _, logged, seen in results:
        assert logged > 0
        assert all(one == epochs for one in seen)


class Validated(TrainModule):
    def __init__(self, part: nn.Module | None = None, score: float = 0.0) -> None:
        super().__init__()
        self.net = network() if part is None else part
        self.register_buffer("score", torch.tensor(score))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.score)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.net.parameters(), lr=0.1)


class Calls(Callback):
    def __init__(self, hook: str, action: Callable[[Any, Any], Any]) -> None:
        setattr(self, hook, lambda trainer, module, *_: action(trainer, module))


@pytest.mark.parametrize("hook", ["setup", "on_validation_end", "on_train_end"])
def test_a_stage_within_a_stage_is_refused(hook: str) -> None:
    callback = Calls(hook, lambda trainer, module: trainer.validate(module, loader(4)))
    trainer, module = silent_trainer(devices=1, max_epochs=1, callbacks=callback), Validated()
    with refuses(ConfigurationError, "Trainer.validate", "Trainer.fit", "one stage at a time"):
        trainer.fit(module, loader(8), loader(4))
    # It is free again.
    trainer.callbacks.clear()
    assert trainer.validate(module, loader(4)) == [{"score": 0.0}]


def test_a_module_in_use_is_refused() -> None:
    other = silent_trainer(devices=1)
    callback = Calls("on_train_start", lambda trainer, module: other.validate(module, loader(4)))
    with refuses(ConfigurationError, "Validated", "Trainer.fit", "copy.deepcopy(module)"):
        silent_trainer(devices=1, max_epochs=1, callbacks=callback).fit(Validated(), loader(8))


def test_a_fit_in_a_thread() -> None:
    trainer, module = silent_trainer(devices=1, max_epochs=2), Validated()
    thread = threading.Thread(target=trainer.fit, args=(module, loader(8)))
    thread.start()
    thread.join()
    assert trainer.global_step == 4
    assert module.trainer is trainer


def test_callbacks_begin_each_fit_anew(tmp_path: Path) -> None:
    saver, stopper, timer = ModelCheckpoint(monitor="score"), EarlyStopping("score", patience=1), Timer("00:00:10:00")
    for fold in (1.0, 2.0):
        trainer = Trainer(
            max_epochs=5, accelerator="cpu", devices=1, default_root_dir=tmp_path, logger=False, verbose=False,
            callbacks=[saver, stopper, timer], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Validated(score=fold), loader(8), loader(4))
        assert trainer.current_epoch == 2
        assert stopper.best_score == fold
        assert timer.time_elapsed() < 600
        assert [float(score) for score in saver.best_k_models.values()] == [fold]
        assert trainer.test(Validated(), loader(4), ckpt_path="best") == [{"score": fold}]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_of_a_trainer(tmp_path: Path, copied: Callable[[Any], Any]) -> None:
    loggers = [CSVLogger(), TensorBoardLogger(), JSONLinesLogger()]
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, logger=loggers, verbose=False,
        callbacks=[ProgressBar(), ModelCheckpoint(monitor="score")], enable_model_summary=False,
    )  # fmt: skip
    before = copied(trainer)
    trainer.fit(Validated(score=3.0), loader(8), loader(4))
    after = copied(trainer)
    assert (after.global_step, after.callback_metrics, after.log_dir) == (2, trainer.callback_metrics, trainer.log_dir)
    assert isinstance(after.checkpoint_callback, ModelCheckpoint)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    assert after.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path
    assert after.validate(dataloaders=loader(4)) == [{"score": 3.0}]
    for other, version in ((before, 1), (after, 2)):
        other.fit(Validated(), loader(8), loader(4))
        assert other.log_dir is not None
        assert other.log_dir.endswith(f"version_{version}")
        assert Path(other.log_dir, "metrics.csv").is_file()
    assert trainer.log_dir is not None
    assert trainer.log_dir.endswith("version_0")
