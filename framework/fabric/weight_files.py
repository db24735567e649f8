"""``model.safetensors``, or its shards and an index: weights in the layout that Hugging Face's libraries read."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..checkpoint.manifest import MODEL
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.safetensors_export import PlainTensors, section_tensors
from ..pretrained.saving import publish_folder, write_weight_files
from ..pretrained.weight_folder import open_weights
from ..system.atomic_directories import remove_tree
from ..system.atomic_files import hidden_sibling, make_directory


def publish_weights(draft: Path, directory: Path, max_shard_size: int | str) -> None:
    """Turn a checkpoint of one module into weight files in ``directory``; the checkpoint is removed.

    New files replace old ones before old shards that are no longer needed are removed.
    """
    finished = hidden_sibling(directory, "tmp")
    try:
        make_directory(finished)
        write_weight_files(PlainTensors(section_tensors(open_checkpoint(draft), MODEL)), finished, max_shard_size)
        publish_folder(finished, directory)
    finally:
        for leftover in (finished, draft):
            if leftover.exists():
                remove_tree(leftover)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint, a ``.safetensors`` file, or a directory of weight files, by name.

    Raises:
        CheckpointError: there are no readable weights.
    """
    return {name: stored.read() for name, stored in open_weights(path).tensors.items()}
