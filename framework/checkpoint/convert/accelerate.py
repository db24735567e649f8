"""Folders of Accelerate's ``save_state``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from .deepspeed import from_engine, read_engine
from .foreign import Foreign, ForeignProgress, counted
from .handover import Job
from .layout import file_of, names_in
from .naming import all_bare, prefix_in
from .ordering import build_module, by_name, orders_of
from .request import Request
from .sharded import named_optimizer, nested, tensors_of

_SAFE, _PICKLED, _FULL = "model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin"
_MOST_INDEX_BYTES = 1 << 30
_NOT_CARRIED = re.compile(r"(random_states|custom_checkpoint)_\d+\.pkl|(sampler|dl_state_dict)(_\d+)?\.bin")


def convert_folder(request: Request) -> Foreign:
    """Return what ``save_state`` wrote of one model."""
    source, names = request.source, names_in(request.source)
    _refuse_several(request)
    ordered = not (_SAFE in names.files or f"{_SAFE}.index.json" in names.files)
    prefixes = ("module.",) if _ranks(names.files) > 1 else ()
    weights = all_bare(_read_pickled(request) if ordered else _read_safe(source), prefixes)
    module = build_module(request.module, {})
    prefix = prefix_in(module, weights, request.prefix)
    foreign = Foreign("accelerate", {prefix + name: tensor for name, tensor in weights.items()})
    states = [dict(content) for content in request.read(_numbered(source, "optimizer"))]
    for state in states:
        _put_before(state, prefix)
    orders = orders_of(module, request.optimizers)
    foreign.optimizers = by_name(states, foreign.weights, orders, ordered, foreign.notes) if states else None
    _rest(foreign, request)
    return foreign


def convert_sharded(request: Request) -> Foreign:
    """Return what ``save_state`` wrote under FSDP, as torch.distributed.checkpoint folders."""
    source = request.source
    folders = sorted(names_in(source).folders)
    models = [name for name in folders if re.fullmatch(r"pytorch_model_fsdp_\d+", name)]
    optimizers = [name for name in folders if re.fullmatch(r"optimizer_\d+", name)]
    if len(models) > 1:
        raise CheckpointError(f"{source} holds several models ({counted(models)}); one can be converted.")
    contents = request.read([Job(source / name, sharded=True) for name in (*models, *optimizers)])
    tree = nested(contents[0], source / models[0])
    weights = all_bare(tensors_of(tree.get("model"), source / models[0]))
    module = build_module(request.module, {})
    prefix = prefix_in(module, weights, request.prefix)
    foreign = Foreign("accelerate-sharded", {prefix + name: tensor for name, tensor in weights.items()})
    foreign.optimizers = [
        named_optimizer(nested(content, source / name).get("optimizer", {}), source / name, prefix)
        for name, content in zip(optimizers, contents[1:], strict=True)
    ] or None
    orders = orders_of(module, request.optimizers) or []
    for optimizer, order in zip(foreign.optimizers or [], orders, strict=False):
        optimizer.kind = order.kind
    _rest(foreign, request)
    return foreign


def convert_deepspeed(request: Request) -> Foreign:
    """Return what ``save_state`` wrote under DeepSpeed: an engine's folder, and the rest beside it."""
    folders = [name for name in sorted(names_in(request.source).folders) if re.fullmatch(r"pytorch_model(_\d+)?", name)]
    if len(folders) > 1:
        raise CheckpointError(f"{request.source} holds several models ({counted(folders)}); one can be converted.")
    engine = read_engine(request.source / folders[0], request)
    prefix = prefix_in(build_module(request.module, {}), engine.first["module"], request.prefix)
    foreign = from_engine(engine, "accelerate-deepspeed", request, prefix)
    _rest(foreign, request)
    return foreign


def _rest(foreign: Foreign, request: Request) -> None:
    """Add schedulers and loss scaler, count steps, and tell what is left out."""
    source, names = request.source, names_in(request.source)
    schedulers = request.read(_numbered(source, "scheduler"))
    if schedulers or foreign.schedulers is None:
        foreign.schedulers = [dict(content) for content in schedulers] or None
    if "scaler.pt" in names.files:
        foreign.scaler = dict(request.read([Job(file_of(source, "scaler.pt"))])[0])
    steps = foreign.progress.global_step or _steps(foreign)
    foreign.progress = ForeignProgress(0, steps, None, steps)
    foreign.notes.append("left out: epoch and position in the data, which Accelerate does not save")
    left = sorted(name for name in names.files if _NOT_CARRIED.fullmatch(name))
    if left:
        foreign.notes.append(f"left out: {counted(left)} (random generators, samplers, objects of your own)")
    if foreign.schedulers and _ranks(names.files) > 1:
        foreign.notes.append(
            "Accelerate steps a scheduler once for each process, unless split_batches or "
            "step_scheduler_with_optimizer=False is set; from here on it steps once for each update"
        )


def _steps(foreign: Foreign) -> int:
    """Return how many updates the optimizers count."""
    counts = [slots["step"] for one in foreign.optimizers or [] for slots in one.state.values() if "step" in slots]
    return max((int(count) for count in counts), default=0)


def _ranks(files: frozenset[str]) -> int:
    return sum(bool(re.fullmatch(r"random_states_\d+\.pkl", name)) for name in files)


def _refuse_several(request: Request) -> None:
    several = [name for name in names_in(request.source).files if re.fullmatch(r"(pytorch_)?model_\d+\.\w+", name)]
    if several:
        raise CheckpointError(
            f"{request.source} holds several models ({counted(sorted(several))} beside the first); one can be "
            "converted: train each by itself, or put them into one module before save_state."
        )


def _numbered(source: Path, stem: str) -> list[Job]:
    """Return jobs for ``<stem>.bin``, ``<stem>_1.bin`` and so on."""
    numbers = [
        int(match[1] or 0)
        for name in names_in(source).files
        if (match := re.fullmatch(rf"{stem}(?:_(\d+))?\.bin", name))
    ]
    return [Job(file_of(source, f"{stem}.bin" if not n else f"{stem}_{n}.bin")) for n in sorted(numbers)]


def _put_before(state: dict[str, Any], prefix: str) -> None:
    """Give an optimizer's names the prefix, where its state is kept by name."""
    state["param_groups"] = [
        {**group, "params": [prefix + key if isinstance(key, str) else key for key in group["params"]]}
        for group in state["param_groups"]
    ]
    state["state"] = {prefix + key if isinstance(key, str) else key: value for key, value in state["state"].items()}


def _read_pickled(request: Request) -> dict[str, Tensor]:
    source, files = request.source, names_in(request.source).files
    if f"{_PICKLED}.index.json" in files:
        parts = _indexed(source, f"{_PICKLED}.index.json")
    else:
        parts = [file_of(source, _FULL if _FULL in files else _PICKLED)]
    contents = request.read([Job(path) for path in parts])
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
            raise CheckpointError(f"{source / name} is no index of weights: {error}.") from error
