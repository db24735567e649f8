"""The callbacks that do one small thing each, in real fits."""

from __future__ import annotations

import csv
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from small_fits import Tiny, capturing, loader, quiet_trainer
from torch import nn

from phalanx.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    GradientNormMonitor,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
)
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.loggers import CSVLogger

# ---- GradientAccumulationScheduler -----------------------------------------------------------------------------------


def test_accumulation_changes_with_the_epoch(tmp_path: Path) -> None:
    steps: list[int] = []
    counter = LambdaCallback(on_train_epoch_end=lambda trainer, module: steps.append(trainer.global_step))
    trainer = quiet_trainer(tmp_path, [GradientAccumulationScheduler({1: 2, 2: 3}), counter], max_epochs=3)
    trainer.fit(Tiny(), loader())
    assert steps == [4, 6, 8]
    assert GradientAccumulationScheduler({1: 2}).get_accumulate_grad_batches(0) == 1


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {0: 1.5}, 4])
def test_wrong_schedules_are_refused(scheduling: Any) -> None:
    with pytest.raises(ConfigurationError):
        GradientAccumulationScheduler(scheduling)


# ---- GradientNormMonitor ---------------------------------------------------------------------------------------------


def test_the_norm_is_that_of_the_gradient_before_clipping(tmp_path: Path) -> None:
    module, norms = Tiny(lr=0.0), []
    weights = nn.Linear(4, 1)
    weights.load_state_dict(module.layer.state_dict())
    for batch in loader():
        weights.zero_grad()
        weights(batch[0]).square().mean().backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in weights.parameters() if p.grad is not None]).item())
    monitor = GradientNormMonitor()
    trainer = quiet_trainer(
        tmp_path,
        [monitor],
        max_epochs=1,
        logger=CSVLogger(tmp_path, "", "run"),
        gradient_clip_val=1e-3,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader())
    with open(next(tmp_path.rglob("metrics.csv"))) as file:
        logged = [float(row["grad_norm"]) for row in csv.DictReader(file) if row["grad_norm"]]
    assert logged == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("norm_type", [0, -1.0, "2", True])
def test_a_wrong_norm_type_is_refused(norm_type: Any) -> None:
    with pytest.raises(ConfigurationError):
        GradientNormMonitor(norm_type)


# ---- LambdaCallback --------------------------------------------------------------------------------------------------


def test_functions_are_called_at_their_hooks_and_nothing_else_is_wanted(tmp_path: Path) -> None:
    called: list[str] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: called.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: called.append(str(index)),
    )
    quiet_trainer(tmp_path, callback, max_epochs=1).fit(Tiny(), loader())
    assert called == ["fit", "0", "1", "2", "3"]
    hooks = [name for name in vars(Callback) if name.startswith("on_") and callback.wants(name)]
    assert hooks == ["on_train_batch_end"]


