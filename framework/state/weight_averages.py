"""``Averages``: the averages registered by a run's callbacks: updates, evaluation, and their checkpoint section."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..checkpoint.consolidate import AVERAGES as SECTION, validated_average
from ..checkpoint.reader import Checkpoint
from ..checkpoint.stored_tensor import SavedTensor
from ..checkpoint.write_plan import Shard
from ..core.errors import ConfigurationError
from .switched_weights import KEY, SwitchedWeights
from .weight_average import Average


class Averages:
    """The averages of a run, as registered by its callbacks."""

    def __init__(self) -> None:
        self.recompute: Callable[[Average], None] | None = None
        """Recomputes the batch statistics of an average, if the run has training data."""
        self.switched: SwitchedWeights | None = None
        """The weights of optimizers that switch them for evaluation; None if there are no such optimizers."""
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
        if settings.key in (*self._averages, KEY):
            raise ConfigurationError(
                f"two averages are named {settings.key!r}, so a checkpoint could not distinguish them: "
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

    def use_switched(self, switched: SwitchedWeights) -> None:
        """Evaluate and save the weights to evaluate of these optimizers, if there are any."""
        self.switched = switched if switched else None

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
        """Use the weights to evaluate in the module within the context. Collective.

        They are those of optimizers that switch them, and the evaluation average if there is one. After an error on a
        rank the live weights are restored too, unless that is a collective.
        """
        if self.switched is None:
            with self._averaged():
                yield
            return
        try:
            self.switched.swap_in()
            with self._averaged():
                yield
        finally:
            self.switched.swap_out()

    @contextmanager
    def _averaged(self) -> Generator[None, None, None]:
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
        """Leave the weights to evaluate in the module permanently, at the end of a fit. Collective."""
        if self.switched is not None:
            self.switched.swap_in()
        for average in self:
            if average.settings.stays and average.count:
                average.swap_in()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def with_live(self, state: dict[str, Shard]) -> dict[str, Shard]:
        """Return a module's canonical state as a checkpoint holds it: with the live weights, not averages.

        Of optimizers that switch weights, it has those to evaluate. Collective.
        """
        for average in self:
            state = average.with_live(state)
        return state if self.switched is None else self.switched.to_evaluate(state)

    def shards(self) -> dict[str, Shard]:
        """Return this rank's part of all averages, as a checkpoint's section holds them."""
        return {name: shard for average in self for name, shard in average.shards().items()}

    def weights_of_training(self) -> dict[str, Shard]:
        """Return this rank's part of the weights of optimizers that switch them, for the same section. Collective."""
        return {} if self.switched is None else self.switched.shards()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's document."""
        return {average.settings.key: average.state_dict() for average in self}

    def load(self, checkpoint: Checkpoint, names: Mapping[str, str], note: Callable[[str], None]) -> None:
        """Load the averages from a checkpoint, after the weights and optimizers were loaded. Collective.

        ``names`` maps each tensor of the module to its saved name.
        """
        if self.switched is not None:
            self.switched.load(_training_weights(checkpoint, names))
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
            if (validated := validated_average(checkpoint)) is not None:
                note(
                    f"{checkpoint.path} was validated with the average {validated!r}, which no callback here has: its "
                    "trained weights are used."
                )
            return
        tensors = average.saved(checkpoint, names)
        if tensors:
            average.load_into_module(tensors)
        else:
            note(f"{checkpoint.path} holds no average {average.settings.key!r}: its live weights are used.")


def _training_weights(checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, SavedTensor]:
    """Return the weights of training in a checkpoint by name; none if it was saved without them."""
    held = set(checkpoint.names(SECTION)) if SECTION in checkpoint.sections else set()
    keys = {name: f"{KEY}/{saved}" for name, saved in names.items()}
    return {name: SavedTensor(checkpoint, SECTION, key) for name, key in keys.items() if key in held}
