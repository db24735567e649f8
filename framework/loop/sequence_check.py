"""The check that a module trains the same model on parts of sequences, before the first step of a fit.

A model whose attention does not go through ``scaled_dot_product_attention``, which counts positions from 0 in every
part, or whose targets are shifted after the cut would be trained wrongly without an error. So a few first positions of
a batch are computed in parts and in full by ``training_step``, in evaluation and in training mode and without
gradients, and the losses are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from ..core.errors import ConfigurationError
from ..data.accumulation_window import Windows
from ..diagnostics.isolated_step import isolated
from ..parallel.fresh_batches import fresh
from ..parallel.strategy import StepFunction
from ..run.run import Run
from .step_base import TrainingStep
from .step_output import loss_of

# Positions of each part; more if none of them has a target.
_POSITIONS = (16, 256, None)
_EXACT, _NARROW = 2e-5, 1e-2


def check_parts(run: Run, windows: Windows, step: TrainingStep) -> None:
    """Compare the loss of this rank's first batch, in parts, with that of full sequences. Collective.

    Args:
        run: the fit.
        windows: the data; the batch is not consumed.
        step: routes the user's step, and cuts and moves batches.

    Raises:
        ConfigurationError: on all ranks; the losses differ.
    """
    strategy, transfer = run.strategy, step.transfer
    part = strategy.part
    if part.size == 1 or transfer is None:
        return
    with closing(windows.coming(run.progress.batch_in_epoch)) as coming:
        batch, index = next(coming, (None, 0))
    if not all(run.world.all_gather_object(batch is not None)):
        return
    trial = _Trial(run, lambda: (transfer(fresh(batch)), index), step.plain())
    if _compare(run, trial):
        # What is computed over tokens in training alone, such as batch statistics and losses that balance experts.
        trial.trains = True
        _compare(run, trial)


def _compare(run: Run, trial: _Trial) -> bool:
    """Compare losses on as few positions as have a target; return whether all of it could be compared. Collective.

    Raises:
        ConfigurationError: on all ranks; the losses differ.
    """
    part = run.strategy.part
    for positions in _POSITIONS:
        with part.first(None if positions is None else positions * part.size):
            losses, weights = trial.in_parts()
            full, total = trial.in_full()
            if total == 0 and positions is not None:
                continue
            if (total != 0 and not _same(losses, full, run)) or weights != total:
                if trial.changes_with_seed(full):
                    if not trial.trains:
                        run.note("training_step draws random numbers, so it was not checked on parts of sequences.")
                    return False
                raise _difference(run, (losses, weights), (full, total), trial.trains)
        return True
    return True


class _Trial:
    """Runs the step on one batch of each rank, without effects."""

    def __init__(self, run: Run, batch: Callable[[], tuple[Any, int]], step: StepFunction) -> None:
        self._run, self._batch, self._step = run, batch, step
        self.trains = False
        """Whether the module is in training mode."""

    def in_parts(self) -> tuple[float, float]:
        """Return the mean loss over all ranks' parts and its weight. Collective."""
        return self._mean(counts=self._run.world.counts_data)

    def in_full(self) -> tuple[float, float]:
        """Return the mean loss of full sequences and its weight. Collective."""
        part = self._run.strategy.part
        counts = self._run.world.counts_data and part.rank == 0
        with part.whole():
            return self._mean(counts)

    def changes_with_seed(self, full: float) -> bool:
        """Whether the loss of full sequences changes with the seed. Collective."""
        with isolated(self._run.module):
            torch.manual_seed(torch.initial_seed() + 1)
            return not _same(self.in_full()[0], full, self._run)

    def _mean(self, counts: bool) -> tuple[float, float]:
        module = self._run.module
        training = [part for part in module.modules() if part.training]
        if not self.trains:
            module.eval()
        try:
            with torch.no_grad(), isolated(module, runs_again=True):
                batch, index = self._batch()
                weight = float(module.batch_weight(batch))
                loss = loss_of(self._step(batch, index))
        finally:
            for part in training:
                part.training = True
        mine = 0.0 if loss is None or not weight else loss.item() * weight
        total, weights = self._run.world.control_reduce((mine, weight) if counts else (0.0, 0.0)).wait()
        return total / weights if weights else 0.0, weights


def _same(one: float, other: float, run: Run) -> bool:
    narrow = run.precision.compute_dtype not in (torch.float32, torch.float64)
    bound = _NARROW if narrow else _EXACT
    return abs(one - other) <= bound * max(abs(one), abs(other))


def _difference(run: Run, parts: tuple[float, float], full: tuple[float, float], trains: bool) -> ConfigurationError:
    strategy = run.strategy
    name, size = type(run.module).__name__, strategy.part.size
    if parts[1] != full[1]:
        return ConfigurationError(
            f"{name}.batch_weight is {full[1]:g} for full sequences and {parts[1]:g} for their {size} parts together: "
            "let it count the targets of the batch that it is given, and shift targets before cut_sequences cuts them."
        )
    mode = " in training mode" if trains else ""
    return ConfigurationError(
        f"the loss of {name}{mode} is {full[0]:.7g} for full sequences, and {parts[0]:.7g} for {size} parts of them "
        f"under parallel={{'cp': {size}}}. All attention must be torch's scaled_dot_product_attention, positions must "
        "be those of part.positions(), targets must be shifted before they are cut, and the loss must be a mean over "
        "what batch_weight counts, without statistics over tokens. See docs/parallelism.md."
    )
