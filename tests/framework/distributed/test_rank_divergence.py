"""Things that ranks could do differently, and then hang, or train different models in silence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.callbacks import Callback, EarlyStopping, ModelCheckpoint
from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError


def fitted(module: TrainModule, **arguments: Any) -> tuple[int, Tensor]:
    """Train on two ranks; return the updates applied and the weights."""
    data = arguments.pop("data", None) or loader(64, 4)
    trainer = silent_trainer(**{"devices": 2, "max_epochs": 1, **arguments})
    trainer.fit(module, data)
    return trainer.global_step, weights_of(module)


def same(results: list[tuple[int, Tensor]]) -> int:
    """Assert that all ranks came to the same weights; return the updates applied."""
    for steps, weights in results[1:]:
        assert steps == results[0][0]
        assert torch.equal(weights, results[0][1])
    return results[0][0]


class NoneWithBuffers(Regressor):
    """Has buffers, which DDP broadcasts before a forward, and returns None on one rank now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx % 3 == 1 else loss


class WeightlessOrNone(Regressor):
    """Rank 0 has losses that weigh nothing, one of them NaN; rank 1 has none at all."""

    def batch_weight(self, batch: Any) -> int:
        return 0 if self.global_rank == 0 else 5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 else loss * math.nan


class OneElement(Regressor):
    """Has losses with a dim."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).reshape(1)


class Plateau(Regressor):
    """Has a schedule that follows a value of each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}


class Toggled(Regressor):
    """Steps an optimizer while another one is toggled."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        first.zero_grad()
        second.zero_grad()
        with first.toggle_model():
            self.manual_backward(loss)
        self.toggle_optimizer(second)
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        first.step()
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 3)]


class StopTakenBack(Regressor):
    """Wishes to stop on both ranks, of which one takes that back."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.should_stop = True
        if batch_idx == 3 and self.global_rank == 1:
            self.trainer.should_stop = False


class EndsEpoch(Regressor):
    """Ends the epoch before its second batch, between two validations."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def val_dataloader(self) -> Any:
        return loader(8)


def trained(kind: type[Regressor], settings: dict[str, Any]) -> tuple[int, Tensor]:
    return fitted(kind(), **settings)


@pytest.mark.parametrize(
    ("kind", "settings", "steps"),
    [
        (NoneWithBuffers, {"accumulate_grad_batches": 2}, 4),
        (WeightlessOrNone, {}, 0),
        (OneElement, {}, 8),
        (Plateau, {"max_epochs": 6}, 48),
        (Toggled, {}, 8),
        (StopTakenBack, {"min_steps": 6}, 8),
        (EndsEpoch, {"val_check_interval": 1}, 1),
    ],
)
def test_both_ranks_make_the_same_steps(kind: type[Regressor], settings: dict[str, Any], steps: int) -> None:
    assert same(run_on_ranks(2, trained, kind, settings)) == steps


class ByClosure(Regressor):
    automatic_optimization = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_closure(ranks: int, kind: str) -> tuple[int, Tensor]:
    # LBFGS makes much of the last digits.
    return fitted(ByClosure(kind), devices=ranks, data=loader(64, 8 // ranks), precision="64-true")


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_a_closure_sees_the_gradient_of_all_ranks(kind: str) -> None:
    steps, expected = by_closure(1, kind)
    results = run_on_ranks(2, by_closure, 2, kind)
    assert same(results) == steps
    torch.testing.assert_close(results[0][1], expected, rtol=1e-5, atol=1e-6)


def test_a_closure_is_refused_where_gradients_are_scaled() -> None:
    with refuses(ConfigurationError, "closure"):
        fitted(ByClosure("sgd"), devices=1, precision="16-mixed")


class TwoScales(TrainModule):
    """Two optimizers under one loss scale, of which the first overflows in the first batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward((self.a * (torch.inf if batch_idx == 0 else 1.0)).sum())
        self.manual_backward(self.b.sum())
        first.step()
        second.step()
        self.seen.append(self.b.grad.item())  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in (self.a, self.b)]


def test_an_overflow_of_one_optimizer_leaves_the_others_gradients_alone() -> None:
    module = TwoScales()
    trainer = silent_trainer(max_steps=4, precision="16-mixed", nonfinite="ignore")
    trainer.fit(module, loader(64, 4))
    assert module.seen == [1.0] * 4
    assert trainer.fabric.scaler is not None
    assert trainer.fabric.scaler.scale == 2.0**15


def own_shards(root: str) -> tuple[bool, int, int]:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(f"{root}/five.ckpt")

    def data() -> DataLoader[Any]:
        return DataLoader(regression_data(28 if torch.distributed.get_rank() else 12), batch_size=4)

    settings: dict[str, Any] = {"devices": 2, "max_epochs": 1, "use_distributed_sampler": False}
    whole, resumed = Regressor(), Regressor()
    first = silent_trainer(callbacks=[Saves()], **settings)
    first.fit(whole, data())
    second = silent_trainer(**settings)
    second.fit(resumed, data(), ckpt_path=f"{root}/five.ckpt")
    return torch.equal(weights_of(whole), weights_of(resumed)), first.global_step, second.global_step


def test_ranks_with_loaders_of_their_own_length_save_and_resume(tmp_path: Path) -> None:
    assert run_on_ranks(2, own_shards, str(tmp_path)) == [(True, 7, 7)] * 2


# ---- what is saved, and when ---------------------------------------------------------------------------------------


class SavesInWindow(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint("never.ckpt")


def test_a_save_within_a_window_is_refused() -> None:
    with refuses(ConfigurationError, "save_checkpoint"):
        fitted(Regressor(), devices=1, accumulate_grad_batches=2, callbacks=[SavesInWindow()])


class Scored(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.current_epoch))


def test_an_epoch_cut_short_is_not_checked_for_divergence(tmp_path: Path) -> None:
    stopper = EarlyStopping("val", patience=1)
    saver = ModelCheckpoint(tmp_path, monitor="val", save_last=True)
    trainer = silent_trainer(
        max_steps=12, callbacks=[stopper, saver], enable_checkpointing=True, default_root_dir=tmp_path
    )
    trainer.fit(Scored(), loader(32), loader(8))
    # Eight steps an epoch: one is whole, the second has four.
    assert stopper.wait_count == 0
    assert [Path(path).name for path in saver.best_k_models] == ["epoch=0-step=8.ckpt"]
    assert open_checkpoint(saver.last_model_path).document["progress"]["global_step"] == 12
