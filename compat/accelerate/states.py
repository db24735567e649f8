"""Numbered states of an Accelerator: ``checkpoints/checkpoint_0`` and so on."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ...framework.core.errors import CheckpointError, ConfigurationError
from ...framework.fabric.fabric import Fabric
from .configuration import ProjectConfiguration

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class NumberedStates:
    """Saves and loads states in the directories that a ``ProjectConfiguration`` describes."""

    def __init__(self, fabric: Fabric, project: ProjectConfiguration) -> None:
        self._fabric = fabric
        self._project = project

    def save(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Save to a directory, by default to the next numbered one; return it. Collective.

        Raises:
            ConfigurationError: no directory is given, and states are not numbered.
        """
        if not self._project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state needs a directory: give one, or ProjectConfiguration(automatic_checkpoint_naming=True)."
                )
            self._fabric.save_state(output_dir)
            return os.fspath(output_dir)
        path = self._project.states / f"checkpoint_{self._project.iteration}"
        if self._fabric.broadcast(path.exists()):
            raise ConfigurationError(f"{path} exists: set project_configuration.iteration to a new number.")
        self._fabric.save_state(path)
        self._project.continue_from(self._project.iteration + 1)
        if self._fabric.is_global_zero and self._project.total_limit is not None:
            for old in self._numbered()[: -self._project.total_limit or None]:
                shutil.rmtree(old)
        return str(path)

    def load(self, input_dir: str | os.PathLike[str] | None) -> None:
        """Load from a directory, by default from the last numbered one. Collective.

        Raises:
            CheckpointError: there is none.
        """
        if input_dir is None:
            found = self._fabric.broadcast([str(each) for each in self._numbered()])
            if not found:
                raise CheckpointError(f"{self._project.states} has no numbered state: give load_state a directory.")
            input_dir = found[-1]
        self._fabric.load_state(input_dir)
        number = _NUMBERED.fullmatch(Path(input_dir).name)
        if self._project.automatic_checkpoint_naming and number:
            self._project.continue_from(int(number[1]) + 1)

    def _numbered(self) -> list[Path]:
        """Return the numbered states, the oldest first."""
        found = [each for each in self._project.states.glob("checkpoint_*") if _NUMBERED.fullmatch(each.name)]
        return sorted(found, key=lambda each: int(each.name.rpartition("_")[2]))


def write_object(obj: Any, path: str | os.PathLike[str], safe_serialization: bool) -> None:
    """Write an object with ``torch.save``, or a dict of tensors as safetensors."""
    if not safe_serialization:
        torch.save(obj, path)
        return
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in obj.items()}, path)
