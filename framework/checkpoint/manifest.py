"""The manifest of a checkpoint: the location and the checksum of every piece of a tensor. Does not import torch.

``manifest.json`` begins with the 31 bytes ``{"checksum":"0123456789abcdef",``; the checksum is the XXH3-64 of the byte
``{`` followed by all that comes after these 31. It is verified before the rest of the file is parsed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..core.errors import CheckpointError, did_you_mean
from .safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, RESERVED_NAME, FileRecord, PlainFile, byte_size, distinct

JSON: TypeAlias = Any
"""None, bool, int, finite float, str, and lists and string-keyed dicts of them."""

MANIFEST = "manifest.json"
FORMAT = "phalanx-checkpoint"
VERSION = 3
"""The newest format version. Version 2 has the documents of the ranks in the manifest, version 1 has in addition no
tensors that are left out."""
RANKS = "ranks"
"""The section of the documents of the ranks, as bytes. In the manifest they would be most of what is read to list
checkpoints, and a thousand ranks would make it 20 MB."""
MODEL = "model"
STATE = "state"
AVERAGES = "averages"
_START = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')
FILE_NAME = re.compile(r"([a-z][a-z0-9_]*)-[0-9]{5,9}\.safetensors")
SECTION_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
MAX_MANIFEST_BYTES = 1 << 30
"""The size limit of a manifest, which is read into memory; a checkpoint of 6 million parts fits."""
START_BYTES = 31


@dataclass(frozen=True)
class Part:
    """A piece of a tensor in a file: a box at ``offsets``, or a range of the flattened tensor (``is_flat``)."""

    file: str
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    xxh3_64: str


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: the code of its dtype, its global shape, and parts that cover it exactly once.

    A tensor that the checkpoint leaves out has no parts, and a fingerprint of its values: ``fingerprint.fingerprint``.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fingerprint: str | None = None

    def size_of(self, part: Part) -> int:
        """Return the size of a part in bytes."""
        return byte_size(part.shape, self.dtype)


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``. In ``sections``, a string denotes a tensor tied to the one of that name."""

    sections: dict[str, dict[str, TensorRecord | str]]
    files: dict[str, FileRecord]
    document: JSON = None
    rank_documents: list[JSON] = field(default_factory=list)
    """One for each rank, unless they are in the section ``RANKS``."""
    nonfinite: str | None = None
    sharded: bool = False
    world_size: int = 1
    saved_at: float = 0.0
    phalanx: str = ""
    checksum: str = field(default="", compare=False)
    """The checksum of the manifest's bytes, and so of its contents; empty until it is written."""

    @property
    def version(self) -> int:
        """The format version: the oldest one that has everything that this checkpoint contains."""
        if RANKS in self.sections:
            return VERSION
        return 2 if self.left_out else 1

    @property
    def left_out(self) -> dict[str, TensorRecord]:
        """The tensors of the model that the checkpoint leaves out, by name."""
        model = self.sections.get(MODEL, {})
        return {name: one for name, one in model.items() if isinstance(one, TensorRecord) and one.fingerprint}


