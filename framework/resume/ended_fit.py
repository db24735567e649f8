"""``EndedFit``: the state of a fit at its end, from which checkpoints can be saved until the next fit begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checkpoint import save
from ..checkpoint.write_plan import CheckpointContents
from ..core.errors import ConfigurationError, PhalanxError
from ..data.accumulation_window import Windows
from ..distributed.collective_errors import on_all_ranks
from ..pretrained import save_folder
from ..run.run import Run
from .capture import RankState, RunState, place_of

if TYPE_CHECKING:
    from ..pretrained.saving import FolderOrder

_IN_TIME = "call it in on_train_end, or add a ModelCheckpoint"


class EndedFit:
    """The state of a fit at its end.

    It refers to the tensors of the module and its optimizers where every rank has them in full. Under a strategy that
    shards the state it holds this rank's shards, whose memory is in use until the next fit begins. It refers to no run,
    loop or data source.
    """

    def __init__(self, run: Run, windows: Windows) -> None:
        """Read the state; a state that cannot be saved raises in ``save``. Collective."""
        self._world, self._sharded = run.world, not run.traits.replicates
        self._step = run.progress.global_step
        self._module = run.module
        self._state: RunState | None = None
        self._refusal: PhalanxError | None = None
        self._rank_document: Any = None
        if run.traits.weights_on_disk:
            self._refusal = ConfigurationError(
                f"save_checkpoint after a fit under strategy={run.strategy.name!r}, whose state on the disk is deleted "
                f"at the end of the fit: {_IN_TIME}."
            )
            return
        try:
            # A module's own hooks may fail on one rank alone, and what follows needs all ranks.
            self._state = state = on_all_ranks(run.world, lambda: RunState(run))
            state.add_training(run, place_of(windows), run.seed, run.loggers.mark())
            self._rank_document = RankState(run, windows).document()
        except PhalanxError as error:
            self._refusal = error

    def weights_replaced(self, module: nn.Module, checkpoint: Path) -> None:
        """Refuse to save from now on, if this is the module of the fit: its weights are those of a checkpoint now."""
        if module is self._module:
            self._refusal = ConfigurationError(
                f"save_checkpoint saves the last fit, whose weights were replaced by those of {checkpoint}: call it "
                "before the evaluation, or export to write the present weights."
            )
            self._state = None

    def save(self, path: Path, weights_only: bool) -> None:
        """Write a checkpoint. Collective.

        Raises:
            ConfigurationError: on all ranks; the state cannot be saved.
            NonFiniteError: on all ranks; a weight is NaN or infinite.
            StorageError: on all ranks; the checkpoint could not be written.
        """

        def contents() -> CheckpointContents:
            if self._refusal is not None:
                raise self._refusal
            assert self._state is not None
            if weights_only:
                return self._state.weights()
            return replace(self._state.training(), rank_document=self._rank_document)

        found = on_all_ranks(self._world, contents)
        save(path, found, self._world, self._sharded, finite=f"at optimizer step {self._step}")

    @property
    def is_usable(self) -> bool:
        """Whether the state can be saved, the same on all ranks."""
        return self._refusal is None

    def save_pretrained(self, order: FolderOrder) -> Path:
        """Write the model as a folder of Hugging Face's libraries; return the folder. Collective.

        Raises:
            ConfigurationError: on all ranks; there is no such model or average.
            StorageError: on all ranks; the folder cannot be written.
        """
        assert self._state is not None
        sections = self._state.weights().sections
        folder: Path = save_folder(self._world, self._module, sections, self._sharded, order)
        return folder
