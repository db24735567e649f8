"""The contents of a foreign checkpoint in a form common to all formats, and the contents of a checkpoint made of it.

Wrappers put parts into the names of tensors, which are removed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ...core.errors import CheckpointError
from ...core.torch_internals import without_wrappers
from ...core.wording import first_of
from ..codec import encode, encode_inline
from ..write_plan import CheckpointContents, Shard
from .pickles import Pickles

SlotState = dict[str, dict[str, Any]]
"""Slots of each parameter by name: tensors, and step counters."""


@dataclass(frozen=True)
class Request:
    """A foreign checkpoint, what reads its pickles, and the user's objects that tell names."""

    source: Path
    pickles: Pickles
    module: Any = None
    optimizers: Sequence[Optimizer] | None = None
    prefix: str = ""


@dataclass
class Group:
    """A parameter group: names, and hyperparameters."""

    names: list[str]
    hyper: dict[str, Any]


@dataclass
class ForeignOptimizer:
    """An optimizer by parameter names. ``kind`` is its class; empty where it is unknown."""

    groups: list[Group]
    state: SlotState
    kind: str = ""


@dataclass
class ForeignProgress:
    """Progress of the run. ``batch_in_epoch`` counts micro-batches of each rank; None where it is unknown."""

    epoch: int = 0
    global_step: int = 0
    batch_in_epoch: int | None = 0
    global_batch: int = 0
    epoch_ended: bool = False


@dataclass
class ForeignAverage:
    """An average of the weights, and how many updates it holds."""

    weights: dict[str, Tensor]
    count: int


@dataclass
class Foreign:
    """A foreign checkpoint, read."""

    format: str
    weights: dict[str, Tensor]
    optimizers: list[ForeignOptimizer] | None = None
    schedulers: list[dict[str, Any]] | None = None
    """None where the format does not hold schedulers."""
    scaler: dict[str, Any] | None = None
    progress: ForeignProgress = field(default_factory=ForeignProgress)
    hparams: dict[str, Any] = field(default_factory=dict)
    unsaved_hparams: list[str] = field(default_factory=list)
    user: dict[str, Any] = field(default_factory=dict)
    module: str = ""
    buffers: set[str] = field(default_factory=set)
    averages: dict[str, ForeignAverage] = field(default_factory=dict)
    """Averages of the weights, by the name of the callback that keeps one up here."""
    notes: list[str] = field(default_factory=list)


def contents_of(foreign: Foreign, source: str) -> CheckpointContents:
    """Build the contents of a run's checkpoint from a foreign one."""
    sections = {"model": {name: Shard.whole(tensor) for name, tensor in foreign.weights.items()}}
    document: dict[str, Any] = {
        "module": foreign.module,
        "hparams": encode_inline(foreign.hparams),
        "unsaved_hparams": foreign.unsaved_hparams,
        "progress": _progress(foreign.progress),
        "weights_only": foreign.optimizers is None,
        "converted": {"format": foreign.format, "source": source, "notes": list(foreign.notes)},
    }
    if foreign.averages:
        sections["averages"] = {
            f"{key}/{name}": Shard.whole(tensor)
            for key, average in foreign.averages.items()
            for name, tensor in average.weights.items()
            if tensor.is_floating_point()
        }
        document["averages"] = {
            key: {"count": average.count, "last_epoch": foreign.progress.epoch - 1}
            for key, average in foreign.averages.items()
        }
    if foreign.optimizers is not None:
        _add_training_state(foreign, foreign.optimizers, sections, document)
    buffers = foreign.buffers | {name for name, tensor in foreign.weights.items() if not tensor.is_floating_point()}
    return CheckpointContents(sections=sections, document=document, buffers=buffers)


