"""Read-only attributes of a Trainer: its loaders, their numbers of batches, and the speed of its last fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError
from ..loop.fit_plan import estimate_steps
from .stage_records import rank_batches

if TYPE_CHECKING:
    from ..core.progress import Progress
    from ..profiling.throughput import Throughput
    from .session import Session


class DataProperties:
    """The loaders of a Trainer, and the lengths and the speed of its loops. Before the first stage there are none."""

    _session: Session

    @property
    def progress(self) -> Progress:
        """The counters of the current or last fit."""
        raise NotImplementedError

    # ---- speed ----------------------------------------------------------------------------------------------------

    @property
    def throughput(self) -> Throughput | None:
        """The speed of the current or last fit, over all ranks; None before its first step has ended."""
        loop = self._session.loop
        return self._session.records.throughput if loop is None else loop.run.meter.throughput()

    # ---- loaders --------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> Any:
        """The training loaders of the current or last fit, as they were passed to it or returned by a hook, or None.

        A loop iterates over copies of these objects, which yield this rank's part.
        """
        return self._session.records.loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders of the current or last ``fit`` or ``validate``, or None."""
        return self._session.records.loaders.get("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The loaders of the current or last ``test``, or None."""
        return self._session.records.loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loaders of the current or last ``predict``, or None."""
        return self._session.records.loaders.get("predict")

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint that the current or last stage has loaded, or None."""
        return self._session.records.ckpt_path

    @property
    def named_checkpoint(self) -> str | None:
        """``ckpt_path`` if the user chose the checkpoint; None if ``"auto"`` or a restart did."""
        return self._session.records.named_checkpoint

    # ---- numbers of batches ---------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of each rank in an epoch of the current or last fit; infinite if unknown."""
        loop = self._session.loop
        if loop is None:
            return self._session.records.training_batches
        return math.inf if loop.windows.end is None else loop.windows.end

    @property
    def num_val_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last validation."""
        return self._batches("validate")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the sanity check of the current or last fit."""
        steps = self._session.settings.num_sanity_val_steps
        return [batches if steps == -1 else min(steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last ``test``."""
        return self._batches("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """This rank's batches of each loader in the current or last ``predict``."""
        return self._batches("predict")

    def _batches(self, stage: str) -> list[int | float]:
        plan = self._session.plan_of(stage)
        return list(self._session.records.batches.get(stage, [])) if plan is None else rank_batches(plan)

    @property
    def val_enabled(self) -> bool:
        """Whether the running fit validates."""
        return self._session.loop is not None and self._session.loop.plan.validation is not None

    enable_validation = val_enabled

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of the current optimizer step."""
        return self._session.accumulation(self.progress.epoch, self.progress.global_step)

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a full micro-batch of a rank in the current or last fit; None if unknown."""
        loop = self._session.loop
        return self._session.records.micro_batch_size if loop is None else loop.windows.source.micro_batch_size

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch in progress is the last of its epoch, as far as the length is known."""
        return self.progress.batch_in_epoch >= self.num_training_batches - 1

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the entire current or last fit; infinite if unknown."""
        if self._session.loop is not None:
            return self._session.loop.estimated_steps()
        if self._session.records.length is None:
            raise ConfigurationError(
                "estimated_stepping_batches is known from configure_optimizers of the first fit on: read it there."
            )
        return estimate_steps(*self._session.records.length)
