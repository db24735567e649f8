"""Data sources of the loops, made from the user's loaders, DataModule or module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..api.train_module import TrainModule
from ..core.errors import ConfigurationError, DataError
from ..core.torch_internals import tree_map
from ..data.combined_source import prepare_evaluations, prepare_training
from ..data.dataloader import in_order
from ..distributed.rank_zero_first import first_in_turn
from ..run.overrides import is_overridden

if TYPE_CHECKING:
    from ..api.data_module import DataModule
    from ..core.global_batch import GlobalBatch
    from ..data.evaluation_source import EvaluationSource
    from ..data.training_source import TrainingSource
    from ..distributed.world import World
    from .resolved_settings import Settings
    from .session import Session, StageRequest

ARGUMENTS = {
    "train": "train_dataloaders",
    "validate": "val_dataloaders",
    "test": "dataloaders",
    "predict": "dataloaders",
}
_LOADER_HOOKS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def prepare_data(owner: DataModule | TrainModule, world: World) -> None:
    """Call ``prepare_data`` on the first rank of each node, or on rank 0 alone, while the others wait. Collective."""
    per_node = owner.prepare_data_per_node
    with first_in_turn(world, local=per_node):
        if (world.local_rank if per_node else world.rank) == 0:
            owner.prepare_data()


@dataclass
class Data:
    """The origin of the loaders, and their sharding over ranks."""

    world: World
    request: StageRequest
    seed: int
    shard: bool
    kept: dict[str, Any] = field(default_factory=dict)
    """The loaders of each stage that a source was made from, for the Trainer's attributes."""

    def provides(self, stage: str) -> bool:
        """Whether there are loaders for a stage, without requesting them."""
        return self.request.given.get(stage) is not None or _provider(stage, self.request) is not None

    def loaders(self, stage: str) -> Any:
        """Return the loaders of a stage: the user's, else the DataModule's, else the module's; None without any."""
        if self.request.given.get(stage) is not None:
            return self.request.given[stage]
        owner = _provider(stage, self.request)
        return None if owner is None else getattr(owner, _LOADER_HOOKS[stage])()

    def training(self, settings: Settings) -> TrainingSource:
        """Return the training source.

        Raises:
            ConfigurationError: there is no training loader, or it is invalid.
        """
        loaders = self.loaders("train")
        if loaders is None:
            raise ConfigurationError(
                "train_dataloader() returned None, so there is nothing to train on: return a loader."
            )
        self.kept["train"] = loaders
        return prepare_training(
            loaders,
            rank=self.world.data_rank,
            size=self.world.data_size,
            seed=self.seed,
            shard=self.shard,
            sequential=bool(settings.overfit_batches),
            name="train_dataloaders",
            global_batch=settings.global_batch,
        )

    def evaluation(self, stage: str, sequential: bool = False) -> list[EvaluationSource]:
        """Return a source for each loader of a stage; an empty list if there is no loader.

        Args:
            stage: the stage.
            sequential: read shuffled loaders in the dataset's order, as ``overfit_batches`` does.
        """
        loaders = self.loaders(stage)
        if loaders is None:
            return []
        if stage != "train":
            self.kept[stage] = loaders
        return prepare_evaluations(
            tree_map(in_order, loaders) if sequential else loaders,
            rank=self.world.data_rank,
            size=self.world.data_size,
            seed=self.seed,
            shard=self.shard,
            name=ARGUMENTS[stage],
        )

    def agreed_length(self, source: TrainingSource, position: dict[str, Any] | None) -> int | None:
        """Return the batches of an epoch, or None if ranks must agree batch by batch. Collective."""
        length = source.len_batches(position)
        lengths = self.world.all_gather_object(length)
        return length if all(other == length for other in lengths) else None


def check_given(
    session: Session, stage: str, request: StageRequest, required: bool, global_batch: GlobalBatch | None = None
) -> None:
    """Check the given loaders, and that there are some if data is ``required``. Reads no batch.

    Raises:
        ConfigurationError: a loader is invalid or missing.
    """
    # The argument val_dataloaders of fit is named dataloaders in validate.
    name = ARGUMENTS[stage] if stage == "train" or not required else "dataloaders"
    loaders = request.given.get(stage)
    if loaders is not None:
        size, shard = session.resources.data_size, session.settings.shards_data
        options: dict[str, Any] = {"rank": 0, "size": size, "seed": 0, "shard": shard, "name": name}
        if stage == "train":
            prepare_training(loaders, global_batch=global_batch, **options)
        else:
            prepare_evaluations(loaders, **options)
    elif required and _provider(stage, request) is None:
        raise ConfigurationError(
            f"there is no data to {stage}: pass {name} or a datamodule, or define {_LOADER_HOOKS[stage]}()."
        )


def _provider(stage: str, request: StageRequest) -> TrainModule | DataModule | None:
    """Return the owner of the loader hook: the DataModule, else the module; None if neither has one."""
    hook = _LOADER_HOOKS[stage]
    if request.datamodule is not None and request.datamodule.provides(hook):
        return request.datamodule
    return request.module if is_overridden(hook, request.module) else None


def require_data(sources: list[EvaluationSource], stage: str) -> None:
    """Refuse an evaluation without a loader.

    Raises:
        DataError: there is none.
    """
    if not sources:
        raise DataError(
            f"there is no data to {stage}: pass dataloaders or a datamodule, or define {_LOADER_HOOKS[stage]}()."
        )
