"""``OptunaPruning`` in real fits, with real studies of Optuna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from messages import refuses
from ranks import run_on_ranks
from small_fits import Tiny, loader, quiet_trainer

from phalanx.callbacks import OptunaPruning
from phalanx.framework.core.errors import ConfigurationError, MetricError

VALUES = [5.0, 4.0, 3.0, 2.0]


class PruneAt(optuna.pruners.BasePruner):
    """Prunes a trial once it has reported a number of values."""

    def __init__(self, count: int) -> None:
        self.count = count

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return len(trial.intermediate_values) >= self.count


def fit(root: Path, trial: Any, **settings: Any) -> tuple[int, OptunaPruning]:
    pruning = OptunaPruning(trial, "metric")
    trainer = quiet_trainer(root, pruning, max_epochs=len(VALUES), **settings)
    trainer.fit(Tiny({"metric": VALUES}), loader(), loader(4))
    return trainer.current_epoch, pruning


@pytest.mark.parametrize(("count", "epochs"), [(3, 3), (9, 4)])
def test_the_fit_stops_after_the_epoch_at_which_the_trial_is_pruned(tmp_path: Path, count: int, epochs: int) -> None:
    def objective(trial: optuna.Trial) -> float:
        reached, pruning = fit(tmp_path, trial)
        assert reached == epochs
        pruning.raise_if_pruned()
        return VALUES[-1]

    study = optuna.create_study(pruner=PruneAt(count))
    study.optimize(objective, n_trials=1)
    [trial] = study.trials
    assert trial.intermediate_values == dict(enumerate(VALUES[:epochs]))
    assert trial.state.name == ("PRUNED" if epochs < len(VALUES) else "COMPLETE")


def _on_a_rank(root: Path) -> int:
    import torch.distributed as dist

    trial: Any = None
    if dist.get_rank() == 0:
        study = optuna.create_study(pruner=PruneAt(2))
        trial = study.ask()
    return fit(root, trial or (lambda: None), devices=2, strategy="ddp")[0]


def test_all_ranks_stop_at_the_step_at_which_rank_0_learns_of_it(tmp_path: Path) -> None:
    assert run_on_ranks(2, _on_a_rank, tmp_path) == [2, 2]


def test_misuse_is_refused(tmp_path: Path) -> None:
    trial = optuna.create_study().ask()
    with refuses(ConfigurationError, "monitor=''"):
        OptunaPruning(trial, "")
    with refuses(ConfigurationError, "trial=3"):
        OptunaPruning(3, "metric")  # type: ignore[arg-type]
    trainer = quiet_trainer(tmp_path, OptunaPruning(trial, "metrik"), max_epochs=2)
    with refuses(MetricError, "Did you mean 'metric'"):
        trainer.fit(Tiny({"metric": VALUES}), loader(), loader(4))
