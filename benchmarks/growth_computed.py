"""Costs for more ranks than one machine can start: phalanx's own functions, with the input that the ranks would send.

Nothing is estimated. Costs that cannot be measured in one process, such as those of a network, are left out.
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from phalanx.framework.checkpoint.codec import encode_inline
from phalanx.framework.checkpoint.manifest import Box, Manifest, Part, TensorRecord, dump, parse
from phalanx.framework.checkpoint.reader import parts_in_box
from phalanx.framework.checkpoint.safetensors_header import FileRecord, byte_size, header_of
from phalanx.framework.checkpoint.write_plan import Assignment, Piece, Plan, assign
from phalanx.framework.data.orders import NaturalOrder
from phalanx.framework.data.samplers import EvaluationSampler, TrainingSampler
from phalanx.framework.distributed.object_frames import FrameSize
from phalanx.framework.distributed.seed import capture
from phalanx.framework.distributed.world import World
from phalanx.framework.metrics.epoch_reduction import exchange
from phalanx.framework.metrics.metric_entry import Entry, Flags
from phalanx.framework.watchdog.heartbeat import LEARNED, SECTIONS, HeartbeatRecord
from phalanx.framework.watchdog.silence import SilenceTracker

from .task import GPT

T = TypeVar("T")
Found = dict[str, float]
# A GPT of 1.8 billion parameters on the meta device.
WIDTH, HEADS, VOCABULARY, LENGTH = 4096, 32, 50_304, 64
SLOTS = ("exp_avg", "exp_avg_sq")
NO_CHECKSUM = "0" * 16
ROWS = 32
LOGGED = 20


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of a call and its result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def memory() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class SimulatedWorld(World):
    """A rank among many, which all send what this one sends."""

    def __init__(self, size: int) -> None:
        super().__init__(World.single().placement, torch.device("cpu"))
        self.size = self.data_size = size

    def all_gather_object(self, obj: T, size: FrameSize | None = None) -> list[T]:
        """Return copies of the object, one for each rank."""
        sent = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        return [pickle.loads(sent) for _ in range(self.size)]


def sharded_sections(layers: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of a GPT's parameters and of AdamW's state, by section and name."""
    with torch.device("meta"):
        shapes = {
            name: tuple(each.shape) for name, each in GPT(layers, WIDTH, HEADS, VOCABULARY, LENGTH).named_parameters()
        }
    moments = {f"0/{slot}/{name}": shape for slot in SLOTS for name, shape in shapes.items()}
    return {"model": shapes, "optimizer": moments}


def plan_of_rank(sections: dict[str, dict[str, tuple[int, ...]]], rank: int, size: int) -> Plan:
    """Return the plan of a rank under ``fsdp``: rows of each tensor, none if there are fewer rows than ranks."""

    return {
        section: {name: Piece(torch.float32, shape, rows_of(shape, rank, size), None) for name, shape in shapes.items()}
        for section, shapes in sections.items()
    }


def rows_of(shape: tuple[int, ...], rank: int, size: int) -> Box:
    """Return the rows of a tensor that a rank holds, as torch splits: equally many, but fewer on the last ranks."""
    rows = -(-shape[0] // size)
    start = min(rank * rows, shape[0])
    return (start, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:])


def manifest_of(plans: list[Plan], agreed: Assignment, document: Any) -> Manifest:
    """Return the manifest of a save in which all ranks have written their assigned pieces, with dummy checksums."""
    files: dict[str, FileRecord] = {}
    starts: dict[str, dict[str, int]] = {}
    held: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for section, name, rank, (_, extent) in _writers(agreed):
        held.setdefault(f"{section}-{rank:05d}.safetensors", []).append((name, extent))
    for file, tensors in held.items():
        header, starts[file] = header_of([(name, "F32", extent) for name, extent in tensors])
        size = len(header) + sum(byte_size(extent, "F32") for _, extent in tensors)
        files[file] = FileRecord(size, len(header), NO_CHECKSUM, NO_CHECKSUM)
    parts: dict[tuple[str, str], list[Part]] = {}
    for section, name, rank, (offsets, extent) in _writers(agreed):
        file = f"{section}-{rank:05d}.safetensors"
        part = Part(file, starts[file][name], offsets, extent, NO_CHECKSUM)
        parts.setdefault((section, name), []).append(part)
    sections: dict[str, dict[str, TensorRecord | str]] = {section: {} for section in agreed}
    for (section, name), found in parts.items():
        sections[section][name] = TensorRecord("F32", plans[0][section][name].shape, tuple(found))
    return Manifest(sections, files, {}, [document] * len(plans), sharded=True, world_size=len(plans))


