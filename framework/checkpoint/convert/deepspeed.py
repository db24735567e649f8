"""Conversion of DeepSpeed's folders: joins ZeRO's partitions of all ranks and cuts them into named parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError, did_you_mean
from .detect_format import file_of, has_states, names_in
from .foreign_state import Foreign, ForeignOptimizer, ForeignProgress, Group, bare, counted, prefix_in
from .parameter_order import Order, build_module, by_name, orders_of, with_kinds
from .unpickle_client import Job, Request
from .zero_partitions import Engine, FlatPartition, Shapes, cut, cut_stage_2, cut_stage_3

LATEST = "latest"
_MODEL = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_MOST_LATEST_BYTES = 4096
# What DeepSpeed itself puts beside the user's client state.
OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "autoep_layers", "ds_autoep_layers", "universal_checkpoint_info"),
}


def convert_folder(request: Request) -> Foreign:
    """Read a folder that ``save_checkpoint`` wrote."""
    engine = read_engine(state_folder(request.source), request)
    names = {bare(name): None for name in engine.first["module"]}
    built = build_module(request.module, {})
    foreign = from_engine(engine, "deepspeed", request, prefix_in(built, names, request.prefix))
    client = {key: value for key, value in engine.first.items() if key not in OWN}
    foreign.user = {str(key): value for key, value in client.items()}
    foreign.notes.append("left out: epoch, random generators and position in the data, which DeepSpeed does not save")
    return foreign


def state_folder(source: Path) -> Path:
    """Return the folder of one step: the source, the one that ``latest`` names, or the only one.

    Raises:
        CheckpointError: it is not known, or lies elsewhere.
    """
    names = names_in(source)
    if has_states(names):
        return source
    folders = sorted(name for name in names.folders if has_states(names_in(source / name)))
    if LATEST not in names.files:
        if len(folders) == 1:
            return source / folders[0]
        raise CheckpointError(f"{source} has no file 'latest' and holds {counted(folders)}: give one of these folders.")
    with file_of(source, LATEST).open("rb") as file:
        tag = file.read(_MOST_LATEST_BYTES).decode("utf-8", "replace").strip()
    if tag not in folders:
        raise CheckpointError(
            f"{source / LATEST} names {tag!r}, but there is no such folder with states in {source}."
            f"{did_you_mean(tag, folders)} There: {counted(folders) or 'none'}."
        )
    return source / tag


def read_engine(folder: Path, request: Request) -> Engine:
    """Read all files of a step.

    Raises:
        CheckpointError: some are missing, or the model is split by tensor or pipeline parallelism.
    """
    files = sorted(names_in(folder).files)
    models = {int(match["rank"] or 0): match for name in files if (match := _MODEL.fullmatch(name))}
    parts = {int(match["rank"]): match for name in files if (match := _OPTIMIZER.fullmatch(name))}
    split = [match.string for match in (*models.values(), *parts.values()) if int(match["part"])]
    if split:
        raise CheckpointError(
            f"{folder} holds {split[0]}: its model is split by tensor or pipeline parallelism, which is not converted."
        )
    for kind, found in (("model", models), ("optim", parts)):
        if sorted(found) != list(range(len(found))):
            raise CheckpointError(
                f"{folder} lacks the {kind} states of a rank: there are {counted([str(rank) for rank in found])}."
            )
    ranks = [models[rank] for rank in sorted(models)] + [parts[rank] for rank in sorted(parts)]
    contents = request.read([Job(file_of(folder, match.string)) for match in ranks])
    for content in contents[: len(models)]:
        if "module" not in content:
            raise CheckpointError(f"{folder} holds model states without 'module'; they are not DeepSpeed's.")
    partitions = [content["optimizer_state_dict"] for content in contents[len(models) :]]
    engine = Engine(folder, contents[: len(models)], partitions)
    _check_ranks(engine)
    return engine


def _check_ranks(engine: Engine) -> None:
    if not engine.partitions:
        return
    counts = engine.partitions[0].get("partition_count", len(engine.partitions))
    count = max(counts) if isinstance(counts, list) else int(counts)
    if count != len(engine.partitions) or (_stage(engine) == 3 and len(engine.models) != count):
        raise CheckpointError(
            f"{engine.folder} was saved by {count} ranks, but holds the model states of {len(engine.models)} and the "
            f"optimizer states of {len(engine.partitions)}: copy the files of all ranks into it."
        )


def _stage(engine: Engine) -> int:
    return int(engine.partitions[0].get("zero_stage", 0)) if engine.partitions else 0


def from_engine(engine: Engine, format: str, request: Request, prefix: str) -> Foreign:
    """Return model, optimizer, scheduler and counters."""
    first = engine.first
    names = _Naming(first, prefix)
    masters, optimizer = ({}, None) if not engine.partitions else _partitioned(engine, names)
    weights = _weights(engine, names, masters)
    steps = int(first.get("global_steps", 0)) - int(first.get("skipped_steps") or 0)
    foreign = Foreign(format, weights, progress=ForeignProgress(0, steps, None, steps))
    foreign.buffers = {names(name) for name in first.get("buffer_names") or ()}
    foreign.notes += [f"left out: {place}" for content in engine.models for place in content.left]
    foreign.notes += _notes_on_clipping(engine)
    scheduler = first.get("lr_scheduler")
    foreign.schedulers = None if scheduler is None else [scheduler]
    module = build_module(request.module, {})
    orders = orders_of(module, request.optimizers)
    if optimizer is None:
        foreign.optimizers = _plain_optimizer(engine, weights, orders, foreign.notes)
    else:
        foreign.optimizers = with_kinds([optimizer], orders)
        scale = engine.partitions[0].get("loss_scaler")
        if isinstance(scale, dict) and scale.get("dynamic"):
            foreign.scaler = {"scale": float(scale["cur_scale"]), "good_updates": 0}
    return foreign


def _plain_optimizer(
    engine: Engine, weights: dict[str, Tensor], orders: Sequence[Order] | None, notes: list[str]
) -> list[ForeignOptimizer] | None:
    """Return the optimizer of an engine without ZeRO, which keeps its state by position."""
    state = engine.first.get("optimizer")
    if state is None:
        return None
    if not (isinstance(state, dict) and "param_groups" in state and "state" in state):
        raise CheckpointError(
            f"{engine.folder} holds an optimizer of 16-bit training without ZeRO, which is not converted: save it "
            "under stage 1, 2 or 3."
        )
    return by_name([state], weights, orders, True, notes)


def _notes_on_clipping(engine: Engine) -> list[str]:
    given = engine.first.get("ds_config")
    config: Mapping[str, Any] = given if isinstance(given, dict) else {}
    limit = config.get("gradient_clipping", engine.partitions[0].get("clip_grad", 1.0) if engine.partitions else 0.0)
    if not isinstance(limit, int | float) or not limit:
        return []
    return [f"DeepSpeed clipped gradients at a norm of {limit:g}: give the Trainer gradient_clip_val={limit:g} as well"]


class _Naming:
    """Makes names of tensors: without wrappers and what was wrapped around the module, behind a prefix."""

    def __init__(self, first: Mapping[str, Any], prefix: str) -> None:
        names = [bare(name) for name in first["module"]]
        self._wrapped = bool(names) and all(name.startswith("_forward_module.") for name in names)
        self._prefix = prefix

    def __call__(self, name: str) -> str:
        name = bare(name)
        return self._prefix + (name.removeprefix("_forward_module.") if self._wrapped else name)


# ---- the model ----------------------------------------------------------------------------------------------------


def _weights(engine: Engine, names: _Naming, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first = engine.first
    weights: dict[str, Tensor] = {}
    frozen = _frozen(engine)
    shared = {names(tied): names(owner) for tied, owner in (first.get("shared_params") or {}).items()}
    for given, tensor in first["module"].items():
        name = names(given)
        if name in masters:
            weights[name] = masters[name]
        elif given in frozen:
            weights[name] = frozen[given]
        elif shared.get(name) in masters:
            weights[name] = masters[shared[name]]
        elif isinstance(tensor, Tensor) and (tensor.numel() or _stage(engine) < 3 or given in _buffers(first)):
            weights[name] = tensor
    # A model that was saved without its frozen parameters lists nothing of them.
    weights.update({name: tensor for name, tensor in masters.items() if name not in weights})
    weights.update({tied: weights[owner] for tied, owner in shared.items() if owner in weights and tied not in weights})
    # Under stage 3 a tied weight is an empty tensor, and no file records what it is tied to.
    return weights


def _buffers(first: Mapping[str, Any]) -> set[str]:
    return set(first.get("buffer_names") or ())


def _frozen(engine: Engine) -> dict[str, Tensor]:
    shapes: Shapes = engine.first.get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        pieces = [content["frozen_param_fragments"][name].reshape(-1) for content in engine.models]
        flat = torch.cat(pieces) if _stage(engine) == 3 else pieces[0]
        found[name] = cut(flat, 0, shape, name, engine.folder)
    return found


# ---- ZeRO's partitions --------------------------------------------------------------------------------------------


def _partitioned(engine: Engine, names: _Naming) -> tuple[dict[str, Tensor], ForeignOptimizer]:
    """Return fp32 weights and the optimizer's state by name, cut from the flat partitions of all ranks."""
    groups: list[Shapes] = engine.first["param_shapes"]
    if isinstance(groups, dict):
        groups = [groups]
    stage = _stage(engine)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    bases: list[Any] = [partition.get(inner) for partition in engine.partitions]
    if not all(isinstance(base, dict) and "state" in base for base in bases) or key not in engine.partitions[0]:
        raise CheckpointError(
            f"{engine.folder} holds ZeRO states in a form that is not converted (elastic or universal checkpoints): "
            "save once more without load_from_fp32_weights and elastic_checkpoint."
        )
    flats = [FlatPartition.of(partition[key], base) for partition, base in zip(engine.partitions, bases, strict=True)]
    masters: dict[str, Tensor] = {}
    optimizer = ForeignOptimizer([], {})
    hyper = bases[0]["param_groups"]
    cut_group = cut_stage_3 if stage == 3 else cut_stage_2
    for number, shapes in enumerate(groups):
        for given, slots in cut_group(engine, flats, number, groups).items():
            name = names(given)
            masters[name] = slots.pop("")
            if slots:
                optimizer.state[name] = slots
        described = {key: value for key, value in hyper[number].items() if key not in ("params", "param_names")}
        optimizer.groups.append(Group([names(name) for name in shapes], described))
    return masters, optimizer
