"""From what the user gave (loaders, a DataModule, the module's own) to the sources that loops read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .datamodule import DataModule
from .errors import ConfigurationError, DataError
from .evaluation_loaders import EvaluationSource
from .loaders import TrainingSource
from .module import TrainModule
from .settings import Settings
from .sources import prepare_evaluations, prepare_training
from .world import World

_LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


@dataclass
class Data:
    """Where loaders come from, and how they are shared out."""

    world: World
    module: TrainModule
    datamodule: DataModule | None
    given: dict[str, Any]
    seed: int
    shard: bool

    def loaders(self, stage: str) -> Any:
        """Return what the user gave for a stage, what the DataModule has, or what the module has; None for nothing."""
        if self.given.get(stage) is not None:
            return self.given[stage]
        hook = _LOADER_HOOKS[stage]
        for owner, base in ((self.datamodule, DataModule), (self.module, TrainModule)):
            if owner is not None and getattr(type(owner), hook, None) is not getattr(base, hook):
                return getattr(owner, hook)()
        return None

    def training(self, settings: Settings) -> TrainingSource:
        """Return the training source.

        Raises:
            ConfigurationError: there is no training loader, or it cannot be used.
        """
        loaders = self.loaders("train")
        if loaders is None:
            raise ConfigurationError(
                "fit has no training data: pass train_dataloaders or a datamodule, or define train_dataloader()."
            )
        return prepare_training(
            loaders,
            rank=self.world.rank,
            size=self.world.size,
            seed=self.seed,
            shard=self.shard,
            sequential=bool(settings.overfit_batches),
            name="train_dataloaders",
        )

    def evaluation(self, stage: str) -> list[EvaluationSource]:
        """Return a source for each loader of a stage; none where the user has no such loader."""
        loaders = self.loaders(stage)
        if loaders is None:
            return []
        return prepare_evaluations(
            loaders,
            rank=self.world.rank,
            size=self.world.size,
            seed=self.seed,
            shard=self.shard,
            name=_LOADER_HOOKS[stage] + "s",
        )

    def agreed_length(self, source: TrainingSource, position: dict[str, Any] | None) -> int | None:
        """Return the batches of an epoch, or None where ranks have to ask one another batch by batch. Collective."""
        length = source.len_batches(position)
        lengths = self.world.all_gather_object(length)
        return length if all(other == length for other in lengths) else None


def require_data(sources: list[EvaluationSource], stage: str) -> None:
    """Refuse an evaluation without a loader.

    Raises:
        DataError: there is none.
    """
    if not sources:
        raise DataError(f"{stage} has no data: pass dataloaders or a datamodule, or define {_LOADER_HOOKS[stage]}().")
