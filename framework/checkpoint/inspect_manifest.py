"""Description of a checkpoint from its manifest, without reading tensors. Does not import torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from ..core.arguments import names_arguments
from .manifest import JSON, Manifest, TensorRecord
from .manifest_file import read_manifest

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
    return inspection_of(path, read_manifest(path))


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
