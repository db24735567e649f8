"""``BasePredictionWriter`` and ``PredictionWriter``: write predictions as ``Trainer.predict`` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..framework.api.callback import Callback
from ..framework.api.overriding import is_overridden
from ..framework.core.errors import ConfigurationError
from ..framework.loop.evaluation_loop import on_host
from ..framework.system.atomic_files import refuse_url

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

_INTERVALS = ("batch", "epoch", "batch_and_epoch")


class BasePredictionWriter(Callback):
    """Base class of callbacks that write predictions; override the methods that the interval calls.

    Every rank writes the predictions of its own batches: batch i of the loader belongs to rank ``i % world_size``, so
    include ``trainer.global_rank`` in the names of files. With ``trainer.predict(..., return_predictions=False)`` and
    the interval ``"batch"``, no prediction is retained.

    Args:
        write_interval: ``"batch"`` calls ``write_on_batch_end`` after each batch; ``"epoch"`` calls
            ``write_on_epoch_end`` once with all predictions of this rank, which are retained in host memory until then;
            ``"batch_and_epoch"`` calls both.

    Raises:
        ConfigurationError: The interval is unknown; at the start of ``predict``, a method that it calls is not
            overridden.
    """

    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ConfigurationError(
                f"{type(self).__name__}(write_interval={write_interval!r}): give 'batch', 'epoch' or 'batch_and_epoch'."
            )
        self.interval = write_interval
        self._predictions: list[list[Any]] = []
        self._batch_indices: list[list[list[int] | None]] = []

    @property
    def _on_batch(self) -> bool:
        return self.interval != "epoch"

    @property
    def _on_epoch(self) -> bool:
        return self.interval != "batch"

    def write_on_batch_end(
        self,
        trainer: Any,
        module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of one batch.

        Args:
            trainer: The Trainer.
            module: The module that predicts.
            prediction: The output of ``predict_step``, on the device.
            batch_indices: The indices of the batch's samples in the dataset; None if they are unknown.
            batch: The batch.
            batch_idx: The number of the batch among those of this rank and loader.
            dataloader_idx: The number of the loader.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override write_on_batch_end.")

    def write_on_epoch_end(
        self, trainer: Any, module: TrainModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all predictions of this rank.

        Args:
            trainer: The Trainer.
            module: The module that predicts.
            predictions: The outputs of ``predict_step`` on the CPU, one per batch; with several loaders one list each.
            batch_indices: For each loader a list with the indices of each batch's samples in the dataset, or None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override write_on_epoch_end.")

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        needed = {"write_on_batch_end": self._on_batch, "write_on_epoch_end": self._on_epoch}
        for name, is_called in needed.items():
            if stage == "predict" and is_called and not is_overridden(name, self, BasePredictionWriter):
                raise ConfigurationError(
                    f"{type(self).__name__} has write_interval={self.interval!r}, which calls {name}: override it."
                )

    def on_predict_epoch_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._predictions = [[] for _ in trainer.run.batch_indices]
        self._batch_indices = [[] for _ in trainer.run.batch_indices]

    def on_predict_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        indices = trainer.run.batch_indices[dataloader_idx]
        if self._on_batch:
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self._on_epoch:
            self._predictions[dataloader_idx].append(on_host(outputs))
            self._batch_indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        predictions, self._predictions = self._predictions, []
        indices, self._batch_indices = self._batch_indices, []
        if self._on_epoch:
            flat = predictions[0] if len(predictions) == 1 else predictions
            self.write_on_epoch_end(trainer, module, flat, indices)


class PredictionWriter(BasePredictionWriter):
    """Write predictions with ``torch.save``, to be read with ``torch.load``.

    Every file holds a dict of ``predictions`` and ``indices``, the indices of the samples in the dataset or None:

    - ``<dirpath>/<loader>/<rank>-<batch>.pt`` for each batch, with the interval ``"batch"``;
    - ``<dirpath>/predictions-<rank>.pt`` for each rank, with the interval ``"epoch"``.

    Args:
        dirpath: The directory, which is created.
        write_interval: When to write: see ``BasePredictionWriter``.
    """

    def __init__(self, dirpath: str | Path, write_interval: str = "batch") -> None:
        super().__init__(write_interval)
        refuse_url(dirpath)
        self.dirpath = Path(dirpath)

    def write_on_batch_end(
        self,
        trainer: TrainerView,
        module: TrainModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        name = f"{dataloader_idx}/{trainer.global_rank}-{batch_idx}.pt"
        self._write(trainer, name, on_host(prediction), batch_indices)

    def write_on_epoch_end(
        self, trainer: TrainerView, module: TrainModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        self._write(trainer, f"predictions-{trainer.global_rank}.pt", predictions, batch_indices)

    def _write(self, trainer: TrainerView, name: str, predictions: Any, indices: Any) -> None:
        # Ranks that share the same data make the same predictions: one of them writes.
        if trainer.world.counts_data:
            path = self.dirpath / name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"predictions": predictions, "indices": indices}, path)
