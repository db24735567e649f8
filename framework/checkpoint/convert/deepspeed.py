"""Conversion of DeepSpeed's folders, of any stage of ZeRO."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError, did_you_mean
from ...core.torch_internals import without_wrappers
from ...core.wording import first_of
from .detect_format import file_of, has_states, names_in
from .foreign_state import Foreign, ForeignOptimizer, ForeignProgress, Group, Request, prefix_in
from .parameter_order import Order, build_module, by_name, orders_of, with_kinds

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

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Engine:
    """Files of DeepSpeed: model states by rank, and optimizer states by rank (empty without ZeRO)."""

    folder: Path
    models: list[dict[str, Any]]
    partitions: list[Mapping[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        """Rank 0's model states, where the client state is."""
        return self.models[0]

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.partitions[0].get("zero_stage", 0)) if self.partitions else 0


def convert_folder(request: Request) -> Foreign:
    """Read a folder that ``save_checkpoint`` wrote."""
    engine = read_engine(state_folder(request.source), request)
    names = {without_wrappers(name): None for name in engine.first["module"]}
    built = build_module(request.module, {})
    foreign = from_engine(engine, "deepspeed", request, prefix_in(built, names, request.prefix))
    foreign.user = {key: value for key, value in engine.first.items() if key not in OWN}
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
        raise CheckpointError(
            f"{source} has no file 'latest' and holds {first_of(folders)}: give one of these folders."
        )
    with file_of(source, LATEST).open("rb") as file:
        tag = file.read(_MOST_LATEST_BYTES).decode("utf-8", "replace").strip()
    if tag not in folders:
        raise CheckpointError(
            f"{source / LATEST} names {tag!r}, but there is no such folder with states in {source}."
            f"{did_you_mean(tag, folders)} There: {first_of(folders) or 'none'}."
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
                f"{folder} lacks the {kind} states of a rank: there are {first_of([str(rank) for rank in found])}."
            )
    ranks = [models[rank] for rank in sorted(models)] + [parts[rank] for rank in sorted(parts)]
    contents = [request.pickles.load(file_of(folder, match.string)) for match in ranks]
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
    if count != len(engine.partitions) or (engine.stage == 3 and len(engine.models) != count):
        raise CheckpointError(
            f"{engine.folder} was saved by {count} ranks, but holds the model states of {len(engine.models)} and the "
            f"optimizer states of {len(engine.partitions)}: copy the files of all ranks into it."
        )


def from_engine(engine: Engine, format: str, request: Request, prefix: str) -> Foreign:
    """Return model, optimizer, scheduler and counters."""
    first = engine.first
    names = _naming(first, prefix)
    masters, optimizer = ({}, None) if not engine.partitions else _parameters(engine, names)
    weights = _weights(engine, names, masters)
    steps = int(first.get("global_steps", 0)) - int(first.get("skipped_steps") or 0)
    foreign = Foreign(format, weights, progress=ForeignProgress(0, steps, None, steps))
    foreign.buffers = {names(name) for name in first.get("buffer_names") or ()}
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


def _naming(first: Mapping[str, Any], prefix: str) -> Callable[[str], str]:
    """Return what makes names: without wrappers and what was wrapped around the module, behind a prefix."""
    names = [without_wrappers(name) for name in first["module"]]
    around = "_forward_module."
    wrapped = around if names and all(name.startswith(around) for name in names) else ""
    return lambda name: prefix + without_wrappers(name).removeprefix(wrapped)


