"""An evaluation covers every sample once and leaves the training as it was, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from logged import numbers
from models import silent_trainer
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader as rows, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torchmetrics import Accuracy

from phalanx import Callback, Trainer, TrainModule
from phalanx.loggers import Logger

CLASSES = 3


def samples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)


def batches(count: int, batch_size: int = 4, seed: int = 0, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count, seed)), batch_size=batch_size, **arguments)


class Stream(IterableDataset[Any]):
    """The same samples without a length."""

    def __init__(self, count: int) -> None:
        self.x, self.y = samples(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


class Classifier(TrainModule):
    """Logs the mean loss, accuracy by hand and torchmetrics' accuracy; notes the samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Linear(4, CLASSES)
            self.dropout = nn.Dropout(0.5)
        self.accuracy = Accuracy(task="multiclass", num_classes=CLASSES, average="micro")
        self.seen: list[float] = []

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = self.net(self.dropout(x))
        return nn.functional.cross_entropy(logits, y), logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits = self.loss(batch)
        right = (logits.argmax(1) == batch[1]).float()
        self.accuracy(logits, batch[1])
        self.log("loss", loss)
        self.log("by_hand", right.mean())
        self.log("right", right.sum(), reduce_fx="sum")
        self.log("most", loss, reduce_fx="max")
        self.log("accuracy", self.accuracy, add_dataloader_idx=False)
        self.seen += batch[0][:, 0].tolist()

    validation_step = test_step = evaluation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loaders_of(kind: str, count: int) -> Any:
    if kind == "map":
        return batches(count)
    if kind == "stream":
        return DataLoader(Stream(count), batch_size=4)
    if kind == "several":
        return [batches(count), batches(3, 2, seed=1), DataLoader(Stream(count), batch_size=3)]
    assert kind == "plain iterable"
    x, y = samples(count)
    return list(zip(x.split(4), y.split(4), strict=True))


def evaluated(ranks: int, stage: str, kind: str, count: int) -> Any:
    """Return the results, all metrics, and the samples seen."""
    module = Classifier()
    trainer = silent_trainer(devices=ranks)
    results = getattr(trainer, stage)(module, loaders_of(kind, count), verbose=False)
    return results, numbers(trainer.callback_metrics), numbers(trainer.logged_metrics), module.seen


@pytest.mark.parametrize(
    ("ranks", "count", "stage", "kind"),
    [
        *((3, count, "validate", kind) for count in (1, 7) for kind in ("map", "stream", "several", "plain iterable")),
        (2, 5, "test", "map"),
        # The rounding of long sums.
        (2, 1797, "validate", "map"),
        (3, 1797, "validate", "stream"),
    ],
)
def test_metrics_are_exactly_those_of_one_process(stage: str, ranks: int, kind: str, count: int) -> None:
    expected = evaluated(1, stage, kind, count)
    assert expected[1]
    found = run_on_ranks(ranks, evaluated, ranks, stage, kind, count)
    for results, callback, logged, _ in found:
        assert results == expected[0]
        assert callback == expected[1]
        assert logged == expected[2]
    assert sorted(x for *_, seen in found for x in seen) == sorted(expected[3])


def test_metrics_of_one_process_are_right() -> None:
    (results,), *_ = evaluated(1, "validate", "map", 22)
    module = Classifier().eval()
    x, y = samples(22)
    with torch.no_grad():
        logits = module.net(x)
    assert results["loss"] == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-6)
    right = (logits.argmax(1) == y).sum().item()
    assert results["right"] == right
    assert results["by_hand"] == results["accuracy"] == torch.tensor(right / 22).item()