def _add_training_state(
    foreign: Foreign,
    optimizers: list[ForeignOptimizer],
    sections: dict[str, dict[str, Shard]],
    document: dict[str, Any],
) -> None:
    """Add the entries that a resumed run needs beside the model."""
    sections["optimizer"] = {}
    document["optimizers"] = []
    for index, optimizer in enumerate(optimizers):
        described, tensors = _optimizer(optimizer, index)
        document["optimizers"].append(described)
        sections["optimizer"].update(tensors)
    state = {
        "schedulers": foreign.schedulers or [],
        "scaler": _scaler(foreign.scaler),
        "callbacks": {},
        "metrics": {},
        "user": foreign.user,
    }
    document["state"], tensors_of_state = encode(state)
    sections["state"] = {name: Shard.whole(tensor) for name, tensor in tensors_of_state.items()}
    batches = foreign.progress.batch_in_epoch
    document["position"] = {"global_batches": batches} if batches and not foreign.progress.epoch_ended else None


def _scaler(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a loss scaler's state from one of torch's, or from one in the form here."""
    if state is None or "scale" not in state:
        return None
    good = state.get("good_updates", state.get("_growth_tracker", 0))
    return {"scale": float(state["scale"]), "good_updates": int(good)}


def _progress(progress: ForeignProgress) -> dict[str, Any]:
    return {
        "epoch": progress.epoch,
        "batch_in_epoch": progress.batch_in_epoch or 0,
        "global_batch": progress.global_batch,
        "global_step": progress.global_step,
        "attempts": progress.global_step,
        "epoch_ended": progress.epoch_ended,
        "validated_at": -1,
    }


def _optimizer(optimizer: ForeignOptimizer, index: int) -> tuple[dict[str, Any], dict[str, Shard]]:
    shards: dict[str, Shard] = {}
    scalars: SlotState = {}
    for name, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                shards[f"{index}/{slot}/{name}"] = Shard.whole(value)
            else:
                scalars.setdefault(name, {})[slot] = value
    groups = [{"params": group.names, "hyper": encode_inline(group.hyper)} for group in optimizer.groups]
    return {"class": optimizer.kind, "groups": groups, "scalars": encode_inline(scalars)}, shards


V = TypeVar("V")


def all_bare(tensors: Mapping[str, V], prefixes: tuple[str, ...] = ()) -> dict[str, V]:
    """Return tensors by their bare names; a prefix is taken off where all names have it.

    Raises:
        CheckpointError: two names become one.
    """
    inner = {without_wrappers(name): tensor for name, tensor in tensors.items()}
    for prefix in prefixes:
        if inner and all(name.startswith(prefix) for name in inner):
            inner = {name.removeprefix(prefix): tensor for name, tensor in inner.items()}
    if len(inner) != len(tensors):
        raise CheckpointError("two tensors of the foreign checkpoint have one name once wrappers are taken out of it.")
    return inner


def renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return an optimizer's state with other names for the parameters that it keeps by name.

    Raises:
        CheckpointError: it is not a state of torch's.
    """
    if not {"param_groups", "state"} <= state.keys():
        raise CheckpointError(
            f"an optimizer's state holds {first_of([str(key) for key in state])}, and no state of torch's."
        )

    def new_name(key: Any) -> Any:
        return rename(key) if isinstance(key, str) else key

    groups = [{**group, "params": [new_name(key) for key in group["params"]]} for group in state["param_groups"]]
    return {"param_groups": groups, "state": {new_name(key): slots for key, slots in state["state"].items()}}


def prefix_in(module: nn.Module | None, names: Mapping[str, object], given: str) -> str:
    """Return the prefix of all ``names`` in ``module``: ``given``, nothing, or the name of an attribute and a dot.

    A model that was trained alone is often an attribute of the module it is trained as here, such as ``net``.
    """
    if given or module is None:
        return given
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)} | {
        name for name, _ in module.named_buffers(remove_duplicate=False)
    }
    if all(name in own for name in names):
        return ""
    candidates = [f"{child}." for child, _ in module.named_children()]
    fitting = [prefix for prefix in candidates if all(prefix + name in own for name in names)]
    return fitting[0] if len(fitting) == 1 else ""
