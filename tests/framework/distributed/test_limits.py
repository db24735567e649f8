"""Every limit: how many batches, epochs and steps, when to validate, what to try first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.framework.core.errors import ConfigurationError


class Counting(Regressor):
    """Counts its batches by stage, and notes after how many training batches it validates."""

    def __init__(self) -> None:
        super().__init__(lr=0.001)
        self.seen = {"train": 0, "validate": 0, "test": 0, "predict": 0}
        self.validated_after: list[int] = []
        self.rows: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["train"] += 1
        self.rows.append(batch[0][0, 0].item())
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated_after.append(self.seen["train"])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["validate"] += 1

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["test"] += 1

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.seen["predict"] += 1
        first: Tensor = batch[0][:, 0]
        return first


class Unsized(IterableDataset[Any]):
    """Ten samples of a length that nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        data = regression_data(10)
        return (data[index] for index in range(10))


def unsized() -> DataLoader[Any]:
    return DataLoader(Unsized(), batch_size=2)


def fitted(train: Any = None, val: Any = None, **arguments: Any) -> tuple[Counting, Trainer]:
    """Fit on 10 batches, with 4 for validation, of one epoch unless told otherwise."""
    module = Counting()
    trainer = silent_trainer(**{"devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, **arguments})
    trainer.fit(module, loader(40) if train is None else train, loader(16) if val is None else val)
    return module, trainer


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (3, 3)])
def test_a_trial_run(given: Any, batches: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = Counting()
    trainer = Trainer(
        accelerator="cpu", fast_dev_run=given, max_epochs=7, check_val_every_n_epoch=5, enable_progress_bar=False
    )
    trainer.fit(module, loader(40), loader(40))
    trainer.test(module, loader(40), verbose=False)
    assert module.seen == {"train": batches, "validate": batches, "test": batches, "predict": 0}
    assert trainer.fast_dev_run
    assert (trainer.global_step, trainer.current_epoch) == (batches, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("limit", "train", "validate"), [(3, 3, 3), (100, 10, 4), (0.5, 5, 2), (0.01, 1, 1), (1.0, 10, 4), (1, 1, 1)]
)
def test_limits_of_batches(limit: Any, train: int, validate: int) -> None:
    module, trainer = fitted(limit_train_batches=limit, limit_val_batches=limit)
    assert (module.seen["train"], module.seen["validate"]) == (train, validate)
    assert trainer.current_epoch == 1


@pytest.mark.parametrize(
    ("stage", "limit", "batches"),
    [("validate", 2, 2), ("validate", 0.0, 0), ("test", 0.5, 2), ("test", 0, 0), ("predict", 0, 0), ("predict", 9, 4)],
)
def test_limits_of_evaluations(stage: str, limit: Any, batches: int) -> None:
    module = Counting()
    name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
    getattr(silent_trainer(devices=1, **{name: limit}), stage)(module, loader(16))
    assert module.seen[stage] == batches


def test_no_training_and_no_validation() -> None:
    module, trainer = fitted(limit_train_batches=0)
    assert (module.seen["train"], trainer.global_step) == (0, 0)
    module, trainer = fitted(limit_val_batches=0)
    assert (module.seen["train"], module.seen["validate"]) == (10, 0)
    assert not module.validated_after


def test_a_fraction_needs_a_length() -> None:
    with refuses(ConfigurationError, "limit_train_batches=0.5"):
        fitted(unsized(), limit_train_batches=0.5)
    with refuses(ConfigurationError, "val_check_interval=0.5"):
        fitted(unsized(), val_check_interval=0.5)


def test_overfitting_uses_the_same_first_batches() -> None:
    module, _ = fitted(loader(40, shuffle=True), overfit_batches=2, max_epochs=3)
    first = [regression_data(40)[index][0][0].item() for index in (0, 4)]
    assert module.rows == first * 3
    assert module.seen["validate"] == 3 * 2


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        ({}, [10, 20]),
        ({"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ({"val_check_interval": 4}, [4, 8, 14, 18]),
        ({"val_check_interval": 1.0}, [10, 20]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12, 16, 20]),
        ({"val_check_interval": 13, "check_val_every_n_epoch": None}, [13]),
        ({"check_val_every_n_epoch": 2}, [20]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 5}, [15, 20]),
        ({"val_check_interval": timedelta(hours=1)}, []),
        ({"max_steps": 7, "max_epochs": -1, "val_check_interval": 3}, [3, 6]),
        ({"num_sanity_val_steps": 1}, [0, 10, 20]),
        ({"num_sanity_val_steps": -1, "limit_val_batches": 1}, [0, 10, 20]),
    ],
    ids=str,
)
def test_when_validation_runs(arguments: dict[str, Any], after: list[int]) -> None:
    module, _ = fitted(**{"max_epochs": 2, **arguments})
    assert module.validated_after == after


def test_validation_by_time() -> None:
    module, _ = fitted(val_check_interval=timedelta(microseconds=1))
    # Asked for after each batch, and agreed on at the next boundary.
    assert len(module.validated_after) >= 4


def test_an_interval_longer_than_an_epoch() -> None:
    with refuses(ConfigurationError, "val_check_interval=11"):
        fitted(val_check_interval=11)


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs"),
    [
        ({"max_epochs": 2}, 20, 2),
        ({"max_epochs": 3, "max_steps": 25}, 25, 2),
        ({"max_epochs": -1, "max_steps": 25}, 25, 2),
        ({"max_epochs": None, "max_steps": 10}, 10, 1),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 6, 2),
        ({"max_epochs": 5, "max_steps": 4, "accumulate_grad_batches": 4}, 4, 1),
    ],
    ids=str,
)
def test_when_training_ends(arguments: dict[str, Any], steps: int, epochs: int) -> None:
    _, trainer = fitted(**arguments)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


