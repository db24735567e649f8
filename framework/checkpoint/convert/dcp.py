"""Folders of torch.distributed.checkpoint: read with torch's own reader, and nested as they were saved."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ...core.errors import CheckpointError
from ...core.torch_internals import without_wrappers
from .detect_format import file_of
from .foreign_state import ForeignOptimizer, Group, SlotState
from .pickles import Pickles

INDEX = ".metadata"


class _Reader(FileSystemReader):
    """Reads pieces from files, with an index that was read before."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _Planner(DefaultLoadPlanner):
    """Reads values that are not tensors like other pickles: torch's planner unpickles whatever they name."""

    def __init__(self, folder: Path, pickles: Pickles) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder, self._pickles = folder, pickles

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = self._pickles.loaded(self._folder, value, (name,))


def read_nested(folder: Path, pickles: Pickles) -> dict[str, Any]:
    """Return the state that was saved to a folder.

    Raises:
        CheckpointError: the folder is damaged, or names what is not read.
    """
    index = _index(folder, pickles)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else ""
        for name, entry in index.state_dict_metadata.items()
    }
    try:
        with warnings.catch_warnings():
            # That this is a single process.
            warnings.simplefilter("ignore", UserWarning)
            load(state, storage_reader=_Reader(folder, index), planner=_Planner(folder, pickles), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(f"{folder} cannot be read ({type(cause).__name__}: {cause}).") from cause
    return _nested(state, index.planner_data or {}, folder)


def _index(folder: Path, pickles: Pickles) -> Metadata:
    """Return the index, in which all files are of the folder and all elements of a tensor have a place."""
    index = pickles.index(file_of(folder, INDEX))
    try:
        index.storage_meta = StorageMeta()
        for name in sorted({info.relative_path for info in index.storage_data.values()}):
            file_of(folder, name)
        for name, entry in index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                held = sum(prod(chunk.sizes) for chunk in entry.chunks)
                if held != prod(entry.size):
                    raise CheckpointError(f"{folder} holds {held} of {prod(entry.size)} elements of {name!r}.")
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX} is not an index of torch.distributed.checkpoint ({error}).") from error
    found: Metadata = index
    return found


def _nested(state: Mapping[str, Any], paths: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    tree: dict[Any, Any] = {}
    for name, value in state.items():
        if not paths.get(name):
            raise CheckpointError(f"{folder} does not say where {name!r} belongs; it was saved without its planner.")
        place = tree
        *outer, last = paths[name]
        for key in outer:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{folder} holds {name!r} inside of a value; it is damaged.")
        place[last] = value
    return tree


def tensors_of(tree: Any, source: object) -> dict[str, Tensor]:
    """Return a model's tensors by name.

    Raises:
        CheckpointError: there are none.
    """
    found = {name: value for name, value in tree.items() if isinstance(value, Tensor)} if isinstance(tree, dict) else {}
    if not found:
        raise CheckpointError(f"{source} holds no tensors of a model where they belong.")
    return found


def named_optimizer(tree: Mapping[Any, Any], source: object, prefix: str = "") -> ForeignOptimizer:
    """Return an optimizer whose state is kept by names.

    Raises:
        CheckpointError: it is kept by position, or not as torch writes it.
    """
    groups = _unnested(tree.get("param_groups", []))
    named = []
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{source} holds an optimizer whose groups do not name their parameters.")
        hyper = {key: _unnested(value) for key, value in group.items() if key not in ("params", "param_names")}
        named.append(Group([prefix + without_wrappers(name) for name in names], hyper))
    state: SlotState = {prefix + without_wrappers(name): dict(slots) for name, slots in tree.get("state", {}).items()}
    return ForeignOptimizer(named, state)


def _unnested(value: Any) -> Any:
    """Rebuild a list that holds tensors or dicts, and was saved as a dict by position."""
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return [value[key] for key in sorted(value)]
    return value