def dump(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``, one line for each field and tensor.

    Raises:
        ValueError, TypeError: a document is not strict JSON, or the manifest exceeds the size limit.
    """
    from xxhash import xxh3_64_hexdigest

    fields = {
        "format": FORMAT,
        "version": manifest.version,
        "phalanx": manifest.phalanx,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "sharded": manifest.sharded,
        "finite": manifest.nonfinite is None,
        "nonfinite": manifest.nonfinite,
        "document": manifest.document,
        "rank_documents": manifest.rank_documents,
    }
    lines = [f"{text_of(name)}:{text_of(value)}" for name, value in fields.items()]
    lines.append(_block("files", ((name, vars(record)) for name, record in manifest.files.items())))
    sections = (_block(name, map(_tensor_fields, tensors.items())) for name, tensors in manifest.sections.items())
    lines.append('"sections":{\n' + ",\n".join(sections) + "\n}")
    rest = ("\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    if len(rest) + START_BYTES > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(rest):,} bytes is longer than the {MAX_MANIFEST_BYTES:,} that are read")
    return b'{"checksum":"' + xxh3_64_hexdigest(b"{" + rest).encode("ascii") + b'",' + rest


def text_of(value: JSON) -> str:
    """Return strict JSON in ASCII.

    Raises:
        ValueError, TypeError: the value is none.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _block(name: str, items: Iterable[tuple[str, Any]]) -> str:
    return f"{text_of(name)}:{{\n" + ",\n".join(f"{text_of(key)}:{text_of(value)}" for key, value in items) + "\n}"


def _tensor_fields(item: tuple[str, TensorRecord | str]) -> tuple[str, Any]:
    name, record = item
    if isinstance(record, str):
        return name, {"alias": record}
    if record.fingerprint is not None:
        return name, {"dtype": record.dtype, "shape": record.shape, "fingerprint": record.fingerprint}
    return name, {"dtype": record.dtype, "shape": record.shape, "parts": [vars(part) for part in record.parts]}


# ---- bytes to manifest ----------------------------------------------------------------------------------------------


def parse(data: bytes) -> Manifest:
    """Return the manifest in ``data``, validated as far as possible without the tensor files.

    Raises:
        CheckpointError: the manifest is damaged, inconsistent, or has a newer format version.
    """
    from xxhash import xxh3_64_hexdigest

    start = check_start(data)
    if xxh3_64_hexdigest(b"{" + data[start.end() :]).encode("ascii") != start[1]:
        raise CheckpointError("the manifest does not match its checksum; the checkpoint is damaged.")
    try:
        fields = parse_json(data)
        _check_version(fields)
        return _manifest(fields, start[1].decode("ascii"))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the manifest is not one that phalanx writes ({reason}).") from error


def parse_json(data: bytes) -> JSON:
    """Return the value of strict JSON: without duplicate keys, NaN and numbers beyond a float.

    Raises:
        CheckpointError, RecursionError, ValueError: it is none.
    """
    return json.loads(data, object_pairs_hook=distinct, parse_constant=_no_constant, parse_float=_finite)


def check_start(data: bytes) -> re.Match[bytes]:
    """Return the match of a manifest's first 31 bytes, which contain its checksum.

    Raises:
        CheckpointError: the data is not a phalanx manifest.
    """
    start = _START.match(data)
    if start is None:
        raise CheckpointError(f"the manifest does not begin as one of phalanx does; is it damaged? {data[:31]!r}")
    return start


def _no_constant(text: str) -> JSON:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    # JSON allows numbers beyond the range of a float, which Python parses as infinity.
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is beyond what a float holds")
    return value


def _check_version(fields: dict[str, JSON]) -> None:
    if fields["format"] != FORMAT:
        raise CheckpointError(f"format={fields['format']!r}; only {FORMAT!r} is read.")
    version = _natural(fields["version"])
    if version > VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, written by phalanx {fields.get('phalanx')!r}; this phalanx"
            f" reads up to {VERSION}. Update phalanx."
        )


def _manifest(fields: dict[str, JSON], checksum: str) -> Manifest:
    manifest = Manifest(
        sections={
            _matching(SECTION_NAME, section): {name: _tensor(record) for name, record in tensors.items()}
            for section, tensors in fields["sections"].items()
        },
        files={_matching(FILE_NAME, name): _file(record) for name, record in fields["files"].items()},
        document=fields["document"],
        rank_documents=_typed(list, fields["rank_documents"]),
        nonfinite=None if fields["nonfinite"] is None else _typed(str, fields["nonfinite"]),
        sharded=_typed(bool, fields["sharded"]),
        world_size=_natural(fields["world_size"]),
        saved_at=_seconds(fields["saved_at"]),
        phalanx=_typed(str, fields["phalanx"]),
        checksum=checksum,
    )
    for section, tensors in manifest.sections.items():
        for name, record in tensors.items():
            _check_tensor(manifest, section, name, record)
    _check_files(manifest)
    return manifest


def _file(value: JSON) -> FileRecord:
    if _natural(value["header_size"]) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {value['header_size']:,} bytes is more than safetensors knows")
    checksums = (_matching(_CHECKSUM, value["header_xxh3_64"]), _matching(_CHECKSUM, value["xxh3_64"]))
    return FileRecord(_natural(value["size"]), _natural(value["header_size"]), *checksums)


