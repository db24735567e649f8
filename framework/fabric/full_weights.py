"""``FullWeights``: the part of a Fabric that gathers or writes a module's weights in full, for other programs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import save
from ..checkpoint.manifest import MODEL
from ..core.errors import ConfigurationError
from ..distributed.collective_errors import on_rank_zero
from ..parallel.strategy import Strategy
from ..pretrained import folder_order, load_into, save_folder
from ..pretrained.request import requested
from ..state.module_state import model_state
from . import contents_of, publish_weights, snapshot_of
from .collectives import Collectives
from .contents import full_state
from .module import unwrap
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

    def load_pretrained(self, model: nn.Module, path: Location, *, strict: bool | None = None) -> None:
        """Load the weights of a Hugging Face folder into a module that is set up. Collective.

        Each rank reads only its own part of each tensor, and casts it to the module's dtype.

        Args:
            model: the module, or a part of it: a model of transformers, or any other.
            path: a folder with ``model.safetensors`` or its shards and index, a ``.safetensors`` file, or a checkpoint.
            strict: whether all names and shapes must match. If False, only matching tensors are loaded, with a warning.
                By default a model of transformers may have layers that the files lack, and the reverse.

        Raises:
            CheckpointError: on all ranks, before anything has changed; the weights cannot be read, or do not match.
        """
        root, into, strategy = self._found(model)
        request = requested(root, path, None if into is root else into, strict)
        # The warning must show the user's line, which is above this method and the Fabric's call of it.
        load_into(strategy, self._ranks.world, root, request, stacklevel=3)

    def save_pretrained(
        self,
        model: nn.Module,
        directory: Location,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: str | torch.dtype | None = None,
    ) -> Path:
        """Write a model as a folder that ``from_pretrained`` of transformers opens; return the folder. Collective.

        Args:
            model: the module, or a part of it; it is or contains one model of transformers. Of another part the
                weights alone are written.
            directory: the folder; in an existing one the files are replaced once all of them are written.
            tokenizer: a tokenizer or processor to add.
            max_shard_size: the largest size of a file, in bytes or as ``"5GB"``.
            dtype: the dtype in which floating-point tensors are written. Default: that in which updates are applied.

        Raises:
            ConfigurationError: on all ranks; an argument is invalid, there is no such model, or it has adapters of
                peft.
            StorageError: on all ranks; the folder cannot be written.
        """
        root, part, strategy = self._found(model)
        order = folder_order(directory, None if part is root else part, tokenizer, max_shard_size, dtype)
        sections = {MODEL: model_state(strategy, root)}
        return save_folder(self._ranks.world, root, sections, not strategy.traits.replicates, order)

    def _found(self, model: nn.Module) -> tuple[nn.Module, nn.Module, Strategy]:
        """Return the module that was set up and contains ``model``, ``model`` without its wrapper, and the strategy."""
        part = unwrap(model)
        for engine in self._prepared.engines:
            if any(each is part for each in engine.module.modules()):
                return engine.module, part, engine.strategy
        return part, part, self._prepared.strategy

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
            NonFiniteError: a weight is NaN or infinite.
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
        save(draft, snapshot, world, sharded=not strategy.traits.replicates, finite=f"in {type(model).__name__}")
        on_rank_zero(world, lambda: publish_weights(draft, directory, max_shard_size))
