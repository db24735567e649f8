"""``ModelCheckpoint(every="auto")``: the time between saves follows from that of a save and from the failures."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from messages import refuses
from small_fits import Tiny, loader, quiet_trainer

from phalanx.callbacks import LambdaCallback, ModelCheckpoint, checkpoint_plan
from phalanx.callbacks.checkpoint_plan import SaveSchedule, best_interval
from phalanx.framework.core.errors import ConfigurationError


def lost_share(interval: float, save: float, failure: float) -> float:
    """Return the share of the time that saves and failures cost, by simulating 4,000 failures."""
    draw = random.Random(0)
    useful = total = 0.0
    for _ in range(4000):
        alive = draw.expovariate(1.0 / failure)
        whole = math.floor(alive / (interval + save))
        useful, total = useful + whole * interval, total + alive
    return 1.0 - useful / total


@pytest.mark.parametrize(("save", "failure"), [(4.0, 7200.0), (20.0, 3600.0), (1.0, 900.0)])
def test_no_other_interval_loses_less_time(save: float, failure: float) -> None:
    chosen = best_interval(save, failure)
    best = min(lost_share(chosen * factor, save, failure) for factor in (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0))
    assert lost_share(chosen, save, failure) <= best * 1.05


def test_the_interval_has_limits() -> None:
    assert best_interval(0.001, 10.0) == 30.0
    assert best_interval(60.0, 1e9) == 3600.0
    assert best_interval(600.0, 60.0) == 6000.0


def test_failures_of_the_run_count() -> None:
    schedule = SaveSchedule(None, None, None, "auto")
    text = schedule.adapt(2.0, 0, 0.0, 8)
    assert schedule.interval is not None
    assert schedule.interval.total_seconds() == 3600.0
    assert text is not None
    assert "is assumed for 8 ranks" in text
    text = schedule.adapt(2.0, 3, 3 * 3600.0, 8)
    assert schedule.interval.total_seconds() == pytest.approx(math.sqrt(2 * 2.0 * 3600.0))
    assert text is not None
    assert "this run has failed 3 times in 3 h" in text
    assert schedule.adapt(2.1, 3, 3 * 3600.0, 8) is None


def test_a_fit_saves_by_it_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SECONDS", "_LEAST_SECONDS", "_MOST_SECONDS"):
        # After every step.
        monkeypatch.setattr(checkpoint_plan, name, 1e-6)
    monkeypatch.setattr(checkpoint_plan, "_LEAST_INTERVAL_IN_SAVES", 0.0)
    notes: list[str] = []
    saver = ModelCheckpoint(every="auto")
    saved = LambdaCallback(on_train_batch_end=lambda *_: notes.append(saver.best_model_path))
    quiet_trainer(tmp_path, [saver, saved], max_epochs=4).fit(Tiny(), loader())
    # All ranks hear of it one step later.
    assert len({path for path in notes if path}) >= 4


def test_it_excludes_other_intervals() -> None:
    with refuses(ConfigurationError, "every exclude one another"):
        ModelCheckpoint(every="auto", every_n_train_steps=4)
    with refuses(ConfigurationError, "ModelCheckpoint(every='often'): give 'auto'"):
        ModelCheckpoint(every="often")
