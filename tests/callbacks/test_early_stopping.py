"""``EarlyStopping``, in real fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, MetricError

NAN = float("nan")


def stopped_after(tmp_path: Path, callback: EarlyStopping, values: list[float], **settings: Any) -> int:
    trainer = quiet_trainer(tmp_path, callback, max_epochs=len(values), **settings)
    trainer.fit(Tiny({"metric": values}), loader(), loader(4))
    return trainer.current_epoch


@pytest.mark.parametrize(
    ("settings", "values", "epochs"),
    [
        ({"patience": 2}, [5, 4, 4, 4, 4, 4], 4),
        ({"patience": 0}, [5, 4, 3, 3, 2], 4),
        ({"patience": 1}, [5, 4, 3, 2], 4),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1, 5], 4),
        ({"patience": 1, "min_delta": 0.5}, [5, 4.6, 4], 2),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1, 1.5, 3], 2),
        ({"stopping_threshold": 2}, [5, 2, 1.9, 1], 3),
        ({"divergence_threshold": 7}, [5, 7, 7.1, 1], 3),
        ({"mode": "max", "divergence_threshold": 1}, [5, 1, 0.9, 1], 3),
        ({}, [5, 4, NAN, 3], 3),
        ({"check_finite": False}, [5, 4, NAN, 3], 4),
    ],
)
def test_it_stops_after_the_epoch_that_decides(
    tmp_path: Path, settings: dict[str, Any], values: list[float], epochs: int
) -> None:
    assert stopped_after(tmp_path, EarlyStopping("metric", **settings), values) == epochs


def test_it_tells_why_and_how_good_it_was(tmp_path: Path) -> None:
    callback = EarlyStopping("metric", patience=1)
    stopped_after(tmp_path, callback, [5, 3, 4, 2])
    assert callback.stopped_epoch == 2
    assert callback.best_score.item() == 3
    assert callback.stopping_reason.name == "PATIENCE_EXHAUSTED"
    assert callback.stopping_reason_message == "metric did not improve in the last 1 checks; best value 3."


def test_improvements_are_printed_if_verbose(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, EarlyStopping("metric", verbose=True), max_epochs=2)
    notes = capturing(trainer)
    trainer.fit(Tiny({"metric": [5, 4]}), loader(), loader(4))
    assert [note for note in notes if "improved" in note] == ["metric improved to 5.", "metric improved by 1 to 4."]


def test_the_trainings_own_metric_and_steps_can_be_watched(tmp_path: Path) -> None:
    callback = EarlyStopping("train_loss_epoch", stopping_threshold=1e9)
    trainer = quiet_trainer(tmp_path, callback, max_epochs=3)
    trainer.fit(Tiny(), loader())
    assert trainer.current_epoch == 1


def test_several_validations_in_an_epoch_are_several_checks(tmp_path: Path) -> None:
    callback = EarlyStopping("metric", patience=2)
    trainer = quiet_trainer(tmp_path, callback, max_epochs=5, val_check_interval=1)
    trainer.fit(Tiny({"metric": [5, 4]}), loader(), loader(4))
    assert trainer.global_step == 3
    assert callback.stopped_epoch == 0


def test_an_unknown_metric_is_an_error_with_the_closest_name(tmp_path: Path) -> None:
    with refuses(MetricError, "'metrik'", "'metric'"):
        stopped_after(tmp_path, EarlyStopping("metrik"), [1.0])
    assert stopped_after(tmp_path, EarlyStopping("metrik", strict=False), [1.0, 1.0]) == 2


def test_a_stopped_run_stays_stopped_when_resumed_and_continues_with_more_patience(tmp_path: Path) -> None:
    values = [5.0, 4.0, 4.0, 4.0, 3.0, 2.0]

    def fit(patience: int, resume: bool) -> tuple[int, EarlyStopping]:
        callback = EarlyStopping("metric", patience=patience)
        trainer = quiet_trainer(tmp_path, [callback, ModelCheckpoint(tmp_path / "kept")], max_epochs=6)
        path = next((tmp_path / "kept").iterdir()) if resume else None
        trainer.fit(Tiny({"metric": values}), loader(), loader(4), ckpt_path=path)
        return trainer.current_epoch, callback

    assert fit(2, resume=False)[0] == 4
    epochs, callback = fit(2, resume=True)
    assert (epochs, callback.wait_count, callback.best_score.item()) == (4, 2, 4.0)
    assert fit(3, resume=True)[0] == 6


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mode": "auto"}, "mode='auto'"),
        ({"patience": -1}, "patience=-1"),
        ({"patience": 1.5}, "patience=1.5"),
        ({"min_delta": -0.1}, "min_delta=-0.1"),
        ({"monitor": ""}, "monitor=''"),
    ],
)
def test_wrong_arguments_are_refused(settings: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        EarlyStopping(**{"monitor": "metric", **settings})


class Uneven(Tiny):
    """Logs, on rank 1 alone, what makes it stop."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("metric", float(self.trainer.world.rank))
        return super().training_step(batch, batch_idx)


def fit_on_one_of_two_ranks(root: str) -> tuple[int, int]:
    callback = EarlyStopping("metric", stopping_threshold=0.5, mode="max", check_on_train_epoch_end=True)
    trainer = quiet_trainer(Path(root), callback, max_epochs=5, devices=2, strategy="ddp")
    trainer.fit(Uneven(), loader())
    return trainer.current_epoch, trainer.global_step


def test_what_one_rank_decides_stops_all_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, fit_on_one_of_two_ranks, str(tmp_path))
    assert first == second
    assert first[0] == 1
