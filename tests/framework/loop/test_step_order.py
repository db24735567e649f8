"""The order of stops, validations, schedulers with a metric, and notes about missing metrics between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import says
from models import ByHand, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from phalanx import TrainModule
from phalanx.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from phalanx.framework.core.errors import MetricError


def data(rows: int = 24, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))), batch_size)


class Plain(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.begun, self.stop_at = nn.Linear(3, 1), 0, 0
        self.validated_after: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun += 1

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.stop_at:
            self.trainer.should_stop = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", float(len(self.validated_after)))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_after.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(ByHand, Plain):
    """The same, by manual optimization."""


def stopped(kind: type[Plain], strategy: str, min_steps: int | None) -> tuple[int, int]:
    module = kind()
    module.stop_at = 3
    trainer = silent_trainer(devices=2, strategy=strategy, max_epochs=1, min_steps=min_steps)
    trainer.fit(module, data())
    return trainer.global_step, module.begun


@pytest.mark.parametrize(
    ("kind", "strategy", "min_steps", "expected"),
    [(Plain, "fsdp", None, (3, 3)), (Manual, "ddp", None, (3, 4)), (Plain, "ddp", 5, (5, 5))],
)
def test_a_stop_that_all_ranks_request_comes_before_the_next_step(
    kind: type[Plain], strategy: str, min_steps: int | None, expected: tuple[int, int]
) -> None:
    assert run_on_ranks(2, stopped, kind, strategy, min_steps) == [expected] * 2


class Recording(torch.optim.lr_scheduler.ReduceLROnPlateau):
    used: list[float]

    def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]
        self.__dict__.setdefault("used", []).append(float(metrics))
        super().step(metrics, epoch)


class Plateau(Plain):
    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency = frequency

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        self.plateau = Recording(sgd, patience=0)
        config = {"scheduler": self.plateau, "monitor": "val/loss", "interval": "step", "frequency": self.frequency}
        return {"optimizer": sgd, "lr_scheduler": config}


@pytest.mark.parametrize(
    ("interval", "frequency", "used"), [(6, 12, [1, 3]), (6, 6, [0, 1, 2, 3]), (1.0, 12, [0, 1]), (6, 4, None)]
)
def test_a_scheduler_reads_the_validation_of_its_step(interval: Any, frequency: int, used: Any) -> None:
    module = Plateau(frequency)
    trainer = silent_trainer(max_epochs=2, val_check_interval=interval)
    if used is None:
        with pytest.raises(MetricError, match="val/loss"):
            trainer.fit(module, data(), data(4))
        return
    trainer.fit(module, data(), data(4))
    assert module.plateau.used == used


def test_a_resumed_fit_advances_a_scheduler_once_for_a_step(tmp_path: Path) -> None:
    rates = []
    for first in (None, 6, 12):
        module = Plateau(6)
        if first is not None:
            saving = ModelCheckpoint(tmp_path / str(first), every_n_train_steps=first, save_top_k=-1)
            settings = {"max_steps": first, "callbacks": [saving], "enable_checkpointing": True}
            silent_trainer(max_epochs=2, val_check_interval=6, **settings).fit(module, data(), data(4))
            module = Plateau(6)
        path = None if first is None else next((tmp_path / str(first)).glob("*.ckpt"))
        silent_trainer(max_epochs=2, val_check_interval=6).fit(module, data(), data(4), ckpt_path=path)
        rates.append([module.plateau.state_dict()["best"], module.optimizers().param_groups[0]["lr"]])
    assert rates[1:] == [rates[0]] * 2


class Stream(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 124

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        return iter(torch.randn(124, 1, 3)[worker.id :: worker.num_workers])


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    return [line for line in "".join(capsys.readouterr()).splitlines() if any(word in line for word in words)]


def test_data_that_ends_before_a_validation_that_its_length_promised(capsys: pytest.CaptureFixture[str]) -> None:
    module = Plain()
    loader = DataLoader(Stream(), batch_size=4, num_workers=2, drop_last=True)
    silent_trainer(max_epochs=2, val_check_interval=31, verbose=True).fit(module, loader, data(4))
    assert module.validated_after == [30, 60]
    says(lines(capsys, "not reached"), "31 batches")


@pytest.mark.parametrize("monitor", ["train/loss", "nothing"])
def test_a_metric_that_nothing_logs_is_reported_at_the_first_step(
    monitor: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, monitor=monitor)
    trainer = silent_trainer(max_epochs=1, callbacks=[saving], enable_checkpointing=True, verbose=True)
    if monitor == "train/loss":
        trainer.fit(Plain(), data())
        says(lines(capsys, "validation_step", "needs the metric"), "no validation loader")
        return
    with pytest.raises(MetricError, match=r"was not logged\. Logged"):
        trainer.fit(Plain(), data())
    said = lines(capsys, "validation_step", "needs the metric")
    assert len(said) == 2
    says(said[1], repr(monitor))


def test_a_metric_that_neither_the_sanity_check_nor_a_step_logs(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = EarlyStopping("accuracy", strict=True)
    with pytest.raises(MetricError, match="accuracy"):
        silent_trainer(max_epochs=1, callbacks=[stopping], verbose=True, num_sanity_val_steps=1).fit(
            Plain(), data(), data(4)
        )
    says(lines(capsys, "mode", "needs the metric"), "accuracy")


def test_the_recorded_learning_rate_is_the_one_that_was_used(tmp_path: Path) -> None:
    class Decaying(Plain):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.parameters(), lr=1.0)
            decay = torch.optim.lr_scheduler.LinearLR(sgd, 1.0, 0.0, 12)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    trainer = silent_trainer(
        max_epochs=1, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")], logger=True,
        default_root_dir=tmp_path, enable_report=True,
    )  # fmt: skip
    trainer.fit(Decaying(), data())
    curves = trainer.report().data["curves"]
    assert curves["phalanx/learning_rate"]["value"] == curves["lr-SGD"]["value"]
    assert curves["lr-SGD"]["value"][:2] == pytest.approx([1.0, 11 / 12])


class Counted(Plain):
    """Counts its backward passes in a hook, for which the gradients of each are reduced."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.calls = 0

    def batch_weight(self, batch: Any) -> int:
        return len(batch[0])

    def on_after_backward(self) -> None:
        self.calls += 1


