"""Client of the process that reads foreign pickles: starts it, and loads the JSON and safetensors that it wrote."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...core.errors import CheckpointError
from ...core.wording import a_type
from ...system.processes import die_with_parent
from ..codec import decode
from ..convert import unpickle_process
from .unpickle_process import FAILURE, REQUEST

_MODULE = unpickle_process.__name__
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Job:
    """One file, or with ``sharded`` one folder of torch.distributed.checkpoint."""

    path: Path
    sharded: bool = False


class Content(dict[Any, Any]):
    """The contents of a file, and in ``left`` the places that were left out."""

    def __init__(self, content: dict[Any, Any], left: list[str]) -> None:
        super().__init__(content)
        self.left = left


def read_foreign(jobs: Sequence[Job], folder: Path, leave_out: Sequence[str], timeout: float | None) -> list[Content]:
    """Read pickles in a process of its own; return what each holds, as plain values and tensors.

    A sharded folder gives ``{"values": ..., "paths": ..., "tensors": ...}``. ``folder`` is made for this, and the
    tensors are mapped from files in it.

    Raises:
        CheckpointError: a file is refused, damaged, or takes more time or memory than reading it may.
    """
    if not jobs:
        return []
    size = sum(_size(job) for job in jobs)
    seconds = int(300 + size / 20e6 if timeout is None else timeout)
    request = {
        "jobs": [{"path": str(job.path), "kind": "sharded" if job.sharded else "pickle"} for job in jobs],
        "leave_out": list(leave_out),
        "memory_bytes": 3 * size + 2 * _SPARE_BYTES,
        "file_bytes": 2 * size + _SPARE_BYTES,
        "seconds": max(1, seconds),
    }
    folder.mkdir(mode=0o700)
    (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    _run(folder, seconds)
    if (folder / FAILURE).exists():
        failure = _json(folder / FAILURE)
        raise CheckpointError(f"{failure['path']} cannot be converted: {failure['reason']}.")
    return [_taken_over(folder / f"{number:05d}", job) for number, job in enumerate(jobs)]


def _run(folder: Path, seconds: float) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {_MODULE} import main; main({str(folder)!r})"
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            code_of_exit = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CheckpointError(
                f"reading the foreign checkpoint took longer than {seconds:g} seconds and was ended: give a longer "
                "timeout, if you know where the file is from."
            ) from None
        finally:
            process.kill()
            process.wait()
    if code_of_exit and not (folder / FAILURE).exists():
        last = (folder / "output").read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
        how = f"signal {-code_of_exit}" if code_of_exit < 0 else f"exit code {code_of_exit}"
        raise CheckpointError(
            f"the process that reads the foreign checkpoint ended with {how}"
            f"{': ' + last[-1] if last else ''}. The file is damaged, hostile, or too large for this machine."
        )


def _taken_over(base: Path, job: Job) -> Content:
    description = _json(base.with_suffix(".json"))
    tensors = _tensors(base.with_suffix(".safetensors"))
    tensors.update({name: tensors[owner] for name, owner in description["aliases"].items()})
    if job.sharded:
        return Content({**decode(description["document"]), "tensors": tensors}, description["left"])
    content = decode(description["document"], tensors)
    if not isinstance(content, dict):
        raise CheckpointError(f"{job.path} holds {a_type(content)} where a dict is expected.")
    return Content(content, description["left"])


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(_plain(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"what was read of the foreign checkpoint cannot be taken over: {error}.") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(_plain(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"what was read of the foreign checkpoint cannot be taken over: {error}.") from error


def _plain(path: Path) -> Path:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path.name} is not a regular file")
    return path


def _size(job: Job) -> int:
    if not job.sharded:
        return job.path.stat().st_size
    with os.scandir(job.path) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


Reader = Callable[[Sequence[Job]], list[Content]]
"""Reads foreign files in a process of its own."""


@dataclass(frozen=True)
class Request:
    """The source, and the user's objects that tell names."""

    source: Path
    read: Reader
    module: Any = None
    optimizers: Sequence[Optimizer] | None = None
    prefix: str = ""
