"""``SweepStudy``: the trials of a sweep in a journal of Optuna, each proposed from those before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ..framework.core.position_rng import mix_seed
from ..framework.metrics.json_lines import JsonLines
from .search_space import grid

JOURNAL = "study.jsonl"
NAME = "sweep"


@dataclass
class SweepStudy:
    """The study of a sweep. It belongs to one process at a time, which holds the lock of the sweep's directory.

    Args:
        directory: the sweep's directory.
        space: the distribution of each searched name.
        mode: ``"min"`` if lower values are better, or ``"max"``.
        sampler: ``"tpe"``, ``"random"`` or ``"grid"``.
        seed: what is proposed depends on this number, the number of the trial and the trials before it alone.
    """

    directory: Path
    space: dict[str, BaseDistribution]
    mode: str
    sampler: str
    seed: int
    _storage: JournalStorage = field(init=False)

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # What a killed process has left: its lock, and half a line.
        for left in self.directory.glob(f"{JOURNAL}.lock*"):
            left.unlink(missing_ok=True)
        lines = JsonLines(self.journal)
        if self.journal.exists():
            with self.journal.open("rb+") as file:
                file.truncate(lines.size)
        self._storage = JournalStorage(JournalFileBackend(str(self.journal)))
        self._study = optuna.create_study(
            study_name=NAME, storage=self._storage, direction=self._direction, load_if_exists=True
        )

    @property
    def _direction(self) -> StudyDirection:
        return StudyDirection.MINIMIZE if self.mode == "min" else StudyDirection.MAXIMIZE

    @property
    def journal(self) -> Path:
        """The file of the trials."""
        return self.directory / JOURNAL

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials so far, by their numbers."""
        return self._study.get_trials(deepcopy=False)

    def begin(self, number: int) -> FrozenTrial:
        """Return the trial of a number: the one that is under way, or a new one.

        A new trial is written with all its parameters at once: a process that is killed leaves none without them.
        """
        known = self.trials
        if number < len(known):
            return known[number]
        proposed = self._proposed(number, known)
        identity = self._storage.get_study_id_from_name(NAME)
        self._storage.create_new_trial(identity, proposed)
        return self.trials[number]

    def end(self, trial: FrozenTrial, state: TrialState, value: float | None, **facts: Any) -> None:
        """Record the end of a trial."""
        for name, fact in facts.items():
            self._storage.set_trial_user_attr(trial._trial_id, name, fact)
        self._study.tell(trial.number, value, state)

    def _proposed(self, number: int, known: list[FrozenTrial]) -> FrozenTrial:
        if self.sampler == "grid":
            parameters = grid(self.space)[number]
            return optuna.trial.create_trial(state=TrialState.RUNNING, params=parameters, distributions=self.space)
        # A sampler that had drawn numbers for the trials before would be in a state that no file has.
        seed = mix_seed(self.seed, number) % (1 << 32)
        kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        memory = optuna.create_study(direction=self._direction, sampler=kinds[self.sampler](seed=seed))
        memory.add_trials(known)
        memory.ask(self.space)
        return memory.get_trials(deepcopy=False)[-1]