def fitted(ranks: int, count: int) -> Any:
    module = Classifier()
    trainer = silent_trainer(devices=ranks, max_epochs=2, val_check_interval=2, log_every_n_steps=1)
    trainer.fit(module, batches(24, 12 // ranks), batches(count))
    return numbers(trainer.callback_metrics), module.training


def test_validation_within_a_fit_leaves_all_ranks_with_the_same_metrics() -> None:
    found = run_on_ranks(3, fitted, 3, 1)
    for metrics, training in found:
        # The value of a step is a rank's own.
        assert {k: v for k, v in metrics.items() if k != "train_loss_step"} == {
            k: v for k, v in found[0][0].items() if k != "train_loss_step"
        }
        assert {"loss", "accuracy", "train_loss_epoch"} <= set(metrics)
        assert training


# ---- what it leaves alone -----------------------------------------------------------------------------------------


class Modes(Classifier):
    """Notes the modes of its parts, and whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        self.frozen[1].eval()
        self.noted: list[tuple[str, list[bool], bool, bool]] = []

    def note(self, where: str) -> None:
        modes = [part.training for part in self.modules()]
        self.noted.append((where, modes, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate")


@pytest.mark.parametrize("inference_mode", [True, False])
def test_modes_are_restored_and_gradients_off(inference_mode: bool) -> None:
    module = Modes()
    before = [part.training for part in module.modules()]
    trainer = silent_trainer(max_epochs=2, val_check_interval=1, inference_mode=inference_mode)
    trainer.fit(module, batches(8), batches(4))
    assert {where for where, *_ in module.noted} == {"train", "validate"}
    for where, modes, gradients, inference in module.noted:
        if where == "train":
            assert (modes, gradients, inference) == (before, True, False)
        else:
            assert (any(modes), gradients, inference) == (False, False, inference_mode)
    assert [part.training for part in module.modules()] == before


class Raises(Modes):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        raise ZeroDivisionError


def test_an_error_leaves_modes_and_gradients_as_they_were() -> None:
    module = Raises()
    before = [part.training for part in module.modules()]
    with pytest.raises(ZeroDivisionError):
        silent_trainer().validate(module, batches(4), verbose=False)
    assert [part.training for part in module.modules()] == before
    assert torch.is_grad_enabled()


class OwnModes(Modes):
    """Switches modes itself."""

    def on_validation_model_eval(self) -> None:
        self.net.eval()

    def on_validation_model_train(self) -> None:
        self.net.train()


def test_a_module_may_switch_modes_itself() -> None:
    module = OwnModes()
    silent_trainer().validate(module, batches(4), verbose=False)
    ((_, modes, *_),) = module.noted
    assert any(modes)
    assert module.net.training


def trained_metrics(**settings: Any) -> tuple[dict[str, float], Tensor]:
    module = Classifier()
    trainer = silent_trainer(max_epochs=2, **settings)
    trainer.fit(module, batches(22), batches(7) if "val_check_interval" in settings else None)
    found = numbers(trainer.callback_metrics)
    return {name: value for name, value in found.items() if "train" in name}, module.net.weight.detach().clone()


def test_validation_in_mid_epoch_does_not_disturb_the_epochs_metrics() -> None:
    torch.manual_seed(0)
    metrics, weight = trained_metrics()
    torch.manual_seed(0)
    with_validation, other_weight = trained_metrics(val_check_interval=2, num_sanity_val_steps=2)
    assert with_validation == metrics
    assert torch.equal(weight, other_weight)


class Kept(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.append((step, dict(metrics)))


class AfterSanity(Callback):
    """Notes what is there when training begins."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.checked = False

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.checked = True

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.metrics = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]


class StepFigures(Classifier):
    """Logs values of single batches in validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().evaluation_step(batch, batch_idx)
        self.log("each", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        assert float(self.trainer.progress_bar_metrics["each_step"]) == batch_idx
        assert float(self.trainer.logged_metrics["each_step"]) == batch_idx
        # As in Lightning, where callbacks see no steps of an evaluation.
        assert "each_step" not in self.trainer.callback_metrics


def test_the_sanity_check_leaves_no_metrics_and_logs_nothing(tmp_path: Any) -> None:
    logger, watcher, module = Kept(), AfterSanity(), StepFigures()
    settings = {"max_epochs": 1, "limit_val_batches": 2, "default_root_dir": tmp_path}
    trainer = silent_trainer(logger=logger, callbacks=[watcher], **settings)
    trainer.fit(module, batches(8), batches(8))
    assert watcher.checked
    assert watcher.metrics == [{}, {}, {}]
    validations = [row for _, row in logger.rows if "loss" in row]
    assert len(validations) == 1


def test_step_values_of_an_evaluation_are_sent_to_the_loggers(tmp_path: Any) -> None:
    logger, module = Kept(), StepFigures()
    trainer = silent_trainer(max_epochs=2, logger=logger, num_sanity_val_steps=0, default_root_dir=tmp_path)
    trainer.fit(module, batches(8), batches(12))
    steps = [(step, row["each_step"]) for step, row in logger.rows if "each_step" in row]
    # The batches are counted over all validations.
    assert steps == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 0.0), (5, 1.0), (6, 2.0)]
    assert [row["each_epoch"] for _, row in logger.rows if "each_epoch" in row] == [1.0, 1.0]


# ---- arguments of steps and hooks, and loaders without batches -------------------------------------------------------


class Forwarding(Tiny):
    """Hands on whatever its steps and hooks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append(len(args))
        return super().validation_step(*args[:2], **kwargs)

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.given.append(1 + len(args))


class Watching(Callback):
    """Notes how many arguments follow the module."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.given.append(len(args))


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_index_of_a_loader_is_given_to_any_arguments_only_where_there_are_several(
    tmp_path: Path, loaders: int
) -> None:
    module, callback = Forwarding(), Watching()
    data = rows(4) if loaders == 1 else [rows(4), rows(4)]
    quiet_trainer(tmp_path, callback, max_epochs=1).validate(module, data)
    assert module.given == [1 + loaders, 2 + loaders] * loaders
    assert callback.given == [1 + loaders] * loaders


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def notes_of_empty(root: str, kind: str, devices: int) -> list[str]:
    """Return the notes of a fit of two epochs with one empty validation loader of two."""
    empty = DataLoader(Nothing()) if kind == "iterable" else rows(0)
    trainer = quiet_trainer(
        Path(root),
        [],
        max_epochs=2,
        devices=devices,
        strategy="ddp" if devices > 1 else "single",
        num_sanity_val_steps=2,
    )
    notes = capturing(trainer)
    trainer.fit(Tiny({"metric": [1.0]}), rows(), [rows(4), empty])
    return [note for note in notes if "has no batches" in note]


@pytest.mark.parametrize("kind", ["iterable", "map"])
def test_a_validation_loader_without_batches_is_reported_once(tmp_path: Path, kind: str) -> None:
    (note,) = notes_of_empty(str(tmp_path), kind, 1)
    assert note.startswith("val_dataloaders")
    assert len(run_on_ranks(2, notes_of_empty, str(tmp_path), kind, 2)[0]) == 1


def test_a_limit_of_zero_is_not_reported(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1, limit_test_batches=0, limit_val_batches=0)
    notes = capturing(trainer)
    trainer.fit(Tiny(), rows(), rows(4))
    assert not any("has no batches" in note for note in notes)


def test_samplers_of_validation_loaders_are_given_the_epoch(tmp_path: Path) -> None:
    class Recording(SequentialSampler):
        def __init__(self, data: Any) -> None:
            super().__init__(data)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = rows(8).dataset
    sampler = Recording(data)

    class Silent(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_tensor(batch[0])

    trainer = quiet_trainer(tmp_path, [], max_epochs=3)
    trainer.fit(Silent(), rows(), DataLoader(data, sampler=sampler))
    assert sampler.epochs == [0, 1, 2]
