"""``Averages``: the averages registered by a run's callbacks: updates, evaluation, and their checkpoint section."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checkpoint.consolidate import AVERAGES as SECTION
from ..checkpoint.reader import Checkpoint
from ..checkpoint.write_plan import Shard
from ..core.errors import ConfigurationError
from .weight_average import Average


class Averages:
    """The averages of a run, as registered by its callbacks."""

    def __init__(self) -> None:
        self.recompute: Callable[[Average], None] | None = None
        """Recomputes the batch statistics of an average, if the run has training data."""
        self._averages: dict[str, Average] = {}

    def __iter__(self) -> Iterator[Average]:
        return iter(self._averages.values())

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, average: Average) -> Average:
        """Register an average; return it.

        Raises:
            ConfigurationError: the key is already registered, or another average is used for evaluation.
        """
        settings = average.settings
        if settings.key in self._averages:
            raise ConfigurationError(
                f"two callbacks keep an average named {settings.key!r}, so a checkpoint could not distinguish them: "
                "give one of them another name=."
            )
        for flag, argument in (("evaluates", "evaluate"), ("stays", "average_at_end")):
            rival = next((one.settings.key for one in self if getattr(one.settings, flag)), None)
            if rival is not None and getattr(settings, flag):
                raise ConfigurationError(
                    f"the averages {rival!r} and {settings.key!r} would both be in the module: give one of their "
                    f"callbacks {argument}=False."
                )
        self._averages[settings.key] = average
        return average

    def use_statistics(self, recompute: Callable[[Average], None] | None) -> None:
        """Set the function that recomputes batch statistics of averages; None if the module has none."""
        self.recompute = recompute

    # ---- updates and evaluation -----------------------------------------------------------------------------------

    def after_step(self, step_idx: int) -> None:
        """Update after an optimizer step that was applied, the ``step_idx``-th from 0."""
        for average in self._averages.values():
            if average.settings.should_update(step_idx=step_idx):
                average.update()

    def begin_epoch(self) -> None:
        """Rebind all averages to the parameters that are trained in this epoch. Collective."""
        for average in self:
            if average.count and not average.is_rebound:
                average.bind()

    def end_epoch(self, epoch_idx: int) -> None:
        """Update at the end of a complete epoch, once per epoch. Collective."""
        for average in self:
            if not average.begin_epoch_end(epoch_idx) or not average.settings.should_update(epoch_idx=epoch_idx):
                continue
            average.update()
            if average.settings.statistics_batches != 0 and self.recompute is not None:
                self.recompute(average)

    @contextmanager
    def evaluated(self) -> Generator[None, None, None]:
        """Use the evaluation average in the module within the context, if there is one. Collective.

        After an error on a rank the live weights are restored too, unless that is a collective.
        """
        average = next((one for one in self if one.settings.evaluates and one.count and not one.is_in_module), None)
        if average is None:
            yield
            return
        try:
            average.swap_in()
            yield
        except BaseException:
            if not average.needs_all_ranks:
                average.swap_out()
            raise
        average.swap_out()

    def keep_in_module(self) -> None:
        """Leave the average in the module permanently, at the end of a fit. Collective."""
        for average in self:
            if average.settings.stays and average.count:
                average.swap_in()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state with the live weights."""
        for average in self:
            state = average.with_live(state)
        return state

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of all averages, as a checkpoint's section holds them."""
        return {name: shard for average in self for name, shard in average.shards().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's document."""
        return {average.settings.key: average.state_dict() for average in self}

    def load(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Load the averages from a checkpoint, after the live weights were loaded. Collective.

        ``names`` maps each tensor of the module to its saved name.
        """
        saved: dict[str, Any] = checkpoint.document.get(SECTION) or {}
        for average in self:
            key = average.settings.key
            if key in saved:
                average.load(average.saved(checkpoint, names), saved[key])
            else:
                note(f"{checkpoint.path} holds no average {key!r}: starting a new average.")
        left = [key for key in saved if key not in self._averages and saved[key]["count"]]
        if left:
            note(f"{checkpoint.path} holds the averages {', '.join(left)}, which no callback maintains: ignored.")

    def load_into_module(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Load the evaluation average of a checkpoint into a module. Collective."""
        average = next((one for one in self if one.settings.evaluates), None)
        if average is None:
            return
        tensors = average.saved(checkpoint, names)
        if tensors:
            average.load_into_module(tensors)
        else:
            note(f"{checkpoint.path} holds no average {average.settings.key!r}: its live weights are used.")
