"""``StageRecords``: the parts of ended stages that a Trainer still answers for."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..core.accumulation import AccumulationSchedule

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from ..api.train_module import TrainModule
    from ..core.optimizer_config import SchedulerConfig
    from ..loop.evaluation_loop import EvaluationPlan
    from ..loop.fit_loop import FitLoop
    from ..profiling.throughput import Throughput
    from ..resume.ended_fit import EndedFit

# The stages whose loaders a stage replaces: a fit requests validation loaders as well.
_REPLACED = {"fit": ("train", "validate")}
_ASSUMED_STEPS = 1000
_NUMBERS = ("batches", "training_batches", "micro_batch_size", "length", "ckpt_path", "throughput")


@dataclass
class StageRecords:
    """Loaders, numbers and optimizers of the last stages.

    There is no reference to a run, a loop or a data source: these hold iterators, and so the workers of loaders.
    """

    loaders: dict[str, Any] = field(default_factory=dict)
    """The loaders by stage, as the user passed them or a hook returned them."""
    batches: dict[str, list[int | float]] = field(default_factory=dict)
    """This rank's batches of each evaluation loader, by stage."""
    training_batches: int | float = math.inf
    micro_batch_size: int | None = None
    length: tuple[int | float, int | float, int | None, AccumulationSchedule] | None = None
    """The arguments of ``estimate_steps`` for the last fit."""
    throughput: Throughput | None = None
    """The speed of the last fit."""
    ckpt_path: str | None = None
    given_checkpoint: str | None = None
    """``ckpt_path`` of the last stage as the user gave it."""
    named_checkpoint: str | None = None
    """``ckpt_path`` if the user chose the checkpoint; None if ``"auto"`` or a restart did."""
    has_fitted: bool = False
    """Whether a fit has begun."""
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    ended_fit: EndedFit | None = None
    """The state of the last fit at its end, if it ended without an error in this process."""
    no_fit: str = "no fit has ended yet: call fit first, or save_checkpoint in one of its hooks"
    """The reason why there is no ``ended_fit``."""

    def begin(self, stage: str) -> None:
        """Drop the records that a stage replaces. A fit frees the last optimizers before it creates new ones."""
        self.ckpt_path = self.named_checkpoint = None
        for name in _REPLACED.get(stage, (stage,)):
            self.loaders.pop(name, None)
            self.batches.pop(name, None)
        if stage == "fit":
            self.has_fitted = True
            self.training_batches, self.length, self.throughput = math.inf, None, None
            self.micro_batch_size = None
            self.optimizers, self.schedulers = [], []
            self.ended_fit = None
            self.no_fit = "the last fit ended with an error: resume from its newest checkpoint with ckpt_path='auto'"

    def keep_checkpoint(self, path: Path | None, named: bool = True) -> None:
        """Retain the path of the checkpoint that a stage loads, and whether the user chose it."""
        self.ckpt_path = None if path is None else str(path)
        self.named_checkpoint = self.ckpt_path if named else None

    def keep_fit(self, loop: FitLoop) -> None:
        """Retain the optimizers and numbers of a fit.

        Under a strategy that shards the state, the optimizers update shards, which the module does not have any more:
        they are not retained.
        """
        windows, plan = loop.windows, loop.plan
        self.training_batches = math.inf if windows.end is None else windows.end
        self.micro_batch_size = windows.source.micro_batch_size
        self.length = plan.epoch_limit, plan.step_limit, windows.full, windows.schedule
        self.throughput = loop.run.meter.throughput()
        if loop.run.traits.replicates:
            self.optimizers, self.schedulers = loop.run.optimizers, loop.run.schedulers

    @contextmanager
    def assuming_length(self) -> Generator[None, None, None]:
        """Return a context in which a fit that has not begun has some number of optimizer steps.

        For measurements of memory, which does not depend on it: schedulers are built for this number.
        """
        known = self.length
        if known is None:
            self.length = math.inf, _ASSUMED_STEPS, None, AccumulationSchedule(1)
        try:
            yield
        finally:
            self.length = known

    def weights_replaced(self, module: TrainModule, checkpoint: Path) -> None:
        """Record that an evaluation has loaded a checkpoint into a module."""
        if self.ended_fit is not None:
            self.ended_fit.weights_replaced(module, checkpoint)

    def numbers(self) -> dict[str, Any]:
        """Return the records that a rank sends to the process that forked it."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def take_numbers(self, numbers: dict[str, Any]) -> None:
        """Restore the records that rank 0 has sent."""
        for name, value in numbers.items():
            setattr(self, name, value)

    def end_elsewhere(self) -> None:
        """Record that a fit has ended in forked ranks."""
        self.no_fit = (
            "the ranks of the fit have ended with its state: call it in on_train_end, add a ModelCheckpoint, or export "
            "the weights"
        )


def rank_batches(plan: EvaluationPlan) -> list[int | float]:
    """Return this rank's number of batches of each loader; infinite if unknown."""
    lengths = [source.len_local(limit) for source, limit in zip(plan.sources, plan.limits, strict=True)]
    return [math.inf if length is None else length for length in lengths]