def counted() -> tuple[Tensor, int]:
    module = Counted()
    silent_trainer(devices=2, strategy="ddp", max_epochs=1, accumulate_grad_batches=3).fit(module, data(9))
    return weights_of(module), module.calls


def test_hooks_of_each_backward_pass_of_a_rank_with_fewer_micro_batches() -> None:
    module = Counted()
    optimizer = module.configure_optimizers()
    (batch,) = data(9, batch_size=9)
    module.net(batch[0]).square().mean().backward()
    optimizer.step()
    (first, calls), (second, others) = run_on_ranks(2, counted)
    torch.testing.assert_close(first, weights_of(module), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert (calls, others) == (3, 2)


class Normed(TrainModule):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            norm = nn.BatchNorm2d(2, momentum=momentum)
            self.net = nn.Sequential(nn.Conv2d(1, 2, 1), norm, nn.Flatten(), nn.Linear(8, 1))

    def batch_weight(self, batch: Any) -> int:
        return len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def normed(strategy: str, momentum: float | None, accumulate: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(13, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    module = Normed(momentum)
    trainer = silent_trainer(
        devices=2, strategy=strategy, max_epochs=1, sync_batchnorm=True, accumulate_grad_batches=accumulate
    )
    trainer.fit(module, DataLoader(TensorDataset(images), batch_size=2))
    full = module.state_dict()
    return weights_of(module), torch.stack([full["net.1.running_mean"], full["net.1.running_var"]])


@pytest.mark.parametrize(("momentum", "accumulate"), [(0.1, 1), (None, 1), (0.1, 4)])
def test_a_rank_without_a_batch_is_not_in_the_statistics_of_batch_norm(momentum: float | None, accumulate: int) -> None:
    images = torch.randn(13, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    module = Normed(momentum)
    optimizer = module.configure_optimizers()
    for window in images.split(4 * accumulate):
        optimizer.zero_grad()
        for batch in window.split(4):
            (module.net(batch).square().mean() * len(batch) / len(window)).backward()
        optimizer.step()
    full = module.state_dict()
    wanted = torch.stack([full["net.1.running_mean"], full["net.1.running_var"]])
    for weights, statistics in run_on_ranks(2, normed, "ddp", momentum, accumulate):
        torch.testing.assert_close(weights, weights_of(module), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(statistics, wanted)
