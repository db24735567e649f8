"""``Weights``: the tensors of a Hugging Face folder, of a safetensors file or of a checkpoint, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.manifest import MANIFEST, MODEL
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.safetensors_header import distinct
from ..checkpoint.stored_tensor import SavedTensor, StoredTensor
from ..core.errors import CheckpointError
from ..system.atomic_files import absolute
from .file_tensor import TensorFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX_BYTES = 256 << 20


@dataclass
class Weights:
    """The tensors of a folder, a file or a checkpoint. Opening them reads only headers."""

    path: Path
    tensors: dict[str, StoredTensor]
    files: list[TensorFile] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The ``config.json`` of a Hugging Face folder."""


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Open a folder that transformers, timm or ``save_pretrained`` wrote, a ``.safetensors`` file, or a checkpoint.

    Raises:
        CheckpointError: there are no weights that can be read, a file is missing or damaged, the index names a file
            outside of the folder, or the weights are quantized.
    """
    given = absolute(path)
    if (given / MANIFEST).is_file():
        checkpoint = open_checkpoint(given)
        if MODEL not in checkpoint.sections:
            raise CheckpointError(f"{str(given)!r} holds no weights; it holds: {', '.join(checkpoint.sections)}.")
        tensors = {name: SavedTensor(checkpoint, MODEL, name) for name in checkpoint.names(MODEL)}
        return Weights(given, dict(tensors), checkpoint=checkpoint)
    if not given.exists():
        raise CheckpointError(
            f"{os.fspath(path)!r} does not exist. Give a local folder; huggingface_hub.snapshot_download(name) "
            "downloads a model of the hub and returns its folder."
        )
    return _in_folder(given) if given.is_dir() else _in_files(given, [given])


def _in_folder(folder: Path) -> Weights:
    config = _json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{str(folder)!r} holds quantized weights ({CONFIG} has a quantization_config), whose values depend on "
            "scales beside them: give a folder of weights that are not quantized."
        )
    if (folder / INDEX).is_file():
        return _indexed(folder, config)
    if (folder / SINGLE).exists():
        return _in_files(folder, [folder / SINGLE], config)
    pickled = next((name for name in _PICKLES if (folder / name).exists()), None)
    if pickled is not None:
        raise CheckpointError(
            f"{str(folder)!r} holds {pickled}, which is a pickle and is not read: convert it once, with "
            "from_pretrained(...).save_pretrained(...) of transformers."
        )
    raise CheckpointError(f"{str(folder)!r} holds neither {SINGLE} nor {INDEX}, and is not a checkpoint.")


def _indexed(folder: Path, config: dict[str, Any]) -> Weights:
    index = _json(folder / INDEX)
    homes = index.get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(name, str) for name in homes.values()):
        raise CheckpointError(f"{str(folder / INDEX)!r} has no weight_map from names to files; it is damaged.")
    names = sorted(set(homes.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{str(folder / INDEX)!r} names {name!r}, which is not a .safetensors file in the same folder; it is "
                "refused."
            )
    weights = _in_files(folder, [folder / name for name in names], config)
    for name, home in homes.items():
        if name not in weights.tensors:
            raise CheckpointError(f"{str(folder / INDEX)!r} says that {home} holds {name!r}, which it does not.")
    return weights


def _in_files(path: Path, files: list[Path], config: dict[str, Any] | None = None) -> Weights:
    opened = [TensorFile(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in _all_tensors(opened):
        if name in tensors:
            raise CheckpointError(f"{str(path)!r} holds {name!r} in two files; it is damaged.")
        tensors[name] = tensor
    return Weights(path, tensors, opened, config=config or {})


def _all_tensors(files: list[TensorFile]) -> Iterator[tuple[str, StoredTensor]]:
    for file in files:
        yield from file.tensors.items()


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_bytes(), object_pairs_hook=distinct)
        if not isinstance(found, dict):
            raise TypeError("it is not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from error
    return found
