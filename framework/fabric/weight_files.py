"""``model.safetensors``, or its shards and an index: weights in the layout that Hugging Face's libraries read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import Tensor

from ..checkpoint.consolidate import consolidate
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.whole_checkpoint import weights
from ..core.errors import CheckpointError
from ..system.atomic_directories import remove_tree

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def publish_weights(draft: Path, directory: Path, max_shard_size: int | str) -> None:
    """Turn a checkpoint of one module into weight files in ``directory``; the checkpoint is removed.

    New files replace old ones before old shards that are no longer needed are removed.
    """
    shards = directory / ".shards"
    try:
        if shards.exists():
            remove_tree(shards)
        consolidate(draft, shards, max_shard_size)
        files = sorted(path.name for path in shards.glob("*.safetensors"))
        single = len(files) == 1
        for name in files:
            os.replace(shards / name, directory / (_SINGLE if single else name))
        if single:
            (directory / _INDEX).unlink(missing_ok=True)
        else:
            os.replace(shards / _INDEX, directory / _INDEX)
        written = {_SINGLE} if single else set(files)
        for path in [*directory.glob("model-*-of-*.safetensors"), directory / _SINGLE]:
            if path.name not in written:
                path.unlink(missing_ok=True)
    finally:
        for leftover in (shards, draft):
            if leftover.exists():
                remove_tree(leftover)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint, a ``.safetensors`` file, or a directory of weight files, by name.

    Raises:
        CheckpointError: there are no readable weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.is_dir() and (path / MANIFEST).exists():
        return weights(path)
    files = [path]
    if path.is_dir():
        index = path / _INDEX
        files = [path / _SINGLE]
        if index.exists():
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [path / name for name in sorted(set(table.values()))]
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} holds no weights that can be read ({error}): give a checkpoint, a .safetensors file, or a "
            "directory with model.safetensors."
        ) from error
