"""A module's part of a checkpoint, under canonical names: saving, comparing, loading.

State other than parameters and buffers is that of torch's ``get_extra_state`` and ``set_extra_state``, which fp8 layers
and quantization use. It may be any value that a checkpoint can hold, is stored by the module's canonical name on rank
0, and is restored after the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.codec import decode
from ..checkpoint.reader import Checkpoint, SavedTensor, StoredTensors
from ..checkpoint.write_plan import Shard
from ..parallel.parameter_names import canonical_names, canonical_table, renamed
from ..parallel.strategy import Strategy
from .state_matching import ModelMatch, SavedModel, match_model, refuse

Shapes = Mapping[str, tuple[int, ...]]

LENIENT = "Load with strict=False to load only matching tensors."


def shapes_of(strategy: Strategy, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor in a module's state, by canonical name."""
    canonical = canonical_names(module)
    return {canonical(name): tuple(shape) for name, shape in strategy.state.shapes(module).items()}


def model_state(strategy: Strategy, module: nn.Module) -> dict[str, Shard]:
    """Return this rank's part of a module's state, by canonical name. Collective."""
    canonical = canonical_names(module)
    return {canonical(name): shard for name, shard in strategy.state.model_state(module).items()}


def put_model(strategy: Strategy, module: nn.Module, tensors: StoredTensors) -> None:
    """Load tensors by canonical name into a module; other tensors are unchanged. Collective."""
    own = canonical_table(module)
    strategy.state.load_model_state(module, {own[name]: stored for name, stored in tensors.items()})


def stored_of(checkpoint: Checkpoint, match: ModelMatch) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint that match a module, by the module's canonical names.

    Tensors that the checkpoint leaves out are not among them: see ``frozen_base.check_base``.
    """
    left_out = checkpoint.left_out
    return {
        name: SavedTensor(checkpoint, "model", saved) for name, saved in match.tensors.items() if saved not in left_out
    }


def check_model(
    module: nn.Module,
    own: Shapes,
    checkpoint: Checkpoint,
    strict: bool,
    renames: Mapping[str, str] | None = None,
    advice: str = LENIENT,
) -> ModelMatch:
    """Compare names and shapes of a module, ``own``, with a checkpoint's; return the match.

    Raises:
        CheckpointError: they differ and ``strict`` is set; the message lists the names with both shapes.
    """
    match = match_model(module, own, SavedModel.of(checkpoint, renames or {}))
    if strict:
        refuse(Path(checkpoint.path), type(module).__name__, match.problems, advice)
    return match


def buffer_locations(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Map each buffer's canonical name to its location: the table of its module, and the key in the table."""
    canonical = canonical_names(module)
    return {
        canonical(f"{prefix}.{key}" if prefix else key): (part._buffers, key)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for key, buffer in part._buffers.items()
        if buffer is not None
    }


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return the extra state of a module and its submodules, by canonical name."""
    return {name: part.get_extra_state() for name, part in _keepers(module).items()}


def put_extra_state(module: nn.Module, saved: Mapping[str, Any], renames: Mapping[str, str] | None = None) -> list[str]:
    """Restore extra state; return messages about entries that only one side has. ``renames``: see ``renamed``."""
    keepers, theirs = _keepers(module), renamed(saved, renames or {})
    for name, part in keepers.items():
        if name in theirs:
            part.set_extra_state(saved[theirs[name]])
    return [
        *(f"extra state of {name or 'the module'} is not in the checkpoint" for name in keepers if name not in theirs),
        *(f"extra state of {name or 'the module'} is not in the module" for name in theirs if name not in keepers),
    ]


def saved_extra_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the extra state that a Trainer's checkpoint holds."""
    state = state_of(checkpoint)
    extra: dict[str, Any] = decode(state["extra"], StateTensors(checkpoint)) if state.get("extra") else {}
    return extra


def state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the part of a checkpoint's document that belongs to its section ``state``, still encoded."""
    state = checkpoint.document.get("state") if isinstance(checkpoint.document, dict) else None
    return state if isinstance(state, dict) else {}


class StateTensors(Mapping[str, Tensor]):
    """The tensors of the section ``state``, each read on demand."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, key: str) -> Tensor:
        return self._checkpoint.read("state", key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names("state"))

    def __len__(self) -> int:
        return len(self._checkpoint.names("state"))


def _keepers(module: nn.Module) -> dict[str, nn.Module]:
    keepers = {
        name: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
    if not keepers:
        return {}
    canonical = canonical_names(module)
    return {canonical(name): part for name, part in keepers.items()}