def _weights(engine: Engine, names: Callable[[str], str], masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first = engine.first
    weights: dict[str, Tensor] = {}
    frozen, buffers = _frozen(engine), first.get("buffer_names") or ()
    shared = {names(tied): names(owner) for tied, owner in (first.get("shared_params") or {}).items()}
    for given, tensor in first["module"].items():
        name = names(given)
        if name in masters:
            weights[name] = masters[name]
        elif given in frozen:
            weights[name] = frozen[given]
        elif shared.get(name) in masters:
            weights[name] = masters[shared[name]]
        elif isinstance(tensor, Tensor) and (tensor.numel() or engine.stage < 3 or given in buffers):
            weights[name] = tensor
    # A model that was saved without its frozen parameters lists nothing of them.
    weights.update({name: tensor for name, tensor in masters.items() if name not in weights})
    weights.update({tied: weights[owner] for tied, owner in shared.items() if owner in weights and tied not in weights})
    # Under stage 3 a tied weight is an empty tensor, and no file records what it is tied to.
    return weights


def _frozen(engine: Engine) -> dict[str, Tensor]:
    shapes: Shapes = engine.first.get("frozen_param_shapes") or {}
    found = {}
    for name, shape in shapes.items():
        pieces = [content["frozen_param_fragments"][name].reshape(-1) for content in engine.models]
        flat = torch.cat(pieces) if engine.stage == 3 else pieces[0]
        found[name] = _cut(flat, shape, name, engine.folder)
    return found


# ---- the flat partitions of ZeRO, joined and cut into named parameters ----------------------------------------------


_Partition = tuple[Sequence[Tensor], Mapping[int, Any]]
"""A rank's flat fp32 weights, and the state that the optimizer has of each."""


def _parameters(engine: Engine, named: Callable[[str], str]) -> tuple[dict[str, Tensor], ForeignOptimizer]:
    """Return fp32 weights and the optimizer's state by name.

    Raises:
        CheckpointError: the partitions have another form, or too few elements.
    """
    ranks, hyper = _partitions(engine)
    groups: list[Shapes] = engine.first["param_shapes"]
    if isinstance(groups, dict):
        groups = [groups]
    paddings = engine.partitions[0].get("param_alignment_paddings")
    masters: dict[str, Tensor] = {}
    optimizer = ForeignOptimizer([], {})
    offset = 0
    for number, shapes in enumerate(groups):
        rows, scalars = _rows(engine.stage, ranks, number, hyper)
        # Under stage 3 the parameters of all groups follow one another.
        offset = offset if engine.stage == 3 else 0
        for place, (given, shape) in enumerate(shapes.items()):
            name, size = named(given), -(-prod(shape) // len(rows[""]))
            slots = {
                slot: _cut(_joined([flat[offset : offset + size] for flat in row]), shape, name, engine.folder)
                for slot, row in rows.items()
            }
            masters[name] = slots.pop("")
            if slots or scalars:
                optimizer.state[name] = {**scalars, **slots}
            offset += size + (paddings[number][place] if paddings else 0)
        described = {key: value for key, value in hyper[number].items() if key not in ("params", "param_names")}
        optimizer.groups.append(Group([named(name) for name in shapes], described))
    return masters, optimizer


def _partitions(engine: Engine) -> tuple[list[_Partition], list[dict[str, Any]]]:
    """Return the partition of each rank, and the optimizer's parameter groups.

    Raises:
        CheckpointError: the partitions have another form.
    """
    key, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
    if engine.stage == 3:
        key, inner = "fp32_flat_groups", "optimizer_state_dict"
    bases: list[Any] = [partition.get(inner) for partition in engine.partitions]
    if not all(isinstance(base, dict) and "state" in base for base in bases) or key not in engine.partitions[0]:
        raise CheckpointError(
            f"{engine.folder} holds ZeRO states in a form that is not converted (elastic or universal checkpoints): "
            "load it with DeepSpeed, and save it once more with elastic_checkpoint false in zero_optimization."
        )
    ranks = [(partition[key], base["state"]) for partition, base in zip(engine.partitions, bases, strict=True)]
    return ranks, bases[0]["param_groups"]


def _rows(
    stage: int, ranks: Sequence[_Partition], number: int, hyper: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Return the flat tensors of a parameter group by slot, and the slots that are equal for all parameters.

    In stage 3 there is one tensor for each rank, otherwise one that is joined from those of all ranks.
    """
    if stage == 3:
        # Each rank holds an equal, padded part of every parameter, one after the other through all groups, which are
        # split further for the optimizer.
        flats = [_flat(*rank, range(len(rank[0]))) for rank in ranks]
        rows = {slot: [flat[slot] for flat in flats] for slot in flats[0]}
        first = hyper[number]["params"][0]
    else:
        # Each rank holds a contiguous part of the group's parameters.
        flats = [_flat(*rank, [number]) for rank in ranks]
        rows = {slot: [_joined([flat[slot] for flat in flats])] for slot in flats[0]}
        first = number
    return rows, {slot: value for slot, value in ranks[0][1].get(first, {}).items() if not _is_flat(value)}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _flat(weights: Sequence[Tensor], state: Mapping[int, Any], groups: Sequence[int]) -> dict[str, Tensor]:
    """Return one rank's flat tensors of some groups by slot; the empty slot is the weights."""
    found = {"": [weights[number].float() for number in groups]}
    for number in groups:
        for slot, value in state.get(number, {}).items():
            if _is_flat(value):
                found.setdefault(slot, []).append(value)
    return {slot: _joined([piece.reshape(-1) for piece in pieces]) for slot, pieces in found.items()}


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(flat: Tensor, shape: Sequence[int], name: str, folder: Path) -> Tensor:
    """Return the tensor of ``shape`` at the beginning of a flat one.

    Raises:
        CheckpointError: there are too few elements.
    """
    if flat.dim() != 1 or prod(shape) > flat.numel():
        raise CheckpointError(f"{folder} holds too few elements of {name} ({flat.numel()} for {list(shape)}).")
    return flat[: prod(shape)].reshape(tuple(shape))