def _writers(agreed: Assignment) -> Any:
    for section, tensors in agreed.items():
        for name, writers in tensors.items():
            for rank, box in () if isinstance(writers, str) else writers:
                yield section, name, rank, box


def files_read(manifest: Manifest, rank: int, size: int) -> set[str]:
    """Return the files that hold pieces of one of ``size`` ranks."""
    found: set[str] = set()
    for tensors in manifest.sections.values():
        for record in tensors.values():
            assert isinstance(record, TensorRecord)
            found.update(part.file for part in parts_in_box(record, *rows_of(record.shape, rank, size)))
    return found


def checkpoint(size: int, layers: int) -> Found:
    """Plan a checkpoint of ``size`` ranks, and serialize and parse its manifest, without any tensor."""
    sections = sharded_sections(layers)
    plans = [plan_of_rank(sections, rank, size) for rank in range(size)]
    document = encode_inline({"random": capture()})
    plan_bytes = len(pickle.dumps(plans[1], pickle.HIGHEST_PROTOCOL))
    assigning, agreed = timed(lambda: assign(plans))
    manifest = manifest_of(plans, agreed, document)
    writing, data = timed(lambda: dump(manifest))
    before = memory()
    reading, found = timed(lambda: parse(data))
    parsed = memory() - before
    mapping, opened = timed(lambda: files_read(found, size // 4, size // 2))
    return {
        "parts": sum(1 for _ in _writers(agreed)),
        "files": len(found.files),
        "documents": len(pickle.dumps(document)) * size,
        "plans": plan_bytes * size,
        "assign seconds": assigning,
        "manifest": len(data),
        "dump seconds": writing,
        "parse seconds": reading,
        "parsed": parsed,
        "map seconds": mapping,
        "opened": len(opened),
    }


def sampling(size: int) -> Found:
    """Return the seconds for the next batch of a rank in training and evaluation."""
    rounds = 40
    order = NaturalOrder(range(rounds * size * ROWS), 0, shuffle=True)
    common: dict[str, Any] = {"drop_last": False, "whole": False, "seed": 0, "seeded": False}
    training = TrainingSampler(None, order, ROWS, rank=size // 2, size=size, **common)
    evaluation = EvaluationSampler(None, order, ROWS, **common)
    evaluation.first, evaluation.step = size // 2, size
    found: Found = {}
    for name, sampler in (("training", training), ("evaluation", evaluation)):
        # Kept alive during the measurement, because it holds the order of the epoch.
        batches = iter(sampler)
        next(batches)
        seconds, _ = timed(lambda batches=batches: [next(batches) for _ in range(rounds // 2)])  # type: ignore[misc]
        found[name] = seconds / (rounds // 2)
    return found


def reducing(size: int) -> Found:
    """Reduce the means that were logged in an epoch."""
    entries = {f"loss_{number}": Entry(f"loss_{number}", _FLAGS, "mean", False, True) for number in range(LOGGED)}
    for entry in entries.values():
        entry.add(0.1, 32.0)
    world, frames = SimulatedWorld(size), FrameSize()
    seconds, _ = timed(lambda: exchange(world, "train", entries, {None}, False, frames))
    return {"reducing": seconds}


_FLAGS = Flags(False, True, False, True, "mean", False)


def watching(size: int) -> Found:
    """Read the heartbeats of all ranks, each of which has made progress since the last time."""
    limits = (LEARNED,) * len(SECTIONS)
    watch, looks = SilenceTracker(), []
    for number in range(1, 12):
        beats: dict[int, HeartbeatRecord | None] = {
            rank: HeartbeatRecord(rank, rank, 0, limits, number, 3, 0, number, 0, number) for rank in range(size)
        }
        looks.append(timed(lambda beats=beats: watch.update(beats))[0])  # type: ignore[misc]
    return {"watching": statistics.median(looks)}


def computed(size: int, layers: int) -> Found:
    """Return the results for a number of ranks."""
    found = checkpoint(size, layers)
    gc.collect()
    return found | sampling(size) | reducing(size) | watching(size)
