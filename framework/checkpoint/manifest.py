"""The manifest of a checkpoint: the location and the checksum of every piece of a tensor.

``manifest.json`` begins with the 31 bytes ``{"checksum":"0123456789abcdef",``; the checksum is the XXH3-64 of the byte
``{`` followed by all that comes after these 31. It is verified before the rest of the file is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, TypeAlias

from ..core.errors import CheckpointError
from .manifest_values import MAX_VALUE, extent, matching, natural, seconds, typed
from .safetensors_header import ITEM_BYTES, MAX_HEADER_BYTES, RESERVED_NAME, FileRecord, byte_size, distinct
from .tiling import coverage_problem

JSON: TypeAlias = Any
"""None, bool, int, finite float, str, and lists and string-keyed dicts of them."""

MANIFEST = "manifest.json"
FORMAT = "phalanx-checkpoint"
VERSION = 2
"""The newest format version. Version 1 has no tensors that are left out."""
MODEL = "model"
_START = re.compile(rb'\{"checksum":"([0-9a-f]{16})",')
FILE_NAME = re.compile(r"([a-z][a-z0-9_]*)-[0-9]{5,9}\.safetensors")
SECTION_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
MAX_MANIFEST_BYTES = 1 << 30
"""The size limit of a manifest, which is read into memory; a checkpoint of 6 million parts fits."""
START_BYTES = 31


@dataclass(frozen=True)
class Part:
    """A piece of a tensor in a file: a box at ``offsets``, or a range of the flattened tensor (``cover.is_flat``)."""

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
        return VERSION if self.left_out else 1

    @property
    def left_out(self) -> dict[str, TensorRecord]:
        """The tensors of the model that the checkpoint leaves out, by name."""
        model = self.sections.get(MODEL, {})
        return {name: one for name, one in model.items() if isinstance(one, TensorRecord) and one.fingerprint}


def left_out_message(path: object, name: str, count: int) -> str:
    """Return the sentence about a tensor that is to be read, and that the checkpoint leaves out."""
    return (
        f"{str(path)!r} leaves out {name!r}, one of {count} frozen weights that it does not contain: load it into a "
        "module that is built with the same base, with load_from_checkpoint or ckpt_path=."
    )


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
    lines = [f"{_text(name)}:{_text(value)}" for name, value in fields.items()]
    lines.append(_block("files", ((name, vars(record)) for name, record in manifest.files.items())))
    sections = (_block(name, map(_tensor_fields, tensors.items())) for name, tensors in manifest.sections.items())
    lines.append('"sections":{\n' + ",\n".join(sections) + "\n}")
    rest = ("\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    if len(rest) + START_BYTES > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(rest):,} bytes is longer than the {MAX_MANIFEST_BYTES:,} that are read")
    return b'{"checksum":"' + xxh3_64_hexdigest(b"{" + rest).encode("ascii") + b'",' + rest


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _block(name: str, items: Iterable[tuple[str, Any]]) -> str:
    return f"{_text(name)}:{{\n" + ",\n".join(f"{_text(key)}:{_text(value)}" for key, value in items) + "\n}"


def _tensor_fields(item: tuple[str, TensorRecord | str]) -> tuple[str, Any]:
    name, record = item
    if isinstance(record, str):
        return name, {"alias": record}
    if record.fingerprint is not None:
        return name, {"dtype": record.dtype, "shape": record.shape, "fingerprint": record.fingerprint}
    return name, {"dtype": record.dtype, "shape": record.shape, "parts": [vars(part) for part in record.parts]}


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
        fields = json.loads(data, object_pairs_hook=distinct, parse_constant=_no_constant, parse_float=_finite)
        _check_version(fields)
        return _manifest(fields, start[1].decode("ascii"))
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the manifest is not one that phalanx writes ({reason}).") from error


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
    version = natural(fields["version"])
    if version > VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, written by phalanx {fields.get('phalanx')!r}; this phalanx"
            f" reads up to {VERSION}. Update phalanx."
        )


def _manifest(fields: dict[str, JSON], checksum: str) -> Manifest:
    manifest = Manifest(
        sections={
            matching(SECTION_NAME, section): {name: _tensor(record) for name, record in tensors.items()}
            for section, tensors in fields["sections"].items()
        },
        files={matching(FILE_NAME, name): _file(record) for name, record in fields["files"].items()},
        document=fields["document"],
        rank_documents=typed(list, fields["rank_documents"]),
        nonfinite=None if fields["nonfinite"] is None else typed(str, fields["nonfinite"]),
        sharded=typed(bool, fields["sharded"]),
        world_size=natural(fields["world_size"]),
        saved_at=seconds(fields["saved_at"]),
        phalanx=typed(str, fields["phalanx"]),
        checksum=checksum,
    )
    for section, tensors in manifest.sections.items():
        for name, record in tensors.items():
            _check_tensor(manifest, section, name, record)
    _check_files(manifest)
    return manifest


def _file(value: JSON) -> FileRecord:
    if natural(value["header_size"]) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {value['header_size']:,} bytes is more than safetensors knows")
    checksums = (matching(_CHECKSUM, value["header_xxh3_64"]), matching(_CHECKSUM, value["xxh3_64"]))
    return FileRecord(natural(value["size"]), natural(value["header_size"]), *checksums)


def _tensor(value: JSON) -> TensorRecord | str:
    if "alias" in value:
        return typed(str, value["alias"])
    dtype = typed(str, value["dtype"])
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} is not known")
    if "fingerprint" in value:
        return TensorRecord(dtype, extent(value["shape"]), (), matching(_CHECKSUM, value["fingerprint"]))
    if type(value["parts"]) is not list:
        raise TypeError(f"parts={value['parts']!r} is not a list")
    return TensorRecord(dtype, extent(value["shape"]), tuple(map(_part, value["parts"])))


def _part(value: JSON) -> Part:
    return Part(
        typed(str, value["file"]),
        natural(value["start"]),
        extent(value["offsets"]),
        extent(value["shape"]),
        matching(_CHECKSUM, value["xxh3_64"]),
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
    if prod(max(size, 1) for size in record.shape) * ITEM_BYTES[record.dtype] > MAX_VALUE:
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
