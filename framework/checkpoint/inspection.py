"""Description of checkpoints from their manifests, their list, and the search for the one to resume from.

The search goes by contents and never by a pointer file. Does not import torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError
from ..storage.mirror import refreshed
from ..storage.remote_file import download_file
from ..system.atomic_files import storage_error
from .manifest import JSON, MANIFEST, Manifest, TensorRecord, parse_at, read_manifest, read_manifest_bytes
from .verify import first_incomplete, verify, verify as verified

_COUNTERS = ("epoch", "batch_in_epoch", "global_batch", "global_step")


@dataclass(frozen=True)
class SectionSummary:
    """The contents of a section: the number of tensors, elements, bytes, and names that are tied to others."""

    tensors: int
    tied: int
    elements: int
    bytes: int
    bytes_by_dtype: dict[str, int]
    """Bytes by the safetensors code of the dtype: ``F32``, ``BF16``, ..."""
    left_out: int = 0
    """The number of frozen tensors that the checkpoint leaves out, which the other fields do not count."""
    left_out_elements: int = 0
    """The number of their elements."""


@dataclass(frozen=True)
class OptimizerSummary:
    """An optimizer's class, and for each of its groups the number of parameters and the hyperparameters."""

    kind: str
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint. Fields that it does not contain are `None` or empty."""

    path: str
    format_version: int
    phalanx: str
    saved_at: float
    """Seconds since 1970."""
    kind: str
    """``"trainer"``, ``"weights"`` (of a Trainer, no training), ``"fabric"`` or ``"other"``."""
    module: str | None
    strategy: str | None
    precision: str | None
    world_size: int
    sharded: bool
    epoch: int | None
    batch: int | None
    """Micro-batches of each rank within the epoch."""
    step: int | None
    """Optimizer steps that were applied."""
    finite: bool
    nonfinite: str | None
    """The first weight that is not finite."""
    sections: dict[str, SectionSummary]
    files: dict[str, int]
    """Bytes of each tensor file."""
    bytes: int
    optimizers: list[OptimizerSummary]
    hparams: dict[str, Any]
    """As in the manifest: values that JSON does not support are objects with the key ``"$"``."""
    unsaved_hparams: list[str]
    metrics: dict[str, float]
    """The logged metrics that are numbers."""


@names_arguments
def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describe a checkpoint by its manifest; use ``verify`` to check the files.

    Raises:
        CheckpointError: there is no checkpoint, its manifest is damaged, or it has a newer format version.
    """
    return inspection_of(path, read_manifest(refreshed(path)))


def inspection_of(path: str | os.PathLike[str], manifest: Manifest) -> Inspection:
    """Describe the checkpoint ``path`` by its manifest."""
    document = _dict(manifest.document)
    progress = _dict(document.get("progress"))
    epoch, batch, _, step = (_count(progress.get(name)) for name in _COUNTERS)
    return Inspection(
        path=os.fspath(path),
        format_version=manifest.version,
        phalanx=manifest.phalanx,
        saved_at=manifest.saved_at,
        kind=kind_of(manifest),
        module=_text(document.get("module")),
        strategy=_text(document.get("strategy")),
        precision=_text(document.get("precision")),
        world_size=manifest.world_size,
        sharded=manifest.sharded,
        epoch=epoch,
        batch=batch,
        step=step,
        finite=manifest.nonfinite is None,
        nonfinite=manifest.nonfinite,
        sections={name: _section(tensors) for name, tensors in manifest.sections.items()},
        files={name: record.size for name, record in manifest.files.items()},
        bytes=sum(record.size for record in manifest.files.values()),
        optimizers=[_optimizer(_dict(one)) for one in _list(document.get("optimizers"))],
        hparams=_dict(document.get("hparams")),
        unsaved_hparams=[name for name in _list(document.get("unsaved_hparams")) if type(name) is str],
        metrics=metrics_of(manifest),
    )