def _tensor(value: JSON) -> TensorRecord | str:
    if "alias" in value:
        return _typed(str, value["alias"])
    dtype = _typed(str, value["dtype"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known")
    if "fingerprint" in value:
        return TensorRecord(dtype, _extent(value["shape"]), (), _matching(_CHECKSUM, value["fingerprint"]))
    if type(value["parts"]) is not list:
        raise TypeError(f"parts={value['parts']!r} is not a list")
    return TensorRecord(dtype, _extent(value["shape"]), tuple(map(_part, value["parts"])))


def _part(value: JSON) -> Part:
    return Part(
        _typed(str, value["file"]),
        _natural(value["start"]),
        _extent(value["offsets"]),
        _extent(value["shape"]),
        _matching(_CHECKSUM, value["xxh3_64"]),
    )


def _check_tensor(manifest: Manifest, section: str, name: str, record: TensorRecord | str) -> None:
    where = f"{section} tensor {name!r}"
    if name == RESERVED_NAME:
        raise ValueError(f"{where} has a name that safetensors reserves")
    if isinstance(record, str):
        if not isinstance(manifest.sections[section].get(record), TensorRecord):
            raise ValueError(f"{where} is an alias of {record!r}, which holds no data")
        return
    # Also if another dim is empty: torch multiplies all dims.
    if prod(max(size, 1) for size in record.shape) * ITEM_BYTES[record.dtype] > _MAX_VALUE:
        raise ValueError(f"{where} has the absurd shape {list(record.shape)}")
    if record.fingerprint is not None:
        if section != MODEL:
            raise ValueError(f"{where} is left out, which only tensors of the model can be")
        return
    problem = coverage_problem(record.shape, ((part.offsets, part.shape) for part in record.parts))
    if problem is not None:
        raise ValueError(f"{where}: {problem}")
    if len({part.file for part in record.parts}) != len(record.parts):
        raise ValueError(f"{where} has two parts in one file")
    for part in record.parts:
        if part.file not in manifest.files or FILE_NAME.fullmatch(part.file)[1] != section:  # type: ignore[index]
            raise ValueError(f"{where} lies in {part.file!r}, which is not a file of this section")


def _check_files(manifest: Manifest) -> None:
    """Check that every byte of every file belongs to its header or to exactly one part, for full checksums."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for tensors in manifest.sections.values():
        for record in tensors.values():
            if isinstance(record, TensorRecord):
                for part in record.parts:
                    ranges[part.file].append((part.start, part.start + record.size_of(part)))
    for name, file in manifest.files.items():
        position = file.header_size
        for start, end in sorted(ranges[name]):
            if start != position:
                raise ValueError(f"file {name!r} has a gap or an overlap at byte {min(start, position)}")
            position = end
        if position != file.size:
            raise ValueError(f"file {name!r} has {file.size:,} bytes where its parts end at {position:,}")


def run_of(manifest: Manifest) -> object:
    """Return the identity of the run that saved a checkpoint; None if the checkpoint does not record it."""
    return manifest.document.get("run") if isinstance(manifest.document, dict) else None


# ---- values, each of which has exactly one JSON type ----------------------------------------------------------------


_MAX_VALUE = 1 << 62
_MAX_DIMS = 64

T = TypeVar("T")


def _natural(value: Any) -> int:
    """Return a count, from 0 to 2^62."""
    if type(value) is not int or not 0 <= value <= _MAX_VALUE:
        raise ValueError(f"{value!r} is not a count")
    return value


def _seconds(value: Any) -> float:
    """Return a time in seconds since 1970."""
    if type(value) not in (int, float) or not 0 <= value < 1e12:
        raise ValueError(f"{value!r} is not a time in seconds since 1970")
    return float(value)


def _extent(value: Any) -> tuple[int, ...]:
    """Return the sizes or offsets of at most 64 dims."""
    if len(_typed(list, value)) > _MAX_DIMS:
        raise ValueError(f"{len(value)} dims are more than {_MAX_DIMS}")
    return tuple(map(_natural, value))


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    """Return a string that matches a pattern."""
    if pattern.fullmatch(_typed(str, value)) is None:
        raise ValueError(f"{value!r} is not of the form {pattern.pattern}")
    return str(value)


def _typed(kind: Callable[..., T], value: Any) -> T:
    """Return a value of exactly the class ``kind``."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} where a {getattr(kind, '__name__', kind)} belongs")
    return value  # type: ignore[no-any-return]


# ---- coverage of a tensor by its parts, checked in a time that is bounded also for a hostile manifest ---------------


Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""The offsets of a part, and its shape."""

# Parts of meshes can be separated along one dim after another; the groups that remain are small.
_MAX_CUTS = 8
_MAX_PAIRWISE = 64


def is_flat(shape: Sequence[int], offsets: Sequence[int]) -> bool:
    """Whether a part is a range of the flattened (row-major) tensor: it has one offset, and the tensor does not have
    one dim."""
    return len(offsets) == 1 and len(shape) != 1


def coverage_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Return the reason why boxes ``(offsets, shape)`` do not cover a tensor exactly once, or None if they do."""
    boxes = list(boxes)
    kinds = {is_flat(shape, offsets) for offsets, _ in boxes}
    if kinds == {True, False}:
        return "parts by dim and parts of the flattened tensor are mixed"
    if kinds == {True}:
        shape = (prod(shape),)
    for offsets, extent in boxes:
        if not len(offsets) == len(extent) == len(shape):
            return f"a part at {list(offsets)} of shape {list(extent)} does not fit the dims of {list(shape)}"
        if any(start + size > whole for start, size, whole in zip(offsets, extent, shape, strict=True)):
            return f"a part at {list(offsets)} of shape {list(extent)} reaches beyond {list(shape)}"
    covered = sum(prod(extent) for _, extent in boxes)
    if covered != prod(shape):
        return f"the parts hold {covered:,} of {prod(shape):,} elements"
    return _overlap([box for box in boxes if prod(box[1])], _MAX_CUTS)


def _overlap(boxes: list[Box], cuts: int) -> str | None:
    """Find two boxes that share an element: separate the boxes along a dim if possible, and check each group.

    Comparing all pairs would take hours for a hundred thousand parts. If no cut is found, only a few boxes may be left.
    """
    if len(boxes) < 2:
        return None
    for dim in range(len(boxes[0][0]) if cuts else 0):
        heaps = _cut_apart(boxes, dim)
        if len(heaps) > 1:
            return next((problem for heap in heaps if (problem := _overlap(heap, cuts - 1))), None)
    if len(boxes) > _MAX_PAIRWISE:
        return f"the {len(boxes)} parts at {list(boxes[0][0])} and beyond overlap, or interlock without a plane between"
    for index, (offsets, extent) in enumerate(boxes):
        for other, size in boxes[:index]:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, extent, other, size, strict=True)):
                return f"the parts at {list(other)} and {list(offsets)} overlap"
    return None


