"""Verification of every byte of a checkpoint. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError
from ..storage.mirror import refreshed
from .manifest import Manifest, read_manifest
from .safetensors_header import CHUNK_BYTES, FileRecord, open_tensor_file, parse_header

_Header: TypeAlias = "dict[str, tuple[str, tuple[int, ...], int, int, str]]"
"""For each tensor in a file: dtype, shape, first byte, end, and checksum."""

# A running fit may replace the checkpoint that is being read.
_MOST_READINGS = 3


@names_arguments
def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a checkpoint and return a list of problems, one sentence each; empty if it is good."""
    given = path
    for _ in range(_MOST_READINGS):
        path = refreshed(given)
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            return [str(error)]
        problems = problems_of(path, manifest, manifest.files)
        if not problems or not was_replaced(path, manifest):
            break
    return problems


def was_replaced(path: str | os.PathLike[str], manifest: Manifest) -> bool:
    """Whether the checkpoint was replaced since ``manifest`` was read: files read later belong to the new one."""
    try:
        return read_manifest(path) != manifest
    except CheckpointError:
        return False


def problems_of(path: str | os.PathLike[str], manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Read every byte of some of a checkpoint's files and return a list of problems, one sentence each."""
    return [problem for _, found in _problems(Path(path), manifest, files) for problem in found]


def bad_files(path: str | os.PathLike[str], manifest: Manifest, files: Iterable[str]) -> set[str]:
    """Read some of a checkpoint's files and return the names of those that are damaged."""
    return {name for name, found in _problems(Path(path), manifest, files) if any(True for _ in found)}


def _problems(path: Path, manifest: Manifest, files: Iterable[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the names of some files, each with a sentence for each of its problems; reads as far as they are asked."""
    for name, expected in _expected_headers(manifest, files).items():
        yield name, _file_problems(path / name, manifest.files[name], expected)


@names_arguments
def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint has a good manifest and files of the right sizes. Cheap: no tensor is read."""
    try:
        path = refreshed(path)
        return first_incomplete(path, read_manifest(path)) is None
    except CheckpointError:
        return False


def first_incomplete(path: str | os.PathLike[str], manifest: Manifest) -> str | None:
    """Return the problem of the first file that is missing or has another size or header; None if all files match."""
    try:
        for name, record in manifest.files.items():
            open_tensor_file(Path(path) / name, record)
    except CheckpointError as error:
        return str(error)
    return None


def _file_problems(path: Path, record: FileRecord, expected: _Header) -> Iterator[str]:
    from xxhash import xxh3_64

    try:
        file = open_tensor_file(path, record)
        header = file.read(record.header_size)
        whole = xxh3_64(header)
        # The header, which other readers of safetensors use, must agree with the manifest.
        if parse_header(header) != {name: fields[:4] for name, fields in expected.items()}:
            yield f"the header of {str(path)!r} contradicts the manifest."
        scratch = memoryview(bytearray(CHUNK_BYTES))
        for name, (_, _, start, end, checksum) in sorted(expected.items(), key=lambda item: item[1][2:4]):
            digest = xxh3_64()
            for position in range(start, end, CHUNK_BYTES):
                chunk = scratch[: min(CHUNK_BYTES, end - position)]
                file.read_into(chunk, position)
                digest.update(chunk)
                whole.update(chunk)
            if digest.hexdigest() != checksum:
                yield f"tensor {name!r} in {str(path)!r} does not match its checksum."
    except CheckpointError as error:
        yield str(error)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        yield f"the header of {str(path)!r} is not a safetensors header ({error})."
    else:
        if whole.hexdigest() != record.xxh3_64:
            yield f"{str(path)!r} does not match its checksum."


def _expected_headers(manifest: Manifest, files: Iterable[str]) -> dict[str, _Header]:
    """Return the parts in each of some files, in one pass over all parts: their number grows with the number of
    ranks."""
    found: dict[str, _Header] = {name: {} for name in files}
    for tensors in manifest.sections.values():
        for name, record in tensors.items():
            if isinstance(record, str):
                continue
            for part in record.parts:
                if part.file in found:
                    end = part.start + record.size_of(part)
                    found[part.file][name] = (record.dtype, part.shape, part.start, end, part.xxh3_64)
    return found