def kind_of(manifest: Manifest) -> str:
    """Return the kind of a checkpoint: ``"trainer"``, ``"weights"``, ``"fabric"`` or ``"other"``."""
    document = _dict(manifest.document)
    if type(document.get("fabric")) is dict:
        return "fabric"
    if "progress" in document and document.get("weights_only") is True:
        return "weights"
    needed = ("progress", "optimizers", "state")
    return "trainer" if all(name in document for name in needed) else "other"


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """Return the metrics in a Trainer's checkpoint that are numbers."""
    state = _dict(_dict(manifest.document).get("state"))
    found = {}
    for name, value in _dict(state.get("metrics")).items():
        value = value.get("value") if type(value) is dict and value.get("$") in ("scalar", "numpy") else value
        if _is_number(value):
            found[name] = value
    return found


def monitored(manifest: Manifest) -> tuple[str, float] | None:
    """Return the metric that a ModelCheckpoint monitors and its value at this checkpoint, or None if not recorded."""
    for state in _dict(_dict(_dict(manifest.document).get("state")).get("callbacks")).values():
        name, score = _dict(state).get("monitor"), _dict(state).get("current_score")
        if type(name) is str and _is_number(score):
            return name, score
    return None


def best_recorded(manifest: Manifest) -> str | None:
    """Return the path of the best checkpoint when this one was saved, or None if it is not recorded."""
    for state in _dict(_dict(_dict(manifest.document).get("state")).get("callbacks")).values():
        if path := _text(_dict(state).get("best_model_path")):
            return path
    return None


def _section(tensors: Mapping[str, TensorRecord | str]) -> SectionSummary:
    every = [record for record in tensors.values() if isinstance(record, TensorRecord)]
    records = [record for record in every if record.fingerprint is None]
    absent = [prod(record.shape) for record in every if record.fingerprint is not None]
    sizes: Counter[str] = Counter()
    for record in records:
        sizes[record.dtype] += sum(record.size_of(part) for part in record.parts)
    elements = sum(prod(record.shape) for record in records)
    tied = len(tensors) - len(every)
    return SectionSummary(len(records), tied, elements, sizes.total(), dict(sizes), len(absent), sum(absent))


def _optimizer(described: dict[str, JSON]) -> OptimizerSummary:
    groups = []
    for group in map(_dict, _list(described.get("groups"))):
        groups.append({"parameters": len(_list(group.get("params"))), **_dict(group.get("hyper"))})
    return OptimizerSummary(_text(described.get("class")) or "", groups)


# A manifest is well-formed; its document may hold anything.
def _dict(value: JSON) -> dict[str, Any]:
    return value if type(value) is dict else {}


def _list(value: JSON) -> list[Any]:
    return value if type(value) is list else []


def _text(value: JSON) -> str | None:
    return value if type(value) is str else None


def _is_number(value: JSON) -> TypeGuard[float]:
    return type(value) in (int, float)


def _count(value: JSON) -> int | None:
    return value if type(value) is int else None


# ---- search ---------------------------------------------------------------------------------------------------------


@names_arguments
def newest_good(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    note: Callable[[str], None],
    refuse: Callable[[Manifest], str | None] | None = None,
) -> Path | None:
    """Return the checkpoint with the most progress that verifies, in ``directory`` or in one of several, or None.

    Checkpoints are compared by the progress in their manifests (optimizer steps, then batches, then the time of
    saving), never by names or a pointer file. ``note`` is called with the reason for each better checkpoint that was
    skipped: it is damaged, has weights that are not finite, or was rejected by ``refuse``. Links and unfinished saves
    are ignored.
    """
    directories = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    for path, manifest in _furthest_first(map(refreshed, directories), note):
        reason = _reason_against(path, manifest) or (refuse(manifest) if refuse is not None else None)
        if reason is None:
            return path
        note(f"Skipped {path.name}: {reason}")
    return None


def newest_complete(
    directories: Iterable[Path], refuse: Callable[[Manifest], str | None], preferred: Path | None = None
) -> Path | None:
    """Return the complete checkpoint with the most progress in one of several directories, or None.

    Only manifests and headers are read, unlike in ``newest_good``. ``preferred`` is returned if no other has more
    progress. Those with weights that are not finite are ignored, and those for which ``refuse`` returns a reason.

    Raises:
        StorageError: a directory cannot be listed.
    """
    for path, manifest in _furthest_first(directories, preferred=preferred):
        if manifest.nonfinite is None and refuse(manifest) is None and first_incomplete(path, manifest) is None:
            return path
    return None