def _cut_apart(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Group the boxes such that a plane across ``dim`` separates the groups."""
    heaps: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        start, size = box[0][dim], box[1][dim]
        if start >= end:
            heaps.append([])
        heaps[-1].append(box)
        end = max(end, start + size)
    return heaps


# ---- the file in a checkpoint ---------------------------------------------------------------------------------------


# The part of a file of torch.save that begins with the keys of the saved dict.
_HEAD_BYTES = 1 << 16


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return a checkpoint's validated manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer format version.
    """
    return parse_at(path, read_manifest_bytes(path))


def parse_at(path: str | os.PathLike[str], data: bytes) -> Manifest:
    """Return the manifest in ``data``, which was read from the checkpoint ``path``.

    Raises:
        CheckpointError: it is damaged, or of a newer format version; the message names the checkpoint.
    """
    try:
        return parse(data)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r}: {error}") from error


def read_manifest_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a checkpoint's manifest; only the beginning is checked.

    Raises:
        CheckpointError: there is no manifest, it is too long, or its first bytes are wrong.
    """
    folder = Path(path)
    _check_directory(folder)
    file = PlainFile(folder / MANIFEST)
    # The first bytes identify a manifest before a file of any size is read.
    try:
        check_start(file.read(min(file.size, START_BYTES)))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r}: {error}") from error
    if file.size > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: its manifest has {file.size:,} bytes, more than the {MAX_MANIFEST_BYTES:,} "
            "that are read; it is damaged."
        )
    return file.read(file.size)


def _how_to_read(path: Path) -> str:
    """Return the next step for a file that is given as a checkpoint; nothing of it is unpickled."""
    load = "module.load_state_dict(torch.load(path, weights_only=True)) before"
    convert = f"convert it: phalanx checkpoint convert {path} OUT"
    head = b""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(b"PK"):
        return f"If torch.save wrote a state_dict to it, call {load}; if Lightning wrote it, {convert}."
    if b"pytorch-lightning_version" in head:
        return f"Lightning wrote it: {convert}."
    return f"torch.save wrote it: if it holds a state_dict, call {load}, and leave the path out."


def _check_directory(folder: Path) -> None:
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is a file, and a checkpoint is a directory. {_how_to_read(folder)}"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {str(folder)!r} does not exist.{_interrupted(folder)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} cannot be read: {error}.") from error
    if MANIFEST not in names:
        several = sum(os.path.lexists(folder / name / MANIFEST) for name in names)
        below = f" It is a directory of {several}: `phalanx checkpoint list` shows them." if several else ""
        raise CheckpointError(
            f"{str(folder)!r} holds no {MANIFEST}: it is not a checkpoint, or not a complete one.{below}"
        )


def _interrupted(folder: Path) -> str:
    try:
        names = os.listdir(folder.parent)
    except OSError:
        return ""
    if any(name.startswith(f".{folder.name}.") and name.endswith(".old") for name in names):
        return " A replacement of it was interrupted: phalanx.checkpoint.clean_leftovers puts the previous one back."
    return did_you_mean(folder.name, [name for name in names if not name.startswith(".")])


def is_ours(path: Path) -> bool:
    """Whether a directory contains only files of a checkpoint, damaged or not, so that deleting it is safe."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = os.listdir(path)
    return all(name == MANIFEST or FILE_NAME.fullmatch(name) for name in names)
