"""The process that reads foreign pickles: bounded, with torch's safe unpickler, handing over JSON and safetensors.

``request.json`` names the files to read. Whatever a file does to this process, at worst the process fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ...core.errors import PhalanxError
from ..codec import encode
from ..safetensors_io import CODES, write_tensor_file
from .dcp_files import ShardedFiles
from .placeholder_objects import allowed, as_plain
from .sandbox import confine

REQUEST, FAILURE, BLOCKED = "request.json", "failure.json", ("sys", "os", "posix", "nt")


class Refused(Exception):
    """Raised for a file that is refused; the message is a sentence for the user."""


def main(folder: str) -> None:
    """Carry out ``request.json`` in ``folder``; write ``failure.json`` where it cannot be done."""
    directory = Path(folder)
    request = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    confine(request["memory_bytes"], request["seconds"], request["file_bytes"])
    job: dict[str, Any] = {"path": "the request"}
    try:
        with torch.serialization.safe_globals(allowed(request["leave_out"])):
            for number, job in enumerate(request["jobs"]):
                _run(job, directory / f"{number:05d}", request["leave_out"])
    except BaseException as error:
        reason = str(error) if isinstance(error, Refused) else _reason(error)
        (directory / FAILURE).write_text(json.dumps({"path": job["path"], "reason": reason}), encoding="utf-8")
        sys.exit(1)


def _run(job: dict[str, Any], target: Path, leave_out: list[str]) -> None:
    path, left = Path(job["path"]), list[str]()
    if job["kind"] == "sharded":
        files = ShardedFiles(path, open_plainly, lambda file: unpickled(file, leave_out))
        values = {name: as_plain(value, name, left) for name, value in files.values().items()}
        document = {"values": values, "paths": {name: list(found) for name, found in files.paths.items()}}
        specs = [(name, dtype, shape) for name, (dtype, shape) in files.tensors.items()]
        _write(target, document, specs, files.read, {}, left)
        return
    with open_plainly(path) as file:
        content = as_plain(unpickled(file, leave_out), "", left)
    encoded, tensors = encode(content)
    owners: dict[Any, str] = {}
    aliases = {name: owner for name, tensor in tensors.items() if (owner := _owner(owners, name, tensor)) != name}
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name not in aliases]
    _write(target, encoded, specs, tensors.__getitem__, aliases, left, encoded=True)


def _write(
    target: Path,
    document: Any,
    specs: list[tuple[str, torch.dtype, tuple[int, ...]]],
    fetch: Callable[[str], Tensor],
    aliases: dict[str, str],
    left: list[str],
    encoded: bool = False,
) -> None:
    for name, dtype, _ in specs:
        if dtype not in CODES:
            raise Refused(f"its tensor {name!r} is {dtype}, which cannot be kept")
    write_tensor_file(target.with_suffix(".safetensors"), specs, fetch)
    if not encoded:
        document, tensors = encode(document)
        if tensors:
            raise Refused("it holds tensors where plain values belong")
    description = {"document": document, "aliases": aliases, "left": left}
    target.with_suffix(".json").write_text(json.dumps(description), encoding="utf-8")


def open_plainly(path: Path) -> BinaryIO:
    """Open a regular file, and nothing through a link."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused("it is not a regular file")
    return os.fdopen(handle, "rb")


def unpickled(file: BinaryIO, leave_out: list[str]) -> Any:
    """Read a file with torch's safe unpickler.

    Raises:
        Refused: it names classes that are neither known nor to be left out.
    """
    unknown: list[str] = []
    # Files written before torch 1.6 are not archives; those the unpickler itself stops at the first unknown name.
    with contextlib.suppress(ValueError):
        unknown = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if unknown:
        blocked = [name for name in unknown if name.rpartition(".")[0] in BLOCKED]
        shown = ", ".join((blocked or unknown)[:10])
        advice = (
            "no checkpoint needs those, so trust nothing of it"
            if blocked
            else f"to have such values left out, pass leave_out={unknown!r}"
        )
        raise Refused(f"its pickle names what is not read: {shown}; {advice}")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _owner(owners: dict[Any, str], name: str, tensor: Tensor) -> str:
    if not tensor.numel():
        return name
    where = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return owners.setdefault(where, name)


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError) or "not enough memory" in str(error) or "allocate" in str(error):
        return "it needs more memory than reading it may take"
    if isinstance(error, PhalanxError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
