"""The context that a Trainer passes to a run, and the protocols of the parts that attach to a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer

    from ..api.contracts import TrainerView
    from ..api.data_module import DataModule
    from ..checkpoint.save_request import SaveRequest
    from ..data.accumulation_window import Windows
    from ..state.frozen_base import FrozenBase
    from ..system.run_directory import RunDirectory
    from ..watchdog.heartbeat import Heartbeat


@dataclass(frozen=True)
class RunContext:
    """The parts of a Trainer that a run uses."""

    view: TrainerView
    """The Trainer that hooks receive as an argument."""
    note: Callable[[str], None]
    """Shows a line on the console of rank 0."""
    notify: Callable[[str, str, int | None, str | None], None]
    """Sends an event to the user's servers, on rank 0: its name, a sentence, the optimizer step and a key."""
    directory: RunDirectory
    heartbeat: Heartbeat
    writes: bool
    """Whether the run writes files."""
    requeue: bool
    """Whether a preempted SLURM job is requeued."""
    has_failed: Callable[[], bool]
    """Whether an error has ended the run. Other ranks may then never reach another collective."""
    datamodule: DataModule | None
    """The data module of the stage, if it was given one."""
    preemption_directory: Callable[[], Path | None]
    """The directory of the checkpoint of a preempted run; None if the run saves no checkpoints."""


class ManualOptimizer(Protocol):
    """An optimizer under manual optimization, whose gradients may not be reduced over ranks yet."""

    @property
    def optimizer(self) -> Optimizer: ...
    def reduce(self) -> None: ...


class RunSaver(Protocol):
    """Saves the checkpoints of a run; see ``resume.checkpoint_saver``."""

    base: FrozenBase | None
    """The weights with which the fit began, if its checkpoints leave out those that are frozen."""
    before_save: Callable[[], object] | None
    """Called before each save, on all ranks; it raises if the state must not be saved."""

    @property
    def is_pending(self) -> bool: ...
    @property
    def sharded(self) -> bool: ...
    def keep_base(self) -> None: ...
    def follow(self, windows: Windows) -> None: ...
    def record(self) -> Any: ...
    def prepare(self, size: int = 0) -> None: ...
    def estimate(self, weights_only: bool) -> int: ...
    def save(self, request: SaveRequest) -> None: ...
    def finish(self, number: int | None = None) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...
