"""Numbered states of an Accelerator: ``checkpoints/checkpoint_0`` and so on."""

from __future__ import annotations

import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import CheckpointError, ConfigurationError
from ...framework.fabric.fabric import Fabric
from .configuration import ProjectConfiguration

SaveHook = Callable[[list[Any], list[dict[str, Tensor]], str], None]
LoadHook = Callable[[list[Any], str], None]

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class NumberedStates:
    """Saves and loads states in the directories that a ``ProjectConfiguration`` describes."""

    def __init__(self, fabric: Fabric, project: ProjectConfiguration) -> None:
        self._fabric = fabric
        self._project = project
        # Ordered, since a handle removes its hook from an ordered dict.
        self._before_save: OrderedDict[int, SaveHook] = OrderedDict()
        self._before_load: OrderedDict[int, LoadHook] = OrderedDict()

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on all ranks before a state is saved.

        ``weights`` holds the full state dict of each model. A model whose dict the hook removes from the list is not
        saved; changes of the tensors have no effect.

        Returns:
            A handle, whose ``remove`` removes the hook.
        """
        return _register(self._before_save, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on all ranks before a state is loaded.

        A model that the hook removes from the list is not loaded.

        Returns:
            A handle, whose ``remove`` removes the hook.
        """
        return _register(self._before_load, hook)

    def save(self, /, output_dir: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """Save all objects that are set up or registered, and every rank's random generators. Collective.

        Args:
            output_dir: the directory; by default a numbered one, see ``ProjectConfiguration``.
            options: ``safe_serialization`` is accepted; tensors are always stored as safetensors.

        Returns:
            The directory.

        Raises:
            ConfigurationError: no directory is given, and states are not numbered.
        """
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state needs a directory: give one, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            self._save(output_dir)
            return os.fspath(output_dir)
        path = self._project.states / f"checkpoint_{self._project.iteration}"
        if self._fabric.broadcast(path.exists()):
            raise ConfigurationError(f"{path} exists: set project_configuration.iteration to a new number.")
        self._save(path)
        self._project.iteration += 1
        if self._fabric.is_global_zero and self._project.total_limit is not None:
            for old in self._numbered()[: -self._project.total_limit or None]:
                shutil.rmtree(old)
        return str(path)

    def load(self, /, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Load what ``save_state`` saved. Collective.

        Args:
            input_dir: the directory; by default the last numbered one.
            options: accepted; nothing that is loaded depends on them.

        Raises:
            CheckpointError: there is none.
        """
        if input_dir is None:
            found = self._fabric.broadcast([str(each) for each in self._numbered()])
            if not found:
                raise CheckpointError(f"{self._project.states} has no numbered state: give load_state a directory.")
            input_dir = found[-1]
        models = self._fabric.modules
        for hook in self._before_load.values():
            hook(models, os.fspath(input_dir))
        self._fabric.load_state(input_dir, without=_missing(self._fabric.modules, models))
        number = _NUMBERED.fullmatch(Path(input_dir).name)
        if self._project.automatic_checkpoint_naming and number:
            self._project.iteration = int(number[1]) + 1

    def _save(self, path: str | os.PathLike[str]) -> None:
        models = self._fabric.modules
        weights = [self._fabric.full_state_dict(model) for model in models] if self._before_save else []
        given = list(weights)
        for hook in self._before_save.values():
            hook(models, weights, os.fspath(path))
        left_out = {id(each) for each in _missing(given, weights)}
        modules = self._fabric.modules
        without = [model for model, each in zip(modules, given, strict=bool(given)) if id(each) in left_out]
        self._fabric.save_state(path, without=without)

    def _numbered(self) -> list[Path]:
        """Return the numbered states, the oldest first."""
        found = [each for each in self._project.states.glob("checkpoint_*") if _NUMBERED.fullmatch(each.name)]
        return sorted(found, key=lambda each: int(each.name.rpartition("_")[2]))


def _register(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _missing(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Return the objects that were removed from a list."""
    kept = {id(each) for each in after}
    return [each for each in before if id(each) not in kept]


def write_object(obj: Any, path: str | os.PathLike[str], safe_serialization: bool) -> None:
    """Write an object with ``torch.save``, or a dict of tensors as safetensors."""
    if not safe_serialization:
        torch.save(obj, path)
        return
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in obj.items()}, path)
