"""Conversion of the folders that Accelerate's ``save_state`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.errors import CheckpointError
from ...core.wording import first_of
from .dcp import named_optimizer, read_nested, tensors_of
from .deepspeed import from_engine, read_engine
from .detect_format import file_of, names_in
from .foreign_state import Foreign, ForeignProgress, Request, all_bare, prefix_in, renamed
from .parameter_order import build_module, by_name, orders_of, with_kinds

_SAFE, _PICKLED, _FULL, _SCALER = "model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin", "scaler.pt"
_MOST_INDEX_BYTES = 1 << 30
_NOT_CARRIED = re.compile(r"(random_states|custom_checkpoint)_\d+\.pkl|(sampler|dl_state_dict)(_\d+)?\.bin")


def convert_folder(request: Request) -> Foreign:
    """Read a folder that ``save_state`` wrote for one model."""
    source, files = request.source, names_in(request.source).files
    _refuse_several(source, files)
    # safetensors files hold tensors in an order of their own.
    ordered = not (_SAFE in files or f"{_SAFE}.index.json" in files)
    held = _read_pickled(request) if ordered else _read_safe(source)
    weights = all_bare(held, ("module.",) if _ranks(files) > 1 else ())
    module = build_module(request.module, {})
    prefix = prefix_in(module, weights, request.prefix)
    foreign = Foreign("accelerate", {prefix + name: tensor for name, tensor in weights.items()})
    states = [renamed(state, lambda name: prefix + name) for state in _numbered(request, "optimizer")]
    orders = orders_of(module, request.optimizers)
    foreign.optimizers = by_name(states, foreign.weights, orders, ordered, foreign.notes) if states else None
    return _with_rest(foreign, request)


def convert_sharded(request: Request) -> Foreign:
    """Read a folder that ``save_state`` wrote under FSDP, as torch.distributed.checkpoint folders."""
    source = request.source
    folder = source / _only(source, r"pytorch_model_fsdp_\d+")
    weights = all_bare(tensors_of(read_nested(folder, request.pickles).get("model"), folder))
    module = build_module(request.module, {})
    prefix = prefix_in(module, weights, request.prefix)
    foreign = Foreign("accelerate-sharded", {prefix + name: tensor for name, tensor in weights.items()})
    optimizers = [
        named_optimizer(read_nested(source / name, request.pickles).get("optimizer", {}), source / name, prefix)
        for name in _folders(source, r"optimizer_\d+")
    ]
    foreign.optimizers = with_kinds(optimizers, orders_of(module, request.optimizers)) or None
    return _with_rest(foreign, request)


def convert_deepspeed(request: Request) -> Foreign:
    """Read a folder that ``save_state`` wrote under DeepSpeed: an engine's folder, and the rest beside it."""
    engine = read_engine(request.source / _only(request.source, r"pytorch_model(_\d+)?"), request)
    prefix = prefix_in(build_module(request.module, {}), engine.first["module"], request.prefix)
    return _with_rest(from_engine(engine, "accelerate-deepspeed", request, prefix), request)


def _folders(source: Path, pattern: str) -> list[str]:
    return sorted(name for name in names_in(source).folders if re.fullmatch(pattern, name))


def _only(source: Path, pattern: str) -> str:
    found = _folders(source, pattern)
    if len(found) > 1:
        raise CheckpointError(f"{source} holds several models ({first_of(found)}); one can be converted.")
    return found[0]


def _with_rest(foreign: Foreign, request: Request) -> Foreign:
    """Return the checkpoint with schedulers, loss scaler and the number of steps; note what is left out."""
    names, states = names_in(request.source), _numbered(request, "scheduler")
    scaler = foreign.scaler
    if _SCALER in names.files:
        scaler = request.pickles.load(file_of(request.source, _SCALER))
    steps = foreign.progress.global_step or _steps(foreign)
    notes = [*foreign.notes, "left out: epoch and position in the data, which Accelerate does not save"]
    left = sorted(name for name in names.files if _NOT_CARRIED.fullmatch(name))
    if left:
        notes.append(f"left out: {first_of(left)} (random generators, samplers, objects of your own)")
    if states and _ranks(names.files) > 1:
        notes.append(
            "Accelerate steps a scheduler once for each process, unless split_batches or "
            "step_scheduler_with_optimizer=False is set; from here on it steps once for each update"
        )
    progress = ForeignProgress(0, steps, None, steps)
    return replace(foreign, scaler=scaler, schedulers=states or foreign.schedulers, progress=progress, notes=notes)


def _steps(foreign: Foreign) -> int:
    """Return how many updates the optimizers count."""
    counts = [slots["step"] for one in foreign.optimizers or [] for slots in one.state.values() if "step" in slots]
    return max((int(count) for count in counts), default=0)


def _ranks(files: frozenset[str]) -> int:
    return sum(bool(re.fullmatch(r"random_states_\d+\.pkl", name)) for name in files)


def _refuse_several(source: Path, files: frozenset[str]) -> None:
    several = sorted(name for name in files if re.fullmatch(r"(pytorch_)?model_\d+\.\w+", name))
    if several:
        raise CheckpointError(
            f"{source} holds several models ({first_of(several)} beside the first); one can be converted: train each "
            "by itself, or put them into one module before save_state."
        )


def _numbered(request: Request, stem: str) -> list[dict[str, Any]]:
    """Read ``<stem>.bin``, ``<stem>_1.bin`` and so on."""
    numbers = [
        int(match[1] or 0)
        for name in names_in(request.source).files
        if (match := re.fullmatch(rf"{stem}(?:_(\d+))?\.bin", name))
    ]
    files = [f"{stem}.bin" if not number else f"{stem}_{number}.bin" for number in sorted(numbers)]
    return [request.pickles.load(file_of(request.source, name)) for name in files]


def _read_pickled(request: Request) -> dict[str, Tensor]:
    source, files = request.source, names_in(request.source).files
    if f"{_PICKLED}.index.json" in files:
        parts = _indexed(source, f"{_PICKLED}.index.json")
    else:
        parts = [file_of(source, _FULL if _FULL in files else _PICKLED)]
    contents = [request.pickles.load(part) for part in parts]
    return {name: value for content in contents for name, value in content.items() if isinstance(value, Tensor)}


def _read_safe(source: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = f"{_SAFE}.index.json"
    parts = _indexed(source, index) if index in names_in(source).files else [file_of(source, _SAFE)]
    try:
        return {name: tensor for part in parts for name, tensor in load_file(part).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} holds weights that cannot be read: {error}.") from error


def _indexed(source: Path, name: str) -> list[Path]:
    with file_of(source, name).open("rb") as file:
        try:
            table: Mapping[str, str] = json.loads(file.read(_MOST_INDEX_BYTES))["weight_map"]
            return [file_of(source, str(part)) for part in sorted(set(table.values()))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{source / name} is not an index of weights: {error}.") from error