def test_an_unknown_hook_is_refused_with_the_closest_name() -> None:
    with refuses(UnknownNameError, "'on_train_epoch_ends'", "'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)
    with refuses(ConfigurationError, "on_fit_start=3"):
        LambdaCallback(on_fit_start=3)  # type: ignore[arg-type]


# ---- LearningRateMonitor ---------------------------------------------------------------------------------------------


class Scheduled(Tiny):
    interval = "epoch"
    named: str | None = None
    groups: tuple[dict[str, Any], ...] = ({},)

    def configure_optimizers(self) -> Any:
        weights = [[self.layer.weight], [self.layer.bias]] if len(self.groups) > 1 else [list(self.parameters())]
        groups = [{"params": part, **group} for part, group in zip(weights, self.groups, strict=True)]
        optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.25, betas=(0.5, 0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        config = {"scheduler": scheduler, "interval": self.interval, "name": self.named}
        return {"optimizer": optimizer, "lr_scheduler": config}


def logged(tmp_path: Path, module: Tiny, monitor: LearningRateMonitor) -> dict[str, dict[int, float]]:
    logger = CSVLogger(tmp_path, version="v")
    quiet_trainer(tmp_path, monitor, max_epochs=2, logger=logger, log_every_n_steps=2).fit(module, loader())
    found: dict[str, dict[int, float]] = {}
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name not in ("step", "epoch") and not name.startswith("train") and value:
                    found.setdefault(name, {})[int(row["step"])] = float(value)
    return found


def test_rates_follow_the_schedulers_interval(tmp_path: Path) -> None:
    module = Scheduled()
    assert logged(tmp_path / "epoch", module, LearningRateMonitor()) == {"lr-AdamW": {0: 1.0, 3: 0.5}}
    module.interval = "step"
    rates = logged(tmp_path / "step", module, LearningRateMonitor())
    assert rates == {"lr-AdamW": {1: 0.5, 3: 0.125, 5: 0.5**5, 7: 0.5**7}}


def test_rates_can_be_logged_by_steps_or_epochs_whatever_the_scheduler_does(tmp_path: Path) -> None:
    assert list(logged(tmp_path / "a", Scheduled(), LearningRateMonitor("step"))["lr-AdamW"]) == [1, 3, 5, 7]
    module = Scheduled()
    module.interval = "step"
    assert list(logged(tmp_path / "b", module, LearningRateMonitor("epoch"))["lr-AdamW"]) == [0, 3]
    assert list(logged(tmp_path / "c", Tiny(), LearningRateMonitor())["lr-SGD"]) == [0, 1, 3, 5, 7]


def test_names_tell_groups_schedulers_and_what_else_is_logged(tmp_path: Path) -> None:
    module = Scheduled()
    module.groups = ({"lr": 2.0}, {"name": "bias"})
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    values = {name: steps[0] for name, steps in logged(tmp_path / "a", module, monitor).items()}
    assert values == {
        "lr-AdamW/pg1": 2.0,
        "lr-AdamW/pg1-momentum": 0.5,
        "lr-AdamW/pg1-weight_decay": 0.25,
        "lr-AdamW/bias": 1.0,
        "lr-AdamW/bias-momentum": 0.5,
        "lr-AdamW/bias-weight_decay": 0.25,
    }
    assert monitor.lrs == {"lr-AdamW/pg1": [2.0, 1.0], "lr-AdamW/bias": [1.0, 0.5]}
    assert set(monitor.last_momentum_values.values()) == {0.5}
    assert set(monitor.last_weight_decay_values.values()) == {0.25}
    module = Scheduled()
    module.named = "mine"
    assert list(logged(tmp_path / "b", module, LearningRateMonitor())) == ["mine"]


def test_a_second_optimizer_of_a_class_is_numbered(tmp_path: Path) -> None:
    class Two(Tiny):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(self.layer(batch[0]).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.weight], 0.1), torch.optim.SGD([self.layer.bias], 0.2)]

    rates = logged(tmp_path, Two(), LearningRateMonitor("epoch"))
    assert {name: steps[0] for name, steps in rates.items()} == {"lr-SGD": 0.1, "lr-SGD-1": 0.2}


def test_rates_need_a_logger_a_known_interval_and_names_that_differ(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "logging_interval='batch'"):
        LearningRateMonitor("batch")
    with refuses(ConfigurationError, "LearningRateMonitor"):
        quiet_trainer(tmp_path, LearningRateMonitor(), max_epochs=1).fit(Tiny(), loader())
    module = Scheduled()
    module.groups = ({"name": "same"}, {"name": "same"})
    with refuses(ConfigurationError, "'same'"):
        logged(tmp_path, module, LearningRateMonitor())


# ---- Timer -----------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("phalanx.callbacks.timer.time", self)

    def monotonic(self) -> float:
        return self.now


def ticking(clock: Clock, seconds: float = 1.0) -> LambdaCallback:
    def tick(*_: Any) -> None:
        clock.now += seconds

    return LambdaCallback(on_train_batch_start=tick)


@pytest.mark.parametrize("duration", ["00:00:00:06", timedelta(seconds=6), {"seconds": 6}, {"minutes": 0.1}])
def test_the_run_ends_at_the_step_where_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration: Any
) -> None:
    clock = Clock(monkeypatch)
    timer = Timer(duration)
    trainer = quiet_trainer(tmp_path, [ticking(clock), timer], max_epochs=5)
    trainer.fit(Tiny(), loader())
    assert trainer.global_step == 6
    assert timer.time_elapsed() == 6
    assert timer.time_remaining() == 0
    assert (timer.start_time(), timer.end_time()) == (1000.0, 1006.0)


def test_by_epochs_the_epoch_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer = quiet_trainer(tmp_path, [ticking(clock), Timer("00:00:00:06", interval="epoch")], max_epochs=5)
    trainer.fit(Tiny(), loader())
    assert trainer.current_epoch == 2