def _furthest_first(
    directories: Iterable[Path], note: Callable[[str], None] = lambda _: None, preferred: Path | None = None
) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints in directories that have a good manifest, sorted by progress, the furthest first.

    ``preferred`` precedes those of equal progress. ``note`` is called for each without a good manifest.
    """
    found = good_manifests(directories, note)
    return sorted(found, key=lambda each: (*furthest(each[1]), each[0] == preferred), reverse=True)


def good_manifests(
    directories: Iterable[Path], note: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoints in directories that have a good manifest, with it. ``note`` is called for each other one.

    Raises:
        StorageError: a directory cannot be listed.
    """
    for path in (path for each in dict.fromkeys(directories) for path in candidates(each)):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            note(f"Skipped {path.name}: {error}")
        else:
            yield path, manifest


def candidates(directory: Path) -> Iterator[Path]:
    """Yield the possible checkpoints in a directory, sorted by name, without links and hidden entries.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error("listing", directory, error) from error
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        if is_folder and (entry.name.endswith(".ckpt") or os.path.lexists(os.path.join(entry.path, MANIFEST))):
            yield directory / entry.name


def furthest(manifest: Manifest) -> tuple[int, int, float]:
    """Return the progress of a checkpoint to compare it by: optimizer steps, batches, and the time of saving."""
    progress = _dict(_dict(manifest.document).get("progress"))
    step, batch = progress.get("global_step"), progress.get("batch", progress.get("global_batch"))
    return (
        step if isinstance(step, int) else -1,
        batch if isinstance(batch, int) else -1,
        manifest.saved_at,
    )


def _reason_against(path: Path, manifest: Manifest) -> str | None:
    if manifest.nonfinite is not None:
        return f"its weight {manifest.nonfinite!r} is not finite."
    for name in manifest.files:
        download_file(path / name)
    problems = verify(path)
    return None if not problems else problems[0]


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a directory. For a damaged one, possibly only its name and the problem are known."""

    path: Path
    status: str
    """``"complete"``: the manifest is good and all files have their sizes and headers. ``"good"``: every byte was read
    too. ``"damaged"``: see ``problem``."""
    problem: str | None = None
    kind: str | None = None
    """See ``Inspection``."""
    step: int | None = None
    epoch: int | None = None
    metric: tuple[str, float] | None = None
    """The metric that a ModelCheckpoint monitors, and its value."""
    bytes: int | None = None
    """The size of the tensor files and the manifest, in bytes."""
    saved_at: float | None = None
    """Seconds since 1970."""


@names_arguments
def checkpoints(directory: str | os.PathLike[str], verify: bool = False) -> list[Listed]:
    """Return the checkpoints in a directory (not in subdirectories), sorted by progress, the furthest last.

    Links and unfinished saves are ignored. Only manifests and headers are read, which is cheap, unless ``verify`` is
    set, which reads every byte.

    Raises:
        CheckpointError: there is no such directory, or it is a checkpoint itself.
        StorageError: it cannot be read.
    """
    folder = refreshed(directory)
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{str(folder)!r} is a checkpoint itself: inspect it, or give the directory it lies in.")
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{str(folder)!r} {kind}; give a directory that holds checkpoints.")
    found = [_listed(path, verify) for path in candidates(folder)]
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.saved_at or -1.0))


def _listed(path: Path, verify: bool) -> Listed:
    try:
        data = read_manifest_bytes(path)
        manifest = parse_at(path, data)
    except CheckpointError as error:
        return Listed(path, "damaged", str(error))
    problem = next(iter(verified(path)), None) if verify else first_incomplete(path, manifest)
    status = "damaged" if problem else "good" if verify else "complete"
    inspection = inspection_of(path, manifest)
    return Listed(
        path=path,
        status=status,
        problem=problem,
        kind=inspection.kind,
        step=inspection.step,
        epoch=inspection.epoch,
        metric=monitored(manifest),
        bytes=inspection.bytes + len(data),
        saved_at=inspection.saved_at,
    )
