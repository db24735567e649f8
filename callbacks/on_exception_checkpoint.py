"""``OnExceptionCheckpoint``: saves a checkpoint when a fit ends with an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback
from ..framework.core.errors import ConfigurationError
from ..framework.storage.cached_url import local_place
from ..framework.system.atomic_files import absolute
from .last_step import LastStep

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


@dataclass(frozen=True)
class SavedAfterError:
    """The checkpoint of an ``OnExceptionCheckpoint``, for the search for the newest one: it ranks no metric.

    It has no ``dirpath``, since a preempted run saves into another directory.
    """

    path: Path
    best_model_path: str = ""
    best_model_score: None = None
    last_model_path: str = ""
    monitor: None = None
    dirpath: None = None
    keep_local: None = None
    only_after_errors: bool = True

    @property
    def saves_into(self) -> tuple[Path, Callable[[str], bool]]:
        """The directory, and a check for the name of the checkpoint."""
        return self.path.parent, lambda name: name == self.path.name


class OnExceptionCheckpoint(Callback):
    """Save the state after the last optimizer step when a fit ends with an error or a KeyboardInterrupt.

    - The state is recorded after each step: buffers are copied, and weights and optimizer state are saved as they are,
      which an error before the next update has not changed. A fit resumed from the checkpoint repeats the batches
      after that step. On one rank it equals an undisturbed fit bit by bit.
    - The record takes host time in every step: 0.08 to 0.1 ms, measured on a CPU for models of three linear layers
      without and with batch norm.
    - On several ranks, the rank that fails first saves. The generators and the values logged in the epoch so far by the
      other ranks are not known to it: a resumed fit has the same weights, optimizers and order of batches, but other
      random numbers, and epoch means begin at the checkpoint.
    - Nothing is saved, with a message, if the error comes before the first step or while an update is applied. Nothing
      is saved after a preemption either, which saves a checkpoint of its own.
    - On several ranks the save takes at most 15 seconds. The other ranks end within 2 seconds afterwards.
    - A fit with ``ckpt_path="auto"`` or ``"last"`` finds the checkpoint in ``dirpath`` if the Trainer has this callback
      again.
    - Strategies that shard the state are refused before training, as no rank has the full state.

    Args:
        dirpath: The directory of the checkpoint.
        filename: Its name, without the extension.

    Raises:
        ConfigurationError: The name is empty.
    """

    runs_last = True
    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename=''): give the checkpoint a name.")
        self.dirpath = str(absolute(local_place(dirpath)))
        self.filename = filename
        self._last = LastStep()

    @property
    def saved_checkpoints(self) -> SavedAfterError:
        return SavedAfterError(Path(self.ckpt_path))

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._last.begin(trainer)

    def on_before_optimizer_step(self, trainer: TrainerView, module: TrainModule, optimizer: Optimizer) -> None:
        self._last.update_begins(trainer)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.fast_dev_run:
            self._last.batch_ends(trainer)

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        self._last.end()

    def on_exception(self, trainer: TrainerView, module: TrainModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and not trainer.fast_dev_run:
            self._last.save(trainer, Path(self.ckpt_path), exception)
