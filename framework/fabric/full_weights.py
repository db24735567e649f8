"""``FullWeights``: the part of a Fabric that gathers or writes a module's weights in full, for other programs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from ..checkpoint import save
from ..core.errors import ConfigurationError
from ..distributed.collective_errors import on_rank_zero
from . import contents_of, publish_weights, snapshot_of
from .collectives import Collectives
from .contents import full_state
from .prepared import Prepared

Location = str | os.PathLike[str]


class FullWeights:
    """A module's weights in full, in memory or as files."""

    def __init__(self, ranks: Collectives, prepared: Prepared) -> None:
        self._ranks = ranks
        self._prepared = prepared

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a module's weights in full, by name. Collective.

        Returns:
            Under a strategy that shards weights: on the CPU of rank 0, and an empty dict on other ranks. Else those of
            ``model.state_dict()``, on all ranks.
        """
        return full_state(contents_of({"": model}, self._prepared.strategy, self._prepared.engines), self._ranks.world)

    def save_model(
        self,
        model: nn.Module,
        save_directory: Location,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a module's weights as ``model.safetensors``, or shards and an index, for other programs. Collective.

        Existing weights in the directory are replaced, other files are kept.

        Args:
            model: the module.
            save_directory: the directory, created if missing.
            max_shard_size: the size of a file, in bytes or as ``"10GB"``.
            safe_serialization: must be True.

        Raises:
            ConfigurationError: ``max_shard_size`` is not a size, or ``safe_serialization`` is False.
            StorageError: the directory cannot be written.
        """
        if not safe_serialization:
            raise ConfigurationError("safe_serialization=False asks for a pickle, which phalanx does not write.")
        directory = Path(os.path.abspath(save_directory))
        draft = directory / ".saving"
        world, strategy = self._ranks.world, self._prepared.strategy
        contents = contents_of({"model": model}, strategy, self._prepared.engines)
        snapshot = snapshot_of(contents, {}, {}, 0, {}, None, world.is_global_zero)
        on_rank_zero(world, partial(directory.mkdir, parents=True, exist_ok=True))
        save(draft, snapshot, world, sharded=not strategy.traits.replicates)
        on_rank_zero(world, lambda: publish_weights(draft, directory, max_shard_size))
