"""Reader of torch.distributed.checkpoint folders: parses the index, and assembles each tensor from its pieces."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..safetensors_io import DTYPES
from .pickle_reader import Built, Named, read_inert

METADATA = ".metadata"
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
_MOST_METADATA_BYTES = 1 << 30

Open = Callable[[Path], BinaryIO]
Unpickle = Callable[[BinaryIO], Any]


@dataclass
class _Place:
    file: str
    offset: int
    length: int


@dataclass
class _Entry:
    """A tensor, or with ``dtype`` None any other value."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], _Place]] = field(default_factory=list)


class ShardedFiles:
    """The entries of a folder by their flat names.

    Raises:
        ValueError: the index is not one that torch.distributed.checkpoint writes.
    """

    def __init__(self, folder: Path, open_file: Open, unpickle: Unpickle) -> None:
        self._folder, self._open, self._unpickle = folder, open_file, unpickle
        with open_file(folder / METADATA) as file:
            metadata = read_inert(file.read(_MOST_METADATA_BYTES))
        if not isinstance(metadata, Built):
            raise ValueError("the index holds no Metadata")
        attributes = metadata.attributes()
        self.paths: dict[str, tuple[Any, ...]] = {
            name: tuple(path) for name, path in (attributes.get("planner_data") or {}).items()
        }
        self._entries = _entries(attributes)

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor."""
        return {name: (entry.dtype, entry.shape) for name, entry in self._entries.items() if entry.dtype is not None}

    def values(self) -> dict[str, Any]:
        """Return all values that are not tensors."""
        return {
            name: self._unpickle(io.BytesIO(self._read(entry.pieces[0][2])))
            for name, entry in self._entries.items()
            if entry.dtype is None
        }

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, put together from its pieces."""
        entry = self._entries[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        covered = 0
        for offsets, sizes, place in entry.pieces:
            piece = self._unpickle(io.BytesIO(self._read(place)))
            if not isinstance(piece, Tensor) or tuple(piece.shape) != sizes or piece.dtype != entry.dtype:
                raise ValueError(f"the piece of {name!r} at {list(offsets)} is not what the index says")
            part = whole
            for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(piece)
            covered += prod(sizes)
        if covered != whole.numel():
            raise ValueError(f"the pieces of {name!r} hold {covered} of {whole.numel()} elements")
        return whole

    def _read(self, place: _Place) -> bytes:
        with self._open(self._folder / place.file) as file:
            file.seek(place.offset)
            data = file.read(place.length)
        if len(data) != place.length:
            raise ValueError(f"{place.file} ends too early")
        return data


def _entries(attributes: dict[str, Any]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, described in attributes["state_dict_metadata"].items():
        fields = described.attributes()
        entries[name] = _Entry(_dtype(fields), _size(fields["size"])) if "properties" in fields else _Entry(None, ())
    sizes = {
        (name, _size(chunk.attributes()["offsets"])): _size(chunk.attributes()["sizes"])
        for name, described in attributes["state_dict_metadata"].items()
        for chunk in described.attributes().get("chunks", ())
    }
    for index, stored in attributes["storage_data"].items():
        where, info = index.attributes(), stored.attributes()
        name = where["fqn"]
        offsets = _size(where["offset"]) if where.get("offset") is not None else ()
        entries[name].pieces.append((offsets, sizes.get((name, offsets), ()), _place(info)))
    missing = [name for name, entry in entries.items() if not entry.pieces and 0 not in entry.shape]
    if missing:
        raise ValueError(f"the index says nowhere where {missing[0]!r} lies")
    return entries


def _dtype(fields: dict[str, Any]) -> torch.dtype:
    named = fields["properties"].state[0]
    name = named.name if isinstance(named, Named | Built) else str(named)
    if name not in _DTYPES:
        raise ValueError(f"the dtype {name} is not read")
    return _DTYPES[name]


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a ``torch.Size``."""
    if isinstance(value, Built):
        value = value.arguments[0] if value.arguments else ()
    return tuple(int(number) for number in value)


def _place(info: dict[str, Any]) -> _Place:
    if info.get("transform_descriptors"):
        raise ValueError("its files are compressed or otherwise transformed, which is not read")
    place = _Place(str(info["relative_path"]), int(info["offset"]), int(info["length"]))
    if Path(place.file).name != place.file or place.file in ("", ".", ".."):
        raise ValueError(f"the index points to {place.file!r}, which is not a file of the folder itself")
    return place