class Stopping(Counting):
    """Asks for a stop with its third batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.seen["train"] == 3:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({}, 3), ({"min_steps": 5}, 5), ({"min_epochs": 2}, 20), ({"min_steps": 12, "min_epochs": 1}, 12)],
    ids=str,
)
def test_a_stop_waits_for_the_least_that_was_asked_for(arguments: dict[str, Any], steps: int) -> None:
    module = Stopping()
    trainer = silent_trainer(devices=1, max_epochs=3, **arguments)
    trainer.fit(module, loader(40))
    assert trainer.global_step == steps


def test_time_is_a_limit() -> None:
    _, trainer = fitted(max_time=timedelta(microseconds=1), max_epochs=None)
    assert trainer.global_step <= 2
    assert trainer.max_epochs is None


@pytest.mark.parametrize(
    ("reload", "check", "train", "val"),
    [
        (0, 1, [0], [0]),
        (1, 1, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        (2, 1, [0, 2, 4], [0, 2, 4]),
        (2, 3, [0, 2, 4], [0, 2, 5]),
    ],
)
def test_loaders_are_requested_again_before_they_are_needed(
    reload: int, check: int, train: list[int], val: list[int]
) -> None:
    asked: dict[str, list[int]] = {"train": [], "val": []}

    class Own(Counting):
        def train_dataloader(self) -> Any:
            asked["train"].append(self.current_epoch)
            return loader(8)

        def val_dataloader(self) -> Any:
            asked["val"].append(self.current_epoch)
            return loader(4)

    settings = {"reload_dataloaders_every_n_epochs": reload, "check_val_every_n_epoch": check}
    silent_trainer(devices=1, max_epochs=6, num_sanity_val_steps=0, **settings).fit(Own())
    assert asked == {"train": train, "val": val}


@pytest.mark.parametrize("limit", [None, 3])
def test_a_loader_without_length(limit: int | None) -> None:
    module, trainer = fitted(unsized(), unsized(), max_epochs=2, limit_train_batches=limit, accumulate_grad_batches=2)
    each = limit or 5
    assert module.seen["train"] == 2 * each
    assert trainer.global_step == 2 * -(-each // 2)
    assert module.validated_after == [each, 2 * each]


# ---- switches -----------------------------------------------------------------------------------------------------


def test_barebones_leaves_out_what_costs_time() -> None:
    module = Counting()
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1)
    trainer.fit(module, loader(40), loader(16))
    assert (trainer.callbacks, trainer.loggers, module.validated_after) == ([], [], [10])


@pytest.mark.filterwarnings("ignore:Error detected")
def test_an_anomaly_names_the_operation() -> None:
    class Broken(Counting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            zero = (self(batch[0]) * 0.0).sum()
            return torch.where(zero == 0, zero, torch.sqrt(zero))

    assert not torch.is_anomaly_enabled()
    trainer = silent_trainer(devices=1, max_epochs=1, detect_anomaly=True)
    with pytest.raises(RuntimeError, match="SqrtBackward"):
        trainer.fit(Broken(), loader(8))
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("given", "enabled", "warns"), [(True, True, False), ("warn", True, True), (False, False, False)]
)
def test_determinism(given: Any, enabled: bool, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # With CUDA an environment variable is set as well; see the next test.
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    try:
        silent_trainer(deterministic=given)
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_determinism_on_cuda_includes_cublas(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    # Set first, so that pytest removes what the Trainer sets.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before or "")
    if before is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    silent_trainer(deterministic=False)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == before
    try:
        silent_trainer(deterministic="warn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize("given", [True, False])
def test_inference_mode(given: bool) -> None:
    seen: list[tuple[bool, bool]] = []

    class Looking(Counting):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    silent_trainer(devices=1, inference_mode=given).test(Looking(), loader(4))
    assert seen == [(given, False)]


def limited_on_ranks() -> tuple[int, int, list[float]]:
    module = Counting()
    trainer = silent_trainer(
        devices=2, max_epochs=1, limit_train_batches=3, limit_val_batches=3, limit_predict_batches=3
    )
    trainer.fit(module, loader(40), loader(40))
    predictions = trainer.predict(module, loader(40))
    assert predictions is not None
    return module.seen["train"], module.seen["validate"], torch.cat(predictions).tolist()


def test_limits_count_each_ranks_training_batches_and_all_evaluation_batches() -> None:
    first = [regression_data(40)[index][0][0].item() for index in range(12)]
    # Two batches of the sanity check are read too: one by each rank.
    assert run_on_ranks(2, limited_on_ranks) == [(3, 2 + 1, first), (3, 1 + 1, first)]


class Late(Counting):
    """Skips its first two epochs."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch < 2 else None


@pytest.mark.parametrize(("epochs", "told"), [(-1, 1), (50, 0)])
def test_a_run_that_comes_no_nearer_to_its_end_says_so_once(
    capsys: pytest.CaptureFixture[str], epochs: int, told: int
) -> None:
    module = Late()
    silent_trainer(max_steps=2, max_epochs=epochs).fit(module, loader(8, 2))
    assert module.seen["train"] == 2
    printed = "".join(capsys.readouterr())
    assert printed.count("epoch 0 made no optimizer step, and only max_steps=2 ends this run") == told
    assert printed.count("made no optimizer step") == told


def test_a_run_resumed_at_the_end_of_an_epoch_gets_no_warning_about_missing_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "a.ckpt"))
    silent_trainer(max_steps=4, callbacks=[saver]).fit(Counting(), loader(8, 2))
    silent_trainer(max_steps=6).fit(Counting(), loader(8, 2), ckpt_path=tmp_path / "a.ckpt")
    assert "made no optimizer step" not in "".join(capsys.readouterr())
