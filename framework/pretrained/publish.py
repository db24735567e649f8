"""Weight files in the layout of Hugging Face's libraries, and the replacement of those in a folder."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.safetensors_export import PlainTensors, write_plain
from ..system.atomic_directories import replace_directory
from ..system.atomic_files import sync_directory
from .weight_folder import INDEX, SINGLE


def write_weight_files(tensors: PlainTensors, folder: Path, max_shard_size: int | str) -> None:
    """Write ``model.safetensors``, or shards and an index, into a folder that has no such files.

    Raises:
        ConfigurationError: ``max_shard_size`` is not a size, or a number does not fit into the dtype.
        StorageError: a file cannot be written.
    """
    shards = write_plain(tensors, folder / ".shards", max_shard_size)
    files = sorted(shards.glob("*.safetensors"))
    if len(files) == 1:
        os.replace(files[0], folder / SINGLE)
        (shards / INDEX).unlink()
    else:
        for path in (*files, shards / INDEX):
            os.replace(path, folder / path.name)
    shards.rmdir()


def sync_files(folder: Path) -> None:
    """Sync the files in a folder that another library has written."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def publish_folder(finished: Path, folder: Path) -> None:
    """Give a finished folder, whose files are synced, its name.

    If the folder exists, its files are replaced one by one, the index last; then weight files of a model that are not
    needed any more are removed. Its other files stay. Until then the folder cannot be opened, unless one file holds all
    weights before and after.
    """
    if not os.path.lexists(folder):
        replace_directory(finished, folder)
        return
    names = sorted((path.name for path in finished.iterdir()), key=lambda name: (name == INDEX, name))
    has_model = INDEX in names or SINGLE in names
    if INDEX in names or (has_model and (folder / INDEX).exists()):
        # If the process is killed in between, shards of two models must not be opened as one.
        for name in (INDEX, SINGLE):
            (folder / name).unlink(missing_ok=True)
        sync_directory(folder)
    for name in names:
        os.replace(finished / name, folder / name)
    for path in folder.glob("model-*-of-*.safetensors") if has_model else ():
        if path.name not in names:
            path.unlink(missing_ok=True)
    sync_directory(folder)
    finished.rmdir()
