"""The settings with which a model of transformers generates: the ``generation_config.json`` of its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import CheckpointError
from .transformers_models import is_transformers_model

_FILE, _OLDER_FILE = "generation_config.json", "config.json"


def use_generation_config(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Let a model generate as one of ``from_pretrained`` does, with the settings of the folder that its weights are of.

    Without effect if the model does not generate, or if ``path`` is not a folder of transformers.

    Raises:
        CheckpointError: the settings cannot be read.
    """
    if not is_transformers_model(model):
        return
    generator: Any = model
    found = stored_generation_config(path) if generator.can_generate() else None
    if found is not None:
        generator.generation_config = found


def stored_generation_config(path: str | os.PathLike[str]) -> Any:
    """Return the ``GenerationConfig`` of a folder; None if it has none.

    Older folders have its values in ``config.json``.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = Path(path)
    file = next((name for name in (_FILE, _OLDER_FILE) if (folder / name).is_file()), None)
    if file is None:
        return None
    from transformers import GenerationConfig

    options: dict[str, Any] = {} if file == _FILE else {"_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(folder, config_file_name=file, local_files_only=True, **options)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
