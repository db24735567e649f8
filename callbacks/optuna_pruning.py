"""``OptunaPruning``: reports a metric to a trial of Optuna, and stops the fit when Optuna prunes the trial."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError
from ..framework.metrics.monitor import missing_metric
from ..framework.report.run_files import PRUNED
from .monitoring import acts_at_epoch_end

if TYPE_CHECKING:
    import optuna

    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


class OptunaPruning(Callback):
    """Report a metric to a trial of Optuna, and stop the fit when Optuna prunes the trial.

    The metric is reported after each validation, or at the end of each training epoch if the run validates at most once
    per epoch. The number of the report is the epoch then, and else the optimizer step. Rank 0 alone asks Optuna; all
    ranks stop at the same step. ``phalanx sweep --prune`` adds this callback by itself.

    Args:
        trial: the trial, ``optuna.Trial``. Other ranks than rank 0 ignore it.
        monitor: name of the metric.

    Raises:
        ConfigurationError: ``monitor`` is not a name, or the object is not a trial.
        MetricError: during the fit: the metric was not logged.

    Example:
        ::

            def objective(trial):
                pruning = OptunaPruning(trial, "val_loss")
                trainer = Trainer(max_epochs=10, callbacks=[pruning])
                trainer.fit(Model(lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True)), data, validation)
                pruning.raise_if_pruned()
                return trainer.callback_metrics["val_loss"].item()
    """

    monitors = True

    def __init__(self, trial: optuna.Trial | Callable[[], optuna.Trial], monitor: str) -> None:
        if not isinstance(monitor, str) or not monitor:
            raise ConfigurationError(f"OptunaPruning(monitor={monitor!r}): give the name of a logged metric.")
        if not hasattr(trial, "should_prune") and not callable(trial):
            raise ConfigurationError(
                f"OptunaPruning(trial={trial!r}): give the trial that Optuna passes to objectives."
            )
        self.monitor = monitor
        self.pruned = False
        """Whether Optuna has pruned the trial; known on rank 0."""
        self._given: Any = trial
        self._trial: Any = None

    @classmethod
    def of_sweep(cls, journal: str, study: str, number: int, pruner: str, monitor: str) -> OptunaPruning:
        """Return the callback for a trial that another process has created.

        Args:
            journal: the file of Optuna's journal.
            study: the name of the study.
            number: the number of the trial.
            pruner: the name of a pruner, see ``pruner_of``.
            monitor: name of the metric.
        """

        def open_trial() -> optuna.Trial:
            import optuna
            from optuna.storages.journal import JournalFileBackend

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            storage = optuna.storages.JournalStorage(JournalFileBackend(journal))
            # The sampler draws nothing: the trial has all its parameters.
            opened = optuna.load_study(
                study_name=study, storage=storage, sampler=optuna.samplers.RandomSampler(), pruner=pruner_of(pruner)
            )
            known = storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(study), number)
            return optuna.trial.Trial(opened, known)

        return cls(open_trial, monitor)

    @property
    def needed_metrics(self) -> tuple[str, ...]:
        return (self.monitor,)

    def raise_if_pruned(self) -> None:
        """Raise ``optuna.TrialPruned`` if the trial was pruned; call it on rank 0, after the fit."""
        if self.pruned:
            import optuna

            raise optuna.TrialPruned(f"{PRUNED} by Optuna")

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self.pruned = False
            if trainer.is_global_zero:
                self._trial = self._given if hasattr(self._given, "should_prune") else self._given()

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        # The fit that this one continues may have reported the value for which the trial is pruned.
        if self._trial is not None and trainer.progress.global_step and self._trial.should_prune():
            self._stop(trainer, "by the values of the fit before")

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        # An epoch that a stop has cut short has no validation.
        if trainer.progress.epoch_ended and acts_at_epoch_end(trainer, None):
            self._report(trainer, trainer.current_epoch)

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not acts_at_epoch_end(trainer, None):
            self._report(trainer, trainer.global_step)

    def _report(self, trainer: TrainerView, number: int) -> None:
        metrics = trainer.callback_metrics
        if trainer.fast_dev_run or self.monitor in trainer.outdated_metrics:
            return
        if self.monitor not in metrics:
            if trainer.val_enabled and trainer.progress.validated_at < 0:
                # The first validation may log it.
                return
            raise missing_metric("OptunaPruning", self.monitor, metrics)
        if self._trial is None:
            return
        value = float(metrics[self.monitor])
        with warnings.catch_warnings():
            # A continued fit reports values again that the one before had reported.
            warnings.simplefilter("ignore")
            self._trial.report(value, number)
        if self._trial.should_prune():
            self._stop(trainer, f"{self.monitor} = {value:.6g}")

    def _stop(self, trainer: TrainerView, why: str) -> None:
        self.pruned = True
        trainer.request_stop(f"{PRUNED}: {why}")


def pruner_of(name: str) -> optuna.pruners.BasePruner:
    """Return the pruner of a name: ``"median"`` or ``"halving"``."""
    import optuna

    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "median": optuna.pruners.MedianPruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
    }
    return pruners[name]()