def test_the_time_before_a_resume_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    saver = ModelCheckpoint(tmp_path / "kept")
    quiet_trainer(tmp_path, [ticking(clock), Timer(), saver], max_epochs=1).fit(Tiny(), loader())
    clock.now = 1e6
    timer = Timer("00:00:00:06")
    trainer = quiet_trainer(tmp_path, [ticking(clock), timer], max_epochs=5)
    trainer.fit(Tiny(), loader(), ckpt_path=saver.best_model_path)
    assert trainer.global_step == 6
    assert timer.time_elapsed() == 6


def test_a_time_that_was_used_up_before_stops_at_once(tmp_path: Path) -> None:
    timer = Timer("00:00:01:00")
    timer.load_state_dict({"time_elapsed": {"train": 61.0}})
    trainer = quiet_trainer(tmp_path, timer, max_epochs=5)
    trainer.fit(Tiny(), loader())
    assert trainer.global_step == 0


def test_every_stage_is_measured(tmp_path: Path) -> None:
    timer = Timer()
    trainer = quiet_trainer(tmp_path, timer, max_epochs=1)
    trainer.fit(Tiny({"metric": [1]}), loader(), loader(4))
    trainer.predict(dataloaders=[torch.ones(1, 4)], model=_Predicting())
    for stage in ("train", "validate", "predict"):
        start, end = timer.start_time(stage), timer.end_time(stage)
        assert start is not None
        assert end is not None
        assert start <= end <= time.monotonic()
        assert timer.time_elapsed(stage) == end - start
    assert timer.time_elapsed("test") == 0
    assert timer.time_remaining() is None
    with refuses(UnknownNameError, "stage='training'", "'train'"):
        timer.start_time("training")


class _Predicting(Tiny):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)


def test_a_timer_without_duration_wants_no_batches() -> None:
    assert not Timer().wants("on_train_batch_end")
    assert not Timer("00:00:00:01", interval="epoch").wants("on_train_batch_end")
    assert Timer("00:00:00:01", interval="epoch").wants("on_train_epoch_end")
    assert Timer("00:00:00:01").wants("on_train_batch_end")


@pytest.mark.parametrize("duration", ["12:00", 5, {"second": 1}, timedelta(-1), "00:00:00:-1"])
def test_wrong_durations_are_refused(duration: Any) -> None:
    with refuses(ConfigurationError, "Timer"):
        Timer(duration)


# ---- ModelSummary ----------------------------------------------------------------------------------------------------


def summary(tmp_path: Path, module: Tiny, depth: int = 1) -> list[str]:
    trainer = quiet_trainer(tmp_path, ModelSummary(depth), max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(module, loader())
    return next((note for note in notes if "parameters in all" in note), "").splitlines()


def test_parts_and_totals_are_shown(tmp_path: Path) -> None:
    class Deep(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 1))
            self.block[1].requires_grad_(False)
            self.tied = self.layer

    assert summary(tmp_path, Deep()) == [
        "Name  | Type       | Params | Share  | Dtype   | Mode",
        "-" * 54,
        "layer | Linear     | 5      | 0.2 %  | float32 | train",
        "block | Sequential | 2.1 K  | 99.8 % | float32 | train",
        "-" * 54,
        "2.1 K trainable, 51 frozen, 2.1 K parameters in all, 0.008 MB.",
    ]
    assert any(line.startswith("block.0 | Linear") for line in summary(tmp_path, Deep(), -1))
    assert summary(tmp_path, Deep(), 0) == []


def test_lazy_layers_are_reported(tmp_path: Path) -> None:
    from phalanx.callbacks.summary import summarize

    lines = summarize(nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))).splitlines()
    assert lines[2].split(" | ")[:3] == ["0   ", "LazyLinear", "?     "]
    assert lines[-2].startswith("3 trainable")
    assert lines[-1] == "Lazy layers, whose shape depends on the first batch, are not counted."


@pytest.mark.parametrize("depth", [-2, 1.5, True])
def test_wrong_depths_are_refused(depth: Any) -> None:
    with refuses(ConfigurationError, "max_depth"):
        ModelSummary(depth)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (99_940, "99.9 K"),
        (123_456, "123 K"),
        (999_600, "1.0 M"),
        (7e12, "7.0 T"),
    ],
)
def test_counts_are_short(number: int, text: str) -> None:
    from phalanx.callbacks.summary import _short

    assert _short(number) == text
